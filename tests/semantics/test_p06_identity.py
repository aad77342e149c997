"""P6 Stable identity."""

import hashlib
import io
import os
from typing import Any

import pytest
from boto3.s3.transfer import TransferConfig
from tests.nodes import StartNode

from tiergate.testing.faults import FaultyOrigin
from tiergate.testing.node import RunningNode
from tiergate.testing.objects import ack_of, body_of, listed, refusal

MIB = 1 << 20


@pytest.mark.semantics("P6.3")
def test_node_without_memory_shows_identity_that_another_gave(start_node: StartNode, direct: Any, bucket: str) -> None:
    first = start_node()
    client = first.client()
    client.put_object(Bucket=bucket, Key="k", Body=os.urandom(6 * MIB), ContentType="a/b", Metadata={"step": "7"})
    first.wait_settled()
    shown = ("ETag", "LastModified", "ContentLength", "ContentType", "Metadata")
    before = client.head_object(Bucket=bucket, Key="k")
    other = start_node().client()
    for answer in (other.head_object(Bucket=bucket, Key="k"), other.get_object(Bucket=bucket, Key="k")):
        assert [answer[name] for name in shown] == [before[name] for name in shown]
    assert before["Metadata"] == {"step": "7"}
    assert direct.head_object(Bucket=bucket, Key="k")["ETag"] != before["ETag"]


@pytest.mark.semantics("P6.4")
def test_condition_of_a_read_may_name_either_etag(node: RunningNode, s3: Any, direct: Any, bucket: str) -> None:
    s3.put_object(Bucket=bucket, Key="k", Body=os.urandom(6 * MIB))
    node.wait_settled()
    ours = s3.head_object(Bucket=bucket, Key="k")["ETag"]
    theirs = direct.head_object(Bucket=bucket, Key="k")["ETag"]
    assert ours != theirs
    for etag in (ours, theirs):
        assert body_of(s3, bucket, "k", IfMatch=etag)
        assert refusal(lambda etag=etag: s3.head_object(Bucket=bucket, Key="k", IfNoneMatch=etag)) == (304, "304")  # type: ignore[misc]
    neither = '"00000000000000000000000000000000"'
    assert refusal(lambda: s3.get_object(Bucket=bucket, Key="k", IfMatch=neither)) == (412, "PreconditionFailed")


@pytest.mark.semantics("P6.5")
@pytest.mark.parametrize("size", [0, 5 * MIB, 5 * MIB + 1])
def test_etag_is_md5_of_small_bodies_only(node: RunningNode, s3: Any, bucket: str, size: int) -> None:
    data = os.urandom(size)
    etag = s3.put_object(Bucket=bucket, Key="k", Body=data)["ETag"].strip('"')
    if size <= 5 * MIB:
        assert etag == hashlib.md5(data, usedforsecurity=False).hexdigest()
    else:
        assert etag.endswith("-1")
    assert [each for _, _, each in listed(s3, bucket)] == [f'"{etag}"']
    node.wait_settled()


@pytest.mark.semantics("P6.6")
def test_multipart_object_of_exact_parts_has_etag_of_s3(node: RunningNode, s3: Any, direct: Any, bucket: str) -> None:
    data = os.urandom(12 * MIB)
    config = TransferConfig(multipart_threshold=MIB, multipart_chunksize=5 * MIB)
    s3.upload_fileobj(io.BytesIO(data), bucket, "k", Config=config)
    parts = [data[at : at + 5 * MIB] for at in range(0, len(data), 5 * MIB)]
    digests = b"".join(hashlib.md5(part, usedforsecurity=False).digest() for part in parts)
    expected = f'"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-3"'
    assert s3.head_object(Bucket=bucket, Key="k")["ETag"] == expected
    node.wait_settled()
    assert direct.head_object(Bucket=bucket, Key="k")["ETag"] == expected


@pytest.mark.semantics("P6.7")
@pytest.mark.parametrize("is_cold", [False, True], ids=["warm", "cold"])
def test_forwarded_request_speaks_of_the_identity_that_the_gateway_shows(
    node: RunningNode, start_node: StartNode, s3: Any, direct: Any, proxy: FaultyOrigin, bucket: str, is_cold: bool
) -> None:
    data = os.urandom(6 * MIB)
    s3.put_object(Bucket=bucket, Key="k", Body=data)
    node.wait_settled()
    shown = s3.head_object(Bucket=bucket, Key="k")
    ours, theirs = shown["ETag"], direct.head_object(Bucket=bucket, Key="k")["ETag"]
    assert ours != theirs
    client = start_node().client() if is_cold else s3

    attributes = client.get_object_attributes(Bucket=bucket, Key="k", ObjectAttributes=["ETag", "ObjectSize"])
    assert (attributes["ETag"], attributes["ObjectSize"]) == (ours.strip('"'), len(data))
    assert attributes["LastModified"] == shown["LastModified"]
    # What asks for another payer is the origin's to answer.
    read = client.get_object(Bucket=bucket, Key="k", RequestPayer="requester", IfMatch=ours)
    assert (read["ETag"], read["LastModified"]) == (ours, shown["LastModified"])
    assert read["Body"].read() == data
    since = {"IfModifiedSince": shown["LastModified"]}
    for condition in ({"IfNoneMatch": ours}, since):
        unchanged = refusal(
            lambda condition=condition: client.head_object(  # type: ignore[misc]
                Bucket=bucket, Key="k", RequestPayer="requester", **condition
            )
        )
        assert unchanged == (304, "304")
    # An ACL is the origin's to keep, so all of these are done there.
    source = {"Bucket": bucket, "Key": "k"}
    copied = client.copy_object(Bucket=bucket, Key="c", CopySource=source, ACL="private", CopySourceIfMatch=ours)
    assert ack_of(copied) == "origin"
    assert proxy.seen("CopyObject", "c")[-1].headers["x-amz-copy-source-if-match"] == theirs
    client.put_object(Bucket=bucket, Key="k", Body=b"new", ACL="private", IfMatch=ours)
    assert proxy.seen("PutObject", "k")[-1].headers["if-match"] == theirs
    assert body_of(direct, bucket, "k") == b"new"
    neither = '"00000000000000000000000000000000"'
    lost = refusal(lambda: client.put_object(Bucket=bucket, Key="k", Body=b"x", ACL="private", IfMatch=neither))
    assert lost == (412, "PreconditionFailed")
