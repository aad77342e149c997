"""What the gateway does not own is the origin's to do: buckets, versions, tags, unknown headers.

That all of its answers are passed on as they are, test_forwarding_model shows.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from botocore.exceptions import ClientError
from tests.conformance.wire import Ask, Bucket, query_of

from tiergate.testing.node import RunningNode
from tiergate.testing.origins import ProcessOrigin

TAGS = {"TagSet": [{"Key": "a", "Value": "b c"}]}


@pytest.fixture
def clients(node: RunningNode, origin: ProcessOrigin) -> Iterator[tuple[Any, Any]]:
    direct = origin.client()
    yield node.client(), direct
    direct.close()


def test_tags_put_through_the_gateway_are_in_its_answers(clients: tuple[Any, Any], s3: Bucket, prefix: str) -> None:
    through, direct = clients
    through.put_object(Bucket=s3.name, Key=f"{prefix}o", Body=b"1")
    through.put_object_tagging(Bucket=s3.name, Key=f"{prefix}o", Tagging=TAGS)
    for client in clients:
        assert client.get_object_tagging(Bucket=s3.name, Key=f"{prefix}o")["TagSet"] == TAGS["TagSet"]
    assert direct.get_object(Bucket=s3.name, Key=f"{prefix}o")["TagCount"] == 1


def test_bucket_is_made_and_deleted_through_the_gateway(clients: tuple[Any, Any], node: RunningNode) -> None:
    through, direct = clients
    name = "made-through-the-gateway"
    with pytest.raises(ClientError, match="NoSuchBucket"):
        through.put_object(Bucket=name, Key="k", Body=b"1")
    through.create_bucket(Bucket=name)
    direct.head_bucket(Bucket=name)
    through.put_object(Bucket=name, Key="k", Body=b"1")
    with pytest.raises(ClientError, match="BucketNotEmpty"):
        through.delete_bucket(Bucket=name)
    through.delete_object(Bucket=name, Key="k")
    node.wait_settled()
    through.delete_bucket(Bucket=name)
    with pytest.raises(ClientError, match="404"):
        direct.head_bucket(Bucket=name)
    with pytest.raises(ClientError, match="NoSuchBucket"):
        through.put_object(Bucket=name, Key="k", Body=b"1")


def test_versioned_bucket_is_written_through(clients: tuple[Any, Any], node: RunningNode) -> None:
    through, direct = clients
    name = "versioned-conformance"
    through.create_bucket(Bucket=name)
    through.put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": "Enabled"})
    first = through.put_object(Bucket=name, Key="k", Body=b"one", Metadata={"m": "1"})
    second = through.put_object(Bucket=name, Key="k", Body=b"two")
    for answer in (first, second):
        assert answer["ResponseMetadata"]["HTTPHeaders"]["x-tiergate-ack"] == "origin"
        assert answer["VersionId"]
    assert first["VersionId"] != second["VersionId"]
    for client in clients:
        assert client.get_object(Bucket=name, Key="k")["Body"].read() == b"two"
        old = client.get_object(Bucket=name, Key="k", VersionId=first["VersionId"])
        assert (old["Body"].read(), old["VersionId"]) == (b"one", first["VersionId"])
    current = through.head_object(Bucket=name, Key="k")
    assert current["VersionId"] == second["VersionId"]
    deleted = through.delete_object(Bucket=name, Key="k")
    assert deleted["DeleteMarker"]
    with pytest.raises(ClientError, match="404"):
        through.head_object(Bucket=name, Key="k")
    through.delete_object(Bucket=name, Key="k", VersionId=deleted["VersionId"])
    assert through.get_object(Bucket=name, Key="k")["Body"].read() == b"two"
    upload_id = through.create_multipart_upload(Bucket=name, Key="m")["UploadId"]
    etag = through.upload_part(Bucket=name, Key="m", UploadId=upload_id, PartNumber=1, Body=b"part")["ETag"]
    parts = {"Parts": [{"PartNumber": 1, "ETag": etag}]}
    done = through.complete_multipart_upload(Bucket=name, Key="m", UploadId=upload_id, MultipartUpload=parts)
    assert done["VersionId"]
    assert direct.get_object(Bucket=name, Key="m")["Body"].read() == b"part"
    assert node.status()["writeback"]["pending"] == 0


def test_request_with_an_unknown_header_is_the_origins_and_still_sees_what_is_pending(s3: Bucket, prefix: str) -> None:
    unknown = {"x-amz-invented-later": "1"}
    for number in range(5):
        key = f"{prefix}{number}"
        s3.put(key, b"pending")
        assert key in s3.ask(Ask("GET", "/conformance", query_of(prefix=prefix, **{"list-type": "2"}), unknown)).texts(
            "Contents/Key"
        )
        reply = s3.get(key, unknown)
        assert reply.body == b"pending"
        assert "x-tiergate-tier" not in reply.headers


def test_headers_that_only_name_the_client_keep_a_request_here(s3: Bucket, prefix: str) -> None:
    s3.put(f"{prefix}o", b"pending")
    for name, value in (
        ("x-amz-api-version", "2006-03-01"),
        ("x-amz-user-agent", "x"),
        ("amz-sdk-request", "attempt=1"),
    ):
        assert s3.get(f"{prefix}o", {name: value}).headers["x-tiergate-tier"] == "memory"
