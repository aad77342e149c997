"""The memory daemon's shards as objects: races with a namespace that goes, and what leaves them alone."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from tests.unit.engine.cluster import BUCKET, Arriving, Cluster, body_of, content
from tests.unit.engine.test_persistence import keeper_of, keys_in_memory, keys_of, promotion_of

from tiergate.checkpoints.shards import ShardName
from tiergate.engine.shards import Shards
from tiergate.errors import MemoryFullError, NotFoundError
from tiergate.model import Role

PLACE = f"s3://{BUCKET}/daemon/"
Start = Callable[..., Cluster]


@pytest.fixture
def one(start: Start) -> Cluster:
    """One node with a place for shards."""
    return start(1, alone=True, daemon_uri=PLACE, prefixes=[f"{{uri = 's3://{BUCKET}/run/', persist = 'none'}}"])


def shards_of(cluster: Cluster, node: str = "a") -> Shards:
    return Shards(cluster[node].rooms, cluster[node].service.answer)


def head_of(data: bytes) -> Callable[[], Awaitable[bytes]]:
    async def head() -> bytes:
        return data[:512]

    return head


async def put(shards: Shards, rank: int, step: int, data: bytes = b"data", namespace: str = "job") -> None:
    await shards.put(ShardName(namespace, rank, step), head_of(data), Arriving(data), "r")


class Halting(Arriving):
    """A body of which the second half waits."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.halfway = asyncio.Event()
        self.go_on = asyncio.Event()

    async def pieces(self) -> AsyncIterator[bytes | memoryview]:
        middle = len(self._data) // 2
        yield self._data[:middle]
        self.halfway.set()
        await self.go_on.wait()
        yield self._data[middle:]


@pytest.mark.parametrize("again", [False, True], ids=["dropped", "created again"])
async def test_shard_whose_namespace_goes_meanwhile_takes_itself_back(one: Cluster, again: bool) -> None:
    shards, body = shards_of(one), Halting(content(50_000))
    assert await shards.create("job", 1, 3, "r")
    writing = asyncio.create_task(shards.put(ShardName("job", 0, 1), head_of(b"x"), body, "r"))
    await body.halfway.wait()
    assert await shards.drop("job", "r")
    if again:
        assert await shards.create("job", 1, 3, "r")
    body.go_on.set()
    with pytest.raises(NotFoundError):
        await writing
    assert await keys_of(one) == ({"daemon/job/namespace"} if again else set())
    assert one["a"].is_empty()


async def test_what_is_left_of_a_namespace_is_none_of_the_next_one_of_its_name(one: Cluster) -> None:
    shards = shards_of(one)
    assert await shards.create("job", 1, 3, "r")
    await put(shards, 0, 1)
    # As a process leaves it that is killed while it drops a namespace.
    await one["a"].ask("DeleteObject", "DELETE", "daemon/job/namespace")
    assert await shards.namespace("job") is None
    assert await shards.create("job", 1, 3, "r")
    assert await keys_of(one) == {"daemon/job/namespace"}
    assert not await shards.create("job", 1, 3, "r")


async def test_nothing_but_deletion_takes_a_shard_from_memory(one: Cluster) -> None:
    shards, keeper = shards_of(one), keeper_of(one)
    assert await shards.create("job", 1, 2, "r")
    for step in range(3):
        await put(shards, 0, step)
    await one["a"].put("run/step_1/x", b"of a run with a policy")
    before = await keys_in_memory(one)
    for _ in range(3):
        await keeper.round()
    await keeper.promote_newest()
    assert await keys_in_memory(one) == before
    assert {key for key in before if key.startswith("daemon/")} == {
        "daemon/job/namespace",
        *(f"daemon/job/rank_0/step_{step}" for step in (1, 2)),
    }
    assert await one.directory.pending() == []
    one.origin.is_away = True
    await put(shards, 0, 3)
    opened = await shards.get(ShardName("job", 0, 3), "r")
    assert await body_of(opened.answer) == b"data"


async def test_shard_that_somebody_wants_in_s3_goes_alone(one: Cluster) -> None:
    shards, promotion = shards_of(one), promotion_of(one)
    assert await shards.create("job", 1, 3, "r")
    for step in (1, 2):
        await put(shards, 0, step)
    name = (await one.directory.scan(BUCKET, "daemon/job/rank_0/step_1", "", 1))[0].name
    await promotion.clear(name, Role.SMALL)
    assert [write.name for write in await one.directory.pending()] == [name]
    await put(shards, 0, 1, b"again")
    assert [write.name for write in await one.directory.pending()] == [name], "the origin may hold what was there"
    await one.persist(name.key, b"again")
    await put(shards, 0, 1, b"a third time")
    assert [write.name for write in await one.directory.pending()] == [name]
    assert await keys_in_memory(one) == {"daemon/job/namespace", "daemon/job/rank_0/step_2"}


async def test_shard_without_room_is_refused_whatever_the_origin_would_take(one: Cluster) -> None:
    shards = shards_of(one)
    assert await shards.create("job", 1, 3, "r")
    with pytest.raises(MemoryFullError):
        await put(shards, 0, 1, content(6 << 20))
    assert await keys_of(one) == {"daemon/job/namespace"}
    assert not one["a"].counted("through_writes")


async def test_nodes_see_the_same(start: Start) -> None:
    cluster = start(3, daemon_uri=PLACE)
    first, second = shards_of(cluster), shards_of(cluster, "b")
    created = await asyncio.gather(first.create("job", 2, 3, "r"), second.create("job", 9, 9, "r"))
    assert sorted(created) == [False, True]
    await put(first, 0, 1, b"one")
    await put(second, 1, 1, b"two")
    for node in "abc":
        assert (await shards_of(cluster, node).namespace("job")) == (await first.namespace("job"))
        opened = await shards_of(cluster, node).get(ShardName("job", 1, 1), "r")
        assert await body_of(opened.answer) == b"two"
    await shards_of(cluster, "c").reset("r")
    assert await keys_of(cluster) == set()
