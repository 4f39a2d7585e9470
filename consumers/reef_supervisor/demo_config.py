"""What the demo's arguments ask for, as a configuration.

Knows: arguments, defaults of a demonstration. Must not know: what is done with them.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

import msgspec

from consumers.reef_supervisor.commands import RELEASES, TARGET, TARGET_LORA
from consumers.reef_supervisor.deployment import CONFIG_FILE
from consumers.reef_supervisor.harness import GROUP_SIZE, TASKS
from reef_bus.config import Adapters, Config, Inference, Nats, Publication, Training, load
from reef_bus.core.effects import Deadlines, Restarts
from reef_bus.core.ids import BASE
from reef_bus.errors import Rejected
from reef_bus.events import CATALOGUE

MODEL = "model"  # a folder in the state folder
PEFT = "`make demo-lora` installs it beside, or pip install 'reef-bus[lora]'"
SGLANG = "`make demo-sglang` installs it beside, for the CPU; docs/sglang.md says how it is done with a GPU"


def check(args: argparse.Namespace) -> None:
    roles = [*Config(publication=Publication(publishers=1)).components(), "nats"]
    for order in args.kill:
        component, _, event = order.partition("@")
        if component not in roles:
            raise Rejected(f"--kill {order}: role {component!r} is not one of {', '.join(roles)}")
        if event not in CATALOGUE:
            raise Rejected(f"--kill {order}: event {event!r} is not one of {', '.join(CATALOGUE)}")
    if args.flip and not (args.flip.partition("@")[0] in roles and args.flip.partition("@")[2].isdigit()):
        raise Rejected(f"--flip {args.flip}: expected ENGINE@N, such as engine-1@3")
    if args.lora and args.mode:
        raise Rejected(f"--mode {args.mode}: an adapter is always loaded beside what is served; leave --mode out")
    if args.keep and args.resume:
        raise Rejected("--keep is for a new state folder, --resume for one that was kept; give one of them")
    if args.target is None and args.releases is None:
        args.target = TARGET_LORA if args.lora else TARGET
    if args.releases is None:
        args.releases = 1 if args.resume else RELEASES
    if args.lora and importlib.util.find_spec("peft") is None:
        raise Rejected(f"--lora: PEFT, which trains adapters, is not installed here; {PEFT}")
    if args.engine == "sglang" and importlib.util.find_spec("sglang") is None:
        raise Rejected(f"--engine sglang: SGLang is not installed here; {SGLANG}")


def configured(args: argparse.Namespace, temporary: str | None) -> Config:
    if args.resume:
        path = Path(args.resume, "run", CONFIG_FILE)
        if not path.exists():
            raise Rejected(
                f"--resume {args.resume}: no deployment there; `reef-bus demo --keep {args.resume}` makes one"
            )
        model = Path(args.resume, MODEL).resolve()  # it may have been moved, with all that is in it
        config = load(path, [f"inference.model-path={model}"] if model.exists() else [])
        if args.engine and args.engine != config.inference.backend:
            raise Rejected(f"--engine {args.engine}: {args.resume} was made with {config.inference.backend}")
        gateway = msgspec.structs.replace(config.gateway, port=0)  # another process may have the old one by now
        publication = msgspec.structs.replace(config.publication, mode=args.mode or config.publication.mode)
        return msgspec.structs.replace(
            config,
            nats=Nats(),
            gateway=gateway,
            publication=publication,
            state_dir=args.resume,
        )
    folder = temporary or args.keep
    if Path(folder, "run", CONFIG_FILE).exists():
        raise Rejected(
            f"--keep {folder}: it holds a deployment already; `reef-bus demo --resume {folder}` goes on from it"
        )
    return Config(
        deployment="demo",
        scenario=BASE if args.lora else Config().scenario,
        state_dir=folder,
        inference=_inference(args.engine or "torch", folder, args.lora),
        adapters=Adapters(scenarios=tuple(TASKS), alpha=32) if args.lora else Adapters(),
        training=Training(seed=args.seed, group_size=GROUP_SIZE),
        publication=Publication(
            publishers=1,
            mode=args.mode or "fenced",
            deadlines=Deadlines(fence_s=10.0, sender_s=20.0, stall_s=5.0, verify_s=10.0, heartbeat_s=6.0),
        ),
        supervision=Restarts(max_restarts=max(3, len(args.kill)), window_s=300.0, delay_s=0.2),
    )


def _inference(backend: str, folder: str, lora: bool) -> Inference:
    """A server is given the tiny Qwen3 as a model folder, from which the trainer learns its shape as well. A base model
    that is frozen is wider, and drawn wider: an adapter changes nothing of what its answers are read from."""
    if backend == "torch" and not lora:
        return Inference()
    from reef_bus.model_folder import write_model_folder
    from reef_bus.policy import PolicyConfig

    model, shape = Path(folder, MODEL).resolve(), PolicyConfig(qk_norm=True)
    write_model_folder(model, msgspec.structs.replace(shape, hidden=256, ffn=512, init_std=0.1) if lora else shape)
    return Inference(backend=backend, model_path=str(model), dtype="float32")
