"""That etcd went back is seen however far others have brought it since, and is never unlearned: over real etcd."""

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tests.contracts.membernodes import CLOCK, Node, Start, seen, start
from tests.etcds import context_of_member

from tiergate.child import ChildRole
from tiergate.directory.board import Board, Posted
from tiergate.directory.clustered import ClusteredDirectory
from tiergate.directory.era import begin_era, find_era
from tiergate.directory.keys import Keys
from tiergate.directory.ledger import Ledger
from tiergate.directory.membership import Membership
from tiergate.errors import DirectoryUnavailableError, ForeignDirectoryError, OutcomeUnknownError
from tiergate.etcd.client import Access, EtcdClient, Known
from tiergate.etcd.values import Agreed, Outcome, Put, Range, Txn
from tiergate.etcd.watch import Watch
from tiergate.model import About, State, new_uid
from tiergate.server.cluster import Cluster, open_cluster
from tiergate.testing.directory_contract import make_intent, make_version, object_name
from tiergate.testing.directory_contract.values import SHARD
from tiergate.testing.etcd import EtcdServer, needs_etcd

__all__ = ["start"]

pytestmark = needs_etcd

MAP_BYTES = 1 << 20
ABOUT = About("127.0.0.1:7001", "zone", "boot")


@asynccontextmanager
async def opened(etcd: EtcdServer) -> AsyncIterator[EtcdClient]:
    """A client that knows nothing yet."""
    client = EtcdClient(Access(etcd.endpoints), CLOCK, random.Random(0))
    yield client
    await client.close()


async def revision_of(etcd: EtcdServer) -> int:
    async with opened(etcd) as client:
        return (await client.read(Range(b"x"))).revision


async def bring_past(etcd: EtcdServer, revision: int) -> None:
    """Others write until the revision is greater."""
    async with opened(etcd) as client:
        outcome = Outcome(True, ())
        while outcome.revision <= revision:
            outcome = await client.repeat(lambda: client.txn(Txn((), (Put(b"x", b""),))))


def era_of(node: Node) -> int:
    era = node.cluster.standing.era()
    assert era
    return era


async def joined_after(node: Node, era: int) -> None:
    """Wait until a node is a member in another era. On a slow machine a lease may end in between."""
    while node.cluster.standing.era() in (0, era) or not node.cluster.standing.stands():
        await node.joined()


# -- a whole node
async def test_node_that_starts_after_others_brought_it_past_what_it_knew(etcd: EtcdServer, start: Start) -> None:
    a = await start("a")
    era = era_of(a)
    await a.put(object_name("before"))
    copy = await asyncio.to_thread(etcd.save)
    version = await a.put(SHARD)
    await a.stop()
    newest = await revision_of(etcd)
    await asyncio.to_thread(etcd.restore, copy)
    await bring_past(etcd, newest)
    await a.start()
    assert (await seen(a, SHARD))[0].version == version
    assert era_of(a) != era


async def test_idle_node_that_others_were_faster_than(
    etcd: EtcdServer, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a member all the time, and asks etcd for nothing by itself."""
    a = await start("a")
    era = era_of(a)
    copy = await asyncio.to_thread(etcd.save)
    version = await a.put(SHARD)
    newest = await revision_of(etcd)

    async def cut_off(*_: object) -> None:
        raise DirectoryUnavailableError("no way there")

    monkeypatch.setattr(a.cluster.client, "_at_member", cut_off)
    await asyncio.to_thread(etcd.restore, copy)
    await bring_past(etcd, newest)
    monkeypatch.undo()
    await joined_after(a, era)
    assert (await seen(a, SHARD))[0].version == version


@pytest.mark.parametrize("is_interrupted", [False, True])
async def test_what_others_wrote_after_it_went_back_is_newer(
    etcd: EtcdServer, start: Start, monkeypatch: pytest.MonkeyPatch, is_interrupted: bool
) -> None:
    """Though its revisions are smaller. Of what was there before, revisions alone tell, whatever a clock said."""
    a, b = await start("a"), await start("b")
    names = {key: object_name(key) for key in ("put", "deleted", "older", "only")}
    ahead_s = CLOCK.wall_s() + 3600.0
    await b.put(names["older"], made_s=ahead_s)
    await b.put(names["deleted"])
    await a.put(object_name("before"))
    await b.stop()
    copy = await asyncio.to_thread(etcd.save)
    for number in range(20):
        await a.put(object_name(f"first{number}"))
    lost = {key: await a.put(name) for key, name in names.items()}
    lost_from = (await seen(a, names["put"]))[0].revision
    await a.stop()
    newest = await revision_of(etcd)
    await asyncio.to_thread(etcd.restore, copy)
    await b.start()
    since = await b.put(names["put"])
    await b.directory.delete(names["deleted"], make_intent(now_s=CLOCK.wall_s()))
    assert (await seen(b, names["deleted"]))[0].revision < lost_from
    await bring_past(etcd, newest)
    if is_interrupted:
        monkeypatch.setattr(ClusteredDirectory, "reinsert", interrupted(ClusteredDirectory.reinsert))
    await a.start()
    assert (await seen(a, names["put"]))[0].version == since
    assert (await seen(a, names["deleted"]))[0].state is State.TOMBSTONE
    assert (await seen(a, names["only"]))[0].version == lost["only"]
    if not is_interrupted:  # else what was before can no longer be told from what came since
        assert (await seen(a, names["older"]))[0].version == lost["older"]


def interrupted(reinsert: Callable[..., Awaitable[bool]]) -> Callable[..., Awaitable[bool]]:
    """The same, but the second call fails."""
    calls = itertools.count(1)

    async def insert(*args: object) -> bool:
        if next(calls) == 2:
            raise DirectoryUnavailableError("not yet")
        return await reinsert(*args)

    return insert


@pytest.mark.parametrize("what", ["noted", "dropped"])
async def test_holder_of_what_a_node_wrote_that_is_lost_with_it(etcd: EtcdServer, start: Start, what: str) -> None:
    """The holder changed nothing itself since the copy: it attests what it learnt."""
    a, b = await start("a"), await start("b")
    version = await a.put(SHARD, b)
    if what == "noted":
        await a.persist(SHARD, version)
        b.finish(version)
    await b.remembering.refresh()
    copy = await asyncio.to_thread(etcd.save)
    if what == "noted":
        version = await a.put(SHARD, b)
    else:
        await a.persist(SHARD, version)
        b.finish(version)
    await b.remembering.refresh()
    attested = b.cluster.ledger.newest(era_of(b))
    await b.remembering.refresh()
    assert b.cluster.ledger.newest(era_of(b)) == attested  # as nothing is new
    await a.stop()
    await b.stop()
    newest = await revision_of(etcd)
    await asyncio.to_thread(etcd.restore, copy)
    await bring_past(etcd, newest)
    await b.start()
    found = await b.directory.get(SHARD)
    assert (found.record and found.record.version) == (version if what == "noted" else None)
    await a.start()


async def test_what_another_process_of_the_node_saw(etcd: EtcdServer, start: Start) -> None:
    a = await start("a")
    era, version = era_of(a), await a.put(SHARD)
    a.cluster.ledger.doubt(era)
    await joined_after(a, era)
    assert (await seen(a, SHARD))[0].version == version
    # It outlives all processes of the node.
    era = era_of(a)
    a.cluster.ledger.doubt(era)
    await a.stop()
    await a.start()
    assert era_of(a) != era
    assert (await seen(a, SHARD))[0].version == version


async def test_copy_of_an_era_that_was_left(etcd: EtcdServer, start: Start) -> None:
    a = await start("a")
    left = era_of(a)
    owed, finished = await a.put(SHARD), await a.put(object_name("finished"))
    copy = await asyncio.to_thread(etcd.save)
    await a.stop()
    async with opened(etcd) as other:
        await begin_era(other, a.cluster.keys, await find_era(other, a.cluster.keys))
    await a.start()
    second = era_of(a)
    assert second != left
    await a.persist(object_name("finished"), finished)
    await asyncio.to_thread(etcd.restore, copy)
    await joined_after(a, second)
    assert era_of(a) != left
    assert (await seen(a, SHARD))[0].version == owed
    found = await a.directory.get(object_name("finished"))
    assert (found.record, found.pending) == (None, None)


async def test_it_goes_back_again_while_it_is_told(
    etcd: EtcdServer, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = await start("a")
    versions = {key: await a.put(object_name(key)) for key in ("k0", "k1", "k2")}
    era = era_of(a)
    copies: list[Path] = []
    insert = ClusteredDirectory.reinsert

    async def again(directory: ClusteredDirectory, *args: object) -> bool:
        if not copies:
            copies.append(await asyncio.to_thread(etcd.save))
        done = await insert(directory, *args)  # type: ignore[arg-type]
        if len(copies) == 1:
            newest = await revision_of(etcd)
            copies.append(copies[0])
            await asyncio.to_thread(etcd.restore, copies[0])
            await bring_past(etcd, newest)
        return done

    monkeypatch.setattr(ClusteredDirectory, "reinsert", again)
    a.cluster.ledger.doubt(era)
    await joined_after(a, era)
    for key, version in versions.items():
        assert (await seen(a, object_name(key)))[0].version == version


async def test_nothing_else_looks_like_it(etcd: EtcdServer, start: Start) -> None:
    """Restarts of etcd and of the node, compaction, receipts that were cleared."""
    a = await start("a")
    era = era_of(a)
    for key in ("one", "two"):
        await a.put(object_name(key))
        await asyncio.to_thread(etcd.restart)
        await a.put(object_name(key))
        await asyncio.to_thread(etcd.compact, await revision_of(etcd))
        await a.directory.expire_finished(CLOCK.wall_s() + 3600.0)
        nobodys = ClusteredDirectory(a.cluster.client, a.cluster.keys)
        await nobodys.expire_finished(CLOCK.wall_s() + 3600.0)
        await nobodys.close()
        await a.put(object_name(key))
        await a.directory.attest()
        await a.remembering.refresh()
        await a.stop()
        await a.start()
    assert era_of(a) == era
    assert not a.cluster.ledger.is_doubted(era)


# -- one process
async def test_client_that_saw_it_believes_no_more(etcd: EtcdServer) -> None:
    agreed, doubted = [Agreed(1, 0)], list[Agreed | None]()
    async with opened(etcd) as first:
        await first.connect()
        agreed[0] = Agreed(1, first.cluster_id)
        client = EtcdClient(
            Access(etcd.endpoints), CLOCK, random.Random(0), agreed=lambda: agreed[0], on_doubt=doubted.append
        )
        copy = await asyncio.to_thread(etcd.save)
        await bring_past(etcd, await revision_of(etcd) + 5)
        newest = (await client.read(Range(b"x"))).revision
        await asyncio.to_thread(etcd.restore, copy)
        with pytest.raises(ForeignDirectoryError):
            await client.read(Range(b"x"))
        await bring_past(etcd, newest)
        for _ in range(2):
            with pytest.raises(ForeignDirectoryError):
                await client.read(Range(b"x"))
            with pytest.raises(ForeignDirectoryError):
                await client.txn(Txn((), (Put(b"x", b""),)))
            with pytest.raises(ForeignDirectoryError):
                await client.keep_alive(1)
        assert doubted == [agreed[0]]
        assert client.is_doubted
        agreed[0] = replace(agreed[0], era=2)
        assert (await client.read(Range(b"x"))).revision > newest
        assert not client.is_doubted
        # What was seen of a directory that was given up since says nothing of this one.
        client.doubt(client.generation - 1, "late")
        await client.read(Range(b"x"))
        await client.close()


async def test_worker_tells_the_others_of_its_node(etcd: EtcdServer, tmp_path: Path) -> None:
    Board.make(tmp_path / "board")
    url = f"etcd://{etcd.endpoints[0]}/{new_uid(CLOCK.wall_s())}"
    context = replace(context_of_member(tmp_path, url, "a"), role=ChildRole.WORKER)
    async with AsyncExitStack() as stack, opened(etcd) as other:
        worker: Cluster = await stack.enter_async_context(open_cluster(context, CLOCK))
        era = await begin_era(other, worker.keys, None)
        board = Board(tmp_path / "board", writable=True)
        stack.callback(board.close)
        board.post(Posted(1, 0.0, ABOUT, era.number, other.cluster_id))
        copy = await asyncio.to_thread(etcd.save)
        await bring_past(etcd, await revision_of(etcd) + 5)
        await worker.client.connect()
        await asyncio.to_thread(etcd.restore, copy)
        with pytest.raises(ForeignDirectoryError):
            await worker.client.connect()
        assert worker.ledger.is_doubted(era.number)
        board.post(Posted(1, 0.0, ABOUT, era.number + 1, other.cluster_id))
        assert not worker.ledger.is_doubted(worker.standing.era())


@pytest.mark.parametrize("wrote_before", [False, True])
async def test_commit_of_a_process_that_lost_nothing_itself(
    etcd: EtcdServer, tmp_path: Path, wrote_before: bool
) -> None:
    """Whether its receipt is older than the copy or was never there: another process of the node has lost something,
    and nothing may be written over that."""
    keys = Keys(f"/{new_uid(CLOCK.wall_s())}")
    ledger = Ledger.open(tmp_path / "ledger", MAP_BYTES)
    async with opened(etcd) as one, opened(etcd) as two:
        member = Membership(one, keys, "a", ABOUT, lease_s=60)
        standing = await member.join()
        worker, other = (ClusteredDirectory(client, keys, standing, ledger, lambda: 7) for client in (one, two))
        name = object_name("k")
        if wrote_before:
            await other.put(name, make_version("v0"), make_intent(holders=(standing.me,)))
        copy = await asyncio.to_thread(etcd.save)
        await worker.put(SHARD, make_version("v1"), make_intent(holders=(standing.me,)))
        newest = ledger.newest(7)
        await asyncio.to_thread(etcd.restore, copy)
        await bring_past(etcd, newest)
        with pytest.raises(ForeignDirectoryError):
            await other.put(name, make_version("v2"), make_intent(holders=(standing.me,)))
        assert two.is_doubted
        async with opened(etcd) as third:
            record = (await ClusteredDirectory(third, keys).get(name)).record
            assert record is None or (record.version, record.state) == (make_version("v0"), State.DIRTY)
            late = ClusteredDirectory(third, keys, standing, ledger, lambda: 7)
            with pytest.raises(ForeignDirectoryError):  # one that begins only now
                await late.put(name, make_version("v2"), make_intent(holders=(standing.me,)))
            await late.close()
        for each in (worker, other):
            await each.close()
    ledger.close()


async def test_commit_whose_answer_comes_when_another_directory_was_told(
    etcd: EtcdServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody may rest on it: what this node told may lack it."""
    keys = Keys(f"/{new_uid(CLOCK.wall_s())}")
    ledger = Ledger.open(tmp_path / "ledger", MAP_BYTES)
    async with opened(etcd) as client:
        standing = await Membership(client, keys, "a", ABOUT, lease_s=60).join()
        directory = ClusteredDirectory(client, keys, standing, ledger, lambda: 7)
        txn = client.txn

        async def late(sent: Txn) -> Outcome:
            outcome = await txn(sent)
            client.begin_anew()
            return outcome

        monkeypatch.setattr(client, "txn", late)
        with pytest.raises(OutcomeUnknownError):
            await directory.put(SHARD, make_version("v1"), make_intent(holders=(standing.me,)))
        assert [entry.write.uid for entry in ledger.entries()] == ["v1"]
        await directory.close()
    ledger.close()


async def test_watch_looks_once_it_is_open(etcd: EtcdServer) -> None:
    """One that began before etcd went back, and is opened behind that, would stay silent."""
    async with opened(etcd) as client:
        copy = await asyncio.to_thread(etcd.save)
        await client.txn(Txn((), (Put(b"w", b""),)))
        newest = await revision_of(etcd)
        known = EtcdClient(
            Access(etcd.endpoints), CLOCK, random.Random(0), known=lambda: Known(witness=b"w", witnessed=newest)
        )
        async with Watch(known, b"w", b"", newest + 1) as watch:
            await asyncio.to_thread(etcd.restore, copy)
            await bring_past(etcd, newest)
            with pytest.raises(ForeignDirectoryError):
                await watch.next()
        await known.close()
