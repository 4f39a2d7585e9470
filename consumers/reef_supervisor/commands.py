"""`reef-bus demo` and `reef-bus up`: their arguments, read before anything heavy is imported, so that `--help` is fast.

Knows: arguments. Must not know: what is done with them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

TARGET, TARGET_LORA, RELEASES = 0.9, 0.7, 12


def demo(argv: Sequence[str]) -> int:
    """The command `demo`; returns its exit status."""
    args = _demo().parse_args(argv)
    from consumers.reef_supervisor.demo import run

    return run(args)


def up(argv: Sequence[str]) -> int:
    """The command `up`; returns its exit status."""
    args = _up().parse_args(argv)
    from consumers.reef_supervisor.up import run

    return run(args)


def _demo() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="reef-bus demo", description="A policy that learns while it serves, every version through the log."
    )
    parser.add_argument(
        "--releases",
        type=int,
        metavar="N",
        help=f"stop after N releases, whatever the reward ({RELEASES} and the target)",
    )
    parser.add_argument(
        "--target",
        type=float,
        metavar="R",
        help=f"mean reward to reach ({TARGET}, with --lora {TARGET_LORA} each; unless --releases is given)",
    )
    parser.add_argument("--keep", metavar="DIR", help="keep the state folder there; it must not hold a deployment yet")
    parser.add_argument("--resume", metavar="DIR", help="go on from a kept state folder")
    parser.add_argument(
        "--kill",
        metavar="ROLE@EVENT",
        action="append",
        default=[],
        help="SIGKILL a role when the event appears; repeatable",
    )
    parser.add_argument(
        "--flip", metavar="ENGINE@N", help="flip one bit of that engine's weights after it received release N"
    )
    parser.add_argument(
        "--engine",
        choices=("torch", "sglang"),
        help="what the engines are: a sampler in torch, or a real SGLang server each, which must be installed (torch)",
    )
    parser.add_argument(
        "--lora",
        action="store_true",
        help="two scenarios with another task each, whose LoRA adapters take turns over one frozen base model",
    )
    parser.add_argument(
        "--mode", choices=("fenced", "staged"), help="engines stop for the transfer (fenced), or only to swap (staged)"
    )
    parser.add_argument(
        "--timeout", type=float, metavar="S", help="give up after S seconds (240; with SGLang servers 900)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the base model and of the order of batches (0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line of stdout")
    return parser


def _up() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="reef-bus up", description="Run a deployment until Ctrl-C.")
    parser.add_argument("-c", "--config", metavar="FILE", help="YAML or JSON; without it, the defaults")
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="override a key, dotted")
    parser.add_argument("--example", action="store_true", help="print a configuration with every default, and end")
    parser.add_argument("--json", action="store_true", help="one JSON object per event instead of a line")
    return parser
