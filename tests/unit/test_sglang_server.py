"""An SGLang server as a process that is asked over HTTP: its start, its end, signs of life, answers, memory it lends.

Knows: stand-ins for the server. Must not know: SGLang, which need not be installed.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import psutil
import pytest

from consumers.reef_engine.sglang import borrowed, launch
from consumers.reef_engine.sglang.adapters import Held
from consumers.reef_engine.sglang.backend import SGLangEngine, _read
from consumers.reef_engine.sglang.client import Client, words
from consumers.reef_engine.sglang.launch import Process, server_flags, silent
from consumers.reef_engine.sglang.room import Room
from consumers.reef_engine.sglang.sums import Oracle, Sums
from reef_bus.backends import Prompt
from reef_bus.config import build
from reef_bus.errors import Rejected, TransferError, Unavailable
from reef_bus.sections import Adapters
from tests.unit.test_sglang import configured, model

__all__ = ["model"]  # pytest finds the fixture by its name


# -- the server's process


FAMILY = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("up", flush=True)
time.sleep({seconds})
"""


@pytest.mark.parametrize("seconds", [0, 60], ids=["it has ended by itself", "it runs"])
def test_a_server_is_ended_with_all_that_it_has_started(tmp_path: Path, seconds: int) -> None:
    process = Process(["-c", FAMILY.format(seconds=seconds)], dict(os.environ), tmp_path / "log")
    leader = psutil.Process(process.process.pid)
    wait_for(lambda: "up" in process.last_words())
    children = group_of(leader.pid) - {leader}
    assert len(children) == 1
    if not seconds:
        wait_for(lambda: leader.status() == psutil.STATUS_ZOMBIE)
    process.end()
    process.end()
    assert not psutil.wait_procs([leader, *children], timeout=5)[1]


def group_of(leader: int) -> set[psutil.Process]:
    return {each for each in psutil.process_iter() if _group(each.pid) == leader}


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


def wait_for(met: Callable[[], bool]) -> None:
    until = time.monotonic() + 10
    while not met():
        assert time.monotonic() < until
        time.sleep(0.02)


async def test_who_waits_for_a_server_hears_that_it_is_starting_and_when_it_is_given_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "SAY_S", 0.1)
    caplog.set_level("INFO")
    process = Process(["-c", "import time; print('loading', flush=True); time.sleep(60)"], {}, tmp_path / "e0.log")
    wait_for(lambda: "loading" in process.last_words())
    with pytest.raises(Unavailable, match=r"(?s)did not come up within 1 s \(inference.start-s\).*loading"):
        await process.ready(Client("http://127.0.0.1:1", ""), 1.0)
    process.end()
    said = [each.getMessage() for each in caplog.records]
    assert said and all("SGLang has been starting for" in each and str(process.out) in each for each in said)


class Lively(http.server.BaseHTTPRequestHandler):
    """Answers after a while, as long as it lives."""

    lives: ClassVar[bool]
    page: ClassVar[bool]
    looks: ClassVar[int]

    def do_GET(self) -> None:
        type(self).looks += 1
        time.sleep(0.15)
        self.send_response(200 if self.lives or self.page else 503)
        self.end_headers()
        self.wfile.write(b"{}" if self.lives else b"<html>Sign in</html>")

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def lively() -> Iterator[Client]:
    Lively.lives, Lively.page, Lively.looks = True, False, 0
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Lively)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield Client(f"http://127.0.0.1:{server.server_port}", "")
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("page", [False, True], ids=["503", "a proxy's page instead"])
async def test_a_server_that_gives_no_sign_of_life_is_given_up_after_a_while(lively: Client, page: bool) -> None:
    Lively.page = page
    watching = asyncio.create_task(silent(lively, "server_info", 0.01, 2.0))
    await asyncio.sleep(3.0)
    assert not watching.done() and Lively.looks > 3
    Lively.lives, began = False, time.monotonic()
    async with asyncio.timeout(20):
        assert await watching == f"the server at {lively.url} has given no sign of life for 2 s"
    assert time.monotonic() - began > 1.5


async def test_a_look_waits_as_long_as_a_server_may_be_silent() -> None:
    """It answers between two batches alone, and a look that was given up would be late for the next one, too."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        client = Client(f"http://127.0.0.1:{mute.getsockname()[1]}", "")
        watching = asyncio.create_task(silent(client, "server_info", 0.01, 1.0))
        mute.setblocking(False)
        asked = await asyncio.get_running_loop().sock_accept(mute)
        await asyncio.sleep(0.5)
        with pytest.raises(BlockingIOError):
            mute.accept()
        assert "no sign of life for 1 s" in await watching
        asked[0].close()


# -- answers


def said(ids: Sequence[int], **reason: Any) -> dict[str, Any]:
    spans = [{"version": "i:0", "start": 0, "end": len(ids)}]
    logprobs = [[-0.5, token, None] for token in ids]
    return {
        "output_ids": list(ids),
        "meta_info": {"output_token_logprobs": logprobs, "weight_versions": spans, "finish_reason": reason},
    }


ASKED = Prompt(ids=(1,), max_tokens=4, stop_ids=(7, 8))


@pytest.mark.parametrize(
    ("ids", "reason", "read"),
    [
        ((1, 2, 3, 4), {"type": "length", "length": 4}, "length"),
        ((1, 7), {"type": "stop", "matched": 7}, "stop"),
        ((1, 2, 3, 8), {"type": "stop", "matched": 8}, "stop"),
        ((1, 2), {"type": "abort", "message": "Abort in waiting queue"}, ""),
        ((), {"type": "abort", "message": "Abort in waiting queue"}, ""),
    ],
)
def test_an_answer_is_as_long_as_it_was_asked_for_or_ends_where_it_was_to_stop(
    ids: tuple[int, ...], reason: dict[str, Any], read: str
) -> None:
    done = _read(ASKED, said(ids, **reason)).completion
    assert (done.ids, done.logprobs, done.finish_reason) == (ids, (-0.5,) * len(ids), read)


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        ((1, 2, 3), {"type": "length", "length": 3}),
        ((), {"type": "length", "length": 0}),
        ((1, 7, 3, 4), {"type": "length", "length": 4}),
        ((1, 2, 3, 4), {"type": "stop", "matched": 4}),  # what the model's own folder calls an end
        ((1, 7), {"type": "stop", "matched": "NaN happened"}),
        ((1, 7), {"type": "stop"}),
        ((7, 8), {"type": "stop", "matched": 8}),
        ((1, 2, 3, 4, 7), {"type": "stop", "matched": 7}),
        ((), {"type": "stop", "matched": 7}),
    ],
)
def test_an_answer_of_another_length_or_end_is_not_what_was_asked_for(
    ids: tuple[int, ...], reason: dict[str, Any]
) -> None:
    """Whoever asked holds it against that, and asks again."""
    done = _read(ASKED, said(ids, **reason)).completion
    assert done.finish_reason and ASKED.reason(done.ids) != done.finish_reason


# -- HTTP


class Answers(http.server.BaseHTTPRequestHandler):
    """/200, /400 … with the body that was sent; /gone ends the connection, /half in the middle of an answer."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/gone":
            return self.connection.close()
        self.send_response(400 if self.path == "/half" else int(self.path[1:]))
        if self.path == "/half":
            self.send_header("Content-Length", "999")
            return self.end_headers()
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def client() -> Iterator[Client]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield Client(f"http://127.0.0.1:{server.server_port}", "key")
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_refusal_is_told_from_no_answer(client: Client) -> None:
    assert client.post("200", {"a": 1}) == {"a": 1}
    with pytest.raises(TransferError, match="refused: /400: 400 not that"):
        client.post("400", {"message": "not that"})
    with pytest.raises(TransferError, match="refused: /half: 400 without a word"):
        client.post("half", {})
    with pytest.raises(Unavailable, match="gave no answer to /gone"):
        client.post("gone", {})
    with pytest.raises(Unavailable, match="gave no answer to /health"):
        Client("http://127.0.0.1:1", "key").get("health")


def test_no_proxy_is_told_the_key(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    assert client.post("200", {"a": 1}) == {"a": 1}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ('{"error": {"message": "too long"}}', "too long"),
        ('{"error": "too long"}', "too long"),
        ('{"success": false, "message": "too long"}', "too long"),
        ('{"detail": "too long"}', "too long"),
        ('{"success": false}', '{"success": false}'),
        ("Flush cache failed.\n", "Flush cache failed."),
        ("", "without a word"),
        ("[1]", "[1]"),
    ],
)
def test_the_servers_words_are_found_in_each_of_its_forms(body: str, said: str) -> None:
    assert words(body) == said


class Impatient(http.server.BaseHTTPRequestHandler):
    """Answers one prompt on a connection, says that it keeps it, and closes it as the next one comes."""

    protocol_version = "HTTP/1.1"
    answered = False

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.answered:
            self.close_connection = True
            return
        self.answered = True
        meta = {
            "finish_reason": {"type": "length"},
            "output_token_logprobs": [[-1.0, 3, None]],
            "weight_versions": [{"version": "i:1", "start": 0, "end": 1}],
        }
        body = msgspec.json.encode({"output_ids": [3], "meta_info": meta})
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


async def test_a_connection_that_the_server_closes_meanwhile_costs_no_answer(model: Path, tmp_path: Path) -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Impatient)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    room, nobody = Room(model, tmp_path / "room"), Oracle([], 0, 0, {}, tmp_path / "log")
    client = Client(f"http://127.0.0.1:{server.server_port}", "key")
    engine = SGLangEngine(configured(model), client, room, nobody, "cpu", [].append, spans=False)
    assert engine.pauses == ("drain", "retract")
    try:
        for _ in range(2):
            answer = await engine.answer(Prompt(ids=(1,), max_tokens=1))
            assert answer.versions == (("i:1", 1),)
    finally:
        await engine.disconnect()
        await asyncio.to_thread(server.shutdown)
        server.server_close()


class Foreign(http.server.BaseHTTPRequestHandler):
    """What stands between us and a server: `said` to every call."""

    said: ClassVar[tuple[int, bytes]]
    paths: ClassVar[list[str]]
    elsewhere: ClassVar[str]

    def do_GET(self) -> None:
        self.paths.append(self.path)
        status, body = self.said
        self.rfile.read(int(self.headers["Content-Length"] or 0))
        self.send_response(status)
        self.send_header("Location", self.elsewhere)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def foreign(model: Path, tmp_path: Path) -> Iterator[SGLangEngine]:
    Foreign.paths, Foreign.elsewhere = [], "/elsewhere"
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Foreign)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    room, nobody = Room(model, tmp_path / "room"), Oracle([], 0, 0, {}, tmp_path / "log")
    client = Client(f"http://127.0.0.1:{server.server_port}", "key")
    config = build("test", {"adapters": {"scenarios": ["a"]}})
    held = Held(client, room, None, config, "cpu")  # type: ignore[arg-type]
    engine = SGLangEngine(configured(model), client, room, nobody, "cpu", [].append, held, spans=False)
    engine._expected["m"] = [Sums(0, "x-64", {"a": "1"})]
    yield engine
    server.shutdown()
    server.server_close()


async def test_who_waits_for_a_borrowed_server_hears_why(
    foreign: SGLangEngine, model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A wrong key, say, which no time mends."""
    monkeypatch.setattr(borrowed, "SAY_S", 0.1)
    caplog.set_level("INFO")
    Foreign.said = 401, b'{"error": "Unauthorized"}'
    waits = configured(model, **{"start-s": 0.6})
    with pytest.raises(
        Unavailable, match=r"no SGLang generates at .*\(waited 0\.6 s\): refused: /model_info: 401 Unauth"
    ):
        await borrowed.ready(foreign.client, waits, Adapters(), spans=False)
    assert any("/model_info: 401 Unauthorized" in each.getMessage() for each in caplog.records)
    Foreign.said = 200, b"<html>Sign in</html>"
    with pytest.raises(Rejected, match="is of another version than ours, by its /server_info"):
        await borrowed.ready(foreign.client, waits, Adapters(), spans=False)


OTHER = [b"<html>Sign in</html>", b"", b"{}", b"[]", b"null", b'{"weight_version": 1, "data": [1], "ranks": {}}']


@pytest.mark.parametrize("said", OTHER)
def test_an_answer_that_is_none_proves_nothing_and_is_no_defect_of_ours(foreign: SGLangEngine, said: bytes) -> None:
    Foreign.said = 200, said
    with pytest.raises(TransferError, match="protocol: /model_info: the answer is not SGLang's"):
        foreign.proof("m", "i:1")
    with pytest.raises(TransferError, match="protocol: /v1/models: the answer is not SGLang's"):
        foreign.resident()
    assert "/v1/models: the answer is not SGLang's" in foreign.unload_adapter("one")


@pytest.mark.parametrize(
    ("said", "status"),
    [
        ((400, b'{"error": {"message": "too long"}}'), 400),
        ((413, b""), 400),
        ((500, b'{"error": {"message": "Out of memory even after retracting all other requests"}}'), 400),
        ((302, b""), 503),
        ((401, b""), 503),
        ((502, b"<html>Bad Gateway</html>"), 503),
        ((503, b'{"error": {"message": "The request queue is full."}}'), 503),
        ((200, b"<html>Sign in</html>"), 503),
        ((200, b"{}"), 503),
        ((200, b""), 503),
        ((200, msgspec.json.encode(said((3,), type="length")).replace(b"[3]", b"[4]")), 503),
    ],
)
async def test_what_says_nothing_of_a_prompt_is_not_held_against_it(
    foreign: SGLangEngine, said: tuple[int, bytes], status: int
) -> None:
    Foreign.said = said
    with pytest.raises(Rejected) as found:
        await foreign.answer(Prompt(ids=(1,), max_tokens=1))
    assert found.value.status == status and Foreign.paths == ["/generate"]
    await foreign.disconnect()


@pytest.mark.parametrize("elsewhere", ["/elsewhere", "http://["])
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_nobody_is_asked_in_the_servers_place_or_given_its_key(
    foreign: SGLangEngine, status: int, elsewhere: str
) -> None:
    Foreign.said, Foreign.elsewhere = (status, b""), elsewhere
    with pytest.raises(TransferError, match=f"refused: /model_info: {status}"):
        foreign.client.get("model_info")
    with pytest.raises(TransferError, match=f"refused: /flush_cache: {status}"):
        foreign.client.post("flush_cache", {})
    assert Foreign.paths == ["/model_info", "/flush_cache"]


def test_sums_of_another_shape_prove_nothing(foreign: SGLangEngine) -> None:
    for ranks in (
        b"1",
        b"[1]",
        b'[{"checksums": {"a": "1"}}]',
        b'[{"checksums": {"a": "1"}, "parallelism_info": [{}]}]',
    ):
        Foreign.said = 200, b'{"weight_version": "i:1", "ranks": %s}' % ranks
        with pytest.raises(TransferError, match="protocol: /weights_checker: the answer is not SGLang's"):
            foreign.proof("m", "i:1")
    right = b'[{"checksums": {"a": "1"}, "parallelism_info": [{"tp_rank": 0, "tp_size": 1}]}]'
    Foreign.said = 200, b'{"weight_version": "i:1", "ranks": %s}' % right
    assert foreign.proof("m", "i:1").flaw == ""


# -- memory


class Busy(http.server.BaseHTTPRequestHandler):
    """Writes down what it is asked; `idle`: whether it would be, in time."""

    asked: ClassVar[list[tuple[str, bytes]]] = []
    idle = True

    def do_POST(self) -> None:
        self.asked.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
        refused = self.path.startswith("/flush_cache") and not self.idle
        body = b"Flush cache failed.\n" if refused else b"null"
        self.send_response(400 if refused else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def lender(model: Path, tmp_path: Path) -> Iterator[SGLangEngine]:
    Busy.asked, Busy.idle = [], True
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Busy)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    room, nobody = Room(model, tmp_path / "room"), Oracle([], 0, 0, {}, tmp_path / "log")
    client = Client(f"http://127.0.0.1:{server.server_port}", "key")
    yield SGLangEngine(configured(model), client, room, nobody, "cuda", [].append, spans=False)
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_server_waits_until_it_is_idle_and_then_gives_the_named_regions_away(lender: SGLangEngine) -> None:
    lender.release(("weights", "kv_cache"))
    lender.resume(("weights",))
    assert Busy.asked == [
        ("/flush_cache?timeout=60.0", b"{}"),
        ("/release_memory_occupation", b'{"tags":["weights","kv_cache"]}'),
        ("/resume_memory_occupation", b'{"tags":["weights"]}'),
    ]


def test_a_server_that_is_not_idle_in_time_is_not_asked_for_its_memory(lender: SGLangEngine) -> None:
    """It would end: it asserts that it is."""
    Busy.idle = False
    with pytest.raises(TransferError, match="Flush cache failed"):
        lender.release(("weights",))
    assert [path for path, _ in Busy.asked] == ["/flush_cache?timeout=60.0"]


@pytest.mark.parametrize("idle", [True, False])
def test_a_server_loads_once_it_is_idle_and_where_it_is_not_in_time_nothing(lender: SGLangEngine, idle: bool) -> None:
    """Its last answer is out a moment before that, and it would load, and refuse to drop what it had computed."""
    Busy.idle = idle
    lender.inference = msgspec.structs.replace(lender.inference, update="disk")
    with contextlib.nullcontext() if idle else pytest.raises(TransferError, match="Flush cache failed"):
        lender.take("i:1")
    asked = [path.partition("?")[0] for path, _ in Busy.asked]
    assert asked == ["/flush_cache", "/update_weights_from_disk"][: 1 + idle]


def test_a_server_can_lend_only_where_it_was_started_so(model: Path) -> None:
    found = configured(model)
    assert "--enable-memory-saver" not in server_flags(found, 1, "k", "cuda", spans=False)
    assert "--enable-memory-saver" in server_flags(found, 1, "k", "cuda", spans=False, saver=True)
    assert SGLangEngine.releases == ()
