"""What a request claims of its body, in good and bad cases."""

import base64
import hashlib
import zlib

import pytest

from tiergate.errors import InvariantError, RequestError
from tiergate.s3.bodyverifier import BodyVerifier, unknown_algorithms
from tiergate.s3.sigv4 import STREAMING_SIGNED, STREAMING_UNSIGNED_TRAILER, UNSIGNED_PAYLOAD

BODY = b"the body"
MD5 = base64.b64encode(hashlib.md5(BODY).digest()).decode()
SHA256 = base64.b64encode(hashlib.sha256(BODY).digest()).decode()
SHA256_HEX = hashlib.sha256(BODY).hexdigest()
CRC32 = base64.b64encode(zlib.crc32(BODY).to_bytes(4, "big")).decode()
CRC32_NAME = "x-amz-checksum-crc32"
Headers = list[tuple[str, str]]
CRC32_HEADER = ("X-Amz-Checksum-CRC32", CRC32)
CRC32_TRAILER = ("x-amz-trailer", CRC32_NAME)
SDK_CRC32 = ("x-amz-sdk-checksum-algorithm", "CRC32")

GOOD: dict[str, tuple[Headers, str, dict[str, str], dict[str, str]]] = {
    "nothing": ([], UNSIGNED_PAYLOAD, {}, {}),
    "payload hash": ([], SHA256_HEX, {}, {}),
    "payload hash in upper case": ([], SHA256_HEX.upper(), {}, {}),
    "md5": ([("Content-MD5", MD5)], UNSIGNED_PAYLOAD, {}, {}),
    "crc32": ([CRC32_HEADER], UNSIGNED_PAYLOAD, {}, {"crc32": CRC32}),
    "boto3 over http": ([CRC32_HEADER, SDK_CRC32], SHA256_HEX, {}, {"crc32": CRC32}),
    "boto3 over https": (
        [CRC32_TRAILER, SDK_CRC32],
        STREAMING_UNSIGNED_TRAILER,
        {CRC32_NAME: CRC32},
        {"crc32": CRC32},
    ),
    "sha256 twice": ([("x-amz-checksum-sha256", SHA256)], SHA256_HEX, {}, {"sha256": SHA256}),
    "everything": ([CRC32_HEADER, SDK_CRC32, ("content-md5", MD5)], SHA256_HEX, {}, {"crc32": CRC32}),
    "headers that are no values": (
        [
            ("x-amz-checksum-type", "FULL_OBJECT"),
            ("x-amz-checksum-mode", "ENABLED"),
            ("x-amz-trailer", "x-other"),
        ],
        UNSIGNED_PAYLOAD,
        {},
        {},
    ),
    "signed chunks without a trailer": ([CRC32_HEADER], STREAMING_SIGNED, {}, {"crc32": CRC32}),
}


@pytest.mark.parametrize("case", GOOD)
def test_finish_claims_that_hold_proved(case: str) -> None:
    headers, payload, trailers, proved = GOOD[case]
    verifier = BodyVerifier(headers, payload)
    verifier.update(BODY[:3])
    verifier.update(memoryview(bytearray(BODY[3:])))
    assert verifier.finish(trailers) == proved
    assert verifier.algorithm == next(iter(proved), "")


@pytest.mark.parametrize("case", [case for case, (headers, payload, *_) in GOOD.items() if headers or payload])
def test_finish_another_body_refused_whenever_something_was_claimed(case: str) -> None:
    headers, payload, trailers, _ = GOOD[case]
    verifier = BodyVerifier(headers, payload)
    verifier.update(b"another body")
    if case in ("nothing", "headers that are no values"):
        assert verifier.finish(trailers) == {}
        return
    with pytest.raises(RequestError) as caught:
        verifier.finish(trailers)
    hashed = len(payload) == 64
    assert caught.value.code == ("XAmzContentSHA256Mismatch" if hashed else "BadDigest")


AT_ONCE: dict[str, tuple[Headers, str, str]] = {
    "md5 that is no base64": ([("Content-MD5", "%%%")], UNSIGNED_PAYLOAD, "InvalidDigest"),
    "md5 too short": ([("Content-MD5", "AAAA")], UNSIGNED_PAYLOAD, "InvalidDigest"),
    "md5 empty": ([("Content-MD5", "")], UNSIGNED_PAYLOAD, "InvalidDigest"),
    "md5 in hex": ([("Content-MD5", hashlib.md5(BODY).hexdigest())], UNSIGNED_PAYLOAD, "InvalidDigest"),
    "md5 twice": ([("Content-MD5", MD5), ("Content-MD5", MD5)], UNSIGNED_PAYLOAD, "InvalidDigest"),
    "crc32 that is no base64": ([(CRC32_NAME, "!")], UNSIGNED_PAYLOAD, "InvalidRequest"),
    "crc32 of another size": ([(CRC32_NAME, "AAAAAAAAAAA=")], UNSIGNED_PAYLOAD, "InvalidRequest"),
    "two algorithms": (
        [CRC32_HEADER, ("x-amz-checksum-sha256", SHA256)],
        UNSIGNED_PAYLOAD,
        "InvalidRequest",
    ),
    "one algorithm twice": ([CRC32_HEADER, CRC32_HEADER], UNSIGNED_PAYLOAD, "InvalidRequest"),
    "an unknown algorithm": ([("x-amz-checksum-crc7", "AA==")], UNSIGNED_PAYLOAD, "InvalidRequest"),
    "header and trailer": ([CRC32_HEADER, CRC32_TRAILER], STREAMING_UNSIGNED_TRAILER, "InvalidRequest"),
    "two trailers": (
        [("x-amz-trailer", f"{CRC32_NAME},x-amz-checksum-sha1")],
        STREAMING_UNSIGNED_TRAILER,
        "InvalidRequest",
    ),
    "an unknown trailer": (
        [("x-amz-trailer", "x-amz-checksum-crc7")],
        STREAMING_UNSIGNED_TRAILER,
        "InvalidRequest",
    ),
    "a trailer of a body without one": ([CRC32_TRAILER], UNSIGNED_PAYLOAD, "MalformedTrailerError"),
    "a trailer of signed chunks without one": ([CRC32_TRAILER], STREAMING_SIGNED, "MalformedTrailerError"),
    "an sdk algorithm alone": ([SDK_CRC32], UNSIGNED_PAYLOAD, "InvalidRequest"),
    "another sdk algorithm": (
        [CRC32_HEADER, ("x-amz-sdk-checksum-algorithm", "SHA1")],
        UNSIGNED_PAYLOAD,
        "InvalidRequest",
    ),
    "an unknown sdk algorithm": (
        [CRC32_HEADER, ("x-amz-sdk-checksum-algorithm", "CRC7")],
        UNSIGNED_PAYLOAD,
        "InvalidRequest",
    ),
}


@pytest.mark.parametrize("case", AT_ONCE)
def test_new_verifier_of_malformed_claims_refused(case: str) -> None:
    headers, payload, code = AT_ONCE[case]
    with pytest.raises(RequestError) as caught:
        BodyVerifier(headers, payload)
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("trailers", "code"),
    [
        ({}, "MalformedTrailerError"),
        ({CRC32_NAME: "AAAAAA=="}, "BadDigest"),
        ({CRC32_NAME: "AAAA"}, "InvalidRequest"),
        ({"x-amz-checksum-sha256": SHA256}, "MalformedTrailerError"),
    ],
)
def test_finish_wrong_trailer_refused(trailers: dict[str, str], code: str) -> None:
    verifier = BodyVerifier([CRC32_TRAILER], STREAMING_UNSIGNED_TRAILER)
    assert verifier.trailer == CRC32_NAME
    verifier.update(BODY)
    with pytest.raises(RequestError) as caught:
        verifier.finish(trailers)
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("headers", "payload", "also", "expensive"),
    [
        ([], UNSIGNED_PAYLOAD, (), False),
        ([CRC32_HEADER], UNSIGNED_PAYLOAD, ("crc64nvme",), False),
        ([CRC32_HEADER], SHA256_HEX, (), True),
        ([("Content-MD5", MD5)], UNSIGNED_PAYLOAD, (), True),
        ([], UNSIGNED_PAYLOAD, ("md5",), True),
    ],
)
def test_expensive_only_for_slow_hashes(headers: Headers, payload: str, also: tuple[str, ...], expensive: bool) -> None:
    assert BodyVerifier(headers, payload, also=also).expensive is expensive


def test_also_computed_and_returned() -> None:
    verifier = BodyVerifier([CRC32_HEADER], SHA256_HEX, also=("md5",))
    verifier.update(BODY)
    assert verifier.finish() == {"crc32": CRC32, "md5": MD5}
    assert verifier.digest("md5") == hashlib.md5(BODY).digest()


def test_finish_expensive_half_forgotten_invariant() -> None:
    verifier = BodyVerifier([("Content-MD5", MD5)], UNSIGNED_PAYLOAD)
    verifier.update_cheap(BODY)
    verifier.update_expensive(BODY[1:])
    with pytest.raises(InvariantError):
        verifier.finish()


def test_object_checksums_false_only_the_document_checked() -> None:
    headers = [(CRC32_NAME, "AAAAAA=="), ("Content-MD5", MD5), SDK_CRC32]
    verifier = BodyVerifier(headers, SHA256_HEX, object_checksums=False)
    verifier.update(BODY)
    assert verifier.finish() == {}


def test_unknown_algorithms_found_wherever_named() -> None:
    assert unknown_algorithms([CRC32_HEADER, CRC32_TRAILER, SDK_CRC32, ("x-amz-checksum-type", "COMPOSITE")]) == set()
    assert unknown_algorithms([("X-Amz-Checksum-CRC7", "x")]) == {"crc7"}
    assert unknown_algorithms([("x-amz-trailer", "a, x-amz-checksum-crc8")]) == {"crc8"}
    assert unknown_algorithms([("x-amz-sdk-checksum-algorithm", "CRC9")]) == {"crc9"}
    assert unknown_algorithms([("x-amz-checksum-algorithm", "BLAKE3")]) == {"blake3"}
