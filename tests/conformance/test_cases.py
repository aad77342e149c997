"""What went wrong for people who checkpoint through S3 endpoints, gateways and caches (BC01 to BC58).

Each case is looked at while its objects are in memory, and again by the last test after the node was started anew with
fresh memory, when all of them come from the origin.
"""

import email.header
import email.utils
import io
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any
from urllib.parse import quote, unquote_plus

import boto3.s3.transfer
import pytest
from botocore.exceptions import ClientError
from tests.conformance.rows import Row, check
from tests.conformance.wire import Ask, Bucket, part_list, query_of

from tiergate.testing.node import RunningNode
from tiergate.testing.origins import ProcessOrigin

MIB = 1 << 20
Check = Callable[[], object]


class Checks:
    """What must hold now and after a cold restart."""

    def __init__(self) -> None:
        self.all: list[tuple[str, Check]] = []

    def both(self, name: str, check: Check) -> None:
        check()
        self.all.append((name, check))


@pytest.fixture(scope="module")
def checks() -> Checks:
    return Checks()


@pytest.fixture
def boto(node: RunningNode) -> Any:
    return node.client()


def shows(s3: Bucket, key: str, body: bytes, etag: str | None = None) -> Check:
    """A check that a key has these bytes in every view, with one ETag."""

    def holds() -> None:
        got, head = s3.get(key), s3.head(key)
        assert (got.status, got.body) == (200, body), key
        assert (head.status, head.headers["content-length"]) == (200, str(len(body))), key
        assert got.etag == head.etag, key
        assert etag in (None, got.etag), key
        page = s3.page(key)
        entry = page.texts("Contents/Key").index(key)
        assert page.texts("Contents/ETag")[entry] == got.etag, key
        assert page.texts("Contents/Size")[entry] == str(len(body)), key

    return holds


def is_gone(s3: Bucket, key: str) -> Check:
    def holds() -> None:
        assert s3.get(key).status == 404, key
        assert s3.head(key).status == 404, key
        assert key not in s3.keys(key), key

    return holds


EXOTIC = [
    "a//b",
    "double//",
    "plus+in name",
    "pct%2Fliteral",
    "pct%20lit",
    "uni/Ключ-文件-é",
    "q?uestion&amp;",
    "hash#tag",
    "semi;colon=eq",
    "run_id=2026-06-26T00:00:00+00:00/f.log",
    "./x",
    "a/../b",
    "/leading",
    "quo'te\"s",
    "b\\s",
    "~!*()",
]


@pytest.mark.parametrize("name", EXOTIC)
def test_bc06_exotic_key_comes_back_under_its_own_name(
    s3: Bucket, boto: Any, checks: Checks, prefix: str, name: str
) -> None:
    key, body = prefix + name, name.encode()
    s3.put(key, body)

    def holds() -> None:
        assert s3.get(key).body == body
        assert s3.head(key).status == 200
        assert [unquote_plus(key) for key in s3.page(prefix, **{"encoding-type": "url"}).texts("Contents/Key")] == [key]
        assert [item["Key"] for item in boto_of(s3).list_objects_v2(Bucket=s3.name, Prefix=prefix)["Contents"]] == [key]

    def boto_of(bucket: Bucket) -> Any:
        server = bucket.server
        assert isinstance(server, RunningNode)
        return server.client()

    checks.both(f"exotic {name}", holds)
    s3.put(f"{key}-deleted", b"1")
    s3.delete(f"{key}-deleted")
    checks.both(f"exotic {name} deleted", is_gone(s3, f"{key}-deleted"))


@pytest.mark.parametrize("order", [1, -1], ids=["short_first", "long_first"])
@pytest.mark.parametrize("size", [0, 5])
def test_bc09_key_that_is_a_prefix_of_another(s3: Bucket, checks: Checks, prefix: str, order: int, size: int) -> None:
    keys = [f"{prefix}step", f"{prefix}step/shard"]
    for key in keys[::order]:
        s3.put(key, bytes(size))

    def both_there() -> None:
        assert s3.keys(prefix) == keys
        page = s3.page(prefix, delimiter="/")
        assert page.texts("Contents/Key") == keys[:1]
        assert page.texts("CommonPrefixes/Prefix") == [f"{keys[0]}/"]
        assert [len(s3.get(key).body) for key in keys] == [size, size]

    both_there()
    s3.delete(keys[0])
    checks.both("bc09 gone", is_gone(s3, keys[0]))
    checks.both("bc09 stays", shows(s3, keys[1], bytes(size)))


def test_bc11_encoding_type_of_a_listing(s3: Bucket, checks: Checks, prefix: str) -> None:
    keys = sorted((prefix + name for name in ("a b.txt", "a+b.txt", "100%.csv", "x&y<z>", "д/ж")), key=str.encode)
    for key in keys:
        s3.put(key, b"1")

    def holds() -> None:
        assert s3.keys(prefix) == keys
        for version in ({"list-type": "2"}, {}):
            reply = s3.call("GET", prefix=prefix, **{"encoding-type": "url"}, **version)
            encoded = reply.texts("Contents/Key")
            assert reply.text("EncodingType") == "url"
            assert [unquote_plus(key) for key in encoded] == keys
            assert not any(character in key for key in encoded for character in " &<")
            assert sum("%2B" in key for key in encoded) == 1
        folders = s3.page(prefix, delimiter="/", **{"encoding-type": "url"}).texts("CommonPrefixes/Prefix")
        assert [unquote_plus(folder) for folder in folders] == [f"{prefix}д/"]
        assert "%" in folders[0]

    checks.both("bc11", holds)


def test_bc13_max_keys_zero_ends_the_listing(s3: Bucket, checks: Checks, prefix: str) -> None:
    s3.put(f"{prefix}a", b"1")

    def holds() -> None:
        for version in ({"list-type": "2"}, {}):
            page = s3.call("GET", prefix=prefix, **{"max-keys": "0"}, **version)
            assert (page.status, page.text("IsTruncated")) == (200, "false")
            assert page.texts("Contents") == []

    checks.both("bc13", holds)


RANGES = [
    ("bytes=10-19", 10, 20),
    ("bytes=90-500", 90, 100),
    ("bytes=99-", 99, 100),
    ("bytes=-20", 80, 100),
    ("bytes=-150", 0, 100),
    ("bytes=0-0", 0, 1),
    ("bytes=0-", 0, 100),
]


def test_bc14_ranges(s3: Bucket, checks: Checks, prefix: str) -> None:
    key, body = f"{prefix}o", os.urandom(100)
    s3.put(key, body)

    def holds() -> None:
        for spec, start, end in RANGES:
            got = s3.get(key, {"Range": spec})
            assert (got.status, got.body) == (206, body[start:end]), spec
            assert got.headers["content-range"] == f"bytes {start}-{end - 1}/100", spec
            head = s3.head(key, {"Range": spec})
            assert (head.status, head.headers["content-length"]) == (206, str(end - start)), spec
        past = s3.get(key, {"Range": "bytes=100-"})
        assert (past.status, past.code, past.headers["content-range"]) == (416, "InvalidRange", "bytes */100")
        for spec in ("bytes=1-0", "bytes=x-y", "items=0-9", "bytes=", "bytes=--1", "bytes=1-2,4-5"):
            got = s3.get(key, {"Range": spec})
            assert (got.status, got.body) == (200, body), spec

    checks.both("bc14", holds)


def test_bc16_failed_precondition_beats_a_bad_range(s3: Bucket, checks: Checks, prefix: str) -> None:
    key = f"{prefix}o"
    stale, current = s3.put(key, os.urandom(5000)).etag, s3.put(key, os.urandom(10)).etag

    def holds() -> None:
        with s3.wire() as wire:
            reply = wire.ask(Ask("GET", s3.path(key), headers={"If-Match": stale, "Range": "bytes=4000-4999"}))
            assert (reply.status, reply.code) == (412, "PreconditionFailed")
            for method in ("GET", "HEAD"):
                reply = wire.ask(Ask(method, s3.path(key), headers={"If-None-Match": current}))
                assert (reply.status, reply.body, reply.etag) == (304, b"", current)
            assert wire.is_silent()
            reply = wire.ask(Ask("GET", s3.path(key), headers={"If-Match": current, "Range": "bytes=0-3"}))
            assert (reply.status, len(reply.body)) == (206, 4)

    checks.both("bc16", holds)


def test_bc17_completion_can_be_repeated(s3: Bucket, checks: Checks, prefix: str) -> None:
    key = f"{prefix}shard"
    upload_id = s3.create_upload(key)
    parts = [(number, s3.part(key, upload_id, number, body)) for number, body in ((1, bytes(5 * MIB)), (2, b"end"))]
    first, again = (s3.complete(key, upload_id, parts) for _ in range(2))
    assert (first.status, again.status) == (200, 200)
    assert first.text("ETag") == again.text("ETag") == s3.head(key).etag
    other = s3.complete(key, upload_id, parts[:1])
    assert (other.status, other.code) == (404, "NoSuchUpload")
    checks.both("bc17", shows(s3, key, bytes(5 * MIB) + b"end", first.text("ETag")))


@pytest.mark.parametrize("fresh", [False, True], ids=["existing", "fresh"])
def test_bc20_upload_in_progress_is_invisible(s3: Bucket, checks: Checks, prefix: str, fresh: bool) -> None:
    key = f"{prefix}ckpt"
    if not fresh:
        s3.put(key, b"old")
    unchanged = is_gone(s3, key) if fresh else shows(s3, key, b"old")
    upload_id = s3.create_upload(key)
    unchanged()
    etag = s3.part(key, upload_id, 1, b"new data")
    unchanged()
    assert s3.get(key, uploadId=upload_id).texts("Part/PartNumber") == ["1"]
    assert s3.call("DELETE", key, uploadId=upload_id).status == 204
    for late in (
        s3.call("PUT", key, b"late", partNumber="2", uploadId=upload_id),
        s3.complete(key, upload_id, [(1, etag)]),
        s3.get(key, uploadId=upload_id),
        s3.call("DELETE", key, uploadId=upload_id),
    ):
        assert (late.status, late.code) == (404, "NoSuchUpload")
    checks.both("bc20", unchanged)


def test_bc23_conditional_writes(s3: Bucket, checks: Checks, prefix: str) -> None:
    key, absent, wrong = f"{prefix}lock", f"{prefix}absent", '"00000000000000000000000000000000"'
    assert s3.call("PUT", key, b"1", {"If-None-Match": "*"}).status == 200
    failed = s3.call("PUT", key, b"2", {"If-None-Match": "*"})
    assert (failed.status, failed.code) == (412, "PreconditionFailed")
    etag = s3.head(key).etag
    assert s3.call("PUT", key, b"3", {"If-Match": wrong}).code == "PreconditionFailed"
    assert s3.call("PUT", key, b"4", {"If-Match": etag}).status == 200
    missing = s3.call("PUT", absent, b"5", {"If-Match": etag})
    assert (missing.status, missing.code) == (404, "NoSuchKey")
    upload_id = s3.create_upload(key)
    parts = [(1, s3.part(key, upload_id, 1, b"6"))]
    assert s3.complete(key, upload_id, parts, {"If-None-Match": "*"}).code == "PreconditionFailed"
    assert s3.complete(key, upload_id, parts, {"If-Match": wrong}).code == "PreconditionFailed"
    checks.both("bc23", shows(s3, key, b"4"))
    checks.both("bc23 absent", is_gone(s3, absent))
    assert s3.complete(key, upload_id, parts, {"If-Match": s3.head(key).etag}).status == 200
    checks.all.pop(-2)
    checks.both("bc23 swapped", shows(s3, key, b"6"))


def test_bc23_of_racing_creators_one_wins(s3: Bucket, prefix: str) -> None:
    start = threading.Barrier(8)

    def create(number: int) -> int:
        start.wait(10)
        return s3.call("PUT", f"{prefix}lock", str(number).encode(), {"If-None-Match": "*"}).status

    with ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(create, range(8)))
    assert sorted(statuses) == [200] + [412] * 7
    assert s3.get(f"{prefix}lock").body == str(statuses.index(200)).encode()


def test_bc28_metadata_that_is_not_ascii(s3: Bucket, checks: Checks, prefix: str) -> None:
    value = "épreuve-шаг-三"
    s3.put(f"{prefix}u", b"1", {"x-amz-meta-name": value.encode()})
    s3.put(f"{prefix}a", b"1", {"x-amz-meta-name": "  spaced   out  ", "X-Amz-Meta-CASE": "v", "x-amz-meta-empty": ""})

    def holds() -> None:
        shown = s3.head(f"{prefix}u").headers["x-amz-meta-name"]
        assert str(email.header.make_header(email.header.decode_header(shown))) == value
        head = s3.head(f"{prefix}a")
        assert (head.status, head.headers["x-amz-meta-case"]) == (200, "v")
        assert head.headers["x-amz-meta-name"].split() == ["spaced", "out"]

    checks.both("bc28", holds)


def test_bc29_last_modified_is_one_instant_for_ever(s3: Bucket, node: RunningNode, checks: Checks, prefix: str) -> None:
    key = f"{prefix}o"
    sent = email.utils.parsedate_to_datetime(s3.put(key, b"x").headers["date"])

    def times() -> tuple[str, str, str]:
        # A node that forgot the object learns its time again from HEAD; LIST alone shows the origin's.
        head = s3.head(key).headers["last-modified"]
        listed = s3.page(key).text("Contents/LastModified")
        return head, s3.get(key).headers["last-modified"], listed

    first = head, got, listed = times()
    assert head == got
    assert head.endswith(" GMT")
    assert listed.endswith("Z")
    instant = email.utils.parsedate_to_datetime(head)
    assert datetime.fromisoformat(listed) == instant
    assert abs((instant - sent).total_seconds()) <= 2

    def holds() -> None:
        assert times() == first
        assert s3.get(key, {"If-Modified-Since": head}).status == 304
        assert s3.get(key, {"If-Unmodified-Since": head}).status == 200

    holds()
    node.wait_settled()
    checks.both("bc29", holds)


@pytest.mark.parametrize("region", [None, "us-west-2"])
def test_bc33_bucket_that_is_there_is_created_again(s3: Bucket, boto: Any, prefix: str, region: str | None) -> None:
    s3.put(f"{prefix}o", b"x")
    more = {"CreateBucketConfiguration": {"LocationConstraint": region}} if region else {}
    codes = {"BucketAlreadyOwnedByYou", "BucketAlreadyExists"}
    refused: Any = None
    try:
        boto.create_bucket(Bucket=s3.name, **more)
    except ClientError as error:
        refused = error.response
    assert refused is None or refused["Error"]["Code"] in codes
    assert refused is None or refused["ResponseMetadata"]["HTTPStatusCode"] == 409
    assert s3.call("HEAD").status == 200
    assert s3.named("no-such-bucket-conformance").call("HEAD").status == 404
    assert s3.get(f"{prefix}o").body == b"x"


def test_bc33_no_bucket_is_made_because_of_a_write(s3: Bucket, origin: ProcessOrigin) -> None:
    absent = s3.named("no-such-bucket-conformance")
    assert absent.call("PUT", "k", b"x").code == "NoSuchBucket"
    assert absent.call("POST", "k", uploads="").code == "NoSuchBucket"
    client = origin.client()
    assert "no-such-bucket-conformance" not in [bucket["Name"] for bucket in client.list_buckets()["Buckets"]]
    client.close()


def test_bc35_empty_marker(s3: Bucket, checks: Checks, prefix: str) -> None:
    key = f"{prefix}.validate_storage_marker"
    s3.put(key, b"")

    def holds() -> None:
        with s3.wire() as wire:
            for _ in range(50):
                reply = wire.ask(Ask("HEAD", s3.path(key)))
                assert (reply.status, reply.headers["content-length"]) == (200, "0")
                assert "transfer-encoding" not in reply.headers
            assert wire.is_silent()
            reply = wire.ask(Ask("GET", s3.path(key)))
            assert (reply.status, reply.body, reply.headers["content-length"]) == (200, b"", "0")
        assert s3.page(key).text("Contents/Size") == "0"

    checks.both("bc35", holds)


def test_bc36_append_by_copying_the_object_into_a_part(s3: Bucket, checks: Checks, prefix: str) -> None:
    key, old, tail = f"{prefix}log", os.urandom(6 * MIB), os.urandom(1000)
    s3.put(key, old)
    upload_id = s3.create_upload(key)
    source = {"x-amz-copy-source": quote(f"{s3.name}/{key}")}
    copied = s3.call("PUT", key, b"", source, partNumber="1", uploadId=upload_id)
    assert copied.document.tag == "CopyPartResult"
    parts = [(1, copied.text("ETag")), (2, s3.part(key, upload_id, 2, tail))]
    assert s3.get(key).body == old
    assert s3.complete(key, upload_id, parts).status == 200
    checks.both("bc36", shows(s3, key, old + tail))


def test_bc36_copied_range(s3: Bucket, checks: Checks, prefix: str) -> None:
    key, body = f"{prefix}o", os.urandom(6 * MIB)
    s3.put(f"{prefix}source", body)
    upload_id = s3.create_upload(key)
    parts = []
    for number, spec in ((1, f"bytes=0-{5 * MIB - 1}"), (2, f"bytes={5 * MIB + 3}-{6 * MIB - 1}")):
        headers = {"x-amz-copy-source": f"/{s3.name}/{prefix}source", "x-amz-copy-source-range": spec}
        copied = s3.call("PUT", key, b"", headers, partNumber=str(number), uploadId=upload_id)
        parts.append((number, copied.text("ETag")))
    assert s3.complete(key, upload_id, parts).status == 200
    checks.both("bc36 range", shows(s3, key, body[: 5 * MIB] + body[5 * MIB + 3 :]))
    past = {"x-amz-copy-source": f"/{s3.name}/{prefix}source", "x-amz-copy-source-range": f"bytes=0-{7 * MIB}"}
    upload_id = s3.create_upload(key)
    refused = s3.call("PUT", key, b"", past, partNumber="1", uploadId=upload_id)
    assert refused.status in (400, 416)


def test_bc38_boto3_as_it_comes(s3: Bucket, boto: Any, checks: Checks, prefix: str) -> None:
    big = os.urandom(11 * MIB)
    config = boto3.s3.transfer.TransferConfig(multipart_threshold=5 * MIB, multipart_chunksize=5 * MIB)
    boto.upload_fileobj(io.BytesIO(big), s3.name, f"{prefix}big", Config=config)
    boto.put_object(Bucket=s3.name, Key=f"{prefix}small", Body=b"x" * 1000)
    boto.put_object(Bucket=s3.name, Key=f"{prefix}empty", Body=b"")
    boto.upload_fileobj(io.BytesIO(b""), s3.name, f"{prefix}empty2")
    for key, body in (("big", big), ("small", b"x" * 1000), ("empty", b""), ("empty2", b"")):
        answer = boto.get_object(Bucket=s3.name, Key=prefix + key)
        assert answer["Body"].read() == body
        assert "ContentEncoding" not in answer
    out = io.BytesIO()
    boto.download_fileobj(s3.name, f"{prefix}big", out)
    assert out.getvalue() == big
    keys = [prefix + key for key in ("big", "small", "empty", "empty2")]
    answer = boto.delete_objects(Bucket=s3.name, Delete={"Objects": [{"Key": key} for key in keys]})
    assert sorted(item["Key"] for item in answer["Deleted"]) == sorted(keys)
    assert "Errors" not in answer

    def holds() -> None:
        assert s3.keys(prefix) == []

    checks.both("bc38", holds)


def test_bc40_write_is_in_every_view_at_once(s3: Bucket, checks: Checks, prefix: str) -> None:
    for number in range(20):
        folder = f"{prefix}step-{number}/"
        key, body = f"{folder}shard", os.urandom(1000 + number)
        etag = s3.multipart(key, [body]) if number % 4 == 3 else s3.put(key, body).etag
        checks.both(f"bc40 {number}", shows(s3, key, body, etag))
        part = s3.get(key, {"Range": "bytes=500-599", "If-Match": etag})
        assert (part.status, part.body) == (206, body[500:600])
        assert folder in s3.folders(prefix)


def test_bc42_validators_survive_write_back(
    s3: Bucket, node: RunningNode, origin: ProcessOrigin, checks: Checks, prefix: str
) -> None:
    key, bodies = f"{prefix}shard", [os.urandom(5 * MIB), os.urandom(3 * MIB)]
    whole = b"".join(bodies)
    etag = s3.multipart(key, bodies)
    modified = s3.head(key).headers["last-modified"]
    assert etag.endswith('-2"')

    def holds() -> None:
        for offset in range(0, len(whole), MIB):
            spec = {"Range": f"bytes={offset}-{offset + MIB - 1}", "If-Match": etag}
            reply = s3.get(key, spec)
            assert (reply.status, reply.body) == (206, whole[offset : offset + MIB])
        head = s3.head(key)
        assert (head.etag, head.headers["last-modified"]) == (etag, modified)
        assert s3.page(key).text("Contents/ETag") == etag

    holds()
    for number, body in enumerate(bodies, 1):  # once its bytes are the origin's alone, parts are the origin's answer
        part = s3.get(key, partNumber=str(number))
        assert (part.status, part.body) == (206, body)
    node.wait_settled()
    checks.both("bc42", holds)
    client = origin.client()
    there = client.head_object(Bucket=s3.name, Key=key)
    client.close()
    assert there["ETag"].endswith('-2"')
    assert there["ContentLength"] == len(whole)


def test_bc49_no_stale_absence_and_no_older_version(s3: Bucket, checks: Checks, prefix: str) -> None:
    for number in range(15):
        key, one, two = f"{prefix}{number}", os.urandom(3000), os.urandom(1500)
        is_gone(s3, key)()
        s3.put(key, one)
        shows(s3, key, one)()
        s3.put(key, two)
        shows(s3, key, two)()
        s3.delete(key)
        checks.both(f"bc49 {number}", is_gone(s3, key))


FOLDERS = ["plain/step_10", "run[bug]/step=10", "run+1 (a)/шаг 10", "50%/step_10", "a'b/s~1,2"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_bc54_rename_of_the_metadata_file(s3: Bucket, checks: Checks, prefix: str, folder: str) -> None:
    base, body = prefix + folder, os.urandom(500)
    s3.put(f"{base}/.metadata.tmp", body)
    source = f"{s3.name}/{base}/.metadata.tmp"
    spellings = [quote(source, safe="-._~/"), "/" + quote(source, safe="-._~/"), quote(source, safe="")]
    for number, spelled in enumerate(spellings):
        reply = s3.call("PUT", f"{base}/.metadata{number}", b"", {"x-amz-copy-source": spelled})
        assert (reply.status, reply.document.tag) == (200, "CopyObjectResult"), str(reply)
        checks.both(f"bc54 {folder} {number}", shows(s3, f"{base}/.metadata{number}", body, reply.text("ETag")))
    s3.delete(f"{base}/.metadata.tmp")
    checks.both(f"bc54 {folder}", is_gone(s3, f"{base}/.metadata.tmp"))
    assert s3.keys(f"{base}/") == [f"{base}/.metadata{number}" for number in range(3)]


def test_bc56_the_last_three_are_kept(s3: Bucket, boto: Any, node: RunningNode, checks: Checks, prefix: str) -> None:
    kept: list[str] = []

    def holds() -> None:
        assert s3.folders(prefix) == kept
        assert len(s3.keys(prefix)) == 5 * len(kept)

    for step in range(8):
        folder = f"{prefix}checkpoint_{step:06d}/"
        for rank in range(4):
            s3.put(f"{folder}rank_{rank}.distcp", os.urandom(200))
        s3.put(f"{folder}.metadata", b"m")
        kept.append(folder)
        if len(kept) > 3:
            names = s3.keys(kept.pop(0))
            assert len(names) == 5
            answer = boto.delete_objects(Bucket=s3.name, Delete={"Objects": [{"Key": name} for name in names]})
            assert "Errors" not in answer
        holds()
    node.wait_settled()
    checks.both("bc56", holds)


def test_bc58_writer_that_fails_midway_leaves_nothing(
    s3: Bucket, boto: Any, node: RunningNode, checks: Checks, prefix: str
) -> None:
    key = f"{prefix}shard"
    s3.put(key, b"previous")
    node.wait_settled()
    before = node.status()["memory"]["dirty_bytes"]
    upload_id = s3.create_upload(key)
    s3.part(key, upload_id, 1, bytes(5 * MIB))
    uploads = boto.list_multipart_uploads(Bucket=s3.name, Prefix=prefix)["Uploads"]
    assert [(upload["Key"], upload["UploadId"]) for upload in uploads] == [(key, upload_id)]
    assert node.status()["memory"]["used_bytes"] >= 5 * MIB
    assert s3.call("DELETE", key, uploadId=upload_id).status == 204
    assert "Uploads" not in boto.list_multipart_uploads(Bucket=s3.name, Prefix=prefix)
    node.wait_status("the parts' memory is free", lambda status: status["memory"]["dirty_bytes"] <= before)
    checks.both("bc58", shows(s3, key, b"previous"))


def test_bc43_change_behind_the_gateway_is_seen_after_restart(
    s3: Bucket, node: RunningNode, origin: ProcessOrigin, checks: Checks, prefix: str
) -> None:
    s3.put(f"{prefix}o", b"one")
    s3.put(f"{prefix}d", b"one")
    node.wait_settled()
    client = origin.client()
    client.put_object(Bucket=s3.name, Key=f"{prefix}o", Body=b"second")
    client.put_object(Bucket=s3.name, Key=f"{prefix}new", Body=b"n")
    client.delete_object(Bucket=s3.name, Key=f"{prefix}d")
    client.close()
    assert s3.get(f"{prefix}new").body == b"n"
    checks.all += [
        ("bc43 replaced", shows(s3, f"{prefix}o", b"second")),
        ("bc43 added", shows(s3, f"{prefix}new", b"n")),
        ("bc43 deleted", is_gone(s3, f"{prefix}d")),
    ]


def test_bc52_upload_goes_on_after_a_crash(s3: Bucket, node: RunningNode, checks: Checks, prefix: str) -> None:
    key, bodies = f"{prefix}long", [os.urandom(5 * MIB) for _ in range(4)] + [b"end"]
    upload_id = s3.create_upload(key)
    parts = [(number, s3.part(key, upload_id, number, bodies[number - 1])) for number in (1, 2, 3)]
    node.kill9("worker")
    parts.append((4, s3.part(key, upload_id, 4, bodies[3])))
    node.kill9("all")
    node.restart()
    assert s3.get(key, uploadId=upload_id).texts("Part/PartNumber") == ["1", "2", "3", "4"]
    parts.append((5, s3.part(key, upload_id, 5, bodies[4])))
    assert s3.complete(key, upload_id, parts).status == 200
    checks.both("bc52", shows(s3, key, b"".join(bodies)))


def test_unsigned_query_and_wrong_bucket_do_not_matter_to_a_repeated_completion(s3: Bucket, prefix: str) -> None:
    key = f"{prefix}o"
    upload_id = s3.create_upload(key)
    parts = [(1, s3.part(key, upload_id, 1, b"1"))]
    assert s3.complete(key, upload_id, parts).status == 200
    ask = Ask("POST", s3.path(f"{key}-other"), query_of(uploadId=upload_id), body=part_list(parts))
    check(s3, Row("other key", ask, 404, "NoSuchUpload"))


def test_everything_again_from_a_node_with_fresh_memory(node: RunningNode, checks: Checks) -> None:
    assert checks.all
    node.restart_cold()
    failed = []
    for name, holds in checks.all:
        try:
            holds()
        except AssertionError as error:
            failed.append(f"{name}: {error}")
    assert not failed, "\n".join(failed)
    assert node.status()["writeback"]["pending"] == 0
