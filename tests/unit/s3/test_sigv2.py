"""URLs presigned with version 2: boto3's default, AWS's example, and what must be refused."""

from typing import Any, cast

import boto3
import pytest
from botocore.config import Config

from tiergate.errors import RequestError
from tiergate.s3 import sigv2, sigv4
from tiergate.s3.auth import authenticate
from tiergate.s3.sigv4 import UNSIGNED_PAYLOAD, Head

KEY = "AKIAIOSFODNN7EXAMPLE"
SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
ENDPOINT = "http://127.0.0.1:9"
HOST = ("Host", "127.0.0.1:9")


def secrets(access_key: str) -> str | None:
    return {KEY: SECRET}.get(access_key)


def presign(operation: str, token: str | None = None, **parameters: Any) -> str:
    session = boto3.Session(KEY, SECRET, region_name="us-east-1", aws_session_token=token)
    client = cast(Any, session.client("s3", endpoint_url=ENDPOINT, config=Config(s3={"addressing_style": "path"})))
    url = cast(str, client.generate_presigned_url(operation, {"Bucket": "bkt", **parameters}, 60))
    client.close()
    assert "AWSAccessKeyId=" in url
    return url.removeprefix(ENDPOINT)


def expires_of(target: str) -> float:
    return float(dict(Head("GET", target, []).parameters())["Expires"])


def code_of(head: Head, now_s: float) -> str:
    with pytest.raises(RequestError) as caught:
        authenticate(head, secrets, now_s)
    assert SECRET not in f"{caught.value} {caught.value.context}"
    return caught.value.code


def test_verify_example_published_by_aws_accepted() -> None:
    signature = "NpgCjnDzrM%2BWFzoENXmpNDUsSn8%3D"
    target = f"/photos/puppy.jpg?AWSAccessKeyId={KEY}&Expires=1175139620&Signature={signature}"
    head = Head("GET", target, [("Host", "johnsmith.s3.amazonaws.com")])
    verified = sigv2.verify(head, secrets, 1175139620, host_bucket="johnsmith")
    assert verified is not None
    assert (verified.access_key, verified.payload, verified.presigned) == (KEY, UNSIGNED_PAYLOAD, True)
    assert code_of(head, 1175139620) == "SignatureDoesNotMatch"  # without the bucket of the host


@pytest.mark.parametrize("key", ["k", "a//b", "a+b", "a b", "100%2Fx", "ünï/码", "a;b:c@d=e&f", "./x", "/lead"])
@pytest.mark.parametrize("token", [None, "tok/en+=="])
def test_verify_boto3_default_presigned_accepted(key: str, token: str | None) -> None:
    target = presign("get_object", token, Key=key, ResponseContentType="a/b; c+d", VersionId="v 1")
    verified = authenticate(Head("GET", target, [HOST]), secrets, expires_of(target))
    assert verified is not None
    assert verified.token == (token or "")


def test_verify_boto3_presigned_put_with_type_needs_that_header() -> None:
    target = presign("put_object", Key="k", ContentType="text/plain", Metadata={"a": "b"})
    now_s = expires_of(target)
    with_type = Head("PUT", target, [HOST, ("Content-Type", "text/plain")])
    assert authenticate(with_type, secrets, now_s) is not None
    assert code_of(Head("PUT", target, [HOST, ("Content-Type", "text/html")]), now_s) == "SignatureDoesNotMatch"
    assert code_of(Head("PUT", target, [HOST]), now_s) == "SignatureDoesNotMatch"


def test_verify_boto3_presigned_part_accepted() -> None:
    target = presign("upload_part", Key="k", UploadId="u+/=", PartNumber=3)
    assert authenticate(Head("PUT", target, [HOST]), secrets, expires_of(target)) is not None


def test_verify_tampered_or_late_refused() -> None:
    target = presign("get_object", Key="k")
    now_s = expires_of(target)
    assert code_of(Head("GET", target, [HOST]), now_s + 1) == "AccessDenied"
    mutations = {
        target.replace("/k?", "/k2?"): "SignatureDoesNotMatch",
        target.replace("Expires=", "Expires=9"): "SignatureDoesNotMatch",
        target.replace("Expires=", "Expires=x"): "AccessDenied",
        target.replace(KEY, "AKIANOBODY"): "InvalidAccessKeyId",
        target + "&acl": "SignatureDoesNotMatch",
        target + "&%61cl": "SignatureDoesNotMatch",
        target + "&retention": "AccessDenied",
        target + "&x-amz-acl=public-read": "SignatureDoesNotMatch",
        target + "&Expires=99999999999": "InvalidArgument",
        target.replace("AWSAccessKeyId=", "Other="): "AccessDenied",
        target + "&X-Amz-Algorithm=AWS4-HMAC-SHA256": "InvalidArgument",
    }
    for mutation, code in mutations.items():
        assert (mutation, code_of(Head("GET", mutation, [HOST]), now_s)) == (mutation, code)
    assert code_of(Head("DELETE", target, [HOST]), now_s) == "SignatureDoesNotMatch"
    assert code_of(Head("GET", target, [HOST, ("x-amz-acl", "private")]), now_s) == "SignatureDoesNotMatch"


def test_verify_line_break_in_a_carried_header_refused() -> None:
    target = presign("put_object", Key="k", ACL="private", Metadata={"a": "b"})
    now_s = expires_of(target)
    assert authenticate(Head("PUT", target, [HOST]), secrets, now_s) is not None
    first, second = "x-amz-acl=private", "x-amz-meta-a=b"
    assert first in target
    assert second in target
    joined = target.replace(f"&{second}", "").replace(f"{second}&", "")
    joined = joined.replace(first, first + "%0Ax-amz-meta-a:b")
    assert code_of(Head("PUT", joined, [HOST]), now_s) == "SignatureDoesNotMatch"


def test_verify_no_such_credentials_none() -> None:
    assert sigv2.verify(Head("GET", "/b/k?acl", [HOST]), secrets, 0) is None
    assert sigv4.verify(Head("GET", presign("get_object", Key="k"), [HOST]), secrets, 0) is None
