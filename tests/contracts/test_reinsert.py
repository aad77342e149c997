"""A directory that forgot is told by the nodes what they hold: over real etcd, emptied or gone back to a copy."""

import asyncio
import random
from dataclasses import replace

import pytest
from tests.contracts.membernodes import CLOCK, Start, seen, start

from tiergate.directory.clustered import ClusteredDirectory
from tiergate.directory.committer import Change, Committer
from tiergate.directory.era import begin_era, find_era
from tiergate.directory.keys import Keys
from tiergate.directory.reinsertion import SET_ASIDE
from tiergate.errors import CompactedError, ForeignDirectoryError, MembershipOverError
from tiergate.etcd.client import Access, EtcdClient
from tiergate.etcd.values import Agreed, Put, Range, Txn
from tiergate.etcd.watch import Watch
from tiergate.model import (
    Kind,
    Role,
    State,
    new_uid,
)
from tiergate.server.remembering import Remembering
from tiergate.testing.directory_contract import make_intent, make_upload, object_name
from tiergate.testing.directory_contract.values import MARKER, SHARD
from tiergate.testing.etcd import EtcdServer, needs_etcd

__all__ = ["start"]

pytestmark = needs_etcd


async def test_emptied_directory_is_told_what_the_nodes_hold(etcd: EtcdServer, start: Start) -> None:
    a, b = await start("a"), await start("b")
    shard, marker = await a.put(SHARD, b), await b.put(MARKER, a, role=Role.MARKER)
    done = await a.put(object_name("done"), b)
    await a.persist(object_name("done"), done)
    b.finish(done)
    await a.directory.delete(object_name("gone"), make_intent(now_s=CLOCK.wall_s()))
    await a.directory.create_upload(make_upload("up"))
    for node in (a, b):
        await node.remembering.refresh()
    await asyncio.to_thread(etcd.restore, None)
    await asyncio.gather(a.joined(), b.joined())
    for name, version in ((SHARD, shard), (MARKER, marker)):
        record, write = await seen(a, name)
        assert record.version == version
        assert (record.state, write.kind) == (State.DIRTY, Kind.PUT)
        assert write.owner in (a.me, b.me)
        assert (await a.directory.get(name)).holders == {version.uid: {a.me, b.me}}
    record, write = await seen(b, object_name("gone"))
    assert (record.state, write.kind, write.owner) == (State.TOMBSTONE, Kind.DELETE, a.me)
    assert (await b.directory.get(object_name("done"))).record is None
    assert await a.directory.get_upload("up") is None
    later = await a.put(object_name("later"))
    assert (await seen(b, object_name("later")))[0].version == later


async def test_parked_writes_come_back_parked(etcd: EtcdServer, start: Start) -> None:
    a, b = await start("a"), await start("b")
    shard, marker = await a.put(SHARD, b, parked=True), await a.put(MARKER, b, role=Role.MARKER, parked=True)
    for node in (a, b):
        await node.remembering.refresh()
    await asyncio.to_thread(etcd.restore, None)
    await asyncio.gather(a.joined(), b.joined())
    for name, version in ((SHARD, shard), (MARKER, marker)):
        record, write = await seen(b, name)
        assert (record.version, record.state, write.parked) == (version, State.DIRTY, True)
        assert (await a.directory.get(name)).holders == {version.uid: {a.me, b.me}}
    assert [*await a.directory.pending(), *await b.directory.pending()] == []


async def test_markers_wait_until_all_have_told(etcd: EtcdServer, start: Start) -> None:
    a, b = await start("a"), await start("b")
    await b.put(SHARD)
    marker, pointer = await a.put(MARKER, role=Role.MARKER), await a.put(object_name("latest"), role=Role.POINTER)
    await b.stop()
    await asyncio.to_thread(etcd.restore, None)
    await a.joined()
    await a.remembering.refresh()
    for name in (MARKER, object_name("latest")):
        assert (await seen(a, name))[1].quarantined == SET_ASIDE
    await b.start()
    told = (await seen(b, SHARD))[1].place
    await Remembering(a.cluster, a.memory, CLOCK, grace_s=0.0).refresh()
    for name, version in ((MARKER, marker), (object_name("latest"), pointer)):
        record, write = await seen(a, name)
        assert write.quarantined == ""
        assert min(write.place, write.revision, record.revision) > told
        assert record.version == version
    assert (await seen(a, MARKER))[1].disturbed_s > 0


@pytest.mark.parametrize("first", ["a", "b"])
async def test_of_two_versions_the_later_one_counts(etcd: EtcdServer, start: Start, first: str) -> None:
    a, b = await start("a"), await start("b")
    name = object_name("k")
    await a.put(name)
    newer = await b.put(name)
    await (b if first == "a" else a).stop()
    await asyncio.to_thread(etcd.restore, None)
    await (a if first == "a" else b).joined()
    await (b if first == "a" else a).start()
    record, write = await seen(a, name)
    assert (record.version, write.owner) == (newer, b.me)
    assert [entry.write.uid for entry in b.cluster.ledger.entries()] == [newer.uid]
    await a.remembering.refresh()
    assert a.cluster.ledger.entries() == []


async def test_what_was_written_since_always_wins(etcd: EtcdServer, start: Start) -> None:
    a, b = await start("a"), await start("b")
    name, gone = object_name("k"), object_name("gone")
    for each in (name, gone):
        await b.put(each)
    await b.stop()
    await asyncio.to_thread(etcd.restore, None)
    await a.joined()
    since = await a.put(name)
    await a.directory.delete(gone, make_intent(now_s=CLOCK.wall_s()))
    await b.start()
    assert (await seen(b, name))[0].version == since
    assert (await seen(b, gone))[0].state is State.TOMBSTONE
    assert b.cluster.ledger.entries() == []


async def test_directory_that_went_back_to_a_copy(etcd: EtcdServer, start: Start) -> None:
    a, b = await start("a"), await start("b")
    names = {each: object_name(each) for each in ("owed", "finished", "replaced", "deleted", "clean", "new", "later")}
    before = {each: await a.put(names[each], b) for each in ("owed", "finished", "replaced", "deleted", "clean")}
    await a.persist(names["clean"], before["clean"])
    b.finish(before["clean"])
    copy = await asyncio.to_thread(etcd.save)
    await a.persist(names["finished"], before["finished"])
    b.finish(before["finished"])
    replaced, new = await b.put(names["replaced"], a), await a.put(names["new"], b)
    for node in (a, b):
        node.finish(before["replaced"])
        node.finish(before["deleted"])
    await b.directory.delete(names["deleted"], make_intent(now_s=CLOCK.wall_s()))
    changed = await a.put(names["clean"])
    await a.persist(names["clean"], changed)
    for node in (a, b):
        await node.remembering.refresh()
    await asyncio.to_thread(etcd.restore, copy)
    await asyncio.gather(a.joined(), b.joined())
    for each, version in (("owed", before["owed"]), ("replaced", replaced), ("new", new)):
        assert (await seen(a, names[each]))[0].version == version
        assert (await a.directory.get(names[each])).holders == {version.uid: {a.me, b.me}}
    assert (await seen(a, names["deleted"]))[0].state is State.TOMBSTONE
    for each in ("finished", "clean"):
        found = await b.directory.get(names[each])
        assert (found.record, found.pending) == (None, None)
    await a.put(names["later"])


async def test_a_node_that_starts_tells_too_and_once(etcd: EtcdServer, start: Start) -> None:
    a = await start("a")
    version = await a.put(SHARD)
    await a.stop()
    await asyncio.to_thread(etcd.restore, None)
    await a.start()
    record, write = await seen(a, SHARD)
    assert (record.version, write.owner) == (version, a.me)
    await a.persist(SHARD, version)
    await a.stop()
    await a.start()
    assert (await a.directory.get(SHARD)).pending is None


async def test_nobody_rests_on_it_before_it_was_told(
    etcd: EtcdServer, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = await start("a")
    await a.put(SHARD)
    looked: list[bool] = []

    def look() -> None:
        agreed = a.cluster.standing.agreed()
        looked.append(a.cluster.standing.stands() or agreed is None or agreed.era != 0)

    insert = ClusteredDirectory.reinsert

    async def watched(directory: ClusteredDirectory, *args: object) -> bool:
        look()
        return await insert(directory, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(ClusteredDirectory, "reinsert", watched)
    await asyncio.to_thread(etcd.restore, None)
    await a.joined()
    assert looked == [False]
    assert a.cluster.standing.stands()


# -- how it is noticed
async def test_client_sees_that_etcd_went_back(etcd: EtcdServer) -> None:
    client = EtcdClient(Access(etcd.endpoints), CLOCK, random.Random(0))
    await client.connect()
    agreed = [Agreed(1, client.cluster_id)]
    follower = EtcdClient(Access(etcd.endpoints), CLOCK, random.Random(0), agreed=lambda: agreed[0])
    copy = await asyncio.to_thread(etcd.save)
    for number in range(10):
        await client.repeat(lambda number=number: client.txn(Txn((), (Put(b"x", b"%d" % number),))))  # type: ignore[misc]
    newest = (await follower.read(Range(b"x"))).revision
    async with Watch(client, b"x", b"", newest + 1) as watch:
        waiting = asyncio.create_task(watch.next())
        await asyncio.to_thread(etcd.restore, copy)
        with pytest.raises(ForeignDirectoryError):
            await client.read(Range(b"x"))
        generation = client.generation
        client.begin_anew()
        assert (await client.read(Range(b"x"))).revision < newest
        with pytest.raises(CompactedError):
            await waiting
    assert client.generation == generation + 1
    with pytest.raises(ForeignDirectoryError):
        await follower.read(Range(b"x"))
    agreed[0] = Agreed(2, client.cluster_id)
    await follower.read(Range(b"x"))
    agreed[0] = Agreed(2, 1)
    with pytest.raises(ForeignDirectoryError):
        await follower.read(Range(b"x"))
    await client.close()
    await follower.close()


async def test_commit_made_up_over_another_directory_does_not_happen(etcd: EtcdServer) -> None:
    client = EtcdClient(Access(etcd.endpoints), CLOCK, random.Random(0))
    committer = Committer(client, Keys(f"/{new_uid(CLOCK.wall_s())}"), None)
    change = Change((), (Put(b"y", b""),), generation=client.generation)
    assert await committer.commit(change) is not None
    client.begin_anew()
    with pytest.raises(MembershipOverError):
        await committer.commit(change)
    assert await committer.commit(replace(change, generation=client.generation)) is not None
    await committer.close()
    await client.close()


async def test_one_era_follows_another_however_many_begin_it(etcd: EtcdServer) -> None:
    client, keys = EtcdClient(Access(etcd.endpoints), CLOCK, random.Random(0)), Keys(f"/{new_uid(CLOCK.wall_s())}")
    assert await find_era(client, keys) is None
    first, same = await asyncio.gather(*(begin_era(client, keys, None) for _ in range(2)))
    assert first == same == await find_era(client, keys)
    second, same = await asyncio.gather(*(begin_era(client, keys, first) for _ in range(2)))
    assert second == same
    assert (second.previous, second.number != first.number, second.since > first.since) == (first.number, True, True)
    await client.close()
