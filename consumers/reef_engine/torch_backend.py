"""An inference engine in this process: the demo's policy, sampled on one CPU thread.

Knows: the policy, its sampler, and prompts as token ids.
Must not know: the trainer, the log, or which version it holds.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from consumers.reef_engine.torch_adapters import Adapters
from reef_bus.backends import Completion, Generation, InferenceBackend, Pieces, Prompt, Proof, Stop, never
from reef_bus.core.memory import WEIGHTS
from reef_bus.core.publication import PAUSES
from reef_bus.errors import ContractError, Rejected, TransferError
from reef_bus.events import Lora
from reef_bus.policy import Policy, PolicyConfig, Sampling, pieces

_LIBC = ctypes.CDLL(None)


class Group(NamedTuple):
    """Prompts of a batch that one forward pass can serve together: their places in it, and how far they have come."""

    places: list[int]
    prompts: list[Prompt]
    sampling: Sampling

    @property
    def adapter(self) -> str:
        """For which they all ask."""
        return self.prompts[0].adapter


class TorchEngine(InferenceBackend):
    """The copies are two whole modules, and a batch's KV cache lives and dies with its batch: so a swap leaves nothing
    of the old weights behind, but in a batch that was stopped and is to go on. Nothing bounds how many adapters there
    are but memory. Weights, theirs included, are all the memory that it keeps between two batches."""

    releases = (WEIGHTS,)
    stages = True
    pauses = PAUSES
    adapters = None

    def __init__(self, config: PolicyConfig | None = None, seed: int | None = None) -> None:
        """`seed` fixes the draws of prompts that bring none; without it they differ from run to run."""
        self.config = config or PolicyConfig()
        self._policy: Policy | None = None
        self._live: Pieces = {}
        self._beside: Policy | None = None
        self._staged: Pieces = {}
        self._adapters = Adapters()
        self._generator = torch.Generator()
        self._generator.manual_seed(self._generator.seed() if seed is None else seed)

    def start(self) -> None:
        torch.set_num_threads(1)
        self._allocate()

    def _allocate(self) -> None:
        self._policy = Policy(self.config).requires_grad_(False)
        self._live = _views(self._policy)

    def live(self) -> Pieces:
        self._started()
        return self._live

    def generate(self, prompts: Sequence[Prompt]) -> list[Completion]:
        """Raises Rejected for a prompt that cannot be answered, or asks for an adapter that is not there; ContractError
        for weights that are not finite."""
        return self.generate_until(prompts, never).completions

    def generate_until(self, prompts: Sequence[Prompt], stop: Stop, kept: Any = None) -> Generation:
        """Raises as `generate`. Group after group: at most one of those that are kept has a KV cache, also when `stop`
        is taken back as soon as one group has seen it."""
        self._started()
        torch.set_num_threads(1)  # the setting belongs to a thread, and the caller's may be a new one
        groups: list[Group] = self._begin(prompts) if kept is None else kept
        policies = {group.adapter: self._policy_of(group.adapter) for group in groups}  # all, before one is answered
        answers: dict[int, Completion] = {}
        going = True
        for group in groups:
            if going:
                group.sampling.go_on(policies[group.adapter], stop)
                going = group.sampling.done()
            answers.update(zip(group.places, _completions(group), strict=True))
        return Generation([answers[index] for index in range(len(prompts))], None if going else groups)

    def stage(self) -> Pieces:
        self._started()
        if self._beside is None:
            try:
                self._beside = Policy(self.config).requires_grad_(False)
            except (RuntimeError, MemoryError) as error:  # the first is what torch's allocator raises
                raise TransferError("memory", f"no room for a second copy: {error}") from error
            self._staged = _views(self._beside)
        return self._staged

    def swap(self) -> None:
        """The views are taken anew, from the parameters themselves, so that they say what the forward pass reads."""
        if self._beside is None:
            raise ContractError("nothing is staged; call stage() and fill it first")
        self._policy, self._beside = self._beside, self._started()
        self._live, self._staged = _views(self._policy), _views(self._beside)
        self._adapters.move(self._policy)

    def unstage(self) -> None:
        self._beside, self._staged = None, {}

    def load_adapter(self, name: str, tensors: Pieces, lora: Lora) -> None:
        self._adapters.load(self._started(), name, tensors, lora)

    def adapter_proof(self, name: str, manifest: str, lora: Lora) -> Proof:
        """Over the memory that the forward pass reads, where it lies, and by address that the rest of it is `live`."""
        return self._adapters.proof(self._started(), name, manifest, lora)

    def unload_adapter(self, name: str) -> str:
        self._adapters.unload(name)
        return ""

    def resident(self) -> frozenset[str]:
        return self._adapters.names()

    def release(self, regions: Sequence[str]) -> None:
        """Both copies: the parameters are freed with the last view of them. What was once part of its heap glibc keeps
        for later, megabytes too, until it is told not to."""
        self._started()
        self.close()
        if trim := getattr(_LIBC, "malloc_trim", None):
            trim(0)

    def resume(self, regions: Sequence[str]) -> None:
        self._allocate()

    def close(self) -> None:
        self._policy, self._live, self._adapters = None, {}, Adapters()
        self.unstage()

    def _started(self) -> Policy:
        if self._policy is None:
            raise ContractError("the engine has no memory; call start() first, or resume() what was released")
        return self._policy

    def _policy_of(self, adapter: str) -> Policy:
        return self._adapters.policy(adapter) if adapter else self._started()

    def _begin(self, prompts: Sequence[Prompt]) -> list[Group]:
        for prompt in prompts:
            _check(prompt, self.config)
        found = ((places, [prompts[index] for index in places]) for places in _groups(prompts))
        return [Group(places, alike, self._sampling(alike)) for places, alike in found]

    def _sampling(self, group: Sequence[Prompt]) -> Sampling:
        draws = torch.stack([self._draws(prompt) for prompt in group])
        ids = torch.tensor([prompt.ids for prompt in group])
        ends = [token for token in group[0].stop_ids if 0 <= token < self.config.vocab]  # of any others none is sampled
        return Sampling(ids, draws, group[0].temperature, ends)

    def _draws(self, prompt: Prompt) -> Tensor:
        """A seeded prompt draws from its own generator: whoever shares its batch does not shift its randomness."""
        generator = self._generator
        if prompt.seed is not None:
            generator = torch.Generator().manual_seed(prompt.seed % 2**64)
        return torch.rand(prompt.max_tokens, dtype=torch.float64, generator=generator)


def _views(policy: Policy) -> Pieces:
    return pieces(dict(policy.named_parameters()), writable=True)


def _completions(group: Group) -> list[Completion]:
    """A row that has ended goes on beside the others; what comes after its end is nobody's."""
    ids, logprobs = group.sampling.sampled()
    if not bool(torch.isfinite(logprobs).all()):
        raise ContractError("found logprobs that are not finite: the weights were never loaded whole")
    rows = zip(group.prompts, ids.tolist(), logprobs.tolist(), strict=True)
    return [_completion(prompt, row[: prompt.answered(row)], each) for prompt, row, each in rows]


def _completion(prompt: Prompt, ids: Sequence[int], logprobs: Sequence[float]) -> Completion:
    return Completion(ids=tuple(ids), logprobs=tuple(logprobs[: len(ids)]), finish_reason=prompt.reason(ids))


def _groups(prompts: Sequence[Prompt]) -> list[list[int]]:
    """Indices of prompts that one forward pass can serve together: same lengths, temperature, adapter, ends."""
    groups: dict[tuple[int, int, float, str, tuple[int, ...]], list[int]] = {}
    for index, prompt in enumerate(prompts):
        alike = len(prompt.ids), prompt.max_tokens, prompt.temperature, prompt.adapter, prompt.stop_ids
        groups.setdefault(alike, []).append(index)
    return list(groups.values())


def _check(prompt: Prompt, config: PolicyConfig) -> None:
    if not prompt.ids or not all(0 <= token < config.vocab for token in prompt.ids):
        raise Rejected(f"found prompt ids {prompt.ids}; expected at least one, each from 0 to {config.vocab - 1}")
    if not 1 <= prompt.max_tokens <= config.max_len - len(prompt.ids):
        room = config.max_len - len(prompt.ids)
        raise Rejected(f"found max_tokens {prompt.max_tokens}; after {len(prompt.ids)} prompt tokens 1 to {room} fit")
    if not (math.isfinite(prompt.temperature) and prompt.temperature >= 0):
        raise Rejected(f"found temperature {prompt.temperature}; expected 0 (greedy) or a positive number")
