"""Bodies that are not what their request says: refused with S3's word, and the older object stays."""

import base64
import hashlib
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from tests.conformance.rows import Row, answered, check, goes_on
from tests.conformance.wire import (
    STREAMING_UNSIGNED,
    UNSIGNED,
    Ask,
    Bucket,
    crc32_of,
    framed,
    http_chunked,
    md5_of,
)

from tiergate.s3.checksums import Checksum
from tiergate.testing.node import RunningNode

BODY = bytes(range(256)) * 100
CHUNKS = (BODY[:8192], BODY[8192:16384], BODY[16384:])
FORMS = ("crc32", "crc32c", "crc64nvme", "sha1", "sha256")
MIB = 1 << 20


def checksum(name: str, data: bytes) -> str:
    computed = Checksum(name)
    computed.update(data)
    return base64.b64encode(computed.digest()).decode()


def put(headers: Mapping[str, str] | None = None, **more: object) -> Ask:
    return replace(Ask("PUT", "/conformance/{}", headers=headers or {}, body=BODY), **more)  # type: ignore[arg-type]


def trailed(
    trailers: Mapping[str, str] | None = None,
    *,
    announced: str | None = "x-amz-checksum-crc32",
    length: str | None = str(len(BODY)),
    body: bytes | None = None,
    chunks: Sequence[bytes] = CHUNKS,
    encoding: str | None = None,
) -> Ask:
    """A PUT in unsigned framing."""
    if trailers is None:
        trailers = {"x-amz-checksum-crc32": crc32_of(BODY)}
    given = {"x-amz-decoded-content-length": length, "x-amz-trailer": announced, "Content-Encoding": encoding}
    kept = {name: value for name, value in given.items() if value is not None}
    sent = framed(chunks, trailers) if body is None else body
    return Ask("PUT", "/conformance/{}", headers=kept, body=sent, payload=STREAMING_UNSIGNED)


WHOLE = framed(CHUNKS, {"x-amz-checksum-crc32": crc32_of(BODY)})
BAD_DIGEST, INCOMPLETE = (400, "BadDigest"), (400, "IncompleteBody")
MALFORMED_TRAILER = (400, "MalformedTrailerError")

GOOD = [
    Row("plain", put(), 200),
    Row("md5", put({"Content-MD5": md5_of(BODY)}), 200),
    Row("trailer", trailed(), 200),
    Row("no_trailer_announced", trailed({}, announced=None), 200),
    Row("one_chunk", trailed(chunks=[BODY]), 200),
    Row(
        "http_chunked_around_framing",
        replace(trailed(), body=http_chunked(WHOLE), length=None, late=[("Transfer-Encoding", "chunked")]),
        200,
    ),
    Row(
        "http_chunked_plain",
        replace(put(payload=UNSIGNED), body=http_chunked(BODY), length=None, late=[("Transfer-Encoding", "chunked")]),
        200,
    ),
    *(Row(f"header_{name}", put({f"x-amz-checksum-{name}": checksum(name, BODY)}), 200) for name in FORMS),
    *(
        Row(
            f"trailer_{name}",
            trailed({f"x-amz-checksum-{name}": checksum(name, BODY)}, announced=f"x-amz-checksum-{name}"),
            200,
        )
        for name in FORMS
    ),
]

BAD = [
    Row("md5_wrong", put({"Content-MD5": md5_of(b"other")}), *BAD_DIGEST),
    Row("md5_malformed", put({"Content-MD5": "not base64!"}), 400, "InvalidDigest"),
    Row("md5_short", put({"Content-MD5": "AAAA"}), 400, "InvalidDigest"),
    Row("checksum_malformed", put({"x-amz-checksum-crc32": "????"}), 400, "InvalidRequest"),
    Row(
        "two_checksums",
        put({f"x-amz-checksum-{name}": checksum(name, BODY) for name in ("crc32", "sha1")}),
        400,
        "InvalidRequest",
    ),
    Row("algorithm_without_value", put({"x-amz-sdk-checksum-algorithm": "CRC32"}), 400, "InvalidRequest"),
    Row(
        "algorithm_other_than_value",
        put({"x-amz-sdk-checksum-algorithm": "SHA1", "x-amz-checksum-crc32": crc32_of(BODY)}),
        400,
        "InvalidRequest",
    ),
    Row("announced_trailer_missing", trailed({}), *MALFORMED_TRAILER),
    Row("trailer_not_announced", trailed(announced=None), *MALFORMED_TRAILER),
    Row("trailer_malformed", trailed(body=framed(CHUNKS)[:-2] + b"no colon here\r\n\r\n"), *MALFORMED_TRAILER),
    Row("trailer_value_malformed", trailed({"x-amz-checksum-crc32": "!"}), 400, "InvalidRequest"),
    Row("trailer_for_plain_body", put({"x-amz-trailer": "x-amz-checksum-crc32"}), *MALFORMED_TRAILER),
    Row("decoded_length_missing", trailed(length=None), 411, "MissingContentLength"),
    Row("decoded_length_malformed", trailed(length="many"), 400, "InvalidArgument"),
    Row("decoded_length_negative", trailed(length="-1"), 400, "InvalidArgument"),
    Row("decoded_length_too_small", trailed(length="100"), *INCOMPLETE),
    Row("decoded_length_too_large", trailed(length=str(len(BODY) + 1)), *INCOMPLETE),
    Row("no_last_chunk", trailed(body=WHOLE[: WHOLE.index(b"\r\n0\r\n") + 2]), *INCOMPLETE),
    Row("chunk_size_not_hex", trailed(body=b"zz" + WHOLE[2:]), *INCOMPLETE),
    Row("chunk_size_too_small", trailed(body=b"1f00" + WHOLE[4:]), *INCOMPLETE),
    Row("small_chunk_in_the_middle", trailed(chunks=[BODY[:100], BODY[100:]]), 400, "InvalidChunkSizeError"),
    Row("chunk_header_endless", trailed(body=b"1" * 5000), *INCOMPLETE),
    Row("lines_after_the_end", trailed(body=WHOLE + b"more\r\n"), *MALFORMED_TRAILER),
    Row("data_after_the_end", trailed(body=WHOLE + b"more"), *INCOMPLETE),
    Row("framing_unknown", put(payload="STREAMING-SOMETHING-NEW"), 400, "InvalidArgument"),
    Row("no_length_at_all", put(length=None, body=b""), 411, "MissingContentLength"),
    Row(
        "http_chunk_malformed",
        replace(
            put(payload=UNSIGNED), body=b"zz\r\nabc\r\n0\r\n\r\n", length=None, late=[("Transfer-Encoding", "chunked")]
        ),
        400,
        "IncompleteBody|BadRequest",
        closes=True,
    ),
    *(
        Row(f"header_{name}_wrong", put({f"x-amz-checksum-{name}": checksum(name, b"other")}), *BAD_DIGEST)
        for name in FORMS
    ),
    *(
        Row(
            f"trailer_{name}_wrong",
            trailed({f"x-amz-checksum-{name}": checksum(name, b"other")}, announced=f"x-amz-checksum-{name}"),
            *BAD_DIGEST,
        )
        for name in FORMS
    ),
]


def aimed(row: Row, prefix: str) -> Row:
    return replace(row, ask=replace(row.ask, path=row.ask.path.replace("{}", f"{prefix}o")))


@pytest.mark.parametrize("row", GOOD, ids=str)
def test_body_that_is_right_is_kept(s3: Bucket, prefix: str, row: Row) -> None:
    check(s3, aimed(row, prefix))
    reply = s3.get(f"{prefix}o")
    assert reply.body == BODY
    assert "content-encoding" not in reply.headers
    assert reply.etag.strip('"') == hashlib.md5(BODY).hexdigest()


@pytest.mark.parametrize("row", BAD, ids=str)
def test_body_that_is_wrong_changes_nothing(s3: Bucket, node: RunningNode, prefix: str, row: Row) -> None:
    s3.put(f"{prefix}o", b"before")
    check(s3, aimed(row, prefix))
    assert s3.get(f"{prefix}o").body == b"before"
    assert node.status()["memory"]["receiving_bytes"] == 0


@pytest.mark.parametrize("start", [b"", b"5\r\nhello\r\n", b"5\r\nhel"], ids=["at_once", "after_a_chunk", "in_a_chunk"])
def test_framing_that_fails_after_the_head_was_read_is_answered_at_once(s3: Bucket, prefix: str, start: bytes) -> None:
    """aiohttp's parser tells the reader of such a body nothing: the answer came with the idle timeout."""
    chunked = [("Transfer-Encoding", "chunked")]
    ask = put({"Expect": "100-continue"}, payload=UNSIGNED, length=None, late=chunked)
    row = aimed(Row("late", ask, 400, "IncompleteBody", closes=True), prefix)
    with s3.wire() as wire:
        wire.begin(row.ask)
        assert wire.socket.recv(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
        wire.pour(start)
        wire.pour(b"zzzzzzzz\r\nabc\r\n0\r\n\r\n")
        reply = wire.reply("PUT")
        answered(row, reply)
        goes_on(s3, wire, reply, row)


@pytest.mark.parametrize("row", [row for row in BAD if "chunk" not in row.name], ids=str)
def test_part_that_is_wrong_is_not_kept(s3: Bucket, prefix: str, row: Row) -> None:
    upload_id = s3.create_upload(f"{prefix}o")
    ask = replace(aimed(row, prefix).ask, query=f"partNumber=1&uploadId={upload_id}")
    check(s3, replace(row, ask=ask))
    assert s3.get(f"{prefix}o", uploadId=upload_id).texts("Part/PartNumber") == []


ENCODINGS = [
    (None, None),
    ("aws-chunked", None),
    ("gzip,aws-chunked", "gzip"),
    ("aws-chunked,gzip", "gzip"),
    ("aws-chunked, gzip", "gzip"),
    ("AWS-Chunked", None),
    ("", None),
]


@pytest.mark.parametrize(("given", "kept"), ENCODINGS)
def test_framing_is_taken_off_whatever_content_encoding_says(
    s3: Bucket, prefix: str, given: str | None, kept: str | None
) -> None:
    ask = trailed(encoding=given)
    check(s3, aimed(Row("encoded", ask, 200), prefix))
    for reply in (s3.get(f"{prefix}o"), s3.head(f"{prefix}o")):
        assert reply.headers.get("content-encoding") == kept
    assert s3.get(f"{prefix}o").body == BODY


def test_content_encoding_of_an_unframed_body_is_kept_as_it_is(s3: Bucket, prefix: str) -> None:
    s3.put(f"{prefix}o", BODY, {"Content-Encoding": "zstd"})
    reply = s3.get(f"{prefix}o", {"Accept-Encoding": "gzip, deflate, br"})
    assert (reply.headers["content-encoding"], reply.body) == ("zstd", BODY)


class TestClientsThatVanish:
    """What a client that goes away in the middle leaves: nothing."""

    @pytest.mark.parametrize("is_part", [False, True], ids=["object", "part"])
    @pytest.mark.parametrize("ending", ["reset", "close"])
    @pytest.mark.parametrize("framing", ["plain", "framed", "http_chunked"])
    def test_cut_upload_is_never_published(
        self, s3: Bucket, node: RunningNode, prefix: str, framing: str, ending: str, is_part: bool
    ) -> None:
        s3.put(f"{prefix}old", b"the good one")
        upload_id = s3.create_upload(f"{prefix}old")
        query = f"partNumber=1&uploadId={upload_id}" if is_part else ""
        for key in ("old",) if is_part else ("old", "new"):
            ask = Ask("PUT", f"/conformance/{prefix}{key}", query, payload=UNSIGNED, length=3 * MIB)
            data = bytes(MIB)
            if framing == "framed":
                headers = {"x-amz-decoded-content-length": str(2 * MIB)}
                ask = replace(ask, payload=STREAMING_UNSIGNED, headers=headers)
                data = b"100000\r\n" + data + b"\r\n"
            elif framing == "http_chunked":
                ask = replace(ask, length=None, late=[("Transfer-Encoding", "chunked")])
                data = b"100000\r\n" + data + b"\r\n"
            with s3.wire() as wire:
                wire.begin(ask)
                wire.pour(data)
                node.wait_status("receiving", lambda status: status["memory"]["receiving_bytes"])
                if ending == "reset":
                    wire.reset()
            node.wait_status("given back", lambda status: status["memory"]["receiving_bytes"] == 0)
        assert s3.get(f"{prefix}old").body == b"the good one"
        assert s3.keys(prefix) == [f"{prefix}old"]
        assert s3.get(f"{prefix}new").status == 404
        assert s3.get(f"{prefix}old", uploadId=upload_id).texts("Part/PartNumber") == []

    def test_half_closed_upload_is_refused(self, s3: Bucket, prefix: str) -> None:
        row = Row("short", Ask("PUT", f"/conformance/{prefix}o", payload=UNSIGNED, length=1000), 400, "IncompleteBody")
        with s3.wire() as wire:
            wire.begin(row.ask)
            wire.pour(bytes(500))
            wire.socket.shutdown(socket.SHUT_WR)
            rest = wire.rest()
        assert rest == b"" or b"IncompleteBody" in rest
        assert s3.get(f"{prefix}o").status == 404


class TestEarlyErrors:
    """An error that is known before the body is in reaches a client that is still sending."""

    ASK = Ask("PUT", "/no-such-bucket-conformance/k", payload=UNSIGNED, length=16 * MIB)
    ROW = Row("early", ASK, 404, "NoSuchBucket")

    def test_error_reaches_a_client_that_sends_on(self, s3: Bucket) -> None:
        with s3.wire() as wire:
            wire.begin(self.ASK)
            for _ in range(16):
                wire.pour(bytes(MIB))
            reply = wire.reply("PUT")
            answered(self.ROW, reply)
            goes_on(s3, wire, reply, self.ROW)

    @pytest.mark.parametrize(
        ("row", "late"),
        [
            (
                Row(
                    "forged",
                    replace(ASK, headers={"x-amz-date": "20200101T000000Z"}, signed=False),
                    403,
                    "AccessDenied",
                ),
                (),
            ),
            (
                Row(
                    "precondition",
                    replace(ASK, path="/conformance/{}", headers={"If-None-Match": "*"}),
                    412,
                    "PreconditionFailed",
                ),
                (),
            ),
            (Row("too_large", replace(ASK, path="/conformance/{}", length=(5 << 30) + 1), 400, "EntityTooLarge"), ()),
        ],
        ids=["forged", "precondition", "too_large"],
    )
    def test_refusal_of_a_large_body(self, s3: Bucket, prefix: str, row: Row, late: tuple[()]) -> None:
        s3.put(f"{prefix}o", b"before")
        row = aimed(row, prefix)
        with s3.wire() as wire:
            wire.begin(row.ask)
            sent = wire.pour(bytes(16 * MIB))
            reply = wire.reply("PUT")
            answered(row, reply)
            if row.name == "too_large":
                assert reply.closes
            assert sent or reply.closes
            goes_on(s3, wire, reply, row)
        assert s3.get(f"{prefix}o").body == b"before"

    def test_client_that_waits_for_continue_is_told_at_once_and_the_connection_ends(self, s3: Bucket) -> None:
        with s3.wire() as wire:
            wire.begin(replace(self.ASK, headers={"Expect": "100-continue"}))
            reply = wire.reply("PUT")
            answered(replace(self.ROW, closes=True), reply)
            assert reply.interim == ()
            goes_on(s3, wire, reply, self.ROW)


class TestExpect:
    """RFC 9110 section 10.1.1, and what botocore makes of it."""

    def test_continue_comes_before_the_body(self, s3: Bucket, prefix: str) -> None:
        ask = Ask("PUT", f"/conformance/{prefix}o", headers={"Expect": "100-continue"}, payload=UNSIGNED, length=5)
        with s3.wire() as wire:
            wire.begin(ask)
            assert wire.socket.recv(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
            wire.pour(b"hello")
            reply = wire.reply("PUT")
            assert (reply.status, reply.interim, reply.closes) == (200, (), False)
            goes_on(s3, wire, reply, Row("continued", ask, 200))
        assert s3.get(f"{prefix}o").body == b"hello"

    @pytest.mark.parametrize(
        "ask",
        [
            Ask("PUT", "/conformance/{}"),
            Ask("PUT", "/conformance/{}", headers={"x-amz-copy-source": "/conformance/{}"}),
            Ask("POST", "/conformance/{}", "uploads="),
            Ask("GET", "/conformance/{}", length=None),
            Ask("DELETE", "/conformance/{}"),
            Ask(
                "PUT",
                "/conformance/{}",
                "tagging=",
                body=b"<Tagging><TagSet><Tag><Key>a</Key><Value>b</Value></Tag></TagSet></Tagging>",
            ),
        ],
        ids=["put", "copy", "create", "get", "delete", "forwarded"],
    )
    def test_success_without_body_is_preceded_by_continue_or_ends_the_connection(
        self, s3: Bucket, prefix: str, ask: Ask
    ) -> None:
        s3.put(f"{prefix}o", b"x")
        headers = {name: str(value).replace("{}", f"{prefix}o") for name, value in ask.headers.items()}
        if headers:
            headers["x-amz-metadata-directive"] = "REPLACE"
        ask = replace(ask, path=ask.path.replace("{}", f"{prefix}o"), headers=headers | {"Expect": "100-continue"})
        with s3.wire() as wire:
            reply = wire.ask(ask)
            assert reply.status in (200, 204), str(reply)
            assert reply.interim == (100,) or reply.closes
            goes_on(s3, wire, reply, Row("empty", ask, reply.status))

    @pytest.mark.parametrize("expectation", ["miracles", "200", ""])
    def test_other_expectation_is_passed_over_as_s3_does(self, s3: Bucket, prefix: str, expectation: str) -> None:
        ask = Ask("PUT", f"/conformance/{prefix}o", headers={"Expect": expectation}, body=b"x")
        reply = check(s3, Row("miracles", ask, 200))
        assert (reply.interim, s3.get(f"{prefix}o").body) == ((), b"x")

    def test_old_client_gets_no_interim_answer(self, s3: Bucket, prefix: str) -> None:
        headers = {"Expect": "100-continue"}
        ask = Ask("PUT", f"/conformance/{prefix}o", headers=headers, body=b"x", version="HTTP/1.0")
        with s3.wire() as wire:
            reply = wire.ask(ask)
        assert (reply.status, reply.interim) == (200, ())
