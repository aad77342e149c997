"""What the gateway does not own is the origin's word: the same through the gateway as asked directly."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from botocore.exceptions import ClientError
from tests.conformance.wire import Ask, Bucket, query_of

from tiergate.testing.node import RunningNode
from tiergate.testing.origins import ProcessOrigin

Act = Callable[[Any, str, str], Any]
VOLATILE = {
    "Date",
    "LastModified",
    "CreationDate",
    "RequestId",
    "HostId",
    "ResponseMetadata",
    "VersionId",
    "NextVersionIdMarker",
    "UploadId",
}
UNLIKE = re.compile(
    r"^(date|server|connection|content-length|last-modified|x-amz-(request-id|id-2|version-id)|x-amzn-requestid|x-tiergate-.*|etag|access-control-.*)$"
)
POLICY = '{"Version":"2012-10-17","Statement":[]}'
TAGS = {"TagSet": [{"Key": "a", "Value": "b c"}]}


@pytest.fixture
def clients(node: RunningNode, origin: ProcessOrigin) -> Iterator[tuple[Any, Any]]:
    direct = origin.client()
    yield node.client(), direct
    direct.close()


def outcome(act: Callable[[], Any]) -> tuple[int, Any, dict[str, str]]:
    """Status, content and telling headers of a call, or of its error."""
    try:
        answer: Any = act()
    except ClientError as error:
        answer = error.response
    meta = answer["ResponseMetadata"]
    if "Payload" in answer:
        answer["Payload"] = [event for event in answer["Payload"] if "Stats" not in event]
    headers = {name: value for name, value in meta["HTTPHeaders"].items() if not UNLIKE.match(name)}
    return meta["HTTPStatusCode"], stable(answer), headers


def stable(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: stable(item) for name, item in value.items() if name not in VOLATILE}
    if isinstance(value, list):
        return [stable(item) for item in value]
    return value


BUCKET_ACTS: list[tuple[str, Act]] = [
    ("put_bucket_tagging", lambda s3, b, k: s3.put_bucket_tagging(Bucket=b, Tagging=TAGS)),
    ("get_bucket_tagging", lambda s3, b, k: s3.get_bucket_tagging(Bucket=b)),
    ("delete_bucket_tagging", lambda s3, b, k: s3.delete_bucket_tagging(Bucket=b)),
    ("get_bucket_tagging_of_none", lambda s3, b, k: s3.get_bucket_tagging(Bucket=b)),
    ("put_bucket_policy", lambda s3, b, k: s3.put_bucket_policy(Bucket=b, Policy=POLICY)),
    ("get_bucket_policy", lambda s3, b, k: s3.get_bucket_policy(Bucket=b)),
    ("delete_bucket_policy", lambda s3, b, k: s3.delete_bucket_policy(Bucket=b)),
    (
        "put_bucket_lifecycle",
        lambda s3, b, k: s3.put_bucket_lifecycle_configuration(
            Bucket=b,
            LifecycleConfiguration={
                "Rules": [{"ID": "r", "Status": "Enabled", "Filter": {"Prefix": "never/"}, "Expiration": {"Days": 9}}]
            },
        ),
    ),
    ("get_bucket_lifecycle", lambda s3, b, k: s3.get_bucket_lifecycle_configuration(Bucket=b)),
    ("delete_bucket_lifecycle", lambda s3, b, k: s3.delete_bucket_lifecycle(Bucket=b)),
    (
        "put_bucket_cors",
        lambda s3, b, k: s3.put_bucket_cors(
            Bucket=b, CORSConfiguration={"CORSRules": [{"AllowedMethods": ["GET"], "AllowedOrigins": ["*"]}]}
        ),
    ),
    ("get_bucket_cors", lambda s3, b, k: s3.get_bucket_cors(Bucket=b)),
    ("delete_bucket_cors", lambda s3, b, k: s3.delete_bucket_cors(Bucket=b)),
    ("get_bucket_versioning", lambda s3, b, k: s3.get_bucket_versioning(Bucket=b)),
    ("get_bucket_acl", lambda s3, b, k: s3.get_bucket_acl(Bucket=b)),
    ("get_bucket_encryption", lambda s3, b, k: s3.get_bucket_encryption(Bucket=b)),
    ("get_bucket_location", lambda s3, b, k: s3.get_bucket_location(Bucket=b)),
    ("get_bucket_website_of_none", lambda s3, b, k: s3.get_bucket_website(Bucket=b)),
    ("get_public_access_block", lambda s3, b, k: s3.get_public_access_block(Bucket=b)),
    ("get_object_lock_configuration", lambda s3, b, k: s3.get_object_lock_configuration(Bucket=b)),
    ("list_buckets", lambda s3, b, k: s3.list_buckets()),
]

OBJECT_ACTS: list[tuple[str, Act]] = [
    ("put_object_tagging", lambda s3, b, k: s3.put_object_tagging(Bucket=b, Key=k, Tagging=TAGS)),
    ("get_object_tagging", lambda s3, b, k: s3.get_object_tagging(Bucket=b, Key=k)),
    ("delete_object_tagging", lambda s3, b, k: s3.delete_object_tagging(Bucket=b, Key=k)),
    ("put_object_acl", lambda s3, b, k: s3.put_object_acl(Bucket=b, Key=k, ACL="public-read")),
    ("get_object_acl", lambda s3, b, k: s3.get_object_acl(Bucket=b, Key=k)),
    (
        "get_object_attributes",
        lambda s3, b, k: s3.get_object_attributes(Bucket=b, Key=k, ObjectAttributes=["ETag", "ObjectSize"]),
    ),
    ("list_object_versions", lambda s3, b, k: s3.list_object_versions(Bucket=b, Prefix=k)),
    ("get_version_null", lambda s3, b, k: s3.head_object(Bucket=b, Key=k, VersionId="null")),
    ("get_version_that_is_not", lambda s3, b, k: s3.head_object(Bucket=b, Key=k, VersionId="nope")),
    (
        "select",
        lambda s3, b, k: s3.select_object_content(
            Bucket=b,
            Key=k,
            Expression="SELECT * FROM S3Object",
            ExpressionType="SQL",
            InputSerialization={"CSV": {"FileHeaderInfo": "USE"}},
            OutputSerialization={"JSON": {}},
        ),
    ),
]


@pytest.mark.parametrize(("name", "act"), BUCKET_ACTS, ids=[name for name, _ in BUCKET_ACTS])
def test_operation_on_a_bucket_answers_as_the_origin(clients: tuple[Any, Any], s3: Bucket, name: str, act: Act) -> None:
    through, direct = clients
    assert outcome(lambda: act(through, s3.name, "")) == outcome(lambda: act(direct, s3.name, ""))


@pytest.mark.parametrize("dirty", [True, False], ids=["dirty", "clean"])
@pytest.mark.parametrize(("name", "act"), OBJECT_ACTS, ids=[name for name, _ in OBJECT_ACTS])
def test_operation_on_an_object_answers_as_the_origin(
    clients: tuple[Any, Any], node: RunningNode, s3: Bucket, prefix: str, name: str, act: Act, dirty: bool
) -> None:
    """On an object that is not written back yet, too: that is done first."""
    through, direct = clients
    key = f"{prefix}o.csv"
    through.put_object(Bucket=s3.name, Key=key, Body=b"a,b\n1,2\n", Tagging="old=1")
    if not dirty:
        node.wait_settled()
    assert outcome(lambda: act(through, s3.name, key)) == outcome(lambda: act(direct, s3.name, key))
    assert through.get_object(Bucket=s3.name, Key=key)["Body"].read() == b"a,b\n1,2\n"
    assert direct.get_object(Bucket=s3.name, Key=key)["Body"].read() == b"a,b\n1,2\n"


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
