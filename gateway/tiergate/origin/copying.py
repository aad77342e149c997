"""What a request says of the source of a copy that the origin makes by itself. Pure."""

from dataclasses import dataclass

from tiergate.model import ObjectName
from tiergate.origin.endpoint import encode_key
from tiergate.s3.wire import quote_etag


@dataclass(frozen=True, slots=True)
class CopySource:
    """An object of the origin, as long as it has this ETag there."""

    name: ObjectName
    etag: str


def copy_headers(source: CopySource) -> tuple[tuple[str, str], ...]:
    """Which object to copy, and that it must still be this one.

    https://docs.aws.amazon.com/AmazonS3/latest/API/API_CopyObject.html
    """
    where = f"{source.name.bucket}/{encode_key(source.name.key)}"
    return (("x-amz-copy-source", where), ("x-amz-copy-source-if-match", quote_etag(source.etag)))
