"""The identity of a version, carried as one metadata header of the origin's object (promise P6). Pure.

A node that forgot a version derives ETag and time from it again. The header is hidden from clients.
"""

import hashlib
import re
from collections.abc import MutableMapping
from dataclasses import dataclass

from tiergate.model import ObjectName, Version

STAMP_METADATA = "tiergate"
STAMP_HEADER = "x-amz-meta-tiergate"

DEFAULT_CONTENT_TYPE = "binary/octet-stream"
"""Of an object that came without one: https://docs.aws.amazon.com/AmazonS3/latest/API/API_PutObject.html"""

METADATA_LIMIT_BYTES = 2048
"""Names and values of user metadata together:
https://docs.aws.amazon.com/AmazonS3/latest/userguide/UsingMetadata.html"""

_STAMP = re.compile(
    r"1;(?P<uid>[0-9A-Za-z._-]{1,64});(?P<etag>[!#-:<-~]{0,200});(?P<modified_s>[0-9]{1,12});(?P<of>[0-9a-f]{12})"
)


@dataclass(frozen=True, slots=True)
class Stamp:
    """What the gateway wrote of a version beside its bytes. `modified_s` are Unix seconds, `etag` is empty where the
    origin's own ETag is the version's, `of` is the digest of the key it was written under."""

    uid: str
    etag: str
    modified_s: int
    of: str

    def is_of(self, name: ObjectName) -> bool:
        """Whether it was written with the object of this name; a copy made in the origin carries its source's."""
        return self.of == _digest(name)


def stamp_header(version: Version, name: ObjectName) -> dict[str, str]:
    """The header that stamps `version` of `name`; empty where user metadata leaves no room for it."""
    value = f"1;{version.uid};{version.etag};{version.modified_s};{_digest(name)}"
    size_bytes = len(STAMP_METADATA) + len(value)
    size_bytes += sum(len(name.encode()) + len(text.encode()) for name, text in version.metadata.items())
    return {STAMP_HEADER: value} if size_bytes <= METADATA_LIMIT_BYTES else {}


def described(version: Version, name: ObjectName) -> dict[str, str]:
    """All headers that tell the origin of a version: its own, the user's metadata, tags and the stamp.

    Some servers guess a content type where none is told: it would not be the same after write-back.
    """
    headers = {"content-type": DEFAULT_CONTENT_TYPE} | version.headers
    headers |= {f"x-amz-meta-{label}": value for label, value in version.metadata.items()}
    if version.tagging:
        headers["x-amz-tagging"] = version.tagging
    return headers | stamp_header(version, name)


def parse_stamp(value: str) -> Stamp | None:
    """The stamp in a header's value; None for a value that the gateway did not write."""
    found = _STAMP.fullmatch(value.strip())
    return Stamp(found["uid"], found["etag"], int(found["modified_s"]), found["of"]) if found else None


def read_stamp(metadata: MutableMapping[str, str]) -> Stamp | None:
    """Take the stamp out of an object's user metadata (names without `x-amz-meta-`).

    A value under the stamp's name that is no stamp is the user's own and stays.
    """
    stamp = parse_stamp(metadata.get(STAMP_METADATA, ""))
    if stamp is not None:
        del metadata[STAMP_METADATA]
    return stamp


def _digest(name: ObjectName) -> str:
    return hashlib.blake2b(f"{name.bucket}\0{name.key}".encode(), digest_size=6).hexdigest()
