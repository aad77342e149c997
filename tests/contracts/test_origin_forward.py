"""The forwarder: what the client sent goes on exactly, what the origin said comes back exactly."""

import asyncio
import base64
import gzip
import hashlib
import zlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.contracts.conftest import BUCKET

from tiergate.clock import SystemClock
from tiergate.errors import OriginCredentialsError, OriginTemporaryError, RequestError
from tiergate.origin.client import OriginClient, OriginSettings
from tiergate.origin.forward import ForwardAnswer, Forwarder, ForwardRequest, Trailer
from tiergate.testing.origins import (
    Answer,
    Cut,
    FaultyOrigin,
    Truncate,
)


@pytest.fixture
async def forwarder(proxy: FaultyOrigin, keys: None) -> AsyncIterator[Forwarder]:
    settings = OriginSettings(endpoint=proxy.endpoint, region="us-east-1", backoff_base_s=0.01)
    async with OriginClient(settings, "node-1", SystemClock()) as client:
        yield Forwarder(client.channel)


async def whole(answer: ForwardAnswer) -> bytes:
    try:
        return b"".join([piece async for piece in answer.pieces()])
    finally:
        await answer.close()


async def pieces_of(data: bytes, piece_bytes: int = 10_000) -> AsyncIterator[bytes | memoryview]:
    for start in range(0, len(data), piece_bytes):
        yield memoryview(data)[start : start + piece_bytes]


def values(answer: ForwardAnswer, name: str) -> list[str]:
    return [value for known, value in answer.headers if known.lower() == name]


async def test_headers_and_query_go_on_without_the_client_s_signature(
    forwarder: Forwarder, proxy: FaultyOrigin
) -> None:
    request = ForwardRequest(
        "GET",
        BUCKET,
        "",
        "prefix=a+b%2fc&list-type=2",
        (
            ("Host", "gateway:9000"),
            ("Authorization", "AWS4-HMAC-SHA256 Credential=client/x"),
            ("X-Amz-Date", "20200101T000000Z"),
            ("X-Amz-Security-Token", "client's"),
            ("X-Amz-Content-Sha256", "client's"),
            ("X-Amz-Expected-Bucket-Owner", "000000000000"),
            ("Expect", "100-continue"),
            ("Connection", "keep-alive, X-Hop"),
            ("X-Hop", "one"),
            ("TE", "trailers"),
            ("Accept-Encoding", "identity"),
            ("X-Unknown", "kept"),
        ),
    )
    answer = await forwarder.forward(request)
    assert b"<ListBucketResult" in await whole(answer)

    (sent,) = proxy.requests
    assert sent.raw_target == f"/{BUCKET}?prefix=a%20b%2Fc&list-type=2"
    assert sent.headers["host"] == proxy.endpoint.removeprefix("http://")
    assert "client" not in sent.headers["authorization"]
    assert sent.headers["x-tiergate-via"] == "node-1"
    assert sent.headers["x-unknown"] == "kept"
    assert sent.headers["x-amz-expected-bucket-owner"] == "000000000000"
    assert sent.headers["accept-encoding"] == "identity"
    assert not {"expect", "x-hop", "te", "connection", "x-amz-security-token"} & sent.headers.keys()
    assert not {"connection", "transfer-encoding"} & {name.lower() for name, _ in answer.headers}


async def test_stream_goes_on_plain_with_its_length(forwarder: Forwarder, proxy: FaultyOrigin, boto: Any) -> None:
    data = bytes(range(256)) * 1000
    headers = (
        ("Content-Type", "x/y"),
        ("Content-Encoding", "aws-chunked,gzip"),
        ("x-amz-decoded-content-length", str(len(data))),
        ("x-amz-trailer", "x-amz-checksum-crc32"),
        ("x-amz-sdk-checksum-algorithm", "CRC32"),
        ("x-amz-meta-a", "1"),
    )
    request = ForwardRequest("PUT", BUCKET, "plain", "", headers, len(data), pieces_of(data))
    answer = await forwarder.forward(request)
    await whole(answer)

    assert answer.status == 200
    (sent,) = proxy.seen("PutObject")
    assert sent.headers["content-length"] == str(len(data))
    assert sent.headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
    assert sent.headers["content-encoding"] == "gzip"
    assert not {"x-amz-trailer", "x-amz-decoded-content-length"} & sent.headers.keys()
    assert sent.body_sha256 == hashlib.sha256(data).hexdigest()
    there = boto.get_object(Bucket=BUCKET, Key="plain")
    assert (there["Body"].read(), there["ContentEncoding"]) == (data, "gzip")


@pytest.mark.parametrize("size_bytes", [0, 1, 65536, 200_000])
async def test_stream_with_trailer_is_framed_anew(
    forwarder: Forwarder, proxy: FaultyOrigin, boto: Any, size_bytes: int
) -> None:
    data = (bytes(range(256)) * 1000)[:size_bytes]
    key = f"framed-{size_bytes}"

    async def checksum() -> str:
        return base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()

    request = ForwardRequest(
        "PUT",
        BUCKET,
        key,
        "",
        (("Content-Encoding", "aws-chunked"), ("x-amz-sdk-checksum-algorithm", "CRC32")),
        size_bytes,
        pieces_of(data, 7_001),
        Trailer("x-amz-checksum-crc32", checksum),
    )
    answer = await forwarder.forward(request)
    body = await whole(answer)

    assert answer.status == 200, body
    (sent,) = proxy.seen("PutObject")
    assert sent.headers["x-amz-content-sha256"] == "STREAMING-UNSIGNED-PAYLOAD-TRAILER"
    assert sent.headers["x-amz-trailer"] == "x-amz-checksum-crc32"
    assert sent.headers["x-amz-decoded-content-length"] == str(size_bytes)
    assert sent.headers["content-encoding"] == "aws-chunked"
    assert sent.body_bytes == int(sent.headers["content-length"])
    assert boto.get_object(Bucket=BUCKET, Key=key)["Body"].read() == data


async def test_stream_without_length_is_refused(forwarder: Forwarder, proxy: FaultyOrigin) -> None:
    with pytest.raises(RequestError) as refused:
        await forwarder.forward(ForwardRequest("PUT", BUCKET, "key", body=pieces_of(b"x")))
    assert refused.value.code == "MissingContentLength"
    assert proxy.requests == []


async def test_answer_comes_back_compressed_with_its_headers_and_without_the_stamp(
    forwarder: Forwarder, boto: Any
) -> None:
    data = gzip.compress(b"text " * 1000)
    boto.put_object(
        Bucket=BUCKET,
        Key="dir//zipped %2F+é",
        Body=data,
        ContentEncoding="gzip",
        Metadata={"tiergate": "1;uid;etag;12;0123456789ab", "mine": "kept"},
    )
    answer = await forwarder.forward(ForwardRequest("GET", BUCKET, "dir//zipped %2F+é"))
    assert await whole(answer) == data
    assert values(answer, "content-encoding") == ["gzip"]
    assert values(answer, "content-length") == [str(len(data))]
    assert values(answer, "x-amz-meta-mine") == ["kept"]
    assert values(answer, "x-amz-meta-tiergate") == []


async def test_head_answer_keeps_its_length(forwarder: Forwarder, boto: Any) -> None:
    boto.put_object(Bucket=BUCKET, Key="headed", Body=b"x" * 1234)
    answer = await forwarder.forward(ForwardRequest("HEAD", BUCKET, "headed"))
    assert await whole(answer) == b""
    assert (answer.status, values(answer, "content-length")) == (200, ["1234"])


async def test_copy_is_done_by_the_origin(forwarder: Forwarder, boto: Any) -> None:
    boto.put_object(Bucket=BUCKET, Key="source", Body=b"copied")
    headers = (("x-amz-copy-source", f"/{BUCKET}/source"),)
    answer = await forwarder.forward(ForwardRequest("PUT", BUCKET, "target", "", headers))
    assert b"CopyObjectResult" in await whole(answer)
    assert boto.get_object(Bucket=BUCKET, Key="target")["Body"].read() == b"copied"


async def test_small_body_is_signed_and_sent(forwarder: Forwarder, boto: Any, proxy: FaultyOrigin) -> None:
    boto.put_object(Bucket=BUCKET, Key="tagged", Body=b"")
    document = b"<Tagging><TagSet><Tag><Key>k</Key><Value>v</Value></Tag></TagSet></Tagging>"
    md5 = base64.b64encode(hashlib.md5(document).digest()).decode()
    request = ForwardRequest("PUT", BUCKET, "tagged", "tagging", (("Content-MD5", md5),), body=document)
    answer = await forwarder.forward(request)
    await whole(answer)
    assert answer.status == 200
    assert proxy.seen("PutObjectTagging")[0].raw_target.endswith("?tagging")
    assert boto.get_object_tagging(Bucket=BUCKET, Key="tagged")["TagSet"] == [{"Key": "k", "Value": "v"}]


async def test_refusal_comes_back_as_it_is(forwarder: Forwarder) -> None:
    answer = await forwarder.forward(ForwardRequest("GET", BUCKET, "never"))
    assert answer.status == 404
    assert b"<Code>NoSuchKey</Code>" in await whole(answer)


async def test_access_denied_comes_back_but_refused_keys_of_ours_do_not(
    forwarder: Forwarder, proxy: FaultyOrigin
) -> None:
    proxy.inject(Answer(403, "AccessDenied"), operation="GetObject")
    answer = await forwarder.forward(ForwardRequest("GET", BUCKET, "key"))
    assert (answer.status, b"AccessDenied" in await whole(answer)) == (403, True)

    proxy.inject(Answer(403, "InvalidAccessKeyId"), operation="GetObject")
    with pytest.raises(OriginCredentialsError):
        await forwarder.forward(ForwardRequest("GET", BUCKET, "key"))


async def test_only_what_can_be_repeated_is_tried_again(forwarder: Forwarder, proxy: FaultyOrigin) -> None:
    proxy.inject(Answer(503, "SlowDown"), operation="GetObject")
    answer = await forwarder.forward(ForwardRequest("GET", BUCKET, "never"))
    await whole(answer)
    assert answer.status == 404
    assert len(proxy.seen("GetObject")) == 2

    proxy.inject(Answer(503, "SlowDown"), operation="PutObject", times=2)
    stream = ForwardRequest("PUT", BUCKET, "key", "", (), 1, pieces_of(b"x"))
    conditional = ForwardRequest("PUT", BUCKET, "key", "", (("If-None-Match", "*"),), body=b"x")
    for request in (stream, conditional):
        answer = await forwarder.forward(request)
        assert (answer.status, b"SlowDown" in await whole(answer)) == (503, True)
    proxy.inject(Answer(500, "InternalError"), operation="CreateMultipartUpload")
    answer = await forwarder.forward(ForwardRequest("POST", BUCKET, "key", "uploads"))
    await whole(answer)
    assert answer.status == 500
    assert len(proxy.seen("PutObject")) == 2
    assert len(proxy.seen("CreateMultipartUpload")) == 1


async def test_last_try_s_fault_is_the_answer(forwarder: Forwarder, proxy: FaultyOrigin) -> None:
    proxy.inject(Answer(503, "SlowDown"), times=None)
    answer = await forwarder.forward(ForwardRequest("GET", BUCKET, "key"))
    assert (answer.status, b"SlowDown" in await whole(answer)) == (503, True)
    assert len(proxy.requests) == 5


async def test_connection_that_breaks_under_a_stream_is_temporary(forwarder: Forwarder, proxy: FaultyOrigin) -> None:
    proxy.inject(Cut(), operation="PutObject")
    with pytest.raises(OriginTemporaryError):
        await forwarder.forward(ForwardRequest("PUT", BUCKET, "key", "", (), 1, pieces_of(b"x")))
    assert len(proxy.seen("PutObject")) == 1


async def test_answer_that_breaks_off_is_an_error_not_an_end(
    forwarder: Forwarder, proxy: FaultyOrigin, boto: Any
) -> None:
    boto.put_object(Bucket=BUCKET, Key="broken", Body=b"x" * 100_000)
    proxy.inject(Truncate(50_000), operation="GetObject")
    answer = await forwarder.forward(ForwardRequest("GET", BUCKET, "broken"))
    with pytest.raises(OriginTemporaryError):
        await whole(answer)


async def test_client_s_broken_body_never_lands(forwarder: Forwarder, proxy: FaultyOrigin, boto: Any) -> None:
    async def broken() -> AsyncIterator[bytes | memoryview]:
        yield b"half"
        raise RequestError("BadDigest")

    boto.put_object(Bucket=BUCKET, Key="whole", Body=b"old")
    with pytest.raises(RequestError):
        await forwarder.forward(ForwardRequest("PUT", BUCKET, "whole", "", (), 8, broken()))
    await asyncio.to_thread(proxy.wait_finished, "PutObject", "whole")
    assert boto.get_object(Bucket=BUCKET, Key="whole")["Body"].read() == b"old"
