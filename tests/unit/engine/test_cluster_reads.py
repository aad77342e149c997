"""Reads of a node in a cluster: peers before the origin, and what happens when they fail in the middle of a body."""

from collections.abc import Callable

import pytest
from tests.unit.engine.cluster import BLOCK_BYTES, Cluster, Node, body_of, content, name_of, pieces_of

from tiergate.directory.base import Seen
from tiergate.errors import OverloadedError, PeerError
from tiergate.model import ObjectName
from tiergate.testing.directory_contract.values import make_intent

DATA = content(10 * BLOCK_BYTES + 777)
TIER = "x-tiergate-tier"


async def placed(cluster: Cluster, key: str = "k") -> tuple[Node, list[str]]:
    """A key is written; a node that does not hold it, and those that do."""
    await cluster["a"].put(key, DATA)
    holders = sorted(await cluster.holders(key))
    return next(cluster[node] for node in "abcd" if node not in holders), holders


@pytest.fixture
def four(start: Callable[..., Cluster]) -> Cluster:
    return start(4, replicas_count="3")


async def test_dirty_version_comes_from_a_peer(four: Cluster) -> None:
    reader, _ = await placed(four)
    answer, data = await reader.get("k")
    assert data == DATA
    assert answer.headers[TIER] == "peer"
    assert reader.counted("read_bodies_total") == 1
    assert reader.counted("read_peer_fills_total") == 11
    assert ("get", "k") not in four.origin.done
    # It is in memory now, evictable.
    again, data = await reader.get("k")
    assert again.headers[TIER] == "memory"
    assert data == DATA
    assert reader.is_empty()


async def test_range_and_head(four: Cluster) -> None:
    reader, _ = await placed(four)
    head = await reader.ask("HeadObject", "HEAD", "k")
    assert head.headers[TIER] == "peer"
    answer, data = await reader.get("k", range="bytes=70000-200000")
    assert answer.status == 206
    assert data == DATA[70000:200001]


@pytest.mark.parametrize("fault", ["dies", "corrupt", "gone"])
@pytest.mark.semantics("P5.6")
async def test_peer_that_fails_in_the_middle_is_replaced(four: Cluster, fault: str) -> None:
    reader, holders = await placed(four)
    if fault == "dies":
        four.peers.dies_after[holders[0]] = 3 * BLOCK_BYTES + 100
    elif fault == "corrupt":
        four.peers.corrupt.add(holders[0])
    else:
        four[holders[0]].memory.drop(await four.uid("k"), await bodies(four))
    assert (await reader.get("k"))[1] == DATA
    assert reader.counted("read_peer_failures_total") >= 1
    assert reader.counted("memory_integrity_failures_total") == (fault == "corrupt") * reader.counted(
        "read_peer_failures_total"
    )


async def bodies(cluster: Cluster, key: str = "k") -> list[str]:
    record = (await cluster.directory.get(name_of(key))).record
    assert record is not None
    assert record.version is not None
    return [part.body.uid for part in record.version.parts]


async def test_without_room_blocks_pass_through(start: Callable[..., Cluster]) -> None:
    four = start(4, replicas_count="3")
    reader, holders = await placed(four)
    four.peers.corrupt.add(holders[0])
    stats = reader.memory.stats()
    room = reader.memory.receive("hog", stats.available_bytes, "hog")
    assert (await reader.get("k"))[1] == DATA
    room.abort()


async def test_every_peer_corrupt_is_an_error_before_the_answer_begins(four: Cluster) -> None:
    reader, holders = await placed(four)
    four.peers.corrupt |= set(holders)
    with pytest.raises(OverloadedError):
        await reader.get("k")
    assert reader.counted("read_lost_total") == 0
    assert reader.is_empty()


async def test_dirty_version_without_a_living_holder_is_lost(four: Cluster) -> None:
    await four.persist_old("k", b"older")
    reader, holders = await placed(four)
    for node in holders:
        four.peers.kill(node)
    with pytest.raises(OverloadedError):
        await reader.get("k")
    assert reader.counted("read_lost_total") == 1


async def test_clean_version_comes_from_the_origin_when_peers_fail_midway(four: Cluster) -> None:
    reader, holders = await placed(four)
    await four.persist("k", DATA)
    for node in holders:
        four.peers.dies_after[node] = 3 * BLOCK_BYTES
    answer, data = await reader.get("k")
    assert answer.headers[TIER] == "peer"
    assert data == DATA
    assert ("get", "k") in four.origin.done


async def test_dirty_version_that_became_clean_midway_is_finished_from_the_origin(four: Cluster) -> None:
    reader, holders = await placed(four)
    answer = await reader.ask("GetObject", "GET", "k")
    assert not isinstance(answer.body, bytes)
    data = b""
    async for piece in pieces_of(answer.body):
        if not data:
            await four.persist("k", DATA)
            for node in holders:
                four.peers.kill(node)
        data += bytes(piece)
    assert data == DATA


async def test_dirty_version_lost_midway_breaks_the_answer_off(four: Cluster) -> None:
    reader, holders = await placed(four)
    answer = await reader.ask("GetObject", "GET", "k")
    for node in holders:
        four.peers.kill(node)
    with pytest.raises(PeerError):
        await body_of(answer)
    assert reader.is_empty()


@pytest.mark.parametrize("change", ["put", "delete"])
async def test_overwrite_or_delete_midway_changes_nothing_for_readers_elsewhere(
    start: Callable[..., Cluster], change: str
) -> None:
    cluster = start(2, replicas_count="1", fill_ahead_count="1")
    await cluster["a"].put("k", DATA)
    answer = await cluster["b"].ask("GetObject", "GET", "k")
    assert not isinstance(answer.body, bytes)
    data = b""
    async for piece in pieces_of(answer.body):
        if not data:
            if change == "put":
                await cluster["a"].put("k", b"new")
            else:
                await cluster["a"].ask("DeleteObject", "DELETE", "k")
        data += bytes(piece)
    assert data == DATA
    assert cluster["b"].counted("read_peer_fills_total") == 11


async def test_version_replaced_before_the_read_began_is_looked_up_again(
    four: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, holders = await placed(four)
    get = four.directory.get
    count = 0

    async def replaced_after(name: ObjectName) -> Seen:
        nonlocal count
        seen = await get(name)
        count += 1
        if count == 1:
            assert seen.record is not None
            assert seen.record.version is not None
            await four.directory.delete(name, make_intent())
            for node in holders:
                four[node].memory.drop(seen.record.version.uid, [seen.record.version.parts[0].body.uid])
            monkeypatch.setattr(four.directory, "get", get)
            await four["a"].put("k", b"new")
            monkeypatch.setattr(four.directory, "get", replaced_after)
        return seen

    monkeypatch.setattr(four.directory, "get", replaced_after)
    assert (await reader.get("k"))[1] == b"new"
