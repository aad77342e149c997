"""Multipart uploads and copies whose parts and sources are on other nodes than the one that is asked."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tests.unit.engine.cluster import Cluster, Node, content, etag_of, name_of

from tiergate.engine import parts as rules
from tiergate.engine.calls import Answer
from tiergate.errors import NotFoundError, RequestError, TooFewCopiesError
from tiergate.model import Part
from tiergate.replication.base import Copies

ACK = "x-tiergate-ack"
FIRST, SECOND, THIRD = (content(150_000, seed) for seed in range(3))


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "LEAST_PART_BYTES", 1000)


@pytest.fixture
def five(start: Callable[..., Cluster]) -> Cluster:
    return start(5)


async def uploaded(cluster: Cluster) -> tuple[str, dict[int, str]]:
    """An upload begun on a, with parts from b and c."""
    upload_id = await cluster["a"].create("k")
    etags = {}
    for number, (node, data) in enumerate([("b", FIRST), ("c", SECOND)], 1):
        answer = await cluster[node].part("k", upload_id, number, data)
        assert answer.headers[ACK] == "memory:2"
        etags[number] = etag_of(answer)
    return upload_id, etags


async def test_parts_from_anywhere_are_completed_anywhere(five: Cluster) -> None:
    upload_id, etags = await uploaded(five)
    parts = await five.directory.list_parts(upload_id)
    assert [{holder.node for holder in part.at} >= {node} for part, node in zip(parts, "bc", strict=True)] == [True] * 2
    answer = await five["d"].complete("k", upload_id, etags)
    assert answer.headers[ACK] == "memory:2"
    holders = await five.holders("k")
    assert "d" in holders
    assert len(holders) == 2
    record = (await five.directory.get(name_of("k"))).record
    assert record is not None
    assert record.version is not None
    assert all(part.at == () for part in record.version.parts)
    for node in holders:
        assert five[node].rooms.holds_whole(record.version)
        assert five[node].holds(upload_id, dirty=True)
    assert five["d"].claims() == []
    told = {(holder.node, uid) for holder, notice in five.peers.notices for uid in notice.body_uids}
    assert told == {(each.node, part.body.uid) for part in parts for each in part.at if each.node not in holders}
    for node in "abcde":
        assert (await five[node].get("k"))[1] == FIRST + SECOND
    again = await five["e"].complete("k", upload_id, etags)
    assert again.headers[ACK] == "memory:2"


async def test_parts_unused_or_replaced_or_aborted_are_told_of_where_they_are(five: Cluster) -> None:
    upload_id, etags = await uploaded(five)
    before = {part.number: part for part in await five.directory.list_parts(upload_id)}
    etags[1] = etag_of(await five["e"].part("k", upload_id, 1, THIRD))
    await five["a"].complete("k", upload_id, {1: etags[1]})
    told = {(holder, uid) for holder, notice in five.peers.notices for uid in notice.body_uids}
    assert told >= {(holder, before[number].body.uid) for number in (1, 2) for holder in before[number].at}
    assert all(notice.uid == upload_id for _, notice in five.peers.notices)

    five.peers.notices.clear()
    upload_id, _ = await uploaded(five)
    parts = await five.directory.list_parts(upload_id)
    await five["e"].abort("k", upload_id)
    told = {(holder, uid) for holder, notice in five.peers.notices for uid in notice.body_uids}
    assert told == {(holder, part.body.uid) for part in parts for holder in part.at}
    with pytest.raises(NotFoundError):
        await five["a"].part("k", upload_id, 1, FIRST)
    assert five["a"].claims() == []


async def test_part_with_a_dead_holder_comes_from_the_other(five: Cluster) -> None:
    upload_id, etags = await uploaded(five)
    five.peers.kill("b")
    await five["d"].complete("k", upload_id, etags)
    assert (await five["e"].get("k"))[1] == FIRST + SECOND


async def test_part_that_is_nowhere_completes_nothing(five: Cluster) -> None:
    upload_id, etags = await uploaded(five)
    parts = await five.directory.list_parts(upload_id)
    at = at_of(parts)
    for holder in parts[1].at:
        five[holder.node].memory.drop(upload_id, [parts[1].body.uid])
    completing = next(five[node] for node in "ade" if node not in at)
    with pytest.raises(TooFewCopiesError):
        await completing.complete("k", upload_id, etags)
    assert (await five.directory.get(name_of("k"))).record is None
    assert await five.directory.get_upload(upload_id) is not None
    assert completing.claims() == []


@pytest.mark.parametrize("same", [True, False])
async def test_part_replaced_while_it_is_completed_is_judged_anew(
    five: Cluster, monkeypatch: pytest.MonkeyPatch, same: bool
) -> None:
    upload_id, etags = await uploaded(five)
    replication = five["a"].rooms.replication
    spread = replication.spread

    async def raced(*args: Any) -> Copies:
        monkeypatch.setattr(replication, "spread", spread)
        copies = await spread(*args)
        await five["b"].part("k", upload_id, 1, FIRST if same else THIRD)
        return copies

    monkeypatch.setattr(replication, "spread", raced)
    if same:
        await five["a"].complete("k", upload_id, etags)
        for node in "abcde":
            assert (await five[node].get("k"))[1] == FIRST + SECOND
    else:
        with pytest.raises(RequestError) as refused:
            await five["a"].complete("k", upload_id, etags)
        assert refused.value.code == "InvalidPart"
        assert await five.directory.get_upload(upload_id) is not None
    assert five["a"].claims() == []


async def test_upload_without_nodes_for_copies_goes_to_the_origin(start: Callable[..., Cluster]) -> None:
    cluster = start(3, replicas_count="2")
    upload_id, _ = await uploaded(cluster)
    cluster.peers.kill("b")
    cluster.peers.kill("c" if "a" in at_of(await cluster.directory.list_parts(upload_id)) else "a")
    left = next(cluster[node] for node in "abc" if node in cluster.peers.epochs)
    answer = await left.part("k", upload_id, 3, THIRD)
    assert answer.headers[ACK] == "origin"


def at_of(parts: Sequence[Part]) -> set[str]:
    return {holder.node for part in parts for holder in part.at}


async def test_completion_without_nodes_for_copies_goes_to_the_origin(start: Callable[..., Cluster]) -> None:
    cluster = start(2, replicas_count="2")
    upload_id = await cluster["a"].create("k")
    etags = {n: etag_of(await cluster["b"].part("k", upload_id, n, data)) for n, data in ((1, FIRST), (2, SECOND))}
    cluster.peers.kill("b")
    answer = await cluster["a"].complete("k", upload_id, etags)
    assert answer.headers[ACK] == "origin"
    assert cluster.origin.objects[name_of("k")].data == FIRST + SECOND
    assert cluster["a"].is_empty()


async def test_part_on_other_nodes_is_brought_in_to_be_spilled(start: Callable[..., Cluster]) -> None:
    cluster = start(4, replicas_count="2")
    upload_id = await cluster["a"].create("k")
    etags = {1: etag_of(await cluster["a"].part("k", upload_id, 1, FIRST))}
    at = at_of(await cluster.directory.list_parts(upload_id))
    far = next(cluster[node] for node in "bcd" if node not in at)
    room = far.memory.receive("hog", far.memory.stats().available_bytes, "hog")
    answer = await far.part("k", upload_id, 2, SECOND)
    assert answer.headers[ACK] == "origin"
    etags[2] = etag_of(answer)
    room.abort()
    done = await far.complete("k", upload_id, etags)
    assert done.headers[ACK] == "origin"
    assert cluster.origin.objects[name_of("k")].data == FIRST + SECOND


async def test_copy_shares_bytes_here_and_on_others(five: Cluster) -> None:
    await five["a"].put("source", FIRST)
    for node in "ab":
        answer = await copy(five[node], f"copy-{node}")
        assert answer.headers[ACK] == "memory:2"
        holders = await five.holders(f"copy-{node}")
        assert node in holders
        assert len(holders) == 2
        for holder in holders:
            assert five[holder].holds(await five.uid(f"copy-{node}"), dirty=True)
        assert five[node].claims() == []
    await five["c"].ask("DeleteObject", "DELETE", "source")
    for node in "abcde":
        assert (await five[node].get("copy-a"))[1] == FIRST
        assert (await five[node].get("copy-b"))[1] == FIRST


async def copy(node: Node, key: str) -> Answer:
    return await node.ask("CopyObject", "PUT", key, headers={"x-amz-copy-source": "/bucket/source"})


async def test_copy_that_too_few_nodes_take_holds_nothing(five: Cluster) -> None:
    await five["a"].put("source", FIRST)
    held = await five.holders("source")
    five.peers.full |= set("bcde") - held
    for node in held - {"a"}:
        five.peers.kill(node)
    with pytest.raises(TooFewCopiesError):
        await copy(five["a"], "copy")
    assert five["a"].claims() == []


async def test_part_copied_from_a_source_elsewhere(five: Cluster) -> None:
    await five["a"].put("source", FIRST)
    held = await five.holders("source")
    far = next(five[node] for node in "bcde" if node not in held)
    upload_id = await far.create("k")
    query = [("partNumber", "1"), ("uploadId", upload_id)]
    headers = {"x-amz-copy-source": "/bucket/source", "x-amz-copy-source-range": "bytes=1000-99999"}
    answer = await far.ask("UploadPartCopy", "PUT", "k", query=query, headers=headers)
    assert answer.headers[ACK] == "memory:2"
    (part,) = await five.directory.list_parts(upload_id)
    assert len(part.at) == 2
    await five["e"].complete("k", upload_id, {1: part.etag})
    assert (await five["d"].get("k"))[1] == FIRST[1000:100000]
