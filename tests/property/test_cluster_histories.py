"""Nodes that die and come back share a directory: rows stay true, each write has the owner that it should have, and the
fence sees through `beside` what it would see in all that is pending."""

import random
from collections.abc import AsyncIterator

import pytest
from tests.directoryrows import check_rows

from tiergate.clock import SystemClock
from tiergate.config import FenceMode
from tiergate.directory import beside, clusterreads
from tiergate.directory.base import Directory, Held, Intent
from tiergate.directory.clustered import ClusteredDirectory
from tiergate.directory.keys import Keys
from tiergate.directory.membership import Membership
from tiergate.errors import FencedError, HolderLostError, MembershipOverError
from tiergate.etcd.client import EtcdClient
from tiergate.model import About, Holder, Kind, ObjectName, Pending, Role, new_uid
from tiergate.testing.directory_contract import make_version
from tiergate.testing.etcd import needs_etcd
from tiergate.writeback.fence import PendingView, blockers

pytestmark = needs_etcd

NAMES = [
    ObjectName(bucket, key)
    for bucket in ("b", "b2")
    for key in ("r/1/s", "r/1/t", "r/1/u", "r/1/.metadata", "r/1/x.index.json", "r/1/p", "r/.metadata", "r/2/s", "top")
]
POINTERS = ("r/1/p",)

HISTORIES_COUNT = 8
CALLS_COUNT = 80


@pytest.fixture
async def keys(client: EtcdClient) -> AsyncIterator[Keys]:
    """A place that no other test uses, whose rows are true in the end."""
    keys = Keys(f"/{new_uid(SystemClock().wall_s())}")
    yield keys
    await check_rows(client, keys)


class Node:
    """A node through all of its epochs: it may believe in one that is over."""

    def __init__(self, client: EtcdClient, keys: Keys, name: str) -> None:
        self._client = client
        self._membership = Membership(client, keys, name, About(f"{name}:1"), lease_s=60)
        self.name = name
        self.directory = ClusteredDirectory(client, keys, self)
        self.is_alive = False

    @property
    def me(self) -> Holder:
        return self._membership.epoch.me

    async def join(self) -> None:
        await self._membership.join()
        self.is_alive = True

    async def die(self) -> None:
        await self._client.revoke(self._membership.ticket.lease_id)
        self.is_alive = False


def role_of(name: ObjectName, rng: random.Random) -> Role:
    if name.key.endswith((".metadata", ".index.json")):
        return Role.MARKER
    return Role.POINTER if name.key in POINTERS else rng.choice([Role.SMALL, Role.LARGE])


class History:
    """Random calls by two nodes, and what must come of them."""

    def __init__(self, client: EtcdClient, keys: Keys, seed: int) -> None:
        self.rng = random.Random(seed)
        self.nodes = [Node(client, keys, name) for name in "ab"]
        self.reader = ClusteredDirectory(client, keys)
        self.owners: dict[ObjectName, tuple[str, Holder]] = {}
        self.holders: dict[ObjectName, dict[str, int]] = {}

    async def close(self) -> None:
        for directory in (self.reader, *(node.directory for node in self.nodes)):
            await directory.close()

    async def step(self, count: int) -> None:
        """One call, by a node that may be dead."""
        rng, node = self.rng, self.rng.choice(self.nodes)
        name, uid = rng.choice(NAMES), f"v{count}"
        if rng.random() < 0.12:
            await (node.die() if node.is_alive else node.join())
            return
        call = rng.choice([self._write] * 3 + [self._finish, self._claim, self._give, self._hold, self._set_aside])
        before = await self.reader.get(name)
        try:
            await call(node, name, uid, before.pending)
        except MembershipOverError:
            assert not node.is_alive
            assert await self.reader.get(name) == before
        else:
            await self._compare(name)

    def _put_down(self, name: ObjectName, write: Pending | None) -> None:
        if write is None or write.owner is None:
            self.owners.pop(name, None)
        else:
            self.owners[name] = (write.uid, write.owner)

    async def _compare(self, name: ObjectName) -> None:
        seen = await self.reader.get(name)
        version = seen.record.version if seen.record else None
        owned = (seen.pending.uid, seen.pending.owner) if seen.pending else None
        assert owned == self.owners.get(name)
        expected = {Holder(node, epoch) for node, epoch in self.holders.get(name, {}).items()}
        assert seen.holders == ({version.uid: expected} if version and expected else {})

    async def _write(self, node: Node, name: ObjectName, uid: str, write: Pending | None) -> None:
        """A put, or a deletion."""
        start = await self.reader.revision() if self.rng.random() < 0.7 else 0
        alive = {each.me for each in self.nodes if each.is_alive}
        holders = tuple(sorted({node.me, *self.rng.sample(sorted(alive), min(len(alive), 1))}))
        intent = Intent(role_of(name, self.rng), start, 1000.0, "base", holders=holders)
        if self.rng.random() < 0.3:
            committed = await node.directory.delete(name, intent)
            if committed is None:
                return
            self.holders[name] = {}
        else:
            try:
                committed = await node.directory.put(name, make_version(uid), intent)
            except HolderLostError:
                assert not node.is_alive
                return
            held_by, self.holders[name] = self.holders.get(name, {}), {each.node: each.epoch for each in holders}
            assert {each.node: each.epoch for each in committed.held_by} == held_by
        pending = (await self.reader.get(name)).pending
        assert pending is None or pending.owner == node.me
        assert write is None or pending is None or pending.place == write.place
        self._put_down(name, pending)

    async def _finish(self, node: Node, name: ObjectName, uid: str, write: Pending | None) -> None:
        if write is None:
            return
        try:
            await node.directory.begin(name, write.uid, write.base)
            await node.directory.persisted(name, write.uid, uid, 1.0)
        except FencedError:
            assert write.owner != node.me
            return
        assert write.owner == node.me
        self.owners.pop(name)

    async def _claim(self, node: Node, name: ObjectName, uid: str, write: Pending | None) -> None:
        claimed = await node.directory.claim(name, write.uid if write else uid)
        owner = write.owner if write else None
        if claimed is None:
            assert write is None or any(each.is_alive and each.me == owner for each in self.nodes)
            return
        self._put_down(name, claimed)
        assert claimed.owner == node.me

    async def _give(self, node: Node, name: ObjectName, uid: str, write: Pending | None) -> None:
        other = next(each for each in self.nodes if each is not node)
        if write is None:
            return
        try:
            given = await node.directory.give(name, write.uid, other.me)
        except HolderLostError:
            assert not other.is_alive
            return
        assert given == (write.owner == node.me)
        if given:
            self.owners[name] = (write.uid, other.me)

    async def _hold(self, node: Node, name: ObjectName, uid: str, write: Pending | None) -> None:
        record = (await self.reader.get(name)).record
        current = record.version.uid if record and record.version else None
        if self.rng.random() < 0.3:
            if current is not None:
                await node.directory.release(name, current, node.name)
                self.holders[name].pop(node.name, None)
            return
        try:
            held = await node.directory.hold(name, current or uid, [node.me])
        except HolderLostError:
            assert not node.is_alive
            return
        assert held == (current is not None)
        if held:
            self.holders[name][node.name] = node.me.epoch

    async def _set_aside(self, node: Node, name: ObjectName, uid: str, write: Pending | None) -> None:
        if write is not None:
            await node.directory.quarantine(name, write.uid, self.rng.choice(["refused", ""]))

    async def check(self) -> None:
        """What reads by node say is what all rows say."""
        every = await self.reader.pending()
        assert {write.name for write in every} == set(self.owners)
        assert await self.reader.owners() == {write.owner.node for write in every if write.owner}
        for node in self.nodes:
            theirs = [write for write in every if write.owner and write.owner.node == node.name]
            assert await self.reader.owed_by(node.name) == theirs
            held = {(name, held_by[node.name]) for name, held_by in self.holders.items() if node.name in held_by}
            found: list[Held] = await self.reader.held_by(node.name)
            assert {(each.name, each.epoch) for each in found} == held
            own = [write for write in theirs if write.owner == node.me]
            assert await node.directory.pending() == own
            uids = {each.uid for each in found}
            assert await node.directory.live_holders() == uids
            owed = {write.uid for write in every if write.kind is Kind.PUT}
            assert await node.directory.owed_holders() == uids & owed
            counted = await node.directory.counts()
            assert (counted["pending"], counted["pending_bytes"]) == (len(own), sum(each.size_bytes for each in own))
            ages = [write.committed_s for write in own if not write.quarantined]
            assert await node.directory.oldest_pending_s() == min(ages, default=None)
            owed_bytes = sum(write.size_bytes for write in own if not write.quarantined)
            assert await node.directory.owed_bytes() == owed_bytes


def held_back(write: Pending, pending: list[Pending], mode: FenceMode) -> bool:
    return blockers(write, PendingView(pending), mode, 5000.0, 10.0) is not None


async def check_view(directory: Directory, rng: random.Random) -> None:
    """The fence decides the same by what stands beside some writes as by all that is pending."""
    every = await directory.pending()
    for mode in FenceMode:
        for _ in range(6):
            some = rng.sample(every, min(len(every), rng.randrange(1, 9)))
            made_up = [through(rng.choice([*NAMES, *(write.name for write in every)]), rng) for _ in range(2)]
            wanted = [*some, *made_up]
            whole = {write.name.bucket for write in wanted} if mode is FenceMode.STRICT else set[str]()
            view = await directory.beside(wanted, whole)
            assert [write for write in view if write not in every] == []
            assert {write.name for write in some} <= {write.name for write in view}
            assert view == sorted(view, key=lambda write: (write.place, write.name))
            for write in wanted:
                assert held_back(write, view, mode) == held_back(write, every, mode), write


def through(name: ObjectName, rng: random.Random) -> Pending:
    """A write that is about to be made through."""
    far = (1 << 62) - 1
    return Pending(name, "through", Kind.PUT, role_of(name, rng), far, far, far, 5000.0, 0)


@pytest.mark.parametrize("seed", range(HISTORIES_COUNT))
async def test_owners_holders_and_fences_view_over_dying_epochs(
    client: EtcdClient, keys: Keys, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that what is read by pages is.
    monkeypatch.setattr(beside, "FIRST_PAGE_COUNT", 2)
    monkeypatch.setattr(clusterreads, "FIRST_PAGE_COUNT", 2)
    history = History(client, keys, seed)
    for node in history.nodes:
        await node.join()
    for count in range(CALLS_COUNT):
        await history.step(count)
        if count % 20 == 19:
            await check_view(history.reader, history.rng)
    await history.check()
    await history.close()


@pytest.mark.parametrize("seed", range(HISTORIES_COUNT))
async def test_fence_sees_beside_what_it_would_see_in_all(
    client: EtcdClient, keys: Keys, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many writes of few scopes, whose requests began at any time before."""
    monkeypatch.setattr(beside, "FIRST_PAGE_COUNT", 2)
    monkeypatch.setattr(clusterreads, "FIRST_PAGE_COUNT", 2)
    rng = random.Random(seed)
    directory = ClusteredDirectory(client, keys)
    names = [ObjectName("b", f"r/{scope}{n}") for scope in ("1/", "2/", "") for n in range(8)]
    names += [ObjectName("b", f"r/{scope}{n}.index.json") for scope in ("1/", "") for n in range(2)]
    revisions = [await directory.revision()]
    for count in range(40):
        name = rng.choice(names)
        role = role_of(name, rng)
        committed = await directory.put(name, make_version(f"v{count}"), Intent(role, rng.choice(revisions), 1.0, ""))
        revisions.append(committed.revision)
        pending = (await directory.get(name)).pending
        assert pending is not None
        if rng.random() < 0.2:
            await directory.quarantine(name, pending.uid, "refused")
        elif rng.random() < 0.3:
            await directory.persisted(name, pending.uid, "o", 1.0)
    for _ in range(3):
        await check_view(directory, rng)
        write = rng.choice(await directory.pending())
        await directory.persisted(write.name, write.uid, "o", 1.0)
    await directory.close()
