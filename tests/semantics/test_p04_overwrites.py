"""P4 No false complete, of sets that are overwritten in place: how short the time without a complete set is."""

import os
from typing import Any

import pytest
from tests.etcds import StartCluster
from tests.nodes import StartNode
from tests.semantics.conftest import SMALL

from tiergate.testing.completeness import Acked, changes_of, false_completes
from tiergate.testing.etcd import needs_etcd
from tiergate.testing.faults import FaultyOrigin
from tiergate.testing.node import RunningNode
from tiergate.testing.objects import ack_of, body_of, is_missing
from tiergate.testing.rules import Gate, Hold

MIB = 1 << 20
SHARDS = ["s/__0_0.distcp", "s/__1_0.distcp"]
MARKER = "s/.metadata"
LONG = ("--marker-hold", "1h", "--dirty-age-slow", "2h", "--dirty-age-limit", "2h")
"""Nothing here ends by itself."""

SHORT = ("--marker-hold", "200ms")


def is_marker(key: str) -> bool:
    return key == MARKER


def put(client: Any, bucket: str, keys: list[str], size: int = 10_000) -> list[Acked]:
    """Write each key anew; what was acknowledged."""
    answers = [(key, client.put_object(Bucket=bucket, Key=key, Body=os.urandom(size))) for key in keys]
    assert {ack_of(answer) for _, answer in answers} <= {"memory:1", "memory:2"}
    return [Acked(key, answer["ETag"].strip('"')) for key, answer in answers]


def sent(proxy: FaultyOrigin, bucket: str) -> list[str]:
    """What happened in the origin, deletions with a minus sign."""
    return [("" if change.etag else "-") + change.key for change in changes_of(proxy.requests, bucket)]


def wait_held(node: RunningNode, count: int) -> None:
    def is_held(status: Any) -> bool:
        return [each["waits"] for each in status["writeback"]["fenced"]] == [
            f"its set stands in the origin and its marker was not written anew yet: {marker_of(status)}"
        ] * count

    def marker_of(status: Any) -> str:
        return f"{status['writeback']['fenced'][0]['uri'].partition('/s/')[0]}/{MARKER}"

    node.wait_status("so many are held", is_held)


@pytest.mark.semantics("P4.12")
def test_new_objects_of_a_standing_set_wait_for_its_new_marker(
    start_node: StartNode, direct: Any, proxy: FaultyOrigin, bucket: str
) -> None:
    node = start_node(*LONG)
    client = node.client()
    acked = put(client, bucket, [*SHARDS, MARKER])
    node.wait_settled()
    before = {key: body_of(direct, bucket, key) for key in [*SHARDS, MARKER]}
    first = len(changes_of(proxy.requests, bucket))

    acked += put(client, bucket, SHARDS)
    # What is new takes nothing from the set, so it waits for nothing.
    acked += put(client, bucket, ["s/__2_0.distcp"])
    proxy.wait_finished("PutObject", "s/__2_0.distcp")
    wait_held(node, len(SHARDS))
    assert {key: body_of(direct, bucket, key) for key in [*SHARDS, MARKER]} == before

    acked += put(client, bucket, [MARKER])
    node.wait_settled()
    changes = sent(proxy, bucket)[first:]
    assert changes[:2] == ["s/__2_0.distcp", f"-{MARKER}"]
    assert sorted(changes[2:-1]) == SHARDS
    assert changes[-1] == MARKER
    assert false_completes(proxy.requests, bucket, acked, is_marker) == []


@pytest.mark.semantics("P4.12")
def test_parts_of_a_large_object_travel_before_its_set_is_whole(
    start_node: StartNode, direct: Any, proxy: FaultyOrigin, bucket: str
) -> None:
    node = start_node(*LONG, "--large", "6MiB")
    client = node.client()
    put(client, bucket, [SHARDS[0], MARKER])
    node.wait_settled()
    upload = {"Bucket": bucket, "Key": SHARDS[0]}
    upload["UploadId"] = client.create_multipart_upload(**upload)["UploadId"]
    etags = [
        client.upload_part(**upload, PartNumber=number, Body=os.urandom(5 * MIB))["ETag"] for number in range(1, 3)
    ]
    parts = [{"PartNumber": number, "ETag": etag} for number, etag in enumerate(etags, 1)]
    client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})
    proxy.wait_finished("UploadPart", SHARDS[0], count=2)
    wait_held(node, 1)
    assert not is_missing(direct, bucket, MARKER)
    put(client, bucket, [MARKER])
    node.wait_settled()
    assert sent(proxy, bucket)[-3:] == [f"-{MARKER}", SHARDS[0], MARKER]
    assert len(proxy.seen("UploadPart")) == 2


@pytest.mark.semantics("P4.13")
def test_a_hold_ends_when_it_lasted_for_its_bound(start_node: StartNode, proxy: FaultyOrigin, bucket: str) -> None:
    """Nobody writes the marker again."""
    node = start_node(*SHORT)
    client = node.client()
    put(client, bucket, [*SHARDS, MARKER])
    node.wait_settled()
    first = len(changes_of(proxy.requests, bucket))
    put(client, bucket, SHARDS[:1])
    node.wait_settled()
    assert sent(proxy, bucket)[first:] == [f"-{MARKER}", SHARDS[0], MARKER]


@pytest.mark.semantics("P4.13")
def test_a_hold_ends_when_memory_fills(start_node: StartNode, proxy: FaultyOrigin, bucket: str) -> None:
    node = start_node(*LONG, "--marker-hold-percent", "25", memory_limit=SMALL)
    client = node.client()
    put(client, bucket, [*SHARDS, MARKER])
    node.wait_settled()
    first = len(changes_of(proxy.requests, bucket))
    put(client, bucket, SHARDS[:1], MIB)
    wait_held(node, 1)
    put(client, bucket, SHARDS[1:], 8 * MIB)
    node.wait_settled()
    assert sent(proxy, bucket)[first] == f"-{MARKER}"
    assert sent(proxy, bucket)[-1] == MARKER


@pytest.mark.parametrize("what", ["marker", "shard", "tags"])
@pytest.mark.semantics("P4.14")
def test_a_request_that_must_wait_for_what_is_held_ends_the_hold(
    start_node: StartNode, direct: Any, proxy: FaultyOrigin, bucket: str, what: str
) -> None:
    node = start_node(*LONG, "--marker-quiet", "0s")
    client = node.client()
    acked = put(client, bucket, [*SHARDS, MARKER])
    node.wait_settled()
    first = len(changes_of(proxy.requests, bucket))
    acked += put(client, bucket, SHARDS)
    wait_held(node, len(SHARDS))
    if what == "tags":
        client.put_object_tagging(Bucket=bucket, Key=SHARDS[0], Tagging={"TagSet": [{"Key": "a", "Value": "b"}]})
    else:
        # What grants access is the origin's to do, so the request is done through.
        key = MARKER if what == "marker" else SHARDS[0]
        answer = client.put_object(Bucket=bucket, Key=key, Body=b"through", ACL="private")
        assert ack_of(answer) == "origin"
        acked.append(Acked(key, answer["ETag"].strip('"')))
    node.wait_settled()
    assert sent(proxy, bucket)[first] == f"-{MARKER}"
    assert false_completes(proxy.requests, bucket, acked, is_marker) == []
    assert not is_missing(direct, bucket, MARKER)


CRASHES = (
    ("DeleteObject", MARKER, "before"),
    ("DeleteObject", MARKER, "after"),
    ("PutObject", SHARDS[1], "before"),
    ("PutObject", SHARDS[1], "after"),
    ("PutObject", MARKER, "before"),
    ("PutObject", MARKER, "after"),
)
"""The steps of an overwrite: killed before the origin does it, or after, when its answer is lost."""


@pytest.mark.semantics("P4.15")
def test_overwrite_outlives_a_crash_at_each_step(
    start_node: StartNode, direct: Any, proxy: FaultyOrigin, bucket: str
) -> None:
    node = start_node(*LONG)
    acked = put(node.client(), bucket, [*SHARDS, MARKER])
    node.wait_settled()
    for operation, key, when in CRASHES:
        first = len(changes_of(proxy.requests, bucket))
        acked += put(node.client(), bucket, SHARDS)
        wait_held(node, len(SHARDS))
        gate = Gate()
        proxy.inject(Hold(gate, after_origin=when == "after"), operation=operation, key=key)
        acked += put(node.client(), bucket, [MARKER])
        gate.wait_reached()
        node.kill9()
        gate.release()
        proxy.heal()
        node.restart()
        node.wait_settled()
        changes = sent(proxy, bucket)[first:]
        assert (changes[0], changes[-1]) == (f"-{MARKER}", MARKER), (operation, key, when)
        newest = {each.key: each.etag for each in acked}
        assert {
            each: node.client().head_object(Bucket=bucket, Key=each)["ETag"].strip('"') for each in newest
        } == newest
    assert false_completes(proxy.requests, bucket, acked, is_marker) == []


@pytest.mark.semantics("P4.15")
def test_hold_outlives_a_crash(start_node: StartNode, direct: Any, proxy: FaultyOrigin, bucket: str) -> None:
    node = start_node(*LONG)
    put(node.client(), bucket, [*SHARDS, MARKER])
    node.wait_settled()
    first = len(changes_of(proxy.requests, bucket))
    put(node.client(), bucket, SHARDS)
    wait_held(node, len(SHARDS))
    node.kill9()
    node.restart()
    wait_held(node, len(SHARDS))
    assert sent(proxy, bucket)[first:] == []
    put(node.client(), bucket, [MARKER])
    node.wait_settled()
    changes = sent(proxy, bucket)[first:]
    assert (changes[0], sorted(changes[1:-1]), changes[-1]) == (f"-{MARKER}", SHARDS, MARKER)


@needs_etcd
@pytest.mark.semantics("P4.16")
def test_shards_on_one_node_wait_for_the_new_marker_from_another(
    start_cluster: StartCluster, direct: Any, proxy: FaultyOrigin, bucket: str
) -> None:
    cluster = start_cluster(2, *LONG)
    a, b = cluster.client(0), cluster.client(1)
    acked = put(a, bucket, SHARDS) + put(b, bucket, [MARKER])
    cluster.wait_settled()
    first = len(changes_of(proxy.requests, bucket))
    acked += put(a, bucket, SHARDS)
    wait_held(cluster.nodes[0], len(SHARDS))
    assert not is_missing(direct, bucket, MARKER)
    acked += put(b, bucket, [MARKER])
    cluster.wait_settled()
    changes = sent(proxy, bucket)[first:]
    assert (changes[0], sorted(changes[1:-1]), changes[-1]) == (f"-{MARKER}", SHARDS, MARKER)
    assert false_completes(proxy.requests, bucket, acked, is_marker) == []
