"""Places as people write them: s3://BUCKET/PREFIX."""

_SCHEME = "s3://"


def parse_uri(text: str) -> tuple[str, str]:
    """The bucket and the prefix (or key), which may be empty; neither is decoded.

    Raises:
        ValueError: it is not of that form.
    """
    bucket, _, prefix = text.removeprefix(_SCHEME).partition("/")
    if not text.startswith(_SCHEME) or not bucket:
        raise ValueError(f"{text} is not of the form s3://BUCKET/PREFIX")
    return bucket, prefix


def uri_of(bucket: str, prefix: str) -> str:
    """The place of a bucket and a prefix (or key)."""
    return f"{_SCHEME}{bucket}/{prefix}"
