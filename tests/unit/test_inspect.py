"""Where the commands look: a server, or the first that listens of several, as a cluster's configuration names them."""

from __future__ import annotations

import asyncio
import socket

import pytest

from reef_bus.config import Config, Nats
from reef_bus.errors import Rejected, Unavailable
from reef_bus.inspect import reach


def nobody() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"nats://127.0.0.1:{probe.getsockname()[1]}"


async def test_of_several_servers_the_one_that_listens_is_asked() -> None:
    asked = asyncio.Event()

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        writer.close()

    async with await asyncio.start_server(hear, "127.0.0.1", 0) as server:
        url = f"{nobody()},nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(Unavailable):  # it listens, and is no NATS server
            await reach(Config(nats=Nats(url=url)))
    assert asked.is_set()


async def test_where_none_listens_all_are_named() -> None:
    url = f"{nobody()},{nobody()}"
    with pytest.raises(Unavailable, match=f"no NATS server at {url}: Connection refused; is it up"):
        await reach(Config(nats=Nats(url=url)))


async def test_a_url_that_is_none_is_named_alone() -> None:
    with pytest.raises(Rejected, match=r"nats\.url 'nats://host:port':"):
        await reach(Config(nats=Nats(url=f"{nobody()},nats://host:port")))
