"""A trainer in this process: GRPO advantages, the PPO-clip objective and Adam, on one CPU thread.

Knows: the policy, rewarded samples, and optimizer state as tensors that never change once they are made.
Must not know: the engines, the log, who rewarded a sample, or what a token means.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from reef_bus.backends import Pieces, Sample, TrainingBackend
from reef_bus.errors import ContractError
from reef_bus.policy import Policy, PolicyConfig, fill, new_policy, pieces
from reef_bus.samples import MAX_SCORE

ADAM_EPS = 1e-8
STD_EPS = 1e-4  # a group of equal rewards has advantage zero instead of 0/0

Tensors = Mapping[str, Tensor]


class Hyper(msgspec.Struct, frozen=True, kw_only=True):
    """What steers the updates. `seed` makes the base model; the order of a batch has its own seed in `train`."""

    lr: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 0.2
    minibatches: int = 2
    warmup_versions: int = 3
    grad_clip: float = 1.0
    seed: int = 0


class State(NamedTuple):
    """One version: weights, Adam's two moments, optimizer steps and versions so far. Nobody writes to its tensors."""

    weights: Tensors
    first: Tensors
    second: Tensors
    steps: int
    versions: int


class Packed(NamedTuple):
    """Samples padded on the right to one length L. Entry t of the last three speaks of token t + 1."""

    ids: Tensor  # int64 [N, L]
    mask: Tensor  # float32 [N, L-1], 1 where a completion's token is predicted
    behaviour: Tensor  # float32 [N, L-1], its logprob when it was sampled
    advantage: Tensor  # float32 [N, 1]

    def rows(self, index: Tensor) -> Packed:
        return Packed(self.ids[index], self.mask[index], self.behaviour[index], self.advantage[index])


class TorchTrainer(TrainingBackend):
    """The same state, batch and seed give the same bytes. Logprobs in a batch must be those of temperature 1."""

    def __init__(self, config: PolicyConfig | None = None, hyper: Hyper | None = None) -> None:
        self.config, self.hyper = config or PolicyConfig(), hyper or Hyper()

    def initial(self) -> State:
        return fresh(_frozen(new_policy(self.config, self.hyper.seed)))

    def load(self, weights: Path, optimizer: Path | None) -> State:
        state = fresh(read_tensors(weights, self.shapes(), torch.float32))
        return state if optimizer is None else _resume(state, optimizer)

    def shapes(self) -> Mapping[str, torch.Size]:
        """Of all that a state's weights are, in their order."""
        return policy_shapes(self.config)

    def filled(self, weights: Tensors) -> tuple[Policy, Mapping[str, nn.Parameter]]:
        """A policy that computes with `weights`, and those of its parameters that are to be trained, by their names."""
        policy = fill(Policy(self.config), weights)
        return policy, dict(policy.named_parameters())

    def train(self, state: State, batch: Sequence[Sample], seed: int) -> tuple[State, dict[str, float]]:
        """One pass over the batch in `minibatches` Adam steps. Raises ContractError on anything not finite."""
        began = time.perf_counter()
        torch.set_num_threads(1)  # the setting belongs to a thread, and the caller's may be a new one
        rate = self.hyper.lr * min(1.0, (state.versions + 1) / max(1, self.hyper.warmup_versions))
        packed, steps = pack(batch, self.config), []
        trained = state._replace(versions=state.versions + 1)
        for part in _minibatches(packed, self.hyper.minibatches, seed):
            gradients, figures = _gradients(*self.filled(trained.weights), part, self.hyper)
            trained = adam(trained, gradients, rate, self.hyper)
            steps.append(figures)
        _demand_finite(trained.weights, "weights after the update")
        metrics = {name: math.fsum(step[name] for step in steps) / len(steps) for name in steps[0]}
        return trained, {**_rewards(batch), **metrics, "lr": rate, "seconds": time.perf_counter() - began}

    def weights(self, state: State) -> Pieces:
        return pieces(state.weights)

    def optimizer(self, state: State) -> bytes:
        """Safetensors: both moments and the two counters. No metadata: several keys there have no fixed order."""
        counters = {"steps": torch.tensor(state.steps), "versions": torch.tensor(state.versions)}
        moments = {f"first.{name}": tensor for name, tensor in state.first.items()}
        moments.update({f"second.{name}": tensor for name, tensor in state.second.items()})
        return bytes(save({**counters, **moments}))


# The batch.


def pack(batch: Sequence[Sample], config: PolicyConfig) -> Packed:
    """Raises ContractError naming the first sample that cannot be trained on."""
    if not batch:
        raise ContractError("found an empty batch; expected at least one sample")
    for sample in batch:
        _check(sample, config)
    width = max(len(sample.prompt) + len(sample.completion) for sample in batch)
    return Packed(
        ids=_padded(batch, lambda sample: (*sample.prompt, *sample.completion), width, 0),
        mask=_padded(batch, lambda sample: (*_before(sample), *(1.0 for _ in sample.completion)), width - 1, 0.0),
        behaviour=_padded(batch, lambda sample: (*_before(sample), *sample.logprobs), width - 1, 0.0),
        advantage=torch.tensor(advantages(batch), dtype=torch.float32).unsqueeze(1),
    )


def advantages(batch: Sequence[Sample]) -> list[float]:
    """(reward - mean) / population std within each sample's group (GRPO, Shao et al. 2024); one alone gets zero."""
    groups: dict[str, list[float]] = {}
    for sample in batch:
        groups.setdefault(sample.group, []).append(sample.reward)
    moments = {group: _moments(rewards) for group, rewards in groups.items()}
    centred = ((sample.reward - moments[sample.group][0], moments[sample.group][1]) for sample in batch)
    return [difference / (std + STD_EPS) for difference, std in centred]


def _moments(values: Sequence[float]) -> tuple[float, float]:
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))


def _rewards(batch: Sequence[Sample]) -> dict[str, float]:
    mean, std = _moments([sample.reward for sample in batch])
    return {"reward_mean": mean, "reward_std": std}


def _before(sample: Sample) -> tuple[float, ...]:
    return (0.0,) * (len(sample.prompt) - 1)


def _padded(batch: Sequence[Sample], row: Callable[[Sample], tuple[float, ...]], width: int, pad: float) -> Tensor:
    rows = [row(sample) for sample in batch]
    return torch.tensor([[*values, *[pad] * (width - len(values))] for values in rows])


def _check(sample: Sample, config: PolicyConfig) -> None:
    tokens = (*sample.prompt, *sample.completion)
    if not sample.prompt or not sample.completion or len(tokens) > config.max_len:
        found = f"{len(sample.prompt)} prompt and {len(sample.completion)} completion tokens"
        raise ContractError(f"record {sample.record}: found {found}; expected 1 to {config.max_len} in all, none empty")
    if not all(0 <= token < config.vocab for token in tokens):
        raise ContractError(f"record {sample.record}: found token ids {tokens}; expected 0 to {config.vocab - 1}")
    if len(sample.logprobs) != len(sample.completion):
        found = f"{len(sample.logprobs)} logprobs for {len(sample.completion)} tokens"
        raise ContractError(f"record {sample.record}: found {found}; expected one each")
    if not all(math.isfinite(value) for value in (sample.reward, *sample.logprobs)):
        raise ContractError(f"record {sample.record}: its reward or a logprob is not finite")
    if abs(sample.reward) > MAX_SCORE:
        raise ContractError(
            f"record {sample.record}: found a reward of {sample.reward}; expected {MAX_SCORE:g} at most"
        )


def _minibatches(packed: Packed, count: int, seed: int) -> Iterator[Packed]:
    """The batch in a seeded order, in `count` parts whose sizes differ by one at most."""
    total = packed.ids.shape[0]
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed % 2**64))
    for index in order.tensor_split(min(count, total)):
        yield packed.rows(index)


# The update.


def _gradients(
    policy: Policy, named: Mapping[str, nn.Parameter], part: Packed, hyper: Hyper
) -> tuple[Tensors, dict[str, float]]:
    """Gradients clipped to a global norm, and what the step looked like before it was taken."""
    loss, figures = objective(policy, part, hyper.clip)
    gradients = dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))
    norm = torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt()
    _demand_finite({"loss": loss, "gradient norm": norm}, "the update")
    scale = (hyper.grad_clip / (norm + 1e-6)).clamp(max=1.0)
    clipped = {name: gradient * scale for name, gradient in gradients.items()}
    return clipped, {name: float(value) for name, value in {**figures, "grad_norm": norm}.items()}


def objective(policy: Policy, part: Packed, clip: float) -> tuple[Tensor, Tensors]:
    """PPO's clipped surrogate (Schulman et al. 2017) against the recorded logprobs, averaged over completion tokens."""
    table = F.log_softmax(policy(part.ids[:, :-1]), -1)
    chosen = table.gather(2, part.ids[:, 1:].unsqueeze(2)).squeeze(2)
    log_ratio = chosen - part.behaviour
    ratio = log_ratio.exp()
    gain = torch.minimum(ratio * part.advantage, ratio.clamp(1 - clip, 1 + clip) * part.advantage)
    loss = -_mean(gain, part.mask)
    return loss, {name: value.detach() for name, value in _figures(table, log_ratio, part, clip, loss).items()}


def _figures(table: Tensor, log_ratio: Tensor, part: Packed, clip: float, loss: Tensor) -> Tensors:
    ratio = log_ratio.exp()
    return {
        "loss": loss,
        "clip_fraction": _mean(((ratio - 1).abs() > clip).float(), part.mask),
        "approx_kl": _mean(ratio - 1 - log_ratio, part.mask),  # never negative; joschu.net/blog/kl-approx.html, "k3"
        "entropy": _mean(-(table.exp() * table).sum(-1), part.mask),
    }


def _mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / mask.sum()


def adam(state: State, gradients: Tensors, rate: float, hyper: Hyper) -> State:
    """One step of Adam (Kingma and Ba 2015, algorithm 1) into new tensors.

    Not torch.optim: its first step imports the compiler, which took 2.2 CPU seconds here, and it writes in place.
    """
    step, (beta1, beta2) = state.steps + 1, hyper.betas
    first = {name: beta1 * state.first[name] + (1 - beta1) * g for name, g in gradients.items()}
    second = {name: beta2 * state.second[name] + (1 - beta2) * g * g for name, g in gradients.items()}
    spread = math.sqrt(1 - beta2**step)
    weights = {
        name: tensor - rate / (1 - beta1**step) * first[name] / (second[name].sqrt() / spread + ADAM_EPS)
        for name, tensor in state.weights.items()
    }
    return State(weights, first, second, step, state.versions)


# States, and how they are read back.


def policy_shapes(config: PolicyConfig) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in Policy(config).named_parameters()}


def _frozen(policy: Policy) -> Tensors:
    return {name: parameter.detach() for name, parameter in policy.named_parameters()}


def fresh(weights: Tensors) -> State:
    first, second = ({name: torch.zeros_like(tensor) for name, tensor in weights.items()} for _ in range(2))
    return State(weights, first, second, 0, 0)


def _resume(fresh: State, path: Path) -> State:
    shapes = {name: tensor.shape for name, tensor in fresh.weights.items()}
    expected = {f"{moment}.{name}": shape for moment in ("first", "second") for name, shape in shapes.items()}
    tensors = read_tensors(path, {**expected, "steps": torch.Size(), "versions": torch.Size()}, None)
    first, second = ({name: tensors[f"{moment}.{name}"] for name in shapes} for moment in ("first", "second"))
    return State(fresh.weights, first, second, int(tensors["steps"]), int(tensors["versions"]))


def read_tensors(path: Path, expected: Mapping[str, torch.Size], dtype: torch.dtype | None) -> Tensors:
    """Exactly the tensors of `expected`, copied out of the file so that no later change to it reaches the state."""
    try:
        found = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ContractError(f"{path}: not a readable safetensors file ({error}); fetch the artifact again") from error
    wrong = [name for name in expected.keys() | found.keys() if not _fits(found.get(name), expected.get(name))]
    if wrong:
        raise ContractError(f"{path}: tensors missing, unknown or of another shape: {sorted(wrong)[:4]}")
    if dtype is not None and any(tensor.dtype != dtype for tensor in found.values()):
        raise ContractError(f"{path}: found {sorted({str(t.dtype) for t in found.values()})}; expected only {dtype}")
    _demand_finite(found, str(path))
    return {name: found[name].clone() for name in expected}


def _fits(tensor: Tensor | None, shape: torch.Size | None) -> bool:
    return tensor is not None and tensor.shape == shape


def _demand_finite(tensors: Tensors, where: str) -> None:
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise ContractError(f"{where}: {name} is not finite; nothing was kept")
