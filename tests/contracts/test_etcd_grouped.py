"""Reads that go to real etcd together: each caller gets what it would have got alone."""

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tiergate.clock import SystemClock
from tiergate.errors import CompactedError, DirectoryUnavailableError
from tiergate.etcd.client import TRY_S, Access, EtcdClient
from tiergate.etcd.grouped import GROUP_COUNT
from tiergate.etcd.values import Found, Outcome, Put, Range, Txn, prefix_end
from tiergate.testing.etcd import EtcdServer, needs_etcd

pytestmark = needs_etcd


class Watched(EtcdClient):
    """A client that notes how much each of its calls asks for, and whose answers can be held back, or get lost."""

    def __init__(self, server: EtcdServer) -> None:
        super().__init__(Access(server.endpoints), SystemClock(), random.Random(0))
        self.sent: list[int] = []
        self.lose_count = 0
        self.answered = asyncio.Event()
        self.go = asyncio.Event()
        self.go.set()

    async def _call(self, name: str, message: Any, try_s: float = TRY_S) -> Any:
        self.sent.append(len(message.success))
        if self.lose_count:
            self.lose_count -= 1
            raise DirectoryUnavailableError("lost")
        answer = await super()._call(name, message, try_s)
        self.answered.set()
        await self.go.wait()
        return answer

    async def held(self, *ranges: Range) -> "asyncio.Task[Outcome]":
        """A read that etcd has answered, and whose answer is held back until `go`."""
        self.go.clear()
        self.answered.clear()
        reading = asyncio.create_task(self.read(*ranges))
        await self.answered.wait()
        return reading


@pytest.fixture
async def watched(etcd: EtcdServer) -> AsyncIterator[Watched]:
    client = Watched(etcd)
    for key in (b"g/1", b"g/2", b"g/3"):
        await put(client, key, key)
    client.sent.clear()
    client.answered.clear()
    yield client
    await client.close()


async def put(client: EtcdClient, key: bytes, value: bytes) -> int:
    return (await client.txn(Txn((), (Put(key, value),)))).revision


def values(outcome: Outcome) -> list[list[bytes]]:
    return [[row.value for row in outcome.found(index)] for index in range(len(outcome.answers))]


async def test_reads_asked_for_at_once_are_one_and_answered_each(watched: Watched) -> None:
    every = Range(b"g/", prefix_end(b"g/"))
    first, second, third = await asyncio.gather(
        watched.read(Range(b"g/1"), Range(b"g/none")), watched.read(every), watched.read(Range(b"g/3"))
    )
    assert watched.sent == [4]
    assert values(first) == [[b"g/1"], []]
    assert values(second) == [[b"g/1", b"g/2", b"g/3"]]
    assert values(third) == [[b"g/3"]]
    assert first.revision == second.revision == third.revision >= second.found(0)[-1].mod_revision


async def test_group_is_as_large_as_etcd_takes(watched: Watched) -> None:
    outcomes = await asyncio.gather(*(watched.read(*[Range(b"g/%d" % index)] * 3) for index in range(100)))
    assert watched.sent == [126, 126, 48]
    assert [values(each) for each in outcomes[1:4]] == [[[b"g/%d" % index]] * 3 for index in (1, 2, 3)]
    await watched.read(*[Range(b"g/1")] * GROUP_COUNT)
    assert watched.sent[3:] == [GROUP_COUNT]


async def test_reads_asked_for_meanwhile_go_after_it_and_see_what_was_acknowledged(
    watched: Watched, client: EtcdClient
) -> None:
    early = await watched.held(Range(b"g/1"))
    revision = await put(client, b"g/1", b"new")
    late = [asyncio.create_task(watched.read(Range(key))) for key in (b"g/1", b"g/2")]
    await asyncio.sleep(0)
    assert watched.sent == [1]
    watched.go.set()
    assert values(await early) == [[b"g/1"]]
    one, other = await asyncio.gather(*late)
    assert (values(one), values(other)) == ([[b"new"]], [[b"g/2"]])
    assert one.revision == other.revision >= revision
    assert watched.sent == [1, 2]


async def test_pages_and_counts_go_alone(watched: Watched) -> None:
    start, end = b"g/", prefix_end(b"g/")
    page, count, point = await asyncio.gather(
        watched.read(Range(start, end, limit=2)),
        watched.read(Range(start, end, count_only=True)),
        watched.read(Range(b"g/1")),
    )
    assert watched.sent == [1, 1, 1]
    assert values(page) == [[b"g/1", b"g/2"]]
    assert count.answers == (Found((), 3),)
    assert values(point) == [[b"g/1"]]


async def test_cancelled_caller_takes_no_other_along(watched: Watched) -> None:
    flying = await watched.held(Range(b"g/1"))
    group = [asyncio.create_task(watched.read(Range(key))) for key in (b"g/1", b"g/2", b"g/3")]
    await asyncio.sleep(0)
    flying.cancel()
    group[1].cancel()
    watched.answered.clear()
    watched.go.set()
    await watched.answered.wait()
    for cancelled in (flying, group[1]):
        with pytest.raises(asyncio.CancelledError):
            await cancelled
    assert [values(await group[index]) for index in (0, 2)] == [[[b"g/1"]], [[b"g/3"]]]
    # What nobody waits for any more is not asked for.
    assert watched.sent == [1, 2]


async def test_cancelled_caller_in_flight_takes_no_other_along(watched: Watched) -> None:
    watched.go.clear()
    group = [asyncio.create_task(watched.read(Range(key))) for key in (b"g/1", b"g/2")]
    await watched.answered.wait()
    group[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await group[0]
    watched.go.set()
    assert values(await group[1]) == [[b"g/2"]]
    assert watched.sent == [2]


async def test_refusal_is_for_the_one_it_is_meant_for(watched: Watched, etcd: EtcdServer) -> None:
    old = await put(watched, b"g/1", b"old")
    etcd.compact(await put(watched, b"g/1", b"newest"))
    watched.sent.clear()
    late, good = await asyncio.gather(
        watched.read(Range(b"g/1", revision=old)), watched.read(Range(b"g/1")), return_exceptions=True
    )
    assert isinstance(late, CompactedError)
    assert isinstance(good, Outcome)
    assert values(good) == [[b"newest"]]
    assert watched.sent == [2, 1, 1]


async def test_lost_answer_is_asked_for_again_by_each_alone(watched: Watched) -> None:
    watched.lose_count = 1
    one, other = await asyncio.gather(watched.read(Range(b"g/1")), watched.read(Range(b"g/2")))
    assert (values(one), values(other)) == ([[b"g/1"]], [[b"g/2"]])
    assert watched.sent == [2, 1, 1]


async def test_nobody_answers_any_of_a_group() -> None:
    with EtcdServer() as server:
        client = EtcdClient(Access(server.endpoints), SystemClock(), random.Random(0), patience_s=0.5)
    ends = await asyncio.gather(*(client.read(Range(b"a")) for _ in range(3)), return_exceptions=True)
    assert [type(end) for end in ends] == [DirectoryUnavailableError] * 3
    await client.close()


async def test_close_ends_what_is_under_way_and_what_waits(watched: Watched) -> None:
    flying = await watched.held(Range(b"g/1"))
    waiting = asyncio.create_task(watched.read(Range(b"g/2")))
    await asyncio.sleep(0)
    await watched.close()
    ends = await asyncio.gather(flying, waiting, return_exceptions=True)
    assert [type(end) for end in ends] == [asyncio.CancelledError] * 2


async def test_close_ends_what_was_asked_for_just_now(watched: Watched) -> None:
    reading = asyncio.create_task(watched.read(Range(b"g/1")))
    await asyncio.sleep(0)
    await watched.close()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert watched.sent == []
