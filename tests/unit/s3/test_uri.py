"""Places as people write them."""

import pytest

from tiergate.s3.uri import parse_uri, uri_of


@pytest.mark.parametrize(
    ("text", "bucket", "prefix"),
    [
        ("s3://b", "b", ""),
        ("s3://b/", "b", ""),
        ("s3://b/run/step_1/", "b", "run/step_1/"),
        ("s3://b//k", "b", "/k"),
        ("s3://b/a b?c#d%20/é", "b", "a b?c#d%20/é"),
        ("s3://b/s3://c", "b", "s3://c"),
    ],
)
def test_place_is_read_and_written(text: str, bucket: str, prefix: str) -> None:
    assert parse_uri(text) == (bucket, prefix)
    assert parse_uri(uri_of(bucket, prefix)) == (bucket, prefix)


@pytest.mark.parametrize("text", ["", "b/k", "s3://", "s3:///k", "S3://b", "http://b/k", "s3:/b"])
def test_what_is_no_place_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not of the form s3://BUCKET/PREFIX"):
        parse_uri(text)
