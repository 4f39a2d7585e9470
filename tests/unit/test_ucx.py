"""Transport ucx by itself: what is gone when a transfer ends, what it does to its process, and whom it waits for."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from reef_bus.artifacts import ArtifactStore
from reef_bus.config import load
from reef_bus.errors import Rejected, TransferError
from reef_bus.manifest import describe
from reef_bus.transport import Ticket, transports
from reef_bus.transport import ucx as module
from reef_bus.transport.ucx import UcxTransport
from tests.contract.peer import VERSION, peer
from tests.transfers import BIG, PUBLICATION, fails, offered, params, pieces, receive, run, works

ROOT = Path(__file__).resolve().parents[2]
WINDOW_BYTES = 32 << 20  # two buckets
needs_ucxx = pytest.mark.usefixtures("ucx")


@pytest.fixture(params=params(("ucx",)))
def ucx(request: pytest.FixtureRequest) -> UcxTransport:
    return UcxTransport(stall_s=5.0)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def fresh(code: str, **environment: str) -> str:
    """What a new interpreter prints that makes one transfer, then runs `code`."""
    begin = "from tests.transfers import *\nfrom reef_bus.transport import ucx\nt = ucx.UcxTransport()\nrun(works(t))\n"
    known = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    command, environment = [sys.executable, "-c", begin + code], {**known, **environment}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# What is gone when a transfer ends.


@pytest.mark.parametrize("how", ["cancelled", "cancelled twice", "full", "over"])
def test_when_a_transfer_ends_nothing_is_left_through_which_a_peer_could_write(
    ucx: UcxTransport, how: str, tmp_path: Path
) -> None:
    async def story() -> None:
        await works(ucx)
        middle = asyncio.Event()

        def progress(_: int) -> None:
            middle.set()
            if how == "full":
                raise MemoryError

        with peer("send", ArtifactStore(tmp_path).root, "ucx") as sender:
            ticket = msgspec.json.decode(await sender.said(), type=Ticket)
            before, source = descriptors(), pieces(VERSION, BIG)
            transfer = asyncio.create_task(
                receive(ucx, ticket, describe(source), pieces(0, BIG), progress=progress, stall_s=5)
            )
            await middle.wait()
            if how.startswith("cancelled"):
                transfer.cancel()
            if how == "cancelled twice":
                await asyncio.sleep(0)
                transfer.cancel()
            await asyncio.wait({transfer})
            assert descriptors() == before  # the worker's sockets too: at once, not when somebody collects garbage
            assert (transfer.cancelled(), how == "over") == (how.startswith("cancelled"), not _failed(transfer))

    run(story())


def test_a_sender_that_retracts_from_a_stopped_receiver_keeps_nothing(ucx: UcxTransport, tmp_path: Path) -> None:
    async def story() -> None:
        await works(ucx)
        before = descriptors()
        for _ in range(3):
            async with offered(ucx, pieces(VERSION, BIG)) as offer:
                ticket = msgspec.json.encode(offer.ticket).decode()
                with peer("receive", ArtifactStore(tmp_path).root, "ucx", ticket) as receiver:
                    assert await receiver.said() == "begun"
                    receiver.stop()
                    await offer.close()
            assert descriptors() == before

    run(story())


def _failed(transfer: asyncio.Task[int]) -> bool:
    return transfer.cancelled() or transfer.exception() is not None


def test_while_the_loop_stands_still_no_more_than_two_buckets_arrive(ucx: UcxTransport, tmp_path: Path) -> None:
    async def story() -> None:
        await works(ucx)
        source, target = pieces(VERSION, 3 * WINDOW_BYTES), pieces(0, 3 * WINDOW_BYTES)
        written: list[int] = []

        def progress(count: int) -> None:
            if not written:
                time.sleep(0.5)
                written.append(len(bytes(target["w"].data).rstrip(b"\0")) - count)

        async with offered(ucx, source) as offer:
            await receive(ucx, offer.ticket, describe(source), target, progress=progress, stall_s=5)
        assert written[0] <= WINDOW_BYTES
        assert describe(target) == describe(source)

    run(story())


# What it does to its process.


@needs_ucxx
def test_a_terminal_that_closes_still_ends_the_process_and_stdout_is_the_roles_own() -> None:
    caught = int(fresh("print(open('/proc/self/status').read().split('SigCgt:')[1].split()[0])"), 16)
    assert not caught & 1  # the lowest bit is SIGHUP, which UCX takes for its debugger; and nothing else was printed


@needs_ucxx
def test_the_users_environment_overrides_what_we_tell_ucx() -> None:
    told = "c = t._context.config; print(c['TLS'], c['RNDV_SCHEME'])"
    assert fresh(told) == "^sm put_zcopy"
    assert fresh(told, UCX_TLS="tcp,self", UCX_RNDV_SCHEME="get_zcopy") == "tcp,self get_zcopy"


def test_who_waits_costs_next_to_nothing(ucx: UcxTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        await works(ucx)
        monkeypatch.setattr(module._Lane, "send", lambda lane, parts, moved: lane.linger())
        source = pieces(VERSION, BIG)
        async with offered(ucx, source) as offer:
            transfer = asyncio.create_task(receive(ucx, offer.ticket, describe(source), pieces(0, BIG), stall_s=5))
            await asyncio.sleep(0.5)
            since = time.process_time()
            await asyncio.sleep(1)
            assert time.process_time() - since < 0.2  # of two seconds, both ends together; who polls takes all of them
            transfer.cancel()
            await asyncio.gather(transfer, return_exceptions=True)

    run(story())


@needs_ucxx
def test_settings_that_ucx_cannot_use_are_found_at_the_start_and_named() -> None:
    broken = "print(ucx.UcxTransport().lacks())"
    said = fresh(f"import os; os.environ['UCX_TLS'] = 'none'; ucx._SETTINGS.pop('TLS'); {broken}")
    assert said.startswith("closed: UCX says: ")


# Whom it waits for.


def test_a_stranger_at_the_listener_gets_nothing(ucx: UcxTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    """It speaks something else than UCX; the receiver that was meant comes after it."""
    listen, strangers = module._Lane.listen, []

    def found(lane: module._Lane) -> int:
        port = listen(lane)
        strangers.append(socket.create_connection(("127.0.0.1", port)))
        strangers[-1].sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
        return port

    async def story() -> None:
        monkeypatch.setattr(module._Lane, "listen", found)
        await works(ucx, pieces(VERSION, BIG))
        strangers[0].settimeout(1)
        assert strangers[0].recv(1 << 20) == b""
        strangers[0].close()

    run(story())


# What it needs.


def test_without_ucxx_the_refusal_names_the_line_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        module._ucxx.cache_clear()
        monkeypatch.setitem(sys.modules, "libucx", None)
        source = pieces(VERSION)
        transport = UcxTransport()
        offer = transport.offer(describe(source), source, publication=PUBLICATION, attempt=1)
        assert "pip install 'reef-bus[ucx]'" in await fails("refused", offer)
        taken = receive(transport, Ticket("ucx", "127.0.0.1:9", "token"), describe(source), pieces(0))
        assert "pip install 'reef-bus[ucx]'" in await fails("refused", taken)
        with pytest.raises(Rejected, match=r"transport ucx cannot work here: .*pip install 'reef-bus\[ucx\]'"):
            transports(ArtifactStore(tmp_path), use=("tcp", "ucx"))
        assert "ucx" in transports(ArtifactStore(tmp_path), use=("tcp", "files"))  # who does not use it is not bothered

    run(story())
    module._ucxx.cache_clear()


def test_the_example_prefers_ucx_and_can_do_without() -> None:
    config = load(ROOT / "deploy" / "examples" / "ucx.yaml", [])
    assert config.training.offers == config.inference.accepts == ("ucx", "tcp", "files")


def test_a_sender_on_ipv6_is_refused() -> None:
    async def story() -> None:
        source = pieces(VERSION)
        with pytest.raises(TransferError, match="IPv4 only, found ::1"):
            await UcxTransport("::1").offer(describe(source), source, publication=PUBLICATION, attempt=1)

    run(story())
