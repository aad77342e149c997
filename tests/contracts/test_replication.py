"""Copies on peers, over real sockets into real memories: what is counted as a copy is one, whatever the peer does."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.contracts.peernodes import MIB, NAME, Cluster, PeerNode, content, holders, until

from tiergate.config import Secret
from tiergate.errors import PeerError, TooFewCopiesError
from tiergate.model import BLOCK_BYTES, Body
from tiergate.replication.base import Copies
from tiergate.replication.wire import Pull

SIZES = [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 40 * MIB]


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    """A cluster without nodes. In the end nothing is left of what it did."""
    before = asyncio.all_tasks()
    made = Cluster(tmp_path)
    yield made
    problems = await made.close()
    mine = asyncio.current_task()
    await until(lambda: asyncio.all_tasks() - {mine} <= before, "no task is left")
    assert problems == []


async def copied(node: PeerNode, uid: str, data: bytes, count: int, *, sized: bool = True) -> tuple[Body, Copies]:
    """A body that comes in at a node and is copied meanwhile."""
    copying = node.replication.begin(NAME, "v1", uid, len(data) if sized else None, count)
    body = await node.take(uid, data, "v1", copying)
    return body, await copying.seal(body)


# -- pushing


@pytest.mark.parametrize("sized", [True, False], ids=["sized", "unsized"])
@pytest.mark.parametrize("size_bytes", SIZES)
async def test_a_body_is_whole_on_the_peer_when_it_is_sealed(cluster: Cluster, size_bytes: int, sized: bool) -> None:
    first, second = await cluster.add("a"), await cluster.add("b")
    data = content("u1", size_bytes)
    began_s = cluster.clock.monotonic_s()
    body, copies = await copied(first, "u1", data, 2, sized=sized)
    assert copies.holders == holders((first, second))
    assert copies.count == 2
    assert began_s < copies.until_s < float("inf")
    assert second.bytes_of(body) == data
    assert second.memory.stats().dirty_bytes >= size_bytes
    assert first.counted("pushed_bytes") == second.counted("taken_bytes") == size_bytes
    # The sweep finds it unclaimed: it is the node's, and goes if the directory never learns of it.
    second.memory.reconcile(set(), second.memory.mark())
    assert second.bytes_of(body) is None


async def test_three_copies_go_to_three_nodes_in_three_zones(cluster: Cluster) -> None:
    nodes = [await cluster.add(name, zone) for name, zone in [("a", "1"), ("b", "1"), ("c", "2"), ("d", "3")]]
    body, copies = await copied(nodes[0], "u1", content("u1", 5 * MIB), 3)
    assert {each.node for each in copies.holders} == {"a", "c", "d"}
    assert copies.holders[0].node == "a"
    assert nodes[2].bytes_of(body) == nodes[3].bytes_of(body) == content("u1", 5 * MIB)


async def test_one_copy_needs_nobody(cluster: Cluster) -> None:
    node = await cluster.add("a")
    assert node.replication.rule(None) == 1
    assert node.replication.can_reach(1)
    assert not node.replication.can_reach(2)
    _, copies = await copied(node, "u1", b"data", 1)
    assert copies == Copies((node.node.holder,))
    await cluster.add("b")
    assert node.replication.rule(None) == 2
    assert node.replication.rule(3) == 3
    assert node.replication.can_reach(2)


async def test_what_is_given_up_is_given_back(cluster: Cluster) -> None:
    first, second = await cluster.add("a"), await cluster.add("b")
    copying = first.replication.begin(NAME, "v1", "u1", 8 * MIB, 2)
    await copying.write(bytes(MIB))
    await until(lambda: second.memory.stats().receiving_bytes > 0, "the peer receives")
    await copying.abort()
    await copying.abort()
    await until(lambda: second.memory.stats().used_bytes == 0, "the peer gave it back")

    copying = first.replication.begin(NAME, "v1", "u2", 4, 2)
    body = await first.take("u2", b"data", "v1", copying)
    assert (await copying.seal(body)).count == 2
    await copying.abort()
    await until(lambda: not second.memory.is_known("u2"), "the peer let go of it")


async def test_many_bodies_at_once_take_bounded_memory(cluster: Cluster) -> None:
    first, second = await cluster.add("a"), await cluster.add("b")
    relay = await cluster.between(second)
    data = {f"u{index}": content(f"u{index}", 2 * MIB + index) for index in range(32)}
    done = await asyncio.gather(*(copied(first, uid, each, 2) for uid, each in data.items()))
    assert all(copies.count == 2 for _, copies in done)
    assert all(second.bytes_of(body) == data[body.uid] for body, _ in done)
    assert relay.connections_count <= len(data)


# -- peers that fail


async def test_a_full_peer_is_replaced(cluster: Cluster) -> None:
    first = await cluster.add("a")
    small = await cluster.add("b", memory_bytes=4 * MIB)
    large = await cluster.add("c")
    uids = [f"u{index}" for index in range(6)]
    for uid in uids:  # Whichever of them would have been the first for the holder.
        copying = first.replication.begin(NAME, uid, uid, 8 * MIB, 2)
        body = await first.take(uid, content(uid, 8 * MIB), uid, copying)
        assert (await copying.seal(body)).holders == holders((first, large))
        assert large.bytes_of(body) == content(uid, 8 * MIB)
    assert small.memory.stats().used_bytes == 0
    assert first.counted("peer_failures") >= 1


async def test_without_another_peer_too_few_copies_are_an_error(cluster: Cluster) -> None:
    first, small = await cluster.add("a"), await cluster.add("b", memory_bytes=4 * MIB)
    with pytest.raises(TooFewCopiesError):
        await copied(first, "u1", content("u1", 8 * MIB), 2)
    assert first.counted("peer_failures", "full") >= 1
    assert small.memory.stats().used_bytes == 0
    with pytest.raises(TooFewCopiesError):
        await copied(first, "u2", b"data", 3)
    await until(lambda: not small.memory.is_known("u2"), "what one took is given back")


async def test_a_peer_that_breaks_off_is_tried_again_where_there_is_no_other(cluster: Cluster) -> None:
    first, second = await cluster.add("a"), await cluster.add("b")
    relay = await cluster.between(second)
    relay.cut_after_bytes = 3 * MIB
    copying = first.replication.begin(NAME, "v1", "u1", 9 * MIB, 2)
    body = await first.take("u1", content("u1", 9 * MIB), "v1", copying)
    relay.cut_after_bytes = None
    assert (await copying.seal(body)).count == 2
    assert second.bytes_of(body) == content("u1", 9 * MIB)
    assert first.counted("peer_failures", "unreachable") >= 1


@pytest.mark.parametrize("stop_after_bytes", [0, 3 * MIB, 9 * MIB], ids=["at once", "in the middle", "at the end"])
async def test_a_frozen_peer_is_replaced_by_another(cluster: Cluster, stop_after_bytes: int) -> None:
    first = await cluster.add("a", "1", idle_timeout_s=0.3)
    frozen = await cluster.add("b", "2")
    relay = await cluster.between(frozen)
    relay.stop_after_bytes = stop_after_bytes
    copying = first.replication.begin(NAME, "v1", "u1", 9 * MIB, 2)
    third = await cluster.add("c", "3")
    body = await first.take("u1", content("u1", 9 * MIB), "v1", copying)
    copies = await copying.seal(body)
    assert copies.holders == holders((first, third))
    assert third.bytes_of(body) == content("u1", 9 * MIB)
    assert first.counted("peer_failures", "silent") == 1
    # It comes last for a while.
    assert first.roster.places("v1")[-1].name == "b"


async def test_a_gone_peer_is_replaced(cluster: Cluster) -> None:
    first, gone = await cluster.add("a", "1"), await cluster.add("b", "2")
    copying = first.replication.begin(NAME, "v1", "u1", 4, 2)
    await gone.runner.cleanup()
    third = await cluster.add("c", "3")
    body = await first.take("u1", b"data", "v1", copying)
    assert (await copying.seal(body)).holders == holders((first, third))


async def test_a_flipped_byte_is_no_copy(cluster: Cluster) -> None:
    first, second = await cluster.add("a"), await cluster.add("b")
    relay = await cluster.between(second)
    relay.flip_at = 6 * MIB
    body, copies = await copied(first, "u1", content("u1", 9 * MIB), 2)
    # What it had was given back before it was asked again.
    assert copies.count == 2
    assert second.bytes_of(body) == content("u1", 9 * MIB)
    assert first.counted("peer_failures", "mismatch") == 1


# -- who may


async def test_a_node_with_another_secret_is_refused(cluster: Cluster) -> None:
    first = await cluster.add("a", secret=Secret("another secret"))
    second = await cluster.add("b")
    with pytest.raises(TooFewCopiesError):
        await copied(first, "u1", b"data", 2)
    assert first.counted("peer_failures", "refused") >= 1
    assert second.counted("refused_peers") >= 1
    assert not second.memory.is_known("u1")
    with pytest.raises(PeerError):
        await first.channel.pull(second.node, Pull("v1", (), ()))
