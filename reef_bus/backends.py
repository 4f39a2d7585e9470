"""The contracts that integrations implement: what an inference engine and a trainer must offer.

Knows: plain values and memory views. Must not know: the log, NATS, HTTP, or any framework.
All methods block; consumers call them in worker threads. An engine gets one call at a time, but for `stage`, which may
run beside `generate`; a trainer's states are immutable, so `weights` and `load` may run beside `train`.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from reef_bus.errors import ContractError
from reef_bus.events import Lora, Span


class Piece(NamedTuple):
    """One tensor as bytes: `dtype` in safetensors' spelling ("F32", "BF16"), row-major `data` of format "B"."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


Pieces = Mapping[str, Piece]

Layout = tuple[str, tuple[int, ...], int]
"""dtype, shape, nbytes: what can be compared without reading a tensor."""

Places = Mapping[str, tuple[int, int]]
"""By tensor: address and length of its memory. The same places are the same memory, whoever looks."""


def places(pieces: Pieces) -> Places:
    """Where writable `pieces` lie."""
    return {name: (_address(piece.data), piece.data.nbytes) for name, piece in pieces.items()}


def _address(view: memoryview) -> int:
    return ctypes.addressof((ctypes.c_char * view.nbytes).from_buffer(view))


LENGTH, STOP = "length", "stop"
"""Why an answer ends: it has as many tokens as were asked for, or its last one is one of the prompt's `stop_ids`."""


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """One request to an engine, already rendered to token ids. Its answer ends after the first of `stop_ids`, else
    after `max_tokens`. Whoever asks names the `scenario` (empty: that of the base model); the agent, by its fold, the
    LoRA `adapter` that it is answered with (empty: none)."""

    ids: tuple[int, ...]
    max_tokens: int
    temperature: float = 1.0
    seed: int | None = None
    scenario: str = ""
    adapter: str = ""
    stop_ids: tuple[int, ...] = ()

    def answered(self, ids: Sequence[int]) -> int:
        """How many of the `ids` that were sampled are its answer."""
        return next((place for place, token in enumerate(ids, 1) if token in self.stop_ids), len(ids))

    def reason(self, ids: Sequence[int]) -> str:
        """The finish_reason of an answer of just these `ids`; empty if they are not all of it, or more."""
        if self.answered(ids) != len(ids) or not 0 < len(ids) <= self.max_tokens:
            return ""
        return STOP if ids[-1] in self.stop_ids else LENGTH if len(ids) == self.max_tokens else ""


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """What the policy sampled: ids and the logprob of each at the temperature that was asked for (natural log). The
    finish_reason is the prompt's `reason` for them."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str


class Generation(NamedTuple):
    """What there is of a batch, in its order: a completion without a `finish_reason` was stopped. `kept` is what the
    engine needs to go on, KV cache included; None if everything is whole. Who drops it has given the memory back."""

    completions: list[Completion]
    kept: Any = None


Stop = Callable[[], bool]
"""Whether generation is to stop; cheap, and asked between two tokens."""


def never() -> bool:
    """Generate to the end."""
    return False


BOOT_HEADER = "x-reef-boot"
"""The HTTP header by which a gateway says which boot it means; an engine refuses a request for another one."""


def boot_url(url: str, boot: str) -> str:
    """The same for who sends no header of ours: below this, an engine answers as that boot or refuses."""
    return f"{url}/boot/{boot}"


class Generated(msgspec.Struct, frozen=True, kw_only=True):
    """An answer with everything that its record needs: who produced it, from what, and as of which fold. With `spans`
    it was interrupted, and they say so of each part; `load_id` and `as_of` are then the first one's."""

    engine: str
    boot: str
    load_id: str
    as_of: int
    done_as_of: int
    completion: Completion
    spans: tuple[Span, ...] = ()


class Sample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One rewarded answer as the trainer sees it; self-contained, so that no later eviction can lose it. Each logprob
    is that of the version which produced its token: with `spans` several did, else `load_id` alone."""

    record: str
    group: str
    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    logprobs: tuple[float, ...]
    load_id: str
    reward: float
    spans: tuple[Span, ...] = ()


class Proof(NamedTuple):
    """What an engine's own sums of its memory say. `flaw` names what is not as it should be; empty: nothing. Over so
    many `tensors` of the engine's own layout, by an `algorithm` whose name ends in its width in bits."""

    flaw: str
    tensors: int
    algorithm: str


class InferenceBackend(ABC):
    """One engine's model. The agent around it decides when it may generate and what is loaded into it. An engine that
    `stages` has room for a second copy of the weights; `pauses` are the ways in which it can be stopped: any but
    `drain` needs `generate_until`.

    The forward pass of an engine that is `apart` reads memory of another process, in a layout of its own. It receives
    into a `room`, is then told to `expect` what lies there, to `take` it, and to give `proof` that it did.

    An engine that `releases` regions of its memory (`weights`, `kv_cache`, `cuda_graph`) can give them to a job that
    trains where it runs, and take them back.

    It holds so many LoRA `adapters` at most (None: nothing bounds it), each beside the base model and under a name, by
    which prompts ask for it. They come and go while others are being sampled.
    """

    stages: bool = False
    pauses: tuple[str, ...] = ("drain",)
    apart: bool = False
    adapters: int | None = 0
    releases: tuple[str, ...] = ()

    @abstractmethod
    def start(self) -> None:
        """Allocate the model's memory. Its contents are worthless until they were loaded and hashed."""

    @abstractmethod
    def live(self) -> Pieces:
        """Writable views of the very memory that the forward pass reads: no copy, the same views until a swap. Empty
        where that memory is apart."""

    def room(self, layouts: Mapping[str, Layout]) -> Pieces:
        """Writable views in which a version of these tensors is received, of memory that nothing reads before it is
        taken. Raises TransferError("memory") when there is no room."""
        raise self._not_apart()

    def expect(self, manifest: str) -> None:
        """Told that what lies in the room hashes to `manifest`: work out from it, and from nothing that the engine has
        said, by what its memory can be told to hold it. Raises TransferError where that cannot be."""
        raise self._not_apart()

    def take(self, load_id: str) -> None:
        """Have the forward pass read what lies in the room, under this name. Raises TransferError if the engine says
        that it cannot; that it raises nothing proves nothing."""
        raise self._not_apart()

    def proof(self, manifest: str, load_id: str) -> Proof:
        """Whether the forward pass reads the version `manifest`, as what its answers call `load_id`. Raises
        TransferError if the engine refuses to say."""
        raise self._not_apart()

    def _not_apart(self) -> ContractError:
        return ContractError(f"{type(self).__name__} is not apart: what it reads is written and hashed where it lies")

    @abstractmethod
    def generate(self, prompts: Sequence[Prompt]) -> list[Completion]:
        """Sample one completion per prompt, in order. Never runs while `live` is being written. Raises NotHeld where a
        prompt names an adapter that is not there."""

    def generate_until(self, prompts: Sequence[Prompt], stop: Stop, kept: Any = None) -> Generation:
        """As `generate`; but as soon as `stop` says so, end between two tokens, with what there is. Given what it
        `kept`, go on from there: with the KV cache as it is, and the weights as they are now."""
        return Generation(self.generate(prompts))

    def stage(self) -> Pieces:
        """Writable views of the second copy, which nothing reads: allocated on first use, then the same memory until it
        is swapped or freed. Raises TransferError("memory") when there is no room."""
        raise ContractError(f"{type(self).__name__} has no second copy: its engine should not have joined as staged")

    def swap(self) -> None:
        """Exchange the two copies by pointer, moving no byte: `live` is then where `stage` was, and the other way
        round, and nothing that was computed with the old weights is left (prefixes, KV cache but for what a stopped
        generation keeps). Raises ContractError if the forward pass may read anything else."""
        raise ContractError(f"{type(self).__name__} has no second copy to swap in")

    def unstage(self) -> None:
        """Free the second copy, if there is one; safe to repeat."""

    def load_adapter(self, name: str, tensors: Pieces, lora: Lora) -> None:
        """Hold the adapter of these `tensors`, under PEFT's names, as `name`, which nothing is held as. Returns once
        prompts can ask for it; when it raises (TransferError), the engine may hold it all the same. Raises Misfit, and
        holds nothing, where they are no adapter of the model that it serves, or not as `lora` says."""
        raise self._no_adapters()

    def adapter_proof(self, name: str, manifest: str, lora: Lora) -> Proof:
        """Whether prompts that ask for `name` are answered with the adapter `manifest` and nothing else: by what the
        engine holds or does, never by what it said of it. Raises TransferError if it refuses to say."""
        raise self._no_adapters()

    def unload_adapter(self, name: str) -> str:
        """Be rid of it; no prompt in hand asks for it. Empty once it is certain that nobody is answered under this name
        any more, also if nothing was held as it; else why that is not so. Raises nothing for that."""
        raise self._no_adapters()

    def resident(self) -> frozenset[str]:
        """The names of all adapters that the engine lists. Raises TransferError if it refuses to say."""
        return frozenset()

    def _no_adapters(self) -> ContractError:
        return ContractError(f"{type(self).__name__} takes no adapters: its engine should have joined without any")

    def release(self, regions: Sequence[str]) -> None:
        """Give back the memory of these regions, none of which is out: when this returns, another process may have it.
        Nothing is generated or received meanwhile, nor until it is back. What was in it is lost; views of it are not
        to be used any more, `live` and `stage` included. When this raises, whatever it is, nobody knows what is out."""
        raise self._keeps_its_memory()

    def resume(self, regions: Sequence[str]) -> None:
        """Take the memory of these regions, all of which are out, once more. Their contents are as worthless as after
        `start`. When this raises, whatever it is, nobody knows what is out."""
        raise self._keeps_its_memory()

    def _keeps_its_memory(self) -> ContractError:
        return ContractError(f"{type(self).__name__} keeps its memory: its engine should have joined as one that does")

    @abstractmethod
    def close(self) -> None:
        """Free what `start` took; safe to repeat."""


class Answer(NamedTuple):
    """What became of one prompt. Without a `finish_reason` it was aborted. `versions`: which load ids sampled how many
    of its tokens each, in order."""

    completion: Completion
    versions: tuple[tuple[str, int], ...]


class ContinuousBackend(InferenceBackend):
    """An engine that batches by itself: prompts come and go while others are being sampled. These calls do not block;
    they belong to one event loop. Between `halt` and `go_on` nothing is sampled, and what is loaded is for the rest."""

    @abstractmethod
    async def answer(self, prompt: Prompt) -> Answer:
        """One completion. Cancelled, the engine is rid of the prompt. Raises Rejected for one that it cannot serve, or
        does not answer as it should (with status 503, where that says nothing of the prompt), NotHeld as `generate`,
        and Unavailable when the engine cannot be reached."""

    @abstractmethod
    async def abort(self) -> None:
        """Every prompt in hand is answered now, as it is."""

    @abstractmethod
    async def halt(self) -> None:
        """Returns once nothing is sampled any more; whatever is in hand is kept, halfway."""

    @abstractmethod
    async def go_on(self) -> None:
        """Sample again, first of all what is in hand. Safe to repeat."""


class TrainingBackend(ABC):
    """An optimizer over immutable incumbents: every state it returns is a new one, and none is ever changed.

    One that `mutates_in_place` changes the state that it trains from. That is never used again, nor is any that was
    kept: each is loaded anew, and what was loaded shares no memory with what a step changes.
    """

    mutates_in_place: bool = False

    @abstractmethod
    def initial(self) -> Any:
        """The base model with a fresh optimizer: the same bytes on every call and every machine with this build."""

    @abstractmethod
    def load(self, weights: Path, optimizer: Path | None) -> Any:
        """A state from a stored weights file and what `optimizer` gave; None starts a fresh optimizer. Raises
        ContractError if either is damaged."""

    @abstractmethod
    def train(self, state: Any, batch: Sequence[Sample], seed: int) -> tuple[Any, dict[str, float]]:
        """One version's optimizer steps from `state`: the next state and finite metrics. Unless it mutates in place,
        `state` stays as it is."""

    @abstractmethod
    def weights(self, state: Any) -> Pieces:
        """Read-only views of the state's parameters, under the names that engines use."""

    @abstractmethod
    def optimizer(self, state: Any) -> bytes:
        """What `load` needs beside the weights to go on as if nothing had happened."""

    def release(self) -> None:
        """Give back what steps took of the memory that engines need, beside the states that were returned, which nobody
        holds any more: their memory is free when the last of them is. Who trains where engines run is told so after
        each job, before any engine takes its own back."""
