"""The rules S3 holds parts and completions to. Pure.

https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html
https://docs.aws.amazon.com/AmazonS3/latest/API/API_CompleteMultipartUpload.html
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from tiergate.engine.calls import Call
from tiergate.errors import RequestError
from tiergate.model import Part, Upload
from tiergate.s3.bodyverifier import claimed_algorithm
from tiergate.s3.checksums import COMPOSITE, FULL_OBJECT, bodies_crc64nvme, composite, full_object
from tiergate.s3.etag import unquote

LEAST_PART_BYTES = 5 << 20
LARGEST_PART_NUMBER = 10_000


def part_number(call: Call) -> int:
    """The part number of the request.

    Raises:
        RequestError: InvalidArgument outside 1..10,000.
    """
    number: int = call.params["PartNumber"]
    if not 1 <= number <= LARGEST_PART_NUMBER:
        raise RequestError("InvalidArgument", "Part number must be an integer between 1 and 10000, inclusive")
    return number


def wanted_parts(params: dict[str, Any]) -> list[dict[str, Any]]:
    """The part list of a CompleteMultipartUpload.

    Raises:
        RequestError: MalformedXML for none, InvalidPartOrder unless the numbers ascend.
    """
    listed: list[dict[str, Any]] = (params.get("MultipartUpload") or {}).get("Parts") or []
    if not listed or any("PartNumber" not in item or "ETag" not in item for item in listed):
        raise RequestError("MalformedXML", "The XML you provided was not well-formed")
    numbers = [item["PartNumber"] for item in listed]
    if any(later <= earlier for earlier, later in pairwise(numbers)):
        raise RequestError("InvalidPartOrder", "The list of parts was not in ascending order.")
    return listed


def chosen_parts(upload_id: str, held: Sequence[Part], listed: Sequence[dict[str, Any]]) -> tuple[Part, ...]:
    """The parts that the client lists, checked against those it sent.

    Raises:
        RequestError: InvalidPart, EntityTooSmall.
    """
    by_number = {part.number: part for part in held}
    chosen = []
    for item in listed:
        part = by_number.get(item["PartNumber"])
        if part is None or unquote(item["ETag"]) != part.etag or not checksums_agree(part, item):
            raise RequestError(
                "InvalidPart",
                "One or more of the specified parts could not be found. The part may not have been uploaded, or the "
                "specified entity tag may not match the part's entity tag.",
                upload_id=upload_id,
                part_number=item["PartNumber"],
                part_etag=unquote(item["ETag"]),
            )
        chosen.append(part)
    for part in chosen[:-1]:
        if part.body.size_bytes < LEAST_PART_BYTES:
            raise RequestError(
                "EntityTooSmall",
                "Your proposed upload is smaller than the minimum allowed size",
                proposed_size=part.body.size_bytes,
                min_size_allowed=LEAST_PART_BYTES,
                part_number=part.number,
                part_etag=part.etag,
            )
    return tuple(chosen)


def checksums_agree(part: Part, item: dict[str, Any]) -> bool:
    """Whether every checksum the client lists for a part is the one that was proved."""
    for algorithm, value in part.checksums.items():
        said = item.get(f"Checksum{algorithm.upper()}")
        if said is not None and said != value:
            return False
    return True


def check_part_algorithm(upload: Upload, headers: Mapping[str, str]) -> None:
    """Hold a part to the checksum algorithm its upload was begun with. Where the object's checksum is made of the
    parts', each must bring its own; else it may be left to S3.

    Raises:
        RequestError: InvalidRequest.
    """
    said, wanted = claimed_algorithm(headers), upload.algorithm
    if wanted and said != wanted and (said or upload.checksum_type == COMPOSITE):
        raise RequestError(
            "InvalidRequest",
            f"Checksum Type mismatch occurred, expected checksum Type: {wanted}, actual checksum Type: "
            f"{said or 'null'}",
        )


def check_completion(
    upload: Upload, parts: Sequence[Part], listed: Sequence[dict[str, Any]], params: Mapping[str, Any]
) -> None:
    """Hold a completion to how its upload was begun, and to the size it says.

    https://docs.aws.amazon.com/AmazonS3/latest/API/API_CompleteMultipartUpload.html

    Raises:
        RequestError: InvalidRequest.
    """
    kind, algorithm = params.get("ChecksumType"), upload.algorithm
    begun_kind = upload.checksum_type or FULL_OBJECT
    if kind is not None and kind.upper() != begun_kind:
        raise RequestError(
            "InvalidRequest",
            f"The upload was created using the {begun_kind} checksum mode. The complete request must use the same "
            "checksum mode.",
        )
    member = f"Checksum{algorithm.upper()}"
    missing = next((item["PartNumber"] for item in listed if member not in item), None)
    if algorithm and upload.checksum_type == COMPOSITE and missing is not None:
        raise RequestError(
            "InvalidRequest",
            f"The upload was created using a {algorithm} checksum. The complete request must include the checksum for "
            f"each part. It was missing for part {missing} in the request.",
        )
    said, size_bytes = params.get("MpuObjectSize"), sum(part.body.size_bytes for part in parts)
    if said is not None and said != size_bytes:
        raise RequestError(
            "InvalidRequest",
            f"The provided 'x-amz-mp-object-size' header value {said} does not match what was computed: {size_bytes}",
        )


def object_checksums(upload: Upload, parts: tuple[Part, ...], params: dict[str, Any]) -> tuple[dict[str, str], str]:
    """The completed object's checksums and their type.

    Raises:
        RequestError: BadDigest when the client says another full-object checksum.
    """
    algorithm, kind = upload.algorithm, upload.checksum_type
    if not algorithm or not all(algorithm in part.checksums for part in parts):
        computed = bodies_crc64nvme([part.body for part in parts])
        if computed is None:
            return {}, ""
        algorithm, kind, value = "crc64nvme", FULL_OBJECT, computed
    elif kind == COMPOSITE:
        value = composite(algorithm, [part.checksums[algorithm] for part in parts])
    else:
        value = full_object(algorithm, [(part.checksums[algorithm], part.body.size_bytes) for part in parts])
    said = params.get(f"Checksum{algorithm.upper()}")
    if said is not None and said.split("-")[0] != value.split("-")[0]:
        raise RequestError("BadDigest", "The checksum you specified did not match what we received.")
    return {algorithm: value}, kind


def part_members(part: Part) -> dict[str, Any]:
    """The output members of UploadPart."""
    return {"ETag": part.etag} | {f"Checksum{name.upper()}": value for name, value in part.checksums.items()}


def listed_part(part: Part) -> dict[str, Any]:
    """A part as ListParts shows it."""
    return part_members(part) | {
        "PartNumber": part.number,
        "Size": part.body.size_bytes,
        "LastModified": part.modified_s,
    }
