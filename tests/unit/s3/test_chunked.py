"""The aws-chunked decoder: AWS's examples, what clients send, what must be refused."""

import hashlib

import pytest

from tiergate.errors import InvariantError, RequestError
from tiergate.s3.canonical import ChunkSigner, signing_key
from tiergate.s3.chunked import (
    MAX_CHUNK_BYTES,
    MAX_LINE_BYTES,
    MAX_TRAILERS,
    ChunkedDecoder,
    encode_chunk,
    encode_trailer,
    encoded_length,
    is_chunked,
    strip_aws_chunked,
)

SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
SCOPE = "20130524/us-east-1/s3/aws4_request"
CRC = "x-amz-checksum-crc32c"


def signer(seed: str) -> ChunkSigner:
    return ChunkSigner(seed, "20130524T000000Z", SCOPE, signing_key(SECRET, "20130524", "us-east-1"))


PLAIN = signer("4f232c4386841ef735655705268965c44a0e4690baa4adea153f7db9fa80a0a9")
TRAILING = signer("106e2a8a18243abcf37539882f36619c00e2dfc72633413f02d3b74544bfeb8e")
PLAIN_BODY = (
    b"10000;chunk-signature=ad80c730a21e5b8d04586a2213dd63b9a0e99e0e2307b0ade35a65485a288648\r\n"
    + b"a" * 65536
    + b"\r\n400;chunk-signature=0055627c9e194cb4542bae2aa5492e3c1575bbb81b612b7d234b86a503ef5497\r\n"
    + b"a" * 1024
    + b"\r\n0;chunk-signature=b6c6ea8a5354eaf15b3cb7646744f4275b71ea724fed81ceb9323e279d449df9\r\n\r\n"
)
TRAILING_BODY = (
    b"10000;chunk-signature=b474d8862b1487a5145d686f57f013e54db672cee1c953b3010fb58501ef5aa2\r\n"
    + b"a" * 65536
    + b"\r\n400;chunk-signature=1c1344b170168f8e65b41376b44b20fe354e373826ccbbe2c1d40a8cae51e5c7\r\n"
    + b"a" * 1024
    + b"\r\n0;chunk-signature=2ca2aba2005185cf7159c6277faf83795951dd77a3a99e6e65d5c9f85863f992\r\n"
    + b"x-amz-checksum-crc32c:sOO8/Q==\r\n"
    + b"x-amz-trailer-signature:d81f82fc3505edab99d459891051a732e8730629a2e4a59689829ca17fe2e435\r\n\r\n"
)


def decode(decoder: ChunkedDecoder, body: bytes, step: int = 1 << 20) -> bytes:
    pieces = [bytes(piece) for start in range(0, len(body), step) for piece in decoder.feed(body[start : start + step])]
    decoder.finish()
    return b"".join(pieces)


@pytest.mark.parametrize("step", [1, 7, 1024, 1 << 20])
def test_decode_signed_example_published_by_aws_accepted(step: int) -> None:
    assert decode(ChunkedDecoder(66560, PLAIN), PLAIN_BODY, step) == b"a" * 66560


@pytest.mark.parametrize("step", [1, 7, 1024, 1 << 20])
def test_decode_signed_trailer_example_published_by_aws_accepted(step: int) -> None:
    decoder = ChunkedDecoder(66560, TRAILING, [CRC])
    assert decode(decoder, TRAILING_BODY, step) == b"a" * 66560
    assert decoder.trailers == {CRC: "sOO8/Q=="}


def refusal(decoder: ChunkedDecoder, body: bytes) -> str:
    with pytest.raises(RequestError) as caught:
        decode(decoder, body)
    with pytest.raises(RequestError) as again:
        decoder.finish()
    assert again.value is caught.value
    with pytest.raises(RequestError):
        decoder.feed(b"0\r\n\r\n")
    return caught.value.code


SIGNED_CHANGES = {
    "a byte of data": (b"aaaa\r\n400", b"aaab\r\n400", "SignatureDoesNotMatch"),
    "a byte of the last data": (b"aaaa\r\n0;", b"aaab\r\n0;", "SignatureDoesNotMatch"),
    "a signature": (b"signature=0055", b"signature=0155", "SignatureDoesNotMatch"),
    "the last signature": (b"signature=b6c6", b"signature=b7c6", "SignatureDoesNotMatch"),
    "no signature": (
        b";chunk-signature=ad80c730a21e5b8d04586a2213dd63b9a0e99e0e2307b0ade35a65485a288648",
        b"",
        "SignatureDoesNotMatch",
    ),
    "another extension": (b"chunk-signature=0055", b"chunk-checksum=0055", "SignatureDoesNotMatch"),
}


@pytest.mark.parametrize("case", SIGNED_CHANGES)
def test_decode_signed_body_changed_refused(case: str) -> None:
    old, new, code = SIGNED_CHANGES[case]
    assert old in PLAIN_BODY
    assert refusal(ChunkedDecoder(66560, PLAIN), PLAIN_BODY.replace(old, new)) == code


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        (b"sOO8", b"sOO9", "SignatureDoesNotMatch"),
        (b"signature:d81f", b"signature:d82f", "SignatureDoesNotMatch"),
        (
            b"x-amz-trailer-signature:d81f82fc3505edab99d459891051a732e8730629a2e4a59689829ca17fe2e435\r\n",
            b"",
            "SignatureDoesNotMatch",
        ),
        (b"x-amz-checksum-crc32c:sOO8/Q==\r\n", b"", "MalformedTrailerError"),
        (b"crc32c:", b"crc32:", "MalformedTrailerError"),
    ],
)
def test_decode_signed_trailer_changed_refused(old: bytes, new: bytes, code: str) -> None:
    assert old in TRAILING_BODY
    assert refusal(ChunkedDecoder(66560, TRAILING, [CRC]), TRAILING_BODY.replace(old, new)) == code


def test_decode_signed_body_two_chunks_swapped_refused() -> None:
    one, two, end = (b"%x;chunk-signature=%s\r\n" % (n, b"0" * 64) for n in (8192, 8192, 0))
    assert refusal(ChunkedDecoder(None, PLAIN), one + b"a" * 8192 + b"\r\n" + two + end) == "SignatureDoesNotMatch"


def test_decode_signed_framing_without_signer_signatures_ignored() -> None:
    body = PLAIN_BODY.replace(b"signature=0055", b"signature=0155")
    assert decode(ChunkedDecoder(66560, None), body) == b"a" * 66560
    decoder = ChunkedDecoder(66560, None, [CRC])
    decode(decoder, TRAILING_BODY)
    assert decoder.trailers == {CRC: "sOO8/Q=="}


HELLO = b"5\r\nhello\r\n0\r\n"
TRAILER_FORMS = {
    "one empty line": b"x-amz-checksum-crc32c:v=\r\n\r\n",
    "two empty lines": b"x-amz-checksum-crc32c:v=\r\n\r\n\r\n",
    "no empty line": b"x-amz-checksum-crc32c:v=\r\n",
    "an empty line before": b"\r\nx-amz-checksum-crc32c:v=\r\n\r\n",
    "minio-go": b"x-amz-checksum-crc32c:v=\n\r\nx-amz-trailer-signature:00\r\n\r\n",
    "spaces and upper case": b"X-Amz-Checksum-Crc32c: v= \r\n\r\n",
}


@pytest.mark.parametrize("form", TRAILER_FORMS)
@pytest.mark.parametrize("step", [1, 2, 3, 100])
def test_decode_trailer_form_of_a_client_accepted(form: str, step: int) -> None:
    decoder = ChunkedDecoder(5, None, [" X-Amz-Checksum-CRC32C "])
    assert decode(decoder, HELLO + TRAILER_FORMS[form], step) == b"hello"
    assert decoder.trailers == {CRC: "v="}


@pytest.mark.parametrize("end", [b"", b"\r\n", b"\r\n\r\n"])
def test_decode_no_trailer_announced_any_end_accepted(end: bytes) -> None:
    assert decode(ChunkedDecoder(5, None), HELLO + end) == b"hello"


def test_decode_empty_body_accepted() -> None:
    assert decode(ChunkedDecoder(0, None), b"0\r\n\r\n") == b""


INCOMPLETE = {
    "nothing": b"",
    "half a header": b"5",
    "half a chunk": b"5\r\nhel",
    "no line end after the data": b"5\r\nhello",
    "no last chunk": b"5\r\nhello\r\n",
    "half a line end": HELLO + b"\r",
    "longer than its header": b"5\r\nhello!\r\n0\r\n\r\n",
    "much longer than its header": b"5\r\nhello" + b"!" * 5000,
    "LF only": b"5\nhello\n0\n\n",
    "a size that is no number": b"5g\r\nhello\r\n0\r\n\r\n",
    "a negative size": b"-5\r\nhello\r\n0\r\n\r\n",
    "a size with a sign": b"+5\r\nhello\r\n0\r\n\r\n",
    "a prefixed size": b"0x5\r\nhello\r\n0\r\n\r\n",
    "an underscore": b"0_5\r\nhello\r\n0\r\n\r\n",
    "a size of 17 digits": b"00000000000000005\r\nhello\r\n0\r\n\r\n",
    "an endless header": b"5;" + b"x" * 5000 + b"\r\nhello\r\n0\r\n\r\n",
    "more than announced": b"6\r\nhello!\r\n0\r\n\r\n",
    "less than announced": b"4\r\nhell\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("case", INCOMPLETE)
def test_decode_malformed_framing_incomplete_body(case: str) -> None:
    assert refusal(ChunkedDecoder(5, None), INCOMPLETE[case]) == "IncompleteBody"


def test_feed_more_than_announced_nothing_of_it_handed_on() -> None:
    decoder = ChunkedDecoder(5, None)
    with pytest.raises(RequestError):
        decoder.feed(b"6\r\nhello!")
    assert decoder.decoded_bytes == 0


MALFORMED_TRAILERS = {
    "missing": b"\r\n",
    "not announced": b"x-amz-meta-a:1\r\nx-amz-checksum-crc32c:v=\r\n\r\n",
    "repeated": b"x-amz-checksum-crc32c:v=\r\nx-amz-checksum-crc32c:v=\r\n\r\n",
    "no colon": b"x-amz-checksum-crc32c\r\n\r\n",
    "a space in the name": b"x-amz-checksum-crc32c :v\r\n\r\n",
    "data after the end": b"x-amz-checksum-crc32c:v=\r\n\r\n\r\n\r\n",
    "another body": b"x-amz-checksum-crc32c:v=\r\n\r\n5\r\nhello\r\n",
    "two signatures": b"x-amz-trailer-signature:1\r\nx-amz-trailer-signature:1\r\n\r\n",
}


@pytest.mark.parametrize("case", MALFORMED_TRAILERS)
def test_decode_malformed_trailer_refused(case: str) -> None:
    assert refusal(ChunkedDecoder(5, None, [CRC]), HELLO + MALFORMED_TRAILERS[case]) == "MalformedTrailerError"


def test_decode_small_chunk_before_another_refused_as_s3() -> None:
    body = b"5\r\nhello\r\n5\r\nhello\r\n0\r\n\r\n"
    assert refusal(ChunkedDecoder(10, None), body) == "InvalidChunkSizeError"
    assert decode(ChunkedDecoder(10, None, min_chunk_bytes=1), body) == b"hellohello"


def test_decode_chunk_beyond_any_body_refused() -> None:
    assert refusal(ChunkedDecoder(None, None), b"%x\r\n" % (MAX_CHUNK_BYTES + 1)) == "InvalidChunkSizeError"


def test_decode_too_many_trailers_refused() -> None:
    with pytest.raises(RequestError, match="trailing"):
        ChunkedDecoder(0, None, [f"x-{n}" for n in range(MAX_TRAILERS + 1)])


def test_decode_line_of_the_longest_length_accepted() -> None:
    value = b"v" * (MAX_LINE_BYTES - len(CRC) - 1)
    decoder = ChunkedDecoder(5, None, [CRC])
    decode(decoder, HELLO + CRC.encode() + b":" + value + b"\r\n\r\n")
    assert decoder.trailers == {CRC: value.decode()}
    longer = ChunkedDecoder(5, None, [CRC])
    assert refusal(longer, HELLO + CRC.encode() + b":v" + value + b"\r\n\r\n") == "IncompleteBody"


def test_feed_payload_handed_on_without_copying() -> None:
    body = bytearray(b"5\r\nhello\r\n0\r\n\r\n")
    decoder = ChunkedDecoder(5, None)
    (piece,) = decoder.feed(body)
    body[3:8] = b"HELLO"
    assert bytes(piece) == b"HELLO"
    assert piece.obj is body


def test_encode_then_decode_unchanged_and_as_long_as_said() -> None:
    data = bytes(range(256)) * 100
    chunk_bytes = 8192
    wire = b"".join(
        bytes(piece)
        for start in range(0, len(data), chunk_bytes)
        for piece in encode_chunk(memoryview(data)[start : start + chunk_bytes])
    ) + encode_trailer({CRC: "AAAAAA=="})
    assert len(wire) == encoded_length(len(data), chunk_bytes, {CRC: 8})
    decoder = ChunkedDecoder(len(data), None, [CRC])
    assert hashlib.sha256(decode(decoder, wire)).digest() == hashlib.sha256(data).digest()
    assert decoder.trailers == {CRC: "AAAAAA=="}
    assert encode_trailer({}) == b"0\r\n\r\n"
    with pytest.raises(InvariantError):
        encode_chunk(b"")


@pytest.mark.parametrize(
    ("encoding", "kept"),
    [
        ("aws-chunked", None),
        ("AWS-Chunked", None),
        ("gzip,aws-chunked", "gzip"),
        ("aws-chunked, gzip , br", "gzip, br"),
        ("aws-chunked,aws-chunked", None),
        ("x-aws-chunked-y", "x-aws-chunked-y"),
        ("gzip", "gzip"),
        ("", None),
    ],
)
def test_strip_aws_chunked_only_that_encoding_dropped(encoding: str, kept: str | None) -> None:
    assert strip_aws_chunked(encoding) == kept


def test_is_chunked_by_payload_mode_alone() -> None:
    assert is_chunked("STREAMING-UNSIGNED-PAYLOAD-TRAILER")
    assert is_chunked("STREAMING-AWS4-HMAC-SHA256-PAYLOAD")
    assert not is_chunked("UNSIGNED-PAYLOAD")
    assert not is_chunked("0" * 64)
