"""Reads of what memory does not hold: fetched once, checked, kept, and never older than promised."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.nodes import StartNode

from tiergate.testing.faults import FaultyOrigin
from tiergate.testing.node import RunningNode
from tiergate.testing.objects import body_of, is_missing, keys_of, refusal
from tiergate.testing.rules import Answer, Cut, Gate, Hold, Seen

MIB = 1 << 20
BLOCK = 4 * MIB


def always_ask(start_node: StartNode) -> RunningNode:
    """A node that trusts no copy without asking the origin."""
    return start_node("--revalidate", "0")


def fetched_ranges(proxy: FaultyOrigin, key: str) -> list[tuple[int, int]]:
    """The byte ranges fetched of a key, half-open, in order of their start."""
    found = []
    for seen in proxy.seen("GetObject", key):
        first, _, last = seen.headers["range"].removeprefix("bytes=").partition("-")
        found.append((int(first), int(last) + 1))
    return sorted(found)


def blocks_of(ranges: Sequence[tuple[int, int]]) -> list[int]:
    """Every block that ranges touch, as often as they do."""
    return sorted(index for first, end in ranges for index in range(first // BLOCK, -(-end // BLOCK)))


@pytest.mark.parametrize("workers", [1, 2])
def test_miss_is_fetched_once_however_many_ask(
    start_node: StartNode, proxy: FaultyOrigin, direct: Any, bucket: str, workers: int
) -> None:
    own = start_node(workers=workers)
    client = own.client(max_pool_connections=16)
    data = os.urandom(10 * MIB + 5)
    direct.put_object(Bucket=bucket, Key="cold", Body=data)
    gate = Gate()
    proxy.inject(Hold(gate), operation="GetObject", key="cold", times=None)
    with ThreadPoolExecutor(16) as pool:
        readers = [pool.submit(body_of, client, bucket, "cold") for _ in range(16)]
        try:
            gate.wait_reached()
        finally:
            gate.release()
        assert all(reader.result() == data for reader in readers)

    assert blocks_of(fetched_ranges(proxy, "cold")) == [0, 1, 2]
    proxy.forget()
    assert body_of(client, bucket, "cold") == data
    assert proxy.seen("GetObject") == []


@pytest.mark.parametrize(
    ("first", "end"),
    [(0, 1), (BLOCK - 1, BLOCK + 1), (9 * MIB, 10 * MIB + 5), (5, 5 + 3 * BLOCK // 2)],
    ids=["first byte", "over a border", "tail", "middle"],
)
def test_range_of_a_cold_object_is_exact_and_fetches_no_block_before_it(
    s3: Any, proxy: FaultyOrigin, direct: Any, bucket: str, first: int, end: int
) -> None:
    data = os.urandom(10 * MIB + 5)
    direct.put_object(Bucket=bucket, Key="cold", Body=data)

    answer = s3.get_object(Bucket=bucket, Key="cold", Range=f"bytes={first}-{end - 1}")
    with answer["Body"] as stream:
        assert stream.read() == data[first:end]
    assert answer["ContentRange"] == f"bytes {first}-{end - 1}/{len(data)}"
    blocks = blocks_of(fetched_ranges(proxy, "cold"))
    assert blocks[0] == first // BLOCK
    assert len(blocks) == len(set(blocks))


def test_suffix_and_unsatisfiable_ranges_are_answered_as_s3_does(s3: Any, direct: Any, bucket: str) -> None:
    data = os.urandom(5 * MIB)
    direct.put_object(Bucket=bucket, Key="cold", Body=data)
    assert body_of(s3, bucket, "cold", Range="bytes=-100") == data[-100:]
    found = refusal(lambda: s3.get_object(Bucket=bucket, Key="cold", Range=f"bytes={len(data)}-"))
    assert found == (416, "InvalidRange")


def test_written_object_that_was_evicted_is_read_back_the_same(
    start_node: StartNode, proxy: FaultyOrigin, bucket: str
) -> None:
    own = start_node(memory_limit="64MiB")
    client = own.client()
    data = os.urandom(20 * MIB)
    client.put_object(Bucket=bucket, Key="old", Body=data, Metadata={"a": "b"}, ContentType="x/y")
    own.wait_settled()
    before = client.head_object(Bucket=bucket, Key="old")
    for index in range(3):
        client.put_object(Bucket=bucket, Key=f"new{index}", Body=os.urandom(20 * MIB))
        own.wait_settled()

    assert body_of(client, bucket, "old") == data
    assert proxy.seen("GetObject", "old") != []
    after = client.head_object(Bucket=bucket, Key="old")
    for name in ("ETag", "LastModified", "Metadata", "ContentType", "ContentLength"):
        assert after[name] == before[name]


def test_change_behind_the_gateway_is_seen_when_the_copy_is_revalidated(
    start_node: StartNode, proxy: FaultyOrigin, direct: Any, bucket: str
) -> None:
    client = always_ask(start_node).client()
    direct.put_object(Bucket=bucket, Key="k", Body=b"first")
    assert body_of(client, bucket, "k") == b"first"
    proxy.forget()
    assert body_of(client, bucket, "k") == b"first"
    assert proxy.seen("GetObject") == [], "what still holds is not fetched again"
    assert len(proxy.seen("HeadObject", "k")) == 1

    direct.put_object(Bucket=bucket, Key="k", Body=b"second, longer")
    assert body_of(client, bucket, "k") == b"second, longer"
    direct.delete_object(Bucket=bucket, Key="k")
    assert is_missing(client, bucket, "k")


def test_change_behind_the_gateway_of_what_it_wrote_is_seen(start_node: StartNode, direct: Any, bucket: str) -> None:
    own = always_ask(start_node)
    client = own.client()
    client.put_object(Bucket=bucket, Key="k", Body=b"ours")
    own.wait_settled()
    direct.put_object(Bucket=bucket, Key="k", Body=b"theirs")
    assert body_of(client, bucket, "k") == b"theirs"
    head = client.head_object(Bucket=bucket, Key="k")
    assert head["ETag"] == direct.head_object(Bucket=bucket, Key="k")["ETag"]


def test_change_in_the_middle_of_a_fill_is_never_mixed(s3: Any, proxy: FaultyOrigin, direct: Any, bucket: str) -> None:
    """The reader gets the one or the other whole, or a broken connection; never some of both."""
    old, new = b"o" * (6 * BLOCK), b"n" * (6 * BLOCK)
    direct.put_object(Bucket=bucket, Key="k", Body=old)
    gate = Gate()
    proxy.inject(Hold(gate), where=lambda seen: is_block(seen, 3), times=None)
    stream = s3.get_object(Bucket=bucket, Key="k")["Body"]
    with stream:
        got = stream.read(BLOCK)
        assert got == old[:BLOCK]
        gate.wait_reached()
        direct.put_object(Bucket=bucket, Key="k", Body=new)
        gate.release()
        with pytest.raises(Exception, match=r"(?i)connection|incomplete|read"):
            stream.read()
    assert body_of(s3, bucket, "k") == new


def test_whole_read_of_a_partly_held_object_is_whole(s3: Any, proxy: FaultyOrigin, direct: Any, bucket: str) -> None:
    """Memory holds the third block and what was read ahead of it; the first two come while the answer is under way."""
    data = os.urandom(6 * BLOCK)
    direct.put_object(Bucket=bucket, Key="k", Body=data)
    assert body_of(s3, bucket, "k", Range=f"bytes={2 * BLOCK}-{2 * BLOCK}") == data[2 * BLOCK : 2 * BLOCK + 1]
    gate = Gate()
    proxy.inject(Hold(gate), where=lambda seen: is_block(seen, 1), times=None)
    with s3.get_object(Bucket=bucket, Key="k")["Body"] as stream:
        assert stream.read(BLOCK) == data[:BLOCK]
        gate.wait_reached()
        gate.release()
        assert stream.read() == data[BLOCK:]


def is_block(seen: Seen, index: int) -> bool:
    return seen.operation == "GetObject" and seen.headers["range"].startswith(f"bytes={index * BLOCK}-")


def test_immutable_prefix_is_served_without_asking(
    start_node: StartNode, proxy: FaultyOrigin, direct: Any, bucket: str
) -> None:
    own = start_node("--revalidate", "0", "--prefix", f"{{uri = 's3://{bucket}/fixed/', immutable = true}}")
    client = own.client()
    direct.put_object(Bucket=bucket, Key="fixed/k", Body=b"data")
    assert body_of(client, bucket, "fixed/k") == b"data"
    proxy.forget()
    assert body_of(client, bucket, "fixed/k") == b"data"
    assert [seen for seen in proxy.requests if seen.key == "fixed/k"] == []


@pytest.mark.parametrize("fault", [Answer(503, "SlowDown"), Cut()], ids=["503", "reset"])
def test_origin_down_serves_what_is_held_and_503_for_the_rest(
    start_node: StartNode, proxy: FaultyOrigin, direct: Any, bucket: str, fault: Answer | Cut
) -> None:
    own = start_node("--revalidate", "0", "--prefix", f"{{uri = 's3://{bucket}/only-us/', exclusive = true}}")
    client = own.client()
    written, read = os.urandom(5 * MIB), os.urandom(5 * MIB)
    client.put_object(Bucket=bucket, Key="written", Body=written)
    direct.put_object(Bucket=bucket, Key="read", Body=read)
    direct.put_object(Bucket=bucket, Key="cold", Body=b"never read")
    assert body_of(client, bucket, "read") == read
    own.wait_settled()

    proxy.inject(fault, times=None)

    assert body_of(client, bucket, "written") == written
    assert body_of(client, bucket, "read") == read
    for call in (client.get_object, client.head_object):
        found = refusal(lambda call=call: call(Bucket=bucket, Key="cold"))  # type: ignore[misc]
        assert found is not None
        assert found[0] == 503
    found = refusal(lambda: client.list_objects_v2(Bucket=bucket))
    assert found is not None
    assert found[0] == 503
    # Where only gateways write, the directory is the truth: saves and restores go on.
    client.put_object(Bucket=bucket, Key="only-us/k", Body=b"saved")
    assert body_of(client, bucket, "only-us/k") == b"saved"
    assert keys_of(client, bucket, "only-us/") == ["only-us/k"]
    assert is_missing(client, bucket, "only-us/other")

    proxy.heal()
    own.wait_settled()
    assert body_of(client, bucket, "cold") == b"never read"
    assert body_of(direct, bucket, "only-us/k") == b"saved"


DESCRIPTION: dict[str, Any] = {
    "Tagging": "a=b%20c&d=",
    "CacheControl": "no-cache",
    "ContentDisposition": "attachment",
    "ContentLanguage": "de",
    "ContentType": "a/b",
    "Expires": "Wed, 21 Oct 2065 07:28:00 GMT",
    "StorageClass": "STANDARD_IA",
    "Metadata": {"m": "n"},
}
OF_THE_OBJECT = (
    "cache-control",
    "content-disposition",
    "content-language",
    "content-type",
    "expires",
    "x-amz-meta-m",
    "x-amz-storage-class",
    "x-amz-tagging-count",
)


def test_headers_tags_and_markers_are_the_origins_warm_and_cold(
    start_node: StartNode, direct: Any, bucket: str
) -> None:
    """Also a marker that a node which forgot it takes out of the origin comes back with all of them."""
    node = start_node()
    keys = ["somebody/.metadata", "gateway/.metadata"]
    for writer, key in zip((direct, node.client()), keys, strict=True):
        writer.put_object(Bucket=bucket, Key=key.replace(".metadata", "shard"), Body=b"old")
        writer.put_object(Bucket=bucket, Key=key, Body=b"data", **DESCRIPTION)
    node.wait_settled()

    def shown(client: Any) -> list[dict[str, str]]:
        answers: list[dict[str, str]] = []
        for key in keys:
            answers.append(client.head_object(Bucket=bucket, Key=key)["ResponseMetadata"]["HTTPHeaders"])
            got = client.get_object(Bucket=bucket, Key=key)
            got["Body"].read()
            answers.append(got["ResponseMetadata"]["HTTPHeaders"])
        return [{name: answer.get(name, "") for name in OF_THE_OBJECT} for answer in answers]

    expected = shown(direct)
    assert expected[1]["x-amz-tagging-count"] == "2"
    assert shown(node.client()) == expected
    assert shown(node.client()) == expected, "from memory"
    node.restart_cold()
    for key in keys:
        node.client().put_object(Bucket=bucket, Key=key.replace(".metadata", "shard"), Body=b"new")
    assert shown(node.client()) == expected
    node.wait_settled()
    assert node.metric("tiergate_writeback_withdrawals_total") == 2
    assert shown(direct) == shown(node.client()) == expected
    for key in keys:
        tags = direct.get_object_tagging(Bucket=bucket, Key=key)["TagSet"]
        assert {tag["Key"]: tag["Value"] for tag in tags} == {"a": "b c", "d": ""}
