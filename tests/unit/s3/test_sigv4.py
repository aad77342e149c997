"""Signature Version 4 against AWS's own examples, stock signers, and everything that must be refused."""

import base64
import hashlib
import io
import zlib
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

import boto3
import pytest
from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from botocore.config import Config

from tiergate.errors import RequestError
from tiergate.s3.auth import authenticate, headers_in_query
from tiergate.s3.bodyverifier import BodyVerifier
from tiergate.s3.canonical import EMPTY_SHA256, request_text, sign_text, signing_key
from tiergate.s3.chunked import ChunkedDecoder, strip_aws_chunked
from tiergate.s3.sigv4 import (
    STREAMING_SIGNED,
    STREAMING_SIGNED_TRAILER,
    STREAMING_UNSIGNED_TRAILER,
    UNSIGNED_PAYLOAD,
    Credentials,
    Head,
    describe,
    sign,
    verify,
)

KEY = "AKIAIOSFODNN7EXAMPLE"
SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
NOW = datetime(2013, 5, 24, tzinfo=UTC)
NOW_S = NOW.timestamp()
HOST = "examplebucket.s3.amazonaws.com"
WELCOME = hashlib.sha256(b"Welcome to Amazon S3.").hexdigest()
BASE = [("Host", HOST), ("x-amz-date", "20130524T000000Z")]


def secrets(access_key: str) -> str | None:
    return {KEY: SECRET}.get(access_key)


def authorization(signed: str, signature: str, scope: str = "20130524/us-east-1/s3/aws4_request") -> str:
    return f"AWS4-HMAC-SHA256 Credential={KEY}/{scope},SignedHeaders={signed},Signature={signature}"


def example(target: str, extra: list[tuple[str, str]], signed: str, signature: str, method: str = "GET") -> Head:
    return Head(method, target, [*BASE, *extra, ("Authorization", authorization(signed, signature))])


GET_OBJECT = example(
    "/test.txt",
    [("Range", "bytes=0-9"), ("x-amz-content-sha256", EMPTY_SHA256)],
    "host;range;x-amz-content-sha256;x-amz-date",
    "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41",
)
PUT_OBJECT = example(
    "/test$file.text",
    [
        ("Date", "Fri, 24 May 2013 00:00:00 GMT"),
        ("x-amz-storage-class", "REDUCED_REDUNDANCY"),
        ("x-amz-content-sha256", WELCOME),
    ],
    "date;host;x-amz-content-sha256;x-amz-date;x-amz-storage-class",
    "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd",
    "PUT",
)
LIFECYCLE = example(
    "/?lifecycle",
    [("x-amz-content-sha256", EMPTY_SHA256)],
    "host;x-amz-content-sha256;x-amz-date",
    "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543",
)
LISTING = example(
    "/?prefix=J&max-keys=2",
    [("x-amz-content-sha256", EMPTY_SHA256)],
    "host;x-amz-content-sha256;x-amz-date",
    "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7",
)
PRESIGNED_TARGET = (
    "/test.txt?X-Amz-Algorithm=AWS4-HMAC-SHA256"
    f"&X-Amz-Credential={KEY}%2F20130524%2Fus-east-1%2Fs3%2Faws4_request"
    "&X-Amz-Date=20130524T000000Z&X-Amz-Expires=86400&X-Amz-SignedHeaders=host"
    "&X-Amz-Signature=aeeed9bbccd4d02ee5c0109b86d86835f995330da4c265957d157751f604d404"
)


@pytest.mark.parametrize("head", [GET_OBJECT, PUT_OBJECT, LIFECYCLE, LISTING])
def test_verify_example_published_by_aws_accepted(head: Head) -> None:
    verified = verify(head, secrets, NOW_S)
    assert verified is not None
    assert verified.access_key == KEY
    assert verified.payload == (WELCOME if head.method == "PUT" else EMPTY_SHA256)
    assert not verified.presigned


def test_verify_presigned_example_published_by_aws_accepted() -> None:
    verified = verify(Head("GET", PRESIGNED_TARGET, [("Host", HOST)]), secrets, NOW_S + 86_400)
    assert verified is not None
    assert (verified.payload, verified.presigned, verified.chunk_signer) == (UNSIGNED_PAYLOAD, True, None)


def test_verify_nothing_signed_anonymous() -> None:
    assert verify(Head("GET", "/b/k?list-type=2", [("Host", HOST)]), secrets, NOW_S) is None


def code_of(head: Head, now_s: float = NOW_S, **options: Any) -> str:
    with pytest.raises(RequestError) as caught:
        authenticate(head, secrets, now_s, **options)
    shown = f"{caught.value!r} {caught.value} {caught.value.context}"
    assert SECRET not in shown
    return caught.value.code


def changed(head: Head, name: str, value: str | None) -> Head:
    kept = [(known, text) for known, text in head.headers if known.lower() != name.lower()]
    return Head(head.method, head.raw_target, kept if value is None else [*kept, (name, value)])


SIGNED = "host;range;x-amz-content-sha256;x-amz-date"
SIGNATURE = "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"
REFUSED = {
    "another range": (changed(GET_OBJECT, "Range", "bytes=0-10"), "SignatureDoesNotMatch"),
    "a signed header taken away": (changed(GET_OBJECT, "Range", None), "SignatureDoesNotMatch"),
    "another host": (changed(GET_OBJECT, "Host", "other.s3.amazonaws.com"), "SignatureDoesNotMatch"),
    "another method": (Head("DELETE", "/test.txt", GET_OBJECT.headers), "SignatureDoesNotMatch"),
    "another path": (Head("GET", "/test.txt/", GET_OBJECT.headers), "SignatureDoesNotMatch"),
    "a doubled slash": (Head("GET", "//test.txt", GET_OBJECT.headers), "SignatureDoesNotMatch"),
    "a parameter": (Head("GET", "/test.txt?acl", GET_OBJECT.headers), "SignatureDoesNotMatch"),
    "another host in the target": (
        Head("GET", "http://other.s3.amazonaws.com/test.txt", GET_OBJECT.headers),
        "SignatureDoesNotMatch",
    ),
    "another payload": (changed(GET_OBJECT, "x-amz-content-sha256", WELCOME), "SignatureDoesNotMatch"),
    "an unsigned x-amz header": (
        Head("GET", "/test.txt", [*GET_OBJECT.headers, ("X-Amz-Acl", "public-read")]),
        "AccessDenied",
    ),
    "host not signed": (
        changed(GET_OBJECT, "Authorization", authorization(SIGNED.removeprefix("host;"), SIGNATURE)),
        "AccessDenied",
    ),
    "no payload hash": (changed(GET_OBJECT, "x-amz-content-sha256", None), "InvalidRequest"),
    "a payload hash that is none": (changed(GET_OBJECT, "x-amz-content-sha256", "abc"), "InvalidArgument"),
    "an ECDSA mode": (
        changed(GET_OBJECT, "x-amz-content-sha256", "STREAMING-AWS4-ECDSA-P256-SHA256-PAYLOAD"),
        "NotImplemented",
    ),
    "no date": (changed(GET_OBJECT, "x-amz-date", None), "AccessDenied"),
    "an impossible date": (changed(GET_OBJECT, "x-amz-date", "20130524T250000Z"), "AccessDenied"),
    "another day in the scope": (
        changed(
            GET_OBJECT,
            "Authorization",
            authorization(SIGNED, SIGNATURE, "20130523/us-east-1/s3/aws4_request"),
        ),
        "AuthorizationHeaderMalformed",
    ),
    "another service": (
        changed(
            GET_OBJECT,
            "Authorization",
            authorization(SIGNED, SIGNATURE, "20130524/us-east-1/ec2/aws4_request"),
        ),
        "AuthorizationHeaderMalformed",
    ),
    "another terminator": (
        changed(GET_OBJECT, "Authorization", authorization(SIGNED, SIGNATURE, "20130524/us-east-1/s3/aws5")),
        "AuthorizationHeaderMalformed",
    ),
    "a short credential": (
        changed(GET_OBJECT, "Authorization", authorization(SIGNED, SIGNATURE, "us-east-1/s3/aws4_request")),
        "AuthorizationHeaderMalformed",
    ),
    "no signature": (
        changed(GET_OBJECT, "Authorization", authorization(SIGNED, SIGNATURE).rpartition(",")[0]),
        "AuthorizationHeaderMalformed",
    ),
    "an empty signed header": (
        changed(GET_OBJECT, "Authorization", authorization(SIGNED + ";", SIGNATURE)),
        "AuthorizationHeaderMalformed",
    ),
    "an unknown key": (
        changed(GET_OBJECT, "Authorization", authorization(SIGNED, SIGNATURE).replace(KEY, "AKIANOBODY")),
        "InvalidAccessKeyId",
    ),
    "a signature that is not ASCII": (
        changed(GET_OBJECT, "Authorization", authorization(SIGNED, "é" * 64)),
        "SignatureDoesNotMatch",
    ),
    "version 2 in a header": (changed(GET_OBJECT, "Authorization", f"AWS {KEY}:c2ln"), "InvalidRequest"),
    "another scheme": (changed(GET_OBJECT, "Authorization", "Bearer token"), "InvalidArgument"),
    "two Authorization headers": (
        Head("GET", "/test.txt", [*GET_OBJECT.headers, ("Authorization", "Bearer token")]),
        "InvalidRequest",
    ),
    "header and query": (Head("GET", PRESIGNED_TARGET, GET_OBJECT.headers), "InvalidArgument"),
    "header and version 2 query": (Head("GET", "/k?Signature=x", GET_OBJECT.headers), "InvalidArgument"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_verify_header_auth_tampered_or_malformed_refused(case: str) -> None:
    head, code = REFUSED[case]
    assert code_of(head) == code


@pytest.mark.parametrize(("offset_s", "ok"), [(900, True), (-900, True), (901, False), (-901, False)])
def test_verify_clock_skew_bounded_at_fifteen_minutes(offset_s: int, ok: bool) -> None:
    if ok:
        assert verify(GET_OBJECT, secrets, NOW_S + offset_s) is not None
    else:
        assert code_of(GET_OBJECT, NOW_S + offset_s) == "RequestTimeTooSkewed"


def test_verify_region_limited_when_asked() -> None:
    assert verify(GET_OBJECT, secrets, NOW_S, regions={"us-east-1"}) is not None
    assert code_of(GET_OBJECT, regions={"eu-west-1"}) == "AuthorizationHeaderMalformed"


def replaced(old: str, new: str) -> Head:
    assert old in PRESIGNED_TARGET
    return Head("GET", PRESIGNED_TARGET.replace(old, new), [("Host", HOST)])


BAD_QUERY = "AuthorizationQueryParametersError"
REFUSED_QUERY = {
    "longer life": (replaced("Expires=86400", "Expires=86401"), "SignatureDoesNotMatch"),
    "eternal life": (replaced("Expires=86400", "Expires=604801"), BAD_QUERY),
    "no life": (replaced("Expires=86400", "Expires=0"), BAD_QUERY),
    "negative life": (replaced("Expires=86400", "Expires=-1"), BAD_QUERY),
    "a life that is no number": (replaced("Expires=86400", "Expires=1e3"), BAD_QUERY),
    "no life given": (replaced("&X-Amz-Expires=86400", ""), BAD_QUERY),
    "no signature": (replaced("&X-Amz-Signature", "&Other"), BAD_QUERY),
    "another algorithm": (replaced("AWS4-HMAC-SHA256", "AWS4-ECDSA-P256-SHA256"), BAD_QUERY),
    "a date of another form": (replaced("20130524T000000Z", "2013-05-24"), BAD_QUERY),
    "another day in the scope": (replaced("%2F20130524%2F", "%2F20130523%2F"), BAD_QUERY),
    "a repeated parameter": (replaced("&X-Amz-Expires=86400", "&X-Amz-Expires=86400" * 2), BAD_QUERY),
    "one parameter more": (replaced("/test.txt?", "/test.txt?versionId=1&"), "SignatureDoesNotMatch"),
    "another key": (replaced("/test.txt", "/test2.txt"), "SignatureDoesNotMatch"),
    "an unsigned x-amz header": (
        Head("GET", PRESIGNED_TARGET, [("Host", HOST), ("x-amz-acl", "private")]),
        "AccessDenied",
    ),
}


@pytest.mark.parametrize("case", REFUSED_QUERY)
def test_verify_presigned_tampered_or_malformed_refused(case: str) -> None:
    head, code = REFUSED_QUERY[case]
    assert code_of(head) == code


def test_verify_presigned_outside_its_time_access_denied() -> None:
    head = Head("GET", PRESIGNED_TARGET, [("Host", HOST)])
    assert code_of(head, NOW_S + 86_401) == "AccessDenied"
    assert code_of(head, NOW_S - 901) == "AccessDenied"


def test_secret_values_never_in_a_repr() -> None:
    head = signed_head("PUT", "/b/k", {"x-amz-decoded-content-length": "0"}, STREAMING_SIGNED)
    verified = verify(head, secrets, NOW_S)
    assert verified is not None
    signer = verified.chunk_signer
    assert signer is not None
    credentials = Credentials(KEY, SECRET, "token-text")
    shown = f"{verified!r} {signer!r} {credentials!r} {head!r}"
    assert SECRET not in shown
    assert "token-text" not in shown
    assert repr(signer.key) not in shown


def signed_head(method: str, target: str, headers: dict[str, str], payload: str) -> Head:
    sent = sign(method, f"http://{HOST}{target}", headers, payload, Credentials(KEY, SECRET), "us-east-1", NOW)
    return Head(method, target, [("Host", HOST), *sent.items()])


@pytest.mark.parametrize(
    "payload",
    [UNSIGNED_PAYLOAD, STREAMING_UNSIGNED_TRAILER, STREAMING_SIGNED, STREAMING_SIGNED_TRAILER, EMPTY_SHA256],
)
def test_sign_then_verify_every_payload_mode_kept(payload: str) -> None:
    verified = verify(signed_head("PUT", "/b/k", {"x-amz-meta-a": "  b   c "}, payload), secrets, NOW_S)
    assert verified is not None
    assert verified.payload == payload
    assert (verified.chunk_signer is not None) == payload.startswith("STREAMING-AWS4")


def test_sign_old_credentials_and_dates_dropped_token_added() -> None:
    headers = {"authorization": "old", "X-Amz-Security-Token": "old", "Date": "old", "x-amz-date": "old"}
    sent = sign("GET", f"http://{HOST}/k", headers, EMPTY_SHA256, Credentials(KEY, SECRET, "tok"), "r", NOW)
    assert "old" not in sent.values()
    verified = verify(Head("GET", "/k", [("Host", HOST), *sent.items()]), secrets, NOW_S)
    assert verified is not None
    assert verified.token == "tok"


def test_sign_time_zone_of_now_does_not_matter() -> None:
    there = NOW.astimezone(timezone(timedelta(hours=9)))
    one, other = (
        sign("GET", f"http://{HOST}/k", {}, EMPTY_SHA256, Credentials(KEY, SECRET), "r", now) for now in (NOW, there)
    )
    assert one == other


def test_verify_date_header_alone_accepted_when_signed() -> None:
    date = "Fri, 24 May 2013 00:00:00 GMT"
    signed = "date;host;x-amz-content-sha256"
    block = f"date:{date}\nhost:{HOST}\nx-amz-content-sha256:{EMPTY_SHA256}\n"
    text = request_text(
        "20130524T000000Z",
        "20130524/us-east-1/s3/aws4_request",
        f"GET\n/k\n\n{block}\n{signed}\n{EMPTY_SHA256}",
    )
    signature = sign_text(signing_key(SECRET, "20130524", "us-east-1"), text)
    headers = [("Host", HOST), ("Date", date), ("x-amz-content-sha256", EMPTY_SHA256)]
    head = Head("GET", "/k", [*headers, ("Authorization", authorization(signed, signature))])
    assert verify(head, secrets, NOW_S) is not None
    unsigned = Head("GET", "/k", [*headers, ("Authorization", authorization(signed.removeprefix("date;"), signature))])
    assert code_of(unsigned) == "AccessDenied"


def test_verify_duplicate_headers_joined_in_order() -> None:
    sent = sign("PUT", f"http://{HOST}/k", {"x-amz-meta-a": "1,2"}, EMPTY_SHA256, Credentials(KEY, SECRET), "r", NOW)
    rest = [("Host", HOST), *((name, value) for name, value in sent.items() if name != "x-amz-meta-a")]
    assert verify(Head("PUT", "/k", [*rest, ("X-Amz-Meta-A", "1"), ("x-amz-meta-a", "2")]), secrets, NOW_S)
    assert code_of(Head("PUT", "/k", [*rest, ("x-amz-meta-a", "2"), ("x-amz-meta-a", "1")])) == "SignatureDoesNotMatch"


def test_verify_signed_header_without_a_value_taken_away_refused() -> None:
    head = signed_head("PUT", "/b/k", {"x-amz-tagging": ""}, EMPTY_SHA256)
    assert verify(head, secrets, NOW_S) is not None
    assert code_of(changed(head, "x-amz-tagging", None)) == "SignatureDoesNotMatch"


def test_describe_nothing_checked_mode_honoured() -> None:
    head = changed(GET_OBJECT, "x-amz-content-sha256", STREAMING_SIGNED)
    verified = describe(head)
    assert (verified.access_key, verified.payload, verified.chunk_signer) == (KEY, STREAMING_SIGNED, None)
    presigned = describe(Head("GET", PRESIGNED_TARGET, []))
    assert (presigned.access_key, presigned.payload, presigned.presigned) == (KEY, UNSIGNED_PAYLOAD, True)
    assert describe(Head("GET", "/", [])).access_key == ""
    with pytest.raises(RequestError, match="sha256"):
        describe(changed(GET_OBJECT, "x-amz-content-sha256", "nonsense"))


def test_headers_in_query_hoisted_found_and_authentication_left_out() -> None:
    target = PRESIGNED_TARGET + "&x-amz-acl=private&X-Amz-Meta-A=b%20c&x-amz-tagging=t&versionId=1"
    target += "&x-amz-checksum-crc32=AAAAAA%3D%3D&x-amz-sdk-checksum-algorithm=CRC32"
    head = Head("PUT", target, [("Host", HOST), ("X-Amz-Tagging", "sent")])
    assert headers_in_query(head) == {"x-amz-acl": "private", "x-amz-meta-a": "b c"}
    with pytest.raises(RequestError, match="control"):
        headers_in_query(Head("PUT", "/k?x-amz-acl=a%0D%0Ab", []))


def capture(call: Callable[[Any], Any], endpoint: str, config: Config | None = None) -> AWSPreparedRequest:
    """What a stock boto3 client would send."""
    session = boto3.Session(KEY, SECRET, region_name="eu-central-1")
    client = cast(Any, session.client("s3", endpoint_url=endpoint, config=config))
    seen: list[AWSPreparedRequest] = []

    def keep(request: AWSPreparedRequest, **_: object) -> AWSResponse:
        seen.append(request)

        class Raw:
            def stream(self, **_: object) -> list[bytes]:
                return []

        return AWSResponse(request.url, 200, {"ETag": '"e"'}, Raw())  # type: ignore[arg-type]

    client.meta.events.register("before-send.s3", keep)
    call(client)
    client.close()
    return seen[0]


def head_of(request: AWSPreparedRequest) -> Head:
    parts = urlsplit(request.url)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    headers = [
        (name, value.decode() if isinstance(value, bytes) else str(value)) for name, value in request.headers.items()
    ]
    if not any(name.lower() == "host" for name, _ in headers):
        headers.append(("Host", parts.netloc))
    return Head(request.method, target, headers)


def date_of(head: Head) -> float:
    text = head.single("x-amz-date") or dict(head.parameters())["X-Amz-Date"]
    return datetime.strptime(text, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp()


@pytest.mark.parametrize("body_bytes", [0, 5, 3_000_000])
def test_boto3_over_https_trailing_checksum_proved(body_bytes: int) -> None:
    body = b"x" * body_bytes
    sent: list[bytes] = []

    def put(client: Any) -> None:
        def keep_body(request: Any, **_: object) -> None:
            sent.append(request.body.read())

        client.meta.events.register_first("before-send.s3", keep_body)
        client.put_object(Bucket="bkt", Key="k", Body=io.BytesIO(body), ContentEncoding="gzip")

    head = head_of(capture(put, "https://127.0.0.1:9"))
    verified = verify(head, secrets, date_of(head))
    assert verified is not None
    assert verified.payload == STREAMING_UNSIGNED_TRAILER
    assert strip_aws_chunked(head.single("content-encoding") or "") == "gzip"
    verifier = BodyVerifier(head.headers, verified.payload)
    decoder = ChunkedDecoder(int(head.single("x-amz-decoded-content-length") or ""), None, [verifier.trailer or ""])
    for piece in decoder.feed(sent[0]):
        verifier.update(piece)
    decoder.finish()
    expected = base64.b64encode(zlib.crc32(body).to_bytes(4, "big")).decode()
    assert verifier.finish(decoder.trailers) == {"crc32": expected}
    assert decoder.decoded_bytes == body_bytes


ODD_KEYS = [
    "a//b",
    "/lead",
    "trail/",
    "./x",
    "a/../b",
    "a+b",
    "a b",
    "100%2Fliteral",
    "ünï/码",
    "a;b:c@d=e&f",
    "~_-.",
]


@pytest.mark.parametrize("key", ODD_KEYS)
def test_verify_boto3_odd_key_accepted(key: str) -> None:
    request = capture(
        lambda client: client.put_object(Bucket="bkt", Key=key, Body=b"x", Metadata={"a": "b  c"}),
        "http://127.0.0.1:9",
    )
    head = head_of(request)
    verified = verify(head, secrets, date_of(head))
    assert verified is not None
    assert verified.payload == hashlib.sha256(b"x").hexdigest()


@pytest.mark.parametrize("prefix", ["a b/", "a+b", "ü&=;", "x/y:z"])
def test_verify_boto3_listing_accepted(prefix: str) -> None:
    request = capture(
        lambda client: client.list_objects_v2(Bucket="bkt", Prefix=prefix, Delimiter="/"),
        "http://127.0.0.1:9",
    )
    head = head_of(request)
    assert verify(head, secrets, date_of(head)) is not None


@pytest.mark.parametrize("key", ODD_KEYS)
def test_verify_boto3_presigned_v4_accepted_and_bound_to_its_method(key: str) -> None:
    session = boto3.Session(KEY, SECRET, region_name="eu-central-1", aws_session_token="tok")
    client = cast(
        Any,
        session.client(
            "s3",
            endpoint_url="http://127.0.0.1:9",
            config=Config(signature_version="s3v4", s3={"addressing_style": "path"}),
        ),
    )
    url = client.generate_presigned_url(
        "get_object", {"Bucket": "bkt", "Key": key, "ResponseContentType": "text/plain; a=b"}, 60
    )
    client.close()
    target = url.removeprefix("http://127.0.0.1:9")
    head = Head("GET", target, [("Host", "127.0.0.1:9")])
    signed_s = datetime.strptime(parse_qs(urlsplit(url).query)["X-Amz-Date"][0], "%Y%m%dT%H%M%SZ")
    now_s = signed_s.replace(tzinfo=UTC).timestamp() + 60
    verified = verify(head, secrets, now_s)
    assert verified is not None
    assert verified.token == "tok"
    assert code_of(Head("DELETE", target, head.headers), now_s) == "SignatureDoesNotMatch"
    assert code_of(head, now_s + 1) == "AccessDenied"


def test_verify_query_sent_unencoded_but_signed_canonically_accepted() -> None:
    head = signed_head("GET", "/b?prefix=a%2Fb%20c", {}, EMPTY_SHA256)
    assert verify(Head("GET", "/b?prefix=a/b+c", head.headers), secrets, NOW_S) is not None
    assert code_of(Head("GET", "/b?prefix=a/b%2Bc", head.headers)) == "SignatureDoesNotMatch"
