"""P1 Exact S3."""

import os
from http.client import HTTPConnection
from typing import Any

import pytest

from tiergate.testing.faults import FaultyOrigin
from tiergate.testing.node import RunningNode
from tiergate.testing.objects import ack_of, body_of, refusal
from tiergate.testing.rules import Gate, Hold

CORS = {"CORSRules": [{"AllowedMethods": ["GET"], "AllowedOrigins": ["*"]}]}


@pytest.mark.semantics("P1.1")
def test_unowned_operation_is_forwarded_and_answered_by_origin(s3: Any, direct: Any, bucket: str) -> None:
    assert refusal(lambda: s3.get_bucket_cors(Bucket=bucket)) == (404, "NoSuchCORSConfiguration")
    s3.put_bucket_cors(Bucket=bucket, CORSConfiguration=CORS)
    assert direct.get_bucket_cors(Bucket=bucket)["CORSRules"] == s3.get_bucket_cors(Bucket=bucket)["CORSRules"]


@pytest.mark.semantics("P1.1")
def test_put_with_header_not_carried_out_here_is_forwarded_with_it(
    s3: Any, direct: Any, proxy: FaultyOrigin, bucket: str
) -> None:
    data = os.urandom(100_000)
    answer = s3.put_object(Bucket=bucket, Key="k", Body=data, ACL="bucket-owner-full-control")
    assert ack_of(answer) == "origin"
    assert body_of(direct, bucket, "k") == data
    (sent,) = proxy.seen("PutObject", "k")
    assert sent.headers["x-amz-acl"] == "bucket-owner-full-control"
    assert "Credential=test/" in sent.headers["authorization"]


@pytest.mark.semantics("P1.3")
def test_read_after_forwarded_overwrite_shows_new_object(node: RunningNode, s3: Any, bucket: str) -> None:
    s3.put_object(Bucket=bucket, Key="k", Body=b"old", Metadata={"age": "old"})
    node.wait_settled()
    s3.put_object(Bucket=bucket, Key="k", Body=b"newer", ACL="private")
    assert body_of(s3, bucket, "k") == b"newer"
    head = s3.head_object(Bucket=bucket, Key="k")
    assert (head["ContentLength"], head["Metadata"]) == (5, {})


@pytest.mark.semantics("P1.4")
def test_refusals_carry_codes_of_s3(s3: Any, bucket: str) -> None:
    def complete_with_unknown_part() -> None:
        upload_id = s3.create_multipart_upload(Bucket=bucket, Key="k")["UploadId"]
        parts = [{"PartNumber": 1, "ETag": '"00000000000000000000000000000000"'}]
        s3.complete_multipart_upload(Bucket=bucket, Key="k", UploadId=upload_id, MultipartUpload={"Parts": parts})

    s3.put_object(Bucket=bucket, Key="there", Body=b"123")
    assert refusal(lambda: s3.get_object(Bucket=bucket, Key="none")) == (404, "NoSuchKey")
    assert refusal(lambda: s3.get_object(Bucket="no-such-bucket-1", Key="k")) == (404, "NoSuchBucket")
    assert refusal(lambda: s3.get_object(Bucket=bucket, Key="there", Range="bytes=3-")) == (416, "InvalidRange")
    assert refusal(lambda: s3.list_parts(Bucket=bucket, Key="k", UploadId="tiergate.0")) == (404, "NoSuchUpload")
    assert refusal(complete_with_unknown_part) == (400, "InvalidPart")
    assert refusal(lambda: s3.put_object(Bucket=bucket, Key="k", Body=b"1", StorageClass="NONE")) == (
        400,
        "InvalidStorageClass",
    )


@pytest.mark.semantics("P1.5")
def test_request_that_this_node_sent_is_refused(node: RunningNode, s3: Any, proxy: FaultyOrigin, bucket: str) -> None:
    s3.put_bucket_cors(Bucket=bucket, CORSConfiguration=CORS)
    via = proxy.requests[-1].headers["x-tiergate-via"]
    refused = node.metric("tiergate_http_refused_loops_total")
    connection = HTTPConnection(node.endpoint.removeprefix("http://"), timeout=10)
    connection.request("GET", f"/{bucket}/k", headers={"x-tiergate-via": via})
    answer = connection.getresponse()
    assert (answer.status, b"<Code>InvalidRequest</Code>" in answer.read()) == (400, True)
    connection.close()
    assert node.metric("tiergate_http_refused_loops_total") == refused + 1


@pytest.mark.semantics("P1.6")
def test_delete_of_bucket_with_dirty_object_is_refused_as_not_empty(
    node: RunningNode, s3: Any, direct: Any, proxy: FaultyOrigin, bucket: str
) -> None:
    gate = Gate()
    proxy.inject(Hold(gate), operation="PutObject", key="k")
    s3.put_object(Bucket=bucket, Key="k", Body=b"data")
    gate.wait_reached()
    assert refusal(lambda: s3.delete_bucket(Bucket=bucket)) == (409, "BucketNotEmpty")
    gate.release()
    node.wait_settled()
    assert body_of(direct, bucket, "k") == b"data"


@pytest.mark.semantics("P1.7")
def test_write_into_versioned_bucket_goes_through_and_shows_version(s3: Any, direct: Any, bucket: str) -> None:
    direct.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    answers = [s3.put_object(Bucket=bucket, Key="k", Body=data) for data in (b"first", b"second")]
    assert [ack_of(answer) for answer in answers] == ["origin", "origin"]
    listed = direct.list_object_versions(Bucket=bucket, Prefix="k")["Versions"]
    assert {answer["VersionId"] for answer in answers} == {version["VersionId"] for version in listed}
    first = answers[0]["VersionId"]
    assert body_of(s3, bucket, "k") == b"second"
    assert body_of(s3, bucket, "k", VersionId=first) == b"first"
