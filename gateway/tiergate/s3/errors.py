"""Our errors as S3's: one table, from type and code to status, headers and body; never from a message's
text."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeGuard

from tiergate.errors import (
    OriginCredentialsError,
    OriginError,
    OriginRefusedError,
    OverloadedError,
    RequestError,
)
from tiergate.s3 import wire
from tiergate.s3.errorcodes import ERROR_CODES, UNKNOWN_CODE_STATUS
from tiergate.s3.xml import Node, render_xml

ORIGIN_RETRY_AFTER_S = 1
"""When a client should come back after the origin failed for a passing reason."""

# What S3 adds to <Error>: context key -> element; for all codes.
# https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html#RESTErrorResponses
_FIELDS: Mapping[str, str] = {
    "upload_id": "UploadId",
    "version_id": "VersionId",
    "condition": "Condition",
    "header": "Header",
    "argument_name": "ArgumentName",
    "argument_value": "ArgumentValue",
    "range_requested": "RangeRequested",
    "actual_object_size": "ActualObjectSize",
    "part_number": "PartNumber",
    "part_etag": "ETag",
    "method": "Method",
    "resource_type": "ResourceType",
    "endpoint": "Endpoint",
    "region": "Region",
    "size": "Size",
    "max_size_allowed": "MaxSizeAllowed",
    "min_size_allowed": "MinSizeAllowed",
    "proposed_size": "ProposedSize",
    "max_message_length_bytes": "MaxMessageLengthBytes",
    "expected_digest": "ExpectedDigest",
    "calculated_digest": "CalculatedDigest",
    "client_computed_content_sha256": "ClientComputedContentSHA256",
    "s3_computed_content_sha256": "S3ComputedContentSHA256",
    "access_key_id": "AWSAccessKeyId",
    "string_to_sign": "StringToSign",
    "signature_provided": "SignatureProvided",
    "canonical_request": "CanonicalRequest",
    "request_time": "RequestTime",
    "server_time": "ServerTime",
    "max_allowed_skew_milliseconds": "MaxAllowedSkewMilliseconds",
    "expires": "Expires",
    "storage_class": "StorageClass",
    "tag_key": "TagKey",
    "tag_value": "TagValue",
}
_KEY_CODES = frozenset({"NoSuchKey", "NoSuchVersion", "InvalidObjectState"})
_BUCKET_CODES = frozenset(
    {
        "BucketAlreadyExists",
        "BucketAlreadyOwnedByYou",
        "BucketNotEmpty",
        "InvalidBucketName",
        "NoSuchBucket",
        "NoSuchBucketPolicy",
        "NoSuchCORSConfiguration",
        "NoSuchLifecycleConfiguration",
        "NoSuchTagSet",
        "NoSuchWebsiteConfiguration",
        "ObjectLockConfigurationNotFoundError",
        "PermanentRedirect",
        "ServerSideEncryptionConfigurationNotFoundError",
        "TemporaryRedirect",
    }
)
# These belong to a connection or to the answer's frame, which is ours.
_NOT_PASSED_ON = frozenset(
    {
        "connection",
        "content-length",
        "date",
        "keep-alive",
        "proxy-authenticate",
        "server",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """An error as it goes to the client. A HEAD answer has the same status and headers, and no body."""

    status: int
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class _Verdict:
    status: int
    code: str
    message: str
    headers: Mapping[str, str]


def error_status(code: str) -> int:
    """The HTTP status of an S3 error code; 400 for one that is not in the table."""
    return ERROR_CODES.get(code, (UNKNOWN_CODE_STATUS, ""))[0]


def error_code(error: BaseException) -> str:
    """The S3 code that `render_error` would answer with (for logs, and for the items of DeleteObjects)."""
    if _passes(error):
        return error.code
    return _verdict(error).code


def error_message(error: BaseException) -> str:
    """The message that `render_error` would answer with."""
    return _verdict(error).message


def render_error(error: BaseException, resource: str, request_id: str, host_id: str) -> ErrorAnswer:
    """The answer to a request that failed with `error`.

    A refusal by the origin passes with its own status, headers and body, unless it was for the gateway's own
    credentials: that is ServiceUnavailable. Errors of ours that a client cannot
    act on, and foreign ones, answer InternalError and say nothing of their cause. 304 has no body.
    """
    if _passes(error):
        return _refused(error, resource, request_id, host_id)
    return _answer(_verdict(error), _context(error), resource, request_id, host_id)


def _passes(error: BaseException) -> TypeGuard[OriginRefusedError]:
    """A refusal of the client's request passes on. A refusal of our own keys does not: it would read
    as one of the client's, and may name our key."""
    return isinstance(error, OriginRefusedError) and not isinstance(error, OriginCredentialsError)


def _refused(error: OriginRefusedError, resource: str, request_id: str, host_id: str) -> ErrorAnswer:
    headers = {name: value for name, value in error.headers.items() if name.lower() not in _NOT_PASSED_ON}
    if error.body or error.status < 400:
        return ErrorAnswer(error.status, headers, error.body)
    message = ERROR_CODES.get(error.code, (0, error.message))[1]
    rendered = _answer(_Verdict(error.status, error.code, message, {}), error.context, resource, request_id, host_id)
    kept = {name: value for name, value in headers.items() if name.lower() != "content-type"}
    return ErrorAnswer(error.status, {**kept, **rendered.headers}, rendered.body)


def _verdict(error: BaseException) -> _Verdict:
    """The table. What it does not name is InternalError: an integrity fault, a bug of ours, a lost guard that
    nobody retried, any foreign exception."""
    match error:
        case RequestError():
            message = "" if error.message == error.code else error.message
            return _of_code(error.code, message, _request_headers(error))
        case OverloadedError():
            message = f"Please reduce your request rate. ({error.message})"
            return _of_code("SlowDown", message, {"Retry-After": str(error.retry_after_s)})
        case OriginError():
            return _of_code("ServiceUnavailable", headers={"Retry-After": str(ORIGIN_RETRY_AFTER_S)})
        case _:
            return _of_code("InternalError")


def _request_headers(error: RequestError) -> dict[str, str]:
    headers: dict[str, str] = {}
    context = error.context
    if isinstance(after_s := context.get("retry_after_s"), int):
        headers["Retry-After"] = str(after_s)
    if error.code == "InvalidRange" and "actual_object_size" in context:
        headers["Content-Range"] = f"bytes */{context['actual_object_size']}"
    if error.code == "NotModified":
        if isinstance(etag := context.get("etag"), str) and etag:
            headers["ETag"] = wire.quote_etag(etag)
        if isinstance(modified_s := context.get("modified_s"), int | float):
            headers["Last-Modified"] = wire.http_date(modified_s)
    return headers


def _of_code(code: str, message: str = "", headers: Mapping[str, str] | None = None) -> _Verdict:
    status, usual = ERROR_CODES.get(code, (UNKNOWN_CODE_STATUS, code))
    return _Verdict(status, code, message or usual, headers or {})


def _context(error: BaseException) -> Mapping[str, object]:
    return error.context if isinstance(error, RequestError) else {}


def _answer(
    verdict: _Verdict, context: Mapping[str, object], resource: str, request_id: str, host_id: str
) -> ErrorAnswer:
    if verdict.status == 304:
        return ErrorAnswer(304, dict(verdict.headers), b"")
    fields = [("Code", verdict.code), ("Message", verdict.message)]
    if verdict.code in _KEY_CODES and "key" in context:
        fields.append(("Key", str(context["key"])))
    if verdict.code in _BUCKET_CODES and "bucket" in context:
        fields.append(("BucketName", str(context["bucket"])))
    fields += [(element, str(context[name])) for name, element in _FIELDS.items() if name in context]
    fields += [("Resource", resource), ("RequestId", request_id), ("HostId", host_id)]
    body = render_xml(Node("Error", children=[Node(name, _storable(text)) for name, text in fields]))
    return ErrorAnswer(verdict.status, {**verdict.headers, "Content-Type": "application/xml"}, body)


def _storable(text: str) -> str:
    """A raw target or header may hold surrogates for bytes that are not UTF-8; XML may not."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
