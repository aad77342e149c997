"""The rules S3 holds multipart uploads to, and how parts are copied.

https://docs.aws.amazon.com/AmazonS3/latest/userguide/mpuoverview.html
"""

import base64
import hashlib
from typing import Any

import pytest
from tests.conformance.gateway import checking_node
from tests.conformance.wire import Bucket, Reply, crc32_of, part_list

from tiergate.testing.node import RunningNode
from tiergate.testing.origins import ProcessOrigin

MIB = 1 << 20
BODY = b"0123456789"


def sha256_of(data: bytes) -> str:
    return base64.b64encode(hashlib.sha256(data).digest()).decode()


def refused(reply: Reply, status: int, code: str) -> Reply:
    assert (reply.status, reply.code) == (status, code), str(reply)
    return reply


def copied_part(s3: Bucket, key: str, upload_id: str, source: str, **headers: str) -> Reply:
    named = {"x-amz-copy-source": source} | {f"x-amz-copy-source-{name}": value for name, value in headers.items()}
    return s3.call("PUT", key, b"", named, partNumber="1", uploadId=upload_id)


# -- completion
def test_size_that_the_completion_says_is_checked(s3: Bucket, prefix: str) -> None:
    key = f"{prefix}k"
    upload_id = s3.create_upload(key)
    parts = [(1, s3.part(key, upload_id, 1, BODY))]
    refused(s3.complete(key, upload_id, parts, {"x-amz-mp-object-size": "9"}), 400, "InvalidRequest")
    assert s3.get(key).status == 404
    assert s3.complete(key, upload_id, parts, {"x-amz-mp-object-size": "10"}).status == 200
    assert s3.get(key).body == BODY


def test_too_small_part_is_named_with_its_sizes(s3: Bucket, prefix: str) -> None:
    key = f"{prefix}k"
    upload_id = s3.create_upload(key)
    etags = [s3.part(key, upload_id, number, BODY) for number in (1, 2)]
    reply = refused(s3.complete(key, upload_id, [(1, etags[0]), (2, etags[1])]), 400, "EntityTooSmall")
    said = [reply.text(name) for name in ("ProposedSize", "MinSizeAllowed", "PartNumber", "ETag")]
    assert said == ["10", str(5 * MIB), "1", etags[0].strip('"')]


def test_part_that_does_not_fit_its_upload_s_algorithm_is_refused(s3: Bucket, prefix: str) -> None:
    key = f"{prefix}k"
    upload_id = s3.create_upload(key, {"x-amz-checksum-algorithm": "SHA256"})
    where = {"partNumber": "1", "uploadId": upload_id}
    refused(s3.call("PUT", key, BODY, {"x-amz-checksum-crc32": crc32_of(BODY)}, **where), 400, "InvalidRequest")
    refused(s3.call("PUT", key, BODY, {}, **where), 400, "InvalidRequest")
    assert s3.call("GET", key, uploadId=upload_id).texts("Part/PartNumber") == []
    assert s3.call("PUT", key, BODY, {"x-amz-checksum-sha256": sha256_of(BODY)}, **where).status == 200


def test_completion_of_composite_checksums_lists_one_for_each_part(s3: Bucket, prefix: str) -> None:
    key, value = f"{prefix}k", sha256_of(BODY)
    upload_id = s3.create_upload(key, {"x-amz-checksum-algorithm": "SHA256"})
    put = s3.call("PUT", key, BODY, {"x-amz-checksum-sha256": value}, partNumber="1", uploadId=upload_id)
    refused(s3.complete(key, upload_id, [(1, put.etag)]), 400, "InvalidRequest")
    whole = part_list([(1, put.etag)]).replace(b"</Part>", f"<ChecksumSHA256>{value}</ChecksumSHA256></Part>".encode())
    wrong_mode = {"x-amz-checksum-type": "FULL_OBJECT"}
    refused(s3.call("POST", key, whole, wrong_mode, uploadId=upload_id), 400, "InvalidRequest")
    done = s3.call("POST", key, whole, {"x-amz-checksum-type": "COMPOSITE"}, uploadId=upload_id)
    assert done.status == 200, str(done)
    digest = base64.b64encode(hashlib.sha256(base64.b64decode(value)).digest()).decode()
    assert done.text("ChecksumSHA256") == f"{digest}-1"


def test_full_object_checksum_needs_none_of_the_parts(s3: Bucket, prefix: str) -> None:
    key = f"{prefix}k"
    upload_id = s3.create_upload(key, {"x-amz-checksum-algorithm": "CRC32", "x-amz-checksum-type": "FULL_OBJECT"})
    parts = [(1, s3.part(key, upload_id, 1, BODY))]
    wrong = {"x-amz-checksum-crc32": crc32_of(b"other")}
    refused(s3.complete(key, upload_id, parts, wrong), 400, "BadDigest")
    done = s3.complete(key, upload_id, parts, {"x-amz-checksum-crc32": crc32_of(BODY)})
    assert (done.status, done.text("ChecksumCRC32"), done.text("ChecksumType")) == (200, crc32_of(BODY), "FULL_OBJECT")


def test_checksum_of_an_upload_without_an_algorithm_is_checked(s3: Bucket, prefix: str) -> None:
    key = f"{prefix}k"
    upload_id = s3.create_upload(key)
    parts = [(1, s3.part(key, upload_id, 1, BODY))]
    refused(s3.complete(key, upload_id, parts, {"x-amz-checksum-crc64nvme": "AAAAAAAAAAA="}), 400, "BadDigest")
    assert s3.complete(key, upload_id, parts).status == 200


# -- listings of uploads and parts
def test_empty_page_of_uploads_or_parts_ends_the_listing(s3: Bucket, prefix: str) -> None:
    key = f"{prefix}k"
    upload_id = s3.create_upload(key)
    s3.part(key, upload_id, 1, BODY)
    page = s3.call("GET", **{"uploads": "", "prefix": prefix, "max-uploads": "0"})
    assert (page.status, page.text("IsTruncated"), page.texts("Upload")) == (200, "false", [])
    page = s3.call("GET", key, uploadId=upload_id, **{"max-parts": "0"})
    assert (page.status, page.text("IsTruncated"), page.texts("Part")) == (200, "false", [])


def test_listing_of_uploads_goes_on_after_one_that_ended(s3: Bucket, prefix: str) -> None:
    key = f"{prefix}k"
    ids = [s3.create_upload(key) for _ in range(3)]
    after = {"uploads": "", "prefix": prefix, "key-marker": key, "upload-id-marker": ids[1]}
    assert s3.call("GET", **after).texts("Upload/UploadId") == ids[2:]
    assert s3.call("DELETE", key, uploadId=ids[1]).status == 204
    assert s3.call("GET", **after).texts("Upload/UploadId") == ids[2:]


def test_key_marker_within_a_common_prefix_leaves_what_comes_after_it(s3: Bucket, prefix: str) -> None:
    for name in ("a/1", "a/2", "b"):
        s3.create_upload(prefix + name)

    def page(marker: str) -> tuple[list[str], list[str]]:
        query = {"uploads": "", "prefix": prefix, "delimiter": "/", "key-marker": prefix + marker}
        reply = s3.call("GET", **query)
        return reply.texts("CommonPrefixes/Prefix"), reply.texts("Upload/Key")

    assert page("a/1") == ([f"{prefix}a/"], [f"{prefix}b"])
    assert page("a/2") == ([], [f"{prefix}b"])
    assert page("a/") == ([], [f"{prefix}b"])


@pytest.mark.parametrize("limit", ["1", "2", "3"])
def test_pages_of_uploads_join_to_the_whole(s3: Bucket, prefix: str, limit: str) -> None:
    for name in ("a", "a", "b/1", "b/2", "c", "d/1"):
        s3.create_upload(prefix + name)
    query = {"uploads": "", "prefix": prefix, "delimiter": "/"}
    whole = s3.call("GET", **query)
    found: list[tuple[str, str]] = []
    prefixes: list[str] = []
    markers: dict[str, str] = {}
    while True:
        page = s3.call("GET", **(query | markers), **{"max-uploads": limit})
        found += zip(page.texts("Upload/Key"), page.texts("Upload/UploadId"), strict=True)
        prefixes += page.texts("CommonPrefixes/Prefix")
        if page.text("IsTruncated") == "false":
            break
        assert len(page.texts("Upload/Key")) + len(page.texts("CommonPrefixes/Prefix")) == int(limit)
        markers = {"key-marker": page.text("NextKeyMarker"), "upload-id-marker": page.text("NextUploadIdMarker")}
    assert found == list(zip(whole.texts("Upload/Key"), whole.texts("Upload/UploadId"), strict=True))
    assert prefixes == whole.texts("CommonPrefixes/Prefix") == [f"{prefix}b/", f"{prefix}d/"]


# -- parts that are copied
def test_copied_part_has_the_checksum_of_its_upload(s3: Bucket, prefix: str) -> None:
    s3.put(f"{prefix}source", BODY)
    upload_id = s3.create_upload(f"{prefix}k", {"x-amz-checksum-algorithm": "SHA256"})
    reply = copied_part(s3, f"{prefix}k", upload_id, f"conformance/{prefix}source")
    assert (reply.status, reply.text("ChecksumSHA256")) == (200, sha256_of(BODY))


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"range": "bytes=0-9"}, 200, ""),
        ({"range": "bytes=0-10"}, 416, "InvalidRange"),
        ({"range": "bytes=10-10"}, 416, "InvalidRange"),
        ({"range": "bytes=5-"}, 400, "InvalidArgument"),
        ({"range": "bytes=-5"}, 400, "InvalidArgument"),
        ({"range": "bytes=5-4"}, 400, "InvalidArgument"),
        ({"range": "bytes=0-1,3-4"}, 400, "InvalidArgument"),
        ({"range": "0-1"}, 400, "InvalidArgument"),
        ({"if-match": '"other"'}, 412, "PreconditionFailed"),
        ({"if-none-match": "*"}, 412, "PreconditionFailed"),
        ({"if-modified-since": "Fri, 01 Jan 2100 00:00:00 GMT"}, 412, "PreconditionFailed"),
        ({"if-unmodified-since": "Sat, 01 Jan 2000 00:00:00 GMT"}, 412, "PreconditionFailed"),
        ({"if-match": "*", "if-unmodified-since": "Sat, 01 Jan 2000 00:00:00 GMT"}, 200, ""),
    ],
)
@pytest.mark.parametrize("version", ["", "?versionId=null"], ids=["current", "null"])
def test_copied_part_is_judged(
    s3: Bucket, prefix: str, version: str, headers: dict[str, str], status: int, code: str
) -> None:
    s3.put(f"{prefix}source", BODY)
    upload_id = s3.create_upload(f"{prefix}k")
    reply = copied_part(s3, f"{prefix}k", upload_id, f"conformance/{prefix}source{version}", **headers)
    assert (reply.status, reply.code if reply.status != 200 else "") == (status, code), str(reply)


def test_past_version_can_be_copied_into_a_part(
    node: RunningNode, origin: ProcessOrigin, s3: Bucket, prefix: str
) -> None:
    direct: Any = origin.client()
    direct.create_bucket(Bucket="conformance-past")
    direct.put_bucket_versioning(Bucket="conformance-past", VersioningConfiguration={"Status": "Enabled"})
    client = node.client()
    first = client.put_object(Bucket="conformance-past", Key=f"{prefix}s", Body=BODY)["VersionId"]
    second = client.put_object(Bucket="conformance-past", Key=f"{prefix}s", Body=b"newer")["VersionId"]
    source = f"conformance-past/{prefix}s"
    key = f"{prefix}k"
    for named, version, body, headers in (
        (f"{source}?versionId={first}", first, BODY, {}),
        (f"{source}?versionId={first}", first, BODY[2:5], {"range": "bytes=2-4"}),
        (source, second, b"newer", {}),
    ):
        upload_id = s3.create_upload(key)
        reply = copied_part(s3, key, upload_id, named, **headers)
        assert (reply.status, reply.headers.get("x-amz-copy-source-version-id")) == (200, version), str(reply)
        assert s3.complete(key, upload_id, [(1, reply.text("ETag"))]).status == 200
        assert s3.get(key).body == body
    upload_id = s3.create_upload(key)
    named = f"{source}?versionId={first}"
    refused(copied_part(s3, key, upload_id, named, range="bytes=2-99"), 416, "InvalidRange")
    refused(copied_part(s3, key, upload_id, named, **{"if-match": '"other"'}), 412, "PreconditionFailed")
    assert copied_part(s3, key, upload_id, f"{source}?versionId=nope").status in (400, 404)
    direct.close()


def test_copy_of_what_memory_cannot_hold_arrives_all_the_same(origin: ProcessOrigin, prefix: str) -> None:
    with checking_node(origin, memory_limit="32MiB") as small:
        client = small.client()
        data = bytes(range(256)) * (MIB // 256) * 7
        client.put_object(Bucket="conformance", Key=f"{prefix}s", Body=data)
        upload = {"Bucket": "conformance", "Key": f"{prefix}k"}
        upload["UploadId"] = client.create_multipart_upload(**upload)["UploadId"]
        listed = []
        for number in range(1, 9):
            source = f"conformance/{prefix}s"
            part = client.upload_part_copy(**upload, PartNumber=number, CopySource=source)["CopyPartResult"]
            listed.append({"PartNumber": number, "ETag": part["ETag"]})
        done = client.complete_multipart_upload(**upload, MultipartUpload={"Parts": listed})
        assert done["ResponseMetadata"]["HTTPHeaders"]["x-tiergate-ack"] == "origin"
        with client.get_object(Bucket="conformance", Key=f"{prefix}k")["Body"] as body:
            assert body.read() == data * 8
        small.wait_settled()


# -- what the origin cannot be asked of the gateway's own uploads
def test_whose_the_bucket_is_and_who_pays_is_asked_of_the_origin(s3: Bucket, prefix: str) -> None:
    key = f"{prefix}k"
    upload_id = s3.create_upload(key)
    said = {"x-amz-expected-bucket-owner": "123456789012", "x-amz-request-payer": "requester"}
    put = s3.call("PUT", key, BODY, said, partNumber="1", uploadId=upload_id)
    assert put.status == 200, str(put)
    assert s3.call("GET", key, b"", said, uploadId=upload_id).texts("Part/PartNumber") == ["1"]
    assert s3.complete(key, upload_id, [(1, put.etag)], said).status == 200
    assert s3.get(key).body == BODY


def test_what_only_the_origin_knows_is_not_taken_for_a_lost_upload(s3: Bucket, prefix: str) -> None:
    key = f"{prefix}k"
    upload_id = s3.create_upload(key)
    news = {"x-amz-new-feature": "1"}
    refused(s3.call("PUT", key, BODY, news, partNumber="1", uploadId=upload_id), 501, "NotImplemented")
    assert s3.call("PUT", key, BODY, partNumber="1", uploadId=upload_id).status == 200


def test_copy_part_by_part_has_the_etag_of_its_source(s3: Bucket, prefix: str) -> None:
    bodies = [b"a" * (6 * MIB), b"b" * (5 * MIB), b"c"]
    etag = s3.multipart(f"{prefix}s", bodies)
    upload_id, parts, start = s3.create_upload(f"{prefix}k"), [], 0
    for number, body in enumerate(bodies, 1):
        span = f"bytes={start}-{start + len(body) - 1}"
        headers = {"x-amz-copy-source": f"conformance/{prefix}s", "x-amz-copy-source-range": span}
        reply = s3.call("PUT", f"{prefix}k", b"", headers, partNumber=str(number), uploadId=upload_id)
        parts.append((number, reply.text("ETag")))
        start += len(body)
    done = s3.complete(f"{prefix}k", upload_id, parts)
    assert (done.status, done.text("ETag")) == (200, etag), str(done)
