"""SigV4 over exactly the bytes that are sent: botocore's signer without its clock, its path rules and its
log lines.

https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from botocore.auth import SIGV4_TIMESTAMP, S3SigV4Auth
from botocore.awsrequest import AWSRequest, HTTPHeaders
from botocore.credentials import Credentials

UNSIGNED_PAYLOAD = "UNSIGNED-PAYLOAD"
UNSIGNED_TRAILER = "STREAMING-UNSIGNED-PAYLOAD-TRAILER"
EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()

_SIGNED = frozenset({"host", "content-type", "content-md5"})
"""Beside these only `x-amz-` headers are signed: proxies on the way may touch others."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Credentials that belong together. Not shown in logs."""

    access_key: str
    secret_key: str = field(repr=False)
    token: str | None = field(repr=False, default=None)


class _Signer(S3SigV4Auth):
    def __init__(self, credentials: Credentials, region: str, payload_hash: str, wall_s: float) -> None:
        super().__init__(credentials, "s3", region)
        self._payload_hash = payload_hash
        self._moment = datetime.fromtimestamp(wall_s, UTC)

    def payload(self, request: AWSRequest) -> str:
        return self._payload_hash

    def headers_to_sign(self, request: AWSRequest) -> HTTPHeaders:
        chosen = HTTPHeaders()
        for name, value in super().headers_to_sign(request).items():
            if name in _SIGNED or name.startswith("x-amz-"):
                chosen[name] = value
        return chosen

    def add_auth(self, request: AWSRequest) -> None:
        # The base class would take another clock, and log the session token at debug level.
        timestamp = self._moment.strftime(SIGV4_TIMESTAMP)
        request.context["timestamp"] = timestamp
        request.headers["x-amz-date"] = timestamp
        request.headers["x-amz-content-sha256"] = self._payload_hash
        if self.credentials.token:
            request.headers["x-amz-security-token"] = self.credentials.token
        text = self.string_to_sign(request, self.canonical_request(request))
        names = self.signed_headers(self.headers_to_sign(request))
        request.headers["Authorization"] = (
            f"AWS4-HMAC-SHA256 Credential={self.scope(request)}, SignedHeaders={names}, "
            f"Signature={self.signature(text, request)}"
        )


def sign(
    method: str,
    url: str,
    headers: Iterable[tuple[str, str]],
    payload_hash: str,
    keys: Keys,
    region: str,
    wall_s: float,
) -> list[tuple[str, str]]:
    """The headers with date, payload hash, token and Authorization added, in order.

    `url` must be encoded canonically: it is signed as it is. `wall_s` are Unix seconds.
    """
    request = AWSRequest(method=method, url=url)
    for name, value in headers:
        request.headers[name] = value
    credentials = Credentials(keys.access_key, keys.secret_key, keys.token)
    _Signer(credentials, region, payload_hash, wall_s).add_auth(request)
    return list(request.headers.items())
