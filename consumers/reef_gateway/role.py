"""The gateway: chat requests in, recorded answers with receipts out; reports; status.

Knows: HTTP and how to answer a client's mistake. Must not know: weights, training, or how a release comes about.
It writes nothing to LOG. A request waits while engines are fenced; it never fails for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import os
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from msgspec.structs import replace

from consumers.reef_gateway.answers import Reply, chunks, whole
from consumers.reef_gateway.chat import Call, parse
from consumers.reef_gateway.formats import DIGITS, ChatFormat
from consumers.reef_gateway.recorder import Recorder
from consumers.reef_gateway.router import Router
from reef_bus import process, views
from reef_bus.artifacts import ArtifactStore
from reef_bus.backends import Generated
from reef_bus.config import Config
from reef_bus.core.effects import Debt, Me
from reef_bus.core.serving import hindrance
from reef_bus.core.world import World
from reef_bus.errors import ReefError, Rejected, Unavailable
from reef_bus.events import Event, InferenceRecorded, Recorded
from reef_bus.http import listen
from reef_bus.journal import Journal
from reef_bus.producer import ENGINE, LOAD_ID, RECEIPT, SCENARIO, SPANS, TAG
from reef_bus.runner import Role, blocking
from reef_bus.samples import MAX_SCORE, TokenRow
from reef_bus.tokens import VOCAB

log = logging.getLogger(__name__)

MAX_TAGS, MAX_TAG_BYTES = 16, 256
MAX_DEPTH = 32  # of metadata: whoever reads the stream must be able to walk it, however deep in its own stack it is
LONG_BYTES = 16 * 1024  # of a body: from here on, what tokenizing it takes would be felt by every other request
SHOWN_BYTES, SHOWN = 16 * 1024, 2048  # of a prompt or answer in an event; all of it is in the blob
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
REPORT_ID = re.compile(r"[!-~]{1,128}")


class ReportRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /reef/report. `agent_record_id` makes a repeat recognisable; without it the references do."""

    score: float
    references: list[str]
    feedback: str = ""
    metadata: dict[str, Any] = {}
    agent_record_id: str | None = None


class Gateway(Role):
    """One gateway process."""

    name = "gateway"

    def __init__(self, config: Config, me: Me, router: Router, recorder: Recorder, format: ChatFormat = DIGITS) -> None:
        super().__init__(me)
        self.config = config
        self.router = router
        self.recorder = recorder
        self.format = format
        self.started = int(time.time())

    def react(self, world: World, now: int) -> Sequence[Debt]:
        return ()

    async def perform(self, debt: Debt, scope: contextlib.AsyncExitStack) -> Event | None:
        raise AssertionError(f"a gateway owes nothing, and was asked for {debt.effect}")

    def folded(self, world: World, batch: Sequence[Recorded]) -> None:
        self.router.moved(world)

    # -- routes

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/chat/completions", self.chat),
            web.post("/reef/report", self.report),
            web.get("/v1/models", self.models),
            web.get("/reef/status", self.status),
            web.get("/healthz", self.healthz),
            web.get("/readyz", self.readyz),
        ]

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """A stream begins when its answer is recorded: it is captured whole, or never begins."""
        scenario = self._scenario(request)
        call = await self._call(await request.read())
        tags, of = _tags(request), scenario if scenario != self.config.scenario else ""
        async with self._deadline(of):
            answer = await self.router.generate(replace(call.prompt, scenario=of))
            if _hung_up(request):
                return web.Response(status=499, reason="client closed request")
            record = await self._record(scenario, call, answer, tags)
        reply = Reply.of(call, record, int(time.time()), self.format, answer.completion)
        headers = {RECEIPT: record, SCENARIO: scenario, LOAD_ID: answer.load_id, ENGINE: answer.engine}
        if answer.spans:
            headers[SPANS] = ", ".join(f"{span.load_id}={span.count}" for span in answer.spans)
        if call.stream:
            return await self._stream(request, reply, headers)
        return web.json_response(whole(reply), headers=headers)

    async def _call(self, body: bytes) -> Call:
        if len(body) < LONG_BYTES:
            return parse(body, self.config.model, self.format)
        return await blocking(parse, body, self.config.model, self.format)

    async def _stream(self, request: web.Request, reply: Reply, headers: Mapping[str, str]) -> web.StreamResponse:
        """A client that goes away, or does not read, ends its stream and changes nothing about its record."""
        stream = web.StreamResponse(headers={**headers, "Cache-Control": "no-cache"})
        stream.content_type = "text/event-stream"
        try:
            async with asyncio.timeout(self.config.gateway.timeout_s):
                await stream.prepare(request)
                for chunk in chunks(reply):
                    await stream.write(b"data: " + msgspec.json.encode(chunk) + b"\n\n")
                    await asyncio.sleep(0)  # a write into a buffer with room does not give way to anybody
                await stream.write(b"data: [DONE]\n\n")
                await stream.write_eof()
        except (ConnectionError, TimeoutError) as error:
            log.info("%s is recorded; its stream broke off: %r", reply.record, error)
            if request.transport is not None:
                request.transport.abort()  # else it would look whole
        return stream

    async def _record(self, scenario: str, call: Call, answer: Generated, tags: dict[str, str]) -> str:
        done = answer.completion
        blob, row = await self.recorder.row(
            TokenRow(
                prompt=call.prompt.ids,
                answer=done.ids,
                logprobs=done.logprobs,
                load_ids=tuple(span.load_id for span in answer.spans for _ in range(span.count))
                or (answer.load_id,) * len(done.ids),
            )
        )
        event = InferenceRecorded(
            scenario=scenario,
            record=f"rec-{os.urandom(8).hex()}",
            engine=answer.engine,
            boot=answer.boot,
            load_id=answer.load_id,
            as_of=answer.as_of,
            done_as_of=answer.done_as_of,
            prompt=_shown(self.format, call.prompt.ids),
            answer=_shown(self.format, done.ids),
            prompt_tokens=len(call.prompt.ids),
            answer_tokens=len(done.ids),
            temperature=call.prompt.temperature,
            blob=blob,
            row=row,
            tags=tags,
            spans=answer.spans,
        )
        await self.recorder.answer(event)
        return event.record

    async def report(self, request: web.Request) -> web.Response:
        scenario = self._scenario(request)
        report = _report(await request.read())
        async with self._deadline():
            id_, duplicate = await self.recorder.report(
                scenario,
                report.agent_record_id,
                tuple(report.references),
                report.score,
                report.feedback,
                report.metadata,
            )
        return web.json_response({"agent_record_id": id_, "duplicate": duplicate})

    async def models(self, request: web.Request) -> web.Response:
        model = {
            "id": self.config.model,
            "object": "model",
            "created": self.started,
            "owned_by": self.config.deployment,
        }
        return web.json_response({"object": "list", "data": [model]})

    async def status(self, request: web.Request) -> web.Response:
        return web.json_response(views.status(self.router.world, time.time_ns(), self.config.policy()))

    async def healthz(self, request: web.Request) -> web.Response:
        return web.json_response({"ok": True, "boot": self.me.boot})

    async def readyz(self, request: web.Request) -> web.Response:
        engines = [engine.id for engine in self.router.able()]
        return web.json_response({"ready": bool(engines), "engines": engines}, status=200 if engines else 503)

    @contextlib.asynccontextmanager
    async def _deadline(self, scenario: str = "") -> AsyncIterator[None]:
        """What is not done in time is not known to be undone: the client may ask again, and finds what was recorded."""
        seconds = self.config.gateway.timeout_s
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError as error:
            why = hindrance(self.router.world, scenario)
            said = f"no answer within {seconds:g} s{f': {why}' if why else ''}"
            raise Unavailable(f"{said}; `reef-bus status` says {'what to do' if why else 'why'}") from error

    def _scenario(self, request: web.Request) -> str:
        scenario = request.headers.get(SCENARIO, self.config.scenario)
        trained = (*self.config.adapters.scenarios, *self.router.world.training.adapters)
        known = [self.config.scenario, *dict.fromkeys(trained)]
        if scenario not in known:
            has = ", ".join(map(repr, known))
            raise Rejected(f"scenario {scenario!r} is not known here; this deployment has {has}", 404)
        return scenario


def _report(body: bytes) -> ReportRequest:
    try:
        report = msgspec.json.decode(body, type=ReportRequest)
    except msgspec.ValidationError as error:
        raise Rejected(f"the report does not fit: {error}") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise Rejected(f"the body is not JSON: {error}") from error
    if not _shallow(report.metadata):
        raise Rejected(f"metadata is nested more than {MAX_DEPTH} deep")
    if not report.references or len(set(report.references)) != len(report.references):
        raise Rejected("references must name at least one receipt, and none twice")
    if not math.isfinite(report.score) or abs(report.score) > MAX_SCORE:
        raise Rejected(f"score is {report.score}; expected a finite number between -{MAX_SCORE:g} and {MAX_SCORE:g}")
    if report.agent_record_id is not None and not REPORT_ID.fullmatch(report.agent_record_id):
        raise Rejected("agent_record_id must be 1 to 128 visible ASCII characters: it becomes a header on the log")
    return report


def _shallow(value: object, left: int = MAX_DEPTH) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return left > 0 and all(_shallow(each, left - 1) for each in inner)


def _tags(request: web.Request) -> dict[str, str]:
    tags = {k.lower().removeprefix(TAG): v for k, v in request.headers.items() if k.lower().startswith(TAG)}
    if any("\udc80" <= character <= "\udcff" for value in tags.values() for character in value):
        raise Rejected(f"{TAG}… headers must be UTF-8")  # bytes that are not arrive as surrogates
    if len(tags) > MAX_TAGS or any(len(key) + len(value.encode()) > MAX_TAG_BYTES for key, value in tags.items()):
        raise Rejected(f"at most {MAX_TAGS} {TAG}… headers of {MAX_TAG_BYTES} bytes each")
    return tags


def _shown(format: ChatFormat, ids: Sequence[int]) -> str:
    """Long ones by their beginning and a digest: answers to the same prompt are one group, to others they are not."""
    text = format.shown(ids)
    if len(msgspec.json.encode(text)) <= SHOWN_BYTES:
        return text
    digest = hashlib.sha256(msgspec.json.encode(ids)).hexdigest()[:32]
    return f"{text[:SHOWN]}… ({len(ids)} tokens, {digest})"


def _hung_up(request: web.Request) -> bool:
    return request.transport is None or request.transport.is_closing()


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """A client's mistake gets a 4xx that says what was wrong, in the form that OpenAI's clients read."""
    try:
        return await handler(request)
    except Rejected as error:
        return _error(error.status, "invalid_request_error", str(error))
    except web.HTTPRequestEntityTooLarge as error:
        return _error(413, "invalid_request_error", f"the body is too large: {error.text}")
    except web.HTTPException as error:
        return _error(error.status, "invalid_request_error", f"{request.method} {request.path}: {error.reason}")
    except Unavailable as error:
        return _error(503, "unavailable", str(error))
    except Exception as error:
        log.exception("%s %s", request.method, request.path)
        return _error(500, "internal_error", str(error) if isinstance(error, ReefError) else type(error).__name__)


def _error(status: int, kind: str, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": kind, "code": status}}, status=status)


def _format(config: Config) -> ChatFormat:
    """A model folder's own, if it has a tokenizer. Raises Rejected if that cannot be used."""
    folder = Path(config.inference.model_path)
    if not config.inference.model_path:
        return DIGITS
    if not any((folder / name).exists() for name in TOKENIZER):
        return _without_tokenizer(folder)
    try:
        from consumers.reef_gateway.hugging_face import read
    except ModuleNotFoundError as error:
        raise Rejected(f"{folder} has a tokenizer, which needs an extra: pip install 'reef-bus[chat]'") from error
    return read(folder)


def _without_tokenizer(folder: Path) -> ChatFormat:
    """The demo's folders have none, and its sixteen tokens."""
    try:
        found = msgspec.json.decode((folder / "config.json").read_bytes(), type=dict[str, Any]).get("vocab_size")
    except (OSError, msgspec.MsgspecError) as error:
        raise Rejected(f"{folder / 'config.json'} cannot be read: {error}") from error
    if found != VOCAB:
        raise Rejected(f"{folder} has {found} tokens and no {TOKENIZER[0]}: it belongs beside config.json")
    return DIGITS


async def _build(config: Config, journal: Journal, me: Me, stack: contextlib.AsyncExitStack) -> Role:
    recorder = Recorder(journal, ArtifactStore(config.artifact_root()), f"gateway/{me.id}", me.boot)
    await recorder.start(stack)
    session = await stack.enter_async_context(
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None, sock_connect=5)
        )
    )
    gateway = Gateway(config, me, Router(session), recorder, await blocking(_format, config))
    app = web.Application(middlewares=[errors], client_max_size=config.gateway.max_body_bytes)
    app.add_routes(gateway.routes())
    url = await listen(app, config.gateway.host, config.gateway.port, stack)
    log.info("listening on %s", url)
    return gateway


def run(config: Config, id_: str) -> int:
    """Run a gateway in this process; returns its exit status."""
    return process.run(id_, config, _build)
