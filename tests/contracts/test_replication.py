"""Copies on peers, over real sockets into real memories: what is counted as a copy is one, whatever the peer does."""

import asyncio
import datetime
import ipaddress
import json
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from tests.contracts.peernodes import MIB, NAME, SECRET, Cluster, PeerNode, content, holders, until
from yarl import URL

from tiergate.config import Secret
from tiergate.directory.base import Intent
from tiergate.errors import MembershipOverError, PeerError, TooFewCopiesError
from tiergate.model import BLOCK_BYTES, UNKNOWN_BASE, Body, Holder, ObjectName, Part, Role, Upload, Version
from tiergate.replication import auth
from tiergate.replication.base import Copies, Copying, Notice, Replication
from tiergate.replication.wire import (
    HELD_BODIES_COUNT,
    NOTICES,
    Held,
    Notices,
    Pull,
    Taken,
    decode,
    encode,
    push_target,
)

PUSHED_BYTES = "tiergate_replication_pushed_bytes_total"
TAKEN_BYTES = "tiergate_replication_taken_bytes_total"
PULLED_BYTES = "tiergate_replication_pulled_bytes_total"
READ_BYTES = "tiergate_replication_read_bytes_total"
SERVED_BYTES = "tiergate_replication_served_bytes_total"
PEER_FAILURES = "tiergate_replication_peer_failures_total"
REFUSED_PEERS = "tiergate_replication_refused_peers_total"
DROPPED_NOTICES = "tiergate_replication_dropped_notices_total"
DAMAGED = "tiergate_memory_integrity_failures_total"

SIZES = [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 40 * MIB]


@pytest.fixture
async def cluster(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> AsyncIterator[Cluster]:
    """A cluster without nodes. In the end nothing is left of what it did, and nothing was logged as an error."""
    before = asyncio.all_tasks()
    made = Cluster(tmp_path)
    yield made
    problems = await made.close()
    mine = asyncio.current_task()
    await until(lambda: asyncio.all_tasks() - {mine} <= before, "no task is left")
    assert problems == []
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


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
    assert first.counted(PUSHED_BYTES) == second.counted(TAKEN_BYTES) == size_bytes
    # The sweep finds it unclaimed: it is the node's, and goes if the directory never learns of it.
    second.memory.reconcile(set(), second.memory.mark())
    assert second.bytes_of(body) is None


async def test_a_peer_may_answer_before_the_body_is_said_to_be_complete(cluster: Cluster) -> None:
    """It knows how long the body is: whoever proves it here may take its time."""
    first, second = await cluster.add("a"), await cluster.add("b")
    data = content("u1", 3 * MIB)
    copying = first.replication.begin(NAME, "v1", "u1", len(data), 2)
    receiving = first.memory.receive("u1", len(data), "v1")
    receiving.write(data)
    await copying.write(data)
    await until(lambda: first.counted(PUSHED_BYTES) == len(data), "the peer answered")
    copies = await copying.seal(receiving.seal())
    assert copies.holders == holders((first, second))
    assert first.counted(PEER_FAILURES) == 0
    assert first.replication.is_ready(2)


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
    assert first.counted(PEER_FAILURES) >= 1


async def test_without_another_peer_too_few_copies_are_an_error(cluster: Cluster) -> None:
    first, small = await cluster.add("a"), await cluster.add("b", memory_bytes=4 * MIB)
    with pytest.raises(TooFewCopiesError):
        await copied(first, "u1", content("u1", 8 * MIB), 2)
    assert first.counted(PEER_FAILURES, "full") >= 1
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
    assert first.counted(PEER_FAILURES, "unreachable") >= 1


@pytest.mark.parametrize("stop_after_bytes", [0, 3 * MIB, 9 * MIB], ids=["at once", "in the middle", "at the end"])
@pytest.mark.semantics("P2.6")
async def test_a_frozen_peer_is_replaced_by_another(cluster: Cluster, stop_after_bytes: int) -> None:
    first = await cluster.add("a", "1", idle_timeout_s=1.0)
    frozen = await cluster.add("b", "2")
    relay = await cluster.between(frozen)
    relay.stop_after_bytes = stop_after_bytes
    copying = first.replication.begin(NAME, "v1", "u1", 9 * MIB, 2)
    third = await cluster.add("c", "3")
    body = await first.take("u1", content("u1", 9 * MIB), "v1", copying)
    copies = await copying.seal(body)
    assert copies.holders == holders((first, third))
    assert third.bytes_of(body) == content("u1", 9 * MIB)
    assert first.counted(PEER_FAILURES, "silent") == 1
    # It comes last for a while, and what cannot do without it does not wait for it.
    assert first.roster.places("v1")[-1].name == "b"
    assert first.replication.is_ready(2)
    assert not first.replication.is_ready(3)
    assert first.replication.can_reach(3)


async def test_a_gone_peer_is_replaced(cluster: Cluster) -> None:
    first, gone = await cluster.add("a", "1"), await cluster.add("b", "2")
    copying = first.replication.begin(NAME, "v1", "u1", 4, 2)
    await gone.runner.cleanup()
    third = await cluster.add("c", "3")
    body = await first.take("u1", b"data", "v1", copying)
    assert (await copying.seal(body)).holders == holders((first, third))


@pytest.mark.semantics("P2.6")
async def test_a_flipped_byte_is_no_copy(cluster: Cluster) -> None:
    first, second = await cluster.add("a"), await cluster.add("b")
    relay = await cluster.between(second)
    relay.flip_at = 6 * MIB
    body, copies = await copied(first, "u1", content("u1", 9 * MIB), 2)
    # What it had was given back before it was asked again.
    assert copies.count == 2
    assert second.bytes_of(body) == content("u1", 9 * MIB)
    assert first.counted(PEER_FAILURES, "mismatch") == 1


# -- who may


async def test_a_node_with_another_secret_is_refused(cluster: Cluster) -> None:
    first = await cluster.add("a", secret=Secret("another secret"))
    second = await cluster.add("b")
    with pytest.raises(TooFewCopiesError):
        await copied(first, "u1", b"data", 2)
    assert first.counted(PEER_FAILURES, "refused") >= 1
    assert second.counted(REFUSED_PEERS) >= 1
    assert not second.memory.is_known("u1")
    with pytest.raises(PeerError):
        await first.channel.pull(second.node, Pull("v1", (), ()))


async def send(
    node: PeerNode, method: str, target: str, headers: dict[str, str], data: bytes = b""
) -> tuple[int, bytes]:
    """A request as somebody else may make it; status and answer."""
    async with (
        aiohttp.ClientSession() as session,
        session.request(
            method, URL(f"http://127.0.0.1:{node.port}{target}", encoded=True), data=data, headers=headers
        ) as answer,
    ):
        return answer.status, await answer.read()


def signed(
    node: PeerNode, method: str, target: str, payload: str = auth.STREAMED, age_s: float = 0.0, to: str = "b"
) -> dict[str, str]:
    request = auth.Signable(method, target, "a", to, payload)
    return {"Authorization": auth.authorization(SECRET, request, node.cluster.clock.wall_s() - age_s, "nonce")}


async def test_a_replayed_body_is_answered_as_before_and_an_old_one_refused(cluster: Cluster) -> None:
    node = await cluster.add("b")
    target = push_target(NAME, "v1", "u1", 4)
    headers = signed(node, "PUT", target)
    first = await send(node, "PUT", target, headers, b"data")
    used = node.memory.stats().used_bytes
    assert first[0] == 200
    assert await send(node, "PUT", target, headers, b"data") == first
    assert decode(first[1], type=Taken).size_bytes == 4
    assert node.memory.stats().used_bytes == used

    status, said = await send(node, "PUT", target, headers, b"DATA")
    assert (status, json.loads(said)["code"]) == (409, "mismatch")
    assert node.bytes_of(Body("u1", 4)) == b"data"

    for wrong in (
        signed(node, "PUT", target, age_s=auth.SKEW_S + 5),
        signed(node, "PUT", target, age_s=-auth.SKEW_S - 5),
        signed(node, "GET", target),
        signed(node, "PUT", target + "&more=1"),
        signed(node, "PUT", target, to="c"),
        {"Authorization": "nothing that is known"},
        {},
    ):
        status, said = await send(node, "PUT", target, wrong, b"data")
        assert (status, json.loads(said)["code"]) == (403, "refused")
    assert node.counted(REFUSED_PEERS) == 7


async def test_a_document_that_is_not_the_signed_one_is_refused(cluster: Cluster) -> None:
    node = await cluster.add("b")
    document = encode(Notices(()))
    assert (await send(node, "POST", NOTICES, signed(node, "POST", NOTICES, auth.digest(document)), document))[0] == 204
    for payload in (auth.digest(b"other"), auth.STREAMED):
        status, _ = await send(node, "POST", NOTICES, signed(node, "POST", NOTICES, payload), document)
        assert status == 403


def notices_of(bucket: str, key: str, uid: str, body_uid: str) -> bytes:
    """A message with one notice."""
    return encode(Notices((Notice(ObjectName(bucket, key), uid, (body_uid,)),)))


@pytest.mark.parametrize(
    ("method", "target", "data", "status", "code"),
    [
        ("PUT", "/peer/v1/bodies/u1?holder=v1&size=5", b"data", 400, "broken"),
        ("PUT", "/peer/v1/bodies/u1?holder=v1&size=x", b"data", 400, "broken"),
        ("PUT", "/peer/v1/bodies/u1?holder=&size=4", b"data", 400, "broken"),
        ("PUT", "/peer/v1/bodies/u%20?holder=v1&size=4", b"data", 400, "broken"),
        ("PUT", "/peer/v1/bodies/u1?holder=v1&size=99999999999", b"data", 507, "full"),
        ("GET", "/peer/v1/bodies/u1/blocks/0", b"", 404, "missing"),
        ("POST", "/peer/v1/notices", b"{", 400, "broken"),
        ("POST", "/peer/v1/held", b"{}", 400, "broken"),
        ("POST", "/peer/v1/held", b'{"bodies": [["a/b", 1]]}', 400, "broken"),
        ("POST", "/peer/v1/held", b'{"bodies": [["u", -1]]}', 507, "full"),
        ("POST", "/peer/v1/held", encode(Held((("u", 1),) * (HELD_BODIES_COUNT + 1))), 400, "broken"),
        ("POST", "/peer/v1/pull", b'{"holder": "v1", "bodies": [], "at": [["a"]]}', 400, "broken"),
        (
            "POST",
            "/peer/v1/pull",
            b'{"holder": "v", "bodies": [{"uid": "a/b", "size_bytes": 0}], "at": [[]]}',
            400,
            "broken",
        ),
        *[
            ("POST", "/peer/v1/notices", notices_of(*said), 400, "broken")
            for said in (
                ("", "k", "u", "u"),
                ("a/b", "k", "u", "u"),
                ("b", "", "u", "u"),
                ("b", "k\0", "u", "u"),
                ("b", "k" * 1025, "u", "u"),
                ("b", "k", "", "u"),
                ("b", "k", "u", "../u"),
            )
        ],
        (
            "POST",
            "/peer/v1/pull",
            b'{"holder": "v1", "bodies": [{"uid": "u", "size_bytes": 5, "blocks": "AA=="}], "at": [[]]}',
            400,
            "broken",
        ),
    ],
)
async def test_nonsense_is_refused(
    cluster: Cluster, method: str, target: str, data: bytes, status: int, code: str
) -> None:
    node = await cluster.add("b", secret=None)
    got, said = await send(node, method, target, {}, data)
    assert (got, json.loads(said)["code"]) == (status, code)
    assert node.memory.stats().used_bytes == 0


async def test_a_body_that_ends_early_leaves_nothing(cluster: Cluster) -> None:
    node = await cluster.add("b", secret=None)
    _, writer = await asyncio.open_connection("127.0.0.1", node.port)
    target = push_target(NAME, "v1", "u1", 8 * MIB)
    writer.write(f"PUT {target} HTTP/1.1\r\nHost: b\r\nContent-Length: {8 * MIB}\r\n\r\n".encode() + bytes(MIB))
    await until(lambda: node.memory.stats().receiving_bytes > 0, "it receives")
    status, said = await send(node, "PUT", target, {}, bytes(8 * MIB))
    assert (status, json.loads(said)["code"]) == (503, "busy")
    writer.transport.abort()
    await until(lambda: not node.memory.is_known("u1"), "it gave everything back")


async def test_a_sender_that_falls_silent_is_given_up(cluster: Cluster) -> None:
    node = await cluster.add("b", secret=None, idle_timeout_s=0.2)
    reader, writer = await asyncio.open_connection("127.0.0.1", node.port)
    target = push_target(NAME, "v1", "u1", 8 * MIB)
    writer.write(f"PUT {target} HTTP/1.1\r\nHost: b\r\nContent-Length: {8 * MIB}\r\n\r\n".encode() + bytes(MIB))
    assert (await reader.readline()).startswith(b"HTTP/1.1 408")
    writer.transport.abort()
    assert not node.memory.is_known("u1")


# -- reading


async def test_blocks_are_read_from_whoever_has_them(cluster: Cluster) -> None:
    reader, near, far = await cluster.add("a", "1"), await cluster.add("b", "1"), await cluster.add("c", "2")
    data = content("u1", 2 * BLOCK_BYTES + 1)
    body = near.put("u1", data, "v1")
    gone = Holder("d", 9)
    old = replace(near.node.holder, epoch=77)
    sources = reader.replication.sources([far.node.holder, near.node.holder, reader.node.holder, gone, old])
    assert sources == [near.node.holder, far.node.holder]
    blocks = [b"".join([piece async for piece in reader.replication.read(sources[0], body, i)]) for i in range(3)]
    assert b"".join(blocks) == data
    assert reader.counted(READ_BYTES) == near.counted(SERVED_BYTES) == len(data)
    for source in (far.node.holder, gone, old):
        with pytest.raises(PeerError):
            await anext(reader.replication.read(source, body, 0))
    assert reader.counted(PEER_FAILURES, "missing") == 1


async def test_peers_tell_which_bodies_they_have_whole_now(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiergate.replication.replication.HELD_BODIES_COUNT", 2)
    first, second = await cluster.add("a"), await cluster.add("b")
    bodies = [(await copied(first, f"u{index}", content(f"u{index}", 1000 + index), 2))[0] for index in range(5)]
    longer = Body("u0", bodies[0].size_bytes + BLOCK_BYTES)
    second.memory.drop("v1", ["u3"])
    asked = [*bodies[1:], longer, Body("other", 5)]
    assert await first.replication.held(second.node.holder, asked) == {"u1", "u2", "u4"}
    assert await first.replication.held(Holder("b", second.node.epoch + 1), asked) == set()
    assert await first.replication.held(second.node.holder, []) == set()
    await second.runner.cleanup()
    assert await first.replication.held(second.node.holder, asked) == set()


async def test_peer_lets_go_of_what_is_not_what_it_was(cluster: Cluster) -> None:
    first, second = await cluster.add("a"), await cluster.add("b")
    bodies = [second.put(f"u{number}", content(f"u{number}", BLOCK_BYTES), "v1") for number in range(3)]
    await first.replication.have_dropped(second.node.holder, "v1", ["u0", "u2"])
    assert [second.memory.holds_whole(body) for body in bodies] == [False, True, False]
    await first.replication.have_dropped(second.node.holder, "v1", ["u0"])
    with pytest.raises(PeerError):
        await first.replication.have_dropped(Holder("b", second.node.epoch + 1), "v1", ["u1"])
    await second.runner.cleanup()
    with pytest.raises(PeerError):
        await first.replication.have_dropped(second.node.holder, "v1", ["u1"])
    assert second.memory.holds_whole(bodies[1])


async def test_a_read_from_a_frozen_peer_ends(cluster: Cluster) -> None:
    reader, source = await cluster.add("a", idle_timeout_s=0.2), await cluster.add("b")
    body = source.put("u1", content("u1", BLOCK_BYTES), "v1")
    relay = await cluster.between(source)
    relay.passes.clear()
    with pytest.raises(PeerError):
        await anext(reader.replication.read(source.node.holder, body, 0))
    assert reader.counted(PEER_FAILURES, "silent") == 1


# -- spreading


async def test_missing_bodies_are_fetched_and_spread(cluster: Cluster) -> None:
    first, second, third = [await cluster.add(name) for name in "abc"]
    sizes = {"u0": 0, "u1": 1, "u2": BLOCK_BYTES + 5, "u3": 3 * BLOCK_BYTES, "u4": 77}
    # Each is somewhere else: here, there, there and here, only far.
    places = {"u0": first, "u1": first, "u2": second, "u3": third, "u4": second}
    bodies = [places[uid].put(uid, content(uid, size), "upload") for uid, size in sizes.items()]
    at = {uid: holders([node]) for uid, node in places.items()}
    copies = await first.replication.spread(NAME, "v1", bodies, 2, at)
    # Of the others, it is the one that has most.
    assert copies.holders == holders((first, third))
    assert copies.until_s < float("inf")
    for node in (first, third):
        assert all(node.bytes_of(body) == content(body.uid, body.size_bytes) for body in bodies if body.size_bytes)
        node.memory.drop("upload", list(sizes))
        assert node.memory.stats().dirty_bytes > 0
    first.memory.confirm("v1")
    assert third.counted(PULLED_BYTES) == sum(sizes.values()) - sizes["u3"]
    # Again: nothing moves.
    served = sum(node.counted(SERVED_BYTES) for node in cluster.members)
    assert (await first.replication.spread(NAME, "v1", bodies, 2, at)).holders == copies.holders
    assert sum(node.counted(SERVED_BYTES) for node in cluster.members) == served
    for node in (first, third):
        assert node.memory.reconcile({"v1"}, node.memory.mark()) == 0
        assert all(node.memory.holds_whole(body) for body in bodies)


async def test_what_is_nowhere_cannot_be_spread(cluster: Cluster) -> None:
    first, second = await cluster.add("a"), await cluster.add("b")
    lost = Body("u1", 5, bytes(8))
    with pytest.raises(TooFewCopiesError):
        await first.replication.spread(NAME, "v1", [lost], 2, {"u1": holders([second])})
    with pytest.raises(TooFewCopiesError):
        await first.replication.spread(NAME, "v1", [first.put("u2", b"data", "v1")], 3, {})
    assert first.counted(PEER_FAILURES, "missing") == 1


async def test_a_damaged_source_is_replaced_by_another(cluster: Cluster) -> None:
    first, bad, good = [await cluster.add(name) for name in "abc"]
    data = content("u1", 2 * BLOCK_BYTES)
    body = good.put("u1", data, "v1")
    bad.put("u1", bytes(len(data)), "v1")
    first.roster.shun(good.name)  # So that the other is asked first.
    at = {"u1": holders((bad, good))}
    copies = await first.replication.spread(NAME, "v1", [body], 1, at)
    assert copies == Copies((first.node.holder,))
    assert first.bytes_of(body) == data
    assert first.counted(DAMAGED, "peer") >= 1


async def test_a_full_node_does_not_take_what_is_spread(cluster: Cluster) -> None:
    first, small = await cluster.add("a"), await cluster.add("b", memory_bytes=6 * MIB)
    large = await cluster.add("c")
    body = first.put("u1", content("u1", 9 * MIB), "v1")
    first.roster.shun(large.name)
    copies = await first.replication.spread(NAME, "v1", [body], 2, {})
    assert copies.holders == holders((first, large))
    assert first.counted(PEER_FAILURES, "full") == 1
    assert small.memory.stats().dirty_bytes == 0


async def test_two_fetches_of_one_body_share_the_work(cluster: Cluster) -> None:
    first, second = await cluster.add("a"), await cluster.add("b")
    body = second.put("u1", content("u1", 5 * BLOCK_BYTES), "v1")
    at = {"u1": holders([second])}
    await asyncio.gather(*(first.replication.spread(NAME, f"v{n}", [body], 1, at) for n in range(4)))
    assert first.bytes_of(body) == content("u1", 5 * BLOCK_BYTES)
    assert second.counted(SERVED_BYTES) == body.size_bytes


# -- notices


async def test_notices_let_go_of_what_is_not_owed(cluster: Cluster) -> None:
    first, second = await cluster.add("a"), await cluster.add("b")
    part = Part(1, second.put("owed", b"owed", "v-owed"), "etag")
    version = Version("v-owed", 4, "etag", 0, (part,))
    await second.directory.put(NAME, version, Intent(Role.SMALL, 0, 0.0, UNKNOWN_BASE))
    upload = Upload("upload", ObjectName("bucket", "parts"), Version("v2", 0, "", 0, ()), 0.0)
    await second.directory.create_upload(upload)
    await second.directory.put_part("upload", Part(1, second.put("part", b"part", "upload"), "etag"))
    second.put("old", b"old", "v-old")
    second.put("replaced", b"replaced", "upload")
    sent = [
        Notice(NAME, "v-owed", ("owed",)),
        Notice(NAME, "v-old", ("old",)),
        Notice(upload.name, "upload", ("part", "replaced")),
    ]
    before = second.memory.stats().dirty_bytes
    first.replication.notice([second.node.holder, first.node.holder, Holder("gone", 1)], sent)
    await until(lambda: second.memory.stats().dirty_bytes == before - 2 * 512, "two are clean")
    assert second.bytes_of(Body("old", 3)) == b"old"
    assert first.counted(DROPPED_NOTICES) == 0


async def test_notices_that_cannot_be_delivered_are_dropped_and_bounded(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = await cluster.add("a"), await cluster.add("b")
    monkeypatch.setattr("tiergate.replication.notices.QUEUED_COUNT", 100)
    relay = await cluster.between(second)
    relay.passes.clear()
    first.replication.notice([second.node.holder], [Notice(NAME, "v", ())] * 130)
    assert first.counted(DROPPED_NOTICES) == 30
    await until(lambda: relay.connections_count > 0, "they are under way")
    relay.cut_after_bytes = 0
    relay.passes.set()
    await until(lambda: first.counted(DROPPED_NOTICES) == 130, "all are dropped")


# -- mutual TLS


def certificates(folder: Path) -> tuple[ssl.SSLContext, ssl.SSLContext, ssl.SSLContext]:
    """Contexts of a cluster of its own: for listeners, for clients, and for a client that it does not know."""
    listener, member = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "cluster")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    path = folder / "node.pem"
    path.write_bytes(pem + certificate.public_bytes(serialization.Encoding.PEM))
    for context in (listener, member):
        context.load_cert_chain(path)
        context.load_verify_locations(path)
    listener.verify_mode = ssl.CERT_REQUIRED
    stranger = ssl.create_default_context(cafile=str(path))
    return listener, member, stranger


async def test_over_mutual_tls_no_secret_is_needed(cluster: Cluster, tmp_path: Path) -> None:
    listener, member, stranger = certificates(tmp_path)
    first = await cluster.add("a", secret=None, server_tls=listener, client_tls=member)
    second = await cluster.add("b", secret=None, server_tls=listener, client_tls=member)
    outside = await cluster.add("c", secret=None, server_tls=listener, client_tls=stranger)
    data = content("u1", 9 * MIB)
    copying = first.replication.begin(NAME, "v1", "u1", len(data), 3)
    body = await first.take("u1", data, "v1", copying)
    assert (await copying.seal(body)).count == 3
    assert second.bytes_of(body) == outside.bytes_of(body) == data
    blocks = [b"".join([each async for each in first.replication.read(second.node.holder, body, n)]) for n in range(3)]
    assert b"".join(blocks) == data
    with pytest.raises(PeerError):
        await anext(outside.replication.read(first.node.holder, body, 0))


# -- what is written while a peer is in trouble


async def test_a_cancelled_write_leaves_nothing_behind(cluster: Cluster) -> None:
    first, second = await cluster.add("a"), await cluster.add("b")
    relay = await cluster.between(second)
    relay.stop_after_bytes = MIB
    copying: Copying = first.replication.begin(NAME, "v1", "u1", 64 * MIB, 2)

    written: list[int] = []

    async def feed() -> None:
        for number in range(64):
            await copying.write(bytes(MIB))
            written.append(number)

    feeding = asyncio.create_task(feed())
    await until(lambda: not relay.passes.is_set(), "the peer is frozen")
    await asyncio.wait([feeding], timeout=0.05)
    feeding.cancel()
    await asyncio.wait([feeding])
    assert len(written) < 64  # What a peer does not take is not kept for it either.
    await copying.abort()
    relay.passes.set()
    await until(lambda: second.memory.stats().used_bytes == 0, "the peer gave it back")


async def test_a_read_that_is_given_up_lets_go_of_the_block(cluster: Cluster) -> None:
    reader, source = await cluster.add("a"), await cluster.add("b")
    body = source.put("u1", content("u1", BLOCK_BYTES), "v1")
    replication: Replication = reader.replication
    async with aclosing(reader.replication.read(source.node.holder, body, 0)) as pieces:
        assert await anext(pieces)
    await until(source.is_at_rest, "the pin is gone")
    assert replication.sources([source.node.holder]) == [source.node.holder]


async def test_a_node_that_is_no_member_takes_nothing_but_is_read_from(cluster: Cluster) -> None:
    first, second = await cluster.add("a"), await cluster.add("b")
    body = second.put("u1", b"data", "v1")

    def over() -> Holder:
        raise MembershipOverError("it is over")

    second.roster.me = over
    with pytest.raises(TooFewCopiesError):
        await copied(first, "u2", b"data", 2)
    assert first.counted(PEER_FAILURES, "busy") >= 1
    with pytest.raises(MembershipOverError):
        second.replication.begin(NAME, "v1", "u3", 4, 2)
    assert b"".join([each async for each in first.replication.read(second.node.holder, body, 0)]) == b"data"
    assert second.replication.sources([first.node.holder]) == [first.node.holder]
