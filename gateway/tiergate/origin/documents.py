"""The few XML documents that the origin client reads and writes. Pure.

https://docs.aws.amazon.com/AmazonS3/latest/API/API_Operations_Amazon_Simple_Storage_Service.html
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import quote, unquote_plus, urlencode
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from tiergate.errors import OriginTemporaryError
from tiergate.origin.answers import OriginEntry, OriginPage
from tiergate.s3.wire import parse_boolean, parse_integer, parse_time, quote_etag, unquote_etag

T = TypeVar("T")

NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"

_NO_XML = re.compile(
    rb"[\x00-\x08\x0b\x0c\x0e-\x1f]|\xef\xbf[\xbe\xbf]"
    rb"|&#(?:x0*(?:[0-8bcef]|1[0-9a-f]|fff[ef])|0*(?:[0-8]|1[124-9]|2[0-9]|3[01]|6553[45]));",
    re.IGNORECASE,
)
"""Characters that a key may hold and XML 1.0 may not, raw or as references: S3 writes them all the same.

https://www.w3.org/TR/xml/#charsets"""


@dataclass(frozen=True, slots=True)
class Fault:
    """The error in an answer. `region` is where the origin says the bucket is, or empty."""

    code: str
    message: str
    region: str


@dataclass(frozen=True, slots=True)
class ListedPart:
    """A part that an upload in the origin holds."""

    number: int
    etag: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ListedUpload:
    """An unfinished upload in the origin."""

    key: str
    upload_id: str
    initiated_s: float


class Document:
    """An XML answer whose namespaces do not matter."""

    def __init__(self, root: ElementTree.Element, is_whole: bool = True) -> None:
        self._root = root
        self._is_whole = is_whole
        self.name = _local(root.tag)

    @classmethod
    def parse(cls, body: bytes) -> "Document":
        """Read a document; white space before it was sent to keep the connection alive. Characters that XML cannot
        hold are left out: what they stand in (an echoed key or marker) is known to who asked.

        Raises:
            OriginTemporaryError: it is no XML; something on the way answered in the origin's place.
        """
        try:
            return cls(ElementTree.fromstring(body.strip()))
        except ElementTree.ParseError as error:
            mended, count = _NO_XML.subn(b"", body)
            try:
                if count:
                    return cls(ElementTree.fromstring(mended.strip()), is_whole=False)
            except ElementTree.ParseError:
                pass
            raise OriginTemporaryError("the origin's answer is no XML", reason=str(error)) from error

    def children(self, name: str) -> "list[Document]":
        """The direct children of that name, in order."""
        return [Document(child) for child in self._root if _local(child.tag) == name]

    def text(self, name: str) -> str:
        """The text of the first child of that name, or ""."""
        return next((child._root.text or "" for child in self.children(name)), "")

    def own_text(self) -> str:
        """The root's own text."""
        return self._root.text or ""

    def flag(self, name: str) -> bool:
        """A truth value; absent is false.

        Raises:
            OriginTemporaryError: it is no truth value.
        """
        return _checked(parse_boolean, self.text(name) or "false")

    def number(self, name: str) -> int:
        """A whole number.

        Raises:
            OriginTemporaryError: it is absent or no number.
        """
        return _checked(parse_integer, self.text(name))

    def time_s(self, name: str) -> float:
        """A time in Unix seconds.

        Raises:
            OriginTemporaryError: it is absent or no time.
        """
        return _checked(lambda text: parse_time(text).timestamp(), self.text(name))

    def keys(self) -> Callable[[str], str]:
        """How keys in this listing are decoded: only an origin that says so encoded them.

        Raises:
            OriginTemporaryError: it did not, and a key may have lost characters.
        """
        if self.text("EncodingType") == "url":
            return unquote_plus
        if not self._is_whole:
            raise OriginTemporaryError("the origin lists keys that XML cannot hold")
        return str


def parse_fault(body: bytes) -> Fault | None:
    """The error document in a body; None if it is none."""
    try:
        document = Document.parse(body)
    except OriginTemporaryError:
        return None
    if document.name == "ErrorResponse":
        document = next(iter(document.children("Error")), document)
    if document.name != "Error":
        return None
    return Fault(document.text("Code"), document.text("Message"), document.text("Region"))


def parse_page(document: Document) -> tuple[OriginPage, str]:
    """A ListObjectsV2 answer and the token of the next page ("" for none).

    Raises:
        OriginTemporaryError: a field is missing or malformed.
    """
    decode = document.keys()
    entries = [_entry(item, decode) for item in document.children("Contents")]
    prefixes = [decode(item.text("Prefix")) for item in document.children("CommonPrefixes")]
    page = OriginPage(entries, prefixes, document.flag("IsTruncated"))
    return page, document.text("NextContinuationToken")


def _entry(item: Document, decode: Callable[[str], str]) -> OriginEntry:
    owner = next(((o.text("ID"), o.text("DisplayName")) for o in item.children("Owner")), None)
    return OriginEntry(
        key=decode(item.text("Key")),
        size_bytes=item.number("Size"),
        etag=unquote_etag(item.text("ETag")),
        modified_s=int(item.time_s("LastModified")),
        storage_class=item.text("StorageClass") or "STANDARD",
        owner=owner,
        checksum_algorithms=tuple(child.own_text() for child in item.children("ChecksumAlgorithm")),
        checksum_type=item.text("ChecksumType"),
    )


def parse_parts(document: Document) -> tuple[list[ListedPart], str]:
    """A ListParts answer and the marker of the next page ("" for none)."""
    parts = [
        ListedPart(item.number("PartNumber"), unquote_etag(item.text("ETag")), item.number("Size"))
        for item in document.children("Part")
    ]
    return parts, document.text("NextPartNumberMarker") if document.flag("IsTruncated") else ""


def parse_uploads(document: Document) -> tuple[list[ListedUpload], tuple[str, str] | None]:
    """A ListMultipartUploads answer and the markers (key, upload) of the next page."""
    decode = document.keys()
    uploads = [
        ListedUpload(decode(item.text("Key")), item.text("UploadId"), item.time_s("Initiated"))
        for item in document.children("Upload")
    ]
    if not document.flag("IsTruncated"):
        return uploads, None
    return uploads, (decode(document.text("NextKeyMarker")), document.text("NextUploadIdMarker"))


def parse_tagging(document: Document) -> str:
    """The tags of an object, as x-amz-tagging carries them."""
    tags = [tag for tag_set in document.children("TagSet") for tag in tag_set.children("Tag")]
    return urlencode([(tag.text("Key"), tag.text("Value")) for tag in tags], quote_via=quote)


def render_completion(parts: Sequence[tuple[int, str]], algorithm: str = "", checksums: Sequence[str] = ()) -> bytes:
    """The document that completes an upload of (number, ETag), with each part's checksum where it was begun for one."""
    element = f"Checksum{algorithm.upper()}"
    values = [f"<{element}>{value}</{element}>" for value in checksums] or [""] * len(parts)
    listed = "".join(
        f"<Part><PartNumber>{number}</PartNumber><ETag>{escape(quote_etag(etag))}</ETag>{value}</Part>"
        for (number, etag), value in zip(parts, values, strict=True)
    )
    return f'<CompleteMultipartUpload xmlns="{NAMESPACE}">{listed}</CompleteMultipartUpload>'.encode()


def _local(tag: str) -> str:
    return tag.rpartition("}")[2]


def _checked(read: Callable[[str], T], text: str) -> T:
    try:
        return read(text)
    except ValueError as error:
        raise OriginTemporaryError("the origin's answer is malformed", text=text[:100]) from error
