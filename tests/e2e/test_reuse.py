"""Of a run with `reuse`, what did not change since an earlier set is copied inside the origin, or else sent."""

import io
import os
from collections.abc import Callable
from typing import Any

import pytest
from boto3.s3.transfer import TransferConfig
from tests.nodes import StartNode

from tiergate.testing.faults import FaultyOrigin
from tiergate.testing.node import RunningNode
from tiergate.testing.objects import body_of, is_missing, uploads_of
from tiergate.testing.origins import MotoOrigin, SeaweedOrigin
from tiergate.testing.rules import Action, Answer, Cut, Gate, Hold

MIB = 1 << 20
SIZE = 9 * MIB
CONFIG = TransferConfig(multipart_threshold=MIB, multipart_chunksize=5 * MIB)
IDENTITY = ("ContentLength", "ContentType", "Metadata", "ETag", "LastModified")

Upload = Callable[[Any, str, str, bytes], None]
seaweed = pytest.mark.parametrize("origin", [SeaweedOrigin], ids=["seaweed"], indirect=True)
moto = pytest.mark.parametrize("origin", [MotoOrigin], ids=["moto"], indirect=True)


def put(client: Any, bucket: str, key: str, data: bytes) -> None:
    client.put_object(Bucket=bucket, Key=key, Body=data, ContentType="a/b", Metadata={"of": key})


def in_parts(client: Any, bucket: str, key: str, data: bytes) -> None:
    extra = {"ContentType": "a/b", "Metadata": {"of": key}}
    client.upload_fileobj(io.BytesIO(data), bucket, key, Config=CONFIG, ExtraArgs=extra)


WAYS = pytest.mark.parametrize(
    ("upload", "operation"), [(put, "CopyObject"), (in_parts, "UploadPartCopy")], ids=["at once", "in parts"]
)


def start(start_node: StartNode, bucket: str, *flags: str) -> RunningNode:
    return start_node("--prefix", f"{{uri = 's3://{bucket}/run/', reuse = true}}", *flags)


def sent_bytes(proxy: FaultyOrigin, key: str) -> int:
    return sum(seen.body_bytes for seen in proxy.seen("PutObject", key) + proxy.seen("UploadPart", key))


def assert_is_there(client: Any, direct: Any, bucket: str, key: str, data: bytes, before: dict[str, Any]) -> None:
    """The origin holds the version, with the identity that clients saw before."""
    assert body_of(direct, bucket, key) == data
    head, there = client.head_object(Bucket=bucket, Key=key), direct.head_object(Bucket=bucket, Key=key)
    assert {name: head.get(name) for name in IDENTITY} == {name: before.get(name) for name in IDENTITY}
    assert (there["ContentType"], there["Metadata"]["of"]) == ("a/b", key)
    assert uploads_of(direct, bucket) == []


def second_set(
    node: RunningNode, proxy: FaultyOrigin, bucket: str, upload: Upload, data: bytes, changed: bytes
) -> dict[str, Any]:
    """Write back a second set, after a first with other `model` and the same `frozen`; what HEAD said of the copy."""
    client = node.client()
    upload(client, bucket, "run/step-2/frozen +~%41&=", data)
    upload(client, bucket, "run/step-2/model", changed)
    before: dict[str, Any] = client.head_object(Bucket=bucket, Key="run/step-2/frozen +~%41&=")
    node.wait_settled()
    return before


@pytest.mark.semantics("P5.7")
@seaweed
@WAYS
def test_what_did_not_change_is_copied_and_what_did_is_sent(
    start_node: StartNode, proxy: FaultyOrigin, direct: Any, bucket: str, upload: Upload, operation: str
) -> None:
    node = start(start_node, bucket)
    client, data, changed = node.client(), os.urandom(SIZE), os.urandom(SIZE)
    upload(client, bucket, "run/step-1/frozen +~%41&=", data)
    upload(client, bucket, "run/step-1/model", os.urandom(SIZE))
    node.wait_settled()
    assert proxy.seen(operation) == []
    before = second_set(node, proxy, bucket, upload, data, changed)

    assert_is_there(client, direct, bucket, "run/step-2/frozen +~%41&=", data, before)
    assert body_of(direct, bucket, "run/step-2/model") == changed
    assert sent_bytes(proxy, "run/step-2/frozen +~%41&=") == 0
    assert sent_bytes(proxy, "run/step-2/model") == SIZE
    assert proxy.seen(operation, "run/step-2/model") == []
    source = direct.head_object(Bucket=bucket, Key="run/step-1/frozen +~%41&=")["ETag"]
    done = [seen for seen in proxy.seen(operation, "run/step-2/frozen +~%41&=") if seen.origin_status == 200]
    assert len(done) == (2 if upload is in_parts else 1)
    assert {seen.headers["x-amz-copy-source-if-match"] for seen in done} == {source}
    assert node.status()["totals"]["reused_bytes"] == SIZE
    assert node.metric("tiergate_writeback_reused_bytes_total") == SIZE
    # A third set finds the conditions heeded and asks for nothing but the copy.
    proxy.forget()
    upload(client, bucket, "run/step-3/frozen +~%41&=", data)
    node.wait_settled()
    assert len(proxy.seen(operation, "run/step-3/frozen +~%41&=")) == len(done)
    assert sent_bytes(proxy, "run/step-3/frozen +~%41&=") == 0


@moto
@WAYS
def test_an_origin_that_ignores_conditions_of_copies_is_sent_everything(
    start_node: StartNode, proxy: FaultyOrigin, direct: Any, bucket: str, upload: Upload, operation: str
) -> None:
    node = start(start_node, bucket)
    client, data = node.client(), os.urandom(SIZE)
    upload(client, bucket, "run/step-1/frozen +~%41&=", data)
    node.wait_settled()
    before = second_set(node, proxy, bucket, upload, data, os.urandom(SIZE))

    assert_is_there(client, direct, bucket, "run/step-2/frozen +~%41&=", data, before)
    assert sent_bytes(proxy, "run/step-2/frozen +~%41&=") == SIZE
    assert len(proxy.seen(operation)) == 1
    upload(client, bucket, "run/step-3/frozen +~%41&=", data)
    node.wait_settled()
    assert len(proxy.seen(operation)) == 1
    assert node.status()["totals"]["reused_bytes"] == 0


FAULTS: tuple[Action, ...] = (
    Answer(404, "NoSuchKey"),
    Answer(412, "PreconditionFailed"),
    Answer(200, "InternalError"),
    Cut(after_origin=True),
)


@seaweed
@WAYS
def test_where_no_copy_is_to_be_had_the_bytes_are_sent_in_the_same_try(
    start_node: StartNode, proxy: FaultyOrigin, direct: Any, bucket: str, upload: Upload, operation: str
) -> None:
    node = start(start_node, bucket)
    client, data = node.client(), os.urandom(SIZE)
    for step in (1, 2):  # The second shows that the origin heeds conditions.
        upload(client, bucket, f"run/step-{step}/frozen +~%41&=", data)
        node.wait_settled()
    assert sent_bytes(proxy, "run/step-2/frozen +~%41&=") == 0
    reused_bytes = node.status()["totals"]["reused_bytes"]
    # Afterwards no copy is asked for any more: what is not implemented stays so.
    for step, fault in enumerate((*FAULTS, Answer(501, "NotImplemented"), None), start=3):
        key = f"run/step-{step}/frozen +~%41&="
        if fault is not None:
            proxy.inject(fault, operation=operation, key=key, times=None)
        upload(client, bucket, key, data)
        before = client.head_object(Bucket=bucket, Key=key)
        node.wait_settled()

        assert_is_there(client, direct, bucket, key, data, before)
        assert bool(proxy.seen(operation, key)) is (fault is not None)
        assert sent_bytes(proxy, key) >= SIZE, fault
        client.delete_object(Bucket=bucket, Key=key)  # The set to copy from stays the second.
        node.wait_settled()
    totals = node.status()["totals"]
    assert (totals["reused_bytes"], totals["writeback_retries"]) == (reused_bytes, 0)


@seaweed
@WAYS
def test_a_source_that_is_deleted_while_it_is_copied_costs_nothing_but_the_copy(
    start_node: StartNode, proxy: FaultyOrigin, direct: Any, bucket: str, upload: Upload, operation: str
) -> None:
    """The deletion of the old set races with the copy, and wins."""
    node = start(start_node, bucket)
    client, data = node.client(), os.urandom(SIZE)
    upload(client, bucket, "run/step-1/frozen +~%41&=", data)
    node.wait_settled()
    gate = Gate()
    proxy.inject(Hold(gate), operation=operation, key="run/step-2/frozen +~%41&=", times=None)
    upload(client, bucket, "run/step-2/frozen +~%41&=", data)
    before = client.head_object(Bucket=bucket, Key="run/step-2/frozen +~%41&=")
    gate.wait_reached()
    client.delete_object(Bucket=bucket, Key="run/step-1/frozen +~%41&=")
    proxy.wait_finished("DeleteObject", "run/step-1/frozen +~%41&=")
    gate.release()
    node.wait_settled()

    assert is_missing(direct, bucket, "run/step-1/frozen +~%41&=")
    assert_is_there(client, direct, bucket, "run/step-2/frozen +~%41&=", data, before)
    assert sent_bytes(proxy, "run/step-2/frozen +~%41&=") == SIZE


@seaweed
@WAYS
def test_a_source_that_somebody_replaced_is_not_copied(
    start_node: StartNode, proxy: FaultyOrigin, direct: Any, bucket: str, upload: Upload, operation: str
) -> None:
    node = start(start_node, bucket)
    client, data = node.client(), os.urandom(SIZE)
    upload(client, bucket, "run/step-1/frozen +~%41&=", data)
    node.wait_settled()
    direct.put_object(Bucket=bucket, Key="run/step-1/frozen +~%41&=", Body=os.urandom(SIZE))
    before = second_set(node, proxy, bucket, upload, data, os.urandom(SIZE))
    assert_is_there(client, direct, bucket, "run/step-2/frozen +~%41&=", data, before)
    assert proxy.seen(operation, "run/step-2/frozen +~%41&=")
    assert sent_bytes(proxy, "run/step-2/frozen +~%41&=") == SIZE


@seaweed
def test_nothing_is_copied_unless_a_prefix_says_so(
    node: RunningNode, s3: Any, proxy: FaultyOrigin, bucket: str
) -> None:
    data = os.urandom(SIZE)
    for step in (1, 2):
        put(s3, bucket, f"run/step-{step}/frozen +~%41&=", data)
        node.wait_settled()
    assert proxy.seen("CopyObject") == []
    assert sent_bytes(proxy, "run/step-2/frozen +~%41&=") == SIZE


@seaweed
def test_a_copy_that_is_visible_waits_for_its_turn_and_the_marker_for_it(
    start_node: StartNode, proxy: FaultyOrigin, direct: Any, bucket: str
) -> None:
    node = start(start_node, bucket)
    client, data = node.client(), os.urandom(SIZE)
    put(client, bucket, "run/step-1/frozen +~%41&=", data)
    node.wait_settled()
    gate = Gate()
    proxy.inject(Hold(gate), operation="CopyObject", key="run/step-2/frozen +~%41&=", times=None)
    put(client, bucket, "run/step-2/frozen +~%41&=", data)
    client.put_object(Bucket=bucket, Key="run/step-2/.metadata", Body=b"whole")
    gate.wait_reached()
    assert is_missing(direct, bucket, "run/step-2/.metadata")
    gate.release()
    node.wait_settled()
    landed = [seen.operation for seen in proxy.requests if seen.key.startswith("run/step-2/") and seen.method == "PUT"]
    assert landed[-1] == "PutObject"
    assert set(landed[:-1]) == {"CopyObject"}
    assert body_of(direct, bucket, "run/step-2/.metadata") == b"whole"


@seaweed
@pytest.mark.parametrize(
    ("upload", "operation"),
    [(put, "CopyObject"), (in_parts, "CompleteMultipartUpload")],
    ids=["copied at once", "parts copied"],
)
def test_kill_after_a_copy_takes_it_as_it_is(
    start_node: StartNode, proxy: FaultyOrigin, direct: Any, bucket: str, upload: Upload, operation: str
) -> None:
    """What was copied before the death of all processes is neither sent nor copied again."""
    node = start(start_node, bucket)
    client, data = node.client(), os.urandom(SIZE)
    for step in (1, 2):
        upload(client, bucket, f"run/step-{step}/frozen", data)
        node.wait_settled()
    gate, key = Gate(), "run/step-3/frozen"
    proxy.inject(Hold(gate, after_origin=upload is put), operation=operation, key=key)
    upload(client, bucket, key, data)
    before = client.head_object(Bucket=bucket, Key=key)
    gate.wait_reached()
    node.kill9("all")
    copies_count = len(proxy.seen("CopyObject", key) + proxy.seen("UploadPartCopy", key))
    node.restart()
    node.wait_settled()
    gate.release()  # What was under way comes too late to be of any effect.

    assert_is_there(node.client(), direct, bucket, key, data, before)
    assert sent_bytes(proxy, key) == 0
    assert len(proxy.seen("CopyObject", key) + proxy.seen("UploadPartCopy", key)) == copies_count
