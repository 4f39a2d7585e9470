"""An inference engine in this process: the demo's policy, sampled on one CPU thread.

Knows: the policy, its sampler, and prompts as token ids.
Must not know: the trainer, the log, or which version it holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from reef_bus.backends import Completion, InferenceBackend, Pieces, Prompt
from reef_bus.errors import ContractError, Rejected, TransferError
from reef_bus.policy import Policy, PolicyConfig, pieces, sample_with


class TorchEngine(InferenceBackend):
    """Answers have exactly `max_tokens` tokens: no id ends one, eos included, so finish_reason is always "length".

    The copies are two whole modules, and a batch's KV cache lives and dies with its batch: so a swap leaves nothing of
    the old weights behind."""

    stages = True

    def __init__(self, config: PolicyConfig | None = None, seed: int | None = None) -> None:
        """`seed` fixes the draws of prompts that bring none; without it they differ from run to run."""
        self.config = config or PolicyConfig()
        self._policy: Policy | None = None
        self._live: Pieces = {}
        self._beside: Policy | None = None
        self._staged: Pieces = {}
        self._generator = torch.Generator()
        self._generator.manual_seed(self._generator.seed() if seed is None else seed)

    def start(self) -> None:
        torch.set_num_threads(1)
        self._policy = Policy(self.config).requires_grad_(False)
        self._live = _views(self._policy)

    def live(self) -> Pieces:
        self._started()
        return self._live

    def generate(self, prompts: Sequence[Prompt]) -> list[Completion]:
        """Raises Rejected for a prompt that cannot be answered, ContractError for weights that are not finite."""
        policy = self._started()
        for prompt in prompts:
            _check(prompt, self.config)
        torch.set_num_threads(1)  # the setting belongs to a thread, and the caller's may be a new one
        answers: dict[int, Completion] = {}
        for group in _groups(prompts):
            found = self._answer(policy, [prompts[index] for index in group])
            answers.update(zip(group, found, strict=True))
        return [answers[index] for index in range(len(prompts))]

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

    def unstage(self) -> None:
        self._beside, self._staged = None, {}

    def close(self) -> None:
        self._policy, self._live = None, {}
        self.unstage()

    def _started(self) -> Policy:
        if self._policy is None:
            raise ContractError("the engine has no memory; call start() first")
        return self._policy

    def _answer(self, policy: Policy, group: Sequence[Prompt]) -> list[Completion]:
        draws = torch.stack([self._draws(prompt) for prompt in group])
        ids, logprobs = sample_with(policy, torch.tensor([p.ids for p in group]), draws, group[0].temperature)
        if not bool(torch.isfinite(logprobs).all()):
            raise ContractError("found logprobs that are not finite: the weights were never loaded whole")
        rows = zip(ids.tolist(), logprobs.tolist(), strict=True)
        return [Completion(ids=tuple(row), logprobs=tuple(each), finish_reason="length") for row, each in rows]

    def _draws(self, prompt: Prompt) -> Tensor:
        """A seeded prompt draws from its own generator: whoever shares its batch does not shift its randomness."""
        generator = self._generator
        if prompt.seed is not None:
            generator = torch.Generator().manual_seed(prompt.seed % 2**64)
        return torch.rand(prompt.max_tokens, dtype=torch.float64, generator=generator)


def _views(policy: Policy) -> Pieces:
    return pieces(dict(policy.named_parameters()), writable=True)


def _groups(prompts: Sequence[Prompt]) -> list[list[int]]:
    """Indices of prompts that one forward pass can serve together: same lengths, same temperature."""
    groups: dict[tuple[int, int, float], list[int]] = {}
    for index, prompt in enumerate(prompts):
        groups.setdefault((len(prompt.ids), prompt.max_tokens, prompt.temperature), []).append(index)
    return list(groups.values())


def _check(prompt: Prompt, config: PolicyConfig) -> None:
    if not prompt.ids or not all(0 <= token < config.vocab for token in prompt.ids):
        raise Rejected(f"found prompt ids {prompt.ids}; expected at least one, each from 0 to {config.vocab - 1}")
    if not 1 <= prompt.max_tokens <= config.max_len - len(prompt.ids):
        room = config.max_len - len(prompt.ids)
        raise Rejected(f"found max_tokens {prompt.max_tokens}; after {len(prompt.ids)} prompt tokens 1 to {room} fit")
    if not (math.isfinite(prompt.temperature) and prompt.temperature >= 0):
        raise Rejected(f"found temperature {prompt.temperature}; expected 0 (greedy) or a positive number")
