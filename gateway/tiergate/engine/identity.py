"""How a version gets its identity from the request that writes it (promise P6). Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote, urlencode

from tiergate.errors import RequestError
from tiergate.model import Body, Part, Version
from tiergate.s3.checksums import FULL_OBJECT, bodies_crc64nvme
from tiergate.s3.chunked import strip_aws_chunked
from tiergate.s3.etag import multipart_etag, opaque_etag, part_opaque_etag
from tiergate.s3.tagging import HEADER as TAGGING_HEADER
from tiergate.s3.tagging import parse_tagging
from tiergate.s3.wire import decode_header_text

CONTENT_HEADERS = (
    "cache-control",
    "content-disposition",
    "content-encoding",
    "content-language",
    "content-type",
    "expires",
)
KEPT_HEADERS = (
    "x-amz-storage-class",
    "x-amz-website-redirect-location",
    "x-amz-server-side-encryption",
    "x-amz-server-side-encryption-aws-kms-key-id",
    "x-amz-server-side-encryption-bucket-key-enabled",
)
"""Headers a version keeps, shows again and sends to the origin at write-back."""

SSE_HEADER = "x-amz-server-side-encryption"

METADATA_LIMIT_BYTES = 2048
"""https://docs.aws.amazon.com/AmazonS3/latest/userguide/UsingMetadata.html"""


@dataclass(frozen=True, slots=True)
class Description:
    """What a request says of the object it makes, apart from its bytes."""

    headers: dict[str, str]
    metadata: dict[str, str]
    tagging: str

    @classmethod
    def of(cls, headers: Mapping[str, str], params: Mapping[str, Any]) -> "Description":
        """From the headers and members of PutObject, CopyObject (REPLACE) or CreateMultipartUpload.

        Raises:
            RequestError: MetadataTooLarge, or as `parse_tagging` and `check_kept`.
        """
        given = (name for name in (*CONTENT_HEADERS, *KEPT_HEADERS) if headers.get(name))
        kept = {name: decode_header_text(headers[name]) for name in given}
        if "content-encoding" in kept:
            encoding = strip_aws_chunked(kept["content-encoding"])
            if encoding:
                kept["content-encoding"] = encoding
            else:
                del kept["content-encoding"]
        if kept.get("x-amz-storage-class") == "STANDARD":
            del kept["x-amz-storage-class"]  # S3 shows no header for the default class.
        check_kept(kept)
        metadata = dict(params.get("Metadata") or {})
        size = sum(len(name.encode()) + len(value.encode()) for name, value in metadata.items())
        if size > METADATA_LIMIT_BYTES:
            raise RequestError("MetadataTooLarge", "Your metadata headers exceed the maximum allowed metadata size")
        tags = parse_tagging(headers.get(TAGGING_HEADER, ""))
        return cls(kept, metadata, urlencode(tags, quote_via=quote))


def check_kept(headers: Mapping[str, str]) -> None:
    """Refuse what S3 refuses whatever the bucket is; the rest only the origin can judge.

    Raises:
        RequestError: InvalidArgument for a KMS key without KMS encryption, InvalidRedirectLocation.
    """
    encryption, key = headers.get(SSE_HEADER, ""), headers.get(f"{SSE_HEADER}-aws-kms-key-id")
    if key is not None and not encryption.startswith("aws:kms"):
        raise RequestError(
            "InvalidArgument",
            "Server Side Encryption with AWS KMS managed key requires HTTP header x-amz-server-side-encryption : "
            "aws:kms",
            argument_name=SSE_HEADER,
            argument_value=encryption,
        )
    redirect = headers.get("x-amz-website-redirect-location")
    if redirect is not None and not redirect.startswith(("http://", "https://", "/")):
        raise RequestError("InvalidRedirectLocation")


def put_etag(body: Body, md5_hex: str | None) -> str:
    """The ETag of a PutObject: its MD5 where one was computed, else opaque in multipart form (design section 6)."""
    return md5_hex or opaque_etag(body.uid)


def part_etag(body: Body, md5_hex: str | None) -> str:
    """The ETag of a part, by the same rule."""
    return md5_hex or part_opaque_etag(body.uid)


def put_version(
    uid: str,
    body: Body,
    etag: str,
    modified_s: int,
    described: Description,
    checksums: dict[str, str],
) -> Version:
    """The version that a PutObject makes. Like S3, an object that came without a checksum gets CRC-64/NVME."""
    part = Part(1, body, etag, modified_s, checksums)
    if not checksums:
        computed = bodies_crc64nvme((body,))
        checksums = {"crc64nvme": computed} if computed is not None else {}
    return Version(
        uid=uid,
        size_bytes=body.size_bytes,
        etag=etag,
        modified_s=modified_s,
        parts=(part,),
        headers=described.headers,
        metadata=described.metadata,
        tagging=described.tagging,
        checksums=checksums,
        checksum_type=FULL_OBJECT if checksums else "",
    )


def completed_version(
    begun: Version,
    parts: tuple[Part, ...],
    modified_s: int,
    checksums: dict[str, str],
    checksum_type: str,
) -> Version:
    """The version that a CompleteMultipartUpload makes from its parts. Where they were is not a part's matter any
    more: the version has its holders."""
    return Version(
        uid=begun.uid,
        size_bytes=sum(part.body.size_bytes for part in parts),
        etag=multipart_etag([part.etag for part in parts]),
        modified_s=modified_s,
        parts=tuple(replace(part, at=()) if part.at else part for part in parts),
        headers=begun.headers,
        metadata=begun.metadata,
        tagging=begun.tagging,
        checksums=checksums,
        checksum_type=checksum_type,
        multipart=True,
    )
