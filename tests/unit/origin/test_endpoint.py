"""URLs of the origin, byte for byte."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiergate.errors import ConfigError
from tiergate.origin.endpoint import Endpoint, canonical_query, encode_key, encode_query


def test_own_endpoint_is_in_path_style() -> None:
    endpoint = Endpoint("http://127.0.0.1:8333/", "us-east-1")
    assert endpoint.url("bucket", "a b//c/../d", "") == "http://127.0.0.1:8333/bucket/a%20b//c/../d"
    assert endpoint.url("bucket", "", "list-type=2") == "http://127.0.0.1:8333/bucket?list-type=2"
    assert endpoint.url("", "", "") == "http://127.0.0.1:8333/"
    assert endpoint.url("bucket", "/x", "") == "http://127.0.0.1:8333/bucket//x"


def test_aws_is_in_virtual_host_style_where_the_certificate_allows() -> None:
    endpoint = Endpoint(None, "eu-west-1")
    assert endpoint.url("bucket", "/k", "") == "https://bucket.s3.eu-west-1.amazonaws.com//k"
    assert endpoint.url("bucket", "", "a=b") == "https://bucket.s3.eu-west-1.amazonaws.com/?a=b"
    assert endpoint.url("my.bucket", "k", "") == "https://s3.eu-west-1.amazonaws.com/my.bucket/k"
    assert endpoint.url("Old_Bucket", "k", "") == "https://s3.eu-west-1.amazonaws.com/Old_Bucket/k"
    assert Endpoint(None, "cn-north-1").url("b-b", "", "").startswith("https://b-b.s3.cn-north-1.amazonaws.com.cn/")


def test_learnt_region_holds_for_its_bucket_only() -> None:
    endpoint = Endpoint(None, "us-east-1")
    assert endpoint.learn_region("far", "eu-west-1")
    assert not endpoint.learn_region("far", "eu-west-1")
    assert not endpoint.learn_region("", "eu-west-1")
    assert endpoint.url("far", "k", "") == "https://far.s3.eu-west-1.amazonaws.com/k"
    assert endpoint.region_of("near") == "us-east-1"


@pytest.mark.parametrize("text", ["127.0.0.1:9000", "ftp://host", "http://host/path", "http://u@host", "http://"])
def test_endpoint_that_is_no_url_of_a_host_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        Endpoint(text, "us-east-1")


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=50))
def test_encoded_key_holds_every_byte(key: str) -> None:
    from urllib.parse import unquote

    encoded = encode_key(key)
    assert unquote(encoded) == key
    assert set(encoded) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.~/%")


@pytest.mark.parametrize(
    ("raw", "canonical"),
    [
        ("", ""),
        ("uploads", "uploads"),
        ("uploads=", "uploads="),
        ("a=b+c&d=%2f:", "a=b%20c&d=%2F%3A"),
        ("z=1&a=%C3%A9&a=%25", "z=1&a=%C3%A9&a=%25"),
        ("a=x=y", "a=x%3Dy"),
    ],
)
def test_query_is_encoded_the_one_way(raw: str, canonical: str) -> None:
    assert canonical_query(raw) == canonical
    assert canonical_query(canonical) == canonical


def test_query_parameters_are_encoded() -> None:
    assert encode_query([("uploads", None), ("prefix", "a b/ü"), ("x", "")]) == "uploads&prefix=a%20b%2F%C3%BC&x="
