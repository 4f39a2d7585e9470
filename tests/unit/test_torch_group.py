"""Transport torch by itself: which kind of group, what ends one, and that no process waits for an abandoned one."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from reef_bus.artifacts import ArtifactStore
from reef_bus.config import build
from reef_bus.errors import Rejected, TransferError
from reef_bus.manifest import describe
from reef_bus.transport import torch_backends, transports
from reef_bus.transport.door import Answer
from reef_bus.transport.torch_backends import Gloo, Nccl, group, missing
from reef_bus.transport.torch_group import TorchTransport
from tests.contract.peer import VERSION, peer
from tests.transfers import BIG, fails, hear, message, offered, pieces, receive, run, strange_sender, works

ROOT = Path(__file__).resolve().parents[2]
NO_NCCL = not torch.distributed.is_nccl_available() or not torch.cuda.is_available()
GPUS = torch.cuda.device_count()
without_nccl = pytest.mark.skipif(not NO_NCCL, reason="this PyTorch has NCCL, and a GPU")
on_gpus = pytest.mark.skipif(NO_NCCL or GPUS < 2, reason=f"NCCL between two GPUs; this machine has {GPUS}")


# Which kind.


def test_between_cpus_groups_are_gloos() -> None:
    assert isinstance(group("cpu"), Gloo) and missing("cpu") == ""


@without_nccl
def test_where_nccl_is_not_the_refusal_says_what_was_found_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(
        TransferError, match=r"refused: .*found PyTorch .*, 0 GPUs; or set publication.torch-device to cpu"
    ):
        group("cuda")
    with pytest.raises(Rejected, match=r"transport torch cannot work here: needs a build of PyTorch with NCCL"):
        transports(ArtifactStore(tmp_path), use=("torch",), torch_device="cuda")
    transports(ArtifactStore(tmp_path), use=("tcp",), torch_device="cuda")


def test_a_gpu_that_this_process_does_not_see_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert missing("cuda:2") == "this process sees 2 GPUs; set publication.torch-device to one of them"
    assert isinstance(group("cuda:1"), Nccl) and isinstance(group("cuda"), Nccl)


def test_the_configuration_knows_two_devices() -> None:
    assert build("here", {"publication": {"torch-device": "cuda"}}).publication.torch_device == "cuda"
    with pytest.raises(Rejected, match=r"publication\.torch-device is 'tpu'; expected cpu or cuda"):
        build("here", {"publication": {"torch-device": "tpu"}})


def test_ends_with_different_kinds_of_groups_part_before_they_wait_for_each_other() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await hear(reader)
        for answer in (Answer(), Answer(message="nccl 127.0.0.1:1")):
            writer.write(message(msgspec.json.encode(answer)))
        await reader.read()

    async def story() -> None:
        await works(TorchTransport())
        async with strange_sender("torch", talk) as ticket:
            said = await fails("mismatch", receive(TorchTransport(), ticket, describe(pieces(7)), pieces(0)))
        assert "the sender's group is 'nccl', expected gloo" in said

    run(story())


# NCCL, as far as it goes without a GPU: its polling and its end, over a group that stands still.


class Standing:
    """A group and its operation, neither of which ever moves."""

    def __init__(self) -> None:
        self.begun, self.aborted = threading.Event(), threading.Event()

    def recv(self, tensors: list[Any], peer: int, tag: int) -> Standing:
        self.begun.set()
        return self

    def is_completed(self) -> bool:
        return False

    def abort(self) -> None:
        self.aborted.set()


def test_abort_ends_an_operation_that_waits_and_nccls_own_group() -> None:
    ours, theirs, said = Nccl("cuda"), Standing(), list[str]()
    ours._group, ours._bucket = theirs, torch.zeros(8, dtype=torch.uint8)

    def move() -> None:
        try:
            ours.move("recv", torch.zeros(8, dtype=torch.uint8), 0)
        except TransferError as error:
            said.append(error.cause)

    thread = threading.Thread(target=move)
    thread.start()
    assert theirs.begun.wait(5) and not theirs.aborted.is_set()
    ours.abort()
    thread.join(5)
    assert said == ["closed"] and theirs.aborted.wait(5)
    ours.abort()  # safe to repeat


def test_nccls_watchdog_is_told_only_about_our_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    monkeypatch.delenv(name, raising=False)
    with torch_backends._harmless():
        assert os.environ[name] == "0"
    assert name not in os.environ
    monkeypatch.setenv(name, "1")
    with torch_backends._harmless():
        assert os.environ[name] == "0"
    assert os.environ[name] == "1"


@pytest.mark.gpu
@on_gpus
def test_nccl_between_two_gpus() -> None:
    async def story() -> None:
        sender, receiver = TorchTransport(device="cuda:0"), TorchTransport(device="cuda:1")
        source, target = pieces(VERSION, BIG), pieces(0, BIG)
        async with offered(sender, source) as offer:
            await receive(receiver, offer.ticket, describe(source), target, stall_s=15)
        assert describe(target) == describe(source)

    run(story())


@pytest.mark.gpu
@on_gpus
@pytest.mark.parametrize("strike", ["kill", "stop"])
def test_nccl_outlives_a_sender_that_ends_in_the_middle(strike: str) -> None:
    """Needs a sender of its own process on cuda:0; NCCL's watchdog must leave this one alone."""

    async def story() -> None:
        middle, source, target = asyncio.Event(), pieces(VERSION, BIG), pieces(0, BIG)
        sender, receiver = TorchTransport(device="cuda:0"), TorchTransport(device="cuda:1")
        async with offered(sender, source) as offer:
            transfer = asyncio.create_task(
                receive(receiver, offer.ticket, describe(source), target, progress=lambda _: middle.set())
            )
            await middle.wait()
            if strike == "kill":
                await offer.close()
            else:
                transfer.cancel()
            await asyncio.wait({transfer}, timeout=5)
            assert transfer.done()
        async with offered(sender, source) as offer:
            await receive(receiver, offer.ticket, describe(source), target, stall_s=15)
        assert describe(target) == describe(source)

    run(story())


# The end of a process.

WAITS = """
import sys, msgspec
from tests.transfers import *
from reef_bus.transport.torch_group import TorchTransport

async def story():
    ticket, middle = msgspec.json.decode(sys.argv[1], type=Ticket), asyncio.Event()
    moved, target = lambda _: middle.set(), pieces(0, BIG)
    taken = receive(TorchTransport(), ticket, describe(pieces(7, BIG)), target, stall_s=60, progress=moved)
    transfer = asyncio.create_task(taken)
    await middle.wait()
    print("begun", flush=True)
    sys.stdin.readline()
    await asyncio.sleep(0.5)
    transfer.cancel()
    await asyncio.wait({transfer})
    print("cancelled" if transfer.cancelled() else "over", flush=True)

asyncio.run(story())
"""
"""A receiver whose group waits for a peer that was stopped in the middle, and that is then cancelled."""


def test_a_process_ends_at_once_although_its_group_still_waits(tmp_path: Path) -> None:
    """A role's grace is 5 s; gloo would wait for all of the deadline, which is a minute here."""
    with peer("send", tmp_path, "torch") as sender:
        command = [sys.executable, "-c", WAITS, asyncio.run(sender.said())]
        with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as ours:
            assert ours.stdin is not None and ours.stdout is not None
            assert ours.stdout.readline() == "begun\n"
            sender.stop()
            ours.stdin.write("\n")
            ours.stdin.flush()
            assert ours.stdout.readline() == "cancelled\n"
            assert ours.wait(10) == 0
