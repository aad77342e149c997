"""The origin on bad days: in write-back, in read-through, and in what is forwarded."""

import os
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError
from tests.nodes import StartNode

from tiergate.testing.faults import FaultyOrigin
from tiergate.testing.node import RunningNode
from tiergate.testing.objects import ack_of, body_of, is_missing, keys_of, refusal, uploads_of
from tiergate.testing.origins import MotoOrigin
from tiergate.testing.rules import Action, Answer, Corrupt, Cut, Gate, Hold, Truncate

pytestmark = pytest.mark.parametrize("origin", [MotoOrigin], ids=["moto"], indirect=True)

MIB = 1 << 20
BLOCK = 4 * MIB

PASSING: dict[str, Action] = {
    "500": Answer(500, "InternalError"),
    "503": Answer(503, "SlowDown"),
    "503 before the body": Answer(503, "SlowDown", early=True),
    "429": Answer(429, "TooManyRequests"),
    "RequestTimeout": Answer(400, "RequestTimeout"),
    "reset": Cut(),
    "expired token": Answer(400, "ExpiredToken"),
    "unknown key": Answer(403, "InvalidAccessKeyId"),
    "bad signature": Answer(403, "SignatureDoesNotMatch"),
}
DONE_ALL_THE_SAME: dict[str, Action] = {
    "500 once done": Answer(500, "InternalError", after_origin=True),
    "reset once done": Cut(after_origin=True),
}
REFUSED_FOR_GOOD: dict[str, Action] = {
    "access denied": Answer(403, "AccessDenied"),
    "bad request": Answer(400, "InvalidArgument"),
    "no such bucket": Answer(404, "NoSuchBucket"),
    "no such key": Answer(404, "NoSuchKey"),
}


def put_multipart(client: Any, bucket: str, key: str, parts: list[bytes]) -> None:
    upload_id = client.create_multipart_upload(Bucket=bucket, Key=key)["UploadId"]
    listed = []
    for number, body in enumerate(parts, 1):
        part = client.upload_part(Bucket=bucket, Key=key, UploadId=upload_id, PartNumber=number, Body=body)
        listed.append({"PartNumber": number, "ETag": part["ETag"]})
    client.complete_multipart_upload(Bucket=bucket, Key=key, UploadId=upload_id, MultipartUpload={"Parts": listed})


def read_into(got: bytearray, client: Any, bucket: str, key: str) -> None:
    """GetObject in pieces, so that `got` holds what came before an error."""
    # Not the stream as a context manager: what that yields does not check the length.
    with closing(client.get_object(Bucket=bucket, Key=key)["Body"]) as stream:
        while piece := stream.read(MIB):
            got += piece


def wait_origin_back(node: RunningNode, client: Any, bucket: str) -> None:
    """An outage is over for the node once it answers what only the origin knows."""
    node.wait_until("the origin is back", lambda: refusal(lambda: client.list_objects_v2(Bucket=bucket)) is None)


# -- write-back
@pytest.mark.parametrize("fault", list((PASSING | DONE_ALL_THE_SAME).values()), ids=list(PASSING | DONE_ALL_THE_SAME))
def test_put_that_fails_for_a_while_is_written_back_in_the_end(
    node: RunningNode, s3: Any, proxy: FaultyOrigin, direct: Any, bucket: str, fault: Action
) -> None:
    data = os.urandom(2 * MIB)
    proxy.inject(fault, operation="PutObject", key="k", times=5)
    put = s3.put_object(Bucket=bucket, Key="k", Body=data)
    assert ack_of(put) == "memory:1"

    status = node.wait_settled()

    assert body_of(direct, bucket, "k") == body_of(s3, bucket, "k") == data
    assert s3.head_object(Bucket=bucket, Key="k")["ETag"] == put["ETag"]
    assert status["writeback"]["quarantined"] == []


# A CreateMultipartUpload whose answer is lost is in test_write_back: moto does not tell when an upload began.
@pytest.mark.parametrize("operation", ["UploadPart", "CompleteMultipartUpload"])
@pytest.mark.parametrize(
    "fault", [Answer(503, "SlowDown"), Cut(), Cut(after_origin=True)], ids=["503", "reset", "reset once done"]
)
def test_multipart_that_fails_anywhere_lands_and_leaves_no_upload(
    node: RunningNode, s3: Any, proxy: FaultyOrigin, direct: Any, bucket: str, operation: str, fault: Action
) -> None:
    parts = [os.urandom(5 * MIB), os.urandom(1000)]
    proxy.inject(fault, operation=operation, key="big", times=3)
    put_multipart(s3, bucket, "big", parts)

    node.wait_settled()

    assert body_of(direct, bucket, "big") == body_of(s3, bucket, "big") == b"".join(parts)
    assert uploads_of(direct, bucket) == []


@pytest.mark.parametrize("fault", [*PASSING.values(), Cut(after_origin=True)], ids=[*PASSING, "reset once done"])
def test_delete_that_fails_for_a_while_is_done_in_the_end(
    node: RunningNode, s3: Any, proxy: FaultyOrigin, direct: Any, bucket: str, fault: Action
) -> None:
    s3.put_object(Bucket=bucket, Key="k", Body=b"data")
    node.wait_settled()
    proxy.inject(fault, operation="DeleteObject", key="k", times=5)
    s3.delete_object(Bucket=bucket, Key="k")
    node.wait_settled()
    assert is_missing(direct, bucket, "k")
    assert is_missing(s3, bucket, "k")


def test_put_that_the_origin_never_answers_is_sent_again(
    start_node: StartNode, proxy: FaultyOrigin, direct: Any, bucket: str
) -> None:
    own = start_node("--origin-read-timeout", "500ms")
    gate = Gate()
    proxy.inject(Hold(gate), operation="PutObject", key="k")
    own.client().put_object(Bucket=bucket, Key="k", Body=b"data")
    own.wait_settled()
    assert body_of(direct, bucket, "k") == b"data"
    assert len(proxy.seen("PutObject", "k")) == 2
    gate.release()


@pytest.mark.parametrize("fault", list(REFUSED_FOR_GOOD.values()), ids=list(REFUSED_FOR_GOOD))
def test_refused_put_is_quarantined_served_and_lands_when_released(
    node: RunningNode, s3: Any, proxy: FaultyOrigin, direct: Any, bucket: str, fault: Action
) -> None:
    proxy.inject(fault, operation="PutObject", key="set/shard", times=None)
    s3.put_object(Bucket=bucket, Key="set/shard", Body=b"shard")
    s3.put_object(Bucket=bucket, Key="set/.metadata", Body=b"marker")
    s3.put_object(Bucket=bucket, Key="other/shard", Body=b"another")
    s3.put_object(Bucket=bucket, Key="other/.metadata", Body=b"another marker")

    status = node.wait_status(
        "quarantined", lambda status: status["writeback"]["quarantined"] and status["writeback"]["pending"] == 2
    )
    (held,) = status["writeback"]["quarantined"]
    assert held["uri"] == f"s3://{bucket}/set/shard"
    assert held["reason"]
    (fenced,) = status["writeback"]["fenced"]
    assert fenced["uri"] == f"s3://{bucket}/set/.metadata"
    assert "set/shard" in fenced["waits"]
    # Still served, and nobody else's marker waits for it.
    assert body_of(s3, bucket, "set/shard") == b"shard"
    assert keys_of(s3, bucket) == ["other/.metadata", "other/shard", "set/.metadata", "set/shard"]
    assert keys_of(direct, bucket) == ["other/.metadata", "other/shard"]
    assert node.metric("tiergate_writeback_quarantined_writes") == 1

    proxy.heal()
    assert node.retry(bucket=bucket, key="set/elsewhere") == 0
    assert node.retry(bucket=bucket, key="set/shard") == 1
    node.wait_settled()

    assert body_of(direct, bucket, "set/shard") == b"shard"
    assert body_of(direct, bucket, "set/.metadata") == b"marker"


def test_key_that_the_origin_cannot_hold_is_quarantined_and_can_be_deleted(
    node: RunningNode, s3: Any, direct: Any, bucket: str
) -> None:
    key = "a\nb"  # moto routes no path with a line feed: 404, and no word of a key or a bucket
    s3.put_object(Bucket=bucket, Key=key, Body=b"data")
    status = node.wait_status("quarantined", lambda status: status["writeback"]["quarantined"])
    assert status["writeback"]["quarantined"][0]["reason"].startswith("404")
    assert body_of(s3, bucket, key) == b"data"
    s3.delete_object(Bucket=bucket, Key=key)
    node.wait_settled()
    assert is_missing(s3, bucket, key)
    assert keys_of(s3, bucket) == keys_of(direct, bucket) == []


def test_overwrite_of_what_vanished_from_the_origin_lands_all_the_same(
    node: RunningNode, s3: Any, proxy: FaultyOrigin, direct: Any, bucket: str
) -> None:
    s3.put_object(Bucket=bucket, Key="k", Body=b"first")
    node.wait_settled()
    direct.delete_object(Bucket=bucket, Key="k")
    s3.put_object(Bucket=bucket, Key="k", Body=b"second")
    node.wait_settled()
    assert body_of(direct, bucket, "k") == b"second"
    assert len(proxy.seen("PutObject", "k")) == 3  # the second try meets its condition


def test_quarantine_outlives_a_crash_and_an_overwrite_ends_it(
    start_node: StartNode, proxy: FaultyOrigin, direct: Any, bucket: str
) -> None:
    own = start_node()
    proxy.inject(Answer(403, "AccessDenied"), operation="PutObject", key="k", times=None)
    own.client().put_object(Bucket=bucket, Key="k", Body=b"first")
    own.wait_status("quarantined", lambda status: status["writeback"]["quarantined"])
    own.kill9("all")
    own.restart()
    client = own.client()
    assert len(own.status()["writeback"]["quarantined"]) == 1
    assert body_of(client, bucket, "k") == b"first"

    proxy.heal()
    client.put_object(Bucket=bucket, Key="k", Body=b"second")
    own.wait_settled()
    assert body_of(direct, bucket, "k") == b"second"


# -- read-through
READ_FAULTS: dict[str, Action] = {
    "500": Answer(500, "InternalError"),
    "503": Answer(503, "SlowDown"),
    "reset": Cut(),
    "no body": Truncate(0),
    "short body": Truncate(BLOCK // 2),
}


@pytest.mark.parametrize("nth", [1, 2], ids=["first block", "second block"])
@pytest.mark.parametrize("fault", list(READ_FAULTS.values()), ids=list(READ_FAULTS))
def test_fill_that_fails_once_is_not_noticed(
    s3: Any, proxy: FaultyOrigin, direct: Any, bucket: str, fault: Action, nth: int
) -> None:
    data = os.urandom(10 * MIB)
    direct.put_object(Bucket=bucket, Key="cold", Body=data)
    proxy.inject(fault, operation="GetObject", key="cold", nth=nth)
    assert body_of(s3, bucket, "cold") == data


@pytest.mark.parametrize("fault", list(READ_FAULTS.values()), ids=list(READ_FAULTS))
def test_fill_that_keeps_failing_is_a_503_and_works_afterwards(
    node: RunningNode, s3: Any, proxy: FaultyOrigin, direct: Any, bucket: str, fault: Action
) -> None:
    data = os.urandom(10 * MIB)
    direct.put_object(Bucket=bucket, Key="cold", Body=data)
    proxy.inject(fault, operation="GetObject", key="cold", times=None)
    found = refusal(lambda: s3.get_object(Bucket=bucket, Key="cold"))
    assert found is not None
    assert found[0] == 503

    proxy.heal()
    wait_origin_back(node, s3, bucket)
    assert body_of(s3, bucket, "cold") == data


def test_fill_that_breaks_off_in_the_middle_breaks_the_connection(
    node: RunningNode, s3: Any, proxy: FaultyOrigin, direct: Any, bucket: str
) -> None:
    """Once the status is out, an error must not look like the end of the body."""
    data = os.urandom(8 * BLOCK)
    direct.put_object(Bucket=bucket, Key="cold", Body=data)
    proxy.inject(
        Answer(500, "InternalError"),
        operation="GetObject",
        where=lambda seen: seen.headers["range"].startswith(f"bytes={6 * BLOCK}-"),
        times=None,
    )
    got = bytearray()
    with pytest.raises((BotoCoreError, HTTPClientError)):
        read_into(got, s3, bucket, "cold")
    assert data.startswith(got)

    proxy.heal()
    wait_origin_back(node, s3, bucket)
    assert body_of(s3, bucket, "cold") == data


@pytest.mark.parametrize("offset", [0, BLOCK + 5], ids=["first block", "later block"])
def test_damaged_fill_of_an_acknowledged_object_is_never_served(
    start_node: StartNode, proxy: FaultyOrigin, bucket: str, offset: int
) -> None:
    own = start_node(memory_limit="64MiB")
    client = own.client()
    data = os.urandom(20 * MIB)
    client.put_object(Bucket=bucket, Key="old", Body=data)
    own.wait_settled()
    for index in range(3):
        client.put_object(Bucket=bucket, Key=f"new{index}", Body=os.urandom(20 * MIB))
        own.wait_settled()
    first = offset // BLOCK * BLOCK
    proxy.inject(
        Corrupt(offset - first),
        operation="GetObject",
        key="old",
        where=lambda seen: seen.headers["range"].startswith(f"bytes={first}-"),
        times=None,
    )
    got = bytearray()
    with pytest.raises((BotoCoreError, HTTPClientError, ClientError)) as caught:
        read_into(got, client, bucket, "old")
    if isinstance(caught.value, ClientError):
        assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] in (500, 503)
        assert first == 0, "only before the first byte is there a status to say it with"
    assert data.startswith(got)
    assert len(got) <= first

    proxy.heal()
    wait_origin_back(own, client, bucket)
    assert body_of(client, bucket, "old") == data


def test_read_refused_by_origin_is_refused_to_client_with_its_code(
    s3: Any, proxy: FaultyOrigin, direct: Any, bucket: str
) -> None:
    direct.put_object(Bucket=bucket, Key="cold", Body=b"data")
    proxy.inject(Answer(403, "AccessDenied"), operation="GetObject", key="cold", times=None)
    assert refusal(lambda: s3.get_object(Bucket=bucket, Key="cold")) == (403, "AccessDenied")


@pytest.mark.parametrize("code", ["InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken"])
def test_origin_refusing_our_own_keys_is_a_503_and_never_the_clients_fault(
    node: RunningNode, s3: Any, proxy: FaultyOrigin, direct: Any, bucket: str, code: str
) -> None:
    direct.put_object(Bucket=bucket, Key="cold", Body=b"data")
    before = node.metric("tiergate_origin_refused_credentials_total")
    proxy.inject(Answer(403, code), where=lambda seen: seen.key == "cold", times=None)
    for call in (s3.head_object, s3.get_object, s3.get_object_tagging):
        found = refusal(lambda call=call: call(Bucket=bucket, Key="cold"))  # type: ignore[misc]
        assert found is not None
        assert found[0] == 503
    assert node.metric("tiergate_origin_refused_credentials_total") >= before + 3
    assert f"the origin refuses this node's own credentials ({code})" in node.log
    proxy.heal()
    wait_origin_back(node, s3, bucket)
    assert body_of(s3, bucket, "cold") == b"data"


# -- forwarding
FORWARDED: dict[str, Callable[[Any, str], object]] = {
    "GetObjectTagging": lambda s3, bucket: s3.get_object_tagging(Bucket=bucket, Key="k"),
    "GetBucketVersioning": lambda s3, bucket: s3.get_bucket_versioning(Bucket=bucket),
}


@pytest.mark.parametrize("operation", list(FORWARDED))
@pytest.mark.parametrize(
    "fault", [Answer(500, "InternalError"), Answer(503, "SlowDown"), Cut()], ids=["500", "503", "reset"]
)
def test_forwarded_read_that_fails_once_is_tried_again(
    s3: Any, proxy: FaultyOrigin, direct: Any, bucket: str, operation: str, fault: Action
) -> None:
    direct.put_object(Bucket=bucket, Key="k", Body=b"data")
    s3.head_bucket(Bucket=bucket)
    proxy.inject(fault, operation=operation)
    FORWARDED[operation](s3, bucket)
    assert len(proxy.seen(operation)) >= 2


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (Answer(500, "InternalError"), (500, "InternalError")),
        (Answer(503, "SlowDown"), (503, "SlowDown")),
        (Answer(403, "AccessDenied"), (403, "AccessDenied")),
        (Answer(404, "NoSuchTagSet"), (404, "NoSuchTagSet")),
        (Cut(), (503, "SlowDown")),
    ],
    ids=["500", "503", "403", "404", "reset"],
)
def test_forwarded_request_that_keeps_failing_says_what_the_origin_said(
    node: RunningNode,
    s3: Any,
    proxy: FaultyOrigin,
    direct: Any,
    bucket: str,
    fault: Action,
    expected: tuple[int, str],
) -> None:
    direct.put_object(Bucket=bucket, Key="k", Body=b"data")
    proxy.inject(fault, operation="GetObjectTagging", key="k", times=None)
    assert refusal(lambda: s3.get_object_tagging(Bucket=bucket, Key="k")) == expected
    proxy.heal()
    wait_origin_back(node, s3, bucket)
    assert s3.get_object_tagging(Bucket=bucket, Key="k")["TagSet"] == []


def test_forwarded_change_whose_answer_is_lost_leaves_no_stale_copy(
    node: RunningNode, s3: Any, proxy: FaultyOrigin, direct: Any, bucket: str
) -> None:
    """The origin has done the copy, the client heard 503: what is read then is what the origin holds."""
    direct.put_object(Bucket=bucket, Key="source", Body=b"new")
    direct.put_object(Bucket=bucket, Key="k", Body=b"old")
    assert body_of(s3, bucket, "k") == b"old"
    proxy.inject(Cut(after_origin=True), operation="CopyObject", times=None)
    found = refusal(lambda: s3.copy_object(Bucket=bucket, Key="k", CopySource={"Bucket": bucket, "Key": "source"}))
    assert found is not None
    assert found[0] == 503
    proxy.heal()
    wait_origin_back(node, s3, bucket)
    assert body_of(direct, bucket, "k") == b"new"
    assert body_of(s3, bucket, "k") == b"new"


def test_origin_down_from_the_start_lets_node_start_and_answer_503(
    start_node: StartNode, proxy: FaultyOrigin, bucket: str
) -> None:
    proxy.inject(Cut(), times=None)
    own = start_node()
    client = own.client()
    found = refusal(lambda: client.put_object(Bucket=bucket, Key="k", Body=b"data"))
    assert found is not None
    assert found[0] == 503
    proxy.heal()
    own.wait_until(
        "the origin is back", lambda: refusal(lambda: client.put_object(Bucket=bucket, Key="k", Body=b"d")) is None
    )
    own.wait_settled()
    assert own.stop() == 0


def test_node_without_credentials_says_so_at_its_start_and_to_clients(start_node: StartNode, bucket: str) -> None:
    node = start_node(access_key="", secret_key="")
    node.wait_until("it says so", lambda: "this node has no credentials for the origin" in node.log)
    assert "the AWS chain" in node.log
    with pytest.raises(ClientError) as caught:
        node.client().put_object(Bucket=bucket, Key="k", Body=b"x")
    error = caught.value.response["Error"]
    assert error["Code"] == "SlowDown"
    assert "this node has no credentials for the origin" in error["Message"]
