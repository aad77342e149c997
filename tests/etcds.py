"""Real etcd for the tests of a cluster: the fixtures that they share. A conftest imports them."""

import random
from collections.abc import AsyncIterator, Iterator

import pytest

from tiergate.clock import Clock, SystemClock
from tiergate.etcd.client import Access, EtcdClient
from tiergate.testing.etcd import EtcdServer

__all__ = ["client", "clock", "etcd"]


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdServer]:
    """One member, for all tests of a module."""
    with EtcdServer() as server:
        yield server


@pytest.fixture
def clock() -> Clock:
    """The clients' clock; a module that turns it overrides this."""
    return SystemClock()


@pytest.fixture
async def client(etcd: EtcdServer, clock: Clock) -> AsyncIterator[EtcdClient]:
    """A client of `etcd`."""
    client = EtcdClient(Access(etcd.endpoints), clock, random.Random(0))
    yield client
    await client.close()
