"""`tiergate test`: does an S3 endpoint behave as clients of checkpoints need it? A small black box, boto3 only.

Each check is a function of its own and works on keys of its own below one prefix, which is emptied at the end."""

import hashlib
import secrets
import threading
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import boto3
from botocore.client import BaseClient
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from tiergate.clock import Clock, SystemClock
from tiergate.s3.uri import uri_of

PART_BYTES = 5 << 20
"""The smallest part S3 takes unless it is the last:
https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html"""

ATTEMPTS_COUNT = 2
CONNECT_TIMEOUT_S = 5
READ_TIMEOUT_S = 60
REMOVE_BUCKET_TIMEOUT_S = 30.0
_REMOVE_BUCKET_PAUSE_S = 0.2


class _NotSoError(Exception):
    """The endpoint did not do what S3 does; the message says what was expected and what came."""


class NotRemovedError(Exception):
    """The checks are over, but not all that they wrote could be removed; the message says what, and why."""


@dataclass(frozen=True, slots=True)
class Result:
    """How a check ended. `fault` is empty if all was well."""

    name: str
    fault: str
    took_s: float


@dataclass(frozen=True, slots=True)
class Place:
    """Where a check works: `client` is a boto3 S3 client; all keys are below `prefix`."""

    client: Any
    bucket: str
    prefix: str

    def key(self, name: str) -> str:
        return f"{self.prefix}{name}"

    def put(self, name: str, body: bytes, **more: object) -> dict[str, Any]:
        answer: dict[str, Any] = self.client.put_object(Bucket=self.bucket, Key=self.key(name), Body=body, **more)
        return answer

    def read(self, name: str, **more: object) -> bytes:
        body: bytes = self.client.get_object(Bucket=self.bucket, Key=self.key(name), **more)["Body"].read()
        return body

    def head(self, name: str, **more: object) -> dict[str, Any]:
        answer: dict[str, Any] = self.client.head_object(Bucket=self.bucket, Key=self.key(name), **more)
        return answer

    def listed(self, under: str, **more: object) -> dict[str, Any]:
        answer: dict[str, Any] = self.client.list_objects_v2(Bucket=self.bucket, Prefix=self.key(under), **more)
        return answer

    def names(self, under: str) -> list[str]:
        return [each["Key"].removeprefix(self.prefix) for each in self.listed(under).get("Contents", [])]


Check = Callable[[Place], None]


def connect(endpoint: str, access_key: str, secret_key: str, region: str = "us-east-1") -> BaseClient:
    """A boto3 client in path style, as the checks need it."""
    client: BaseClient = boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id=access_key,
        aws_secret_access_key=secret_key,
        region_name=region,
        config=Config(
            signature_version="s3v4",
            s3={"addressing_style": "path"},
            retries={"total_max_attempts": ATTEMPTS_COUNT},
            connect_timeout=CONNECT_TIMEOUT_S,
            read_timeout=READ_TIMEOUT_S,
        ),
    )
    return client


def run_checks(
    client: Any,
    bucket: str,
    *,
    clock: Clock | None = None,
    on_result: Callable[[Result], object] = lambda _: None,
) -> list[Result]:
    """Run all checks; `on_result` is told each as it ends. What they wrote is removed, and the bucket too if it was
    not there before.

    Raises:
        ClientError or BotoCoreError: the bucket cannot be used.
        NotRemovedError: it cannot be cleaned up.
    """
    clock = clock or SystemClock()
    place = Place(client, bucket, f"tiergate-test-{secrets.token_hex(6)}/")
    is_ours = _ensure_bucket(client, bucket)
    results: list[Result] = []
    try:
        for name, check in CHECKS.items():
            started_s = clock.monotonic_s()
            fault = _fault_of(check, place)
            results.append(Result(name, fault, clock.monotonic_s() - started_s))
            on_result(results[-1])
    finally:
        try:
            _empty(place)
            if is_ours:
                _remove_bucket(client, bucket, clock)
        except (ClientError, BotoCoreError) as error:
            raise NotRemovedError(f"{uri_of(bucket, place.prefix)} could not be removed: {error}") from error
    return results


def _fault_of(check: Check, place: Place) -> str:
    try:
        check(place)
    except (_NotSoError, ClientError, BotoCoreError, OSError) as error:
        return " ".join(str(error).split()) or type(error).__name__
    return ""


def _ensure_bucket(client: Any, bucket: str) -> bool:
    try:
        client.head_bucket(Bucket=bucket)
    except ClientError as error:
        if _code(error) not in ("404", "NoSuchBucket"):
            raise
        client.create_bucket(Bucket=bucket)
        return True
    return False


def _remove_bucket(client: Any, bucket: str, clock: Clock) -> None:
    """A write-back cache in between says "not empty" until the deletions have reached the origin."""
    deadline_s = clock.monotonic_s() + REMOVE_BUCKET_TIMEOUT_S
    while True:
        try:
            client.delete_bucket(Bucket=bucket)
        except ClientError as error:
            if _code(error) != "BucketNotEmpty" or clock.monotonic_s() > deadline_s:
                raise
            threading.Event().wait(_REMOVE_BUCKET_PAUSE_S)
        else:
            return


def _empty(place: Place) -> None:
    uploads = place.client.list_multipart_uploads(Bucket=place.bucket, Prefix=place.prefix).get("Uploads", [])
    for upload in uploads:
        place.client.abort_multipart_upload(Bucket=place.bucket, Key=upload["Key"], UploadId=upload["UploadId"])
    for page in place.client.get_paginator("list_objects_v2").paginate(Bucket=place.bucket, Prefix=place.prefix):
        for each in page.get("Contents", []):
            place.client.delete_object(Bucket=place.bucket, Key=each["Key"])


def _code(error: ClientError) -> str:
    return error.response.get("Error", {}).get("Code", "")


def _same(what: str, expected: object, found: object) -> None:
    if expected != found:
        raise _NotSoError(f"{what}: expected {_short(expected)}, got {_short(found)}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _refused(what: str, call: Callable[[], object], *codes: str) -> None:
    try:
        call()
    except ClientError as error:
        code = _code(error)
        if code not in codes:
            raise _NotSoError(f"{what}: expected {' or '.join(codes)}, got {code}") from error
        return
    raise _NotSoError(f"{what}: expected {codes[0]}, got success")


# -- the checks
def _put_get(place: Place) -> None:
    body = secrets.token_bytes(100_000)
    etag = place.put("put-get", body)["ETag"]
    _same("body", body, place.read("put-get"))
    _same("ETag", etag, place.head("put-get")["ETag"])


def _empty_object(place: Place) -> None:
    place.put("empty", b"")
    _same("body", b"", place.read("empty"))
    _same("size", 0, place.head("empty")["ContentLength"])


def _headers_and_metadata(place: Place) -> None:
    place.put("meta", b"x", ContentType="text/x-test", CacheControl="no-store", Metadata={"step": "7"})
    head = place.head("meta")
    _same("Content-Type", "text/x-test", head["ContentType"])
    _same("Cache-Control", "no-store", head.get("CacheControl"))
    _same("metadata", {"step": "7"}, head["Metadata"])


def _overwrite(place: Place) -> None:
    place.put("overwrite", b"old")
    place.put("overwrite", b"newer")
    _same("body", b"newer", place.read("overwrite"))
    _same("listing", [5], [each["Size"] for each in place.listed("overwrite")["Contents"]])


def _awkward_keys(place: Place) -> None:
    names = ["k/a b+c&d=e", "k/ä/日本", "k/a//b", "k/100%25", "k/trail/"]
    for name in names:
        place.put(name, name.encode())
    for name in names:
        _same(f"body of {name}", name.encode(), place.read(name))
    _same("listing", sorted(names, key=lambda name: name.encode()), place.names("k/"))


def _ranges(place: Place) -> None:
    body = secrets.token_bytes(1000)
    place.put("range", body)
    _same("first bytes", body[:10], place.read("range", Range="bytes=0-9"))
    _same("open range", body[990:], place.read("range", Range="bytes=990-"))
    _same("suffix", body[-7:], place.read("range", Range="bytes=-7"))
    answer = place.client.get_object(Bucket=place.bucket, Key=place.key("range"), Range="bytes=5-2000")
    _same("Content-Range", "bytes 5-999/1000", answer["ContentRange"])
    _same("body past the end", body[5:], answer["Body"].read())
    _refused("range outside", lambda: place.read("range", Range="bytes=1000-"), "InvalidRange")


def _missing(place: Place) -> None:
    _refused("GET of no key", lambda: place.read("never"), "NoSuchKey")
    _refused("HEAD of no key", lambda: place.head("never"), "404", "NoSuchKey")


def _read_conditions(place: Place) -> None:
    etag = place.put("if", b"conditions")["ETag"]
    _same("If-Match", b"conditions", place.read("if", IfMatch=etag))
    _refused("If-Match of another", lambda: place.read("if", IfMatch='"other"'), "PreconditionFailed")
    _refused("If-None-Match of the same", lambda: place.read("if", IfNoneMatch=etag), "304", "NotModified")


def _create_once(place: Place) -> None:
    place.put("once", b"first", IfNoneMatch="*")
    _refused("a second creation", lambda: place.put("once", b"second", IfNoneMatch="*"), "PreconditionFailed")
    _same("body", b"first", place.read("once"))


def _replace_if_same(place: Place) -> None:
    etag = place.put("swap", b"one")["ETag"]
    place.put("swap", b"two", IfMatch=etag)
    _refused("a stale If-Match", lambda: place.put("swap", b"three", IfMatch=etag), "PreconditionFailed")
    _same("body", b"two", place.read("swap"))


def _list_pages(place: Place) -> None:
    names = [f"pages/{index:02}" for index in range(7)]
    for name in names:
        place.put(name, b"x")
    found: list[str] = []
    more: dict[str, object] = {}
    while True:
        page = place.listed("pages/", MaxKeys=3, **more)
        if page["KeyCount"] > 3:
            raise _NotSoError(f"a page of at most 3 keys has {page['KeyCount']}")
        found += [each["Key"].removeprefix(place.prefix) for each in page.get("Contents", [])]
        if not page["IsTruncated"]:
            break
        more = {"ContinuationToken": page["NextContinuationToken"]}
    _same("keys of all pages", names, found)


def _list_delimiter(place: Place) -> None:
    for name in ("tree/a/1", "tree/a/2", "tree/b", "tree/c/3"):
        place.put(name, b"x")
    page = place.listed("tree/", Delimiter="/")
    _same("keys", [place.key("tree/b")], [each["Key"] for each in page["Contents"]])
    prefixes = [each["Prefix"] for each in page["CommonPrefixes"]]
    _same("prefixes", [place.key("tree/a/"), place.key("tree/c/")], prefixes)


def _list_version_1(place: Place) -> None:
    for name in ("v1/a", "v1/b"):
        place.put(name, b"x")
    page = place.client.list_objects(Bucket=place.bucket, Prefix=place.key("v1/"), MaxKeys=1)
    _same("first page", [place.key("v1/a")], [each["Key"] for each in page["Contents"]])
    _same("is truncated", True, page["IsTruncated"])
    page = place.client.list_objects(Bucket=place.bucket, Prefix=place.key("v1/"), Marker=place.key("v1/a"))
    _same("after the marker", [place.key("v1/b")], [each["Key"] for each in page["Contents"]])


def _multipart(place: Place) -> None:
    bodies = [secrets.token_bytes(PART_BYTES), secrets.token_bytes(1000)]
    at: dict[str, Any] = {"Bucket": place.bucket, "Key": place.key("parts")}
    upload = place.client.create_multipart_upload(**at)["UploadId"]
    parts = [
        {"PartNumber": number, "ETag": _upload_part(place, at, upload, number, body)}
        for number, body in enumerate(bodies, 1)
    ]
    _refused("GET before completion", lambda: place.read("parts"), "NoSuchKey")
    listed = place.client.list_parts(**at, UploadId=upload)["Parts"]
    _same("sizes of parts", [len(body) for body in bodies], [part["Size"] for part in listed])
    done = place.client.complete_multipart_upload(**at, UploadId=upload, MultipartUpload={"Parts": parts})
    _same("ETag's end", True, done["ETag"].endswith('-2"'))
    whole = hashlib.sha256(b"".join(bodies)).hexdigest()
    _same("SHA-256", whole, hashlib.sha256(place.read("parts")).hexdigest())
    _same("part 2", bodies[1], place.read("parts", PartNumber=2))
    across = f"bytes={PART_BYTES - 5}-{PART_BYTES + 4}"
    _same("range across parts", bodies[0][-5:] + bodies[1][:5], place.read("parts", Range=across))


def _upload_part(place: Place, at: dict[str, Any], upload: str, number: int, body: bytes) -> str:
    answer = place.client.upload_part(**at, UploadId=upload, PartNumber=number, Body=body)
    return str(answer["ETag"])


def _multipart_abort(place: Place) -> None:
    at: dict[str, Any] = {"Bucket": place.bucket, "Key": place.key("aborted")}
    upload = place.client.create_multipart_upload(**at)["UploadId"]
    _upload_part(place, at, upload, 1, b"x")
    place.client.abort_multipart_upload(**at, UploadId=upload)
    _refused("parts of an aborted upload", lambda: place.client.list_parts(**at, UploadId=upload), "NoSuchUpload")
    _refused("its key", lambda: place.read("aborted"), "NoSuchKey")


def _copy(place: Place) -> None:
    place.put("copy-from", b"copied", Metadata={"a": "1"})
    source = {"Bucket": place.bucket, "Key": place.key("copy-from")}
    place.client.copy_object(Bucket=place.bucket, Key=place.key("copy-to"), CopySource=source)
    _same("body", b"copied", place.read("copy-to"))
    _same("metadata", {"a": "1"}, place.head("copy-to")["Metadata"])


def _rename(place: Place) -> None:
    """How torch.distributed.checkpoint commits: copy `.metadata.tmp` to `.metadata`, then delete it."""
    place.put("set/.metadata.tmp", b"whole")
    source = {"Bucket": place.bucket, "Key": place.key("set/.metadata.tmp")}
    place.client.copy_object(Bucket=place.bucket, Key=place.key("set/.metadata"), CopySource=source)
    place.client.delete_object(Bucket=place.bucket, Key=place.key("set/.metadata.tmp"))
    _same("listing", ["set/.metadata"], place.names("set/"))
    _same("body", b"whole", place.read("set/.metadata"))


def _delete(place: Place) -> None:
    place.put("gone", b"x")
    place.client.delete_object(Bucket=place.bucket, Key=place.key("gone"))
    _refused("GET of a deleted key", lambda: place.read("gone"), "NoSuchKey")
    _same("listing", [], place.names("gone"))
    place.client.delete_object(Bucket=place.bucket, Key=place.key("gone"))  # a second time is no error


def _delete_many(place: Place) -> None:
    names = ["many/a", "many/b", "many/c"]
    for name in names:
        place.put(name, b"x")
    objects = [{"Key": place.key(name)} for name in [*names, "many/never"]]
    answer = place.client.delete_objects(Bucket=place.bucket, Delete={"Objects": objects})
    _same("errors", [], answer.get("Errors", []))
    _same("deleted", 4, len(answer["Deleted"]))
    _same("listing", [], place.names("many/"))


def _checksum(place: Place) -> None:
    answer = place.put("sum", b"123456789", ChecksumAlgorithm="CRC32")
    _same("CRC32", "y/Q5Jg==", answer.get("ChecksumCRC32"))
    _refused("a wrong CRC32", lambda: place.put("sum", b"1", ChecksumCRC32="AAAAAA=="), "BadDigest", "InvalidDigest")
    _same("body after a refused write", b"123456789", place.read("sum"))


def _wrong_md5(place: Place) -> None:
    _refused("a wrong Content-MD5", lambda: place.put("md5", b"x", ContentMD5="1B2M2Y8AsgTpgAmY7PhCfg=="), "BadDigest")
    _refused("what was refused", lambda: place.read("md5"), "NoSuchKey")


def _presigned(place: Place) -> None:
    where = {"Bucket": place.bucket, "Key": place.key("presigned")}
    url = place.client.generate_presigned_url("put_object", where, ExpiresIn=60)
    binary = {"Content-Type": "application/octet-stream"}
    sent = urllib.request.Request(url, b"by url", binary, method="PUT")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(sent, timeout=READ_TIMEOUT_S) as answer:
        _same("status of PUT", 200, answer.status)
    url = place.client.generate_presigned_url("get_object", where, ExpiresIn=60)
    with opener.open(url, timeout=READ_TIMEOUT_S) as answer:
        _same("body", b"by url", answer.read())


CHECKS: dict[str, Check] = {
    "put and get": _put_get,
    "empty object": _empty_object,
    "headers and metadata": _headers_and_metadata,
    "overwrite": _overwrite,
    "awkward keys": _awkward_keys,
    "ranges": _ranges,
    "missing keys": _missing,
    "conditions of reads": _read_conditions,
    "create only once": _create_once,
    "replace only if the same": _replace_if_same,
    "listing in pages": _list_pages,
    "listing with a delimiter": _list_delimiter,
    "listing, version 1": _list_version_1,
    "multipart upload": _multipart,
    "multipart upload aborted": _multipart_abort,
    "copy": _copy,
    "rename of a marker": _rename,
    "delete": _delete,
    "delete many": _delete_many,
    "checksum": _checksum,
    "wrong Content-MD5": _wrong_md5,
    "presigned URLs": _presigned,
}
"""Every check by its name."""
