"""Membership against real etcd: who is a member, until when, and who notices."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from tiergate.clock import SystemClock
from tiergate.directory import membership
from tiergate.directory.clustered import ClusteredDirectory
from tiergate.directory.keys import Keys
from tiergate.directory.membership import Membership, Nodes, Ticket
from tiergate.errors import ConfigError, HolderLostError, MembershipOverError
from tiergate.etcd.client import EtcdClient
from tiergate.etcd.values import Delete, Txn
from tiergate.model import About, Holder, Live, new_uid
from tiergate.testing.directory_contract import (
    SHARD,
    make_completed,
    make_intent,
    make_part,
    make_upload,
    make_version,
    pending_of,
    put,
)
from tiergate.testing.etcd import needs_etcd

pytestmark = needs_etcd

LEASE_S = 3


class HandClock(SystemClock):
    """A clock that jumps when told to."""

    ahead_s = 0.0

    def monotonic_s(self) -> float:
        return super().monotonic_s() + self.ahead_s


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def keys() -> Keys:
    """A place that no other test uses."""
    return Keys(f"/{new_uid(SystemClock().wall_s())}")


def member(client: EtcdClient, keys: Keys, name: str, lease_s: int = 60) -> Membership:
    return Membership(client, keys, name, About(f"{name}:1", "zone-a", "boot", 7), lease_s=lease_s)


async def seen_until(changes: AsyncIterator[Live], names: set[str]) -> Live:
    async for live in changes:
        if set(live.nodes) == names:
            return live
    raise AssertionError("the changes ended")


async def test_join_is_seen_by_others_and_leave_too(client: EtcdClient, keys: Keys) -> None:
    nodes = Nodes(client, keys)
    a, b = member(client, keys, "a"), member(client, keys, "b")
    epoch = await a.join()
    async with aclosing(nodes.watch()) as changes:
        first = await anext(changes)
        assert first.nodes["a"].about == About("a:1", "zone-a", "boot", 7)
        assert first.nodes["a"].epoch == epoch.number
        await b.join()
        both = await seen_until(changes, {"a", "b"})
        assert both.nodes["b"].epoch > both.nodes["a"].epoch
        await a.announce(About("a:1", free_bytes=1))
        told = await anext(changes)
        assert (told.nodes["a"].epoch, told.nodes["a"].about.free_bytes) == (epoch.number, 1)
        await a.leave()
        gone = await seen_until(changes, {"b"})
    assert not epoch.stands()
    assert await nodes.live() == gone


async def test_still_tells_members_from_earlier_lives(client: EtcdClient, keys: Keys) -> None:
    a = member(client, keys, "a")
    old = await a.join()
    await a.leave()
    new = await a.join()
    live = await Nodes(client, keys).live()
    holders = [Holder("a", old.number), Holder("a", new.number), Holder("b", new.number)]
    assert live.still(holders) == {Holder("a", new.number)}


async def test_restart_goes_on_with_its_ticket(client: EtcdClient, keys: Keys) -> None:
    first = member(client, keys, "a")
    epoch = await first.join()
    again = member(client, keys, "a")
    assert (await again.join(first.ticket)).number == epoch.number
    assert again.epoch.stands()


async def test_restart_with_an_old_ticket_begins_anew(client: EtcdClient, keys: Keys) -> None:
    first = member(client, keys, "a")
    epoch = await first.join()
    stale = Ticket(first.ticket.lease_id, epoch.number - 1)
    assert (await member(client, keys, "a").join(stale)).number > epoch.number
    assert (await member(client, keys, "b").join(Ticket(1, 1))).number > epoch.number


async def test_restart_without_ticket_waits_for_the_old_lease(client: EtcdClient, keys: Keys) -> None:
    epoch = await member(client, keys, "a", LEASE_S).join()
    assert (await member(client, keys, "a", LEASE_S).join()).number > epoch.number


async def test_join_name_of_a_living_node_is_refused(
    client: EtcdClient, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "NAME_WAIT_LEASES_COUNT", 0.2)
    await member(client, keys, "a").join()
    with pytest.raises(ConfigError):
        await member(client, keys, "a", LEASE_S).join()


async def test_run_renews_beyond_the_lease(client: EtcdClient, keys: Keys) -> None:
    a = member(client, keys, "a", LEASE_S)
    epoch = await a.join()
    first_s = a.deadline_s()
    running = asyncio.ensure_future(a.run())
    async with asyncio.timeout(60):
        while a.deadline_s() < first_s + LEASE_S:
            await asyncio.sleep(0.05)
            assert not running.done()
    assert epoch.stands()
    assert (await Nodes(client, keys).live()).nodes["a"].epoch == epoch.number
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


@pytest.mark.parametrize("end", ["revoked", "deleted"])
async def test_run_ends_when_the_membership_does(client: EtcdClient, keys: Keys, end: str) -> None:
    a = member(client, keys, "a")
    epoch = await a.join()
    running = asyncio.ensure_future(a.run())
    if end == "revoked":
        await client.revoke(a.ticket.lease_id)
    else:
        await client.txn(Txn((), (Delete(keys.node("a")),)))
    with pytest.raises(MembershipOverError):
        await running
    assert not epoch.stands()


async def test_writer_past_its_own_deadline_stops_before_others_may_act(
    client: EtcdClient, keys: Keys, clock: HandClock
) -> None:
    a = member(client, keys, "a")
    epoch = await a.join()
    directory = ClusteredDirectory(client, keys, epoch)
    await put(directory, SHARD, "v1")
    clock.ahead_s = 59.5
    assert not epoch.stands()
    with pytest.raises(MembershipOverError):
        await put(directory, SHARD, "v2")
    # For everybody else it is a member still.
    assert "a" in (await Nodes(client, keys).live()).nodes
    assert (await pending_of(directory, SHARD)).uid == "v1"
    await directory.close()


async def test_zombie_that_believes_in_its_lease_changes_nothing(client: EtcdClient, keys: Keys) -> None:
    a = member(client, keys, "a")
    zombie = ClusteredDirectory(client, keys, await a.join())
    await put(zombie, SHARD, "v1")
    await client.revoke(a.ticket.lease_id)
    assert a.epoch.stands()
    before = await zombie.get(SHARD)
    with pytest.raises(MembershipOverError):
        await put(zombie, SHARD, "v2")
    with pytest.raises(MembershipOverError):
        await zombie.persisted(SHARD, "v1", "o1", 1.0)
    assert await zombie.get(SHARD) == before
    # Nor does it when its node is a member again: that is another epoch.
    await member(client, keys, "a").join()
    with pytest.raises(MembershipOverError):
        await zombie.begin(SHARD, "v1", "")
    await zombie.close()


async def test_holders_come_with_the_commit_and_go_with_the_version(client: EtcdClient, keys: Keys) -> None:
    epochs = {name: (await member(client, keys, name).join()).number for name in "abc"}
    a, b, c = (Holder(name, epoch) for name, epoch in epochs.items())
    directory = ClusteredDirectory(client, keys)
    intent = make_intent(holders=(a, b))
    await directory.put(SHARD, make_version("v1"), intent)
    assert (await directory.get(SHARD)).holders == {"v1": frozenset({a, b})}
    assert await directory.hold(SHARD, "v1", [c])
    await directory.release(SHARD, "v1", "a")
    assert (await directory.get(SHARD)).holders == {"v1": frozenset({b, c})}
    assert not await directory.hold(SHARD, "v0", [a])
    await directory.persisted(SHARD, "v1", "o1", 1.0)
    assert (await directory.get(SHARD)).holders == {"v1": frozenset({b, c})}
    await directory.put(SHARD, make_version("v2"), make_intent(holders=(a,)))
    assert (await directory.get(SHARD)).holders == {"v2": frozenset({a})}
    await directory.create_upload(make_upload("up"))
    await directory.put_part("up", make_part(1, "p"))
    await directory.finish_upload("up", make_completed("v3", make_part(1, "p")), [], make_intent(holders=(c,)))
    assert (await directory.get(SHARD)).holders == {"v3": frozenset({c})}
    await directory.persisted(SHARD, "v3", "o3", 1.0)
    await directory.forget(SHARD, "v3")
    assert (await directory.get(SHARD)).holders == {}
    await directory.close()


async def test_commit_with_a_holder_that_is_gone_does_not_happen(client: EtcdClient, keys: Keys) -> None:
    peer = member(client, keys, "b")
    old = Holder("b", (await peer.join()).number)
    await peer.leave()
    directory = ClusteredDirectory(client, keys)
    for holder in (old, Holder("b", (await peer.join()).number - 1)):
        with pytest.raises(HolderLostError):
            await directory.put(SHARD, make_version("v1"), make_intent(holders=(holder,)))
        with pytest.raises(HolderLostError):
            await directory.put_through(SHARD, make_version("v1"), "o1", make_intent(holders=(holder,)))
    assert (await directory.get(SHARD)).record is None
    await directory.close()
