"""The newest whole checkpoint as S3 alone has it, for when no gateway answers. What only memory has is not seen, and
what is damaged is passed over, but kept in mind by nobody."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from botocore.exceptions import BotoCoreError, ClientError

from tiergate.checkpoints import recognition
from tiergate.checkpoints.completeness import Doubts, status_of
from tiergate.checkpoints.documents import document_of
from tiergate.checkpoints.lists import LIST_LIMIT_BYTES
from tiergate.checkpoints.markers import Markers, scope_of
from tiergate.checkpoints.newest import UnseenTierError, next_in_turn
from tiergate.checkpoints.recognition import DamagedSetError
from tiergate.checkpoints.sets import Manifest, Member, SetName, SetStatus, Thing
from tiergate.checkpoints.verification import BrokenHeadError, Target, check_of, lists_of, targets_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tiergate_adapters.place import Place

WINDOW_BYTES = 64 << 10
"""So much is read at once where less is asked for: heads lie close together."""


def newest(place: Place, client: Any) -> dict[str, Any]:
    """What a gateway would answer, as far as S3 knows. `client`: S3's own.

    Raises:
        UnseenTierError: S3 does not answer, or a set changed while it was looked at.
    """
    try:
        return _Look(place, client).newest()
    except (BotoCoreError, ClientError) as error:
        raise UnseenTierError(f"S3 does not say what is under {place}: {error}") from error


@dataclass(frozen=True, slots=True)
class _Entry:
    etag: str
    size_bytes: int
    modified_s: float


class _Look:
    """One look at what lies under a place."""

    def __init__(self, place: Place, client: Any) -> None:
        self._place = place
        self._client = client
        self._entries: dict[str, _Entry] = {}
        self._windows: dict[str, tuple[int, bytes]] = {}

    def newest(self) -> dict[str, Any]:
        """The newest set that is whole, and heads of it that can be read."""
        passed_over: list[dict[str, Any]] = []
        judged = {name: self._judged(name) for name in self._names()}
        left = {name: status for name, (status, _) in judged.items()}
        while (status := next_in_turn(left.values())) is not None:
            name = next(name for name, each in left.items() if each is status)
            del left[name]
            document = document_of(status)
            reason = self._fault_of(status, judged[name][1])
            if not reason:
                return {"checkpoint": document, "passed_over": passed_over}
            passed_over.append({"uri": document["uri"], "step": status.step, "reason": reason})
        return {"checkpoint": None, "passed_over": passed_over}

    # -- what is there
    def _names(self) -> list[SetName]:
        """The sets that have objects under the place."""
        listed = self._place.prefix
        while True:
            self._list(listed)
            names = recognition.sets_of(self._place.bucket, self._entries, _NO_PATTERNS)
            wider = [around for around in map(recognition.around, names) if not around.startswith(listed)]
            if not wider:
                break
            listed = scope_of(min(wider, key=len))
        own = [key for key in self._entries if key.startswith(self._place.prefix)]
        return [name for name in names if any(recognition.is_in(name, key) for key in own)]

    def _list(self, prefix: str) -> None:
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._place.bucket, Prefix=prefix)
        found = (each for page in pages for each in page.get("Contents", ()))
        self._entries = {
            each["Key"]: _Entry(each["ETag"], each["Size"], each["LastModified"].timestamp()) for each in found
        }

    def _judged(self, name: SetName) -> tuple[SetStatus, Manifest]:
        own = [key for key in self._entries if recognition.is_in(name, key)]
        # What a pointer speaks for is told by what lies beside it, too.
        around = "" if name.marker else recognition.around(name)
        beside = [key for key in self._entries if around and key.startswith(around)]
        sizes = {key: self._entries[key].size_bytes for key in (*own, *beside)}
        manifest = Manifest(name, tuple(Member(key) for key in own), is_listed=False)
        damage = ""
        try:
            manifest = recognition.manifest_of(name, sizes, self._read)
        except DamagedSetError as error:
            damage = error.message
        things = {key: Thing(key, each.size_bytes, each.modified_s, in_s3=True) for key, each in self._entries.items()}
        return status_of(manifest, things, doubts=Doubts(damage=damage)), manifest

    # -- whether it loads
    def _fault_of(self, status: SetStatus, manifest: Manifest) -> str:
        if not status.is_whole:
            missing = {key for tier in status.tiers.values() for key in tier.missing}
            return status.fault or f"missing: {', '.join(sorted(missing))}"
        found = lists_of(manifest)
        bodies = {key: self._read(key) for key in found if self._entries[key].size_bytes <= LIST_LIMIT_BYTES}
        targets, broken = targets_of(manifest, bodies)
        faults = [f"{key}: {why}" for key, why in broken.items()]
        return "; ".join([*faults, *filter(None, map(self._look_at, targets))][:3])

    def _look_at(self, target: Target) -> str:
        key, size_bytes = target.member.key, self._entries[target.member.key].size_bytes
        check = check_of(target.pieces, size_bytes)
        try:
            start, end = next(check)
            while True:
                start, end = check.send(self._window(key, start, min(end, size_bytes)))
        except StopIteration:
            return ""
        except BrokenHeadError as error:
            return f"{key}: {error.message}"

    def _window(self, key: str, start: int, end: int) -> bytes:
        first, held = self._windows.get(key, (0, b""))
        if not first <= start <= end <= first + len(held):
            size_bytes = self._entries[key].size_bytes
            first, held = start, self._read(key, start, min(max(end, start + WINDOW_BYTES), size_bytes))
            self._windows = {key: (first, held)}
        return held[start - first : end - first]

    def _read(self, key: str, start: int = 0, end: int | None = None, /) -> bytes:
        """Bytes of what was listed, and of nothing that took its place."""
        entry = self._entries[key]
        end = entry.size_bytes if end is None else min(end, entry.size_bytes)
        if start >= end:
            return b""
        wanted: Mapping[str, str] = {"Range": f"bytes={start}-{end - 1}", "IfMatch": entry.etag}
        try:
            answer = self._client.get_object(Bucket=self._place.bucket, Key=key, **wanted)
        except ClientError as error:
            if error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") in (404, 412, 416):
                raise UnseenTierError(f"{key} changes while it is looked at") from error
            raise
        body: bytes = answer["Body"].read()
        return body


_NO_PATTERNS = Markers(lambda bucket, key: (), 1)
