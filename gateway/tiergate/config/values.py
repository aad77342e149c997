"""What settings are made of: value types, and parsers from text or TOML values.

A parser takes what a source gave (text from the environment or a flag, a TOML value from a file) and raises
`ValueError` with the end of a sentence about the value; who calls it knows the source and adds it.
"""

import fnmatch
import ipaddress
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from enum import StrEnum
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

Parser = Callable[[object], object]
_E = TypeVar("_E", bound=StrEnum)


class ClientAuth(StrEnum):
    """Whose signature a client must show."""

    KEYS = "keys"
    NONE = "none"
    ORIGIN = "origin"


class FenceMode(StrEnum):
    """Which objects wait for which before they become visible in the origin."""

    AUTO = "auto"
    STRICT = "strict"
    OFF = "off"


class ConditionalWrites(StrEnum):
    """Whether write-back uses If-Match and If-None-Match on the origin; `auto` finds out."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class EtagMode(StrEnum):
    """Whether large bodies get the exact MD5 ETag (slower) or an opaque one."""

    AUTO = "auto"
    EXACT = "exact"


class LogLevel(StrEnum):
    """The least severe level that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    """How a log record is written to stderr."""

    TEXT = "text"
    JSON = "json"


@dataclass(frozen=True, slots=True)
class Persist:
    """Which sets of a run go to the origin: every so many, or one in so many seconds; none where both are 0."""

    every_count: int = 1
    every_s: float = 0.0

    def __str__(self) -> str:
        if self.every_s:
            return f"every {format_duration(self.every_s)}"
        return {0: "none", 1: "all"}.get(self.every_count, f"every {self.every_count}")


class Secret:
    """Text that shows itself only when asked to: `repr`, `str` and formatting give `***`."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        """The text itself, for the one place that needs it."""
        return self._value

    def __repr__(self) -> str:
        return "Secret(***)"

    def __str__(self) -> str:
        return "***"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._value == self._value

    def __hash__(self) -> int:
        return hash(("Secret", self._value))


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen: a host name or IP address (IPv6 without brackets), and a port (0: any free one)."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect. A name other than `localhost` counts as reachable."""
        try:
            return ipaddress.ip_address(self.host.partition("%")[0]).is_loopback
        except ValueError:
            return self.host == "localhost"


_SIZE_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _SIZE_UNITS[f"{_letter}b"] = 1000**_power
    _SIZE_UNITS[f"{_letter}ib"] = 1024**_power
_DURATION_UNITS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", re.ASCII)


def parse_size(value: object) -> int:
    """Bytes from `2GiB`, `512MiB`, `1.5GB` or a whole number."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _QUANTITY.fullmatch(value.strip()) if isinstance(value, str) else None
    factor = _SIZE_UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"{show(value)} is not a size (such as 2GiB, 512MiB or a number of bytes)")
    try:
        amount = Decimal(match[1]) * factor
    except InvalidOperation as error:
        raise ValueError(f"{show(value)} is not a size") from error
    if amount != amount.to_integral_value():
        raise ValueError(f"{show(value)} is not a whole number of bytes")
    return int(amount)


def format_size(size_bytes: int) -> str:
    """The shortest exact text that `parse_size` reads back, such as `64MiB`."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size_bytes and size_bytes % 1024**power == 0:
            return f"{size_bytes // 1024**power}{unit}"
    return str(size_bytes)


def parse_duration(value: object) -> float:
    """Seconds from `250ms`, `60s`, `5m`, `6h`, `1d` or a number."""
    if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 and math.isfinite(value):
        return float(value)
    match = _QUANTITY.fullmatch(value.strip()) if isinstance(value, str) else None
    factor = _DURATION_UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"{show(value)} is not a duration (such as 60s, 5m, 6h or a number of seconds)")
    return float(match[1]) * factor


def parse_persist(value: object) -> Persist:
    """`all`, `none`, `every 5` (sets) or `every 30m`."""
    text = parse_text(value).lower()
    if text in ("all", "none"):
        return Persist(1 if text == "all" else 0)
    word, _, amount = text.partition(" ")
    amount = amount.strip()
    if word == "every" and amount:
        if amount.isascii() and amount.isdigit():
            if int(amount):
                return Persist(int(amount))
        else:
            try:
                every_s = parse_duration(amount)
            except ValueError:
                every_s = 0.0
            if every_s:
                return Persist(0, every_s)
    raise ValueError(f"{show(value)} is none of all, none, every COUNT and every DURATION (such as every 5, every 30m)")


def format_duration(duration_s: float) -> str:
    """The shortest exact text that `parse_duration` reads back, such as `5m`."""
    for factor, unit in ((3600, "h"), (60, "m")):
        if duration_s and duration_s % factor == 0:
            return f"{duration_s / factor:g}{unit}"
    return f"{duration_s * 1000:g}ms" if 0 < duration_s < 1 else f"{duration_s:g}s"


def parse_seconds(value: object) -> float:
    """A duration of whole seconds."""
    duration_s = parse_duration(value)
    if not duration_s.is_integer():
        raise ValueError(f"{show(value)} is not a number of whole seconds")
    return duration_s


def parse_count(value: object) -> int:
    """A whole number that is not negative."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str) and value.strip().isascii() and value.strip().isdigit():
        return int(value)
    raise ValueError(f"{show(value)} is not a whole number")


def parse_text(value: object) -> str:
    """Text that is not empty."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{show(value)} is not a text")
    return value.strip()


def parse_secret(value: object) -> Secret:
    """A secret; the fault does not show the value."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError("the value is not a text")
    return Secret(value.strip())


def parse_long_secret(value: object) -> Secret:
    """A secret that nobody guesses; the fault does not show the value."""
    secret = parse_secret(value)
    if len(secret.reveal()) < SHORTEST_SECRET:
        raise ValueError(f"the value is shorter than {SHORTEST_SECRET} characters")
    return secret


def parse_flag(value: object) -> bool:
    """A truth value."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise ValueError(f"{show(value)} is neither true nor false")


def parse_texts(value: object) -> tuple[str, ...]:
    """A list of texts: a TOML array, or text with commas."""
    if isinstance(value, str):
        value = [item for item in value.split(",") if item.strip()]
    if not isinstance(value, list | tuple):
        raise ValueError(f"{show(value)} is not a list of texts")
    return tuple(parse_text(item) for item in value)


def parse_markers(value: object) -> tuple[str, ...]:
    """Glob patterns for names of markers."""
    patterns = parse_texts(value)
    for pattern in patterns:
        re.compile(fnmatch.translate(pattern))
    return patterns


ETCD_SCHEMES = ("etcd", "etcds")
SHORTEST_SECRET = 16
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", re.ASCII)
_HOST_NAME = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63})*\.?", re.ASCII)


def parse_host_suffixes(value: object) -> tuple[str, ...]:
    """Domains whose sub-domains name buckets, lower case, without a leading dot."""
    suffixes = tuple(suffix.lower().lstrip(".") for suffix in parse_texts(value))
    for suffix in suffixes:
        if not _HOST_NAME.fullmatch(suffix):
            raise ValueError(f"{show(suffix)} is not a domain name (without scheme and port)")
    return suffixes


def parse_address(value: object) -> Address:
    """HOST:PORT, with an IPv6 host in brackets."""
    text = parse_text(value)
    host, colon, port = text.rpartition(":")
    if "://" in text:
        raise ValueError(f"{show(value)} is a URL, not HOST:PORT (write {text.partition('://')[2].rstrip('/')})")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{show(value)} is not HOST:PORT (such as 127.0.0.1:9000, port 0 for any free one)")
    if bracketed:
        host = host[1:-1]
        try:
            ipaddress.IPv6Address(host)
        except ValueError as error:
            raise ValueError(f"{show(value)} has no valid IPv6 address in its brackets") from error
    elif ":" in host:
        raise ValueError(f"{show(value)} has an IPv6 address without brackets (write [{host}]:{port})")
    elif not host:
        raise ValueError(f"{show(value)} has no host (write 0.0.0.0:{port} for all interfaces)")
    elif not _HOST_NAME.fullmatch(host):
        raise ValueError(f"{show(value)} has no valid host")
    return Address(host, int(port))


def parse_networks(value: object) -> tuple[str, ...]:
    """Networks such as `10.0.0.0/8`, or single IP addresses; each as `ipaddress` writes it."""
    found: list[str] = []
    for text in parse_texts(value):
        try:
            found.append(str(ipaddress.ip_network(text)))
        except ValueError as error:
            raise ValueError(f"{show(text)} is not a network (such as 10.0.0.0/8)") from error
    return tuple(found)


def parse_place(value: object) -> str:
    """s3://BUCKET/PREFIX/: a folder of a bucket; its slash may be left out."""
    text = parse_text(value)
    scheme, _, rest = text.partition("://")
    bucket, _, prefix = rest.partition("/")
    prefix = prefix.rstrip("/")
    if scheme != "s3" or not bucket or not prefix:
        raise ValueError(f"{show(value)} is not s3://BUCKET/PREFIX")
    return f"s3://{bucket}/{prefix}/"


def parse_origin(value: object) -> str:
    """An S3 endpoint: scheme, host and perhaps a port; nothing else."""
    text = parse_text(value)
    try:
        parts = urlsplit(text)
        port_valid = parts.port != 0
    except ValueError as error:
        raise ValueError(f"{show(value)} is not a URL: {error}") from error
    if parts.username is not None or parts.password is not None:
        raise ValueError("the URL holds credentials (they come from the standard AWS chain)")
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_valid:
        raise ValueError(f"{show(value)} is not an endpoint URL (such as https://s3.example.com:9443)")
    if parts.path not in ("", "/") or parts.query or parts.fragment:
        raise ValueError(f"{show(value)} has more than scheme, host and port")
    return f"{parts.scheme}://{parts.netloc}"


def parse_cluster(value: object) -> str:
    """Where the members of an etcd cluster are, and under which name we meet there; see `etcd_place`."""
    text = parse_text(value).removesuffix("/")
    scheme, found, rest = text.partition("://")
    if not found or scheme not in ETCD_SCHEMES:
        raise ValueError(f"{show(value)} is not etcd://HOST:PORT,HOST:PORT (or etcds://, with TLS)")
    members, slash, name = rest.partition("/")
    if slash:
        parse_name(name)
    if "@" in members:
        raise ValueError("the URL holds credentials (they are etcd_user and etcd_password)")
    for member in members.split(","):
        if parse_address(member).port == 0:
            raise ValueError(f"{show(member)} has no port")
    return text


@dataclass(frozen=True, slots=True)
class EtcdPlace:
    """What a cluster's URL says: its members' host:port, whether they speak TLS, and the prefix of all keys."""

    endpoints: tuple[str, ...]
    tls: bool
    prefix: str


def etcd_place(url: str) -> EtcdPlace:
    """Take apart what `parse_cluster` took."""
    scheme, _, rest = url.partition("://")
    members, _, name = rest.partition("/")
    return EtcdPlace(tuple(members.split(",")), scheme == "etcds", f"/{name or 'tiergate'}")


def parse_name(value: object) -> str:
    """A name that stands in keys of the directory and in requests of peers."""
    name = parse_text(value)
    if not _NAME.fullmatch(name):
        raise ValueError(f"{show(value)} is not a name (up to 63 letters, digits, and . _ - within)")
    return name


def parse_file(value: object) -> Path:
    """The absolute path of a file that can be read."""
    path = parse_folder(value)
    try:
        path.open("rb").close()
    except OSError as error:
        raise ValueError(f"{show(value)} cannot be read: {error.strerror}") from error
    return path


def parse_folder(value: object) -> Path:
    """An absolute path. A relative one would depend on where the node was started."""
    path = Path(parse_text(value)).expanduser()
    if not path.is_absolute():
        raise ValueError(f"{show(value)} is not an absolute path")
    return path


def choice_of(kind: type[_E]) -> Callable[[object], _E]:
    """A parser for one of the values of an enumeration."""

    def parse(value: object) -> _E:
        try:
            return kind(value.strip().lower() if isinstance(value, str) else str(value))
        except ValueError as error:
            raise ValueError(f"{show(value)} is not one of {', '.join(kind)}") from error

    return parse


def show(value: object) -> str:
    """A value as a fault shows it: quoted text, cut when long, always one line."""
    text = f'"{value}"' if isinstance(value, str) else str(value)
    text = text.encode("unicode_escape").decode("ascii")
    return text if len(text) <= 80 else f"{text[:77]}..."
