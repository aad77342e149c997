"""What is hardly HTTP, or HTTP that few clients send: answered in S3's words or ended; never a 500, never a hang."""

from dataclasses import replace

import pytest
from tests.conformance.rows import Row, aimed, answered, check, goes_on
from tests.conformance.wire import UNSIGNED, Ask, Bucket, ClosedError, http_chunked
from tests.several import one_node

BAD_REQUEST = (400, "BadRequest")
GET = Ask("GET", "/conformance/{}")
PUT = Ask("PUT", "/conformance/{}", body=b"hello", payload=UNSIGNED)

RAW = [
    ("garbage", b"\x00\x01\x02 what is this\r\n\r\n", *BAD_REQUEST),
    ("tls_hello", bytes.fromhex("16030100c8010000c40303") + bytes(200), *BAD_REQUEST),
    ("http2_preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", *BAD_REQUEST),
    ("ssh_banner", b"SSH-2.0-OpenSSH_9.6\r\n", *BAD_REQUEST),
    ("no_version", b"GET /conformance\r\n\r\n", *BAD_REQUEST),
    ("http_9", b"GET /conformance HTTP/9.9\r\nHost: h\r\n\r\n", *BAD_REQUEST),
    ("space_in_header_name", b"GET /conformance HTTP/1.1\r\nHo st: h\r\n\r\n", *BAD_REQUEST),
    ("folded_header", b"GET /conformance HTTP/1.1\r\nHost: h\r\nA: b\r\n c\r\n\r\n", *BAD_REQUEST),
    ("nul_in_header", b"GET /conformance HTTP/1.1\r\nHost: h\r\nA: b\x00c\r\n\r\n", *BAD_REQUEST),
    (
        "two_lengths",
        b"PUT /conformance/x HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        *BAD_REQUEST,
    ),
    (
        "length_and_chunked",
        b"PUT /conformance/x HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        *BAD_REQUEST,
    ),
    ("negative_length", b"PUT /conformance/x HTTP/1.1\r\nHost: h\r\nContent-Length: -5\r\n\r\n", *BAD_REQUEST),
    ("length_no_number", b"PUT /conformance/x HTTP/1.1\r\nHost: h\r\nContent-Length: 0x10\r\n\r\n", *BAD_REQUEST),
    ("long_request_line", b"GET /conformance/" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: h\r\n\r\n", 400, "InvalidURI"),
    (
        "long_header",
        b"GET /conformance HTTP/1.1\r\nHost: h\r\nA: " + b"b" * 70_000 + b"\r\n\r\n",
        400,
        "RequestHeaderSectionTooLarge",
    ),
    ("many_headers", b"GET /conformance HTTP/1.1\r\nHost: h\r\n" + b"A: b\r\n" * 20_000 + b"\r\n", *BAD_REQUEST),
    ("unheard_method", b"BREW /conformance HTTP/1.1\r\nHost: h\r\n\r\n", *BAD_REQUEST),
    ("lower_case_method", b"get /conformance HTTP/1.1\r\nHost: h\r\n\r\n", 400, "BadRequest"),
]


@one_node("what is no request can be led nowhere")
@pytest.mark.parametrize(("name", "data", "status", "code"), RAW, ids=[row[0] for row in RAW])
def test_what_is_not_http_is_refused_and_the_connection_ends(
    s3: Bucket, name: str, data: bytes, status: int, code: str
) -> None:
    row = Row(name, Ask(), status, code, closes=True)
    with s3.wire() as wire:
        wire.pour(data)
        reply = wire.reply()
        answered(row, reply)
        goes_on(s3, wire, reply, row)


ROWS = [
    Row("key_1024_bytes", Ask("PUT", f"/conformance/{'k' * 1024}", body=b"x"), 200),
    Row("key_1025_bytes", Ask("PUT", f"/conformance/{'k' * 1025}", body=b"x"), 400, "KeyTooLongError"),
    Row("key_1026_bytes_unicode", Ask("GET", f"/conformance/{'%C3%A9' * 513}"), 400, "KeyTooLongError"),
    Row("nul_in_key", replace(GET, path="/conformance/a%00b"), 400, "KeyTooLongError"),
    Row("bad_percent", replace(GET, path="/conformance/a%zz"), 400, "InvalidURI"),
    Row("lone_percent", replace(GET, path="/conformance/100%"), 400, "InvalidURI"),
    Row("key_not_utf8", replace(GET, path="/conformance/%ff%fe"), 400, "InvalidURI"),
    Row("bucket_too_short", Ask("GET", "/ab"), 400, "InvalidBucketName"),
    Row("bucket_with_blank", Ask("GET", "/a%20bucket"), 400, "InvalidBucketName"),
    Row("bucket_like_address", Ask("GET", "/192.168.1.1"), 400, "InvalidBucketName"),
    Row("bucket_two_dots", Ask("GET", "/bu..cket"), 400, "InvalidBucketName"),
    Row("bucket_missing", Ask("GET", "/no-such-bucket-conformance"), 404, "NoSuchBucket"),
    Row("bucket_missing_head", Ask("HEAD", "/no-such-bucket-conformance"), 404),
    Row("key_missing", GET, 404, "NoSuchKey"),
    Row("key_missing_head", replace(GET, method="HEAD"), 404),
    Row("unknown_method", replace(GET, method="PROPFIND"), 405, "MethodNotAllowed"),
    Row("patch_method", replace(GET, method="PATCH"), 405, "MethodNotAllowed"),
    Row("trace_method", replace(GET, method="TRACE"), 405, "MethodNotAllowed"),
    Row("get_with_body", replace(GET, path="/conformance", query="list-type=2&max-keys=0", body=b"surprise"), 200),
    Row("put", PUT, 200),
    Row(
        "put_http_chunked",
        replace(PUT, body=http_chunked(b"hello"), length=None, late=[("Transfer-Encoding", "chunked")]),
        200,
    ),
    Row("put_transfer_gzip", replace(PUT, length=None, late=[("Transfer-Encoding", "gzip")]), *BAD_REQUEST),
    Row(
        "put_transfer_gzip_chunked",
        replace(PUT, length=None, late=[("Transfer-Encoding", "gzip, chunked")], body=http_chunked(b"not gzip")),
        501,
        "NotImplemented",
    ),
    Row("range_multi", replace(GET, path="/conformance/fixed", headers={"Range": "bytes=0-1,3-4"}), 200),
    Row(
        "range_past_the_end",
        replace(GET, path="/conformance/fixed", headers={"Range": "bytes=10-"}),
        416,
        "InvalidRange",
    ),
    Row(
        "range_zero_suffix", replace(GET, path="/conformance/fixed", headers={"Range": "bytes=-0"}), 416, "InvalidRange"
    ),
    Row("part_number_2_of_1", replace(GET, path="/conformance/fixed", query="partNumber=2"), 416, "InvalidPartNumber"),
    Row(
        "range_and_part_number",
        replace(GET, path="/conformance/fixed", query="partNumber=1", headers={"Range": "bytes=0-1"}),
        400,
        "InvalidRequest",
    ),
    Row(
        "headers_64_kib",
        replace(GET, headers={f"x-filler-{n}": "f" * 6000 for n in range(11)}),
        400,
        "RequestHeaderSectionTooLarge",
    ),
    Row("metadata_2_kib", replace(PUT, headers={"x-amz-meta-m": "m" * 2040}), 200),
    Row("metadata_too_large", replace(PUT, headers={"x-amz-meta-m": "m" * 2100}), 400, "MetadataTooLarge"),
    Row("http_1_0", replace(GET, path="/conformance/fixed", version="HTTP/1.0"), 200, closes=True),
    Row("http_1_0_put", replace(PUT, version="HTTP/1.0"), 200, closes=True),
    Row("connection_close", replace(GET, path="/conformance/fixed", late=[("Connection", "close")]), 200, closes=True),
    Row(
        "upgrade_refused",
        replace(GET, path="/conformance/fixed", late=[("Connection", "Upgrade"), ("Upgrade", "h2c")]),
        200,
    ),
    Row("max_keys_word", Ask("GET", "/conformance", "list-type=2&max-keys=ten"), 400, "InvalidArgument"),
    Row("max_keys_negative", Ask("GET", "/conformance", "list-type=2&max-keys=-1"), 400, "InvalidArgument"),
    Row("max_keys_huge", Ask("GET", "/conformance", "list-type=2&max-keys=99999999999"), 400, "InvalidArgument"),
    Row("max_keys_above_1000", Ask("GET", "/conformance", "list-type=2&max-keys=5000"), 200),
    Row(
        "encoding_type_unknown", Ask("GET", "/conformance", "encoding-type=base64&list-type=2"), 400, "InvalidArgument"
    ),
    Row(
        "continuation_token_bad",
        Ask("GET", "/conformance", "continuation-token=nonsense&list-type=2"),
        400,
        "InvalidArgument",
    ),
    Row("continuation_token_empty", Ask("GET", "/conformance", "continuation-token=&list-type=2"), 200),
]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_unusual_request_has_its_answer(s3: Bucket, prefix: str, row: Row) -> None:
    s3.put("fixed", b"0123456789")
    check(s3, aimed(row, f"{prefix}o"))


def test_requests_in_one_packet_are_answered_in_order(s3: Bucket, prefix: str) -> None:
    path = s3.path(f"{prefix}o")
    asks = [
        Ask("PUT", path, body=b"first"),
        Ask("GET", path),
        Ask("HEAD", path),
        Ask("PUT", path, body=b"second"),
        Ask("GET", path),
        Ask("DELETE", path),
        Ask("GET", path),
    ]
    with s3.wire() as wire:
        for ask in asks:
            wire.send(ask)
        replies = [wire.reply(ask.method) for ask in asks]
        assert wire.is_silent()
    assert [reply.status for reply in replies] == [200, 200, 200, 200, 200, 204, 404]
    assert (replies[1].body, replies[4].body) == (b"first", b"second")


def test_head_answers_have_no_body_and_the_connection_lives_on(s3: Bucket, prefix: str) -> None:
    s3.put(f"{prefix}o", bytes(2000))
    asks = [("o", 200), ("none", 404), ("o", 200)]
    with s3.wire() as wire:
        for key, status in asks:
            reply = wire.ask(Ask("HEAD", s3.path(prefix + key)))
            assert reply.status == status
            assert not reply.closes
            if status == 200:
                assert reply.headers["content-length"] == "2000"
            assert wire.is_silent()
        assert wire.ask(Ask("HEAD", "/no-such-bucket-conformance/k")).status == 404
        assert wire.ask(Ask("GET", s3.path(f"{prefix}o"))).body == bytes(2000)


def test_connection_that_says_nothing_is_just_closed(s3: Bucket) -> None:
    with s3.wire() as wire:
        wire.finish()
        with pytest.raises(ClosedError):
            wire.reply()


def test_half_a_head_then_the_end_is_just_closed(s3: Bucket) -> None:
    with s3.wire() as wire:
        wire.pour(b"GET /conformance HTTP/1.1\r\nHost: h\r\nA: ")
        wire.finish()
        assert wire.rest() == b""


@pytest.mark.parametrize("name", ["name", "Name", "x.y_z-1"])
def test_metadata_comes_back_in_lower_case_and_as_it_was(s3: Bucket, prefix: str, name: str) -> None:
    s3.put(f"{prefix}o", b"1", {f"X-Amz-Meta-{name}": "  spaced   out  "})
    head = s3.head(f"{prefix}o")
    assert head.headers[f"x-amz-meta-{name.lower()}"].split() == ["spaced", "out"]
