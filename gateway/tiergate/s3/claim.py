"""What a request says of its own signature, read strictly and believed by nobody yet.

https://docs.aws.amazon.com/AmazonS3/latest/API/sigv4-auth-using-authorization-header.html
https://docs.aws.amazon.com/AmazonS3/latest/API/sigv4-query-string-auth.html
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC
from email.utils import parsedate_to_datetime

from botocore.auth import SIGV4_TIMESTAMP

from tiergate.errors import RequestError
from tiergate.s3.canonical import ALGORITHM, SERVICE, TERMINATOR, decoded_parameter, query_pairs

UNSIGNED_PAYLOAD = "UNSIGNED-PAYLOAD"
STREAMING_UNSIGNED_TRAILER = "STREAMING-UNSIGNED-PAYLOAD-TRAILER"
STREAMING_SIGNED = "STREAMING-AWS4-HMAC-SHA256-PAYLOAD"
STREAMING_SIGNED_TRAILER = "STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER"
MAX_EXPIRES_S = 7 * 24 * 3600

_KNOWN_PAYLOADS = {UNSIGNED_PAYLOAD, STREAMING_UNSIGNED_TRAILER, STREAMING_SIGNED, STREAMING_SIGNED_TRAILER}
_ECDSA_PAYLOADS = {
    "STREAMING-AWS4-ECDSA-P256-SHA256-PAYLOAD",
    "STREAMING-AWS4-ECDSA-P256-SHA256-PAYLOAD-TRAILER",
}
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
_TIMESTAMP = re.compile(r"[0-9]{8}T[0-9]{6}Z")
_ABSOLUTE_FORM = re.compile(r"https?://[^/?]*", re.IGNORECASE)
_QUERY_PARAMETERS = (
    "X-Amz-Algorithm",
    "X-Amz-Credential",
    "X-Amz-Signature",
    "X-Amz-Date",
    "X-Amz-SignedHeaders",
    "X-Amz-Expires",
)
_EXPECTED_CREDENTIAL = 'the Credential is mal-formed; expecting "<YOUR-AKID>/YYYYMMDD/REGION/SERVICE/aws4_request".'


@dataclass(frozen=True, slots=True)
class Head:
    """A request head as on the wire: the raw target, nothing decoded; headers in order, with duplicates."""

    method: str
    raw_target: str
    headers: Sequence[tuple[str, str]] = field(repr=False)

    @property
    def raw_path(self) -> str:
        return self._origin_form().partition("?")[0]

    @property
    def raw_query(self) -> str:
        return self._origin_form().partition("?")[2]

    def values(self, name: str) -> list[str]:
        """All values of a header; `name` in lower case."""
        return [value for known, value in self.headers if known.lower() == name]

    def single(self, name: str) -> str | None:
        """The value of a header that may be sent once, or None.

        Raises:
            RequestError: InvalidRequest when it was sent more often.
        """
        values = self.values(name)
        if len(values) > 1:
            raise RequestError("InvalidRequest", f"The header {name} must not be repeated.")
        return values[0].strip() if values else None

    def parameters(self) -> Iterator[tuple[str, str]]:
        """The query, decoded."""
        for name, value in query_pairs(self.raw_query):
            yield decoded_parameter(name), decoded_parameter(value)

    def names_one_host(self) -> bool:
        """False when a target in absolute form names another host than the (signed) Host header."""
        absolute = _ABSOLUTE_FORM.match(self.raw_target)
        if not absolute:
            return True
        authority = absolute[0].partition("://")[2].lower()
        return [value.strip().lower() for value in self.values("host")] == [authority]

    def _origin_form(self) -> str:
        absolute = _ABSOLUTE_FORM.match(self.raw_target)
        return self.raw_target[absolute.end() :] if absolute else self.raw_target


@dataclass(frozen=True, slots=True)
class Claim:
    """The credentials and the signature a request carries; `query` is the raw query that was signed."""

    access_key: str
    date: str
    region: str
    timestamp: str
    signed_headers: tuple[str, ...]
    signature: str
    payload: str
    query: list[tuple[str, str]]
    token: str = field(repr=False)
    expires_s: int | None = None

    @property
    def scope(self) -> str:
        return f"{self.date}/{self.region}/{SERVICE}/{TERMINATOR}"


def has_header_credentials(head: Head) -> bool:
    """Whether there is an Authorization header, of whatever kind. An empty one says nothing."""
    return any(value.strip() for value in head.values("authorization"))


def has_query_credentials(head: Head) -> bool:
    """Whether the URL was presigned with Signature Version 4."""
    marks = {"X-Amz-Algorithm", "X-Amz-Credential", "X-Amz-Signature"}
    return any(name in marks for name, _ in head.parameters())


def payload_mode(value: str) -> str:
    """The payload mode an x-amz-content-sha256 names; a hash in lower case.

    Raises:
        RequestError: InvalidArgument, or NotImplemented for the ECDSA modes.
    """
    if value in _KNOWN_PAYLOADS:
        return value
    if value in _ECDSA_PAYLOADS:
        raise RequestError("NotImplemented", f"{value} is not implemented.")
    if _SHA256.fullmatch(value):
        return value.lower()
    raise RequestError(
        "InvalidArgument",
        "x-amz-content-sha256 must be UNSIGNED-PAYLOAD, STREAMING-UNSIGNED-PAYLOAD-TRAILER, "
        "STREAMING-AWS4-HMAC-SHA256-PAYLOAD, STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER, "
        "STREAMING-AWS4-ECDSA-P256-SHA256-PAYLOAD, STREAMING-AWS4-ECDSA-P256-SHA256-PAYLOAD-TRAILER "
        "or a valid sha256 value.",
    )


def authorization_fields(text: str) -> dict[str, str]:
    """The `name=value` fields after the scheme of an Authorization header."""
    parts = (part.strip().partition("=") for part in text.split(","))
    return {name.strip(): value.strip() for name, _, value in parts}


def claim_of_header(head: Head) -> Claim:
    """Read the Authorization header.

    Raises:
        RequestError: for anything that is missing, malformed or of another kind.
    """
    authorization = head.single("authorization") or ""
    scheme, _, rest = authorization.partition(" ")
    if scheme == "AWS":
        raise RequestError(
            "InvalidRequest",
            "The authorization mechanism you have provided is not supported. Please use AWS4-HMAC-SHA256.",
        )
    if scheme != ALGORITHM:
        raise RequestError("InvalidArgument", "Unsupported Authorization Type")
    fields = authorization_fields(rest)
    if set(fields) != {"Credential", "SignedHeaders", "Signature"} or rest.count(",") != 2:
        raise _malformed(False, "expecting Credential, SignedHeaders and Signature.")
    access_key, date, region = split_credential(fields["Credential"], False)
    signed_headers = _split_signed_headers(fields["SignedHeaders"], False)
    payload = head.single("x-amz-content-sha256")
    if payload is None:
        raise RequestError("InvalidRequest", "Missing required header for this request: x-amz-content-sha256")
    payload_mode(payload)
    return Claim(
        access_key=access_key,
        date=date,
        region=region,
        timestamp=_timestamp_of_headers(head, signed_headers),
        signed_headers=signed_headers,
        signature=fields["Signature"],
        payload=payload,
        query=query_pairs(head.raw_query),
        token=head.single("x-amz-security-token") or "",
    )


def claim_of_query(head: Head) -> Claim:
    """Read the parameters of a presigned URL.

    Raises:
        RequestError: for anything that is missing or malformed.
    """
    given: dict[str, str] = {}
    for name, value in head.parameters():
        if name in given and name.startswith("X-Amz-"):
            raise _malformed(True, f"{name} must not be repeated.")
        given.setdefault(name, value)
    if any(name not in given for name in _QUERY_PARAMETERS):
        raise RequestError(
            "AuthorizationQueryParametersError",
            "Query-string authentication version 4 requires the X-Amz-Algorithm, X-Amz-Credential, "
            "X-Amz-Signature, X-Amz-Date, X-Amz-SignedHeaders, and X-Amz-Expires parameters.",
        )
    if given["X-Amz-Algorithm"] != ALGORITHM:
        raise _malformed(True, f'X-Amz-Algorithm only supports "{ALGORITHM}"')
    access_key, date, region = split_credential(given["X-Amz-Credential"], True)
    if not _TIMESTAMP.fullmatch(given["X-Amz-Date"]):
        raise _malformed(True, "X-Amz-Date must be in the ISO8601 Long Format \"yyyyMMdd'T'HHmmss'Z'\"")
    payload = given.get("X-Amz-Content-Sha256") or head.single("x-amz-content-sha256") or UNSIGNED_PAYLOAD
    payload_mode(payload)
    pairs = query_pairs(head.raw_query)
    return Claim(
        access_key=access_key,
        date=date,
        region=region,
        timestamp=given["X-Amz-Date"],
        signed_headers=_split_signed_headers(given["X-Amz-SignedHeaders"], True),
        signature=given["X-Amz-Signature"],
        payload=payload,
        query=[pair for pair in pairs if decoded_parameter(pair[0]) != "X-Amz-Signature"],
        token=given.get("X-Amz-Security-Token", ""),
        expires_s=_expires_s(given["X-Amz-Expires"]),
    )


def _malformed(presigned: bool, why: str) -> RequestError:
    if presigned:
        return RequestError("AuthorizationQueryParametersError", why)
    return RequestError("AuthorizationHeaderMalformed", f"The authorization header is malformed; {why}")


def malformed_credential(presigned: bool, why: str) -> RequestError:
    """The refusal of a credential scope."""
    return _malformed(presigned, f"Error parsing the X-Amz-Credential parameter; {why}" if presigned else why)


def split_credential(text: str, presigned: bool) -> tuple[str, str, str]:
    """Access key, date and region of a credential scope.

    Raises:
        RequestError: AuthorizationQueryParametersError if `presigned`, else AuthorizationHeaderMalformed.
    """
    parts = text.rsplit("/", 4)
    if len(parts) != 5 or not all(parts):
        raise malformed_credential(presigned, _EXPECTED_CREDENTIAL)
    access_key, date, region, service, terminator = parts
    if service != SERVICE:
        why = f'incorrect service "{service}". This endpoint belongs to "{SERVICE}".'
        raise malformed_credential(presigned, why)
    if terminator != TERMINATOR:
        why = f'incorrect terminal "{terminator}". This endpoint uses "{TERMINATOR}".'
        raise malformed_credential(presigned, why)
    return access_key, date, region


def _split_signed_headers(text: str, presigned: bool) -> tuple[str, ...]:
    names = tuple(text.split(";"))
    if not all(names) or len(set(names)) != len(names) or text != text.lower():
        raise _malformed(presigned, "the SignedHeaders are mal-formed.")
    return names


def _expires_s(text: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,18}", text):
        raise _malformed(True, "X-Amz-Expires should be a number")
    expires_s = int(text)
    if expires_s > MAX_EXPIRES_S:
        raise _malformed(
            True,
            "X-Amz-Expires must be less than a week (in seconds); "
            f"that is, the given X-Amz-Expires must be less than {MAX_EXPIRES_S} seconds",
        )
    if expires_s < 1:
        raise _malformed(True, "X-Amz-Expires must be non-negative")
    return expires_s


def _timestamp_of_headers(head: Head, signed_headers: tuple[str, ...]) -> str:
    timestamp = head.single("x-amz-date")
    if timestamp is None and "date" in signed_headers:
        timestamp = _timestamp_of_date(head.single("date") or "")
    if timestamp is None or not _TIMESTAMP.fullmatch(timestamp):
        raise no_date()
    return timestamp


def _timestamp_of_date(text: str) -> str:
    try:
        date = parsedate_to_datetime(text)
        # A date that ends in -0000 comes without a zone; it is UTC (RFC 5322, 3.3).
        aware = date if date.tzinfo else date.replace(tzinfo=UTC)
        return aware.astimezone(UTC).strftime(SIGV4_TIMESTAMP)
    except (ValueError, OverflowError) as error:
        raise no_date() from error


def no_date() -> RequestError:
    """The refusal of a request without a usable date."""
    return RequestError("AccessDenied", "AWS authentication requires a valid Date or x-amz-date header")
