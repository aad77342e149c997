"""Scalars on the wire: times, truth values, and text in headers."""

import re
from datetime import UTC, datetime
from email.charset import QP, Charset
from email.header import Header
from email.utils import format_datetime, parsedate_to_datetime

_PLAIN = re.compile(r"[\x20-\x7e]*")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_INTEGER = re.compile(r"-?[0-9]{1,19}")


def parse_time(text: str) -> datetime:
    """Read an HTTP date (any of its three forms) or an ISO 8601 time; without a zone it is UTC.

    Raises:
        ValueError: for anything else.
    """
    text = text.strip()
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = parsedate_to_datetime(text)
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


def http_date(moment: datetime | float) -> str:
    """RFC 9110 date, as in Last-Modified. Numbers are Unix seconds."""
    return format_datetime(_aware(moment), usegmt=True)


def iso_date(moment: datetime | float) -> str:
    """ISO 8601 with milliseconds and `Z`, as in S3's XML. Numbers are Unix seconds."""
    return _aware(moment).isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"


def parse_integer(text: str) -> int:
    """Read a plain decimal integer of up to 19 digits.

    Raises:
        ValueError: for anything else (Python's `int` would also take `1_0` or other scripts' digits).
    """
    text = text.strip()
    if not _INTEGER.fullmatch(text):
        raise ValueError(text)
    return int(text)


def parse_boolean(text: str) -> bool:
    """Read `true` or `false` in any case.

    Raises:
        ValueError: for anything else.
    """
    word = text.strip().lower()
    if word not in {"true", "false"}:
        raise ValueError(text)
    return word == "true"


def quote_etag(etag: str) -> str:
    """The ETag as headers and XML carry it: in double quotes."""
    return etag if etag.startswith(('"', 'W/"')) else f'"{etag}"'


def unquote_etag(etag: str) -> str:
    """The ETag as it is kept inside: without quotes and without a weakness mark."""
    return etag.strip().removeprefix("W/").strip('"')


def has_control(text: str) -> bool:
    """Whether `text` could break out of a header line."""
    return _CONTROL.search(text) is not None


def decode_header_text(value: str) -> str:
    """The text of a header that was read as UTF-8 with `surrogateescape`.

    Bytes that are not UTF-8 are taken as Latin-1, as HTTP once defined: the result is always storable text.
    """
    try:
        value.encode()
    except UnicodeEncodeError:
        return value.encode("utf-8", "surrogateescape").decode("latin-1")
    return value


def encode_metadata(value: str) -> str:
    """A metadata value as S3 answers it: plain if printable ASCII, else one RFC 2047 encoded word in UTF-8.

    https://docs.aws.amazon.com/AmazonS3/latest/userguide/UsingMetadata.html
    """
    if _PLAIN.fullmatch(value):
        return value
    if _CONTROL.search(value):
        # email's own choice splits or folds at line ends, which must not reach a header.
        charset = Charset("utf-8")
        charset.header_encoding = QP
        return charset.header_encode(value)
    return Header(value, "utf-8").encode(maxlinelen=0)


def _aware(moment: datetime | float) -> datetime:
    if isinstance(moment, datetime):
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    return datetime.fromtimestamp(moment, UTC)
