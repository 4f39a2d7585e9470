"""The LoRA adapters of one server: put into it, proven by how it answers with them, taken out of it for certain.

Knows: the server, the room, the reference. Must not know: which adapter is due, or when.
What would end the server's process at the first request, or be passed over, is refused before the server hears of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from consumers.reef_engine.sglang import moves, requests
from consumers.reef_engine.sglang.client import Client, shaped
from consumers.reef_engine.sglang.limits import Limits
from consumers.reef_engine.sglang.probes import Probe, Reference
from consumers.reef_engine.sglang.room import Room
from reef_bus.backends import Layout, Piece, Pieces, Proof
from reef_bus.config import Config
from reef_bus.errors import Misfit, Rejected, TransferError, Unavailable
from reef_bus.events import Lora
from reef_bus.manifest import describe
from reef_bus.peft_folder import TENSORS
from reef_bus.safetensors_file import mapped

ASK_S = 60.0
PROBE = 64
"""Tokens of which the logprobs are compared, where a prompt may have so many."""
WITHIN, WITHIN_ROUNDED = 1e-4, 0.5
"""How far two implementations may differ in one logprob: in float32 on a CPU (measured: 8e-6); in any other dtype, and
on a GPU (bfloat16 on a CPU: 0.15)."""
PREFIX = "base_model.model."


class Model(msgspec.Struct, frozen=True):
    """An adapter, if it has a parent."""

    id: str
    parent: str | None


class Models(msgspec.Struct, frozen=True):
    """What we read of its /v1/models."""

    data: list[Model]


class Held:
    """What a server holds beside the base model that lies in the room: there, too, as PEFT's folders, which it reads
    itself or is sent the tensors of."""

    def __init__(self, client: Client, room: Room, reference: Reference, config: Config, device: str) -> None:
        self.client, self.room, self.reference, self.adapters = client, room, reference, config.adapters
        self.ranks, self.reads = config.inference.tensor_parallel_size, reads_folders(config)
        exact = device == "cpu" and config.inference.dtype == "float32"
        self.within = WITHIN if exact else WITHIN_ROUNDED
        limits = Limits.of(room.folder)
        ids = limits.vocab_size - 1  # SGLang 0.5.23 calls the last id of a prompt 0
        self.probe = tuple(_drawn(place) % ids for place in range(min(PROBE, limits.longest())))

    def load(self, name: str, tensors: Pieces, lora: Lora) -> None:
        if flaw := self._full(name):
            raise TransferError("refused", f"adapter {name}: {flaw}")
        if flaw := self._unfit({each: _layout(piece) for each, piece in tensors.items()}, lora):
            raise Misfit("mismatch", f"adapter {name}: {flaw}")
        self._kept(name, tensors, lora)
        if self.reads:
            self._asked("load_lora_adapter", requests.load_lora_adapter(name, str(self.room.adapter(name))))
        else:
            self._send(name, tensors, lora)

    def _kept(self, name: str, tensors: Pieces, lora: Lora) -> None:
        try:
            self.room.keep(name, tensors, lora)
        except Rejected as error:
            raise Misfit("mismatch", f"adapter {name}: {error}") from error
        except Unavailable as error:
            raise TransferError("memory", f"no room for adapter {name}: {error}") from error

    def _send(self, name: str, tensors: Pieces, lora: Lora) -> None:
        sent = moves.pickled(moves.tensors(self.room.adapter(name) / TENSORS))
        sums = {each: hashlib.sha256(piece.data).hexdigest() for each, piece in tensors.items()}
        body = requests.load_lora_adapter_from_tensors(name, lora, [sent] * self.ranks, sums)
        self._asked("load_lora_adapter_from_tensors", body)

    def _asked(self, route: str, body: requests.Body) -> Any:
        try:
            return self.client.post(route, body, ASK_S)
        except Unavailable as error:  # what the server holds now is for a proof to say, or for an unload
            raise TransferError("closed", str(error)) from error

    def _full(self, name: str) -> str:
        """Why this server takes no adapter of that name, whatever it is."""
        held = self.room.adapters()
        if name in held | self.listed():
            return "the server holds one of this name"
        if len(held) >= self.adapters.most():
            return f"the server holds {len(held)} already, and adapters.capacity is {self.adapters.most()}"
        return ""

    def _unfit(self, found: Mapping[str, Layout], lora: Lora) -> str:
        """Why no server that is started as this one takes it."""
        if lora.rank > self.adapters.rank or not set(lora.targets) <= set(self.adapters.targets):
            return f"found {lora}, and the server was started for {self.adapters.lora()}"
        return incomplete(lora.targets) or _differs(dict(layouts(self.room.layouts, lora)), found)

    def proof(self, name: str, manifest: str, lora: Lora) -> Proof:
        """By what the server answers, held against another implementation, which reads the very file that it was given.
        The sums of what was sent were compared by the server, when it loaded them."""
        try:
            tensors = mapped(self.room.adapter(name) / TENSORS)
        except Rejected as error:
            return Proof(str(error), 0, self.algorithm)
        if (given := describe(tensors).digest) != manifest:
            return Proof(f"the server was given {given}, expected {manifest}", len(tensors), self.algorithm)
        return Proof(self._flaw(name, lora), len(tensors), self.algorithm)

    @property
    def algorithm(self) -> str:
        return f"{'' if self.reads else 'sha256+'}logprobs-within-{self.within:g}"

    def _flaw(self, name: str, lora: Lora) -> str:
        if name not in self.listed():
            return "the server does not list it"
        file = self.room.adapter(name) / TENSORS
        probe = Probe(str(self.room.folder), str(file), lora.alpha / lora.rank, self.probe)
        expected = self.reference.logprobs(probe)
        found = _logprobs(self._asked("generate", requests.probe(self.probe, adapter=name)))
        if [token for _, token in found] != list(self.probe[1:]):
            return "the server spoke of other tokens than it was asked for"
        return _furthest([logprob for logprob, _ in found], expected, self.within)

    def unload(self, name: str) -> str:
        """Once a server has unloaded an adapter that it read from a folder, the next request that names it loads it
        again, if the folder is there. So that goes first, and what the server makes of such a request is asked."""
        there = self._dropped(name)
        try:
            said = self._told(name)
            if name in self.listed():
                return f"the server still lists it; it said: {said}"
        except TransferError as error:
            return str(error)
        return self._answers(name) or there

    def _dropped(self, name: str) -> str:
        """Why its folder is still there."""
        try:
            self.room.drop(name)
        except OSError as error:
            return f"its folder cannot be taken away: {error}"
        return ""

    def _told(self, name: str) -> str:
        try:
            self._asked("unload_lora_adapter", requests.unload_lora_adapter(name))
        except TransferError as error:
            return str(error)  # that it knows no such adapter, too, is for its list and its answers to show
        return "success"

    def _answers(self, name: str) -> str:
        """Why a request that names it is not refused, and for the reason that there is no such adapter."""
        try:
            self._asked("generate", requests.probe(self.probe[:2], adapter=name))
        except TransferError as error:
            gone = any(f"{words} {name}" in str(error) for words in requests.NO_ADAPTER)
            return "" if gone and requests.INCOMPLETE not in str(error) else str(error)
        return "the server still answers requests that name it"

    def listed(self) -> frozenset[str]:
        try:
            cards = shaped("v1/models", self.client.get("v1/models"), Models).data
        except Unavailable as error:
            raise TransferError("closed", str(error)) from error
        return frozenset(card.id for card in cards if card.parent)


def reads_folders(config: Config) -> bool:
    """Whether adapters take the way of the base model: a server that reads that from a folder reads them, too."""
    return config.adapters.most() > 0 and config.inference.update == "disk"


def _layout(piece: Piece) -> Layout:
    return piece.dtype, tuple(piece.shape), piece.data.nbytes


def _drawn(place: int) -> int:
    return int.from_bytes(hashlib.sha256(b"%d" % place).digest()[:8])


def incomplete(targets: Sequence[str]) -> str:
    """Why SGLang, which fuses some layers, cannot serve adapters of these: it refuses to load one that has q_proj
    without v_proj, and ends at the first request for one with k_proj, v_proj or up_proj alone."""
    needs = {"q_proj": "v_proj", "v_proj": "q_proj", "k_proj": "q_proj", "up_proj": "gate_proj"}
    for target, other in needs.items():
        if target in targets and other not in targets:
            return f"SGLang serves no adapter with {target} and without {other}: add {other} to adapters.targets"
    return ""


def layouts(base: Mapping[str, Layout], lora: Lora) -> Iterator[tuple[str, Layout]]:
    """Of the tensors of an adapter, whole: A and B for every layer of the base model that is a target."""
    for name, (_, shape, _) in base.items():
        layer = name.removesuffix(".weight")
        if layer != name and layer.rpartition(".")[2] in lora.targets:
            rows, columns = shape
            for letter, sides in (("A", (lora.rank, columns)), ("B", (rows, lora.rank))):
                yield f"{PREFIX}{layer}.lora_{letter}.weight", ("F32", sides, 4 * sides[0] * sides[1])


def _differs(expected: Mapping[str, Layout], found: Mapping[str, Layout]) -> str:
    if not expected:
        return "the base model that was loaded has no layer that is a target"
    if other := sorted(expected.keys() ^ found.keys()):
        return f"tensor {other[0]!r} is {'missing' if other[0] in expected else 'of no target of the base model'}"
    for name, layout in expected.items():
        if found[name] != layout:
            return f"tensor {name!r} is {found[name][:2]}, expected {layout[:2]}"
    return ""


def _logprobs(said: Any) -> list[tuple[float, int]]:
    try:
        return [(float(logprob), token) for logprob, token, _ in said["meta_info"]["input_token_logprobs"][1:]]
    except (KeyError, TypeError, ValueError) as error:
        raise TransferError("protocol", f"SGLang's answer has no logprobs of its prompt: {error!r}") from error


def _furthest(found: Sequence[float], expected: Sequence[float], within: float) -> str:
    far = [abs(one - other) for one, other in zip(found, expected, strict=True)]
    place = max(range(len(far)), key=lambda each: (not far[each] <= within, far[each]))  # NaN is not within anything
    if far[place] <= within:
        return ""
    return (
        f"the server answers with something else: logprob {place + 1} of the probe is {found[place]:.6f}, expected "
        f"{expected[place]:.6f} within {within:g}"
    )
