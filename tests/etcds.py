"""Real etcd for the tests of a cluster: the fixtures that they share. A conftest imports them."""

import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.nodes import FLAGS

from tiergate import config
from tiergate.child import ChildContext, ChildRole, Folders
from tiergate.clock import Clock, SystemClock
from tiergate.config import Address
from tiergate.etcd.client import Access, EtcdClient
from tiergate.testing.cluster import RunningCluster
from tiergate.testing.etcd import EtcdServer
from tiergate.testing.faults import FaultyOrigin

__all__ = ["StartCluster", "client", "clock", "context_of_member", "etcd", "start_cluster"]

StartCluster = Callable[..., RunningCluster]


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


@pytest.fixture
def start_cluster(proxy: FaultyOrigin, etcd: EtcdServer) -> Iterator[StartCluster]:
    """Starts so many nodes, with further flags, that meet at `etcd`; they end with the test."""
    with ExitStack() as stack:

        def start(nodes: int, *flags: str, **options: Any) -> RunningCluster:
            cluster = RunningCluster(proxy.endpoint, nodes, etcd=etcd, flags=(*FLAGS, *flags), **options)
            return stack.enter_context(cluster)

        yield start


def context_of_member(folder: Path, url: str, node: str, **environ: str) -> ChildContext:
    """What the background process of a member is given, without sockets: for a membership without a node around it."""
    settings = {
        "TIERGATE_CLUSTER": url,
        "TIERGATE_NODE_NAME": node,
        "TIERGATE_ADVERTISE": "127.0.0.1:0",
        "TIERGATE_MEMORY_LIMIT": "64MiB",
        "TIERGATE_MEMORY_DIR": str(folder),
    }
    address = Address("127.0.0.1", 7001)
    return ChildContext(
        settings=config.load(environ=settings | environ).settings,
        role=ChildRole.BACKGROUND,
        index=0,
        listen_address=address,
        admin_address=address,
        peer_address=address,
        daemon_address=None,
        listen_socket=None,
        admin_socket=None,
        peer_socket=None,
        daemon_socket=None,
        wakeup_fd=-1,
        deaths_fd=-1,
        ready_fd=-1,
        sockets_fd=-1,
        folders=Folders(folder),
    )
