"""URLs presigned with AWS Signature Version 2, which boto3 still makes by default.

https://docs.aws.amazon.com/AmazonS3/latest/userguide/RESTAuthentication.html
"""

import base64
import hashlib
import hmac
import re
from collections.abc import Iterator
from urllib.parse import unquote_to_bytes

from botocore.auth import HmacV1QueryAuth

from tiergate.errors import RequestError
from tiergate.s3.canonical import path_forms, query_pairs, wire_bytes
from tiergate.s3.claim import (
    STREAMING_SIGNED,
    UNSIGNED_PAYLOAD,
    Head,
    has_header_credentials,
    has_query_credentials,
    payload_mode,
)
from tiergate.s3.sigv4 import (
    SecretFor,
    Verified,
    request_expired,
    several_mechanisms,
    signature_mismatch,
    unknown_access_key,
)

_CREDENTIALS = ("AWSAccessKeyId", "Expires", "Signature")
_SIGNED_PARAMETERS = frozenset(HmacV1QueryAuth.QSAOfInterest)
# Parameters that version 2 leaves unsigned and that only choose what a listing shows.
_HARMLESS_PARAMETERS = frozenset(
    (
        *("prefix", "delimiter", "marker", "max-keys", "encoding-type", "list-type", "continuation-token"),
        *("start-after", "fetch-owner", "key-marker", "version-id-marker", "upload-id-marker", "max-uploads"),
        *("max-parts", "part-number-marker", "content-type", "content-md5", "x-id"),
    )
)
_EXPIRES = re.compile(r"[0-9]{1,18}")


def has_credentials(head: Head) -> bool:
    """Whether the URL was presigned with Signature Version 2."""
    return any(name in ("AWSAccessKeyId", "Signature") for name, _ in head.parameters())


def verify(head: Head, secret_for: SecretFor, now_s: float, *, host_bucket: str | None = None) -> Verified | None:
    """Check a URL presigned with version 2; `host_bucket` is the bucket named by the host, if it is.

    Returns None when the request carries no such credentials. Version 2 signs only some query parameters;
    one it does not know could turn the request into another, so it is refused.

    Raises:
        RequestError: AccessDenied, InvalidAccessKeyId, InvalidArgument, InvalidRequest,
        SignatureDoesNotMatch.
    """
    if not has_credentials(head):
        return None
    if has_header_credentials(head) or has_query_credentials(head):
        raise several_mechanisms()
    access_key, expires, signature = _read_credentials(head)
    if not _EXPIRES.fullmatch(expires):
        raise RequestError("AccessDenied", f"Invalid date (should be seconds since epoch): {expires}")
    if now_s > int(expires):
        raise request_expired(expires)
    _check_parameters(head)
    secret = secret_for(access_key)
    if secret is None:
        raise unknown_access_key(access_key)
    if not _signature_matches(head, secret, expires, signature, host_bucket):
        raise signature_mismatch(access_key)
    token = dict(_amz_values(head)).get("x-amz-security-token", "")
    payload = payload_mode(head.single("x-amz-content-sha256") or UNSIGNED_PAYLOAD)
    if payload.startswith(STREAMING_SIGNED):
        raise RequestError("InvalidRequest", f"{payload} needs AWS4-HMAC-SHA256.")
    return Verified(access_key, payload, None, True, token)


def _read_credentials(head: Head) -> tuple[str, str, str]:
    given: dict[str, str] = {}
    for name, value in _parameters(head):
        if name not in _CREDENTIALS:
            continue
        if name in given:
            raise RequestError("InvalidArgument", f"{name} must not be repeated.")
        given[name] = value
    if len(given) != len(_CREDENTIALS):
        raise RequestError(
            "AccessDenied",
            "Query-string authentication requires the Signature, Expires and AWSAccessKeyId parameters",
        )
    return given["AWSAccessKeyId"], given["Expires"], given["Signature"]


def _parameters(head: Head) -> Iterator[tuple[str, str]]:
    """The query, decoded; `+` stays, for a signature is base64 and some clients leave it unescaped."""
    for name, value in query_pairs(head.raw_query):
        yield _decoded(name), _decoded(value)


def _decoded(text: str) -> str:
    return unquote_to_bytes(wire_bytes(text)).decode("utf-8", "surrogateescape")


def _check_parameters(head: Head) -> None:
    for name, _ in head.parameters():
        known = name in _SIGNED_PARAMETERS or name in _CREDENTIALS or name in _HARMLESS_PARAMETERS
        if not known and not name.lower().startswith("x-amz-"):
            message = f"Signature version 2 does not cover the parameter {name}. Please use AWS4-HMAC-SHA256."
            raise RequestError("AccessDenied", message)


def _amz_values(head: Head) -> list[tuple[str, str]]:
    """The x-amz- headers, sorted; clients carry them in the URL when its user cannot send them."""
    values: dict[str, list[str]] = {}
    for name, value in head.headers:
        if name.lower().startswith("x-amz-"):
            values.setdefault(name.lower(), []).append(value.strip())
    in_headers = set(values)
    for name, value in _parameters(head):
        lowered = name.lower()
        if lowered.startswith("x-amz-") and lowered not in in_headers:
            values.setdefault(lowered, []).append(value.strip())
    return [(name, ",".join(values[name])) for name in sorted(values)]


def _subresources(raw_query: str) -> list[str]:
    """The signed part of the query. Names are compared decoded, or `%61cl` would slip by unsigned."""
    found: list[tuple[str, str]] = []
    for part in raw_query.split("&"):
        name, mark, value = part.partition("=")
        if _decoded(name) in _SIGNED_PARAMETERS:
            found.append((_decoded(name), mark + _decoded(value)))
    return [name + value for name, value in sorted(found, key=lambda pair: pair[0])]


def _signature_matches(head: Head, secret: str, expires: str, signature: str, host_bucket: str | None) -> bool:
    query = "&".join(_subresources(head.raw_query))
    content_md5, content_type = (head.single(name) or "" for name in ("content-md5", "content-type"))
    fixed = "\n".join((head.method, content_md5, content_type, expires))
    values = _amz_values(head)
    if any("\n" in value for _, value in values):
        return False  # a line break in a value could stand for another signed header
    amz = "".join(f"{name}:{value}\n" for name, value in values)
    given = signature.encode("utf-8", "surrogateescape")
    matches = False
    for path in path_forms(head.raw_path):
        resource = (f"/{host_bucket}" if host_bucket else "") + path + (f"?{query}" if query else "")
        text = f"{fixed}\n{amz}{resource}"
        digest = hmac.new(wire_bytes(secret), wire_bytes(text), hashlib.sha1).digest()
        matches |= hmac.compare_digest(base64.b64encode(digest), given)
    return matches
