"""Who sent a request: one entry for all signature versions, and what a signed URL carries for headers."""

import re
from collections.abc import Collection

from tiergate.errors import RequestError
from tiergate.s3 import sigv2, sigv4
from tiergate.s3.sigv4 import Head, SecretFor, Verified

_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_CHECKSUMS = ("x-amz-checksum-", "x-amz-sdk-checksum-")
_AUTHENTICATION = frozenset(
    (
        *("x-amz-algorithm", "x-amz-credential", "x-amz-signature", "x-amz-date", "x-amz-signedheaders"),
        *("x-amz-expires", "x-amz-security-token", "x-amz-content-sha256"),
    )
)


def authenticate(
    head: Head,
    secret_for: SecretFor,
    now_s: float,
    *,
    host_bucket: str | None = None,
    regions: Collection[str] | None = None,
    max_skew_s: float = sigv4.MAX_SKEW_S,
) -> Verified | None:
    """Check whatever credentials a request carries; None when it carries none at all (anonymous).

    `max_skew_s` is how far a signature's time may be
    from ours. `host_bucket` is the bucket a virtual-host style request names in its Host (version 2 signs it).

    Raises:
        RequestError: as `sigv4.verify` and `sigv2.verify`.
    """
    if sigv2.has_credentials(head):
        return sigv2.verify(head, secret_for, now_s, host_bucket=host_bucket)
    return sigv4.verify(head, secret_for, now_s, regions=regions, max_skew_s=max_skew_s)


def headers_in_query(head: Head) -> dict[str, str]:
    """The x-amz- headers that a presigned URL carries in its query (names in lower case).

    Signers move headers there (`x-amz-acl`, `x-amz-meta-…`, `x-amz-tagging`); S3 honours them as if they
    had been sent as headers. A header that was really sent wins and is left out. Only for presigned requests.
    https://docs.aws.amazon.com/AmazonS3/latest/API/sigv4-query-string-auth.html

    Checksums are left out, as S3 ignores them there: SDKs presign the checksum of an empty body into the URL.
    https://github.com/aws/aws-sdk-go-v2/issues/2610, https://github.com/localstack/localstack/issues/12169

    Raises:
        RequestError: InvalidArgument for a value that no header can carry.
    """
    sent = {name.lower() for name, _ in head.headers}
    found: dict[str, str] = {}
    for name, value in head.parameters():
        lowered = name.lower()
        if lowered in _AUTHENTICATION or lowered.startswith(_CHECKSUMS):
            continue
        if lowered.startswith("x-amz-") and lowered not in sent:
            if _CONTROL.search(value):
                raise RequestError("InvalidArgument", f"{name} holds control characters.")
            found.setdefault(lowered, value)
    return found
