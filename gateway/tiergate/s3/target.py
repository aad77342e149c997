"""The request target: bucket, key and query, decoded exactly once from what was on the wire."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

from tiergate.errors import RequestError

MAX_KEY_BYTES = 1024
"""https://docs.aws.amazon.com/AmazonS3/latest/userguide/object-keys.html"""

_ABSOLUTE_FORM = re.compile(r"https?://(?P<authority>[^/?]*)(?P<rest>.*)", re.IGNORECASE | re.DOTALL)
_BAD_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")
# Buckets made before March 2018 may have up to 255 characters, upper case and underscores; the origin knows
# them. https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]")
_IP_ADDRESS = re.compile(r"\d{1,3}(\.\d{1,3}){3}")


@dataclass(frozen=True, slots=True)
class Target:
    """What a request names. `bucket` and `key` are empty at the levels above them.

    `query` keeps order and repetition; a parameter without `=` has the value None.
    """

    bucket: str
    key: str
    query: tuple[tuple[str, str | None], ...]

    @property
    def resource(self) -> str:
        """What an error says it is about."""
        return "/" + "/".join(filter(None, (self.bucket, self.key)))

    def parameter(self, name: str) -> str | None:
        """The first value of query parameter `name` ("" when it has no value), or None when it is absent."""
        for known, value in self.query:
            if known == name:
                return value or ""
        return None


def split_target(raw_target: str, host: str, host_suffixes: Sequence[str]) -> Target:
    """Split a raw request target into what it names.

    `raw_target` is the target as received (bytes outside ASCII as surrogates or as text), in origin or
    absolute form; `host` is the Host header (an absolute form overrides it). A host `bucket.<suffix>`, for a
    suffix in `host_suffixes`, names the bucket; any other host means path style. `+` is a space in the query
    only. Keys are kept byte for byte: `//`, `.`, `..` and leading or trailing slashes mean nothing.

    Raises:
        RequestError: InvalidURI, InvalidBucketName or KeyTooLongError.
    """
    absolute = _ABSOLUTE_FORM.fullmatch(raw_target)
    if absolute:
        host = absolute["authority"]
        raw_target = absolute["rest"] if absolute["rest"].startswith("/") else "/" + absolute["rest"]
    if not raw_target.startswith("/"):
        raise _invalid_uri()
    raw_path, _, raw_query = raw_target[1:].partition("?")
    bucket = _bucket_of_host(host, host_suffixes)
    raw_key = raw_path
    if bucket is None:
        raw_bucket, _, raw_key = raw_path.partition("/")
        bucket = percent_decode(raw_bucket)
        if not bucket and raw_key:
            raise RequestError("InvalidBucketName", bucket=bucket)
    if bucket:
        check_bucket_name(bucket)
    key = percent_decode(raw_key)
    check_key(key)
    return Target(bucket, key, _split_query(raw_query))


def check_bucket_name(bucket: str) -> None:
    """Refuse what no bucket can be called. Names of the older, wider rules pass: the origin may know them.

    Raises:
        RequestError: InvalidBucketName.
    """
    if not _BUCKET.fullmatch(bucket) or ".." in bucket or _IP_ADDRESS.fullmatch(bucket):
        raise RequestError("InvalidBucketName", bucket=bucket)


def check_key(key: str) -> None:
    """Refuse a key of more than `MAX_KEY_BYTES` of UTF-8, or one with a NUL.

    Raises:
        RequestError: KeyTooLongError.
    """
    size_bytes = len(key.encode())
    if size_bytes > MAX_KEY_BYTES:
        raise RequestError("KeyTooLongError", size=size_bytes, max_size_allowed=MAX_KEY_BYTES)
    if "\0" in key:
        raise RequestError("KeyTooLongError", "A key cannot hold the NUL character")


def percent_decode(raw: str) -> str:
    """Decode percent-encoded UTF-8 once; `+` stays.

    Raises:
        RequestError: InvalidURI, for a lone `%` or bytes that are not UTF-8.
    """
    if _BAD_PERCENT.search(raw):
        raise _invalid_uri()
    try:
        return unquote_to_bytes(raw.encode("utf-8", "surrogateescape")).decode()
    except UnicodeError as error:
        raise _invalid_uri() from error


def _split_query(raw_query: str) -> tuple[tuple[str, str | None], ...]:
    pairs: list[tuple[str, str | None]] = []
    for piece in raw_query.split("&"):
        if piece:
            name, equals, value = piece.replace("+", " ").partition("=")
            pairs.append((percent_decode(name), percent_decode(value) if equals else None))
    return tuple(pairs)


def _bucket_of_host(host: str, host_suffixes: Sequence[str]) -> str | None:
    name = _without_port(host)
    for suffix in sorted(map(_without_port, host_suffixes), key=len, reverse=True):
        if name == suffix:
            return None
        if name.endswith("." + suffix):
            return name[: -len(suffix) - 1]
    return None


def _without_port(host: str) -> str:
    return re.sub(r":\d*$", "", host.strip()).lower().strip(".")


def _invalid_uri() -> RequestError:
    return RequestError("InvalidURI")
