"""What only the directory of a cluster does: who owns and who holds what, over the deaths of nodes."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from tests.directoryrows import check_rows

from tiergate.clock import SystemClock
from tiergate.config import Persist
from tiergate.directory import changes
from tiergate.directory.base import ClusterDirectory, Directory, Held
from tiergate.directory.bynode import ByNode
from tiergate.directory.clustered import ClusteredDirectory
from tiergate.directory.codec import pack
from tiergate.directory.committer import Change
from tiergate.directory.keys import Keys
from tiergate.directory.membership import Membership
from tiergate.errors import FencedError, HolderLostError, MembershipOverError
from tiergate.etcd.client import EtcdClient
from tiergate.etcd.values import Found, Outcome, Put, Range, Txn
from tiergate.model import NO_BASE, About, Holder, OriginUpload, Pending, Role, State, Step, new_uid
from tiergate.policy.persistence import Beginning
from tiergate.testing.directory_contract import (
    BUCKET,
    MARKER,
    SHARD,
    DirectoryContract,
    keys_of,
    make_completed,
    make_intent,
    make_part,
    make_upload,
    make_version,
    object_name,
    pending_of,
    put,
    put_clean,
    record_of,
)
from tiergate.testing.etcd import needs_etcd

pytestmark = needs_etcd


class Member:
    """A node, with the directory of one of its processes."""

    def __init__(self, client: EtcdClient, keys: Keys, name: str) -> None:
        self._client = client
        self._membership = Membership(client, keys, name, About(f"{name}:1"), lease_s=60)
        self.directory = ClusteredDirectory(client, keys, self)

    @property
    def me(self) -> Holder:
        return self._membership.epoch.me

    async def join(self) -> Holder:
        """Become a member, of a new epoch."""
        await self._membership.join()
        return self.me

    async def die(self) -> None:
        """Its lease is over; it believes in it still."""
        await self._client.revoke(self._membership.ticket.lease_id)

    async def leave(self) -> None:
        """The same, and it knows."""
        await self._membership.leave()


class Cluster:
    """The nodes of a test."""

    def __init__(self, client: EtcdClient, keys: Keys) -> None:
        self._client = client
        self._keys = keys
        self.members: list[Member] = []

    async def join(self, name: str) -> Member:
        """One more."""
        member = Member(self._client, self._keys, name)
        self.members.append(member)
        await member.join()
        return member


@pytest.fixture
def keys() -> Keys:
    """A place that no other test uses."""
    return Keys(f"/{new_uid(SystemClock().wall_s())}")


@pytest.fixture
async def cluster(client: EtcdClient, keys: Keys) -> AsyncIterator[Cluster]:
    """Nobody is a member yet. In the end all rows must be true."""
    cluster = Cluster(client, keys)
    yield cluster
    for member in cluster.members:
        await member.directory.close()
    await check_rows(client, keys)


class TestMember(DirectoryContract):
    """A member keeps the contract of every directory, for what it owns and holds."""

    @pytest.fixture
    async def directory(self, cluster: Cluster) -> Directory:
        return (await cluster.join("a")).directory

    async def test_live_holders_are_versions_and_uploads(self, directory: Directory) -> None:
        """Those that it said to hold."""
        me = (await put_owner(directory)).owner
        assert me is not None
        for name, uid in ((SHARD, "v1"), (SHARD, "v2"), (object_name("clean"), "v3")):
            await put(directory, name, uid, make_intent(holders=(me,)))
        await directory.persisted(object_name("clean"), "v3", "o3", 1.0)
        await put(directory, object_name("elsewhere"), "v4")
        await put(directory, object_name("gone"), "v5", make_intent(holders=(me,)))
        await directory.delete(object_name("gone"), make_intent())
        await directory.create_upload(make_upload("up1"))
        await put_clean(directory, MARKER, "m1", "o1", Role.MARKER)
        await directory.withdraw(MARKER, "m1", 1.0)
        assert await directory.live_holders() == {"v2", "v3", "up1", "m1"}
        assert await directory.owed_holders() == {"v2", "up1", "m1"}


async def put_owner(directory: Directory) -> Pending:
    await put(directory, object_name("own"), "own")
    return await pending_of(directory, object_name("own"))


def protocol(member: Member) -> ClusterDirectory:
    """The type checkers see that it is one."""
    return member.directory


# -- owners
async def test_who_commits_owns_and_owes(cluster: Cluster) -> None:
    a, b = await cluster.join("a"), await cluster.join("b")
    await put(a.directory, object_name("1"), "v1", make_intent(now_s=20.0))
    await put(b.directory, object_name("2"), "v2", make_intent(now_s=30.0))
    await a.directory.create_upload(make_upload("up", object_name("3")))
    await b.directory.finish_upload("up", make_completed("v3"), [], make_intent(now_s=10.0))
    await a.directory.delete(object_name("4"), make_intent(now_s=40.0))
    await put_clean(b.directory, MARKER, "m1", "o1", Role.MARKER)
    await a.directory.withdraw(MARKER, "m1", 5.0)
    assert {write.owner for write in await a.directory.pending()} == {a.me}
    assert {write.owner for write in await b.directory.pending()} == {b.me}
    assert set(keys_of(await a.directory.pending())) == {"1", "4", MARKER.key}
    assert keys_of(await b.directory.pending()) == ["2", "3"]
    assert keys_of(await a.directory.owed_by("b")) == ["2", "3"]
    assert await b.directory.owed_by("c") == []
    assert await b.directory.owners() == {"a", "b"}
    assert await a.directory.oldest_pending_s() == 5.0
    assert await b.directory.oldest_pending_s() == 10.0
    await b.directory.quarantine(object_name("3"), "v3", "refused")
    assert await b.directory.oldest_pending_s() == 30.0
    await b.directory.quarantine(object_name("2"), "v2", "refused")
    assert await b.directory.oldest_pending_s() is None
    assert (await a.directory.counts())["pending"] == 3
    assert (await b.directory.counts())["pending_bytes"] == 20


async def test_superseding_put_of_another_takes_over_with_the_place(cluster: Cluster) -> None:
    a, b = await cluster.join("a"), await cluster.join("b")
    first = await put(a.directory, SHARD, "v1")
    await a.directory.begin(SHARD, "v1", NO_BASE)
    await a.directory.note_upload(SHARD, "v1", OriginUpload("u1", 1.0))
    committed = await put(b.directory, SHARD, "v2")
    after = await pending_of(b.directory, SHARD)
    assert (after.owner, after.place, after.revision) == (b.me, first.revision, committed.revision)
    assert after.leftovers == (OriginUpload("u1", 1.0),)
    assert await a.directory.pending() == []
    with pytest.raises(FencedError):
        await a.directory.note_upload(SHARD, "v1", None)
    # What the first one brought to the origin is found there by the second, which may have begun meanwhile.
    begun = await b.directory.begin(SHARD, "v2", "asked")
    assert await a.directory.persisted(SHARD, "v1", "o1", 1.0) is None
    assert await pending_of(b.directory, SHARD) == begun
    await a.directory.delete(SHARD, make_intent())
    assert (await pending_of(a.directory, SHARD)).owner == a.me
    assert await a.directory.owners() == {"a"}


async def test_write_of_a_living_other_is_not_touched(cluster: Cluster) -> None:
    a, b = await cluster.join("a"), await cluster.join("b")
    await put(a.directory, MARKER, "m1", make_intent(Role.MARKER))
    before = await a.directory.get(MARKER)
    with pytest.raises(FencedError):
        await b.directory.begin(MARKER, "m1", NO_BASE)
    with pytest.raises(FencedError):
        await b.directory.note_upload(MARKER, "m1", OriginUpload("u1", 1.0))
    with pytest.raises(FencedError):
        await b.directory.rebase(MARKER, "m1", "o1")
    with pytest.raises(FencedError):
        await b.directory.persisted(MARKER, "m1", "o1", 1.0)
    await b.directory.quarantine(MARKER, "m1", "refused")
    assert not await b.directory.give(MARKER, "m1", b.me)
    assert await b.directory.claim(MARKER, "m1") is None
    assert await a.directory.get(MARKER) == before


async def test_marker_of_another_is_withdrawn_and_settled_for_a_members_sake(cluster: Cluster) -> None:
    """It is another write that takes it out of the origin, or a client that says that its set is whole."""
    a, b = await cluster.join("a"), await cluster.join("b")
    await put(a.directory, SHARD, "s1")
    await put(a.directory, MARKER, "m1", make_intent(Role.MARKER))
    await put(b.directory, SHARD, "s2", make_intent(now_s=50.0))
    await b.directory.withdrawn(MARKER, "m1")
    pending = await pending_of(a.directory, MARKER)
    assert (pending.owner, pending.base, pending.withdrawn, pending.disturbed_s) == (a.me, NO_BASE, True, 50.0)
    await b.directory.settled_set(MARKER, "m1")
    assert (await pending_of(a.directory, MARKER)).disturbed_s == 0.0


async def test_withdrawn_clean_marker_is_held_and_owned_by_who_did_it(cluster: Cluster) -> None:
    a, b = await cluster.join("a"), await cluster.join("b")
    await put(a.directory, MARKER, "m1", make_intent(Role.MARKER, holders=(a.me,)))
    await a.directory.persisted(MARKER, "m1", "o1", 1.0)
    withdrawn = await b.directory.withdraw(MARKER, "m1", 7.0)
    assert withdrawn is not None
    assert withdrawn == await pending_of(a.directory, MARKER)
    assert withdrawn.owner == b.me
    assert (await a.directory.get(MARKER)).holders == {"m1": {a.me, b.me}}
    assert await b.directory.live_holders() == {"m1"}


async def test_claim_of_a_dead_nodes_write_keeps_all_but_the_owner(cluster: Cluster) -> None:
    a, b = await cluster.join("a"), await cluster.join("b")
    await put(a.directory, SHARD, "v1", make_intent(Role.LARGE, holders=(a.me, b.me), now_s=9.0))
    await a.directory.begin(SHARD, "v1", NO_BASE)
    before = await a.directory.note_upload(SHARD, "v1", OriginUpload("u1", 1.0))
    assert await a.directory.claim(SHARD, "v1") == before
    assert await b.directory.claim(SHARD, "v1") is None
    await a.die()
    assert await b.directory.owners() == {"a"}
    assert await b.directory.owed_by("a") == [before]
    claimed = await b.directory.claim(SHARD, "v1")
    assert claimed == replace(before, owner=b.me)
    assert await b.directory.pending() == [claimed]
    assert await b.directory.oldest_pending_s() == 9.0
    assert await b.directory.owed_by("a") == []
    assert await b.directory.owners() == {"b"}
    for name, uid in ((SHARD, "v0"), (MARKER, "v1")):
        assert await b.directory.claim(name, uid) is None
    assert await b.directory.persisted(SHARD, "v1", "o1", 1.0) == make_version("v1")
    assert await b.directory.claim(SHARD, "v1") is None


async def test_parked_write_of_a_dead_node_stays_parked(cluster: Cluster) -> None:
    a, b = await cluster.join("a"), await cluster.join("b")
    await put(a.directory, SHARD, "v1", make_intent(base=NO_BASE, parked=True, holders=(a.me, b.me)))
    assert (await a.directory.pending(), await b.directory.parked()) == ([], [])
    assert await a.directory.parked() == await b.directory.owed_by("a") == [await pending_of(b.directory, SHARD)]
    assert await b.directory.owners() == {"a"}
    await a.die()
    claimed = await b.directory.claim(SHARD, "v1")
    assert claimed is not None
    assert (claimed.parked, claimed.owner) == (True, b.me)
    assert (await b.directory.pending(), await b.directory.parked()) == ([], [claimed])
    assert await b.directory.owed_here(()) == [claimed]


async def test_parked_write_of_another_node_can_be_promoted(cluster: Cluster) -> None:
    a, b = await cluster.join("a"), await cluster.join("b")
    await put(a.directory, SHARD, "v1", make_intent(base=NO_BASE, parked=True))
    assert await b.directory.promote(await a.directory.parked(), 5.0) == 1
    write = await pending_of(a.directory, SHARD)
    assert (write.owner, await a.directory.pending(), await b.directory.pending()) == (a.me, [write], [])
    plan = await b.directory.decide(Beginning("bucket", "run/step_1/", "run/", Persist(), 1.0, may_park=False))
    assert await b.directory.park(SHARD, "v1", plan)
    assert await a.directory.parked() == [await pending_of(a.directory, SHARD)]


async def test_zombie_neither_finishes_nor_supersedes(cluster: Cluster) -> None:
    a, b = await cluster.join("a"), await cluster.join("b")
    await put(a.directory, SHARD, "v1")
    await a.die()
    claimed = await b.directory.claim(SHARD, "v1")
    for call in (
        a.directory.persisted(SHARD, "v1", "o1", 1.0),
        a.directory.begin(SHARD, "v1", NO_BASE),
        put(a.directory, SHARD, "v2"),
        a.directory.delete(SHARD, make_intent()),
        a.directory.begin_step(Step(SHARD, "t", "a", Role.SMALL, False, True)),
    ):
        # One that finds the write to be another's need not even ask whether it is a member.
        with pytest.raises((MembershipOverError, FencedError)):
            await call
    assert await pending_of(b.directory, SHARD) == claimed
    assert await a.directory.steps() == []
    old = a.me
    assert await a.join() != old
    with pytest.raises(FencedError):
        await a.directory.persisted(SHARD, "v1", "o1", 1.0)
    assert await a.directory.claim(SHARD, "v1") is None


async def test_node_that_is_back_owns_nothing_until_it_claims(cluster: Cluster) -> None:
    a, b = await cluster.join("a"), await cluster.join("b")
    await put(a.directory, object_name("1"), "v1")
    await put(a.directory, object_name("2"), "v2")
    await a.die()
    await a.join()
    assert await a.directory.pending() == []
    assert await a.directory.oldest_pending_s() is None
    with pytest.raises(FencedError):
        await a.directory.begin(object_name("1"), "v1", NO_BASE)
    assert keys_of(await a.directory.owed_by("a")) == ["1", "2"]
    mine = await a.directory.claim(object_name("1"), "v1")
    theirs = await b.directory.claim(object_name("2"), "v2")
    assert mine is not None
    assert theirs is not None
    assert (mine.owner, theirs.owner) == (a.me, b.me)
    assert await b.directory.claim(object_name("1"), "v1") is None
    assert await a.directory.pending() == [mine]


async def test_claim_by_rivals_has_one_winner(cluster: Cluster) -> None:
    dead = await cluster.join("dead")
    rivals = [await cluster.join(f"r{index}") for index in range(8)]
    names = [object_name(f"k{index}") for index in range(20)]
    await asyncio.gather(*(put(dead.directory, name, name.key) for name in names))
    await dead.die()
    ends = await asyncio.gather(*(rival.directory.claim(name, name.key) for name in names for rival in rivals))
    won = [end for end in ends if end is not None]
    assert sorted(keys_of(won)) == sorted(name.key for name in names)
    owed = [write for rival in rivals for write in await rival.directory.pending()]
    assert {write.name: write.owner for write in won} == {write.name: write.owner for write in owed}


async def test_quarantine_of_what_a_dead_node_owes_lasts_until_its_return(cluster: Cluster) -> None:
    a, b = await cluster.join("a"), await cluster.join("b")
    await put(a.directory, SHARD, "v1")
    await a.die()
    await b.directory.quarantine(SHARD, "v1", "lost")
    assert (await pending_of(b.directory, SHARD)).quarantined == "lost"
    await a.join()
    claimed = await a.directory.claim(SHARD, "v1")
    assert claimed is not None
    assert claimed.quarantined == "lost"
    assert await a.directory.oldest_pending_s() is None
    await a.directory.quarantine(SHARD, "v1", "")
    assert await a.directory.oldest_pending_s() == 1000.0


async def test_give_makes_a_living_other_the_owner(cluster: Cluster) -> None:
    a, b = await cluster.join("a"), await cluster.join("b")
    await put(a.directory, SHARD, "v1")
    before = await pending_of(a.directory, SHARD)
    gone = Holder("b", b.me.epoch + 1)
    for to in (gone, Holder("nobody", 1)):
        with pytest.raises(HolderLostError):
            await a.directory.give(SHARD, "v1", to)
    assert not await a.directory.give(SHARD, "v0", b.me)
    assert await a.directory.give(SHARD, "v1", b.me)
    assert await b.directory.pending() == [replace(before, owner=b.me)]
    assert not await a.directory.give(SHARD, "v1", b.me)
    with pytest.raises(FencedError):
        await a.directory.begin(SHARD, "v1", NO_BASE)


async def test_nobodys_write_can_be_claimed(cluster: Cluster, client: EtcdClient, keys: Keys) -> None:
    a = await cluster.join("a")
    tool = ClusteredDirectory(client, keys)
    await put(tool, SHARD, "v1")
    assert await a.directory.owners() == {""}
    assert keys_of(await a.directory.owed_by("")) == [SHARD.key]
    assert await a.directory.claim(SHARD, "v1") is not None
    with pytest.raises(FencedError):
        await tool.begin(SHARD, "v1", NO_BASE)
    assert keys_of(await tool.pending()) == [SHARD.key]
    await tool.close()


async def test_owed_here_is_what_a_node_owes_and_what_it_holds_for_others(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = await cluster.join("a"), await cluster.join("b")
    both = make_intent(holders=(a.me, b.me))
    for key, uid in (("copy", "v1"), ("here as well", "v2"), ("clean", "v3"), ("replaced", "v4")):
        await put(b.directory, object_name(key), uid, both)
    await b.directory.persisted(object_name("clean"), "v3", "o3", 1.0)
    await put(b.directory, object_name("replaced"), "v5")
    own = await put(a.directory, object_name("own"), "v6", make_intent(holders=(a.me,)))
    await put_clean(a.directory, object_name("gone"), "v7", "o7")
    await a.directory.delete(object_name("gone"), make_intent())
    dirty = {"v1", "v3", "v4", "v6", "up1", "on its way"}
    found = await a.directory.owed_here(dirty)
    assert keys_of(found) == ["copy", "own", "gone"]
    assert found == sorted(found, key=lambda write: write.place)
    assert found[1].place == own.revision

    async def held(self: object, node: str, at: object) -> list[Held]:
        raise AssertionError("all that a node holds was read")

    # Most of what it holds is in the origin: where nothing is dirty but what it owes, that is not looked at.
    monkeypatch.setattr(ByNode, "_held", held)
    assert keys_of(await a.directory.owed_here({"v6"})) == ["own", "gone"]


async def test_unpersisted_is_everybodys_with_who_holds_it(cluster: Cluster) -> None:
    a, b = await cluster.join("a"), await cluster.join("b")
    await put(a.directory, object_name("1"), "v1", make_intent(holders=(a.me, b.me)))
    await put(b.directory, object_name("2"), "v2", make_intent(holders=(b.me,)))
    await put_clean(b.directory, object_name("3"), "v3", "o3")
    await put(a.directory, object_name("3"), "v4", make_intent(holders=(a.me,)))
    await put_clean(a.directory, object_name("4"), "v5", "o5")
    await a.directory.delete(object_name("4"), make_intent())
    await put_clean(a.directory, object_name("5"), "v6", "o6")
    found = await b.directory.unpersisted(100)
    assert [(write.name.key, held) for write, held in found] == [
        ("1", {a.me, b.me}),
        ("2", {b.me}),
        ("3", {a.me}),
        ("4", frozenset()),
    ]
    assert [write for write, _ in found] == [await pending_of(a.directory, object_name(key)) for key in "1234"]
    assert await b.directory.unpersisted(2) == found[:2]
    await b.directory.release(object_name("1"), "v1", "a")
    assert (await a.directory.unpersisted(1))[0][1] == {b.me}


async def test_owed_bytes_are_this_nodes_own(cluster: Cluster) -> None:
    a, b = await cluster.join("a"), await cluster.join("b")
    await put(a.directory, object_name("1"), "v1", size_bytes=100)
    await put(b.directory, object_name("2"), "v2", size_bytes=20)
    assert (await a.directory.owed_bytes(), await b.directory.owed_bytes()) == (100, 20)
    await put(b.directory, object_name("1"), "v3", size_bytes=3)
    assert (await a.directory.owed_bytes(), await b.directory.owed_bytes()) == (0, 23)
    # The same key, time and owner, and another size.
    await put(b.directory, object_name("1"), "v4", size_bytes=4)
    assert await b.directory.owed_bytes() == 24
    await a.die()
    await a.join()
    assert await a.directory.owed_bytes() == 0


# -- membership
async def test_past_its_membership_a_node_reads_but_owns_nothing(cluster: Cluster) -> None:
    a = await cluster.join("a")
    await put(a.directory, SHARD, "v1", make_intent(holders=(a.me,)))
    seen = await a.directory.get(SHARD)
    await a.leave()
    assert (await a.directory.get(SHARD)).pending == seen.pending
    directory = a.directory
    own = (directory.pending, directory.oldest_pending_s, directory.owed_bytes)
    for call in (*own, directory.live_holders, directory.owed_holders):
        with pytest.raises(MembershipOverError):
            await call()
    with pytest.raises(MembershipOverError):
        await put(a.directory, SHARD, "v2")
    await a.join()
    # It holds its memory still, and must not drop what is in it before it has looked at it.
    assert await a.directory.live_holders() == await a.directory.owed_holders() == {"v1"}


async def test_change_made_up_in_one_epoch_does_not_happen_in_the_next(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = await cluster.join("a")
    committer = a.directory._changes._committer
    real = committer.commit

    async def commit(change: Change) -> int | None:
        await a.die()
        await a.join()
        return await real(change)

    monkeypatch.setattr(committer, "commit", commit)
    with pytest.raises(MembershipOverError):
        await put(a.directory, SHARD, "v1")
    assert (await a.directory.get(SHARD)).record is None


# -- holders
async def test_holders_are_told_by_key_and_by_node(cluster: Cluster) -> None:
    a, b = await cluster.join("a"), await cluster.join("b")
    awkward = object_name("é/\x01 x//")
    for name in (SHARD, awkward):
        await put(a.directory, name, "v1", make_intent(holders=(a.me, b.me)))
    assert (await b.directory.get(SHARD)).holders == {"v1": {a.me, b.me}}
    held = await a.directory.held_by("b")
    assert sorted(held, key=repr) == sorted([Held(name, "v1", b.me.epoch) for name in (SHARD, awkward)], key=repr)
    replaced = await put(b.directory, SHARD, "v2", make_intent(holders=(b.me,)))
    assert replaced.held_by == {a.me, b.me}
    assert (await b.directory.get(SHARD)).holders == {"v2": {b.me}}
    through = await a.directory.put_through(SHARD, make_version("v3"), "o3", make_intent(holders=(a.me,)))
    assert through.held_by == {b.me}
    deleted = await b.directory.delete(SHARD, make_intent())
    assert deleted is not None
    assert deleted.held_by == {a.me}
    assert await a.directory.held_by("a") == [Held(awkward, "v1", a.me.epoch)]
    await a.directory.create_upload(make_upload("up", awkward))
    await a.directory.put_part("up", replace(make_part(1, "p"), at=(a.me,)))
    assert (await b.directory.list_parts("up"))[0].at == (a.me,)
    completed = make_completed("v4", make_part(1, "p"))
    finished = await b.directory.finish_upload("up", completed, [], make_intent(holders=(b.me,)))
    assert finished.held_by == {a.me, b.me}
    assert await a.directory.held_by("a") == []


async def test_survey_tells_who_holds_each_version(cluster: Cluster) -> None:
    a, b = await cluster.join("a"), await cluster.join("b")
    keys = ["k", "k/1", "k\x01", "l"]
    for key in keys:
        await put(a.directory, object_name(key), f"of {key}", make_intent(holders=(a.me, b.me)))
    await put(b.directory, object_name("k/1"), "newer", make_intent(holders=(b.me,)))
    found = await b.directory.survey(BUCKET, "k", "", 10)
    assert [each.holders for each in found] == [{"of k": {a.me, b.me}}, {"of k\x01": {a.me, b.me}}, {"newer": {b.me}}]
    for page in (found, await b.directory.survey(BUCKET, "", "k", 2)):
        for each in page:
            assert each.record is not None
            assert (each, each.holders) == (seen := await a.directory.get(each.record.name), seen.holders)


async def test_node_that_is_back_adopts_what_it_holds(cluster: Cluster) -> None:
    a, b = await cluster.join("a"), await cluster.join("b")
    old = a.me
    for key in ("1", "2"):
        await put(b.directory, object_name(key), key, make_intent(holders=(b.me, a.me)))
    await a.die()
    await a.join()
    held = await a.directory.held_by("a")
    assert held == [Held(object_name(key), key, old.epoch) for key in ("1", "2")]
    with pytest.raises(HolderLostError):
        await a.directory.hold(object_name("1"), "1", [old])
    assert await a.directory.hold(object_name("1"), "1", [a.me])
    await a.directory.release(object_name("2"), "2", "a")
    assert await b.directory.held_by("a") == [Held(object_name("1"), "1", a.me.epoch)]
    assert (await b.directory.get(object_name("1"))).holders == {"1": {a.me, b.me}}
    assert not await a.directory.hold(object_name("1"), "0", [a.me])
    await a.directory.release(object_name("3"), "3", "a")


async def test_holder_that_comes_while_its_version_is_replaced_leaves_no_row(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = await cluster.join("a"), await cluster.join("b")
    await put(a.directory, SHARD, "v1", make_intent(holders=(a.me,)))
    committer = a.directory._changes._committer
    real = committer.commit

    async def commit(change: Change) -> int | None:
        monkeypatch.setattr(committer, "commit", real)
        assert await b.directory.hold(SHARD, "v1", [b.me])
        return await real(change)

    monkeypatch.setattr(committer, "commit", commit)
    assert (await put(a.directory, SHARD, "v2")).held_by == {a.me, b.me}
    assert await b.directory.held_by("b") == []


async def test_version_that_very_many_hold_is_replaced_and_trimmed(
    cluster: Cluster, client: EtcdClient, keys: Keys
) -> None:
    a = await cluster.join("a")
    nodes = [f"n{index:04}" for index in range(1200)]
    for start in range(0, len(nodes), 100):
        rows = (Put(keys.node(node), pack(About("n:1"))) for node in nodes[start : start + 100])
        await client.txn(Txn((), tuple(rows)))
    found = (await client.read(keys.all("n"))).found(0)
    holders = [Holder(row.key[len(keys.table("n")) :].decode(), row.create_revision) for row in found]
    names = [object_name(f"k{index}") for index in range(3)]
    for name in names:
        await put_clean(a.directory, name, "v1", "o1")
        for start in range(0, len(holders), 90):
            assert await a.directory.hold(name, "v1", holders[start : start + 90])
    assert len(await a.directory.trim_clean(1)) == 2
    assert len((await put(a.directory, names[2], "v2")).held_by) == 1201
    assert await a.directory.held_by("n0007") == []


# -- steps
async def test_steps_of_members_of_one_set_never_fail_each_other(
    cluster: Cluster, client: EtcdClient, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "ATTEMPTS_COUNT", 1)
    directories = [ClusteredDirectory(client, keys) for _ in range(8)]
    steps = [
        Step(object_name(f"run/step_1/{index}"), f"t{index}", f"p{index % 8}", Role.SMALL, index % 3 == 0, True)
        for index in range(200)
    ]
    begun = await asyncio.gather(*(directories[index % 8].begin_step(step) for index, step in enumerate(steps)))
    assert all(begun)
    ends = await asyncio.gather(*(directories[index % 8].end_step(step) for index, step in enumerate(steps)))
    assert len(ends) == len(steps)
    assert await directories[0].steps() == []
    for directory in directories:
        await directory.close()


async def test_steps_at_once_of_many_processes_exclude_what_collides(
    cluster: Cluster, client: EtcdClient, keys: Keys
) -> None:
    directories = [ClusteredDirectory(client, keys) for _ in range(6)]
    for turn in range(8):
        members = [Step(object_name(f"r/1/{n}"), f"t{n}", f"p{n}", Role.SMALL, False, True) for n in range(3)]
        marker = Step(object_name("r/1/.metadata"), "m", "p9", Role.MARKER, False, False)
        outer = Step(object_name("r/.metadata"), "o", "p8", Role.MARKER, False, False)
        steps = [*members, marker, outer] if turn % 2 else [outer, marker, *members]
        granted = await asyncio.gather(*(directories[index].begin_step(step) for index, step in enumerate(steps)))
        stand = [step for step, is_granted in zip(steps, granted, strict=True) if is_granted]
        assert stand
        assert {step.role for step in stand} in ({Role.MARKER}, {Role.SMALL})
        assert {step.uid for step in await directories[0].steps()} == {step.uid for step in stand}
        for step in stand:
            await directories[0].end_step(step)
    for directory in directories:
        await directory.close()


# -- what reads cost
async def test_what_others_owe_and_hold_costs_nothing(
    cluster: Cluster, client: EtcdClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = await cluster.join("a"), await cluster.join("b")
    me, other = a.me, b.me
    await put(a.directory, object_name("s/m"), "m", make_intent(Role.MARKER))
    small = make_intent(Role.SMALL, start_revision=(await a.directory.revision()))
    await put(a.directory, object_name("s/own"), "own", replace(small, holders=(me, other)))
    names = [object_name(f"s/{index}") for index in range(400)]
    await asyncio.gather(*(put(b.directory, name, name.key, make_intent(holders=(other,))) for name in names))
    await put(a.directory, object_name("s/large"), "large", make_intent(Role.LARGE))
    read_count = 0
    real = client.read

    async def read(*ranges: Range) -> Outcome:
        nonlocal read_count
        outcome = await real(*ranges)
        read_count += sum(len(answer.rows) for answer in outcome.answers if isinstance(answer, Found))
        return outcome

    monkeypatch.setattr(client, "read", read)
    own = await a.directory.pending()
    assert set(keys_of(own)) == {"s/m", "s/own", "s/large"}
    assert await a.directory.oldest_pending_s() == 1000.0
    assert await a.directory.owners() == {"a", "b"}
    assert await a.directory.live_holders() == await a.directory.owed_holders() == {"own"}
    assert (await a.directory.counts())["pending"] == 3
    assert keys_of(await a.directory.beside([write for write in own if write.role is not Role.MARKER])) == [
        "s/own",
        "s/large",
    ]
    assert read_count < 150
    await put(a.directory, object_name("s/last"), "last", make_intent(Role.MARKER))
    read_count = 0
    assert len(await a.directory.beside([await pending_of(a.directory, object_name("s/last"))])) > 1
    assert read_count < 150


async def test_state_of_keys_is_what_it_was_for_all(cluster: Cluster) -> None:
    """Read-after-write on another node, and what it knows of the origin."""
    a, b = await cluster.join("a"), await cluster.join("b")
    await put(a.directory, SHARD, "v1", make_intent(holders=(a.me,)))
    await a.directory.persisted(SHARD, "v1", "o1", 5.0)
    record = await record_of(b.directory, SHARD)
    assert (record.state, record.origin_etag) == (State.CLEAN, "o1")
    assert protocol(a)
