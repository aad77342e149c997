"""Where moto is known not to answer as S3 does: https://docs.aws.amazon.com/AmazonS3/latest/API/ is the measure."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote_plus

from tests.conformance.answers import BROKEN, Answer, Difference, differences
from tests.conformance.steps import Step


@dataclass(frozen=True, slots=True)
class Known:
    """Where moto is not S3: `path` and `method` are regular expressions; `when` looks at the step, at the gateway's and
    at moto's answer."""

    reason: str
    path: str
    method: str = ".*"
    when: Callable[[Step, Any, Any], bool] = lambda step, one, other: other is None


def _after_marker(step: Step, one: Any, other: Any) -> bool:
    """Whether the prefixes are moto's without those that come twice or before the marker."""
    marker = step.arguments.get("Marker", "")
    found = sorted({each["Prefix"] for each in other or ()}, key=str.encode)
    return [each["Prefix"] for each in one or ()] == [each for each in found if each.encode() > marker.encode()]


KNOWN = (
    Known("moto tells no checksum type", r".*\.ChecksumType"),
    Known("moto computes no checksum that it was not asked for", r".*\.Checksum(CRC64NVME|Algorithm)"),
    Known(
        "moto tells the whole object's checksum with a range",
        r"\.Checksum.*",
        when=lambda step, one, other: "Range" in step.arguments and one is None,
    ),
    Known(
        "moto tells the whole object's checksum with a part",
        r"\.Checksum.*",
        when=lambda step, one, other: "PartNumber" in step.arguments and one is None,
    ),
    Known(
        "moto takes any unit of ranges for bytes",
        ".*",
        "get_object|head_object",
        lambda step, one, other: step.arguments.get("Range", "").startswith("items"),
    ),
    Known("moto lists no checksums of parts", r"\.Parts\[\d+\]\.Checksum.*", "list_parts"),
    Known("moto leaves empty or given parameters of a listing out", r"\.(Prefix|Marker|KeyMarker)", "list_.*"),
    Known(
        "moto's ListObjects does not encode the prefix",
        r"\.Prefix",
        "list_objects",
        lambda step, one, other: unquote_plus(one) == other,
    ),
    Known(
        "moto does not encode StartAfter",
        r"\.StartAfter",
        "list_objects_v2",
        lambda step, one, other: one == step.arguments["StartAfter"],
    ),
    Known("moto's ListObjects repeats prefixes", r"\.CommonPrefixes.*", "list_objects", _after_marker),
    Known(
        "moto takes numbers of parts for offsets",
        ".*",
        "list_parts",
        lambda step, one, other: bool({"PartNumberMarker", "MaxParts"} & step.arguments.keys()),
    ),
    Known(
        "moto looks at sizes before it looks at other faults",
        r"\.code",
        "complete_multipart_upload",
        lambda step, one, other: one in {"InvalidPart", "InvalidPartOrder"} and other == "EntityTooSmall",
    ),
    Known("moto has no body with some errors", r"\.code", when=lambda step, one, other: str(other).isdigit()),
    Known(
        "moto ignores Quiet",
        r"\.Deleted",
        "delete_objects",
        lambda step, one, other: step.arguments["Delete"].get("Quiet") and one is None,
    ),
    Known(
        "moto names a version where there are none",
        r"\.VersionId",
        when=lambda step, one, other: (one, other) == (None, "null"),
    ),
    Known(
        "moto lets the date decide where the ETag does",
        ".*",
        "get_object|head_object",
        lambda step, one, other: (
            {"IfMatch", "IfUnmodifiedSince"} <= step.arguments.keys()
            or {"IfNoneMatch", "IfModifiedSince"} <= step.arguments.keys()
        ),
    ),
)


def unknown_differences(step: Step, one: Answer, other: Answer) -> list[Difference]:
    """What is different and should not be."""
    if other["status"] == BROKEN and 400 <= one["status"] < 500:
        return []  # moto breaks where S3 refuses
    if "Uploads" in other:
        other = other | {
            "Uploads": sorted(
                other["Uploads"], key=lambda each: (each["Key"].encode(), int(each["UploadId"].split()[1]))
            )
        }
    return [
        (path, left, right)
        for path, left, right in differences(one, other)
        if not any(
            re.fullmatch(known.method, step.method) and re.fullmatch(known.path, path) and known.when(step, left, right)
            for known in KNOWN
        )
    ]
