"""The directory of a cluster keeps the directory's contract; and what only it must do."""

import random
from collections.abc import AsyncIterator, Iterator

import pytest

from tiergate.clock import SystemClock
from tiergate.directory.base import Directory
from tiergate.directory.clustered import ClusteredDirectory
from tiergate.directory.keys import Keys
from tiergate.etcd.client import Access, EtcdClient
from tiergate.model import new_uid
from tiergate.testing.directory_contract import DirectoryContract
from tiergate.testing.etcd import EtcdServer


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdServer]:
    with EtcdServer() as server:
        yield server


@pytest.fixture
async def client(etcd: EtcdServer) -> AsyncIterator[EtcdClient]:
    client = EtcdClient(Access(etcd.endpoints), SystemClock(), random.Random(0))
    yield client
    await client.close()


@pytest.fixture
def keys() -> Keys:
    """A place that no other test uses."""
    return Keys(f"/{new_uid(SystemClock().wall_s())}")


@pytest.fixture
async def clustered(client: EtcdClient, keys: Keys) -> AsyncIterator[ClusteredDirectory]:
    directory = ClusteredDirectory(client, keys)
    yield directory
    await directory.close()


class TestClusteredDirectory(DirectoryContract):
    @pytest.fixture
    def directory(self, clustered: ClusteredDirectory) -> Directory:
        return clustered
