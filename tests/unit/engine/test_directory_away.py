"""What goes on while a cluster's directory does not answer: nothing but what cannot be wrong."""

from collections.abc import Callable

import pytest
from tests.unit.engine.cluster import Cluster, content, name_of

from tiergate.errors import (
    DirectoryUnavailableError,
    FencedError,
    MembershipOverError,
    OriginRefusedError,
    OverloadedError,
)

ACK = "x-tiergate-ack"
DATA = content(200_000)
IMMUTABLE = "{uri = 's3://bucket/once/', immutable = true}"


@pytest.fixture
def once(start: Callable[..., Cluster]) -> Cluster:
    return start(4, replicas_count="2", large_bytes="100KiB", prefixes=IMMUTABLE)


@pytest.mark.parametrize("operation", ["GetObject", "HeadObject", "PutObject", "DeleteObject", "ListObjectsV2"])
async def test_other_prefixes_are_refused(once: Cluster, operation: str) -> None:
    await once["a"].put("k", DATA)
    await once.persist("k", DATA)
    once.directory.is_away = True
    methods = {"GetObject": "GET", "HeadObject": "HEAD", "PutObject": "PUT", "DeleteObject": "DELETE"}
    key = "" if operation.startswith("List") else "k"
    with pytest.raises(DirectoryUnavailableError) as caught:
        await once["a"].ask(operation, methods.get(operation, "GET"), key, body=DATA)
    assert caught.value.retry_after_s
    assert once["a"].claims() == []


async def test_immutable_object_is_read_from_the_origin(once: Cluster) -> None:
    once.origin.put_foreign(name_of("once/k"), DATA)
    once.directory.is_away = True
    assert (await once["a"].get("once/k"))[1] == DATA
    answer, data = await once["a"].get("once/k")
    assert data == DATA
    assert answer.headers["x-tiergate-tier"] == "memory"
    assert (await once["a"].ask("HeadObject", "HEAD", "once/k")).status == 200


async def test_immutable_object_is_read_from_memory_where_this_process_knows_it(once: Cluster) -> None:
    await once["a"].put("once/k", DATA)
    await once["a"].get("once/k")
    holders = await once.holders("once/k")
    once.directory.is_away = True
    once.origin.is_away = True
    assert (await once["a"].get("once/k"))[1] == DATA
    other = next(once[node] for node in "bcd" if node not in holders)
    with pytest.raises(OverloadedError):
        await other.get("once/k")


async def test_what_was_seen_dirty_keeps_its_identity_in_the_origin(once: Cluster) -> None:
    await once["a"].put("once/k", DATA)
    holders = await once.holders("once/k")
    other = next(once[node] for node in "bcd" if node not in holders)
    first, _ = await other.get("once/k")
    once.directory.is_away = True
    again, data = await other.get("once/k")
    assert data == DATA
    assert again.headers["ETag"] == first.headers["ETag"]


async def test_what_the_origin_has_not_is_not_said_to_be_missing(once: Cluster) -> None:
    once.directory.is_away = True
    with pytest.raises(DirectoryUnavailableError):
        await once["a"].get("once/k")
    with pytest.raises(DirectoryUnavailableError):
        await once["a"].ask("ListObjectsV2", "GET", "", query=[("list-type", "2"), ("prefix", "once/")])


async def test_immutable_object_is_put_to_the_origin_and_adopted_later(once: Cluster) -> None:
    once.directory.is_away = True
    answer = await once["a"].put("once/k", DATA, content_type="text/x")
    assert answer.headers[ACK] == "origin"
    assert once["a"].is_empty()
    held = once.origin.objects[name_of("once/k")]
    assert held.data == DATA
    assert held.stamp is not None
    with pytest.raises(OriginRefusedError) as refused:
        await once["a"].put("once/k", DATA)
    assert refused.value.status == 412
    once.directory.is_away = False
    assert (await once["b"].get("once/k"))[1] == DATA
    record = (await once.directory.get(name_of("once/k"))).record
    assert record is not None
    assert record.origin_etag == held.etag


@pytest.mark.parametrize("key", ["once/small", "once/.metadata", "once/latest"])
async def test_what_the_fence_might_hold_is_not_put(once: Cluster, key: str) -> None:
    once.directory.is_away = True
    with pytest.raises(DirectoryUnavailableError):
        await once["a"].put(key, DATA if key.endswith("metadata") else b"small")
    assert once.origin.objects == {}


async def test_without_conditional_writes_nothing_is_put(once: Cluster) -> None:
    once.origin.conditional_writes = False
    once.directory.is_away = True
    with pytest.raises(DirectoryUnavailableError):
        await once["a"].put("once/k", DATA)


async def test_membership_over_is_a_refusal_for_now(once: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fenced(*_: object) -> None:
        raise FencedError("over")

    monkeypatch.setattr(once.directory, "put", fenced)
    with pytest.raises(MembershipOverError):
        await once["a"].put("k", DATA)
    assert all(once[node].is_empty() for node in "abcd")
    once.peers.kill("a")
    with pytest.raises(OverloadedError):
        await once["a"].put("k", DATA)
    assert all(once[node].is_empty() for node in "abcd")


async def test_deletions_of_many_end_at_once(once: Cluster) -> None:
    once.directory.is_away = True
    document = b"<Delete><Object><Key>a</Key></Object><Object><Key>b</Key></Object></Delete>"
    with pytest.raises(DirectoryUnavailableError):
        await once["a"].ask("DeleteObjects", "POST", "", query=[("delete", "")], document=document)


async def test_size_is_not_asked_for_at_each_write(
    start: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    bounded = start(2, replicas_count="1", dirty_size_limit_bytes="10")
    await bounded["a"].put("k0", b"12345678")
    with monkeypatch.context() as patched:
        patched.setattr("tiergate.engine.intake.KEPT_S", 60.0)
        await bounded["a"].put("k1", b"12345678")
        await bounded["a"].put("k2", b"x")
    monkeypatch.setattr("tiergate.engine.intake.KEPT_S", 0.0)
    with pytest.raises(OverloadedError) as caught:
        await bounded["a"].put("k3", b"x")
    assert caught.value.retry_after_s
    assert bounded["a"].counted("writeback_refused_writes_total") == 1
    await bounded.persist("k0", b"12345678")
    await bounded["a"].put("k3", b"x")


async def test_size_of_a_node_alone_counts_from_the_commit(start: Callable[..., Cluster]) -> None:
    bounded = start(1, alone=True, dirty_size_limit_bytes="10")
    await bounded["a"].put("k0", b"123456789")
    await bounded["a"].put("k1", b"1")
    with pytest.raises(OverloadedError):
        await bounded["a"].put("k2", b"")
    await bounded["a"].ask("DeleteObject", "DELETE", "k0")
    await bounded["a"].put("k2", b"")


async def test_age_is_not_asked_for_at_each_write(once: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0
    oldest = once.directory.oldest_pending_s

    async def counted() -> float | None:
        nonlocal asked
        asked += 1
        return await oldest()

    monkeypatch.setattr(once.directory, "oldest_pending_s", counted)
    monkeypatch.setattr("tiergate.engine.intake.KEPT_S", 60.0)
    for number in range(3):
        await once["a"].put(f"k{number}", b"x")
    assert asked == 1
