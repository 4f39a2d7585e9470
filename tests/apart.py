"""A model of an engine that is apart: a server with a layout of its own, and the backend that drives it.

Knows: the contract of continuous backends, three tensors. Must not know: the log, agents, or who asks.
The server is right, token by token, unless a switch says otherwise: `updates`, `answers`, `adapter_loads` and
`adapter_unloads` are what befalls the next ones, and the roads there and back are open or not. What it should hold is
worked out here from the room, and from the adapters that were handed in, alone.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Literal

from reef_bus.backends import Answer, Completion, ContinuousBackend, Layout, Piece, Pieces, Prompt, Proof
from reef_bus.core.publication import PAUSES
from reef_bus.errors import Misfit, NotHeld, Rejected, TransferError, Unavailable
from reef_bus.events import Lora
from reef_bus.manifest import describe

VOCABULARY, LONGEST = 64, 256
ROWS, COLUMNS, HEADS = 3, 5, 16
LAYOUTS: dict[str, Layout] = {
    "head": ("U8", (ROWS, COLUMNS), ROWS * COLUMNS),
    "k": ("U8", (HEADS,), HEADS),
    "q": ("U8", (HEADS,), HEADS),
}

LORA = Lora(2, 4, ("head",))
ADAPTER_BYTES = LORA.rank * (COLUMNS + ROWS)
ADAPTER: dict[str, Layout] = {
    "base_model.model.head.lora_A.weight": ("U8", (LORA.rank, COLUMNS), LORA.rank * COLUMNS),
    "base_model.model.head.lora_B.weight": ("U8", (ROWS, LORA.rank), ROWS * LORA.rank),
}

Update = Literal[
    "", "loads nothing", "drops a tensor", "flips a bit", "forgets the label", "refuses", "lost", "unheard"
]
"""What becomes of an update. All but the last three say that they succeeded; of `lost` and `unheard` nobody hears."""

Fate = Literal[
    "",
    "names another version",
    "names one too many",
    "too few tokens",
    "too few named",
    "stops too soon",
    "stops at nothing",
    "never ends",
    "cancelled",
]
"""What becomes of a request."""

Load = Literal["", "refuses", "fails and holds it", "loads nothing", "loads another", "flips a bit", "scales it twice"]
"""What becomes of an adapter that is to be loaded. All but the first two faults say that they succeeded."""

Unload = Literal["", "refuses", "leaks", "lost"]
"""What becomes of one that is to go. One that `leaks` is not listed, and answered all the same; of `lost` nobody hears,
and it is gone."""


def version(name: str) -> Pieces:
    """The tensors of one version, as anybody would publish them."""
    drawn = hashlib.sha512(name.encode()).digest()
    return {
        "q": Piece("U8", (HEADS,), memoryview(drawn[:HEADS])),
        "k": Piece("U8", (HEADS,), memoryview(drawn[HEADS : 2 * HEADS])),
        "head": Piece("U8", (ROWS, COLUMNS), memoryview(drawn[-ROWS * COLUMNS :])),
    }


def adapter(name: str) -> tuple[Pieces, Lora]:
    """One adapter, as anybody would publish it."""
    drawn = hashlib.sha512(f"adapter {name}".encode()).digest()
    (a, (dtype, of_a, size)), (b, (_, of_b, rest)) = ADAPTER.items()
    tensors = {
        a: Piece(dtype, of_a, memoryview(drawn[:size])),
        b: Piece(dtype, of_b, memoryview(drawn[size : size + rest])),
    }
    return tensors, LORA


def fused(given: Mapping[str, bytes], lora: Lora) -> bytes:
    """An adapter as the server lays it out: B before A, and its scale."""
    a, b = (given[name] for name in ADAPTER)
    return b + a + repr(lora.alpha / lora.rank).encode()


def next_token(
    q: bytes, k: bytes, head: bytes, prompt: Prompt, before: Sequence[int], added: bytes = b""
) -> tuple[int, float]:
    """The model: every byte of the weights, of an adapter that was `added`, and every token so far has a say."""
    asked = repr((prompt.ids, prompt.seed, tuple(before))).encode()
    drawn = hashlib.sha256(b"|".join([q, k, head, asked, *([added] if added else [])])).digest()
    return drawn[0] % VOCABULARY, -(1 + drawn[1]) / 256


def by_hand(prompt: Prompt, *parts: tuple[str, int], with_adapter: str = "") -> Completion:
    """The answer whose tokens come from these versions, so many from each; from what was published, and no server."""
    ids, logprobs = list[int](), list[float]()
    tensors, lora = adapter(with_adapter)
    added = fused({each: bytes(piece.data) for each, piece in tensors.items()}, lora) if with_adapter else b""
    for name, count in parts:
        q, k, head = (bytes(version(name)[tensor].data) for tensor in ("q", "k", "head"))
        for _ in range(count):
            token, logprob = next_token(q, k, head, prompt, ids, added)
            ids.append(token)
            logprobs.append(logprob)
    reason = "stop" if ids[-1] in prompt.stop_ids else "length"
    return Completion(ids=tuple(ids), logprobs=tuple(logprobs), finish_reason=reason)


# -- the other process


class Request:
    """One prompt in the server's hands, and which version sampled each of its tokens."""

    def __init__(self, prompt: Prompt, fate: Fate) -> None:
        self.prompt, self.fate = prompt, fate
        self.ids, self.logprobs, self.labels = list[int](), list[float](), list[str]()
        self.aborted = False
        self.ended = asyncio.Event()

    def stopped(self) -> bool:
        return self.fate != "stops at nothing" and bool(self.ids) and self.ids[-1] in self.prompt.stop_ids

    def answer(self) -> Answer:
        short = -1 if self.fate in ("too few tokens", "stops too soon") else len(self.ids)
        reason = "stop" if self.stopped() or self.fate == "stops too soon" else "length"
        reason = "" if self.aborted else reason
        completion = Completion(
            ids=tuple(self.ids[:short]), logprobs=tuple(self.logprobs[:short]), finish_reason=reason
        )
        labels = ["inc:99"] * len(self.ids) if self.fate == "names another version" else self.labels
        if self.fate in ("too few named", "too few tokens", "stops too soon"):
            labels = labels[:-1]
        if self.fate == "names one too many":
            labels = [*labels, "inc:99"]
        return Answer(completion, tuple((label, len(list(run))) for label, run in groupby(labels)))


class Server:
    """Samples for whoever is in hand, all at once, unless it is paused."""

    def __init__(self) -> None:
        self.parameters = {"qk": bytearray(b"\xa5" * 2 * HEADS), "head_t": bytearray(b"\xa5" * ROWS * COLUMNS)}
        self.label = "default"
        self.updates, self.answers = deque[Update](), deque[Fate]()
        self.adapter_loads, self.adapter_unloads = deque[Load](), deque[Unload]()
        self.adapters, self.leaked = dict[str, bytes](), dict[str, bytes]()
        self.hold_at: int | None = None  # no request goes beyond that many tokens
        self.there, self.back = asyncio.Event(), asyncio.Event()  # the roads: whoever is on its way waits for them
        self.there.set()
        self.back.set()
        self.paused = self.dead = self.mute = False  # mute: it does not say what its memory sums up to
        self.in_hand: dict[asyncio.Task[None], Request] = {}
        self.asked, self.dropped = list[Prompt](), list[Prompt]()
        self.loads = self.aborts = self.halts = self.goes = self.most = 0
        self._moved = asyncio.Event()

    def move(self) -> None:
        """Whoever waits looks again."""
        self._moved.set()
        self._moved.clear()

    def die(self) -> None:
        self.dead = True
        for request in self.in_hand.values():
            request.ended.set()

    def enter(self, prompt: Prompt) -> tuple[asyncio.Task[None], Request]:
        request = Request(prompt, self.answers.popleft() if self.answers else "")
        task = asyncio.create_task(self._sample(request))
        self.in_hand[task] = request
        self.asked.append(prompt)
        self.most = max(self.most, len(self.in_hand))
        return task, request

    def leave(self, task: asyncio.Task[None]) -> None:
        self.in_hand.pop(task)
        task.cancel()

    async def _sample(self, request: Request) -> None:
        while len(request.ids) < request.prompt.max_tokens and not request.stopped() and not request.aborted:
            held = self.hold_at is not None and len(request.ids) >= self.hold_at
            if self.paused or held or request.fate == "never ends":
                await self._moved.wait()
                continue
            token, logprob = self._forward(request)
            request.ids.append(token)
            request.logprobs.append(logprob)
            request.labels.append(self.label)
            await asyncio.sleep(0)
        request.ended.set()

    def _forward(self, request: Request) -> tuple[int, float]:
        qk, turned = self.parameters["qk"], self.parameters["head_t"]
        head = bytes(turned[column * ROWS + row] for row in range(ROWS) for column in range(COLUMNS))
        added = self.answering(request.prompt.adapter) if request.prompt.adapter else b""
        return next_token(bytes(qk[:HEADS]), bytes(qk[HEADS:]), head, request.prompt, request.ids, added)

    def abort_all(self) -> None:
        self.aborts += 1
        for request in self.in_hand.values():
            request.aborted |= not request.ended.is_set()
        self.move()

    def load(self, given: Mapping[str, bytes], label: str, fate: Update) -> None:
        """As an update would: parameter by parameter, into memory that may be read."""
        assert self.paused or not self.in_hand, f"weights change while {len(self.in_hand)} requests are sampled"
        self.loads += 1
        if fate != "loads nothing":
            self.parameters["qk"][:HEADS] = given["q"]
            if fate != "drops a tensor":
                self.parameters["qk"][HEADS:] = given["k"]
            for at, value in enumerate(given["head"]):
                self.parameters["head_t"][at % COLUMNS * ROWS + at // COLUMNS] = value
        if fate == "flips a bit":
            self.parameters["head_t"][7] ^= 0x10
        if fate != "forgets the label":
            self.label = label

    def answering(self, name: str) -> bytes:
        """The adapter that answers under this name. Raises Rejected where there is none."""
        found = self.adapters.get(name, self.leaked.get(name))
        if found is None:
            raise NotHeld(f"no adapter {name} is loaded")
        return found

    def load_adapter(self, name: str, held: bytes) -> None:
        fate = self.adapter_loads.popleft() if self.adapter_loads else ""
        if fate == "refuses" or name in self.adapters:
            raise TransferError("refused", f"/load: 400 not {name}")
        if fate in ("loads another", "flips a bit"):
            held = bytes([held[0] ^ (0xFF if fate == "loads another" else 0x10), *held[1:]])
        if fate == "scales it twice":
            held = held[:ADAPTER_BYTES] + repr(2 * float(held[ADAPTER_BYTES:])).encode()
        if fate != "loads nothing":
            self.adapters[name] = held
        if fate == "fails and holds it":
            raise TransferError("refused", f"/load: 500 something went wrong with {name}")

    def unload_adapter(self, name: str) -> None:
        using = [request for request in self.in_hand.values() if request.prompt.adapter == name]
        assert not using, f"adapter {name} goes while {len(using)} requests ask for it"
        fate = self.adapter_unloads.popleft() if self.adapter_unloads else ""
        if fate == "refuses":
            raise TransferError("refused", f"/unload: 400 not {name}")
        held = self.adapters.pop(name, None)
        if held is not None and fate == "leaks":
            self.leaked[name] = held
        if fate == "lost":
            raise Unavailable("the server gave no answer to /unload")

    def sum_of(self, name: str) -> str:
        self.heard()
        return hashlib.sha256(self.answering(name)).hexdigest()[:16]

    def sums(self) -> dict[str, str]:
        self.heard()
        return {name: hashlib.sha256(data).hexdigest()[:16] for name, data in self.parameters.items()}

    def heard(self) -> None:
        if self.mute:
            raise TransferError("refused", "/sums: 500 not now")


# -- the backend


def expected_sums(given: Mapping[str, bytes]) -> dict[str, str]:
    """What a server that holds these tensors says: from the tensors, and nothing that a server ever said."""
    if {name: len(data) for name, data in given.items()} != {name: size for name, (_, _, size) in LAYOUTS.items()}:
        raise TransferError("mismatch", f"tensors {sorted(given)} are no version of this model")
    turned = b"".join(given["head"][column::COLUMNS] for column in range(COLUMNS))
    fused = {"qk": given["q"] + given["k"], "head_t": turned}
    return {name: hashlib.sha256(data).hexdigest()[:16] for name, data in fused.items()}


class Apart(ContinuousBackend):
    """Drives one server, and believes nothing of what its updates say."""

    stages = True
    pauses = PAUSES
    apart = True
    adapters = 4

    def __init__(self, server: Server | None = None) -> None:
        self.server = server or Server()
        self._room: Pieces = {}
        self._layouts: dict[str, Layout] = {}
        self._expected: dict[str, dict[str, str]] = {}
        self._adapters: dict[str, dict[str, bytes]] = {}

    def start(self) -> None: ...

    def live(self) -> Pieces:
        return {}

    def close(self) -> None: ...

    def room(self, layouts: Mapping[str, Layout]) -> Pieces:
        if dict(layouts) != self._layouts:
            self._layouts = dict(layouts)
            self._room = {
                name: Piece(dtype, shape, memoryview(bytearray(size))) for name, (dtype, shape, size) in layouts.items()
            }
        return self._room

    def _received(self) -> dict[str, bytes]:
        return {name: bytes(piece.data) for name, piece in self._room.items()}

    def expect(self, manifest: str) -> None:
        self._expected[manifest] = expected_sums(self._received())

    def take(self, load_id: str) -> None:
        fate = self.server.updates.popleft() if self.server.updates else ""
        if fate == "refuses":
            raise TransferError("refused", "/update: 400 not now")
        if fate != "unheard":
            self.server.load(self._received(), load_id, fate)
        if fate in ("lost", "unheard"):
            raise Unavailable("the server gave no answer to /update")

    def proof(self, manifest: str, load_id: str) -> Proof:
        expected = self._expected.get(manifest)
        if expected is None:
            return Proof("nobody has worked out what the server should hold", 0, "")
        found = self.server.sums()
        wrong = [name for name, sum_ in expected.items() if found[name] != sum_]
        flaw = f"parameter {wrong[0]!r} sums up to {found[wrong[0]]}, expected {expected[wrong[0]]}" if wrong else ""
        if self.server.label != load_id:
            flaw = f"the server calls what it holds {self.server.label!r}, expected {load_id!r}"
        return Proof(flaw, len(expected), "sha256-64")

    def load_adapter(self, name: str, tensors: Pieces, lora: Lora) -> None:
        found = {each: (piece.dtype, tuple(piece.shape), piece.data.nbytes) for each, piece in tensors.items()}
        if found != ADAPTER or (lora.rank, lora.targets) != (LORA.rank, LORA.targets):
            raise Misfit("mismatch", f"tensors {sorted(found)} are no adapter of this model")
        if len(self.server.adapters) >= self.adapters:
            raise TransferError("memory", f"{self.adapters} adapters are all that the server holds")
        given = self._adapters[describe(tensors).digest] = {each: bytes(p.data) for each, p in tensors.items()}
        self.server.load_adapter(name, fused(given, lora))

    def adapter_proof(self, name: str, manifest: str, lora: Lora) -> Proof:
        given = self._adapters.get(manifest)
        if given is None or name not in self.server.adapters:
            return Proof(f"nobody has loaded {manifest}, or the server does not list {name}", 0, "")
        expected, found = hashlib.sha256(fused(given, lora)).hexdigest()[:16], self.server.sum_of(name)
        flaw = "" if found == expected else f"adapter {name} sums up to {found}, expected {expected}"
        return Proof(flaw, len(given), "sha256-64")

    def unload_adapter(self, name: str) -> str:
        """Believed by what the server lists and answers afterwards."""
        try:
            self.server.unload_adapter(name)
        except (TransferError, Unavailable) as error:
            said = str(error)
        else:
            said = "it said that it did"
        if name in self.server.adapters:
            return f"the server lists {name} still: {said}"
        return f"the server answers {name} still: {said}" if name in self.server.leaked else ""

    def resident(self) -> frozenset[str]:
        return frozenset(self.server.adapters)

    def generate(self, prompts: Sequence[Prompt]) -> list[Completion]:
        for prompt in prompts:
            _check(prompt)
        return asyncio.run(self._whole(prompts))

    async def _whole(self, prompts: Sequence[Prompt]) -> list[Completion]:
        return [(await self.answer(prompt)).completion for prompt in prompts]

    async def answer(self, prompt: Prompt) -> Answer:
        _check(prompt)
        await self.server.there.wait()
        self._alive()
        if prompt.adapter:
            self.server.answering(prompt.adapter)
        task, request = self.server.enter(prompt)
        try:
            await request.ended.wait()
            await self.server.back.wait()
        except asyncio.CancelledError:
            self.server.dropped.append(prompt)
            raise
        finally:
            self.server.leave(task)
        self._alive()
        if request.fate == "cancelled":
            raise asyncio.CancelledError
        return request.answer()

    def _alive(self) -> None:
        if self.server.dead:
            raise Unavailable("the server does not answer")

    async def abort(self) -> None:
        self._alive()
        self.server.abort_all()
        await asyncio.sleep(0)

    async def halt(self) -> None:
        self._alive()
        self.server.paused = True
        self.server.halts += 1
        await asyncio.sleep(0)

    async def go_on(self) -> None:
        self._alive()
        self.server.paused = False
        self.server.goes += 1
        self.server.move()
        await asyncio.sleep(0)


def _check(prompt: Prompt) -> None:
    if not prompt.ids or not all(0 <= token < VOCABULARY for token in prompt.ids):
        raise Rejected(f"found prompt ids {prompt.ids}; expected at least one, each from 0 to {VOCABULARY - 1}")
    if not 1 <= prompt.max_tokens <= LONGEST - len(prompt.ids):
        raise Rejected(f"found max_tokens {prompt.max_tokens}; expected 1 to {LONGEST - len(prompt.ids)}")
    if not (math.isfinite(prompt.temperature) and prompt.temperature >= 0):
        raise Rejected(f"found temperature {prompt.temperature}; expected 0 or more")
