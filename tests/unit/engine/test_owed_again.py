"""A version whose bytes the origin lost goes there again, whatever is heard of each try."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from tests.unit.engine.cluster import Cluster, Node, name_of

from tiergate.errors import OriginTemporaryError
from tiergate.model import NO_BASE, Pending, State, Version
from tiergate.testing.modelorigin import Held
from tiergate.writeback.sender import Sender, SenderSettings

NAME = name_of("run/shard")
DATA = b"bytes that were acknowledged"


@asynccontextmanager
async def at_once(_: Pending) -> AsyncIterator[None]:
    yield


@pytest.fixture
def cluster(start: Callable[..., Cluster]) -> Cluster:
    return start(1, alone=True)


def sender_of(node: Node) -> Sender:
    rooms = node.rooms
    settings = SenderSettings(2, send_checksums=False)
    return Sender(rooms.directory, rooms.memory, rooms.origin, rooms.withdrawals, rooms.clock, rooms.metrics, settings)


async def send(cluster: Cluster) -> None:
    """One try to bring what is pending to the origin."""
    (write,) = await cluster.directory.pending()
    await sender_of(cluster["a"]).put(write, at_once)


async def rotten(cluster: Cluster) -> Held:
    """The origin says what it said of a version, and gives other bytes; that is owed again."""
    await cluster["a"].put(NAME.key, DATA)
    await send(cluster)
    held = cluster.origin.objects[NAME]
    assert (held.data, bool(held.uid)) == (DATA, True)
    cluster.origin.objects[NAME] = rot = replace(held, data=DATA[::-1])
    version = await version_of(cluster, State.CLEAN)
    record = (await cluster.directory.get(NAME)).record
    assert record is not None
    assert await cluster["a"].rooms.withdrawals.owe_again(record, version, rot.etag) is not None
    assert await version_of(cluster, State.DIRTY) == version
    return rot


async def version_of(cluster: Cluster, state: State) -> Version:
    record = (await cluster.directory.get(NAME)).record
    assert record is not None
    assert record.version is not None
    assert record.state is state
    return record.version


async def test_what_is_owed_again_replaces_what_bears_its_name(cluster: Cluster) -> None:
    await rotten(cluster)
    assert not cluster["a"].is_empty(), "its bytes may not be evicted"
    await send(cluster)
    assert cluster.origin.objects[NAME].data == DATA
    assert (await version_of(cluster, State.CLEAN)).size_bytes == len(DATA)
    assert await cluster.directory.pending() == []
    assert cluster["a"].is_empty()


@pytest.mark.parametrize("is_there", [False, True])
async def test_try_of_which_nothing_was_heard_is_told_from_what_it_replaces(cluster: Cluster, is_there: bool) -> None:
    rot = await rotten(cluster)
    origin = cluster.origin
    origin.eager = False
    task = asyncio.create_task(send(cluster))
    while not (calls := [call for call in origin.open_calls() if call.operation == "put"]):
        for call in origin.open_calls():
            origin.let(call)
        await asyncio.sleep(0)
    if is_there:
        origin.let(calls[0], heard=False)
    else:
        origin.lose(calls[0])
    with pytest.raises(OriginTemporaryError):
        await task
    assert (origin.objects[NAME] == rot) is not is_there
    origin.eager = True
    origin.done.clear()
    await send(cluster)
    assert origin.objects[NAME].data == DATA
    assert [operation for operation, _ in origin.done].count("put") == (0 if is_there else 1)


async def test_what_is_gone_is_put_where_nothing_is(cluster: Cluster) -> None:
    await cluster["a"].put(NAME.key, DATA)
    await send(cluster)
    del cluster.origin.objects[NAME]
    record = (await cluster.directory.get(NAME)).record
    assert record is not None
    version, withdrawals = await version_of(cluster, State.CLEAN), cluster["a"].rooms.withdrawals
    assert await withdrawals.owe_again(record, replace(version, uid="other"), NO_BASE) is None
    assert await withdrawals.owe_again(record, version, NO_BASE) is not None
    assert await withdrawals.owe_again(record, version, NO_BASE) is None
    await send(cluster)
    assert cluster.origin.objects[NAME].data == DATA
