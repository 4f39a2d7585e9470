"""The brokers that the contract tests run on: servers are started once, every test has a deployment of its own.

Knows: the four kinds. Must not know: what is asked of them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from reef_bus.embedded import NatsServer
from tests.contract.brokers import Broker, InMemory, Served
from tests.e2e.cluster import NatsCluster, cluster

SERVER = pytest.param("server", marks=pytest.mark.integration)
CLUSTER = pytest.param("cluster", marks=pytest.mark.integration)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    found = NatsServer(tmp_path_factory.mktemp("server"))
    try:
        found.start()
        yield found
    finally:
        found.stop()


@pytest.fixture(scope="session")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsCluster]:
    with cluster(tmp_path_factory.mktemp("cluster")) as found:
        yield found


@pytest.fixture(params=["memory-single", "memory-cluster", SERVER, CLUSTER])
async def broker(request: pytest.FixtureRequest) -> AsyncIterator[Broker]:
    """Each of the four in turn."""
    if request.param.startswith("memory"):
        yield InMemory(request.param.removeprefix("memory-"))
    else:
        async for found in _served(request, request.param):
            yield found


@pytest.fixture(params=[SERVER, CLUSTER])
async def served(request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    """The two real ones in turn."""
    async for found in _served(request, request.param):
        yield found


@pytest.fixture
async def single(request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    async for found in _served(request, "server"):
        yield found


@pytest.fixture
async def replicated(request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    async for found in _served(request, "cluster"):
        yield found


async def _served(request: pytest.FixtureRequest, kind: str) -> AsyncIterator[Served]:
    found = Served(request.getfixturevalue("server" if kind == "server" else "nodes"))
    await found.open()
    yield found
    await found.close()
