"""Conditional requests: may this read, copy or write go on?

An object has several accepted ETags (ours, and the one the origin gave to the same bytes); any of them
satisfies a condition. ETags are without quotes here; times are whole Unix seconds.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tiergate.errors import NotFoundError, PreconditionError, RequestError
from tiergate.s3 import wire

COPY_SOURCE_PREFIX = "x-amz-copy-source-"
"""What the headers of a condition on a copy's source begin with."""

_NAMES = ("if-match", "if-none-match", "if-modified-since", "if-unmodified-since")

_ETAG = re.compile(r'(?P<weak>W/)?"(?P<quoted>[^"]*)"|(?P<bare>[^\s,"]+)')


@dataclass(frozen=True, slots=True)
class Conditions:
    """The four conditions of a read or of a copy's source; None where the request has none."""

    if_match: str | None = None
    if_none_match: str | None = None
    if_modified_since_s: int | None = None
    if_unmodified_since_s: int | None = None

    @property
    def any(self) -> bool:
        """Whether there is any condition."""
        return self != Conditions()


def read_conditions(params: Mapping[str, Any]) -> Conditions:
    """The conditions of a parsed GetObject or HeadObject."""
    return _conditions(params, "")


def copy_source_conditions(params: Mapping[str, Any]) -> Conditions:
    """The conditions on the source of a parsed CopyObject or UploadPartCopy."""
    return _conditions(params, "CopySource")


def check_read(conditions: Conditions, etags: Sequence[str], modified_s: int) -> None:
    """Let a read go on, or not.

    If-Match decides over If-Unmodified-Since and If-None-Match over If-Modified-Since, as RFC 9110 13.2.2 and
    https://docs.aws.amazon.com/AmazonS3/latest/API/API_GetObject.html say. The first of `etags` is the one
    shown.

    Raises:
        PreconditionError: PreconditionFailed (412), or NotModified (304; its context has `etag`,
        `modified_s`).
    """
    failed = _failed(conditions, etags, modified_s)
    if failed in {"If-None-Match", "If-Modified-Since"}:
        raise PreconditionError("NotModified", etag=etags[0] if etags else "", modified_s=modified_s)
    if failed:
        raise PreconditionError("PreconditionFailed", condition=failed)


def check_copy_source(conditions: Conditions, etags: Sequence[str], modified_s: int) -> None:
    """Let a copy go on, or not: the rules of a read, but every failure is a 412.

    https://docs.aws.amazon.com/AmazonS3/latest/API/API_CopyObject.html

    Raises:
        PreconditionError: PreconditionFailed.
    """
    failed = _failed(conditions, etags, modified_s)
    if failed:
        raise PreconditionError("PreconditionFailed", condition=f"x-amz-copy-source-{failed}")


def check_write(
    if_match: str | None,
    if_none_match: str | None,
    etags: Sequence[str] | None,
    bucket: str = "",
    key: str = "",
) -> None:
    """Let a write or a delete go on, or not, seen against the current object (`etags` None: there is none).

    https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes.html and
    conditional-deletes.html. `bucket` and `key` go into the error.

    Raises:
        NotFoundError: NoSuchKey, for an If-Match with an ETag on an object that is not there.
        PreconditionError: PreconditionFailed.
        RequestError: NotImplemented, for an If-None-Match other than `*`.
    """
    if if_none_match is not None:
        if if_none_match.strip().strip('"') != "*":
            raise RequestError("NotImplemented", header="If-None-Match", bucket=bucket, key=key)
        if etags is not None:
            raise PreconditionError("PreconditionFailed", condition="If-None-Match", bucket=bucket, key=key)
    if if_match is not None:
        if etags is None and not _is_star(if_match):
            raise NotFoundError("NoSuchKey", bucket=bucket, key=key)
        if etags is None or not etag_matches(if_match, etags, weak=False):
            raise PreconditionError("PreconditionFailed", condition="If-Match", bucket=bucket, key=key)


def range_applies(if_range: str | None, etags: Collection[str], modified_s: int) -> bool:
    """Whether the Range of a read counts: an If-Range that names another version asks for the whole instead.

    https://www.rfc-editor.org/rfc/rfc9110.html#section-13.1.5
    """
    if if_range is None:
        return True
    moment_s = _date_s(if_range)
    if moment_s is not None:
        return moment_s == modified_s
    return not _is_star(if_range) and etag_matches(if_range, etags, weak=False)


def has_conditions(headers: Mapping[str, str], prefix: str = "") -> bool:
    """Whether any condition stands in headers (lower-case names)."""
    return any(prefix + name in headers for name in (*_NAMES, "if-range"))


def restated(
    headers: Mapping[str, str], prefix: str, etags: Sequence[str], origin_etag: str, modified_s: int
) -> dict[str, str]:
    """Headers (lower-case names) whose conditions on an object are put so that a server which holds the same object
    as `origin_etag`, written at `modified_s` or later, decides them as they are decided here.

    An ETag that matches `etags` becomes `origin_etag`; a date that would be decided otherwise there is left out where
    the condition holds, and becomes an ETag where it does not.
    """
    found = dict(headers)
    theirs = wire.quote_etag(origin_etag)
    for name in ("if-match", "if-none-match"):
        value = headers.get(prefix + name)
        if value is not None and not _is_star(value) and etag_matches(value, etags, weak=name == "if-none-match"):
            found[prefix + name] = theirs
    bound_s = _date_s(headers.get(f"{prefix}if-unmodified-since"))
    if bound_s is not None and modified_s <= bound_s:
        del found[f"{prefix}if-unmodified-since"]
    bound_s = _date_s(headers.get(f"{prefix}if-modified-since"))
    if bound_s is not None and modified_s <= bound_s:
        del found[f"{prefix}if-modified-since"]
        found.setdefault(f"{prefix}if-none-match", theirs)
    if not prefix and "if-range" in headers and range_applies(headers["if-range"], etags, modified_s):
        found["if-range"] = theirs
    return found


def etag_matches(header: str, etags: Collection[str], weak: bool) -> bool:
    """Whether a header's list of ETags (quoted or bare, or `*`) names one of `etags`.

    `weak` allows tags marked `W/` to match, as RFC 9110 8.8.3.2 wants for If-None-Match only.
    """
    if _is_star(header):
        return True
    for match in _ETAG.finditer(header):
        named = match["bare"] if match["quoted"] is None else match["quoted"]
        if named in etags and (weak or not match["weak"]):
            return True
    return False


def _conditions(params: Mapping[str, Any], prefix: str) -> Conditions:
    return Conditions(
        if_match=params.get(f"{prefix}IfMatch"),
        if_none_match=params.get(f"{prefix}IfNoneMatch"),
        if_modified_since_s=_seconds(params.get(f"{prefix}IfModifiedSince")),
        if_unmodified_since_s=_seconds(params.get(f"{prefix}IfUnmodifiedSince")),
    )


def _seconds(moment: datetime | None) -> int | None:
    return None if moment is None else int(moment.timestamp())


def _date_s(text: str | None) -> int | None:
    try:
        return None if text is None else int(wire.parse_time(text).timestamp())
    except ValueError:
        return None


def _failed(conditions: Conditions, etags: Sequence[str], modified_s: int) -> str | None:
    if conditions.if_match is not None:
        if not etag_matches(conditions.if_match, etags, weak=False):
            return "If-Match"
    elif conditions.if_unmodified_since_s is not None and modified_s > conditions.if_unmodified_since_s:
        return "If-Unmodified-Since"
    if conditions.if_none_match is not None:
        if etag_matches(conditions.if_none_match, etags, weak=True):
            return "If-None-Match"
    elif conditions.if_modified_since_s is not None and modified_s <= conditions.if_modified_since_s:
        return "If-Modified-Since"
    return None


def _is_star(header: str) -> bool:
    return header.strip() == "*"
