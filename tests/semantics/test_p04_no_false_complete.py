"""P4 No false complete. Most of its sentences are held by tests/e2e/test_fence.py."""

import os
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
from tests.nodes import StartNode
from tests.semantics.conftest import SMALL

from tiergate.testing.completeness import Acked, changes_of, false_completes
from tiergate.testing.faults import FaultyOrigin
from tiergate.testing.node import RunningNode
from tiergate.testing.objects import ack_of, body_of, is_missing
from tiergate.testing.rules import Answer, Gate, Hold

MIB = 1 << 20
MARKER = ".metadata"
POINTER = "checkpoint_manager_snapshot.json"


def is_marker(key: str) -> bool:
    return key.rpartition("/")[2] == MARKER


def save(client: Any, bucket: str, prefix: str) -> list[Acked]:
    """Two shards and their marker; what was acknowledged."""
    keys = [f"{prefix}__0_0.distcp", f"{prefix}__1_0.distcp", f"{prefix}{MARKER}"]
    return [
        Acked(key, client.put_object(Bucket=bucket, Key=key, Body=os.urandom(10_000))["ETag"].strip('"'))
        for key in keys
    ]


def sent(proxy: FaultyOrigin, bucket: str) -> list[str]:
    """What happened in the origin, deletions with a minus sign."""
    return [("" if change.etag else "-") + change.key for change in changes_of(proxy.requests, bucket)]


@pytest.mark.semantics("P4.7")
def test_write_through_of_a_shard_withdraws_marker_before_its_bytes(
    start_node: StartNode, direct: Any, proxy: FaultyOrigin, bucket: str
) -> None:
    node = start_node(memory_limit=SMALL)
    client = node.client()
    save(client, bucket, "s/")
    node.wait_settled()
    first = proxy.requests[-1].number
    data = os.urandom(40 * MIB)
    assert ack_of(client.put_object(Bucket=bucket, Key="s/__0_0.distcp", Body=data)) == "origin"
    node.wait_settled()
    changes = [
        (seen.operation, seen.key) for seen in proxy.requests[first:] if seen.operation in ("PutObject", "DeleteObject")
    ]
    assert changes == [
        ("DeleteObject", f"s/{MARKER}"),
        ("PutObject", "s/__0_0.distcp"),
        ("PutObject", f"s/{MARKER}"),
    ]
    assert body_of(direct, bucket, "s/__0_0.distcp") == data


@pytest.mark.semantics("P4.7")
def test_write_through_and_marker_of_its_set_never_overlap(
    start_node: StartNode, direct: Any, proxy: FaultyOrigin, bucket: str
) -> None:
    """The marker comes back while the write-through lasts, or the write-through begins while the marker goes in."""
    node = start_node("--marker-quiet", "100ms", memory_limit=SMALL)
    client = node.client()
    shard, marker = "s/__0_0.distcp", f"s/{MARKER}"
    save(client, bucket, "s/")
    node.wait_settled()
    first = len(changes_of(proxy.requests, bucket))
    through, returning = Gate(), Gate()
    proxy.inject(Hold(through), operation="PutObject", key=shard)
    with ThreadPoolExecutor(1) as pool:
        overwrite = pool.submit(client.put_object, Bucket=bucket, Key=shard, Body=bytes(40 * MIB))
        through.wait_reached()
        proxy.inject(Hold(returning), operation="PutObject", key=marker)
        client.put_object(Bucket=bucket, Key=marker, Body=b"2")
        # Write-back has looked since the marker was committed, and left it where it is.
        client.put_object(Bucket=bucket, Key="other", Body=b"")
        proxy.wait_finished("PutObject", "other")
        through.release()
        assert ack_of(overwrite.result()) == "origin"
        returning.wait_reached()
        overwrite = pool.submit(client.put_object, Bucket=bucket, Key=shard, Body=bytes(41 * MIB))
        node.wait_until("the write-through waits", lambda: node.metric("tiergate_http_active_requests") == 1)
        returning.release()
        assert ack_of(overwrite.result()) == "origin"
    node.wait_settled()
    changes = [change for change in changes_of(proxy.requests, bucket)[first:] if change.key != "other"]
    assert all(one.until_s <= other.from_s for one, other in pairwise(changes))
    assert sent(proxy, bucket)[-1] == marker
    in_turn = [("" if change.etag else "-") + change.key for change in changes]
    assert in_turn == [f"-{marker}", shard, marker, f"-{marker}", shard, marker]


@pytest.mark.semantics("P4.7")
def test_completion_of_an_upload_that_is_the_origin_s_own_withdraws_marker_before(
    node: RunningNode, s3: Any, proxy: FaultyOrigin, bucket: str
) -> None:
    save(s3, bucket, "s/")
    node.wait_settled()
    first = proxy.requests[-1].number
    upload = {"Bucket": bucket, "Key": "s/__0_0.distcp"}
    # An ACL is the origin's to keep, so the upload is its own.
    upload["UploadId"] = s3.create_multipart_upload(**upload, ACL="private")["UploadId"]
    part = s3.upload_part(**upload, PartNumber=1, Body=b"new")
    s3.complete_multipart_upload(**upload, MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]})
    assert body_of(s3, bucket, "s/__0_0.distcp") == b"new"
    node.wait_settled()
    watched = ("PutObject", "DeleteObject", "CompleteMultipartUpload")
    changes = [(seen.operation, seen.key) for seen in proxy.requests[first:] if seen.operation in watched]
    assert changes == [
        ("DeleteObject", f"s/{MARKER}"),
        ("CompleteMultipartUpload", "s/__0_0.distcp"),
        ("PutObject", f"s/{MARKER}"),
    ]


@pytest.mark.semantics("P4.8")
def test_quarantined_shard_holds_back_only_its_own_marker_until_retried(
    start_node: StartNode, direct: Any, proxy: FaultyOrigin, bucket: str
) -> None:
    node = start_node()
    s3 = node.client()
    rule = proxy.inject(Answer(403, "AccessDenied"), operation="PutObject", key="a/__0_0.distcp", times=None)
    save(s3, bucket, "a/")
    save(s3, bucket, "b/")
    status = node.wait_status(
        "one is quarantined, one waits for it", lambda status: status["writeback"]["pending"] == 2
    )["writeback"]
    (quarantined,) = status["quarantined"]
    assert quarantined["uri"] == f"s3://{bucket}/a/__0_0.distcp"
    assert quarantined["reason"]
    (fenced,) = status["fenced"]
    assert fenced["uri"] == f"s3://{bucket}/a/{MARKER}"
    assert is_missing(direct, bucket, f"a/{MARKER}")
    assert not is_missing(direct, bucket, f"b/{MARKER}")
    assert body_of(s3, bucket, f"a/{MARKER}")

    assert rule.matched
    proxy.heal()
    assert node.retry(bucket) == 1
    node.wait_settled()
    assert not is_missing(direct, bucket, f"a/{MARKER}")


@pytest.mark.semantics("P4.9")
def test_death_of_all_processes_in_the_middle_shows_no_marker_before_its_set(
    start_node: StartNode, direct: Any, proxy: FaultyOrigin, bucket: str
) -> None:
    node = start_node()
    client = node.client()
    gate = Gate()
    proxy.inject(Hold(gate), operation="PutObject", key="s/__1_0.distcp")
    acked = save(client, bucket, "s/")
    gate.wait_reached()
    node.kill9()
    gate.release()
    node.restart()
    node.wait_settled()
    assert false_completes(proxy.requests, bucket, acked, is_marker) == []
    assert not is_missing(direct, bucket, f"s/{MARKER}")


@pytest.mark.semantics("P4.10")
def test_pointer_waits_for_what_was_before_it_and_is_never_withdrawn(
    node: RunningNode, s3: Any, direct: Any, proxy: FaultyOrigin, bucket: str
) -> None:
    gate = Gate()
    proxy.inject(Hold(gate), operation="PutObject", key="run/checkpoint_1/__0_0.distcp")
    save(s3, bucket, "run/checkpoint_1/")
    s3.put_object(Bucket=bucket, Key=f"run/{POINTER}", Body=b"1")
    gate.wait_reached()
    node.wait_status("shard, marker and pointer are left", lambda status: status["writeback"]["pending"] == 3)
    assert is_missing(direct, bucket, f"run/{POINTER}")
    gate.release()
    node.wait_settled()
    assert sent(proxy, bucket)[-1] == f"run/{POINTER}"

    s3.put_object(Bucket=bucket, Key="run/checkpoint_1/__0_0.distcp", Body=b"again")
    s3.delete_object(Bucket=bucket, Key="run/checkpoint_1/__1_0.distcp")
    node.wait_settled()
    assert f"-run/{POINTER}" not in sent(proxy, bucket)


@pytest.mark.semantics("P4.17")
@pytest.mark.parametrize("folder", ["ns/rank_{}/step_7/", "ns/step_7/rank_{}/"])
def test_list_of_a_tiered_checkpoint_waits_for_the_shards_of_all_ranks(
    node: RunningNode, s3: Any, direct: Any, proxy: FaultyOrigin, bucket: str, folder: str
) -> None:
    shards = [f"{folder.format(rank)}checkpoint.pt" for rank in range(3)]
    marker = f"{folder.format(0)}metadata.metadata"

    def save() -> None:
        for key in (*shards, marker):
            s3.put_object(Bucket=bucket, Key=key, Body=os.urandom(10_000))

    gate = Gate()
    proxy.inject(Hold(gate), operation="PutObject", key=shards[2])
    save()
    gate.wait_reached()
    node.wait_status("a shard and the list are left", lambda status: status["writeback"]["pending"] == 2)
    assert is_missing(direct, bucket, marker)
    gate.release()
    node.wait_settled()
    assert sent(proxy, bucket)[-1] == marker

    # Saved again in place: the list goes first and comes back last.
    save()
    node.wait_settled()
    again = sent(proxy, bucket)[4:]
    assert again.index(f"-{marker}") < min(again.index(shard) for shard in shards)
    assert again[-1] == marker

    for key in (*shards, marker):
        s3.delete_object(Bucket=bucket, Key=key)
    node.wait_settled()
    deleted = sent(proxy, bucket)[4 + len(again) :]
    assert deleted[0] == f"-{marker}"
    assert set(deleted) == {f"-{key}" for key in (*shards, marker)}
