"""The memory budget: never exceeded, never paid for with un-persisted data."""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from botocore.exceptions import BotoCoreError
from tests.nodes import StartNode

from tiergate.testing.faults import FaultyOrigin
from tiergate.testing.node import RunningNode, allocated_bytes
from tiergate.testing.objects import ack_of, body_of, keys_of, refusal, uploads_of
from tiergate.testing.origins import MotoOrigin
from tiergate.testing.rules import Answer, Gate, Hold

pytestmark = pytest.mark.parametrize("origin", [MotoOrigin], ids=["moto"], indirect=True)

MIB = 1 << 20
BLOCK_BYTES = 4096
LIMIT = 64 * MIB
WRITING = ("PutObject", "CompleteMultipartUpload", "UploadPart", "CreateMultipartUpload")


@pytest.fixture
def small(start_node: StartNode) -> RunningNode:
    """A node of 64 MiB. A write-through waits a second at most for its turn."""
    return start_node("--through-wait", "1s", memory_limit="64MiB")


def hold_writes(proxy: FaultyOrigin, held: str = "") -> Gate:
    """Writes of keys that start with `held` wait before they reach the origin."""
    gate = Gate()
    proxy.inject(Hold(gate), where=lambda seen: seen.operation in WRITING and seen.key.startswith(held), times=None)
    return gate


def within_budget(node: RunningNode) -> dict[str, Any]:
    """Memory's part of the status, once it is known to fit the budget in every respect."""
    memory: dict[str, Any] = node.status()["memory"]
    assert allocated_bytes(node.memory_dir) <= LIMIT
    return memory


def test_puts_beyond_memory_go_through_to_origin_and_say_so(
    small: RunningNode, proxy: FaultyOrigin, direct: Any, bucket: str
) -> None:
    client = small.client()
    gate = hold_writes(proxy, "held/")
    data = {f"held/{index}": os.urandom(20 * MIB) for index in range(2)}
    data |= {f"k{index}": os.urandom(20 * MIB) for index in range(8)}
    acks = {}
    memory = within_budget(small)
    for key, body in data.items():
        acks[key] = ack_of(client.put_object(Bucket=bucket, Key=key, Body=body))
        if acks[key] == "origin":
            assert key in keys_of(direct, bucket)
        memory = within_budget(small)
    assert acks["held/0"] == acks["held/1"] == "memory:1"
    assert "origin" in acks.values()
    assert memory["dirty_bytes"] >= 40 * MIB, "dirty data is never evicted"
    for key, body in data.items():
        assert body_of(client, bucket, key) == body, key

    gate.release()
    small.wait_settled()
    for key, body in data.items():
        assert body_of(direct, bucket, key) == body, key
    assert keys_of(direct, bucket) == keys_of(client, bucket) == sorted(data)
    within_budget(small)


def test_puts_beyond_memory_while_origin_refuses_get_slow_down_and_lose_nothing(
    small: RunningNode, proxy: FaultyOrigin, direct: Any, bucket: str
) -> None:
    client = small.client()
    proxy.inject(Answer(503, "SlowDown"), where=lambda seen: seen.operation in WRITING, times=None)
    acked: dict[str, bytes] = {}
    refused: dict[str, tuple[int, str] | None] = {}
    for index in range(10):
        key, body = f"k{index}", os.urandom(20 * MIB)

        def put(key: str = key, body: bytes = body) -> None:
            assert ack_of(client.put_object(Bucket=bucket, Key=key, Body=body)) == "memory:1"
            acked[key] = body

        found = refusal(put)
        if found is not None:
            refused[key] = found
        assert within_budget(small)["dirty_bytes"] >= 20 * MIB * len(acked)
    assert len(acked) >= 2
    assert len(acked) + len(refused) == 10
    assert set(refused.values()) == {(503, "SlowDown")}
    small.wait_status("what was refused left nothing", lambda status: status["memory"]["receiving_bytes"] == 0)
    for key, body in acked.items():
        assert body_of(client, bucket, key) == body, key
    assert keys_of(direct, bucket) == []

    proxy.heal()
    small.wait_settled()
    for key, body in acked.items():
        assert body_of(direct, bucket, key) == body, key
    assert keys_of(client, bucket) == sorted(acked)


def test_memory_full_of_a_set_overwritten_while_its_marker_was_evicted_comes_free(
    small: RunningNode, proxy: FaultyOrigin, direct: Any, bucket: str
) -> None:
    """The marker must be in memory before it is withdrawn, and withdrawn before anything here may land."""
    client = small.client()
    for index in range(4):
        client.put_object(Bucket=bucket, Key=f"s/{index}", Body=b"old")
    client.put_object(Bucket=bucket, Key="s/.metadata", Body=b"marker")
    small.wait_settled()
    for index in range(4):
        client.put_object(Bucket=bucket, Key=f"other{index}", Body=bytes(18 * MIB))
        small.wait_settled()
    assert small.status()["memory"]["evictions"] > 4
    proxy.inject(Answer(503, "SlowDown"), times=None)
    for index in range(2):
        client.put_object(Bucket=bucket, Key=f"s/{index}", Body=bytes(18 * MIB))
    rest_bytes = small.status()["memory"]["available_bytes"] // BLOCK_BYTES * BLOCK_BYTES

    def fill() -> None:
        client.put_object(Bucket=bucket, Key="s/3", Body=bytes(rest_bytes))

    # Whoever tries to bring the marker in takes some of the room for a moment.
    small.wait_until("the rest is full", lambda: refusal(fill) is None)
    assert small.status()["memory"]["available_bytes"] < BLOCK_BYTES
    proxy.heal()
    small.wait_settled()
    assert body_of(direct, bucket, "s/.metadata") == b"marker"
    assert body_of(direct, bucket, "s/3") == bytes(rest_bytes)


def test_eviction_takes_the_least_recently_used(small: RunningNode, proxy: FaultyOrigin, bucket: str) -> None:
    client = small.client()
    data = {f"k{index}": os.urandom(10 * MIB) for index in range(4)}
    for key, body in data.items():
        client.put_object(Bucket=bucket, Key=key, Body=body)
        small.wait_settled()
    assert body_of(client, bucket, "k0") == data["k0"]
    assert proxy.seen("GetObject") == []
    for index in (4, 5):
        data[f"k{index}"] = os.urandom(12 * MIB)
        client.put_object(Bucket=bucket, Key=f"k{index}", Body=data[f"k{index}"])
        small.wait_settled()
    assert small.status()["memory"]["evictions"] > 0

    # The one read last stayed, the one before it in age went.
    assert body_of(client, bucket, "k0") == data["k0"]
    assert proxy.seen("GetObject") == []
    assert body_of(client, bucket, "k1") == data["k1"]
    assert proxy.seen("GetObject", "k1") != []
    within_budget(small)


def test_small_objects_share_slabs(small: RunningNode, proxy: FaultyOrigin, bucket: str) -> None:
    client = small.client()
    gate = hold_writes(proxy)
    for index in range(300):
        client.put_object(Bucket=bucket, Key=f"k{index:03}", Body=b"x" * 3000)
    memory = within_budget(small)
    assert memory["dirty_bytes"] >= 300 * 3000
    assert memory["used_bytes"] <= 300 * 4096
    assert memory["slab_bytes"] <= 8 * MIB
    assert len(keys_of(client, bucket)) == 300
    gate.release()
    small.wait_settled()


def test_object_larger_than_memory_spills_by_multipart_and_is_whole(
    small: RunningNode, direct: Any, bucket: str
) -> None:
    client = small.client()
    upload_id = client.create_multipart_upload(Bucket=bucket, Key="huge", Metadata={"a": "b"})["UploadId"]
    parts = [os.urandom(10 * MIB) for _ in range(9)]
    listed = []
    acks = []
    for number, body in enumerate(parts, 1):
        part = client.upload_part(Bucket=bucket, Key="huge", UploadId=upload_id, PartNumber=number, Body=body)
        acks.append(ack_of(part))
        listed.append({"PartNumber": number, "ETag": part["ETag"]})
        within_budget(small)
    assert acks[0] == "memory:1"
    assert "origin" in acks
    assert len(client.list_parts(Bucket=bucket, Key="huge", UploadId=upload_id)["Parts"]) == 9
    done = client.complete_multipart_upload(
        Bucket=bucket, Key="huge", UploadId=upload_id, MultipartUpload={"Parts": listed}
    )
    assert ack_of(done) == "origin"

    whole = b"".join(parts)
    assert body_of(direct, bucket, "huge") == whole
    assert body_of(client, bucket, "huge") == whole
    assert body_of(client, bucket, "huge", Range="bytes=31457000-31457999") == whole[31457000:31458000]
    head = client.head_object(Bucket=bucket, Key="huge")
    assert (head["ETag"], head["ContentLength"], head["Metadata"]) == (done["ETag"], len(whole), {"a": "b"})
    assert uploads_of(direct, bucket) == []
    within_budget(small)


def test_aborting_a_spilled_upload_aborts_it_in_origin(small: RunningNode, direct: Any, bucket: str) -> None:
    client = small.client()
    upload_id = client.create_multipart_upload(Bucket=bucket, Key="huge")["UploadId"]
    body = os.urandom(15 * MIB)
    for number in range(1, 6):
        client.upload_part(Bucket=bucket, Key="huge", UploadId=upload_id, PartNumber=number, Body=body)
    assert [key for key, _ in uploads_of(direct, bucket)] == ["huge"]
    client.abort_multipart_upload(Bucket=bucket, Key="huge", UploadId=upload_id)

    assert uploads_of(direct, bucket) == []
    memory = within_budget(small)
    assert (memory["used_bytes"], memory["receiving_bytes"]) == (0, 0)


def test_single_put_larger_than_memory_goes_through(small: RunningNode, direct: Any, bucket: str) -> None:
    client = small.client()
    body = os.urandom(70 * MIB)
    assert ack_of(client.put_object(Bucket=bucket, Key="huge", Body=body)) == "origin"
    assert body_of(direct, bucket, "huge") == body
    assert body_of(client, bucket, "huge") == body
    within_budget(small)


def spilled_upload(client: Any, bucket: str, key: str, **more: Any) -> dict[str, Any]:
    """An upload of more parts than memory holds, all of them there; what completes it."""
    named: dict[str, Any] = {"Bucket": bucket, "Key": key}
    named["UploadId"] = client.create_multipart_upload(**named)["UploadId"]
    parts = [
        {"PartNumber": number, "ETag": client.upload_part(**named, PartNumber=number, Body=bytes(8 * MIB))["ETag"]}
        for number in range(1, 10)
    ]
    return named | {"MultipartUpload": {"Parts": parts}} | more


def test_spilled_upload_completed_twice_at_once_is_answered_the_same(
    small: RunningNode, direct: Any, bucket: str
) -> None:
    client = small.client()
    upload = spilled_upload(client, bucket, "twice")
    with ThreadPoolExecutor(2) as pool:
        done = [pool.submit(client.complete_multipart_upload, **upload) for _ in range(2)]
        etags = {each.result()["ETag"] for each in done}
    assert etags == {direct.head_object(Bucket=bucket, Key="twice")["ETag"]}
    assert body_of(direct, bucket, "twice") == bytes(72 * MIB)


def test_spilled_upload_completed_on_a_condition_may_be_completed_again(
    small: RunningNode, proxy: FaultyOrigin, direct: Any, bucket: str
) -> None:
    """The answer to the first completion was lost with the worker: the object it made must not fail the second."""
    client = small.client()
    upload = spilled_upload(client, bucket, "once", IfNoneMatch="*")
    gate = Gate()
    proxy.inject(Hold(gate, after_origin=True), operation="CompleteMultipartUpload", key="once")
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(client.complete_multipart_upload, **upload)
        gate.wait_reached()
        small.kill9("worker")
        gate.release()
        assert isinstance(first.exception(), BotoCoreError)
    answer = small.client().complete_multipart_upload(**upload)
    assert answer["ETag"] == direct.head_object(Bucket=bucket, Key="once")["ETag"]


def test_spilled_upload_that_the_origin_would_not_abort_is_aborted_later(
    small: RunningNode, proxy: FaultyOrigin, direct: Any, bucket: str
) -> None:
    client = small.client()
    upload = spilled_upload(client, bucket, "aborted")
    proxy.inject(Answer(403, "AccessDenied"), operation="AbortMultipartUpload", key="aborted")
    client.abort_multipart_upload(Bucket=bucket, Key="aborted", UploadId=upload["UploadId"])
    assert uploads_of(client, bucket) == []
    small.wait_until("nothing is left in the origin", lambda: not uploads_of(direct, bucket))
    assert small.status()["memory"]["used_bytes"] == 0
