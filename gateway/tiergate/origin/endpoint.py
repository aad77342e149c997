"""Where the origin is: settings, and the exact URL of a bucket or a key."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import quote, unquote_to_bytes

from tiergate.config.values import ConditionalWrites
from tiergate.errors import ConfigError

UNRESERVED = "-_.~"
"""Beside letters and digits, all that SigV4 leaves as it is:
https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html"""

REGIONS_LIMIT_COUNT = 10_000

# A dot in the name would not match S3's wildcard certificate.
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/VirtualHosting.html
_HOST_LABEL = re.compile(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]")


@dataclass(frozen=True, slots=True, kw_only=True)
class OriginSettings:
    """How to reach the origin. Durations are seconds.

    `endpoint` None means AWS (virtual-host style); any other origin is spoken to in path style. It is never
    taken from the environment, where it would point at the gateway itself. `region` None: what the standard
    AWS chain says. `connect_timeout_s` bounds connecting, `read_timeout_s` each silence of the origin after
    that. A call is tried up to `attempts_count` times, and not again once `retry_limit_s` have passed;
    before try n+1 it waits a random time up to `backoff_base_s` * 2^(n-1), at most `backoff_cap_s`."""

    endpoint: str | None = None
    region: str | None = None
    connect_timeout_s: float = 5.0
    read_timeout_s: float = 60.0
    attempts_count: int = 5
    backoff_base_s: float = 0.2
    backoff_cap_s: float = 20.0
    retry_limit_s: float = 120.0
    max_connections_count: int = 64
    conditional_writes: ConditionalWrites = ConditionalWrites.AUTO


class Endpoint:
    """Makes URLs, and remembers which region a bucket turned out to be in."""

    def __init__(self, endpoint: str | None, region: str) -> None:
        """
        Raises:
            ConfigError: the endpoint is not an HTTP URL of a host.
        """
        if endpoint is not None and not re.fullmatch(r"https?://[^/?#@\s]+/?", endpoint):
            raise ConfigError("the origin's endpoint must be http(s)://HOST[:PORT]", endpoint=endpoint)
        self._endpoint = endpoint.rstrip("/") if endpoint else None
        self._region = region
        self._regions: dict[str, str] = {}

    def region_of(self, bucket: str) -> str:
        """The region to sign for."""
        return self._regions.get(bucket, self._region)

    def learn_region(self, bucket: str, region: str) -> bool:
        """Note what the origin said; whether that changes anything."""
        if not bucket or not region or self.region_of(bucket) == region:
            return False
        if len(self._regions) >= REGIONS_LIMIT_COUNT:
            self._regions.clear()
        self._regions[bucket] = region
        return True

    def url(self, bucket: str, key: str, raw_query: str) -> str:
        """The URL byte for byte as it must be on the wire; an empty key names the bucket, an empty bucket the
        service. `raw_query` must be encoded already (`encode_query`, `canonical_query`)."""
        path = "/" + encode_key(key)
        if self._endpoint is None:
            host = self._aws_host(bucket)
            if bucket and not host.startswith(bucket + "."):
                path = f"/{quote(bucket, safe=UNRESERVED)}" + (path if key else "")
            base = "https://" + host
        else:
            base = self._endpoint
            if bucket:
                path = f"/{quote(bucket, safe=UNRESERVED)}" + (path if key else "")
        return base + path + ("?" + raw_query if raw_query else "")

    def _aws_host(self, bucket: str) -> str:
        region = self.region_of(bucket)
        host = f"s3.{region}.amazonaws.com" + (".cn" if region.startswith("cn-") else "")
        return f"{bucket}.{host}" if _HOST_LABEL.fullmatch(bucket) else host


def encode_key(key: str) -> str:
    """Percent-encode each UTF-8 byte of a key but the unreserved ones and `/`."""
    return quote(key, safe=UNRESERVED + "/")


def encode_query(parameters: Iterable[tuple[str, str | None]]) -> str:
    """A query string in the order given; None makes a parameter without `=`."""
    return "&".join(
        quote(name, safe=UNRESERVED) + ("" if value is None else "=" + quote(value, safe=UNRESERVED))
        for name, value in parameters
    )


def canonical_query(raw_query: str) -> str:
    """A client's query with each name and value encoded the one way SigV4 knows; order and meaning are kept.

    `+` is a space here, as S3 reads it.
    """
    pieces = []
    for piece in raw_query.split("&"):
        if piece:
            name, equals, value = piece.replace("+", " ").partition("=")
            pieces.append(_recode(name) + equals + _recode(value))
    return "&".join(pieces)


def _recode(text: str) -> str:
    return quote(unquote_to_bytes(text.encode("utf-8", "surrogateescape")), safe=UNRESERVED)
