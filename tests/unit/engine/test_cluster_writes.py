"""Writes of a node in a cluster: on how many nodes they are, what they say, and what is left of those that fail."""

import asyncio
import re
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest
from tests.unit.engine.cluster import Cluster, content, etag_of, name_of

from tiergate.directory.base import Committed, Intent
from tiergate.engine import holding
from tiergate.errors import (
    NotFoundError,
    OriginExhaustedError,
    OutcomeUnknownError,
    PreconditionError,
    TooFewCopiesError,
)
from tiergate.model import Body, Holder, ObjectName, Version
from tiergate.replication.base import Copies, Copying
from tiergate.testing.directory_contract.values import make_intent

ACK = "x-tiergate-ack"
DATA = content(200_000)


async def test_put_is_on_two_nodes_and_says_so(cluster: Cluster) -> None:
    answer = await cluster["a"].put("k", DATA)
    assert answer.headers[ACK] == "memory:2"
    uid, holders = await cluster.uid("k"), await cluster.holders("k")
    assert "a" in holders
    assert len(holders) == 2
    assert {name for name, node in cluster.nodes.items() if node.holds(uid, dirty=True)} == holders
    assert cluster["a"].claims() == []


@pytest.mark.parametrize("method", ["PUT", "DELETE"])
async def test_write_takes_one_look_and_one_commit(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Each is a way to etcd. How old the oldest write is, is asked for once a second."""
    await cluster["a"].put("k", DATA)
    asked: list[str] = []

    def noted(name: str) -> Callable[..., Any]:
        whole = getattr(cluster.directory, name)

        def ask(*args: Any) -> Any:
            asked.append(name)
            return whole(*args)

        return ask

    for name in ("revision", "get", "get_bucket", "put_bucket", "put", "delete", "scan", "pending_under"):
        monkeypatch.setattr(cluster.directory, name, noted(name))
    if method == "PUT":
        await cluster["a"].put("k", DATA)
    else:
        await cluster["a"].ask("DeleteObject", "DELETE", "k")
    assert asked == ["get", "put" if method == "PUT" else "delete"]


@pytest.mark.parametrize("count", [1, 3])
async def test_prefix_says_on_how_many(start: Callable[..., Cluster], count: int) -> None:
    cluster = start(replicas_count=str(count))
    answer = await cluster["a"].put("k", DATA)
    assert answer.headers[ACK] == f"memory:{count}"
    assert len(await cluster.holders("k")) == count
    deleted = await cluster["a"].ask("DeleteObject", "DELETE", "k")
    assert deleted.headers[ACK] == f"memory:{count}"


async def test_deletion_of_many_judges_each_key_by_its_own(cluster: Cluster) -> None:
    """Some are deleted at once; what is wrong with one is no failure of the request."""
    for key in ("right", "wrong", "plain"):
        await cluster["a"].put(key, DATA)
    items = [
        "<Object><Key>plain</Key></Object>",
        f"<Object><Key>wrong</Key><ETag>&quot;{'0' * 32}&quot;</ETag></Object>",
        f"<Object><Key>{'k' * 1025}</Key></Object>",
        "<Object><Key>right</Key><ETag>*</ETag></Object>",
    ]
    document = f"<Delete>{''.join(items)}</Delete>".encode()
    answer = await cluster["b"].ask("DeleteObjects", "POST", "", query=[("delete", "")], document=document)
    assert (answer.status, answer.headers[ACK]) == (200, "memory:2")
    said = cast(bytes, answer.body).decode()
    assert re.findall("<Deleted><Key>(.*?)</Key>", said) == ["plain", "right"]
    assert re.findall("<Code>(.*?)</Code>", said) == ["PreconditionFailed", "KeyTooLongError"]
    assert (await cluster["a"].get("wrong"))[1] == DATA


async def test_empty_object_has_holders_too(cluster: Cluster) -> None:
    answer = await cluster["a"].put("k", b"")
    assert answer.headers[ACK] == "memory:2"
    assert len(await cluster.holders("k")) == 2


async def test_too_few_nodes_write_through(start: Callable[..., Cluster]) -> None:
    cluster = start(2, replicas_count="2")
    cluster.peers.kill("b")
    answer = await cluster["a"].put("k", DATA)
    assert answer.headers[ACK] == "origin"
    assert cluster.origin.objects[name_of("k")].data == DATA
    assert cluster["a"].is_empty()


async def test_nodes_that_failed_a_moment_ago_are_tried_only_while_the_origin_is_away(
    start: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = start(3, replicas_count="3")
    cluster.peers.shunned = {"b"}
    assert (await cluster["a"].put("k", DATA)).headers[ACK] == "origin"
    upload_id = await cluster["a"].create("m")
    part = await cluster["a"].part("m", upload_id, 1, DATA)
    done = await cluster["a"].complete("m", upload_id, {1: etag_of(part)})
    assert (part.headers[ACK], done.headers[ACK]) == ("origin", "origin")

    async def away(*_: object) -> None:
        raise OriginExhaustedError("away")

    monkeypatch.setattr("tiergate.engine.outage.PROBE_INTERVAL_S", 1000.0)
    monkeypatch.setattr(cluster.origin, "put_object", away)
    with pytest.raises(OriginExhaustedError):
        await cluster["a"].put("k", DATA)
    assert (await cluster["a"].put("k", DATA)).headers[ACK] == "memory:3"


@pytest.mark.parametrize("fault", ["full", "dies", "corrupt"])
async def test_peer_that_fails_is_replaced_by_another(cluster: Cluster, fault: str) -> None:
    order = [node for node in cluster.peers.order("") if node != "a"]
    fail(cluster, fault, order[0])
    for number in range(6):  # The place of each is its own.
        answer = await cluster["a"].put(f"k{number}", DATA)
        assert answer.headers[ACK] == "memory:2"
        assert await cluster.holders(f"k{number}") == {"a", order[1]}


@pytest.mark.parametrize("fault", ["full", "dies", "corrupt"])
async def test_peers_that_all_fail_leave_nothing(cluster: Cluster, fault: str) -> None:
    for node in "bc":
        fail(cluster, fault, node)
    with pytest.raises(TooFewCopiesError):
        await cluster["a"].put("k", DATA)
    assert (await cluster.directory.get(name_of("k"))).record is None
    assert all(cluster[node].is_empty() for node in "abc")


def fail(cluster: Cluster, fault: str, node: str) -> None:
    if fault == "full":
        cluster.peers.full.add(node)
    elif fault == "dies":
        cluster.peers.dies_after[node] = 100_000
    else:
        cluster.peers.corrupt.add(node)


async def test_holder_lost_before_the_commit_is_replaced(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    peers, put = cluster.peers, cluster.directory.put
    lost: list[Holder] = []

    async def put_late(name: ObjectName, version: Version, intent: Intent) -> Committed:
        if not lost:
            lost.append(intent.holders[1])
            peers.kill(intent.holders[1].node)
        return await put(name, version, intent)

    monkeypatch.setattr(cluster.directory, "put", put_late)
    answer = await cluster["a"].put("k", DATA)
    assert answer.headers[ACK] == "memory:2"
    assert await cluster.holders("k") == {"a", *"bc"} - {lost[0].node}


async def test_holders_that_keep_going_are_given_up(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    put = cluster.directory.put
    tries = 0

    async def put_late(name: ObjectName, version: Version, intent: Intent) -> Committed:
        nonlocal tries
        tries += 1
        cluster.peers.begin_anew(intent.holders[1].node)
        return await put(name, version, intent)

    monkeypatch.setattr(cluster.directory, "put", put_late)
    with pytest.raises(TooFewCopiesError):
        await cluster["a"].put("k", DATA)
    assert tries == holding.COMMITS_COUNT
    assert cluster["a"].is_empty()


async def test_promise_that_is_over_is_asked_for_anew(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.peers.commit_s = 0.0
    replication = cluster["a"].rooms.replication
    spread = replication.spread

    async def renewed(*args: Any, **more: Any) -> Copies:
        cluster.peers.commit_s = 30.0
        return await spread(*args, **more)

    monkeypatch.setattr(replication, "spread", renewed)
    answer = await cluster["a"].put("k", DATA)
    assert answer.headers[ACK] == "memory:2"
    assert cluster.peers.commit_s == 30.0


async def test_replaced_version_stays_for_readers_and_its_holders_are_told(cluster: Cluster) -> None:
    await cluster["a"].put("k", DATA)
    uid, held = await cluster.uid("k"), cluster.directory.held[await cluster.uid("k")]
    await cluster["b"].put("k", content(1000, 1))
    told = {holder for holder, notice in cluster.peers.notices if notice.uid == uid and notice.name == name_of("k")}
    assert told == held
    assert not cluster["b"].holds(uid, dirty=True)
    await cluster["a"].ask("DeleteObject", "DELETE", "k")
    assert len({notice.uid for _, notice in cluster.peers.notices}) == 2


async def test_failed_condition_gives_back_here_and_on_peers(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    take = cluster["a"].rooms.replication.begin

    def begin(*args: Any) -> Copying:
        copying = take(*args)
        seal = copying.seal

        async def raced(body: Body) -> Copies:
            await cluster["b"].put("k", b"first")
            return await seal(body)

        monkeypatch.setattr(copying, "seal", raced)
        return copying

    monkeypatch.setattr(cluster["a"].rooms.replication, "begin", begin)
    with pytest.raises(PreconditionError):
        await cluster["a"].put("k", DATA, if_none_match="*")
    stats = [cluster[node].memory.stats().dirty_bytes for node in "abc"]
    assert sum(stats) == 2 * 512  # The other's few bytes, on two nodes.


# -- the outcome of a commit that nobody heard of


DOUBT_S, PAUSE_S = 0.05, 0.01


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holding, "DOUBT_S", DOUBT_S)
    monkeypatch.setattr("tiergate.engine.afterwards.FIRST_PAUSE_S", PAUSE_S)
    monkeypatch.setattr("tiergate.engine.afterwards.LAST_PAUSE_S", PAUSE_S)


async def settled(cluster: Cluster) -> None:
    async with asyncio.timeout(30):
        for node in cluster.nodes.values():
            await node.service.settled()


@pytest.mark.usefixtures("soon")
async def test_unknown_outcome_that_happened_keeps_the_bytes(cluster: Cluster) -> None:
    cluster.directory.lose_answer = True
    with pytest.raises(OutcomeUnknownError):
        await cluster["a"].put("k", DATA)
    uid = await cluster.uid("k")
    assert cluster["a"].holds(uid, dirty=True)
    await settled(cluster)
    assert cluster["a"].claims() == []
    for node in "abc":
        assert (await cluster[node].get("k"))[1] == DATA


@pytest.mark.usefixtures("soon")
async def test_unknown_outcome_that_did_not_happen_gives_back_in_the_end(cluster: Cluster) -> None:
    cluster.directory.lose_request = True
    with pytest.raises(OutcomeUnknownError):
        await cluster["a"].put("k", DATA)
    assert not cluster["a"].is_empty()
    await settled(cluster)
    assert all(cluster[node].is_empty() for node in "abc")


@pytest.mark.usefixtures("soon")
async def test_unknown_outcome_is_kept_while_the_directory_is_away(cluster: Cluster) -> None:
    cluster.directory.lose_request = True
    with pytest.raises(OutcomeUnknownError):
        await cluster["a"].put("k", DATA)
    cluster.directory.is_away = True
    async with asyncio.timeout(30):
        while True:
            await asyncio.sleep(PAUSE_S)
            # Asked in vain for longer than it takes to decide, whatever the jitter of the pauses.
            if cluster.directory.unanswered_count * PAUSE_S >= 8 * DOUBT_S:
                break
    assert not cluster["a"].is_empty()
    cluster.directory.is_away = False
    await settled(cluster)
    assert cluster["a"].is_empty()


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("happened", [True, False])
async def test_unknown_outcome_of_a_part(cluster: Cluster, happened: bool) -> None:
    upload_id = await cluster["a"].create("k")
    cluster.directory.lose_answer, cluster.directory.lose_request = happened, not happened
    with pytest.raises(OutcomeUnknownError):
        await cluster["a"].part("k", upload_id, 1, DATA)
    await settled(cluster)
    assert cluster["a"].holds(upload_id, dirty=True) == happened
    assert cluster["a"].claims() == []


@pytest.mark.usefixtures("soon")
async def test_unknown_outcome_of_a_part_that_is_completed_meanwhile(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiergate.engine.afterwards.FIRST_PAUSE_S", 0.3)
    upload_id = await cluster["a"].create("k")
    cluster.directory.lose_answer = True
    with pytest.raises(OutcomeUnknownError):
        await cluster["a"].part("k", upload_id, 1, DATA)
    cluster.directory.is_away = True
    await asyncio.sleep(0)  # The first look at it finds out nothing.
    cluster.directory.is_away = False
    (part,) = await cluster.directory.list_parts(upload_id)
    assert cluster["a"].claims() == [upload_id]
    await cluster["b"].complete("k", upload_id, {1: part.etag})
    await settled(cluster)
    for node in {"a"} | await cluster.holders("k"):
        assert cluster[node].holds(upload_id, dirty=True)
    assert cluster["a"].claims() == []


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("happened", [True, False])
async def test_unknown_outcome_of_a_completion_is_told_by_the_next_try(cluster: Cluster, happened: bool) -> None:
    upload_id = await cluster["a"].create("k")
    etag = etag_of(await cluster["a"].part("k", upload_id, 1, DATA))
    cluster.directory.lose_answer, cluster.directory.lose_request = happened, not happened
    with pytest.raises(OutcomeUnknownError):
        await cluster["a"].complete("k", upload_id, {1: etag})
    await settled(cluster)
    answer = await cluster["b"].complete("k", upload_id, {1: etag})
    assert answer.headers[ACK] == "memory:2"
    for node in "abc":
        assert (await cluster[node].get("k"))[1] == DATA
        assert cluster[node].claims() == []
    assert await cluster.uid("k") == upload_id


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("happened", [True, False])
async def test_unknown_outcome_of_an_abort_is_told_by_the_next_try(cluster: Cluster, happened: bool) -> None:
    upload_id = await cluster["a"].create("k")
    await cluster["a"].part("k", upload_id, 1, DATA)
    cluster.directory.lose_answer, cluster.directory.lose_request = happened, not happened
    with pytest.raises(OutcomeUnknownError):
        await cluster["a"].abort("k", upload_id)
    if happened:
        with pytest.raises(NotFoundError):
            await cluster["a"].abort("k", upload_id)
    else:
        assert (await cluster["a"].abort("k", upload_id)).status == 204
    # What the answer did not say is found by the next sweep: nobody knows of it any more.
    mark = cluster["a"].memory.mark()
    cluster["a"].memory.reconcile(await cluster.directory.live_holders(), mark, keep_clean=True)
    assert cluster["a"].is_empty()


# -- cancelled at each of its suspensions


async def cancelled_at(step: int, work: Coroutine[Any, Any, object]) -> bool:
    """Run work, cancelled when it is suspended for the `step`th time; False if it is done before."""
    task = asyncio.create_task(work)
    for _ in range(step):
        await asyncio.sleep(0)
        if task.done():
            break
    if task.done():
        await task
        return False
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        return True
    return True


async def drop(cluster: Cluster, key: str) -> bool:
    """Have nothing left of a key; whether there was something."""
    record = (await cluster.directory.get(name_of(key))).record
    if record is None or record.version is None:
        return False
    await cluster.directory.delete(name_of(key), make_intent())
    for node in cluster.nodes.values():
        node.memory.drop(record.version.uid, [part.body.uid for part in record.version.parts])
    return True


@pytest.mark.usefixtures("soon")
async def test_put_cancelled_anywhere_leaves_nothing_or_the_whole(cluster: Cluster) -> None:
    step, committed_count = 1, 0
    while await cancelled_at(step, cluster["a"].put(f"k{step}", DATA)):
        await settled(cluster)
        assert cluster["a"].claims() == []
        if (await cluster.directory.get(name_of(f"k{step}"))).record is not None:
            assert (await cluster["a"].get(f"k{step}"))[1] == DATA
            committed_count += await drop(cluster, f"k{step}")
        assert all(cluster[node].is_empty() for node in "abc"), step
        step += 1
    assert step > 10
    assert committed_count


@pytest.mark.usefixtures("soon")
async def test_failing_put_cancelled_anywhere_leaves_nothing(cluster: Cluster) -> None:
    """Also where what is cancelled is the giving back."""
    cluster.peers.full.add("b")
    cluster.peers.dies_after["c"] = 100_000
    step = 1
    while True:
        cluster.peers.epochs.setdefault("c", 3)
        cluster.peers.dies_after["c"] = 100_000
        try:
            if not await cancelled_at(step, cluster["a"].put(f"k{step}", DATA)):
                break
        except TooFewCopiesError:
            break
        assert cluster["a"].is_empty(), step
        assert cluster["c"].is_empty(), step
        step += 1
    assert step > 10


@pytest.mark.usefixtures("soon")
async def test_part_cancelled_anywhere_leaves_nothing_or_the_whole(cluster: Cluster) -> None:
    upload_id = await cluster["a"].create("k")
    step = 1
    while await cancelled_at(step, cluster["a"].part("k", upload_id, step, DATA)):
        await settled(cluster)
        assert cluster["a"].claims() == []
        kept = {part.body.uid for part in await cluster.directory.list_parts(upload_id)}
        for node in "abc":
            stats = cluster[node].memory.stats()
            assert not stats.receiving_bytes, step
            assert stats.bodies <= len(kept), step
        assert cluster["a"].memory.stats().bodies == len(kept), step
        step += 1
    assert step > 10


@pytest.mark.usefixtures("soon")
async def test_copy_cancelled_anywhere_leaves_nothing_or_the_whole(cluster: Cluster) -> None:
    await cluster["a"].put("source", DATA)
    headers = {"x-amz-copy-source": "/bucket/source"}
    source_uid = await cluster.uid("source")
    step = 1
    while await cancelled_at(step, cluster["a"].ask("CopyObject", "PUT", f"k{step}", headers=headers)):
        await settled(cluster)
        assert cluster["a"].claims() == []
        await drop(cluster, f"k{step}")
        assert {holder for _, holder, _ in cluster["a"].memory._holders()} == {source_uid.encode()}, step
        step += 1
    assert step > 5


async def test_alone_nothing_is_different(start: Callable[..., Cluster]) -> None:
    cluster = start(1, alone=True)
    answer = await cluster["a"].put("k", DATA)
    assert answer.headers[ACK] == "memory:1"
    uid = await cluster.uid("k")
    assert cluster.directory.held[uid] == frozenset()
    await cluster["a"].put("k", b"new")
    assert not cluster["a"].holds(uid, dirty=True)
    assert not cluster["a"].holds(uid, dirty=False)
    assert cluster["a"].rooms.step_holder == cluster["a"].memory.token
    deleted = await cluster["a"].ask("DeleteObject", "DELETE", "k")
    assert deleted.headers[ACK] == "memory:1"
    assert cluster["a"].is_empty()


def test_step_says_whose_it_is(cluster: Cluster) -> None:
    rooms = cluster["b"].rooms
    assert rooms.step_holder == f"b@{cluster.peers.epochs['b']}/{rooms.memory.token}"


async def test_deletions_of_many_and_a_listing_of_many(cluster: Cluster) -> None:
    keys = [f"k{number:03}" for number in range(100)]
    for number, key in enumerate(keys):
        await cluster["abc"[number % 3]].put(key, b"x")
        await cluster.persist(key, b"x")
    _, body = await cluster["b"].get("k000")
    assert body == b"x"
    own = {key: (await cluster.directory.get(name_of(key))).record for key in keys}
    listing = await cluster["a"].ask("ListObjectsV2", "GET", "", query=[("list-type", "2")])
    text = bytes(cast(bytes, listing.body)).decode()
    for key in keys:  # Their own ETags, not the origin's.
        record = own[key]
        assert record is not None
        assert record.version is not None
        assert f"<Key>{key}</Key>" in text
        assert record.version.etag in text
    named = "".join(f"<Object><Key>{key}</Key></Object>" for key in keys)
    answer = await cluster["c"].ask(
        "DeleteObjects", "POST", "", query=[("delete", "")], document=f"<Delete>{named}</Delete>".encode()
    )
    assert answer.headers[ACK] == "memory:2"
    told = bytes(cast(bytes, answer.body)).decode()
    assert [part.partition("</Key>")[0] for part in told.split("<Key>")[1:]] == keys
    for key in keys:
        record = (await cluster.directory.get(name_of(key))).record
        assert record is None or record.version is None
