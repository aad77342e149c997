"""ETags we make: stable, and of the shape S3's own have.

S3 promises an MD5 only for bodies sent in one piece and stored without KMS keys; a `-` in the ETag tells
clients that it is not one. https://docs.aws.amazon.com/AmazonS3/latest/API/API_Object.html
"""

import hashlib
import re
from collections.abc import Sequence

from tiergate.errors import invariant
from tiergate.s3.wire import quote_etag as quote
from tiergate.s3.wire import unquote_etag as unquote

__all__ = ["multipart_etag", "opaque_etag", "part_opaque_etag", "quote", "unquote"]

_PART_ETAG = re.compile(r"[0-9a-fA-F]{32}")


def opaque_etag(uid: str) -> str:
    """The ETag of an object whose MD5 was not computed: multipart form, the same for the same `uid`."""
    return f"{_opaque(uid, b'object')}-1"


def part_opaque_etag(uid: str) -> str:
    """The ETag of a part whose MD5 was not computed: 32 hexadecimal digits, the same for the same `uid`."""
    return _opaque(uid, b"part")


def multipart_etag(part_etags: Sequence[str]) -> str:
    """The ETag of an object made of parts; S3's own when the parts' ETags are their MD5.

    Raises:
        InvariantError: when there is no part, or the ETag of one is not 32 hexadecimal digits.
    """
    invariant(len(part_etags) > 0, "an object has at least one part")
    digest = hashlib.md5(usedforsecurity=False)
    for etag in part_etags:
        invariant(_PART_ETAG.fullmatch(etag) is not None, "a part's ETag is not of S3's form", etag=etag)
        digest.update(bytes.fromhex(etag))
    return f"{digest.hexdigest()}-{len(part_etags)}"


def _opaque(uid: str, what: bytes) -> str:
    return hashlib.blake2b(uid.encode(), digest_size=16, person=what).hexdigest()
