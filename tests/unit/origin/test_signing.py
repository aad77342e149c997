"""Signatures, against the example that AWS publishes."""

from datetime import UTC, datetime

from tiergate.origin.signing import EMPTY_SHA256, Keys, sign

KEYS = Keys("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
MOMENT_S = datetime(2013, 5, 24, tzinfo=UTC).timestamp()


def signed(url: str, headers: list[tuple[str, str]], keys: Keys = KEYS) -> dict[str, str]:
    return dict(sign("GET", url, headers, EMPTY_SHA256, keys, "us-east-1", MOMENT_S))


def test_bucket_lifecycle_example_has_aws_signature() -> None:
    # https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html
    headers = signed("https://examplebucket.s3.amazonaws.com/?lifecycle", [])
    assert headers["Authorization"] == (
        "AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request, "
        "SignedHeaders=host;x-amz-content-sha256;x-amz-date, "
        "Signature=fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543"
    )


def test_only_amz_headers_and_content_type_are_signed() -> None:
    headers = signed(
        "https://b.s3.amazonaws.com/k",
        [("X-Amz-Meta-A", "1"), ("Content-Type", "x/y"), ("x-tiergate-via", "n"), ("range", "bytes=0-1")],
    )
    assert "SignedHeaders=content-type;host;x-amz-content-sha256;x-amz-date;x-amz-meta-a," in headers["Authorization"]
    assert headers["range"] == "bytes=0-1"


def test_token_is_sent_and_signed_but_not_shown() -> None:
    keys = Keys("AKID", "the secret", "the token")
    headers = signed("https://b.s3.amazonaws.com/k", [], keys)
    assert headers["x-amz-security-token"] == "the token"
    assert "x-amz-security-token" in headers["Authorization"]
    assert "the secret" not in repr(keys)
    assert "the token" not in repr(keys)


def test_path_is_signed_as_it_is() -> None:
    plain = signed("https://b.s3.amazonaws.com/a/c", [])["Authorization"]
    dotted = signed("https://b.s3.amazonaws.com/a/./b/../c", [])["Authorization"]
    assert plain != dotted
