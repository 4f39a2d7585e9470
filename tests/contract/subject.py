"""What the promises of inference backends are asked of: an engine that has been started, and what it must answer.

Knows: the contract in reef_bus/backends.py. Must not know: any engine, agents, or the log.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

from reef_bus.backends import Answer, ContinuousBackend, InferenceBackend, Pieces, Prompt
from reef_bus.events import Lora
from reef_bus.manifest import describe

numbers = itertools.count(1)

Adapter = tuple[Pieces, Lora]


async def at_once() -> None:
    """Nothing to wait for."""


class Subject(NamedTuple):
    """`backend` is started. `versions`: "one" and "other", two versions of its model that answer `prompt` differently.
    `longest`: how many tokens fit, prompt and answer; and how many of them the prompt may have, if not all but one.
    `greedy`: which tokens a version must give at temperature 0, from its tensors and by other code, where there is any.
    `adapters`: two at least, by any names, with which version "one" answers `prompt` as with no other, nor alone; and
    `adapted`, which tokens it must give with one of them. Engines that take no adapters need neither.
    `begun` returns when a request that was just made has probably come some way, of `long` tokens, and not to its end.
    """

    backend: InferenceBackend
    versions: Mapping[str, Pieces]
    vocabulary: int
    longest: int
    prompt: tuple[int, ...]
    greedy: Callable[[Pieces, Prompt], tuple[int, ...]] | None = None
    begun: Callable[[], Awaitable[None]] = at_once
    long: int = 24
    longest_prompt: int = 0
    adapters: Mapping[str, Adapter] = {}
    adapted: Callable[[Pieces, Adapter, Prompt], tuple[int, ...]] | None = None

    def asking(
        self, max_tokens: int = 8, temperature: float = 0.0, seed: int | None = None, adapter: str = ""
    ) -> Prompt:
        return Prompt(ids=self.prompt, max_tokens=max_tokens, temperature=temperature, seed=seed, adapter=adapter)

    async def ask(self, prompt: Prompt) -> Answer:
        if isinstance(self.backend, ContinuousBackend):
            return await self.backend.answer(prompt)
        return Answer((await asyncio.to_thread(self.backend.generate, [prompt]))[0], ())

    async def fill(self, name: str, load_id: str = "") -> str:
        """Load the version; returns the name that it then goes by."""
        load_id = load_id or f"contract:{next(numbers)}"
        await asyncio.to_thread(fill, self.backend, self.versions[name], load_id)
        return load_id


Promise = Callable[[Subject], Awaitable[None]]


def fill(backend: InferenceBackend, tensors: Pieces, load_id: str) -> str:
    """As an agent loads a version, with what is between two machines left out. Returns its manifest's digest."""
    manifest = describe(tensors)
    if backend.apart:
        write(backend.room(manifest.layouts()), tensors)
        backend.expect(manifest.digest)
        backend.take(load_id)
        assert backend.proof(manifest.digest, load_id).flaw == ""
    else:
        write(backend.live(), tensors)
        assert describe(backend.live()).digest == manifest.digest
    return manifest.digest


def write(into: Pieces, tensors: Pieces) -> None:
    assert into.keys() == tensors.keys()
    for name, piece in tensors.items():
        assert (into[name].dtype, into[name].shape) == (piece.dtype, piece.shape)
        into[name].data[:] = piece.data
