"""The checksums that go with what write-back sends, from those kept since ingest. Pure."""

from tiergate.model import Part, Version
from tiergate.s3.checksums import HEADER_PREFIX, bodies_crc64nvme


def whole_proof(version: Version, algorithm: str) -> dict[str, str]:
    """The headers that prove a version sent at once; none without an algorithm."""
    if not algorithm:
        return {}
    value = version.checksums.get(algorithm) or bodies_crc64nvme([part.body for part in version.parts])
    return proof(algorithm, value) if value else {}


def part_checksum(part: Part, algorithm: str) -> str:
    """The base64 checksum of a part: the client's, or from those kept of its blocks."""
    return part.checksums.get(algorithm) or bodies_crc64nvme((part.body,)) or ""


def proof(algorithm: str, value: str) -> dict[str, str]:
    """The headers that prove a body. The one that names the algorithm is optional in general, but S3 demands it for
    objects under a retention period, and some servers keep no checksum without it.

    https://docs.aws.amazon.com/AmazonS3/latest/API/API_PutObject.html
    """
    return {f"{HEADER_PREFIX}{algorithm}": value, "x-amz-sdk-checksum-algorithm": algorithm.upper()}
