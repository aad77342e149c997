"""Byte ranges of reads and of copies. Inside, a range is half-open: [start, end).

https://docs.aws.amazon.com/AmazonS3/latest/API/API_GetObject.html and RFC 9110 section 14.
"""

import re

from tiergate.errors import RequestError

_RANGE = re.compile(r"\s*bytes\s*=\s*(?P<first>[0-9]*)\s*-\s*(?P<last>[0-9]*)\s*", re.IGNORECASE)
_COPY_RANGE = re.compile(r"bytes=(?P<first>[0-9]+)-(?P<last>[0-9]+)")
_FAR = 1 << 62
"""Stands for every number of 19 digits or more: farther than any object reaches."""


def parse_range(header: str | None, size_bytes: int) -> tuple[int, int] | None:
    """The part of an object of `size_bytes` that a Range header asks for; None means the whole, with status
    200.

    As in S3, what is not one well-formed byte range (another unit, several ranges, last before first) is
    ignored.

    Raises:
        RequestError: InvalidRange, when it begins at or past the end (so any range of an empty object, and
        `-0`).
    """
    match = _RANGE.fullmatch(header) if header else None
    if header is None or match is None or not (match["first"] or match["last"]):
        return None
    if not match["first"]:
        start = max(0, size_bytes - _number(match["last"]))
        if start >= size_bytes:
            raise _unsatisfiable(header, size_bytes)
        return start, size_bytes
    first = _number(match["first"])
    last = _number(match["last"]) if match["last"] else _FAR
    if last < first:
        return None
    if first >= size_bytes:
        raise _unsatisfiable(header, size_bytes)
    return first, min(last + 1, size_bytes)


def content_range(start: int, end: int, size_bytes: int) -> str:
    """The Content-Range header of a 206 answer with bytes [start, end)."""
    return f"bytes {start}-{end - 1}/{size_bytes}"


def parse_copy_range(header: str | None, size_bytes: int) -> tuple[int, int] | None:
    """The part of a copy's source of `size_bytes`; None means the whole. Stricter than a read's range.

    https://docs.aws.amazon.com/AmazonS3/latest/API/API_UploadPartCopy.html

    Raises:
        RequestError: InvalidArgument when it is not `bytes=first-last`, InvalidRange when it leaves the
        source.
    """
    if header is None:
        return None
    match = _COPY_RANGE.fullmatch(header.strip())
    first, last = (_number(match["first"]), _number(match["last"])) if match else (1, 0)
    if last < first:
        raise RequestError(
            "InvalidArgument",
            "The x-amz-copy-source-range value must be of the form bytes=first-last where "
            "first and last are the "
            "zero-based offsets of the first and last bytes to copy",
            argument_name="x-amz-copy-source-range",
            argument_value=header,
        )
    if last >= size_bytes:
        raise _unsatisfiable(header, size_bytes)
    return first, last + 1


def _number(digits: str) -> int:
    significant = digits.lstrip("0")
    return _FAR if len(significant) > 18 else int(significant or "0")


def _unsatisfiable(header: str, size_bytes: int) -> RequestError:
    return RequestError("InvalidRange", range_requested=header, actual_object_size=size_bytes)
