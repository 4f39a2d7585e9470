"""The two kinds of process group that transport `torch` can make: gloo between CPUs, NCCL between GPUs.

Knows: torch.distributed, one device. Must not know: sockets, deadlines, what is in a bucket.
Buckets are CPU memory in both, because tensors are: NCCL's ends copy each to and from one bucket on their GPU.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from reef_bus.errors import TransferError

BUCKET_BYTES = 16 << 20
"""Moved by one operation, and so the unit of progress: 16 MiB in 10 s is 1.6 MB/s."""
NEVER = timedelta(days=1)
"""NCCL's own deadline ends the process, not the operation: ours, which aborts the group, comes long before."""
POLL_S = 0.0005
INSTALL = "pip install 'reef-bus[torch]'"

_environment = threading.Lock()


class Group(ABC):
    """Two ranks, used in one thread, and once; only `abort` may come from another."""

    name: str

    def __init__(self, device: str) -> None:
        self._device = device
        self._group: Any = None

    @abstractmethod
    def make(self, rank: int, store: Any, host: str, timeout: timedelta) -> None:
        """Join. Blocks until the other one has come, at the latest in the first operation."""

    @abstractmethod
    def move(self, what: str, bucket: Any, peer: int) -> None:
        """ "send" or "recv" a bucket. Blocks until it has moved."""

    @abstractmethod
    def abort(self) -> None:
        """Let go of the group, and of what waits in it if that is possible. Does not block; safe to repeat."""


class Gloo(Group):
    """Nothing ends an operation that waits in it but the operation's own timeout: its `abort` is empty (torch 2.13)."""

    name = "gloo"

    def make(self, rank: int, store: Any, host: str, timeout: timedelta) -> None:
        gloo, self._timeout = distributed().ProcessGroupGloo, timeout
        options = gloo._Options()
        options._timeout = timeout
        options._devices = [gloo.create_device(hostname=host)]
        self._group = gloo(store, rank, 2, options)

    def move(self, what: str, bucket: Any, peer: int) -> None:
        getattr(self._group, what)([bucket], peer, 0).wait(self._timeout)

    def abort(self) -> None:
        self._group = None  # with its last operation it closes


class Nccl(Group):
    """Between two GPUs: NCCL refuses two ranks on the same one."""

    name = "nccl"

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self._left = threading.Event()

    def make(self, rank: int, store: Any, host: str, timeout: timedelta) -> None:
        torch, nccl = importlib.import_module("torch"), distributed().ProcessGroupNCCL
        torch.cuda.set_device(torch.device(self._device))  # of this thread
        self._bucket = torch.empty(BUCKET_BYTES, dtype=torch.uint8, device=self._device)
        options = nccl.Options()
        options._timeout = NEVER
        with _harmless():
            self._group = nccl(store, rank, 2, options)

    def move(self, what: str, bucket: Any, peer: int) -> None:
        """Polled, because to wait for a stream of the GPU blocks until the peer moves, whatever becomes of us."""
        there = self._bucket[: bucket.numel()]
        if what == "send":
            there.copy_(bucket)
        work = getattr(self._group, what)([there], peer, 0)
        while not work.is_completed():
            if self._left.wait(POLL_S):
                raise TransferError("closed", "this end has left the group")
        work.wait()  # raises what went wrong
        if what == "recv":
            bucket.copy_(there)

    def abort(self) -> None:
        self._left.set()
        group, self._group = self._group, None
        if group is not None:
            # Not in the pair's thread, which may be inside NCCL until this has ended it.
            threading.Thread(target=_abort_of(group), name="reef-nccl-abort", daemon=True).start()


def group(device: str) -> Group:
    """The one that fits the device, "cpu", "cuda" or "cuda:1". Raises TransferError("refused") where it cannot be. The
    first time it loads torch, which takes seconds."""
    if said := missing(device):
        raise TransferError("refused", f"transport torch on {device}: {said}")
    distributed()
    return Gloo(device) if device == "cpu" else Nccl(device)


def missing(device: str) -> str:
    """What this machine lacks for a group on that device, and what to do; empty if nothing."""
    if importlib.util.find_spec("torch") is None:
        return f"needs PyTorch: {INSTALL}; or set publication.transport to tcp or files"
    if device == "cpu":
        return ""
    torch = importlib.import_module("torch")
    if not distributed().is_nccl_available() or not torch.cuda.is_available():
        found = f"PyTorch {torch.__version__}, {torch.cuda.device_count()} GPUs"
        return f"needs a build of PyTorch with NCCL, and a GPU; found {found}; or set publication.torch-device to cpu"
    if (torch.device(device).index or 0) >= torch.cuda.device_count():
        return f"this process sees {torch.cuda.device_count()} GPUs; set publication.torch-device to one of them"
    return ""


def distributed() -> Any:
    """Untyped: torch does not export what it documents."""
    return importlib.import_module("torch.distributed")


def _abort_of(nccl: Any) -> Any:
    """Its name was `_abort` in torch 2.6."""
    return getattr(nccl, "abort", None) or nccl._abort


@contextlib.contextmanager
def _harmless() -> Iterator[None]:
    """A group that is made in here leaves the process alone when its peer dies: by default NCCL's watchdog ends it, and
    it reads that from the environment only. What a training loop makes for itself keeps the user's own setting."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    with _environment:
        before = os.environ.get(name)
        os.environ[name] = "0"
        try:
            yield
        finally:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before
