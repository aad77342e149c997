"""Takes the same steps against a server alone and against a gateway before a like server, and compares their answers.

What a server chooses (ETags, ids, times) is compared by what it stands for: the n-th version of a key, the n-th upload.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import unquote_plus

from botocore.exceptions import ClientError
from tests.conformance.steps import MANAGING, Etag, Moment, PartEtag, Source, Step, Upload

NO_ETAG = '"00000000000000000000000000000000"'
LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)
CHOSEN = frozenset(
    {"ResponseMetadata", "RequestId", "HostId", "Location", "Initiator", "Owner", "Bucket", "Name", "Error"}
)
"""Members that name the server's own affairs."""

SHOWN_HEADERS = ("content-length", "content-range", "accept-ranges", "content-type", "content-encoding")
ENCODED = frozenset({"Key", "Prefix", "Delimiter", "Marker", "NextMarker", "StartAfter"})
"""Members that encoding-type=url speaks of; which characters it encodes is the server's to choose."""

MAKING = frozenset({"put_object", "copy_object", "complete_multipart_upload"})
NEXT = {"list_objects_v2": ("NextContinuationToken", "ContinuationToken"), "list_objects": ("NextMarker", "Marker")}
PAGES_LIMIT_COUNT = 100

Answer = dict[str, Any]


@dataclass
class Side:
    """One server's bucket, and what it chose so far."""

    client: Callable[[], Any]
    bucket: str
    etags: dict[str, list[str]] = field(default_factory=dict)
    """Of each key's versions, oldest first."""
    modified: dict[str, datetime] = field(default_factory=dict)
    uploads: list[str] = field(default_factory=list)
    parts: dict[tuple[int, int], list[str]] = field(default_factory=dict)

    # -- requests
    def take(self, step: Step) -> Answer:
        """The answer to a step; of a listing in pages what they say together."""
        arguments = {name: self.value(value) for name, value in step.arguments.items()}
        answers = []
        for _ in range(PAGES_LIMIT_COUNT):
            answer = self._call(step.method, arguments)
            answers.append(self._stable(step, arguments, answer))
            if not step.pages:
                return answers[0]
            if not answer.get("IsTruncated"):
                return joined(answers)
            member, argument = NEXT[step.method]
            following = answer[member] if member in answer else answer["Contents"][-1]["Key"]
            is_encoded = "EncodingType" in step.arguments and step.method == "list_objects"
            arguments[argument] = unquote_plus(following) if is_encoded else following
        raise AssertionError(f"a listing without an end: {step}")

    def _call(self, method: str, arguments: dict[str, Any]) -> Answer:
        try:
            answer: Answer = getattr(self.client(), method)(Bucket=self.bucket, **arguments)
        except ClientError as error:
            return dict(error.response)
        if "Body" in answer:
            answer["Body"] = answer["Body"].read()
        return answer

    def value(self, value: Any) -> Any:
        """An argument with what this server chose in the place of what stands for it."""
        if isinstance(value, Etag):
            known = self.etags.get(value.key, [])
            return known[-1 - value.back] if len(known) > value.back else NO_ETAG
        if isinstance(value, Moment):
            return self.modified.get(value.key, LONG_AGO) + timedelta(seconds=value.plus_s)
        if isinstance(value, Upload):
            return self.uploads[value.number] if value.number < len(self.uploads) else "never-begun"
        if isinstance(value, PartEtag):
            return self.parts.get((value.upload, value.number), [NO_ETAG])[-1]
        if isinstance(value, Source):
            return {"Bucket": self.bucket, "Key": value.key}
        if isinstance(value, dict):
            return {name: self.value(item) for name, item in value.items()}
        if isinstance(value, list):
            return [self.value(item) for item in value]
        return value

    # -- answers
    def _stable(self, step: Step, arguments: dict[str, Any], answer: Answer) -> Answer:
        meta = answer["ResponseMetadata"]
        found: Answer = {"status": meta["HTTPStatusCode"]}
        if "Error" in answer:
            return found | {"code": answer["Error"]["Code"]}
        key = arguments.get("Key", "")
        self._learn(step, key, answer)
        found |= {name: meta["HTTPHeaders"].get(name) for name in SHOWN_HEADERS if "Body" in answer}
        return found | {name: self._told(step, key, name, item) for name, item in answer.items() if name not in CHOSEN}

    def _learn(self, step: Step, key: str, answer: Answer) -> None:
        result = answer.get("CopyObjectResult") or answer.get("CopyPartResult") or answer
        if step.method in MAKING:
            self.etags.setdefault(key, []).append(result["ETag"])
        if step.method == "create_multipart_upload":
            self.uploads.append(answer["UploadId"])
        if step.method in {"upload_part", "upload_part_copy"}:
            place = (step.arguments["UploadId"].number, step.arguments["PartNumber"])
            self.parts.setdefault(place, []).append(result["ETag"])
        if isinstance(answer.get("LastModified"), datetime):
            self.modified[key] = answer["LastModified"]

    def _told(self, step: Step, key: str, name: str, value: Any) -> Any:
        """A member of an answer, with what this server chose replaced by what it stands for."""
        if isinstance(value, dict):
            key = self._told(step, key, "Key", value["Key"]) if "Key" in value else key
            return {inner: self._told(step, key, inner, item) for inner, item in value.items() if inner not in CHOSEN}
        if isinstance(value, list):
            return [self._told(step, key, name, item) for item in value]
        if isinstance(value, datetime):
            return "a time"
        if name.endswith("Token"):
            return "a token"
        if step.arguments.get("EncodingType") and name in ENCODED:
            return unquote_plus(value)
        if name == "ETag":
            return self._etag(step, key, value)
        if name.startswith("UploadId") or name.endswith("UploadIdMarker"):
            return f"upload {self.uploads.index(value)}" if value in self.uploads else f"unknown upload {value}"
        return value

    def _etag(self, step: Step, key: str, etag: str) -> str:
        upload = step.arguments.get("UploadId")
        if isinstance(upload, Upload) and step.method != "complete_multipart_upload":
            for (number, part), known in self.parts.items():
                if number == upload.number and etag in known:
                    return f"part {part}, try {len(known) - known[::-1].index(etag)}"
            return f"unknown part {etag}"
        known = self.etags.get(key, [])
        return (
            f"version {len(known) - known[::-1].index(etag)} of {key}" if etag in known else f"unknown {etag} of {key}"
        )


def joined(pages: list[Answer]) -> Answer:
    """Several pages of a listing as one: where one ends is the server's to choose (it may send fewer than asked for)."""
    whole = dict(pages[0])
    for name in ("Contents", "CommonPrefixes"):
        items = [item for page in pages for item in page.get(name, ())]
        if items:
            whole[name] = items
    for name in ("IsTruncated", "NextMarker", "NextContinuationToken", "KeyCount"):
        whole.pop(name, None)
    return whole


def differences(one: Any, other: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Where two answers differ: (path, one, other)."""
    if isinstance(one, dict) and isinstance(other, dict):
        for name in sorted(one.keys() | other.keys()):
            yield from differences(one.get(name), other.get(name), f"{path}.{name}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            yield from differences(left, right, f"{path}[{index}]")
    elif one != other:
        yield path, one, other


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
    Known("moto's ListObjects repeats prefixes", r"\.CommonPrefixes.*", "list_objects", _after_marker),
    Known(
        "moto takes numbers of parts for offsets",
        ".*",
        "list_parts",
        lambda step, one, other: {"PartNumberMarker", "MaxParts"} & step.arguments.keys(),
    ),
    Known(
        "moto looks at sizes before it looks at the order",
        r"\.code",
        "complete_multipart_upload",
        lambda step, one, other: (one, other) == ("InvalidPartOrder", "EntityTooSmall"),
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
"""https://docs.aws.amazon.com/AmazonS3/latest/API/ has these answers otherwise."""


def unknown_differences(step: Step, one: Answer, other: Answer) -> list[tuple[str, Any, Any]]:
    """What is different and should not be."""
    if other["status"] == 500 and 400 <= one["status"] < 500:
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
