"""The origin client against real S3 servers: what it writes, they hold; what they say, it understands."""

import asyncio
import base64
import hashlib
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import pytest
from tests.contracts.conftest import BUCKET

from tiergate.clock import SystemClock
from tiergate.config.values import ConditionalWrites
from tiergate.errors import OriginCredentialsError, OriginRefusedError
from tiergate.model import ObjectName, Version
from tiergate.origin.client import Condition, OriginClient, OriginSettings
from tiergate.origin.stamp import stamp_header
from tiergate.testing.origins import FaultyOrigin, MotoOrigin, ProcessOrigin, s3_client

pytestmark = pytest.mark.usefixtures("keys")

PART_BYTES = 5 << 20

STRANGE_KEYS = (
    "plain",
    "with space",
    "plus+plus",
    "per%cent",
    "escaped%2Fslash",
    "ünï/çødé/キー",
    "emoji-\U0001f600",
    "double//slash",
    "/leading",
    "trailing/",
    "a/./b",
    "a/../b",
    "..",
    "quo'te\"s",
    "semi;colon&and=equals?question#hash",
    "~tilde_under.dot-dash",
    "l" * 1024,
    "é" * 512,
)


@pytest.fixture
async def origin(proxy: FaultyOrigin) -> AsyncIterator[OriginClient]:
    settings = OriginSettings(endpoint=proxy.endpoint, attempts_count=2, backoff_base_s=0.01)
    async with OriginClient(settings, "node-1", SystemClock()) as client:
        yield client


def chunks_of(data: bytes, piece_bytes: int = 1 << 20) -> Callable[[], AsyncIterator[memoryview]]:
    async def pieces() -> AsyncIterator[memoryview]:
        view = memoryview(data)
        for start in range(0, len(view), piece_bytes):
            yield view[start : start + piece_bytes]

    return pieces


def name_of(request: pytest.FixtureRequest, suffix: str = "") -> ObjectName:
    return ObjectName(BUCKET, f"{request.node.originalname}{suffix}")


async def put(origin: OriginClient, name: ObjectName, data: bytes, **headers: str) -> str:
    return (await origin.put_object(name, len(data), chunks_of(data), headers)).etag


async def get(origin: OriginClient, name: ObjectName, start: int, end: int) -> bytes:
    async with origin.get_object(name, start, end) as (_, pieces):
        return b"".join([piece async for piece in pieces])


async def test_put_then_head_gives_identity_headers_and_stamp(
    origin: OriginClient, proxy: FaultyOrigin, request: pytest.FixtureRequest
) -> None:
    name = name_of(request)
    data = bytes(range(256)) * 5000
    version = Version("uid-1", len(data), "abc-1", 1_700_000_000, ())
    headers = {
        "content-type": "application/x-thing",
        "cache-control": "max-age=3",
        "x-amz-meta-color": "dark  blue",
        "x-amz-version-id": "an answer's header",
    } | stamp_header(version, name)

    answer = await origin.put_object(name, len(data), chunks_of(data, 100_000), headers)
    there = await origin.head_object(name)

    assert answer.etag == hashlib.md5(data).hexdigest()
    assert there is not None
    assert (there.etag, there.size_bytes) == (answer.etag, len(data))
    assert there.headers["content-type"] == "application/x-thing"
    assert there.headers["cache-control"] == "max-age=3"
    assert there.metadata.keys() == {"color"}
    assert there.stamp is not None
    assert (there.stamp.uid, there.stamp.etag, there.stamp.modified_s) == ("uid-1", "abc-1", 1_700_000_000)
    assert abs(there.modified_s - SystemClock().wall_s()) < 60
    assert there.parts_count is None
    sent = proxy.seen("PutObject", name.key)[0]
    assert sent.headers["x-tiergate-via"] == "node-1"
    assert sent.headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
    assert sent.body_sha256 == hashlib.sha256(data).hexdigest()
    assert "x-amz-version-id" not in sent.headers


@pytest.mark.parametrize("key", STRANGE_KEYS, ids=lambda key: ascii(key)[:24])
async def test_strange_key_arrives_byte_for_byte(origin: OriginClient, proxy: FaultyOrigin, key: str) -> None:
    allowed = b"-_.~/" + bytes(c for c in range(128) if chr(c).isalnum())
    encoded = "".join(chr(c) if c in allowed else f"%{c:02X}" for c in key.encode())
    # Not every server can hold every key; what matters is what reached it.
    with suppress(OriginRefusedError):
        await origin.put_object(ObjectName(BUCKET, key), 2, chunks_of(b"ok"), {})

    (sent,) = proxy.seen("PutObject")
    assert sent.raw_target == f"/{BUCKET}/{encoded}"


@pytest.mark.parametrize("key", STRANGE_KEYS[:7], ids=lambda key: ascii(key)[:24])
async def test_strange_key_is_put_listed_read_and_deleted(origin: OriginClient, boto: Any, key: str) -> None:
    name = ObjectName(BUCKET, f"strange/{key}")
    await put(origin, name, b"bytes of " + key.encode())

    assert boto.get_object(Bucket=BUCKET, Key=name.key)["Body"].read() == b"bytes of " + key.encode()
    page = await origin.list_objects(BUCKET, name.key)
    assert [entry.key for entry in page.entries] == [name.key]
    assert await get(origin, name, 0, 5) == b"bytes"
    await origin.delete_object(name)
    assert await origin.head_object(name) is None


async def test_empty_object_is_put_and_read(origin: OriginClient, request: pytest.FixtureRequest) -> None:
    name = name_of(request)
    await put(origin, name, b"")

    there = await origin.head_object(name)
    assert there is not None
    assert there.size_bytes == 0
    assert await get(origin, name, 0, 0) == b""


async def test_head_of_missing_key_is_none(origin: OriginClient) -> None:
    assert await origin.head_object(ObjectName(BUCKET, "never")) is None


async def test_head_in_missing_bucket_is_refused(origin: OriginClient) -> None:
    with pytest.raises(OriginRefusedError) as refused:
        await origin.head_object(ObjectName("no-such-bucket-here", "key"))
    assert (refused.value.status, refused.value.code) == (404, "NoSuchBucket")


async def test_get_range_gives_exactly_that(origin: OriginClient, request: pytest.FixtureRequest) -> None:
    name = name_of(request)
    data = bytes(range(256)) * 4000
    etag = await put(origin, name, data)

    async with origin.get_object(name, 1000, 300_000, etag) as (there, pieces):
        got = b"".join([piece async for piece in pieces])

    assert got == data[1000:300_000]
    assert (there.size_bytes, there.etag) == (len(data), etag)


async def test_get_with_stale_etag_is_refused(origin: OriginClient, request: pytest.FixtureRequest) -> None:
    name = name_of(request)
    await put(origin, name, b"new")
    with pytest.raises(OriginRefusedError) as refused:
        async with origin.get_object(name, 0, 3, "0" * 32):
            pytest.fail("the condition was ignored")
    assert refused.value.status == 412


async def test_get_past_the_end_is_refused(origin: OriginClient, request: pytest.FixtureRequest) -> None:
    name = name_of(request)
    await put(origin, name, b"short")
    with pytest.raises(OriginRefusedError) as refused:
        async with origin.get_object(name, 10, 20):
            pytest.fail("the range was ignored")
    assert (refused.value.status, refused.value.code) == (416, "InvalidRange")


async def test_get_of_missing_key_is_refused(origin: OriginClient) -> None:
    with pytest.raises(OriginRefusedError) as refused:
        async with origin.get_object(ObjectName(BUCKET, "never"), 0, 1):
            pytest.fail("there is no such key")
    assert (refused.value.status, refused.value.code) == (404, "NoSuchKey")


async def test_leaving_a_body_early_does_not_disturb_the_next_call(
    origin: OriginClient, request: pytest.FixtureRequest
) -> None:
    name = name_of(request)
    data = bytes(4 << 20)
    await put(origin, name, data)
    async with origin.get_object(name, 0, len(data)) as (_, pieces):
        assert await anext(pieces)
    assert await get(origin, name, 5, 10) == bytes(5)


async def test_conditional_put_on_absent_key_then_on_present_key(
    origin: OriginClient, request: pytest.FixtureRequest
) -> None:
    name = name_of(request)
    await origin.put_object(name, 1, chunks_of(b"a"), {}, Condition.if_absent())
    with pytest.raises(OriginRefusedError) as refused:
        await origin.put_object(name, 1, chunks_of(b"b"), {}, Condition.if_absent())
    assert (refused.value.status, refused.value.code) == (412, "PreconditionFailed")
    assert await get(origin, name, 0, 1) == b"a"


async def test_conditional_put_over_known_version_then_over_another(
    origin: OriginClient, request: pytest.FixtureRequest
) -> None:
    name = name_of(request)
    first = await put(origin, name, b"a")
    await origin.put_object(name, 1, chunks_of(b"b"), {}, Condition.if_match(first))
    with pytest.raises(OriginRefusedError) as refused:
        await origin.put_object(name, 1, chunks_of(b"c"), {}, Condition.if_match(first))
    assert refused.value.status == 412
    assert await get(origin, name, 0, 1) == b"b"


async def test_conditions_switched_off_are_not_sent(proxy: FaultyOrigin, request: pytest.FixtureRequest) -> None:
    name = name_of(request)
    settings = OriginSettings(endpoint=proxy.endpoint, conditional_writes=ConditionalWrites.OFF)
    async with OriginClient(settings, "node-1", SystemClock()) as origin:
        await put(origin, name, b"a")
        await origin.put_object(name, 1, chunks_of(b"b"), {}, Condition.if_absent())
        assert await get(origin, name, 0, 1) == b"b"


async def test_multipart_upload_from_begin_to_end(
    origin: OriginClient, proxy: FaultyOrigin, server: ProcessOrigin, request: pytest.FixtureRequest
) -> None:
    name = name_of(request)
    first, last = bytes(range(256)) * (PART_BYTES // 256), b"the end"
    upload_id = await origin.create_multipart_upload(name, {"content-type": "x/y", "x-amz-meta-a": "b"})

    etags = await asyncio.gather(
        origin.upload_part(name, upload_id, 1, len(first), chunks_of(first), {}),
        origin.upload_part(name, upload_id, 2, len(last), chunks_of(last), {}),
    )
    listed = await origin.list_parts(name, upload_id)
    uploads = await origin.list_uploads(BUCKET, name.key)
    parts = [(1, etags[0]), (2, etags[1])]
    answer = await origin.complete_multipart_upload(name, upload_id, parts, {}, Condition.if_absent())

    assert listed == [(1, etags[0], len(first)), (2, etags[1], len(last))]
    assert [(key, found) for key, found, _ in uploads] == [(name.key, upload_id)]
    if not isinstance(server, MotoOrigin):  # moto says 2010 for all uploads.
        assert abs(uploads[0][2] - SystemClock().wall_s()) < 60
    assert answer.etag.endswith("-2")
    there = await origin.head_object(name)
    assert there is not None
    assert (there.etag, there.size_bytes) == (answer.etag, len(first) + len(last))
    assert there.parts_count == 2
    assert (there.headers["content-type"], there.metadata) == ("x/y", {"a": "b"})
    assert await get(origin, name, len(first) - 3, len(first) + 7) == first[-3:] + last
    (sent,) = [each for each in proxy.seen("UploadPart") if each.query["partNumber"] == "1"]
    assert sent.body_sha256 == hashlib.sha256(first).hexdigest()


async def test_aborted_upload_is_unknown_and_may_be_aborted_again(
    origin: OriginClient, server: ProcessOrigin, request: pytest.FixtureRequest
) -> None:
    name = name_of(request)
    upload_id = await origin.create_multipart_upload(name, {})
    await origin.abort_multipart_upload(name, upload_id)
    await origin.abort_multipart_upload(name, upload_id)
    assert await origin.list_parts(name, upload_id) is None
    assert await origin.list_uploads(BUCKET, name.key) == []
    if isinstance(server, MotoOrigin):
        return  # moto fails with 500 on completing an unknown upload.
    with pytest.raises(OriginRefusedError) as refused:
        await origin.complete_multipart_upload(name, upload_id, [(1, "0" * 32)], {})
    assert refused.value.code == "NoSuchUpload"


async def test_delete_of_missing_key_is_fine(origin: OriginClient) -> None:
    await origin.delete_object(ObjectName(BUCKET, "never"))


async def test_listing_page_by_page_has_everything_once(origin: OriginClient) -> None:
    keys = [f"list/{letter}/{number}" for letter in "abc" for number in range(3)] + ["list/z"]
    for key in keys:
        await put(origin, ObjectName(BUCKET, key), key.encode())

    found: list[str] = []
    after = ""
    while True:
        page = await origin.list_objects(BUCKET, "list/", "", after, 4)
        found += [entry.key for entry in page.entries]
        if not page.is_truncated:
            break
        after = page.last_key
    assert found == keys
    entry = page.entries[-1]
    assert (entry.size_bytes, entry.etag) == (6, hashlib.md5(b"list/z").hexdigest())
    assert abs(entry.modified_s - SystemClock().wall_s()) < 120


async def test_listing_with_delimiter_page_by_page_has_each_prefix_once(origin: OriginClient) -> None:
    for key in ("roll/a/1", "roll/a/2", "roll/b/1", "roll/c", "roll/d/1"):
        await put(origin, ObjectName(BUCKET, key), b"x")

    found: list[str] = []
    after = ""
    while True:
        page = await origin.list_objects(BUCKET, "roll/", "/", after, 1)
        found += [*page.common_prefixes, *(entry.key for entry in page.entries)]
        if not page.is_truncated:
            break
        after = page.last_key
    assert found == ["roll/a/", "roll/b/", "roll/c", "roll/d/"]


async def test_listing_of_missing_bucket_is_refused(origin: OriginClient) -> None:
    with pytest.raises(OriginRefusedError) as refused:
        await origin.list_objects("no-such-bucket-here", "")
    assert refused.value.code == "NoSuchBucket"


async def test_bucket_is_described_and_versioning_seen(origin: OriginClient, boto: Any) -> None:
    plain = await origin.get_bucket(BUCKET, 12.0)
    assert plain is not None
    assert (plain.name, plain.versioned, plain.learnt_s) == (BUCKET, False, 12.0)
    assert await origin.get_bucket("no-such-bucket-here", 12.0) is None
    for status in ("Enabled", "Suspended"):
        boto.create_bucket(Bucket="versioned-" + status.lower())
        boto.put_bucket_versioning(Bucket="versioned-" + status.lower(), VersioningConfiguration={"Status": status})
        bucket = await origin.get_bucket("versioned-" + status.lower(), 0.0)
        assert bucket is not None
        assert bucket.versioned


async def test_checksum_sent_with_the_body_is_kept(origin: OriginClient, request: pytest.FixtureRequest) -> None:
    name = name_of(request)
    value = base64.b64encode(zlib.crc32(b"data").to_bytes(4, "big")).decode()
    headers = {"x-amz-checksum-crc32": value, "x-amz-sdk-checksum-algorithm": "CRC32"}
    await origin.put_object(name, 4, chunks_of(b"data"), headers)
    there = await origin.head_object(name)
    assert there is not None
    assert there.checksums.get("crc32") == value


async def test_wrong_secret_is_a_matter_of_credentials(
    proxy: FaultyOrigin, server: ProcessOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isinstance(server, MotoOrigin):
        pytest.skip("moto checks no signatures")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    async with OriginClient(OriginSettings(endpoint=proxy.endpoint), "node-1", SystemClock()) as origin:
        with pytest.raises(OriginCredentialsError):
            await origin.put_object(ObjectName(BUCKET, "key"), 1, chunks_of(b"x"), {})
        with pytest.raises(OriginCredentialsError):
            await origin.head_object(ObjectName(BUCKET, "key"))
    assert len(proxy.seen("PutObject")) == 1


async def test_stock_client_works_through_the_proxy(proxy: FaultyOrigin, server: ProcessOrigin) -> None:
    def work() -> bytes:
        client = s3_client(proxy.endpoint, server.access_key, server.secret_key)
        try:
            client.put_object(Bucket=BUCKET, Key="stock +%/é", Body=b"s" * 200_000)
            body: bytes = client.get_object(Bucket=BUCKET, Key="stock +%/é")["Body"].read()
            return body
        finally:
            client.close()

    assert await asyncio.to_thread(work) == b"s" * 200_000
    assert [each.operation for each in proxy.requests] == ["PutObject", "GetObject"]
    assert {each.key for each in proxy.requests} == {"stock +%/é"}
