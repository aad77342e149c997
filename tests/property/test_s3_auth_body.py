"""Signatures, framing and checksums under generated input."""

import base64
import hashlib
import zlib
from datetime import UTC, datetime
from itertools import pairwise
from urllib.parse import quote, unquote_to_bytes

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiergate.errors import RequestError
from tiergate.s3.canonical import ChunkSigner, signing_key
from tiergate.s3.checksums import ALGORITHMS, Checksum, full_object
from tiergate.s3.chunked import ChunkedDecoder, encode_chunk, encode_trailer, encoded_length
from tiergate.s3.sigv4 import UNSIGNED_PAYLOAD, Credentials, Head, sign, verify

KEY, SECRET = "AKID", "secret"
NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
HOST = "host:9000"
CRC = "x-amz-checksum-crc32"

keys = st.text(
    st.one_of(st.sampled_from("/+%.;:=&?# aZ~é码\u0000"), st.characters(exclude_categories=["Cs"])),
    min_size=1,
    max_size=20,
)


def signed(method: str, path: str, query: str, headers: dict[str, str]) -> Head:
    target = path + (f"?{query}" if query else "")
    sent = sign(method, f"http://{HOST}{target}", headers, UNSIGNED_PAYLOAD, Credentials(KEY, SECRET), "r", NOW)
    return Head(method, target, [("Host", HOST), *sent.items()])


def accepted(head: Head) -> bool:
    try:
        return verify(head, {KEY: SECRET}.get, NOW.timestamp()) is not None
    except RequestError:
        return False


@given(keys, st.lists(st.tuples(keys, keys), max_size=3))
def test_verify_any_key_and_query_accepted_in_every_encoding(key: str, pairs: list[tuple[str, str]]) -> None:
    path = "/bkt/" + quote(key, safe="/")
    query = "&".join(f"{quote(name, safe='')}={quote(value, safe='')}" for name, value in pairs)
    head = signed("PUT", path, query, {"x-amz-meta-a": "b"})
    assert accepted(head)
    other = "/bkt/" + "".join(f"%{byte:02x}" for byte in key.encode())
    assert accepted(Head("PUT", other + (f"?{query}" if query else ""), head.headers))


def meaning(head: Head) -> tuple[object, ...]:
    """All that a signature must pin down, worked out independently of the code under test."""
    path, _, query = head.raw_target.encode("utf-8", "surrogateescape").partition(b"?")
    pairs = [part.partition(b"=") for part in query.split(b"&")] if query else []
    parameters = sorted(tuple(unquote_to_bytes(text.replace(b"+", b" ")) for text in (n, v)) for n, _, v in pairs)
    # A space after a comma of Authorization means nothing.
    headers = sorted((name.lower(), " ".join(value.replace(", ", ",").split())) for name, value in head.headers)
    return head.method, unquote_to_bytes(path), parameters, headers


@settings(max_examples=600)
@given(st.data())
def test_verify_any_change_of_meaning_refused(data: st.DataObject) -> None:
    head = signed("PUT", "/bkt/a/b%20c+d", "partNumber=1&uploadId=x%2By&acl", {"x-amz-meta-a": "b c", "range": "0-9"})
    texts = [head.method, head.raw_target, *(value for _, value in head.headers)]
    which = data.draw(st.integers(0, len(texts) - 1))
    at = data.draw(st.integers(0, len(texts[which]) - 1))
    new = data.draw(st.sampled_from(["", "%", "/", "+", "a", "0", "&", "=", "%20", "%2F", ";", ","]))
    texts[which] = texts[which][:at] + new + texts[which][at + data.draw(st.integers(0, 1)) :]
    names = [name for name, _ in head.headers]
    changed = Head(texts[0], texts[1], list(zip(names, texts[2:], strict=True)))
    assert accepted(head)
    if meaning(changed) != meaning(head):
        assert not accepted(changed)


def cut(body: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(body), *(at % (len(body) + 1) for at in cuts)})
    return [body[start:end] for start, end in pairwise(edges)]


def build(chunks: list[bytes], trailer: str, signer: ChunkSigner | None) -> bytes:
    if signer is None:
        framed = b"".join(bytes(piece) for chunk in chunks for piece in encode_chunk(chunk))
        return framed + encode_trailer({CRC: trailer})
    wire, previous = b"", signer.seed
    for chunk in [*chunks, b""]:
        previous = signer.chunk(previous, hashlib.sha256(chunk).hexdigest())
        wire += f"{len(chunk):x};chunk-signature={previous}\r\n".encode() + chunk + (b"\r\n" if chunk else b"")
    line = f"{CRC}:{trailer}\n".encode()
    ending = f"x-amz-trailer-signature:{signer.trailer(previous, line)}\r\n\r\n".encode()
    return wire + line.replace(b"\n", b"\r\n") + ending


SIGNER = ChunkSigner("0" * 64, "20261129T120000Z", "20261129/r/s3/aws4_request", signing_key(SECRET, "20261129", "r"))


@given(
    st.lists(st.binary(min_size=1, max_size=60), max_size=4),
    st.lists(st.integers(0, 10_000), max_size=12),
    st.booleans(),
)
def test_decode_any_cut_same_payload(chunks: list[bytes], cuts: list[int], with_signatures: bool) -> None:
    signer = SIGNER if with_signatures else None
    body = b"".join(chunks)
    checksum = base64.b64encode(zlib.crc32(body).to_bytes(4, "big")).decode()
    wire = build(chunks, checksum, signer)
    for pieces in (cut(wire, cuts), [wire[at : at + 1] for at in range(len(wire))]):
        decoder = ChunkedDecoder(len(body), signer, [CRC], min_chunk_bytes=1)
        decoded = b"".join(bytes(part) for piece in pieces for part in decoder.feed(piece))
        decoder.finish()
        assert decoded == body
        assert decoder.trailers == {CRC: checksum}


@given(st.data(), st.lists(st.binary(min_size=1, max_size=30), min_size=1, max_size=3))
def test_decode_signed_any_byte_changed_refused_or_same_payload(data: st.DataObject, chunks: list[bytes]) -> None:
    wire = bytearray(build(chunks, "AAAAAA==", SIGNER))
    at = data.draw(st.integers(0, len(wire) - 1))
    wire[at] ^= 1 << data.draw(st.integers(0, 7))
    decoder = ChunkedDecoder(None, SIGNER, [CRC], min_chunk_bytes=1)
    try:
        decoded = b"".join(bytes(part) for part in decoder.feed(wire))
        decoder.finish()
    except RequestError:
        return
    # Upper case in a chunk size or a trailer's name changes nothing.
    assert decoded == b"".join(chunks)
    assert decoder.trailers == {CRC: "AAAAAA=="}


@given(st.lists(st.binary(min_size=1, max_size=30), min_size=1, max_size=3), st.data(), st.booleans())
def test_decode_truncated_anywhere_refused(chunks: list[bytes], data: st.DataObject, with_signatures: bool) -> None:
    wire = build(chunks, "AAAAAA==", SIGNER if with_signatures else None)
    # The last CRLF is optional, so up to there.
    wire = wire[: data.draw(st.integers(0, len(wire) - 3))]
    decoder = ChunkedDecoder(sum(map(len, chunks)), SIGNER if with_signatures else None, [CRC], min_chunk_bytes=1)
    with pytest.raises(RequestError):  # noqa: PT012 - either call may notice
        decoder.feed(wire)
        decoder.finish()


@given(st.binary(max_size=400))
def test_decode_any_bytes_refused_or_bounded(body: bytes) -> None:
    decoder = ChunkedDecoder(None, None, [CRC])
    code, pieces = "", list[memoryview]()
    try:
        pieces = decoder.feed(body)
        decoder.finish()
    except RequestError as error:
        code = error.code
    assert code in {"", "IncompleteBody", "InvalidChunkSizeError", "MalformedTrailerError"}
    assert sum(map(len, pieces)) <= decoder.decoded_bytes <= len(body)


@given(st.integers(0, 100_000), st.integers(1, 70_000))
def test_encoded_length_as_encoded(decoded_bytes: int, chunk_bytes: int) -> None:
    data = bytes(decoded_bytes)
    wire = b"".join(
        bytes(piece)
        for start in range(0, decoded_bytes, chunk_bytes)
        for piece in (encode_chunk(data[start : start + chunk_bytes]))
    )
    assert len(wire + encode_trailer({CRC: "AAAAAA=="})) == encoded_length(decoded_bytes, chunk_bytes, {CRC: 8})


@given(
    st.lists(st.binary(max_size=100), min_size=1, max_size=5),
    st.sampled_from(["crc32", "crc32c", "crc64nvme"]),
)
def test_full_object_of_parts_as_computed_directly(parts: list[bytes], algorithm: str) -> None:
    def value_of(data: bytes) -> str:
        checksum = Checksum(algorithm)
        checksum.update(data)
        return checksum.digest_base64()

    assert full_object(algorithm, [(value_of(part), len(part)) for part in parts]) == value_of(b"".join(parts))


@given(st.lists(st.binary(max_size=50), max_size=6), st.sampled_from(sorted(ALGORITHMS)))
def test_checksum_any_cut_same_value(parts: list[bytes], algorithm: str) -> None:
    cut_up, whole = Checksum(algorithm), Checksum(algorithm)
    for part in parts:
        cut_up.update(part)
    whole.update(b"".join(parts))
    assert cut_up.digest() == whole.digest()
