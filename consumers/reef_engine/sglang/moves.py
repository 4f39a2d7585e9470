"""How a version in a room gets into a server: read from the folder, sent in the request, or broadcast by us.

Knows: one client, one room, the server's update session. Must not know: whether what came of it is right. An
update that succeeds may have loaded nothing.
"""

from __future__ import annotations

import base64
import importlib
import io
import pickle
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from consumers.reef_engine.sglang import requests
from consumers.reef_engine.sglang.client import Client
from consumers.reef_engine.sglang.launch import free_port
from consumers.reef_engine.sglang.room import Room
from reef_bus.errors import TransferError, Unavailable

UPDATE_S = 300.0
BUCKET_BYTES = 256 << 20
"""Sent in one request; the server holds as much more while it loads them."""

Tensors = Mapping[str, Any]


def tensors(file: Path) -> Tensors:
    """torch's views of the file: no copy."""
    return importlib.import_module("safetensors.torch").load_file(str(file))  # type: ignore[no-any-return]


def from_disk(client: Client, room: Room, load_id: str, *, flush: bool) -> None:
    """The server reads the room's folder. It was started with that folder, so its model path and name stay the same."""
    body = requests.update_weights_from_disk(str(room.folder), flush=flush, version=load_id, format="auto")
    client.post("update_weights_from_disk", body, UPDATE_S)


def from_tensors(client: Client, room: Room, load_id: str, ranks: int, *, flush: bool) -> None:
    """In the request itself."""
    with _Session(client):
        for bucket, last in _buckets(tensors(room.weights)):
            said = {"flush": flush and last, "version": load_id if last else None}
            body = requests.update_weights_from_tensor([pickled(list(bucket.items()))] * ranks, **said)  # type: ignore[arg-type]
            client.post("update_weights_from_tensor", body, UPDATE_S)


def broadcast(
    client: Client, room: Room, load_id: str, ranks: int, sender: tuple[str, str], *, host: str, flush: bool
) -> None:
    """Through a process group of the server's ranks and us, which they find at `host`, and which ends with it."""
    with _Group(client, ranks, sender, host) as group, _Session(client):
        for bucket, last in _buckets(tensors(room.weights)):
            layout = {name: (str(each.dtype).removeprefix("torch."), each.shape) for name, each in bucket.items()}
            body = requests.update_weights_from_distributed(
                layout, group=group.name, flush=flush and last, version=load_id if last else None
            )
            group.send(bucket, partial(client.post, "update_weights_from_distributed", body, UPDATE_S))


def sender(device: str, ranks: int, options: Mapping[str, Any], gpus: int) -> tuple[str, str]:
    """Where our tensors are while they are broadcast, and by which backend; `gpus`: how many this process sees. NCCL
    refuses two ranks on one GPU, so ours is the first after the server's. Where there is none, gloo sends them from the
    host's memory; it receives into a GPU's, too."""
    first = int(options.get("base-gpu-id", 0)) + ranks * int(options.get("gpu-id-step", 1))
    return (f"cuda:{first}", "nccl") if device == "cuda" and first < gpus else ("cpu", "gloo")


class _Session:
    """An update session: whatever happens in it, it is ended; so is one that a killed agent left open."""

    def __init__(self, client: Client) -> None:
        self.client = client

    def __enter__(self) -> None:
        try:
            self._begin()
        except TransferError:
            self._end()
            self._begin()

    def __exit__(self, *_: object) -> None:
        self._end()

    def _begin(self) -> None:
        self.client.post("begin_weight_update", requests.begin_weight_update(), UPDATE_S)

    def _end(self) -> None:
        """It makes of the weights what the kernels read, if that is something else."""
        self.client.post("end_weight_update", requests.end_weight_update(), UPDATE_S)


def _buckets(found: Tensors) -> Iterator[tuple[dict[str, Any], bool]]:
    """And whether it is the last one."""
    bucket: dict[str, Any] = {}
    size = 0
    for name, tensor in found.items():
        if bucket and size + tensor.nbytes > BUCKET_BYTES:
            yield bucket, False
            bucket, size = {}, 0
        bucket[name] = tensor
        size += tensor.nbytes
    yield bucket, True


def pickled(tensors: Any) -> str:
    """As bytes and nothing that is shared: what the server cannot unpickle ends its process."""
    out = io.BytesIO()
    pickle.dump(tensors, out)
    return base64.b64encode(out.getvalue()).decode()


class _Group:
    """Rank 0 of a group whose other ranks are the server's. A borrowed server may still have that of an agent that was
    killed, and takes no second one of its name."""

    def __init__(self, client: Client, ranks: int, sender: tuple[str, str], host: str) -> None:
        self.client, self.ranks, self.host = client, ranks, host
        self.device, self.backend = sender
        self.name = f"reef-{uuid.uuid4().hex}"
        self._group: Any = None

    def __enter__(self) -> _Group:
        port = free_port()
        body = requests.init_weights_update_group(
            self.host, port, offset=1, size=self.ranks + 1, group=self.name, backend=self.backend
        )
        _both(lambda: self.client.post("init_weights_update_group", body, UPDATE_S), lambda: self._join(port))
        return self

    def _join(self, port: int) -> None:
        """As the server's ranks do it (`init_custom_process_group`), for which torch has no public call: a group beside
        the default one, which we do not have."""
        c10d = importlib.import_module("torch.distributed.distributed_c10d")
        store_of = importlib.import_module("torch.distributed").TCPStore
        size, limit = self.ranks + 1, timedelta(seconds=UPDATE_S)
        store = c10d.PrefixStore(self.name, store_of(self.host, port, size, is_master=True, timeout=limit))
        self._group, _ = c10d._new_process_group_helper(
            size, 0, [], c10d.Backend(self.backend), store, group_name=self.name, timeout=limit
        )
        c10d._world.pg_group_ranks[self._group] = {rank: rank for rank in range(size)}

    def send(self, bucket: Mapping[str, Any], ask: Callable[[], Any]) -> None:
        _both(ask, lambda: self._broadcast(bucket))

    def _broadcast(self, bucket: Mapping[str, Any]) -> None:
        broadcast = importlib.import_module("torch.distributed").broadcast
        moved = [
            broadcast(tensor.to(self.device), src=0, group=self._group, async_op=True) for tensor in bucket.values()
        ]
        for each in moved:
            each.wait()

    def __exit__(self, *_: object) -> None:
        try:
            self.client.post("destroy_weights_update_group", requests.destroy_weights_update_group(self.name))
        finally:  # a server that has none any more, as one that was started again, keeps nobody in it
            importlib.import_module("torch.distributed").destroy_process_group(self._group)


def _both(ask: Callable[[], Any], do: Callable[[], None]) -> None:
    """Ask the server for something that it can only do together with us. Whichever of both fails, the other one may
    wait for it as long as its own deadline lets it, and is left behind."""
    asked, done = _begin(ask), _begin(do)
    ended, _ = wait((asked, done), return_when=FIRST_EXCEPTION)
    if asked in ended:
        asked.result()
    if done in ended and (error := done.exception()):
        raise Unavailable(f"the group with the server broke: {error!r}") from error


def _begin(call: Callable[[], Any]) -> Future[None]:
    """In a thread that keeps no process from ending."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            call()
            future.set_result(None)
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, name="reef-sglang-update", daemon=True).start()
    return future
