"""Takes the same steps against a server alone and against a gateway before a like server, and compares their answers.

What a server chooses (ETags, ids, times) is compared by what it stands for: the n-th version of a key, the n-th upload.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import unquote_plus

from botocore.exceptions import ClientError
from tests.conformance.answers import BROKEN, Answer, Difference
from tests.conformance.moto_answers import unknown_differences
from tests.conformance.sides import Sides
from tests.conformance.steps import MANAGING, Etag, Moment, PartEtag, Source, Step, Upload

from tiergate.origin.stamp import STAMP_HEADER
from tiergate.testing.origins import Gate, Hold, Seen

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
PART_MAKING = frozenset({"upload_part", "upload_part_copy"})
NEXT = {"list_objects_v2": ("NextContinuationToken", "ContinuationToken"), "list_objects": ("NextMarker", "Marker")}
UNKNOWN = "unknown"
PAGES_LIMIT_COUNT = 100


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
    answered: int = 0
    """The status of the last answer."""
    guide: "Side | None" = None
    """The side whose ETags say which versions are alike; it gives the same bytes the same ETag."""

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
            return self._etag_of(value)
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

    def _etag_of(self, named: Etag) -> str:
        known = (self.guide or self).etags.get(named.key, [])
        if not known:
            return NO_ETAG
        wanted = [index for index, etag in enumerate(known) if (etag == known[-1]) != named.before]
        return self.etags[named.key][wanted[-1]] if wanted else NO_ETAG

    # -- answers
    def _stable(self, step: Step, arguments: dict[str, Any], answer: Answer) -> Answer:
        meta = answer["ResponseMetadata"]
        self.answered = meta["HTTPStatusCode"]
        found: Answer = {"status": self.answered}
        if "Error" in answer:
            return found | {"code": answer["Error"]["Code"]}
        key = arguments.get("Key", "")
        self._learn(step, key, answer)
        found |= {name: meta["HTTPHeaders"].get(name) for name in SHOWN_HEADERS if "Body" in answer}
        of = step.arguments["PartNumber"] if step.method in PART_MAKING else key
        return found | {name: self._told(step, of, name, item) for name, item in answer.items() if name not in CHOSEN}

    def _learn(self, step: Step, key: str, answer: Answer) -> None:
        result = answer.get("CopyObjectResult") or answer.get("CopyPartResult") or answer
        if step.method in MAKING:
            self.etags.setdefault(key, []).append(result["ETag"])
        if step.method == "create_multipart_upload":
            self.uploads.append(answer["UploadId"])
        if step.method in PART_MAKING:
            place = (step.arguments["UploadId"].number, step.arguments["PartNumber"])
            self.parts.setdefault(place, []).append(result["ETag"])
        if isinstance(answer.get("LastModified"), datetime):
            self.modified[key] = answer["LastModified"]

    def _told(self, step: Step, of: str | int, name: str, value: Any) -> Any:
        """A member of an answer, with what this server chose replaced by what it stands for; `of` is the key or the
        number of the part that it is about."""
        if isinstance(value, dict):
            of = self._told(step, of, "Key", value["Key"]) if "Key" in value else value.get("PartNumber", of)
            return {inner: self._told(step, of, inner, item) for inner, item in value.items() if inner not in CHOSEN}
        if isinstance(value, list):
            return [self._told(step, of, name, item) for item in value]
        if isinstance(value, datetime):
            return "a time"
        if name.endswith("Token"):
            return "a token"
        if step.arguments.get("EncodingType") and name in ENCODED:
            return unquote_plus(value)
        if name == "ETag":
            return self._etag(step, of, value)
        if name.startswith("UploadId") or name.endswith("UploadIdMarker"):
            return f"upload {self.uploads.index(value)}" if value in self.uploads else f"{UNKNOWN} upload {value}"
        return value

    def _etag(self, step: Step, of: str | int, etag: str) -> str:
        if isinstance(of, int):
            known = self.parts.get((step.arguments["UploadId"].number, of), [])
        else:
            known = self.etags.get(of, [])
        return (
            f"version {len(known) - known[::-1].index(etag)} of {of}" if etag in known else f"{UNKNOWN} {etag} of {of}"
        )


@dataclass
class Race:
    """A gateway's bucket and the same server's other one. `etags` says that the gateway shows the server's own ETags;
    else a listing by a node that forgot an object shows another ETag than GET does (a stated limit)."""

    sides: Sides
    through: Side
    direct: Side
    etags: bool
    taken: list[Step] = field(default_factory=list)
    _gate: Gate | None = None
    _is_cold: bool = False
    _was_killed: bool = False
    _completed: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.through.guide = self.direct

    def run(self, steps: Iterable[Step]) -> None:
        """Take all steps.

        Raises:
            AssertionError: the answers to one differ; the message tells what led to it.
        """
        try:
            for step in steps:
                self.taken.append(step)
                found = self.manage(step) if step.method in MANAGING else self.compare(step)
                if any(path == ".status" and other == BROKEN for path, _, other in found):
                    return  # What moto did before it broke, nobody knows.
                assert not found, self._report(step, found)
        finally:
            self._resume()

    def compare(self, step: Step) -> list[Difference]:
        """The differences in the answers to a request."""
        needs_origin = "tagging" in step.method or (self._is_cold and "CopySource" in step.arguments)
        if needs_origin:
            self._resume()  # It waits for what is held.
        if step.method == "list_multipart_uploads" and self._gate is None:
            # Of an upload that comes and goes while moto lists it, moto does not say when it began.
            self.sides.node.wait_settled()
        if step.method == "complete_multipart_upload" and step.arguments["UploadId"].number in self._completed:
            return []  # moto answers it again, whatever parts it lists.
        through, direct = self.through.take(step), self.direct.take(step)
        if self._was_killed and "Uploads" in through:
            # What a killed node had begun, it finds again by its time; moto does not tell that.
            known = [each for each in through["Uploads"] if not each["UploadId"].startswith(UNKNOWN)]
            through |= {"Uploads": known or None}
        found = unknown_differences(step, through, direct)
        if step.method == "complete_multipart_upload" and self.direct.answered < 300:
            self._completed.add(step.arguments["UploadId"].number)
        if step.method.startswith("list_objects") and self._is_cold and not self.etags:
            found = [each for each in found if not each[0].endswith(".ETag")]
        return found

    def manage(self, step: Step) -> list[Difference]:
        """Change what the node holds."""
        if step.method == "pause" and self._gate is None:
            self._gate = Gate()
            self.sides.proxy.inject(Hold(self._gate), where=is_written_back, times=None)
        elif step.method == "resume":
            self._resume()
        elif step.method == "kill":
            self._was_killed = True
            self.sides.node.kill9()
            self.sides.node.restart()
        elif step.method in {"settle", "cold"}:
            self._resume()
            self.sides.node.wait_settled()
            if step.method == "cold":
                self._end_uploads()
                self.sides.node.restart_cold()
                self._is_cold = True
        return []

    def _end_uploads(self) -> None:
        for side in (self.through, self.direct):
            client = side.client()
            for each in client.list_multipart_uploads(Bucket=side.bucket).get("Uploads", ()):
                client.abort_multipart_upload(Bucket=side.bucket, Key=each["Key"], UploadId=each["UploadId"])

    def _resume(self) -> None:
        gate, self._gate = self._gate, None
        if gate is not None:
            self.sides.proxy.heal()
            gate.release()

    def _report(self, step: Step, found: list[Difference]) -> str:
        key = step.arguments.get("Key")
        led = [
            f"{number:4} {each}"
            for number, each in enumerate(self.taken)
            if each.arguments.get("Key") == key or each.method in MANAGING
        ]
        told = [f"{path}: {one!r:.300}, and the server alone {other!r:.300}" for path, one, other in found]
        return "\n".join([f"step {len(self.taken) - 1}: {step}", *told, "what led to it:", *led[-40:]])


def is_written_back(seen: Seen) -> bool:
    """Whether the node sends this request on its own account and not for a client who waits for it."""
    makes = seen.operation in {"PutObject", "CreateMultipartUpload"} and STAMP_HEADER in seen.headers
    return makes or (seen.operation == "DeleteObject" and not seen.query)


def joined(pages: list[Answer]) -> Answer:
    """Several pages of a listing as one: where one ends is the server's to choose."""
    whole = dict(pages[0])
    for name in ("Contents", "CommonPrefixes"):
        items = [item for page in pages for item in page.get(name, ())]
        if items:
            whole[name] = items
    for name in ("IsTruncated", "NextMarker", "NextContinuationToken", "KeyCount"):
        whole.pop(name, None)
    return whole
