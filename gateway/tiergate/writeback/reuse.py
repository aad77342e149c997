"""What the origin holds already is copied there instead of sent: an object of a run whose bytes did not change since an
earlier set (frozen weights, say).

A copy takes only bytes from its source: names, headers, stamp and checksums are those of the version that is sent, and
its steps come in the same turns. Whatever stands in its way, the bytes are sent in the same try.

An origin may ignore the conditions of copies without a word. So it is tried on one that cannot hold, where nothing of
it can be seen or taken for a version of the gateway, before any copy is trusted.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from tiergate.checkpoints.unchanged import folder_of, is_unchanged, past, place_of
from tiergate.directory.base import Directory
from tiergate.errors import OriginCredentialsError, OriginError, OriginRefusedError
from tiergate.model import ObjectName, Part, Pending, Role, State, Version
from tiergate.observe.logs import get_logger
from tiergate.observe.metrics import Metrics
from tiergate.origin.answers import Condition, PutAnswer
from tiergate.origin.client import OriginClient
from tiergate.origin.copying import CopySource
from tiergate.origin.stamp import described
from tiergate.s3.checksums import HEADER_PREFIX
from tiergate.writeback.proofs import part_checksum, whole_proof

log = get_logger(__name__)

LEAST_BYTES = 8 << 20
"""Smaller objects are sent: what a copy saves is then less than what it takes to find one. Must be more than 5 MB, from
where on S3 copies ranges."""

SETS_LIMIT_COUNT = 1000
"""Sets of a run that are known, the first by name."""

LOOK_COUNT = 8
"""So many of the newest are looked at for an object, those that are not in the origin included."""

CHANGED_COUNT = 2
"""What has changed in so many of them has changed."""

PROBE_PART = 10_000
"""The last number that a part may have: it is in nobody's way, and a part that no completion names does not count."""

NOBODYS_ETAG = "00000000000000000000000000000000"

WHOLE, PART = "CopyObject", "UploadPartCopy"

RunOf = Callable[[ObjectName], str | None]
"""The prefix of the run that an object belongs to, None where nothing is to be copied."""


def no_run(_: ObjectName) -> str | None:
    """Nothing is copied."""
    return None


class Reuse:
    """Finds what to copy and copies it. Remembers which sets there are and whether the origin heeds conditions."""

    def __init__(self, directory: Directory, origin: OriginClient, metrics: Metrics, run_of: RunOf) -> None:
        self._directory = directory
        self._origin = origin
        self._metrics = metrics
        self._run_of = run_of
        self._sets: dict[ObjectName, Sequence[str]] = {}
        """By run, newest first."""
        self._finding = asyncio.Lock()
        self._heeds: dict[str, bool] = {}
        """By operation: whether its conditions hold."""

    async def source_of(self, write: Pending, version: Version) -> CopySource | None:
        """An object in the origin with the same bytes, at the same place of one of the newest sets of the run."""
        name, run = write.name, self._run_of(write.name)
        if run is None or version.size_bytes < LEAST_BYTES or write.role in (Role.MARKER, Role.POINTER):
            return None
        own, path = place_of(name.key, run)
        if not own:
            return None
        changed_count = 0
        others = [prefix for prefix in await self._sets_of(name.bucket, run, own) if prefix != own]
        for prefix in others[:LOOK_COUNT]:
            record = (await self._directory.get(ObjectName(name.bucket, prefix + path))).record
            if record is None or record.state is not State.CLEAN or record.version is None or not record.origin_etag:
                continue
            if is_unchanged(version, record.version):
                return CopySource(record.name, record.origin_etag)
            changed_count += 1
            if changed_count == CHANGED_COUNT:
                break
        return None

    async def _sets_of(self, bucket: str, run: str, own: str) -> Sequence[str]:
        """The sets of a run, newest first, as of the first object that was sent of set `own`."""
        at = ObjectName(bucket, run)
        async with self._finding:
            found = self._sets.get(at, ())
            if own not in found:
                found = self._sets[at] = await self._look_for_sets(bucket, run, own)
        return found

    async def _look_for_sets(self, bucket: str, run: str, own: str) -> Sequence[str]:
        revisions: dict[str, int] = {own: 0}
        below, after = folder_of(run), ""
        for _ in range(SETS_LIMIT_COUNT):
            page = await self._directory.scan(bucket, below, after, 1)
            if not page:
                break
            prefix, _ = place_of(page[0].name.key, run)
            after = past(prefix) if prefix else page[0].name.key
            if prefix:
                revisions[prefix] = page[0].revision
        return sorted(revisions, key=lambda prefix: revisions[prefix], reverse=True)

    # -- at once
    async def whole(
        self, write: Pending, version: Version, source: CopySource, algorithm: str, condition: Condition
    ) -> tuple[PutAnswer | None, Condition]:
        """Copy an object, in its turn. None: it must be sent, on the condition that comes with it.

        Raises:
            OriginCredentialsError: the origin does not take our keys.
        """
        name = write.name
        try:
            if WHOLE not in self._heeds and not write.conditional:
                landed = await self._try_whole(name, source, condition)
                if landed is not None:
                    self._does_not_heed(WHOLE)
                    return None, Condition.if_match(landed.etag)
            elif not self._heeds.get(WHOLE, False):
                return None, condition
            asked = {"x-amz-checksum-algorithm": algorithm.upper()} if algorithm else {}
            answer = await self._origin.copy_object(name, source, described(version, name) | asked, condition)
        except OriginError as error:
            self._refused(WHOLE, name, error)
            return None, condition
        self._heeds[WHOLE] = True
        if not _proves(answer, algorithm, whole_proof(version, algorithm).get(f"{HEADER_PREFIX}{algorithm}", "")):
            log.error("a copy has another checksum than its source had", bucket=name.bucket, key=name.key)
            return None, Condition.if_match(answer.etag)
        self._metrics.reused_bytes.inc(version.size_bytes)
        return answer, condition

    async def _try_whole(self, name: ObjectName, source: CopySource, condition: Condition) -> PutAnswer | None:
        """Copy on conditions that do not hold, without a stamp: None if both were heeded, else what is there now.

        Raises:
            OriginError: the origin refused it for another reason.
        """
        tries = [(replace(source, etag=NOBODYS_ETAG), condition)]
        if self._origin.conditional_writes:
            tries.append((source, Condition.if_match(NOBODYS_ETAG)))
        for from_there, on in tries:
            try:
                return await self._origin.copy_object(name, from_there, {}, on)
            except OriginRefusedError as refused:
                # Of an If-Match on a key that is not there S3 says NoSuchKey; if that was the source, the copy that
                # follows fails too, and nothing was learnt.
                if refused.status != 412 and refused.code != "NoSuchKey":
                    raise
        return None

    # -- in parts
    async def parts(self, write: Pending, version: Version, upload_id: str, algorithm: str) -> "PartCopies | None":
        """What copies the parts of an upload; None: they must be sent.

        Raises:
            OriginCredentialsError: the origin does not take our keys.
        """
        name, source = write.name, await self.source_of(write, version)
        if source is None:
            return None
        if PART not in self._heeds and version.parts[-1].number != PROBE_PART:
            try:
                await self._origin.upload_part_copy(
                    name, upload_id, PROBE_PART, replace(source, etag=NOBODYS_ETAG), 0, 1
                )
                self._does_not_heed(PART)
            except OriginError as error:
                if isinstance(error, OriginRefusedError) and error.status == 412:
                    self._heeds[PART] = True
                else:
                    self._refused(PART, name, error)
        return PartCopies(self, name, version, upload_id, algorithm, source) if self._heeds.get(PART) else None

    async def copy_part(
        self, name: ObjectName, upload_id: str, source: CopySource, part: Part, start: int, algorithm: str
    ) -> str | None:
        """Have the part, which begins at `start`, copied; its ETag, or None: it must be sent."""
        end = start + part.body.size_bytes
        try:
            answer = await self._origin.upload_part_copy(name, upload_id, part.number, source, start, end)
        except OriginError as error:
            self._refused(PART, name, error)
            return None
        if not _proves(answer, algorithm, part_checksum(part, algorithm)):
            log.error("a copy has another checksum than its source had", bucket=name.bucket, key=name.key)
            return None
        self._metrics.reused_bytes.inc(part.body.size_bytes)
        return answer.etag

    # -- what is learnt
    def _does_not_heed(self, operation: str) -> None:
        self._heeds[operation] = False
        log.warning("the origin ignores the conditions of copies: it is sent everything", operation=operation)

    def _refused(self, operation: str, name: ObjectName, error: OriginError) -> None:
        """Go on without a copy.

        Raises:
            OriginCredentialsError: that is why.
        """
        if isinstance(error, OriginCredentialsError):
            raise error
        if isinstance(error, OriginRefusedError) and error.status in (405, 501):
            self._heeds[operation] = False
        log.info("not copied inside the origin, sent instead", bucket=name.bucket, key=name.key, error=error)


class PartCopies:
    """Of one upload; after the first refusal the rest is sent."""

    def __init__(
        self, reuse: Reuse, name: ObjectName, version: Version, upload_id: str, algorithm: str, source: CopySource
    ) -> None:
        self._reuse = reuse
        self._name = name
        self._upload_id = upload_id
        self._algorithm = algorithm
        self._source = source
        self._is_over = False
        self._starts: dict[int, int] = {}
        start = 0
        for part in version.parts:
            self._starts[part.number] = start
            start += part.body.size_bytes

    async def copy(self, part: Part) -> str | None:
        """The ETag of the copied part; None: it must be sent."""
        if self._is_over or not part.body.size_bytes:
            return None
        start = self._starts[part.number]
        etag = await self._reuse.copy_part(self._name, self._upload_id, self._source, part, start, self._algorithm)
        self._is_over = self._is_over or etag is None
        return etag


def _proves(answer: PutAnswer, algorithm: str, value: str) -> bool:
    """Whether the checksum that the origin tells of a copy, if it does, is the one that was kept since ingest."""
    told = answer.headers.get(f"{HEADER_PREFIX}{algorithm}", "") if algorithm else ""
    return not told or not value or told == value
