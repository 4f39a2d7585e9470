"""What deltas save on versions that training really makes: `python -m tests.bench.delta [--json] [--params 50e6]`.

Knows: the demo's learning loop, a larger transformer that learns sums, a stopwatch. Must not know: how deltas work.
Per step: the version before is the base. Figures are medians over the steps, on one thread. GB/s are of the version's
bytes, not the delta's, per second of processor time: others may be at work. `wins below`: the bandwidth at which encode
+ delta/bandwidth + apply takes as long as full/bandwidth; hashing is left out, for both need it.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from consumers.reef_engine.torch_backend import TorchEngine
from consumers.reef_trainer.torch_backend import TorchTrainer
from reef_bus import tokens
from reef_bus.backends import Piece, Pieces, Prompt, Sample
from reef_bus.delta import apply, encode
from reef_bus.delta.buckets import zstd
from reef_bus.manifest import ITEM_BYTES, describe
from reef_bus.policy import PolicyConfig, new_policy, pieces

SUMS = "0123456789+=;"
ROWS, LENGTH = 16, 32  # of a batch of sums: small, so that a step takes seconds on one core
WARM_RATE, RAMP = 3e-4, 10


class Version(NamedTuple):
    """What a step made, and the loss or reward that says whether anything is learnt."""

    weights: Pieces
    score: float


# (a) The demo's policy: fp32, GRPO on the task `digit`.


def demo(steps: int) -> Iterator[Version]:
    trainer, engine, chance = TorchTrainer(), TorchEngine(), random.Random(0)
    engine.start()
    state = trainer.initial()
    yield Version(trainer.weights(state), 0.0)
    for step in range(steps):
        for name, piece in trainer.weights(state).items():
            engine.live()[name].data[:] = piece.data
        batch = [sample for group in range(16) for sample in answers(engine, group, chance.randrange(10), step)]
        state, metrics = trainer.train(state, batch, step)
        yield Version(trainer.weights(state), metrics["reward_mean"])


def answers(engine: TorchEngine, group: int, digit: int, step: int) -> Iterator[Sample]:
    ids = tokens.render([{"role": "user", "content": str(digit)}])
    asked = [Prompt(ids=ids, max_tokens=4, seed=step * 1000 + group * 16 + copy) for copy in range(16)]
    for number, answer in enumerate(engine.generate(asked)):
        reward = answer.ids.count(digit) / 4
        yield Sample(
            record=f"{group}.{number}",
            group=str(group),
            prompt=ids,
            completion=answer.ids,
            logprobs=answer.logprobs,
            load_id="w",
            reward=reward,
        )


# (b) A transformer that learns sums: fp32 master weights, Adam, served as bf16.


class Learner:
    """Next-token prediction on strings such as `7+35=42;`, drawn anew for every step. The moments survive a change of
    the rate."""

    def __init__(self, params: float) -> None:
        self.policy, self.chance = new_policy(shape(params), 0), random.Random(0)
        self.adam = torch.optim.Adam(self.policy.parameters(), betas=(0.9, 0.95), fused=True)

    def step(self, rate: float) -> float:
        ids = torch.tensor([[SUMS.index(character) for character in line(self.chance)] for _ in range(ROWS)])
        loss = F.cross_entropy(self.policy(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        self.adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        self.adam.param_groups[0]["lr"] = rate
        self.adam.step()
        return loss.item()

    def served(self) -> Pieces:
        return pieces({name: master.detach().to(torch.bfloat16) for name, master in self.policy.named_parameters()})

    def state(self) -> Any:
        return copy.deepcopy((self.policy.state_dict(), self.adam.state_dict(), self.chance.getstate()))

    def restore(self, state: Any) -> None:
        weights, moments, chance = copy.deepcopy(state)
        self.policy.load_state_dict(weights)
        self.adam.load_state_dict(moments)
        self.chance.setstate(chance)


def shape(params: float) -> PolicyConfig:
    """The least number of layers that has so many parameters."""
    sizes = {"hidden": 768, "heads": 12, "kv_heads": 4, "ffn": 2048, "max_len": LENGTH, "init_std": 0.02}
    layer = 768 * (768 * 2 + 256 * 2 + 2048 * 3 + 2)
    return PolicyConfig(**sizes, layers=max(1, math.ceil(params / layer)))  # type: ignore[arg-type]


def line(chance: random.Random) -> str:
    text = ""
    while len(text) < LENGTH:
        a, b = chance.randrange(100), chance.randrange(100)
        text += f"{a}+{b}={a + b};"
    return text[:LENGTH]


def warmed(params: float, steps: int) -> Learner:
    """Away from its first weights, and with moments that real gradients made, before anything is measured."""
    learner = Learner(params)
    for step in range(steps):
        loss = learner.step(WARM_RATE * min(1.0, (step + 1) / RAMP))
        print(f"warming {step + 1}/{steps}: loss {loss:.3f}", file=sys.stderr, flush=True)
    return learner


def sums(learner: Learner, steps: int, rate: float) -> Iterator[Version]:
    yield Version(learner.served(), math.nan)
    for _ in range(steps):
        loss = learner.step(rate)
        yield Version(learner.served(), loss)


# The stopwatch.


def measure(versions: Iterator[Version]) -> dict[str, Any]:
    base = next(versions).weights
    staging = {name: piece._replace(data=memoryview(bytearray(piece.data.nbytes))) for name, piece in base.items()}
    steps, scores = list[dict[str, float]](), list[float]()
    for version in versions:
        steps.append(step_of(base, version.weights, staging))
        scores.append(version.score)
        base = version.weights
        print(f"step {len(steps)}: {steps[-1]['changed']:.2%} changed", file=sys.stderr, flush=True)
    shares = [step["changed"] for step in steps]
    return {
        "bytes": sum(piece.data.nbytes for piece in base.values()),
        "values": sum(piece.data.nbytes // ITEM_BYTES[piece.dtype] for piece in base.values()),
        "dtype": next(iter(base.values())).dtype,
        "steps": len(steps),
        "score": [scores[0], scores[-1]],
        "changed_range": [min(shares), max(shares)],
        **{name: statistics.median(step[name] for step in steps) for name in steps[0]},
    }


def step_of(base: Pieces, new: Pieces, staging: dict[str, Piece]) -> dict[str, float]:
    held, target = describe(base), describe(new)
    encoding, parts = timed(lambda: list(encode(base, held, new, target)))
    delta = b"".join(parts)
    applying, _ = timed(lambda: list(apply(delta, base, held, staging, target)))
    assert describe(staging) == target
    full = target.total
    packed = len(zstd.compress(b"".join(piece.data for piece in new.values()), 1))
    return {
        "changed": changed(base, new),
        "of_full": len(delta) / full,
        "of_zstd": len(delta) / packed,
        "encode_gb_s": full / encoding / 1e9,
        "apply_gb_s": full / applying / 1e9,
        "wins_below_gb_s": (full - len(delta)) / (encoding + applying) / 1e9,
    }


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    began = time.thread_time()
    result = work()
    return time.thread_time() - began, result


def changed(base: Pieces, new: Pieces) -> float:
    """The share of values whose bits differ."""
    pairs = [(bits(base[name]), bits(new[name])) for name in base]
    return sum(int((a != b).sum()) for a, b in pairs) / sum(a.numel() for a, _ in pairs)


def bits(piece: Piece) -> Tensor:
    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[ITEM_BYTES[piece.dtype]]
    return torch.frombuffer(bytearray(piece.data), dtype=dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description="what deltas save on versions that training really makes")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--params", type=float, default=50e6, help="of the transformer, at least")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm", type=int, default=20, help="steps before the first that is measured")
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-6, 1e-5], help="each from the same state")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = {"demo, fp32, lr 0.003": measure(demo(args.steps))}
    learner = warmed(args.params, args.warm)
    start = learner.state()
    for rate in args.lr:
        learner.restore(start)
        found[f"sums, bf16, lr {rate:g}"] = measure(sums(learner, args.steps, rate))
    report(found, args.json)


def report(found: dict[str, dict[str, Any]], as_json: bool) -> None:
    load = [round(each, 2) for each in os.getloadavg()]
    if as_json:
        print(json.dumps({"load": load, "cores": os.cpu_count(), "runs": found}))
        return
    print(f"load {load} on {os.cpu_count()} cores; medians")
    print("| versions | values | changed | delta / full | delta / zstd of full | encode | apply | wins below |")
    print("|---|---|---|---|---|---|---|---|")
    for name, row in found.items():
        low, high = row["changed_range"]
        print(
            f"| {name} | {row['values']:,} | {row['changed']:.2%} ({low:.2%} to {high:.2%}) | {row['of_full']:.2%} "
            f"| {row['of_zstd']:.2%} | {row['encode_gb_s']:.2f} GB/s | {row['apply_gb_s']:.2f} GB/s "
            f"| {row['wins_below_gb_s']:.2f} GB/s |"
        )


if __name__ == "__main__":
    main()
