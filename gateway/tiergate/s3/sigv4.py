"""AWS Signature Version 4: checks what clients sign, signs what goes to the origin.

https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-authenticating-requests.html
"""

import hmac
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from botocore.auth import SIGV4_TIMESTAMP, S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import ReadOnlyCredentials

from tiergate.errors import RequestError
from tiergate.s3.canonical import (
    ALGORITHM,
    SERVICE,
    ChunkSigner,
    header_block,
    path_forms,
    query_forms,
    query_pairs,
    request_text,
    sign_text,
    signing_key,
)
from tiergate.s3.claim import (
    STREAMING_SIGNED,
    STREAMING_SIGNED_TRAILER,
    STREAMING_UNSIGNED_TRAILER,
    UNSIGNED_PAYLOAD,
    Claim,
    Head,
    authorization_fields,
    claim_of_header,
    claim_of_query,
    has_header_credentials,
    has_query_credentials,
    malformed_credential,
    no_date,
    payload_mode,
)

__all__ = [
    "MAX_SKEW_S",
    "STREAMING_SIGNED",
    "STREAMING_SIGNED_TRAILER",
    "STREAMING_UNSIGNED_TRAILER",
    "UNSIGNED_PAYLOAD",
    "Credentials",
    "Head",
    "SecretFor",
    "Verified",
    "describe",
    "sign",
    "verify",
]

MAX_SKEW_S = 15 * 60

_MISMATCH = (
    "The request signature we calculated does not match the signature you provided. Check your key and signing method."
)
SecretFor = Callable[[str], str | None]
"""The secret of an access key, or None when nobody has that key."""


@dataclass(frozen=True, slots=True)
class Verified:
    """Who sent a request and how its body is protected.

    `payload` is a hexadecimal SHA-256 of the body (lower case), UNSIGNED-PAYLOAD or a STREAMING-… mode. For
    the signed streaming modes `chunk_signer` checks the chunks (None when signatures are not checked at all).
    `access_key` is empty when nobody signed. `token` is the session token as sent, for the caller to judge.
    """

    access_key: str
    payload: str
    chunk_signer: ChunkSigner | None = None
    presigned: bool = False
    token: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class Credentials:
    """Keys we sign with."""

    access_key: str
    secret: str = field(repr=False)
    token: str = field(default="", repr=False)


def verify(
    head: Head,
    secret_for: SecretFor,
    now_s: float,
    *,
    regions: Collection[str] | None = None,
    max_skew_s: float = MAX_SKEW_S,
) -> Verified | None:
    """Check the signature of a request; `now_s` is wall time, `regions` limits the scope's region when given.

    Returns None only when the request carries no such credentials; it is then anonymous (or presigned with
    version 2) and the caller decides. An Authorization header of another kind is an error, never anonymous.

    Raises:
        RequestError: with S3's code: AccessDenied, AuthorizationHeaderMalformed,
        AuthorizationQueryParametersError,
            InvalidAccessKeyId, InvalidArgument, InvalidRequest, NotImplemented, RequestTimeTooSkewed,
            SignatureDoesNotMatch.
    """
    by_header, by_query = has_header_credentials(head), has_query_credentials(head)
    if by_header and by_query:
        raise several_mechanisms()
    if not by_header and not by_query:
        return None
    claim = claim_of_header(head) if by_header else claim_of_query(head)
    _check_scope(claim, by_query, regions)
    _check_time(claim, now_s, max_skew_s)
    _check_coverage(head, claim)
    secret = secret_for(claim.access_key)
    if secret is None:
        raise unknown_access_key(claim.access_key)
    key = signing_key(secret, claim.date, claim.region)
    if not _signature_matches(head, claim, key):
        raise signature_mismatch(claim.access_key)
    signer = None
    if claim.payload.startswith(STREAMING_SIGNED):
        signer = ChunkSigner(claim.signature, claim.timestamp, claim.scope, key)
    return Verified(claim.access_key, payload_mode(claim.payload), signer, by_query, claim.token)


def describe(head: Head) -> Verified:
    """What `verify` would return, with no signature checked: for a gateway that accepts anybody.

    The access key is what the request says of itself; the payload mode is honoured all the same.

    Raises:
        RequestError: InvalidArgument or NotImplemented for a payload mode that cannot be read.
    """
    parameters = dict(head.parameters())
    presigned = "X-Amz-Signature" in parameters or "Signature" in parameters
    payload = head.single("x-amz-content-sha256") or parameters.get("X-Amz-Content-Sha256") or UNSIGNED_PAYLOAD
    credential = parameters.get("X-Amz-Credential") or parameters.get("AWSAccessKeyId") or ""
    for authorization in head.values("authorization"):
        scheme, _, rest = authorization.partition(" ")
        if scheme == ALGORITHM:
            credential = authorization_fields(rest).get("Credential", "")
        elif scheme == "AWS":
            credential = rest.rpartition(":")[0]
    token = head.single("x-amz-security-token") or parameters.get("X-Amz-Security-Token", "")
    access_key = credential.rsplit("/", 4)[0].strip()
    return Verified(access_key, payload_mode(payload), None, presigned, token)


def sign(
    method: str,
    url: str,
    headers: Mapping[str, str],
    payload_hash: str,
    credentials: Credentials,
    region: str,
    now: datetime,
) -> dict[str, str]:
    """Sign a request of ours and return all headers to send, `headers` included.

    `url` is sent as it is: its path is signed exactly as given (percent-encode every byte but the unreserved
    ones and `/`), its query is brought into canonical form first. `payload_hash` is a hexadecimal SHA-256,
    UNSIGNED-PAYLOAD or STREAMING-UNSIGNED-PAYLOAD-TRAILER. `now` must know its time zone. Host is taken from
    `headers` or else from `url`. Old credentials and dates in `headers` are dropped.
    """
    replaced = {"authorization", "date", "x-amz-date", "x-amz-content-sha256", "x-amz-security-token"}
    sent = {name: value for name, value in headers.items() if name.lower() not in replaced}
    timestamp = now.astimezone(UTC).strftime(SIGV4_TIMESTAMP)
    sent["X-Amz-Date"] = timestamp
    sent["X-Amz-Content-SHA256"] = payload_hash
    if credentials.token:
        sent["X-Amz-Security-Token"] = credentials.token
    base, mark, raw_query = url.partition("?")
    canonical_url = base + mark + query_forms(query_pairs(raw_query))[-1]
    request = AWSRequest(method=method, url=canonical_url, headers=sent)
    request.context["timestamp"] = timestamp
    keys = ReadOnlyCredentials(credentials.access_key, credentials.secret, credentials.token or None)
    auth = S3SigV4Auth(keys, SERVICE, region)
    text = auth.string_to_sign(request, auth.canonical_request(request))
    sent["Authorization"] = (
        f"{ALGORITHM} Credential={auth.scope(request)}, "
        f"SignedHeaders={auth.signed_headers(auth.headers_to_sign(request))}, "
        f"Signature={auth.signature(text, request)}"
    )
    return sent


def several_mechanisms() -> RequestError:
    """The refusal of a request that is signed in more than one way."""
    return RequestError(
        "InvalidArgument",
        "Only one auth mechanism allowed; only the X-Amz-Algorithm query parameter, Signature query string "
        "parameter or the Authorization header should be specified",
    )


def unknown_access_key(access_key: str) -> RequestError:
    """The refusal of an access key that nobody has."""
    message = "The AWS Access Key Id you provided does not exist in our records."
    return RequestError("InvalidAccessKeyId", message, access_key=access_key)


def signature_mismatch(access_key: str) -> RequestError:
    """The refusal of a wrong signature; says nothing of what would have been right."""
    return RequestError("SignatureDoesNotMatch", _MISMATCH, access_key=access_key)


def request_expired(expires: str) -> RequestError:
    """The refusal of a presigned URL after its time."""
    return RequestError("AccessDenied", "Request has expired", expires=expires)


def _check_scope(claim: Claim, presigned: bool, regions: Collection[str] | None) -> None:
    if claim.date != claim.timestamp[:8]:
        why = f'Invalid credential date "{claim.date}". This date is not the same as X-Amz-Date: '
        raise malformed_credential(presigned, f'{why}"{claim.timestamp[:8]}".')
    if regions is not None and claim.region not in regions:
        why = f"the region '{claim.region}' is wrong; expecting '{' or '.join(sorted(regions))}'"
        raise malformed_credential(presigned, why)


def _check_time(claim: Claim, now_s: float, max_skew_s: float) -> None:
    try:
        signed_at = datetime.strptime(claim.timestamp, SIGV4_TIMESTAMP).replace(tzinfo=UTC)
    except ValueError as error:
        raise no_date() from error
    signed_s = signed_at.timestamp()
    if claim.expires_s is None:
        if abs(now_s - signed_s) > max_skew_s:
            message = "The difference between the request time and the current time is too large."
            raise RequestError("RequestTimeTooSkewed", message, request_time=claim.timestamp)
    elif signed_s - now_s > max_skew_s:
        raise RequestError("AccessDenied", "Request is not yet valid")
    elif now_s > signed_s + claim.expires_s:
        raise request_expired(claim.timestamp)


def _check_coverage(head: Head, claim: Claim) -> None:
    must = {"host"} | {name.lower() for name, _ in head.headers if name.lower().startswith("x-amz-")}
    missing = must - set(claim.signed_headers)
    if missing:
        message = "There were headers present in the request which were not signed"
        raise RequestError("AccessDenied", message, headers_not_signed=", ".join(sorted(missing)))


def _signature_matches(head: Head, claim: Claim, key: bytes) -> bool:
    headers = header_block(head.headers, claim.signed_headers)
    if headers is None or not head.names_one_host():
        return False
    given = claim.signature.encode("utf-8", "surrogateescape")
    matches = False
    for path in path_forms(head.raw_path):
        for query in query_forms(claim.query):
            canonical = "\n".join((head.method, path, query, headers, ";".join(claim.signed_headers), claim.payload))
            signature = sign_text(key, request_text(claim.timestamp, claim.scope, canonical))
            matches |= hmac.compare_digest(signature.encode(), given)
    return matches
