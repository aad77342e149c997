"""Who may ask: signatures in headers, in URLs and in chunks, right and wrong, on the wire."""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import pytest
from tests.conformance.gateway import CLIENT
from tests.conformance.rows import Row, answered, check
from tests.conformance.wire import (
    STREAMING,
    STREAMING_TRAILER,
    UNSIGNED,
    Ask,
    Bucket,
    Identity,
    crc32_of,
    framed_signed,
    seal,
)

BODY = b"0123456789" * 3000
CHUNKS = (BODY[:8192], BODY[8192:20000], BODY[20000:])
STRANGER = Identity("AKIDSTRANGER", "the/secret+of=clients")
FORGER = Identity(CLIENT.access_key, "guessed")
DENIED, MISMATCH = (403, "AccessDenied"), (403, "SignatureDoesNotMatch")


def get(**more: object) -> Ask:
    return replace(Ask("GET", "/conformance/signed"), **more)  # type: ignore[arg-type]


def put(**more: object) -> Ask:
    return replace(Ask("PUT", "/conformance/signed-put", body=BODY), **more)  # type: ignore[arg-type]


ROWS = [
    Row("right", get(), 200),
    Row("right_clock_14_minutes_slow", get(skew=timedelta(minutes=-14)), 200),
    Row("wrong_secret", get(identity=FORGER), *MISMATCH),
    Row("unknown_access_key", get(identity=STRANGER), 403, "InvalidAccessKeyId"),
    Row("clock_16_minutes_slow", get(skew=timedelta(minutes=-16)), 403, "RequestTimeTooSkewed"),
    Row("clock_16_minutes_fast", get(skew=timedelta(minutes=16)), 403, "RequestTimeTooSkewed"),
    Row("anonymous_get", get(signed=False), *DENIED),
    Row("anonymous_head", get(method="HEAD", signed=False), *DENIED),
    Row("anonymous_put", put(signed=False), *DENIED),
    Row("unsigned_amz_header", get(late=[("x-amz-meta-later", "1")]), *DENIED),
    Row(
        "garbage_authorization",
        get(signed=False, late=[("Authorization", "AWS4-HMAC-SHA256 nonsense")]),
        400,
        "AuthorizationHeaderMalformed",
    ),
    Row("empty_authorization", get(signed=False, late=[("Authorization", " ")]), *DENIED),
    Row("basic_authorization", get(signed=False, late=[("Authorization", "Basic dTpw")]), 400, "InvalidArgument"),
    Row("presigned", get(presign_s=60), 200),
    Row("presigned_put", put(presign_s=60), 200),
    Row("presigned_expired", get(presign_s=60, skew=timedelta(minutes=-2)), *DENIED),
    Row("presigned_not_yet", get(presign_s=60, skew=timedelta(minutes=20)), *DENIED),
    Row("presigned_too_long", get(presign_s=604801), 400, "AuthorizationQueryParametersError"),
    Row("presigned_negative", get(presign_s=-1), 400, "AuthorizationQueryParametersError"),
    Row("presigned_by_forger", get(presign_s=60, identity=FORGER), *MISMATCH),
    Row("payload_hash_wrong", put(payload="0" * 64), 400, "XAmzContentSHA256Mismatch"),
    Row("payload_hash_no_hash", put(payload="no-hash"), 400, "InvalidArgument"),
    Row("payload_unsigned", put(payload=UNSIGNED), 200),
    Row(
        "payload_hash_of_document",
        Ask("POST", "/conformance", "delete=", body=b"<Delete/>", payload="1" * 64),
        400,
        "XAmzContentSHA256Mismatch",
    ),
]


@pytest.fixture(scope="module", autouse=True)
def _object(s3: Bucket) -> None:
    s3.put("signed", b"for readers")


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_signature_is_judged(s3: Bucket, row: Row) -> None:
    check(s3, row)


def tampered(ask: Ask, s3: Bucket, change: Callable[[bytes], bytes]) -> Ask:
    """Change the request line after signing."""
    with s3.wire() as wire:
        target = seal(ask, wire.authority, CLIENT).head.split(b" ")[1]
    path, _, query = change(target).decode().partition("?")
    return replace(ask, path=path, query=query, signed=False, presign_s=None)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("key", lambda target: target.replace(b"/signed", b"/signed-put")),
        ("expiry", lambda target: target.replace(b"X-Amz-Expires=60", b"X-Amz-Expires=600")),
        ("parameter", lambda target: target + b"&response-content-type=text%2Fhtml"),
        ("signature", lambda target: target[:-1] + (b"0" if target[-1:] != b"0" else b"1")),
    ],
)
def test_presigned_url_that_was_tampered_with_is_refused(
    s3: Bucket, name: str, change: Callable[[bytes], bytes]
) -> None:
    check(s3, Row(name, tampered(get(presign_s=60), s3, change), *MISMATCH))


def test_presigned_url_for_get_does_not_put(s3: Bucket) -> None:
    for_get = tampered(get(presign_s=60), s3, lambda target: target)
    check(s3, Row("put", replace(for_get, method="PUT", body=b"x"), *MISMATCH))


def streamed(payload: str, **headers: str) -> Ask:
    return Ask(
        "PUT",
        "/conformance/streamed",
        headers={"x-amz-decoded-content-length": str(len(BODY)), **headers},
        payload=payload,
    )


def framed_length(trailers: dict[str, str] | None) -> int:
    sealed = seal(streamed(STREAMING), "h", CLIENT)
    return len(framed_signed(sealed, CHUNKS, trailers))


CHECKSUM = {"x-amz-checksum-crc32": crc32_of(BODY)}


def same(body: bytes) -> bytes:
    return body


SIGNED_CHUNKS: list[tuple[str, dict[str, str] | None, Callable[[bytes], bytes], int, str]] = [
    ("right", None, same, 200, ""),
    ("data_changed", None, lambda body: body.replace(b"0123456789", b"0123456780", 1), *MISMATCH),
    ("signature_changed", None, lambda body: body.replace(b"chunk-signature=", b"chunk-signature=0", 1), *MISMATCH),
    ("signature_missing", None, lambda body: body.replace(b";chunk-signature=", b";chunk-signatur=", 1), *MISMATCH),
    ("trailer_right", CHECKSUM, same, 200, ""),
    ("trailer_changed", CHECKSUM, lambda body: body.replace(b"crc32:", b"crc32:A", 1), *MISMATCH),
    (
        "trailer_signature_missing",
        CHECKSUM,
        lambda body: body.replace(b"x-amz-trailer-signature", b"x-amz-trailer-signaturX", 1),
        400,
        "MalformedTrailerError",
    ),
]


@pytest.mark.parametrize(
    ("name", "trailers", "change", "status", "code"), SIGNED_CHUNKS, ids=[row[0] for row in SIGNED_CHUNKS]
)
def test_signed_chunks_are_judged(
    s3: Bucket, name: str, trailers: dict[str, str] | None, change: Callable[[bytes], bytes], status: int, code: str
) -> None:
    s3.put("streamed", b"before")
    payload = STREAMING_TRAILER if trailers else STREAMING
    ask = streamed(payload, **({"x-amz-trailer": "x-amz-checksum-crc32"} if trailers else {}))
    with s3.wire() as wire:
        ask = replace(ask, length=None)
        template = framed_signed(seal(ask, wire.authority, CLIENT), CHUNKS, trailers)
        extra = len(change(template)) - len(template)
        sealed = wire.begin(replace(ask, late=[("Content-Length", str(len(template) + extra))]))
        wire.pour(change(framed_signed(sealed, CHUNKS, trailers)))
        reply = wire.reply("PUT")
        answered(Row(name, ask, status, code), reply)
    assert s3.get("streamed").body == (BODY if status == 200 else b"before")
