"""An SGLang server as an engine: it samples, holds the weights, and says what they sum up to.

Knows: the server, a room, an oracle. Must not know: the log, or which version is due.
Nobody but this process speaks to a server of its own, whose key is the boot's id. What is in a server's memory is
believed for what it sums up to, never for what an update answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import urllib.parse
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import aiohttp
import msgspec

from consumers.reef_engine.sglang import moves, requests
from consumers.reef_engine.sglang.adapters import Held
from consumers.reef_engine.sglang.client import CALL_S, Client, shaped, words
from consumers.reef_engine.sglang.launch import gpus
from consumers.reef_engine.sglang.limits import Limits
from consumers.reef_engine.sglang.room import Room
from consumers.reef_engine.sglang.sums import Checked, Oracle, Sums, flaw
from reef_bus.backends import STOP, Answer, Completion, ContinuousBackend, Layout, Pieces, Prompt, Proof
from reef_bus.config import Inference
from reef_bus.core.publication import DRAIN, PAUSES, RETRACT
from reef_bus.errors import NotHeld, Rejected, TransferError, Unavailable
from reef_bus.events import Lora
from reef_bus.runner import blocking

log = logging.getLogger(__name__)

SUMS_S = 300.0
MEMORY_S = 300.0
IDLE_S = 60.0
TELL_S = 5.0
NOT_NOW = (301, 302, 303, 307, 308, 401, 403, 404, 408, 429, 502, 503, 504)
"""By what a server, or whatever stands before it, says nothing of the prompt: elsewhere, or later, it may do."""
KNOWN = 8
"""Versions of which the expected sums are remembered: the head and what comes next, and a few to go back to."""


class Named(msgspec.Struct, frozen=True):
    """What we read of its /model_info."""

    weight_version: str


class SGLangEngine(ContinuousBackend):
    """A server that is up, and what belongs to it. It stages in the room: there is room for one version beside the one
    that the server holds."""

    stages = True
    apart = True

    def __init__(
        self,
        inference: Inference,
        client: Client,
        room: Room,
        oracle: Oracle,
        device: str,
        died: Callable[[str], None],
        held: Held | None = None,
        *,
        spans: bool,
        borrowed: bool = False,
    ) -> None:
        """`spans`: the server tells exactly which version sampled what. `died` is told why the server is of no use any
        more; what it does ends the boot."""
        self.inference, self.client, self.room_, self.oracle = inference, client, room, oracle
        self.device, self.died, self.borrowed = device, died, borrowed
        self.pauses = PAUSES if spans else (DRAIN, RETRACT)
        self.limits = Limits.of(room.folder)
        self.held, self.adapters = held, held.adapters.most() if held else 0
        self._expected: dict[str, list[Sums]] = {}
        self._session: aiohttp.ClientSession | None = None
        self._halted = False

    # -- weights

    def start(self) -> None:
        """The server has allocated what it needs."""

    def live(self) -> Pieces:
        return {}

    def room(self, layouts: Mapping[str, Layout]) -> Pieces:
        return self.room_.fit(layouts)

    def expect(self, manifest: str) -> None:
        try:
            self._expected[manifest] = self.oracle.expected(self.room_.weights)
        except Unavailable as error:
            self.died(str(error))  # it would be asked in vain for ever
            raise
        while len(self._expected) > KNOWN:
            del self._expected[next(iter(self._expected))]

    def take(self, load_id: str) -> None:
        """What was computed with the old weights goes, but for what is halted in place without a prefix cache."""
        try:
            with self._undisturbed():
                self._update(load_id)
        except TransferError:
            raise  # the server has heard us, and says no
        except Exception as error:
            self.died(f"the server may still wait for an update that broke off: {error!r}")
            raise Unavailable(str(error)) from error

    @contextlib.contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Others may ask a borrowed server: what they have in hand stops meanwhile, and is then computed anew."""
        if self._halted:
            yield
        elif self.borrowed:
            self.client.post("pause_generation", requests.pause_generation("retract"))
            try:
                yield
            finally:
                self.client.post("continue_generation", requests.continue_generation())
        else:
            self._wait_until_idle()
            yield

    def _wait_until_idle(self) -> None:
        """For a moment after its last answer a server is not: then it would refuse to drop what it has computed, which
        is no load any more, and end when its memory is to go. Raises TransferError when it takes too long."""
        query = urllib.parse.urlencode(requests.flush_cache(IDLE_S))
        self.client.post(f"flush_cache?{query}", {}, IDLE_S + CALL_S)

    def _update(self, load_id: str) -> None:
        ranks, flush = self.inference.tensor_parallel_size, not (self._halted and not self.inference.prefix_cache)
        match self.inference.update:
            case "disk":
                moves.from_disk(self.client, self.room_, load_id, flush=flush)
            case "tensors":
                moves.from_tensors(self.client, self.room_, load_id, ranks, flush=flush)
            case _:
                sender, host = moves.sender(self.device, ranks, self.inference.options, gpus()), self.inference.host
                moves.broadcast(self.client, self.room_, load_id, ranks, sender, host=host, flush=flush)

    def proof(self, manifest: str, load_id: str) -> Proof:
        expected = self._expected.get(manifest)
        if expected is None:
            return Proof("nobody has worked out what the server should hold", 0, "")
        return Proof(self._flaw(expected, load_id), sum(len(each.sums) for each in expected), expected[0].algorithm)

    def _flaw(self, expected: Sequence[Sums], load_id: str) -> str:
        named = shaped("model_info", self.client.get("model_info"), Named).weight_version
        if named != load_id:
            return f"the server calls what it holds {named!r}, expected {load_id!r}"
        said = self.client.post("weights_checker", requests.weights_checker("checksum"), SUMS_S)
        return flaw(expected, shaped("weights_checker", said, Checked).ranks)

    # -- adapters

    def load_adapter(self, name: str, tensors: Pieces, lora: Lora) -> None:
        self._held().load(name, tensors, lora)

    def adapter_proof(self, name: str, manifest: str, lora: Lora) -> Proof:
        try:
            return self._held().proof(name, manifest, lora)
        except Unavailable as error:
            self.died(str(error))  # it would be asked in vain for ever
            raise

    def unload_adapter(self, name: str) -> str:
        return self._held().unload(name)

    def resident(self) -> frozenset[str]:
        return self.held.listed() if self.held else frozenset()

    def _held(self) -> Held:
        if self.held is None:
            raise self._no_adapters()
        return self.held

    # -- memory

    def release(self, regions: Sequence[str]) -> None:
        self._wait_until_idle()
        self.client.post("release_memory_occupation", requests.release_memory_occupation(*regions), MEMORY_S)

    def resume(self, regions: Sequence[str]) -> None:
        self.client.post("resume_memory_occupation", requests.resume_memory_occupation(*regions), MEMORY_S)

    def close(self) -> None:
        """Whoever started the server, the room and the oracle ends them."""

    # -- generation

    def generate(self, prompts: Sequence[Prompt]) -> list[Completion]:
        """For whoever has no event loop; prompts that are sampled together are answered together."""
        for prompt in prompts:
            self.limits.check(prompt)
        answers = [self.client.post("generate", _body(prompt), SUMS_S) for prompt in prompts]
        return [_read(prompt, said).completion for prompt, said in zip(prompts, answers, strict=True)]

    async def answer(self, prompt: Prompt) -> Answer:
        self.limits.check(prompt)
        rid = uuid.uuid4().hex
        try:
            return await self._asked(prompt, rid)
        except Rejected as error:
            if error.status == 503:
                log.info("%s; whoever asked may ask again", error)
            raise
        except asyncio.CancelledError:
            self._tell("abort_request", requests.abort_request(rid))
            raise

    async def _asked(self, prompt: Prompt, rid: str) -> Answer:
        url = f"{self.client.url}/generate"
        try:
            asked = self._http().post(url, json=_body(prompt, rid), headers=self.client.headers, allow_redirects=False)
            async with asked as reply:
                said = await reply.read()
        except (aiohttp.ClientError, OSError) as error:
            raise Unavailable(f"SGLang does not answer: {error!r}") from error
        if reply.status != 200:
            text = words(said.decode(errors="replace"))
            refused = NotHeld if any(each in text for each in requests.NO_ADAPTER) else Rejected
            raise refused(f"SGLang answered {reply.status}: {text}", 503 if reply.status in NOT_NOW else 400)
        return _answer(prompt, said)

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            # a connection that is kept may be closed by the server just as the next prompt is sent: a boot's end for it
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            forever = aiohttp.ClientTimeout(total=None)
            self._session = aiohttp.ClientSession(connector=connector, timeout=forever)
        return self._session

    def _tell(self, route: str, body: requests.Body) -> None:
        """Nobody waits for the answer."""
        telling = asyncio.get_running_loop().run_in_executor(None, self.client.post, route, body, TELL_S)
        telling.add_done_callback(_heard)

    async def disconnect(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def abort(self) -> None:
        with contextlib.suppress(TransferError):
            await blocking(self.client.post, "abort_request", requests.abort_every_request())

    async def halt(self) -> None:
        """The server answers before its scheduler has heard of it; whatever the scheduler is asked next, it answers
        after that."""
        self._halted = True
        mode = "retract" if self.inference.prefix_cache else "in_place"
        await blocking(self.client.post, "pause_generation", requests.pause_generation(mode))  # type: ignore[arg-type]
        await blocking(self.client.get, "server_info", SUMS_S)

    async def go_on(self) -> None:
        self._halted = False
        await blocking(self.client.post, "continue_generation", requests.continue_generation())


def _heard(told: asyncio.Future[Any]) -> None:
    if not told.cancelled() and told.exception():
        log.info("SGLang was told, and did not hear: %s", told.exception())


def _body(prompt: Prompt, rid: str | None = None) -> requests.Body:
    return requests.generate(
        prompt.ids,
        max_tokens=prompt.max_tokens,
        temperature=prompt.temperature,
        seed=prompt.seed,
        rid=rid,
        adapter=prompt.adapter or None,
        stop_ids=prompt.stop_ids,
    )


def _no_answer(why: object) -> Rejected:
    """Which is the server's fault, and not the prompt's."""
    return Rejected(f"SGLang's answer is not one: {why}", 503)


def _answer(prompt: Prompt, said: bytes) -> Answer:
    try:
        return _read(prompt, msgspec.json.decode(said))
    except msgspec.DecodeError as error:
        raise _no_answer(error) from error


def _read(prompt: Prompt, said: Any) -> Answer:
    """Raises Rejected for an answer that is not one: tokens, each with its logprob, which is of the temperature that
    was asked for. The server gives that of temperature 1 for greedy tokens."""
    try:
        ids, meta = tuple(said["output_ids"]), said["meta_info"]
        logprobs = [(float(logprob), token) for logprob, token, _ in meta["output_token_logprobs"]]
        versions = tuple((str(span["version"]), span["end"] - span["start"]) for span in meta["weight_versions"])
        reason = _reason(ids, meta["finish_reason"])
    except (KeyError, TypeError, ValueError) as error:
        raise _no_answer(repr(error)) from error
    if tuple(token for _, token in logprobs) != ids or not all(math.isfinite(logprob) for logprob, _ in logprobs):
        raise _no_answer("its logprobs are not those of its tokens")
    given = tuple(logprob if prompt.temperature else 0.0 for logprob, _ in logprobs)
    return Answer(Completion(ids=ids, logprobs=given, finish_reason=reason), versions)


def _reason(ids: Sequence[int], said: Mapping[str, Any]) -> str:
    """By what it says that the answer ended; empty: it was aborted. A stop is by the last token, or by something that
    nobody has asked for: where it computes no numbers, the server puts a stop token in the place of the sampled one."""
    reason, matched = str(said["type"]), said.get("matched")
    if reason == STOP and matched not in ids[-1:]:
        return f"{STOP} ({matched})"
    return "" if reason == "abort" else reason
