"""What an answer that is no success means: temporary, refused for good, or a matter of our credentials.
Pure."""

from collections.abc import Sequence

from tiergate.errors import OriginCredentialsError, OriginError, OriginRefusedError
from tiergate.origin.documents import Fault, parse_fault
from tiergate.origin.retry import OriginBusyError

_TEMPORARY_STATUSES = frozenset({408, 429, 500, 502, 503, 504})

# https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html
_TEMPORARY_CODES = frozenset(
    {
        "BandwidthLimitExceeded",
        "InternalError",
        "OperationAborted",
        "RequestTimeout",
        "RequestTimeoutException",
        "ServiceUnavailable",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "TooManyRequests",
    }
)
_CREDENTIAL_CODES = frozenset(
    {
        "AuthorizationHeaderMalformed",
        "ExpiredToken",
        "ExpiredTokenException",
        "InvalidAccessKeyId",
        "InvalidClientTokenId",
        "InvalidSecurity",
        "InvalidToken",
        "NotSignedUp",
        "RequestExpired",
        "RequestTimeTooSkewed",
        "SignatureDoesNotMatch",
        "TokenRefreshRequired",
    }
)
_REDIRECT_CODES = frozenset({"AuthorizationHeaderMalformed", "PermanentRedirect", "Redirect", "TemporaryRedirect"})

# For answers without a body, as those to HEAD.
_CODES = {
    301: "PermanentRedirect",
    304: "NotModified",
    307: "TemporaryRedirect",
    400: "BadRequest",
    403: "AccessDenied",
    404: "NoSuchKey",
    405: "MethodNotAllowed",
    409: "OperationAborted",
    411: "MissingContentLength",
    412: "PreconditionFailed",
    416: "InvalidRange",
    500: "InternalError",
    501: "NotImplemented",
    503: "SlowDown",
}


def fault_of(status: int, headers: Sequence[tuple[str, str]], body: bytes) -> Fault:
    """The error an answer speaks of; code and region from wherever the origin put them."""
    fault = parse_fault(body)
    named = {name.lower(): value for name, value in headers}
    code = (fault.code if fault else "") or _CODES.get(status, f"Http{status}")
    region = named.get("x-amz-bucket-region", "") or (fault.region if fault else "")
    return Fault(code, fault.message if fault else "", region)


def is_redirect(status: int, fault: Fault) -> bool:
    """Whether the bucket is in another region than the one asked.

    https://docs.aws.amazon.com/AmazonS3/latest/userguide/Redirects.html
    """
    if not fault.region:
        return False
    # HEAD has no body that would name AuthorizationHeaderMalformed.
    return status in (301, 307) or fault.code in _REDIRECT_CODES or (status == 400 and not fault.message)


def is_credential_fault(code: str) -> bool:
    """Whether the origin objects to our keys, token or clock rather than to the request."""
    return code in _CREDENTIAL_CODES


def is_temporary(status: int, code: str) -> bool:
    """Whether the same request may succeed later."""
    return status in _TEMPORARY_STATUSES or code in _TEMPORARY_CODES


def error_of(
    status: int, headers: Sequence[tuple[str, str]], body: bytes, fault: Fault, **context: object
) -> OriginError:
    """The exception for an answer that is no success."""
    if is_temporary(status, fault.code):
        asked = next((value for name, value in headers if name.lower() == "retry-after"), "")
        retry_after_s = float(asked) if asked.isascii() and asked.isdigit() else 0.0
        return OriginBusyError(f"{status} {fault.code}", status, fault.code, retry_after_s, **context)
    named = {name.lower(): value for name, value in headers}
    kind = OriginCredentialsError if is_credential_fault(fault.code) else OriginRefusedError
    return kind(status, fault.code, fault.message, body, named, **context)
