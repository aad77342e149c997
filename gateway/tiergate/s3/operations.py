"""From an HTTP request to an S3 operation and its input, and from its output to headers and body.

This is the codec's front: `split_target`, `resolve`, `unknown_parts`, `parse`, `render`. What it knows of the
operations it reads from botocore's model. Headers may be any mapping of names to values; case does not
matter, and repeated headers (a multidict's items) count as one, joined by commas.
"""

from collections.abc import Mapping

from botocore.model import ListShape

from tiergate.s3 import servicemodel
from tiergate.s3.decode import SIGNING_QUERY, fold_headers, hoisted_headers, parse
from tiergate.s3.encode import render
from tiergate.s3.servicemodel import Field, Level
from tiergate.s3.target import Target, split_target

__all__ = ["Target", "fold_headers", "parse", "render", "resolve", "split_target", "unknown_parts"]

# SigV4's and SigV2's presigned parameters, and the operation's name that newer SDKs add for logs.
_PROTOCOL_QUERY = SIGNING_QUERY | {"awsaccesskeyid", "signature", "expires", "x-id"}
_PROTOCOL_HEADERS = frozenset(
    {
        "x-amz-api-version",  # the C++ SDK (pyarrow) sends it with every request that has no body
        "x-amz-content-sha256",
        "x-amz-date",
        "x-amz-decoded-content-length",
        "x-amz-region-set",
        "x-amz-security-token",
        "x-amz-trailer",
        "x-amz-user-agent",
    }
)
_COPY_SOURCE = "x-amz-copy-source"
_CHECKSUM_PREFIX = "x-amz-checksum-"
# A wrong encoding type is refused by `parse`: no origin is needed for that.
_JUDGED_HERE = frozenset({"EncodingType"})
# Some SDKs write the names of algorithms in small letters; all other values S3 takes only as they are.
_ANY_CASE_PREFIX = "Checksum"


def resolve(method: str, target: Target, headers: Mapping[str, str]) -> str | None:
    """The name of the operation a request asks for, or None when S3's model has none (a browser's form POST,
    a CORS preflight).

    The most specific one wins: fixed query markers (`?uploads`, `?list-type=2`) count before required
    parameters (`uploadId`), and those before x-amz-copy-source. What the request says beyond that is not
    looked at; see `unknown_parts`.
    """
    level = Level.KEY if target.key else Level.BUCKET if target.bucket else Level.SERVICE
    query: dict[str, str] = {}
    for name, value in target.query:
        query.setdefault(name, value or "")
    copies = _COPY_SOURCE in fold_headers(headers) or _COPY_SOURCE in hoisted_headers(target)
    for candidate in servicemodel.candidates().get((method.upper(), level), ()):
        if candidate.copies and not copies:
            continue
        if all(name in query and value in {None, query[name]} for name, value in candidate.markers) and all(
            name in query for name in candidate.required_query
        ):
            return candidate.name
    return None


def unknown_parts(operation: str, target: Target, headers: Mapping[str, str]) -> list[str]:
    """The query parameters and x-amz-* headers that `operation` does not know, and those whose value is none
    of the values it knows (a new storage class).

    A request with any of them should go to the origin, which may know more, instead of being half understood.
    """
    plan = servicemodel.operation(operation)
    markers = {name for name, _ in plan.markers}
    folded = fold_headers(headers)
    hoisted = hoisted_headers(target)
    unknown = [
        name
        for name, value in target.query
        if name not in markers
        and name.lower() not in _PROTOCOL_QUERY
        and name.lower() not in hoisted
        and not _knows(plan.input.query.get(name), value or "")
    ]
    for name, value in {**hoisted, **folded}.items():
        if not name.startswith("x-amz-") or name in _PROTOCOL_HEADERS:
            continue
        if any(name.startswith(prefix.wire) for prefix in plan.input.prefixes):
            continue
        if plan.checksummed and name.startswith(_CHECKSUM_PREFIX):
            continue
        if not _knows(plan.input.headers.get(name), value):
            unknown.append(name)
    return unknown


def _knows(field: Field | None, value: str) -> bool:
    if field is None:
        return False
    shape, values = field.shape, [value]
    if isinstance(shape, ListShape):
        shape, values = shape.member, value.split(",")
    known = servicemodel.enum_values(shape)
    if not known or field.member in _JUDGED_HERE:
        return True
    if field.member.startswith(_ANY_CASE_PREFIX):
        known = frozenset(each.upper() for each in known)
        values = [value.upper() for value in values]
    return all(value.strip() in known for value in values)
