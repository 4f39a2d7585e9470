"""A model of an engine that is apart: a server with a layout of its own, and the backend that drives it.

Knows: the contract of continuous backends, three tensors. Must not know: the log, agents, or who asks.
The server is right, token by token, unless a switch says otherwise: `updates` and `answers` are what befalls the next
ones, and the roads there and back are open or not. What it should hold is worked out here from the room alone.
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
from reef_bus.errors import Rejected, TransferError, Unavailable

VOCABULARY, LONGEST = 64, 256
ROWS, COLUMNS, HEADS = 3, 5, 16
LAYOUTS: dict[str, Layout] = {
    "head": ("U8", (ROWS, COLUMNS), ROWS * COLUMNS),
    "k": ("U8", (HEADS,), HEADS),
    "q": ("U8", (HEADS,), HEADS),
}

Update = Literal[
    "", "loads nothing", "drops a tensor", "flips a bit", "forgets the label", "refuses", "lost", "unheard"
]
"""What becomes of an update. All but the last three say that they succeeded; of `lost` and `unheard` nobody hears."""

Fate = Literal[
    "", "names another version", "names one too many", "too few tokens", "too few named", "never ends", "cancelled"
]
"""What becomes of a request."""


def version(name: str) -> Pieces:
    """The tensors of one version, as anybody would publish them."""
    drawn = hashlib.sha512(name.encode()).digest()
    return {
        "q": Piece("U8", (HEADS,), memoryview(drawn[:HEADS])),
        "k": Piece("U8", (HEADS,), memoryview(drawn[HEADS : 2 * HEADS])),
        "head": Piece("U8", (ROWS, COLUMNS), memoryview(drawn[-ROWS * COLUMNS :])),
    }


def next_token(q: bytes, k: bytes, head: bytes, prompt: Prompt, before: Sequence[int]) -> tuple[int, float]:
    """The model: every byte of the weights and every token so far has a say in the next one."""
    drawn = hashlib.sha256(b"|".join([q, k, head, repr((prompt.ids, prompt.seed, tuple(before))).encode()])).digest()
    return drawn[0] % VOCABULARY, -(1 + drawn[1]) / 256


def by_hand(prompt: Prompt, *parts: tuple[str, int]) -> Completion:
    """The answer whose tokens come from these versions, so many from each; from what was published, and no server."""
    ids, logprobs = list[int](), list[float]()
    for name, count in parts:
        q, k, head = (bytes(version(name)[tensor].data) for tensor in ("q", "k", "head"))
        for _ in range(count):
            token, logprob = next_token(q, k, head, prompt, ids)
            ids.append(token)
            logprobs.append(logprob)
    return Completion(ids=tuple(ids), logprobs=tuple(logprobs), finish_reason="length")


# -- the other process


class Request:
    """One prompt in the server's hands, and which version sampled each of its tokens."""

    def __init__(self, prompt: Prompt, fate: Fate) -> None:
        self.prompt, self.fate = prompt, fate
        self.ids, self.logprobs, self.labels = list[int](), list[float](), list[str]()
        self.aborted = False
        self.ended = asyncio.Event()

    def answer(self) -> Answer:
        short = -1 if self.fate == "too few tokens" else len(self.ids)
        reason = "" if self.aborted else "length"
        completion = Completion(
            ids=tuple(self.ids[:short]), logprobs=tuple(self.logprobs[:short]), finish_reason=reason
        )
        labels = ["inc:99"] * len(self.ids) if self.fate == "names another version" else self.labels
        if self.fate in ("too few named", "too few tokens"):
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
        while len(request.ids) < request.prompt.max_tokens and not request.aborted:
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
        return next_token(bytes(qk[:HEADS]), bytes(qk[HEADS:]), head, request.prompt, request.ids)

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

    def sums(self) -> dict[str, str]:
        if self.mute:
            raise TransferError("refused", "/sums: 500 not now")
        return {name: hashlib.sha256(data).hexdigest()[:16] for name, data in self.parameters.items()}


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

    def __init__(self, server: Server | None = None) -> None:
        self.server = server or Server()
        self._room: Pieces = {}
        self._layouts: dict[str, Layout] = {}
        self._expected: dict[str, dict[str, str]] = {}

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
