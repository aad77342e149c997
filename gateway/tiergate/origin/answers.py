"""Values that the origin client hands out. ETags have no quotes, times are Unix seconds. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from tiergate.errors import OriginTemporaryError
from tiergate.origin.stamp import Stamp, read_stamp
from tiergate.s3.checksums import COMPOSITE, FULL_OBJECT
from tiergate.s3.wire import decode_header_text, parse_time, quote_etag, unquote_etag

_META = "x-amz-meta-"
_CHECKSUM = "x-amz-checksum-"

# What a GET or HEAD answer says of the object itself.
# https://docs.aws.amazon.com/AmazonS3/latest/API/API_HeadObject.html#API_HeadObject_ResponseSyntax
_SETTABLE = frozenset(
    {
        "cache-control",
        "content-disposition",
        "content-encoding",
        "content-language",
        "content-type",
        "expires",
        "x-amz-object-lock-event-hold",
        "x-amz-object-lock-event-hold-duration-days",
        "x-amz-object-lock-event-hold-duration-years",
        "x-amz-object-lock-legal-hold",
        "x-amz-object-lock-mode",
        "x-amz-object-lock-retain-until-date",
        "x-amz-server-side-encryption",
        "x-amz-server-side-encryption-aws-kms-key-id",
        "x-amz-server-side-encryption-bucket-key-enabled",
        "x-amz-storage-class",
        "x-amz-website-redirect-location",
    }
)
ANSWER_ONLY = frozenset(
    {
        "x-amz-archive-status",
        "x-amz-delete-marker",
        "x-amz-expiration",
        "x-amz-missing-meta",
        "x-amz-mp-parts-count",
        "x-amz-replication-status",
        "x-amz-restore",
        "x-amz-tagging-count",
        "x-amz-version-id",
    }
)
"""Headers of an object that only an answer carries; S3 refuses a request with them."""

TAGGING_COUNT = "x-amz-tagging-count"

_SHOWN = (_SETTABLE | ANSWER_ONLY) - {"x-amz-delete-marker", "x-amz-mp-parts-count", "x-amz-version-id"}


@dataclass(frozen=True, slots=True)
class Condition:
    """What must hold of the key for a write to happen. Make one with `none`, `if_absent` or `if_match`."""

    header: str = ""
    value: str = ""

    @classmethod
    def none(cls) -> Self:
        """Write whatever is there."""
        return cls()

    @classmethod
    def if_absent(cls) -> Self:
        """Write only if the key does not exist.

        https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes.html
        """
        return cls("if-none-match", "*")

    @classmethod
    def if_match(cls, etag: str) -> Self:
        """Write only over the version with this ETag of the origin."""
        return cls("if-match", quote_etag(etag))


@dataclass(frozen=True, slots=True)
class PutAnswer:
    """What the origin said of a write. `version_id` is empty in a bucket without versions; header names are
    lower case."""

    etag: str
    version_id: str
    headers: dict[str, str]


@dataclass(frozen=True, slots=True)
class OriginObject:
    """An object as the origin describes it.

    `headers` are those a reader is to be shown again (lower case; without ETag, Last-Modified, length,
    checksums and metadata, which have their own fields). `metadata` is the user's, without our stamp.
    `checksums` maps the algorithm in lower case to base64. `version_id` is empty in a bucket without
    versions, `parts_count` None for an object that was put at once. `tagging` holds the tags as x-amz-tagging
    does, where they were asked for."""

    etag: str
    size_bytes: int
    modified_s: int
    headers: dict[str, str]
    metadata: dict[str, str]
    checksums: dict[str, str]
    checksum_type: str
    version_id: str
    parts_count: int | None
    storage_class: str
    stamp: Stamp | None
    tagging: str = ""


@dataclass(frozen=True, slots=True)
class OriginEntry:
    """An object in a listing. `owner` is (id, display name); `checksum_algorithms` are in upper case."""

    key: str
    size_bytes: int
    etag: str
    modified_s: int
    storage_class: str
    owner: tuple[str, str] | None = None
    checksum_algorithms: tuple[str, ...] = ()
    checksum_type: str = ""


@dataclass(frozen=True, slots=True)
class OriginPage:
    """A part of a listing, in the origin's order. If `is_truncated`, the next page starts after
    `last_key`."""

    entries: Sequence[OriginEntry]
    common_prefixes: Sequence[str]
    is_truncated: bool
    last_key: str = field(init=False, default="")

    def __post_init__(self) -> None:
        names = [entry.key for entry in self.entries] + list(self.common_prefixes)
        object.__setattr__(self, "last_key", max(names, key=str.encode, default=""))


def lower_names(headers: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Headers by lower-case name, values as storable text; the values of a repeated name are joined."""
    found: dict[str, str] = {}
    for name, value in headers:
        low, text = name.lower(), decode_header_text(value)
        found[low] = f"{found[low]},{text}" if low in found else text
    return found


def object_of(headers: Mapping[str, str], size_bytes: int) -> OriginObject:
    """An object from the headers of the origin's answer to GET or HEAD.

    Raises:
        OriginTemporaryError: ETag or Last-Modified are missing or no such thing.
    """
    etag = unquote_etag(headers.get("etag", ""))
    try:
        modified_s = int(parse_time(headers.get("last-modified", "")).timestamp())
    except ValueError as error:
        raise OriginTemporaryError("the origin's answer has no Last-Modified") from error
    if not etag:
        raise OriginTemporaryError("the origin's answer has no ETag")
    metadata = {name[len(_META) :]: text for name, text in headers.items() if name.startswith(_META)}
    stamp = read_stamp(metadata)
    checksums = {name[len(_CHECKSUM) :]: text for name, text in headers.items() if name.startswith(_CHECKSUM)}
    checksum_type = checksums.pop("type", "")
    checksums.pop("algorithm", None)  # not AWS's, but some servers name the upload's algorithm here
    if checksums and not checksum_type:
        # Some servers leave it out; the form of the value says it.
        # https://docs.aws.amazon.com/AmazonS3/latest/userguide/checking-object-integrity-upload.html
        checksum_type = COMPOSITE if any("-" in value for value in checksums.values()) else FULL_OBJECT
    parts_count = _parts_count(headers, etag)
    if checksum_type == COMPOSITE and parts_count is not None:
        # Some servers leave the number of parts out; SDKs would then take it for the checksum of the whole body.
        checksums = {name: value if "-" in value else f"{value}-{parts_count}" for name, value in checksums.items()}
    return OriginObject(
        etag=etag,
        size_bytes=size_bytes,
        modified_s=modified_s,
        headers={name: text for name, text in headers.items() if name in _SHOWN},
        metadata=metadata,
        checksums=checksums,
        checksum_type=checksum_type,
        version_id=_version_id(headers),
        parts_count=parts_count,
        storage_class=headers.get("x-amz-storage-class", "STANDARD"),
        stamp=stamp,
    )


def put_answer_of(headers: Mapping[str, str], etag: str) -> PutAnswer:
    """What a write's answer says.

    Raises:
        OriginTemporaryError: it has no ETag.
    """
    if not etag:
        raise OriginTemporaryError("the origin's answer has no ETag")
    return PutAnswer(unquote_etag(etag), _version_id(headers), dict(headers))


def _version_id(headers: Mapping[str, str]) -> str:
    version_id = headers.get("x-amz-version-id", "")
    return "" if version_id == "null" else version_id


def _parts_count(headers: Mapping[str, str], etag: str) -> int | None:
    """S3 states the count only to requests for a part; the ETag of a multipart object ends in it."""
    text = headers.get("x-amz-mp-parts-count", "") or etag.partition("-")[2]
    return int(text) if text.isascii() and text.isdigit() else None
