"""Browsers' form uploads: who is let in, what becomes of them, and that they are writes like any other.

https://docs.aws.amazon.com/AmazonS3/latest/API/RESTObjectPOST.html
"""

import base64
import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.conformance.gateway import CLIENT
from tests.conformance.wire import REGION, Ask, Bucket, Identity, Reply, crc32_of
from tests.several import memory_ack

from tiergate.testing.node import RunningNode
from tiergate.testing.origins import ProcessOrigin

BOUNDARY = "----form7MA4YWxk"
Fields = list[tuple[str, str]]
FILE = b"bytes of the file\r\n--not the boundary\r\n"


def conditions_of(fields: Mapping[str, str]) -> list[Any]:
    return [{"bucket": "conformance"}, *({name: value} for name, value in fields.items())]


def policy_of(conditions: Any, expires: timedelta = timedelta(hours=1), **other: Any) -> str:
    expiration = (datetime.now(UTC) + expires).strftime("%Y-%m-%dT%H:%M:%S.000Z")
    document = {"expiration": expiration, "conditions": conditions} | other
    return base64.b64encode(json.dumps({k: v for k, v in document.items() if v is not None}).encode()).decode()


def signed_v4(fields: Mapping[str, str], conditions: list[Any] | None = None, identity: Identity = CLIENT) -> Fields:
    """The form's fields with a policy that allows just them (or `conditions`), and its signature."""
    now = datetime.now(UTC)
    scope = f"{now:%Y%m%d}/{REGION}/s3/aws4_request"
    signing = {
        "x-amz-algorithm": "AWS4-HMAC-SHA256",
        "x-amz-credential": f"{identity.access_key}/{scope}",
        "x-amz-date": f"{now:%Y%m%dT%H%M%SZ}",
    }
    allowed = conditions_of(fields) if conditions is None else conditions
    policy = policy_of(allowed + [{name: value} for name, value in signing.items()])
    key = f"AWS4{identity.secret_key}".encode()
    for word in scope.split("/"):
        key = hmac.digest(key, word.encode(), "sha256")
    signature = hmac.digest(key, policy.encode(), "sha256").hex()
    return [*fields.items(), *signing.items(), ("policy", policy), ("x-amz-signature", signature)]


def signed_v2(fields: Mapping[str, str], policy: str | None = None, identity: Identity = CLIENT) -> Fields:
    policy = policy or policy_of(conditions_of(fields))
    digest = hmac.new(identity.secret_key.encode(), policy.encode(), hashlib.sha1).digest()
    signature = base64.b64encode(digest).decode()
    return [*fields.items(), ("AWSAccessKeyId", identity.access_key), ("policy", policy), ("signature", signature)]


def encoded(fields: Sequence[tuple[str, str]], file: bytes | None = FILE, filename: str = "a b.txt") -> bytes:
    lines: list[bytes] = []
    for name, value in fields:
        lines += [
            f"--{BOUNDARY}".encode(),
            f'Content-Disposition: form-data; name="{name}"'.encode(),
            b"",
            value.encode(),
        ]
    if file is not None:
        disposition = f'Content-Disposition: form-data; name="file"; filename="{filename}"'
        lines += [f"--{BOUNDARY}".encode(), disposition.encode(), b"Content-Type: text/plain", b"", file]
    return b"\r\n".join([*lines, f"--{BOUNDARY}--\r\n".encode()])


def post(s3: Bucket, body: bytes, path: str = "/conformance", **headers: str) -> Reply:
    typed = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"} | headers
    return s3.ask(Ask("POST", path, headers=typed, body=body, signed=False))


@pytest.mark.semantics("P1.8")
@pytest.mark.parametrize("sign", [signed_v4, signed_v2])
def test_form_is_a_write_like_any_other(
    s3: Bucket, node: RunningNode, origin: ProcessOrigin, prefix: str, sign: Any
) -> None:
    key = f"{prefix}f"
    s3.put(key, b"what was there before")
    fields = {
        "key": key,
        "Content-Type": "text/x-shard",
        "x-amz-meta-step": "7",
        "x-amz-checksum-crc32": crc32_of(FILE),
        "tagging": "<Tagging><TagSet><Tag><Key>a b</Key><Value>c&amp;d</Value></Tag></TagSet></Tagging>".replace(
            "&amp;", "-"
        ),
    }
    reply = post(s3, encoded(sign(fields)))
    assert (reply.status, reply.body, reply.headers["x-tiergate-ack"]) == (204, b"", memory_ack()), str(reply)
    assert reply.etag == f'"{hashlib.md5(FILE, usedforsecurity=False).hexdigest()}"'
    assert reply.headers["location"].endswith(f"/conformance/{key}")
    got = s3.get(key)
    assert (got.body, got.etag, got.headers["content-type"]) == (FILE, reply.etag, "text/x-shard")
    assert (got.headers["x-amz-meta-step"], got.headers["x-amz-tagging-count"]) == ("7", "1")
    node.wait_settled()
    direct = origin.client()
    assert direct.get_object(Bucket="conformance", Key=key)["Body"].read() == FILE
    assert direct.get_object_tagging(Bucket="conformance", Key=key)["TagSet"] == [{"Key": "a b", "Value": "c-d"}]
    direct.close()


def test_form_that_only_the_origin_can_carry_out_is_never_hidden_by_an_older_copy(s3: Bucket, prefix: str) -> None:
    key = f"{prefix}f"
    s3.put(key, b"what was there before")
    reply = post(s3, encoded(signed_v4({"key": key, "acl": "private"})))
    assert (reply.status, reply.headers["x-tiergate-ack"]) == (204, "origin"), str(reply)
    assert s3.get(key).body == FILE


def test_answer_is_as_the_form_asks(s3: Bucket, prefix: str) -> None:
    key = f"{prefix}a b&c"
    created = post(s3, encoded(signed_v4({"key": key, "success_action_status": "201"})))
    assert (created.status, created.document.tag) == (201, "PostResponse")
    said = [created.text(name) for name in ("Bucket", "Key", "ETag")]
    assert said == ["conformance", key, created.etag]
    assert created.text("Location") == created.headers["location"]
    for status, answered in (("200", 200), ("204", 204), ("999", 204), ("", 204)):
        assert post(s3, encoded(signed_v4({"key": key, "success_action_status": status}))).status == answered
    sent = post(s3, encoded(signed_v4({"key": key, "success_action_redirect": "http://example.com/done?x=1"})))
    assert sent.status == 303
    assert sent.headers["location"].startswith("http://example.com/done?x=1&bucket=conformance&key=")
    for no_url in ("nowhere", "javascript:alert(1)", "http://[bad"):
        assert post(s3, encoded(signed_v4({"key": key, "success_action_redirect": no_url}))).status == 204


def test_key_may_be_made_of_the_file_s_name(s3: Bucket, prefix: str) -> None:
    allowed = [{"bucket": "conformance"}, ["starts-with", "$key", prefix]]
    body = encoded(signed_v4({"key": prefix + "${filename}"}, allowed), filename="C:\\\\dir/sub\\\\a b.txt")
    assert post(s3, body).status == 204
    assert s3.keys(prefix) == [f"{prefix}a b.txt"]


def test_credentials_in_a_header_need_no_policy(s3: Bucket, prefix: str) -> None:
    headers = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
    body = encoded([("key", f"{prefix}k"), ("success_action_status", "201")])
    assert s3.ask(Ask("POST", "/conformance", headers=headers, body=body)).status == 201
    wrong = Ask("POST", "/conformance", headers=headers, body=body, payload=hashlib.sha256(b"other").hexdigest())
    assert s3.ask(wrong).code == "XAmzContentSHA256Mismatch"


def with_field(fields: Fields, name: str, value: str | None) -> Fields:
    kept = [(known, text) for known, text in fields if known.lower() != name.lower()]
    return kept if value is None else [*kept, (name, value)]


GOOD = {"key": "forms-never-there"}
NOBODY = Identity("AKIDNOBODY", "secret")
FORGER = Identity(CLIENT.access_key, "not the secret")
BROAD = [{"bucket": "conformance"}, ["starts-with", "$key", ""]]
REFUSED: list[tuple[str, bytes, int, str]] = [
    ("no_policy", encoded([*GOOD.items()]), 403, "AccessDenied"),
    ("unknown_key_v4", encoded(signed_v4(GOOD, identity=NOBODY)), 403, "InvalidAccessKeyId"),
    ("unknown_key_v2", encoded(signed_v2(GOOD, identity=NOBODY)), 403, "InvalidAccessKeyId"),
    ("forged_v4", encoded(signed_v4(GOOD, identity=FORGER)), 403, "SignatureDoesNotMatch"),
    ("forged_v2", encoded(signed_v2(GOOD, identity=FORGER)), 403, "SignatureDoesNotMatch"),
    ("no_signature_v4", encoded(with_field(signed_v4(GOOD), "x-amz-signature", None)), 400, "InvalidArgument"),
    ("no_signature_v2", encoded(with_field(signed_v2(GOOD), "signature", None)), 400, "InvalidArgument"),
    ("other_algorithm", encoded(with_field(signed_v4(GOOD), "x-amz-algorithm", "X")), 400, "InvalidArgument"),
    ("no_key", encoded(signed_v4({})), 400, "InvalidArgument"),
    ("empty_key", encoded(signed_v4({"key": ""})), 400, "InvalidArgument"),
    ("long_key", encoded(signed_v4({"key": "k" * 1025})), 400, "KeyTooLongError"),
    ("key_twice", encoded([("key", "other"), *signed_v4(GOOD)]), 400, "InvalidArgument"),
    ("no_file", encoded(signed_v4(GOOD), None), 400, "InvalidArgument"),
    ("not_in_policy", encoded([("x-amz-meta-extra", "1"), *signed_v4(GOOD)]), 403, "AccessDenied"),
    ("other_value", encoded(with_field(signed_v4(GOOD), "key", "other")), 403, "AccessDenied"),
    ("other_start", encoded(signed_v4(GOOD, [*BROAD[:1], ["starts-with", "$key", "user/"]])), 403, "AccessDenied"),
    ("other_bucket", encoded(signed_v4(GOOD, [{"bucket": "elsewhere"}, BROAD[1]])), 403, "AccessDenied"),
    ("not_given", encoded(signed_v4(GOOD, [*BROAD, {"x-amz-meta-a": "1"}])), 403, "AccessDenied"),
    ("too_long", encoded(signed_v4(GOOD, [*BROAD, ["content-length-range", 0, 3]])), 400, "EntityTooLarge"),
    ("too_short", encoded(signed_v4(GOOD, [*BROAD, ["content-length-range", 1000, 2000]])), 400, "EntityTooSmall"),
    ("no_range", encoded(signed_v4(GOOD, [*BROAD, ["content-length-range", 3]])), 400, "InvalidPolicyDocument"),
    ("bad_range", encoded(signed_v4(GOOD, [*BROAD, ["content-length-range", -1, 3]])), 400, "InvalidPolicyDocument"),
    ("empty_rule", encoded(signed_v4(GOOD, [*BROAD, {}])), 400, "InvalidPolicyDocument"),
    ("unknown_rule", encoded(signed_v4(GOOD, [*BROAD, ["ends-with", "$key", "x"]])), 400, "InvalidPolicyDocument"),
    ("expired", encoded(signed_v2(GOOD, policy_of(BROAD, timedelta(hours=-1)))), 403, "AccessDenied"),
    ("no_expiration", encoded(signed_v2(GOOD, policy_of(BROAD, expiration=None))), 400, "InvalidPolicyDocument"),
    ("bad_expiration", encoded(signed_v2(GOOD, policy_of(BROAD, expiration="soon"))), 400, "InvalidPolicyDocument"),
    ("no_conditions", encoded(signed_v2(GOOD, policy_of(None))), 400, "InvalidPolicyDocument"),
    ("case_matters", encoded(signed_v2(GOOD, policy_of(None, CONDITIONS=BROAD))), 400, "InvalidPolicyDocument"),
    ("no_json", encoded(signed_v2(GOOD, base64.b64encode(b"{").decode())), 400, "InvalidPolicyDocument"),
    ("no_base64", encoded(signed_v2(GOOD, "{}")), 400, "InvalidPolicyDocument"),
    ("control", encoded(signed_v4(GOOD | {"x-amz-meta-a": "1\r\nx: y"})), 400, "InvalidArgument"),
    ("bad_tags", encoded(signed_v4(GOOD | {"tagging": "<Tagging>"})), 400, "MalformedXML"),
    ("checksum", encoded(signed_v4(GOOD | {"x-amz-checksum-crc32": "AAAAAA=="})), 400, "BadDigest"),
    ("cut_short", encoded(signed_v4(GOOD))[:-30], 400, "MalformedPOSTRequest"),
    ("no_parts", b"hello", 400, "MalformedPOSTRequest"),
    ("empty", b"", 400, "MalformedPOSTRequest"),
    (
        "large_fields",
        encoded([("x-ignore-a", "x" * 21_000), *signed_v4(GOOD)]),
        400,
        "MaxPostPreDataLengthExceededError",
    ),
]


@pytest.mark.semantics("P1.8")
@pytest.mark.parametrize(("body", "status", "code"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_form_that_is_wrong_changes_nothing(s3: Bucket, body: bytes, status: int, code: str) -> None:
    reply = post(s3, body)
    assert (reply.status, reply.code) == (status, code), str(reply)
    assert s3.get(GOOD["key"]).status == 404


ALLOWED: list[tuple[str, bytes]] = [
    ("field_names_in_any_case", encoded([(name.title(), value) for name, value in signed_v4({"key": "forms-case"})])),
    ("ignored_field", encoded([("x-ignore-this", "1"), *signed_v4({"key": "forms-ignored"})])),
    (
        "condition_in_any_case",
        encoded(signed_v4({"key": "forms-cond"}, [*BROAD[:1], ["StArTs-WiTh", "$KeY", "forms"]])),
    ),
    ("preamble", b"to be ignored\r\n" + encoded(signed_v4({"key": "forms-preamble"}))),
    (
        "exact_length",
        encoded(signed_v4({"key": "forms-len"}, [*BROAD, ["content-length-range", len(FILE), len(FILE)]])),
    ),
    ("empty_file", encoded(signed_v4({"key": "forms-empty"}), b"")),
]


@pytest.mark.parametrize("body", [row[1] for row in ALLOWED], ids=[row[0] for row in ALLOWED])
def test_form_that_is_right_is_taken(s3: Bucket, body: bytes) -> None:
    assert post(s3, body).status == 204


def test_form_goes_through_to_a_versioned_bucket(s3: Bucket, origin: ProcessOrigin, prefix: str) -> None:
    direct = origin.client()
    direct.create_bucket(Bucket="conformance-forms")
    direct.put_bucket_versioning(Bucket="conformance-forms", VersioningConfiguration={"Status": "Enabled"})
    allowed = [{"bucket": "conformance-forms"}, BROAD[1]]
    reply = post(s3, encoded(signed_v4({"key": f"{prefix}v"}, allowed)), "/conformance-forms")
    assert (reply.status, reply.headers["x-tiergate-ack"]) == (204, "origin"), str(reply)
    (version,) = direct.list_object_versions(Bucket="conformance-forms", Prefix=prefix)["Versions"]
    assert reply.headers["x-amz-version-id"] == version["VersionId"]
    direct.close()


def test_boto3_s_presigned_post_is_taken(s3: Bucket, node: RunningNode, prefix: str) -> None:
    fields = {"x-amz-meta-a": "b"}
    made = node.client().generate_presigned_post(
        "conformance", prefix + "${filename}", Fields=dict(fields), Conditions=[fields], ExpiresIn=60
    )
    assert post(s3, encoded([*made["fields"].items()])).status == 204
    assert s3.get(f"{prefix}a b.txt").body == FILE
