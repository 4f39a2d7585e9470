"""The gateway's parts: the recorder writes once and knows every receipt, the router waits, asks again, and lets go.

Knows: an in-memory journal, a real artifact store, engines that are functions. Must not know: a model.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from multidict import CIMultiDict

from consumers.reef_gateway import recorder as recorder_module
from consumers.reef_gateway import role as role_module
from consumers.reef_gateway import router as router_module
from consumers.reef_gateway.chat import parse
from consumers.reef_gateway.recorder import Recorder
from consumers.reef_gateway.role import Gateway
from consumers.reef_gateway.router import Router
from reef_bus.artifacts import ArtifactStore
from reef_bus.backends import Completion, Generated, Prompt
from reef_bus.config import Config
from reef_bus.config import Gateway as GatewayConfig
from reef_bus.core.effects import Me
from reef_bus.core.membership import Engine
from reef_bus.core.world import World
from reef_bus.errors import ContractError, Rejected, Unavailable
from reef_bus.events import Blob, Draft, InferenceRecorded, Recorded
from reef_bus.http import listen
from reef_bus.journal import RECORDS, MemoryJournal, MemoryStreams
from reef_bus.producer import SCENARIO
from reef_bus.samples import TokenRow, decode_rows
from tests.facts import (
    E0,
    E1,
    FROZEN,
    MATH,
    SERVING,
    adapter_damaged,
    excluded,
    joined,
    left,
    name,
    target,
    trained,
    unloaded,
)
from tests.loop import until
from tests.spec import Step, by, given
from tests.unit.test_adapters import ONE

ROW = TokenRow(prompt=(11, 7, 10), answer=(1, 2), logprobs=(-1.0, -2.0), load_ids=("inc:0", "inc:0"))
PROMPT = Prompt(ids=(11, 7, 10), max_tokens=2)


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "RETRY_S", 0.01)
    monkeypatch.setattr(router_module, "BACK_OFF_S", 0.005)


def answer(record: str, scenario: str = "digit") -> InferenceRecorded:
    return InferenceRecorded(
        scenario=scenario,
        record=record,
        engine="e0",
        boot="e0.1",
        load_id="inc:0",
        as_of=7,
        done_as_of=7,
        prompt="7",
        answer="12",
        prompt_tokens=3,
        answer_tokens=2,
        temperature=1.0,
        blob=Blob("sha", 1),
        row=0,
        tags={},
    )


@contextlib.asynccontextmanager
async def recording(journal: MemoryJournal, folder: Path, boot: str = "g1") -> AsyncIterator[Recorder]:
    async with contextlib.AsyncExitStack() as stack:
        found = Recorder(journal, ArtifactStore(folder), f"gateway/{boot}", boot)
        await found.start(stack)
        yield found


async def report(found: Recorder, *references: str, score: float = 1.0, id_: str | None = None) -> tuple[str, bool]:
    return await found.report("digit", id_, references, score, "", {})


def stored(journal: MemoryJournal) -> list[str]:
    return [message.subject.rpartition(".")[2] for message in journal.streams.messages[RECORDS]]


# -- recorder: answers


async def test_answers_that_finish_together_share_one_blob(tmp_path: Path) -> None:
    async with recording(MemoryJournal(MemoryStreams()), tmp_path) as found:
        rows = [msgspec.structs.replace(ROW, answer=(i, i)) for i in range(3)]
        kept = await asyncio.gather(*(found.row(row) for row in rows))
        assert len({blob for blob, _ in kept}) == 1
        read = decode_rows(found.store.get(kept[0][0].digest))
        assert [read[index] for _, index in kept] == rows


@pytest.mark.parametrize("error", [Unavailable("disk full"), ValueError("a defect")])
async def test_a_store_that_fails_is_told_to_who_waits_and_the_next_answer_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    async with recording(MemoryJournal(MemoryStreams()), tmp_path) as found:

        def fail(data: bytes) -> Blob:
            raise error

        with monkeypatch.context() as patched:
            patched.setattr(found.store, "put", fail)
            with pytest.raises(type(error)):
                async with asyncio.timeout(1):
                    await found.row(ROW)
        async with asyncio.timeout(1):
            assert (await found.row(ROW))[1] == 0


async def test_a_lost_acknowledgement_is_one_record(tmp_path: Path) -> None:
    lost = iter([True, True, False])
    journal = MemoryJournal(MemoryStreams(), lose_ack=lambda draft: next(lost))
    async with recording(journal, tmp_path) as found:
        await found.answer(answer("rec-1"))
    assert stored(journal) == ["InferenceRecorded"]


# -- recorder: reports


async def test_a_report_is_recorded_once_and_its_repeat_is_a_duplicate(tmp_path: Path) -> None:
    journal = MemoryJournal(MemoryStreams())
    async with recording(journal, tmp_path) as found:
        await found.answer(answer("rec-1"))
        first, second = await report(found, "rec-1"), await report(found, "rec-1")
    assert first[0] == second[0] and (first[1], second[1]) == (False, True)
    assert stored(journal) == ["InferenceRecorded", "ReportReceived"]


async def test_the_same_report_with_other_content_is_a_conflict(tmp_path: Path) -> None:
    journal = MemoryJournal(MemoryStreams())
    async with recording(journal, tmp_path) as found:
        await found.answer(answer("rec-1"))
        await report(found, "rec-1", score=1.0)
        with pytest.raises(Rejected) as refused:
            await report(found, "rec-1", score=0.0)
    assert refused.value.status == 409 and len(stored(journal)) == 2


async def test_two_gateways_that_race_with_different_scores_record_one_and_refuse_the_other(tmp_path: Path) -> None:
    streams = MemoryStreams()
    async with (
        recording(MemoryJournal(streams), tmp_path, "g1") as one,
        recording(MemoryJournal(streams), tmp_path, "g2") as two,
    ):
        await one.answer(answer("rec-1"))
        found = await asyncio.gather(
            report(one, "rec-1", score=1.0), report(two, "rec-1", score=0.0), return_exceptions=True
        )
    refused = [each for each in found if isinstance(each, Rejected)]
    assert [each.status for each in refused] == [409] and len(streams.messages[RECORDS]) == 2


async def test_another_gateways_receipt_is_known_here(tmp_path: Path) -> None:
    streams = MemoryStreams()
    async with (
        recording(MemoryJournal(streams), tmp_path, "g1") as one,
        recording(MemoryJournal(streams), tmp_path, "g2") as two,
    ):
        await one.answer(answer("rec-1"))
        assert (await report(two, "rec-1"))[1] is False


async def test_an_unknown_receipt_and_one_of_another_scenario_are_not_found(tmp_path: Path) -> None:
    journal = MemoryJournal(MemoryStreams())
    async with recording(journal, tmp_path) as found:
        await found.answer(answer("rec-1", scenario="chess"))
        for reference in ("rec-0", "rec-1"):
            with pytest.raises(Rejected) as refused:
                await report(found, reference)
            assert refused.value.status == 404 and reference in str(refused.value)


async def test_a_receipt_given_as_the_reports_own_id_is_refused(tmp_path: Path) -> None:
    """Both are ids on one stream: the broker would take the report for the answer sent again."""
    journal = MemoryJournal(MemoryStreams())
    async with recording(journal, tmp_path) as found:
        await found.answer(answer("rec-1"))
        with pytest.raises(Rejected) as refused:
            await report(found, "rec-1", id_="rec-1")
    assert refused.value.status == 409 and len(stored(journal)) == 1


class Slow(MemoryJournal):
    """Delivers one event at a time, each when it is let."""

    def __init__(self, streams: MemoryStreams) -> None:
        super().__init__(streams)
        self.let = asyncio.Semaphore(0)

    async def follow(self, stream: str, after: int = 0, last_id: str = "") -> AsyncIterator[list[Recorded]]:
        async for batch in super().follow(stream, after, last_id):
            for recorded in batch:
                await self.let.acquire()
                yield [recorded]


async def test_a_restarted_gateway_judges_a_repeat_on_the_whole_stream(tmp_path: Path) -> None:
    """A broker forgets ids after its window: then only the index knows that the report is there."""
    streams = MemoryStreams()
    async with recording(MemoryJournal(streams), tmp_path, "g1") as found:
        await found.answer(answer("rec-1"))
        await report(found, "rec-1", score=1.0)
    streams.ids.clear()
    journal = Slow(streams)
    async with recording(journal, tmp_path, "g2") as found:
        journal.let.release()
        await until(lambda: found.seq == 1)  # the answer is known, its report is not yet
        asked = asyncio.create_task(report(found, "rec-1", score=0.0))
        await asyncio.sleep(0.02)
        journal.let.release()
        with pytest.raises(Rejected) as refused:
            async with asyncio.timeout(1):
                await asked
    assert refused.value.status == 409 and len(streams.messages[RECORDS]) == 2


class Unreadable(MemoryJournal):
    async def follow(self, stream: str, after: int = 0, last_id: str = "") -> AsyncIterator[list[Recorded]]:
        await asyncio.sleep(0.01)
        raise ContractError("event 2 cannot be read", 2)
        yield []


async def test_when_records_cannot_be_followed_a_report_fails_with_the_reason_and_does_not_hang(tmp_path: Path) -> None:
    journal = Unreadable(MemoryStreams())
    async with recording(journal, tmp_path) as found:
        await found.answer(answer("rec-1"))
        with pytest.raises(ContractError, match="event 2"):
            async with asyncio.timeout(1):
                await report(found, "rec-1")


# -- router


Hands = Callable[[Engine], Awaitable[Generated | None]]


class Scripted(Router):
    """Engines are functions."""

    def __init__(self, hands: Hands) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self.hands = hands
        self.asked: list[str] = []

    async def _post(self, engine: Engine, prompt: Prompt) -> Generated | None:
        self.asked.append(engine.boot)
        return await self.hands(engine)


def generated(engine: Engine, load_id: str = "inc:0", as_of: int = 7) -> Generated:
    done = Completion(ids=(1, 2), logprobs=(-1.0, -2.0), finish_reason="length")
    return Generated(
        engine=engine.id, boot=engine.boot, load_id=load_id, as_of=as_of, done_as_of=as_of, completion=done
    )


async def at_once(engine: Engine) -> Generated:
    return generated(engine)


def world(*history: Step) -> World:
    return given(*history).world


async def test_a_request_waits_until_an_engine_may_generate() -> None:
    router = Scripted(at_once)
    router.moved(world(*SERVING[:5]))
    asked = asyncio.create_task(router.generate(PROMPT))
    await asyncio.sleep(0.02)
    assert not asked.done() and router.asked == []
    router.moved(world(*SERVING))
    assert (await asked).load_id == "inc:0"


async def test_load_spreads_over_the_engines() -> None:
    release = asyncio.Event()

    async def hold(engine: Engine) -> Generated:
        await release.wait()
        return generated(engine)

    router = Scripted(hold)
    router.moved(world(*SERVING))
    asked = [asyncio.create_task(router.generate(PROMPT)) for _ in range(6)]
    await until(lambda: len(router.asked) == 6)
    assert router.in_flight == {"e0.1": 3, "e1.1": 3}
    release.set()
    await asyncio.gather(*asked)
    assert router.in_flight == {}


async def test_an_engine_that_refuses_at_once_does_not_swallow_a_request_that_another_could_serve() -> None:
    """A dead one always has the fewest in flight."""
    release = asyncio.Event()

    async def hands(engine: Engine) -> Generated:
        if engine.id == "e0":
            raise aiohttp.ClientConnectionError("refused")
        await release.wait()
        return generated(engine)

    router = Scripted(hands)
    router.moved(world(*SERVING))
    asked = [asyncio.create_task(router.generate(PROMPT)) for _ in range(4)]
    await until(lambda: router.in_flight.get("e1.1", 0) == 4, seconds=1.0)
    release.set()
    assert {found.engine for found in await asyncio.gather(*asked)} == {"e1"}


async def test_an_engine_that_breaks_off_alone_is_asked_again() -> None:
    calls = iter([ConnectionResetError(), None, "answer"])

    async def hands(engine: Engine) -> Generated | None:
        found = next(calls)
        if isinstance(found, Exception):
            raise found
        return generated(engine, as_of=6) if found else None

    router = Scripted(hands)
    router.moved(world(*SERVING[:6]))
    assert (await router.generate(PROMPT)).engine == "e0"
    assert router.asked == ["e0.1"] * 3 and router.in_flight == {}


async def test_a_request_at_an_engine_that_is_excluded_is_asked_elsewhere() -> None:
    async def hands(engine: Engine) -> Generated:
        await asyncio.sleep(60 if engine.id == "e0" else 0)
        return generated(engine)

    router = Scripted(hands)
    router.moved(world(*SERVING))
    asked = asyncio.create_task(router.generate(PROMPT))
    await until(lambda: router.asked == ["e0.1"])
    router.moved(world(*SERVING, excluded("e0")))
    async with asyncio.timeout(1):
        assert (await asked).engine == "e1"
    assert router._gone.keys() == {"e1.1"}


async def test_a_request_at_a_boot_that_was_replaced_is_asked_elsewhere() -> None:
    async def hands(engine: Engine) -> Generated:
        await asyncio.sleep(60 if engine.boot == "e0.1" else 0)
        return generated(engine)

    router = Scripted(hands)
    router.moved(world(*SERVING))
    asked = asyncio.create_task(router.generate(PROMPT))
    await until(lambda: router.asked == ["e0.1"])
    router.moved(world(*SERVING, by("e0.2", joined("e0"))))
    async with asyncio.timeout(1):
        assert (await asked).boot == "e1.1"


async def test_a_fence_breaks_nothing_off_the_request_waits_at_its_engine() -> None:
    release = asyncio.Event()

    async def hands(engine: Engine) -> Generated:
        await release.wait()
        return generated(engine)

    router = Scripted(hands)
    router.moved(world(*SERVING))
    asked = asyncio.create_task(router.generate(PROMPT))
    await until(lambda: len(router.asked) == 1)
    router.moved(world(*SERVING, *trained("c1"), target(1, "c1", E0, E1)))
    release.set()
    assert (await asked).load_id == "inc:0" and len(router.asked) == 1


async def test_an_answer_is_held_until_this_fold_is_as_far_as_the_engines() -> None:
    async def hands(engine: Engine) -> Generated:
        return generated(engine, as_of=12)

    router, history = Scripted(hands), (*SERVING, *trained("c1"))
    router.moved(world(*SERVING))
    asked = asyncio.create_task(router.generate(PROMPT))
    await asyncio.sleep(0.02)
    assert not asked.done()
    router.moved(world(*history))
    assert (await asked).as_of == 12


async def test_an_answer_by_a_release_that_nobody_committed_is_never_given() -> None:
    load_ids = iter(["inc:9", "inc:0"])

    async def hands(engine: Engine) -> Generated:
        return generated(engine, load_id=next(load_ids))

    router = Scripted(hands)
    router.moved(world(*SERVING))
    assert (await router.generate(PROMPT)).load_id == "inc:0" and len(router.asked) == 2


async def test_what_the_engine_cannot_serve_is_the_clients_mistake_and_not_asked_again() -> None:
    async def hands(engine: Engine) -> Generated:
        raise Rejected("no")

    router = Scripted(hands)
    router.moved(world(*SERVING))
    with pytest.raises(Rejected):
        await router.generate(PROMPT)
    assert len(router.asked) == 1 and router.in_flight == {}


async def test_a_cancelled_request_leaves_nothing_in_flight() -> None:
    async def hands(engine: Engine) -> Generated:
        await asyncio.sleep(60)
        return generated(engine)

    router = Scripted(hands)
    router.moved(world(*SERVING))
    asked = asyncio.create_task(router.generate(PROMPT))
    await until(lambda: len(router.asked) == 1)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    assert router.in_flight == {}
    router.moved(world(*SERVING, excluded("e0")))  # whoever waited for it is gone, and that is no error


# -- routes


class Deaf(MemoryJournal):
    """No append is ever acknowledged, or stored."""

    async def append(self, draft: Draft, prev: int) -> Any:
        raise Unavailable("no acknowledgement")


@contextlib.asynccontextmanager
async def gateway(
    journal: MemoryJournal, folder: Path, timeout_s: float = 30.0
) -> AsyncIterator[tuple[str, aiohttp.ClientSession, Gateway]]:
    async with contextlib.AsyncExitStack() as stack:
        recorder = Recorder(journal, ArtifactStore(folder), "gateway/g1", "g1")
        await recorder.start(stack)
        router = Scripted(at_once)
        router.moved(world(*SERVING))
        config = Config(gateway=GatewayConfig(timeout_s=timeout_s))
        found = Gateway(config, Me("gateway", "g1"), router, recorder)
        app = web.Application(middlewares=[role_module.errors])
        app.add_routes(found.routes())
        url = await listen(app, "127.0.0.1", 0, stack)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        yield url, session, found


QUESTION = {"model": "reef-digit", "messages": [{"role": "user", "content": "7"}]}


async def test_a_chat_is_recorded_before_it_is_answered(tmp_path: Path) -> None:
    journal = MemoryJournal(MemoryStreams())
    async with gateway(journal, tmp_path) as (url, session, _):
        async with session.post(f"{url}/v1/chat/completions", json=QUESTION) as reply:
            body = await reply.json()
    assert body["choices"][0]["message"]["content"] == "12" and reply.headers["x-reef-load-id"] == "inc:0"
    assert reply.headers["x-reef-agent-record-id"] == body["id"] and stored(journal) == ["InferenceRecorded"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/reef/report"])
async def test_a_log_that_is_away_is_a_503_in_time(tmp_path: Path, path: str) -> None:
    async with gateway(Deaf(MemoryStreams()), tmp_path, 0.2) as (url, session, found):
        found.recorder.answers["rec-1"] = "digit"
        body = QUESTION if "chat" in path else {"score": 1, "references": ["rec-1"]}
        async with asyncio.timeout(10), session.post(url + path, json=body) as reply:
            assert reply.status == 503 and "0.2 s" in (await reply.json())["error"]["message"]


async def test_a_scenario_whose_adapter_nobody_can_load_is_a_503_that_says_so(tmp_path: Path) -> None:
    lost = (unloaded("e0", name(MATH, 1)), adapter_damaged("e0", MATH, 1, "no blob at /store/aa: copy it there"))
    async with gateway(MemoryJournal(MemoryStreams()), tmp_path, 0.2) as (url, session, found):
        found.router = Router(session)
        found.router.moved(world(*FROZEN, *ONE, *lost, left("e1")))
        async with session.post(f"{url}/v1/chat/completions", json=QUESTION, headers={SCENARIO: MATH}) as reply:
            said = (await reply.json())["error"]["message"]
    assert reply.status == 503 and "e0 cannot load math's adapter inc:1: no blob at /store/aa: copy it there" in said
    assert said.endswith("`reef-bus status` says what to do")


async def test_a_defect_is_a_500_in_the_form_that_clients_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway(MemoryJournal(MemoryStreams()), tmp_path) as (url, session, found):

        async def fail(*_: Any) -> str:
            raise ZeroDivisionError

        monkeypatch.setattr(found, "_record", fail)
        async with session.post(f"{url}/v1/chat/completions", json=QUESTION) as reply:
            assert reply.status == 500 and (await reply.json())["error"]["message"] == "ZeroDivisionError"


@pytest.mark.parametrize(
    ("value", "status"), [(b"g-1", 200), ("Größe".encode(), 200), ("Größe".encode("latin-1"), 400), (b"x" * 257, 400)]
)
async def test_tags_are_text_of_a_bounded_size(tmp_path: Path, value: bytes, status: int) -> None:
    """What is not UTF-8 could not be written to the log: said before anything is generated."""
    journal = MemoryJournal(MemoryStreams())
    async with gateway(journal, tmp_path) as (url, _, found):
        body = msgspec.json.encode(QUESTION)
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
        writer.write(head.encode() + b"X-Reef-Tag-Group: " + value + b"\r\n\r\n" + body)
        said = await reader.read()
        writer.close()
        await writer.wait_closed()
        assert said.split(b" ")[1] == str(status).encode(), said
        assert isinstance(found.router, Scripted) and len(found.router.asked) == (status == 200)
    assert len(stored(journal)) == (status == 200)


def test_tags_are_counted_in_bytes() -> None:
    request = _Headers({"x-reef-tag-a": "ü" * 128})
    with pytest.raises(Rejected):
        role_module._tags(request)  # type: ignore[arg-type]


class _Headers:
    def __init__(self, headers: dict[str, str]) -> None:
        self.headers = CIMultiDict(headers)


@pytest.mark.parametrize(("depth", "fits"), [(31, True), (32, False), (980, False), (100_000, False)])
def test_metadata_that_some_reader_could_not_walk_is_refused(depth: int, fits: bool) -> None:
    """It would be stored, and end every follower of the stream, for good."""
    nested = b"[" * depth + b"]" * depth
    body = b'{"score": 1, "references": ["rec-1"], "metadata": {"a": ' + nested + b"}}"
    with contextlib.nullcontext() if fits else pytest.raises(Rejected):
        role_module._report(body)


def test_a_chat_nested_too_deep_is_refused() -> None:
    nested = b"[" * 100_000 + b"]" * 100_000
    with pytest.raises(Rejected, match="not JSON"):
        parse(b'{"model": "reef-digit", "messages": [{"role": "user", "content": ' + nested + b"}]}", "reef-digit")


@pytest.mark.parametrize(
    ("id_", "fits"),
    [("r-1", True), ("0b5c/7:x.y", True), ("", False), ("a b", False), ("a\r\nNats-Rollup: all", False), ("é", False)],
)
def test_a_reports_own_id_can_stand_in_a_header(id_: str, fits: bool) -> None:
    body = msgspec.json.encode({"score": 1, "references": ["rec-1"], "agent_record_id": id_})
    with contextlib.nullcontext() if fits else pytest.raises(Rejected, match="agent_record_id"):
        role_module._report(body)
