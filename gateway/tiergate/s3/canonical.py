"""Canonical forms and keys of AWS Signature Version 4.

https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html
"""

import hashlib
import hmac
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from urllib.parse import quote, unquote_to_bytes

ALGORITHM = "AWS4-HMAC-SHA256"
TERMINATOR = "aws4_request"
SERVICE = "s3"
EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()

MAX_SIGNING_KEYS = 256
"""How many derived signing keys a process remembers; one is used by a client for a day and region."""

_SPACES = re.compile(r"\s+", re.ASCII)


def wire_bytes(text: str) -> bytes:
    """The bytes `text` had on the wire; servers decode bytes outside UTF-8 to surrogates."""
    return text.encode("utf-8", "surrogateescape")


def normalised(text: str, safe: str = "") -> str:
    """Percent-decode `text` once and encode it again as S3 does: all bytes but unreserved ones and `safe`."""
    return quote(unquote_to_bytes(wire_bytes(text)), safe=safe)


def path_forms(raw_path: str) -> tuple[str, ...]:
    """The canonical URIs a signer may have used for `raw_path`: as sent, then normalised.

    Both name the same key, so accepting either gives no freedom to whoever tampers. `//`, `.` and `..` stay.
    """
    path = raw_path or "/"
    return tuple(dict.fromkeys((path, normalised(path, "/"))))


def query_pairs(raw_query: str) -> list[tuple[str, str]]:
    """Split a raw query, nothing decoded; a parameter without `=` has an empty value."""
    if not raw_query:
        return []
    pairs = (part.partition("=") for part in raw_query.split("&"))
    return [(name, value) for name, _, value in pairs]


def decoded_parameter(text: str) -> str:
    """The text of a query name or value; `+` is a space there."""
    return unquote_to_bytes(wire_bytes(text.replace("+", " "))).decode("utf-8", "surrogateescape")


def query_forms(pairs: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """The canonical query strings a signer may have used for raw `pairs`: as sent, then normalised."""
    encoded = [tuple(normalised(text.replace("+", " ")) for text in pair) for pair in pairs]
    forms = (sorted(pairs), sorted(encoded))
    return tuple(dict.fromkeys("&".join("=".join(pair) for pair in form) for form in forms))


def header_block(headers: Iterable[tuple[str, str]], signed: Sequence[str]) -> str | None:
    """The canonical headers named by `signed` (lower case), in that order, or None when one is not there."""
    found: dict[str, list[str]] = {name: [] for name in signed}
    for name, value in headers:
        lowered = name.lower()
        if lowered in found:
            found[lowered].append(_SPACES.sub(" ", value.strip()))
    if not all(found.values()):
        return None
    return "".join(f"{name}:{','.join(found[name])}\n" for name in signed)


def sign_text(key: bytes, text: str) -> str:
    """The hexadecimal HMAC-SHA256 of `text`."""
    return hmac.new(key, wire_bytes(text), hashlib.sha256).hexdigest()


@lru_cache(maxsize=MAX_SIGNING_KEYS)
def signing_key(secret: str, date: str, region: str) -> bytes:
    """The key that signs S3 requests of one `date` (YYYYMMDD) and region."""
    key = wire_bytes("AWS4" + secret)
    for text in (date, region, SERVICE, TERMINATOR):
        key = hmac.new(key, wire_bytes(text), hashlib.sha256).digest()
    return key


def request_text(timestamp: str, scope: str, canonical_request: str) -> str:
    """The string to sign of a request."""
    digest = hashlib.sha256(wire_bytes(canonical_request)).hexdigest()
    return "\n".join((ALGORITHM, timestamp, scope, digest))


@dataclass(frozen=True, slots=True)
class ChunkSigner:
    """Signs the chunks of one body; each signature covers the one before it, the first covers `seed`.

    https://docs.aws.amazon.com/AmazonS3/latest/API/sigv4-streaming.html
    https://docs.aws.amazon.com/AmazonS3/latest/API/sigv4-streaming-trailers.html
    """

    seed: str
    timestamp: str
    scope: str
    key: bytes = field(repr=False)

    def chunk(self, previous: str, data_sha256: str) -> str:
        """The signature of a chunk whose data has the hexadecimal hash `data_sha256`."""
        return self._sign("PAYLOAD", previous, EMPTY_SHA256, data_sha256)

    def trailer(self, previous: str, trailers: bytes) -> str:
        """The signature of the trailing headers, given as `name:value\\n` lines."""
        return self._sign("TRAILER", previous, hashlib.sha256(trailers).hexdigest())

    def _sign(self, what: str, previous: str, *hashes: str) -> str:
        text = "\n".join((f"{ALGORITHM}-{what}", self.timestamp, self.scope, previous, *hashes))
        return sign_text(self.key, text)
