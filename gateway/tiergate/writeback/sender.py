"""Sends one pending write to the origin: conditional on what it replaces, resumable, checked before it leaves.

The steps that can be seen in the origin happen inside `visible(...)`, which the uploader grants by the fence.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from tiergate.clock import Clock
from tiergate.directory.base import Directory
from tiergate.errors import (
    FencedError,
    IntegrityError,
    MembershipOverError,
    OriginRefusedError,
    OriginTemporaryError,
)
from tiergate.memory.memory import Memory, Pin
from tiergate.model import NO_BASE, UNKNOWN_BASE, ObjectName, OriginUpload, Part, Pending, Role, Version
from tiergate.observe.logs import get_logger
from tiergate.observe.metrics import Metrics
from tiergate.origin.client import Condition, OriginClient, OriginObject
from tiergate.origin.retry import Tries
from tiergate.origin.stamp import described
from tiergate.replication.base import Alone, Notice, Replication
from tiergate.s3.checksums import FULL_OBJECT, block_checksum
from tiergate.writeback.proofs import part_checksum, proof, whole_proof
from tiergate.writeback.reuse import Reuse, RunOf, no_run
from tiergate.writeback.standing import ALONE, Standing
from tiergate.writeback.withdrawal import Withdrawals, bodies_of

T = TypeVar("T")
log = get_logger(__name__)

SEND_BYTES = 1 << 20
"""Piece handed to a socket at a time."""

REBASE_ATTEMPTS_COUNT = 4
"""How often one try goes on after finding that the origin changed under it."""

INTENT_SLACK_S = 60.0
"""Clock difference to the origin that is allowed for when an upload is looked for by its start."""

_UNKNOWN_CHECKSUM_CODES = frozenset({"InvalidArgument", "InvalidRequest", "NotImplemented"})

BLOCK_ALGORITHM = "crc64nvme"

Visible = Callable[[Pending], AbstractAsyncContextManager[None]]


class MissingBytesError(IntegrityError):
    """What is to be sent is not in this node's memory, or not all of it."""


class ForeignVersionError(OriginRefusedError):
    """A conditional write lost: the origin holds somebody else's version."""


@dataclass(frozen=True, slots=True)
class SenderSettings:
    """`part_concurrency_count` parts of one object travel at a time; `send_checksums` to an origin that knows them."""

    part_concurrency_count: int
    send_checksums: bool


class Sender:
    """Does the work of one pending write; holds nothing between calls."""

    def __init__(
        self,
        directory: Directory,
        memory: Memory,
        origin: OriginClient,
        withdrawals: Withdrawals,
        clock: Clock,
        metrics: Metrics,
        settings: SenderSettings,
        standing: Standing = ALONE,
        replication: Replication | None = None,
        run_of: RunOf = no_run,
    ) -> None:
        self._directory = directory
        self._memory = memory
        self._origin = origin
        self._withdrawals = withdrawals
        self._clock = clock
        self._metrics = metrics
        self._settings = settings
        self._standing = standing
        self._replication = replication or Alone()
        self._reuse = Reuse(directory, origin, metrics, run_of)
        self._knows: dict[str, bool] = {}
        """Checksum algorithms that the origin took, or refused."""

    async def delete(self, write: Pending, visible: Visible) -> None:
        """Carry out a pending deletion.

        Raises:
            OriginError: as the origin client.
            FencedError: the key was written again meanwhile.
        """
        write = await self._directory.begin(write.name, write.uid, write.base)
        await self._abort_leftovers(write)
        async with visible(write):
            if write.base != NO_BASE:
                await self._withdrawals.clear_way(write.name, write.owner, deleting=True)
            self._standing.check(write.owner)
            await self._origin.delete_object(write.name)
            await self._directory.persisted(write.name, write.uid, "", self._clock.wall_s())
        self._persisted(write)

    async def put(self, write: Pending, visible: Visible) -> None:
        """Bring a pending version into the origin and mark it clean.

        Raises:
            OriginError: as the origin client; OriginRefusedError is for good.
            ForeignVersionError: a conditional write lost against a writer behind the gateway.
            FencedError: the version was superseded meanwhile.
            IntegrityError: the bytes in memory are not those that were acknowledged.
        """
        version = await self._version(write)
        with ExitStack() as pins:
            held = [pins.enter_context(pin_part(self._memory, part)) for part in version.parts]
            await verify(version.parts, held)
            for _ in range(REBASE_ATTEMPTS_COUNT):
                grounded = await self._ground(write)
                if grounded is None:
                    is_there = await self._look_again(write, version, visible)
                else:
                    is_there = await self._attempt(grounded, version, held, visible)
                if is_there:
                    return
                write = await self._current(write)
        raise OriginTemporaryError("the origin's object keeps changing", key=write.name.key)

    async def _landed(self, write: Pending, version: Version, origin_etag: str) -> None:
        """Make it clean, and let its bytes be evicted. Called in its turn: a marker that is withdrawn while it is
        pending must stay so. The bytes are still pinned: a clean marker may be withdrawn by another process this very
        moment, and then they must stay."""
        await self._directory.persisted(write.name, write.uid, origin_etag, self._clock.wall_s())
        self._memory.clean(version.uid, [part.body.uid for part in version.parts])
        seen = await self._directory.get(write.name)
        if seen.pending is not None and seen.pending.uid == version.uid:
            self._memory.hold_all(bodies_of(version), version.uid, dirty=True)
        notice = Notice(write.name, version.uid, tuple(bodies_of(version)))
        self._replication.notice(seen.holders.get(version.uid, ()), [notice])
        self._persisted(write)
        self._metrics.persisted_bytes.inc(version.size_bytes)

    def _persisted(self, write: Pending) -> None:
        self._metrics.persist_seconds.observe(max(0.0, self._clock.wall_s() - write.committed_s), write.role)

    async def _version(self, write: Pending) -> Version:
        seen = await self._directory.get(write.name)
        version = seen.record.version if seen.record else None
        if version is None or version.uid != write.uid:
            raise FencedError("superseded", key=write.name.key)
        return version

    async def _current(self, write: Pending) -> Pending:
        """The write as the directory has it now."""
        pending = (await self._directory.get(write.name)).pending
        if pending is None or pending.uid != write.uid:
            raise FencedError("superseded", key=write.name.key)
        return pending

    async def _ground(self, write: Pending) -> Pending | None:
        """Know what the origin holds before sending, and begin on top of that; None if it seems to be this very version
        already (a crash, or a lost answer, after it landed)."""
        base = write.base
        if base == UNKNOWN_BASE or write.begun:
            there = await self._origin.head_object(write.name)
            # What it is to replace may bear its name: a version that is owed again since its bytes were damaged there.
            if there is not None and is_version(there, write.uid) and there.etag != base:
                return None
            found = there.etag if there else NO_BASE
            # A marker that is gone may have been withdrawn.
            is_foreign = base not in (UNKNOWN_BASE, found) and (found != NO_BASE or write.role is not Role.MARKER)
            if is_foreign and write.conditional:
                raise ForeignVersionError(412, "PreconditionFailed", "the origin holds a foreign version")
            base = found
        return await self._directory.begin(write.name, write.uid, base)

    async def _look_again(self, write: Pending, version: Version, visible: Visible) -> bool:
        """Whether the origin holds the version, as seen in its turn: before, a marker may be about to be withdrawn."""
        async with visible(write):
            there = await self._origin.head_object(write.name)
            if there is not None and is_version(there, write.uid):
                await self._landed(write, version, there.etag)
                return True
        return False

    async def _attempt(self, write: Pending, version: Version, held: Sequence[Pin | None], visible: Visible) -> bool:
        """One try; False if the origin changed meanwhile and the ground must be taken anew."""
        condition = Condition.if_match(write.base) if write.base else Condition.if_absent()
        await self._abort_leftovers(write)
        algorithm, kind = self._chosen(version)
        try:
            if version.multipart:
                await self._multipart(write, version, held, condition, visible, algorithm, kind)
                return True
            source = await self._reuse.source_of(write, version)
            async with visible(write):
                await self._clear_way(write)
                answer = None
                if source is not None:
                    answer, condition = await self._reuse.whole(write, version, source, algorithm, condition)
                if answer is None:
                    answer = await self._origin.put_object(
                        write.name,
                        version.size_bytes,
                        stream(version.parts, held),
                        described(version, write.name) | whole_proof(version, algorithm),
                        condition,
                    )
                    self._knows[algorithm] = True
                await self._landed(write, version, answer.etag)
                return True
        except OriginRefusedError as refused:
            if origin_changed(refused, write.base) or refused.code == "NoSuchUpload":
                return False
            if self._may_not_know(algorithm, refused):
                await self._start_over(write)
                return False
            raise

    async def _start_over(self, write: Pending) -> None:
        """Leave no upload that goes by another checksum than the next try's."""
        pending = (await self._directory.get(write.name)).pending
        if pending is not None and pending.uid == write.uid and pending.upload is not None:
            await self.abort(write.name, pending.upload)
            await self._directory.note_upload(write.name, write.uid, None)

    async def _clear_way(self, write: Pending) -> None:
        if write.base != NO_BASE:
            await self._withdrawals.clear_way(write.name, write.owner)
        self._standing.check(write.owner)

    # -- multipart
    async def _multipart(
        self,
        write: Pending,
        version: Version,
        held: Sequence[Pin | None],
        condition: Condition,
        visible: Visible,
        algorithm: str,
        kind: str,
    ) -> None:
        """The client's own parts, so that an all-exact object has S3's own ETag. Parts travel before their turn."""
        upload_id, there = await self._resume(write, version, algorithm, kind)
        is_whole = all(part.number in there for part in version.parts)
        copies = None if is_whole else await self._reuse.parts(write, version, upload_id, algorithm)
        slots = asyncio.Semaphore(self._settings.part_concurrency_count)

        async def send(part: Part, pin: Pin | None) -> tuple[int, str]:
            known = there.get(part.number)
            if known is not None and known[1] == part.body.size_bytes:
                return part.number, known[0]
            async with slots:
                copied = await copies.copy(part) if copies else None
                if copied is not None:
                    return part.number, copied
                headers = proof(algorithm, part_checksum(part, algorithm)) if algorithm else {}
                etag = await self._origin.upload_part(
                    write.name, upload_id, part.number, part.body.size_bytes, stream((part,), (pin,)), headers
                )
            return part.number, etag

        proofs = [part_checksum(part, algorithm) for part in version.parts] if algorithm else []
        parts = await all_of([send(part, pin) for part, pin in zip(version.parts, held, strict=True)])
        async with visible(write):
            await self._clear_way(write)
            try:
                answer = await self._origin.complete_multipart_upload(
                    write.name, upload_id, parts, {}, condition, (algorithm, proofs)
                )
            except OriginRefusedError as refused:
                if refused.code == "ConditionalRequestConflict":
                    # https://docs.aws.amazon.com/AmazonS3/latest/API/API_CompleteMultipartUpload.html wants the parts
                    # sent anew then.
                    await self._origin.abort_multipart_upload(write.name, upload_id)
                    await self._directory.note_upload(write.name, write.uid, None)
                raise
            self._knows[algorithm] = True
            # It is over; what is still noted when the version counts as landed would be aborted.
            with suppress(FencedError):
                await self._directory.note_upload(write.name, write.uid, None)
            await self._landed(write, version, answer.etag)

    async def _resume(
        self, write: Pending, version: Version, algorithm: str, kind: str
    ) -> tuple[str, dict[int, tuple[str, int]]]:
        """The upload to go on with, and the parts it holds: {number: (etag, size)}."""
        upload = write.upload
        if upload is not None and upload.upload_id:
            parts = await self._origin.list_parts(write.name, upload.upload_id)
            if parts is not None:
                return upload.upload_id, {number: (etag, size) for number, etag, size in parts}
        elif upload is not None:
            await self.abort_unnamed(write.name, upload)
        started_s = self._clock.wall_s()
        await self._directory.note_upload(write.name, write.uid, OriginUpload("", started_s))
        headers = described(version, write.name)
        if algorithm:
            headers |= {"x-amz-checksum-algorithm": algorithm.upper(), "x-amz-checksum-type": kind}
        tries = Tries()
        upload_id = await self._origin.create_multipart_upload(write.name, headers, tries)
        upload = OriginUpload(upload_id, started_s)
        try:
            await self._directory.note_upload(write.name, write.uid, upload)
        except (FencedError, MembershipOverError):
            # Superseded meanwhile, or about to be: nobody but us knows its name, its time is only the origin's word,
            # and who superseded it may have looked for it before it was there.
            await self._origin.abort_multipart_upload(write.name, upload_id)
            raise
        if tries.count > 1:
            # The answer to an earlier try may be all that was lost of it.
            await self.abort_unnamed(write.name, upload)
        return upload_id, {}

    async def abort_unnamed(self, name: ObjectName, upload: OriginUpload) -> None:
        """See `abort_lost_uploads`."""
        lost_count = await abort_lost_uploads(self._directory, self._origin, name, upload.started_s)
        self._metrics.aborted_uploads.inc(lost_count)

    async def abort(self, name: ObjectName, upload: OriginUpload) -> None:
        """Abort an upload that no pending write needs; one that is gone already is fine."""
        if upload.upload_id:
            await self._origin.abort_multipart_upload(name, upload.upload_id)
            self._metrics.aborted_uploads.inc()
        else:
            await self.abort_unnamed(name, upload)

    async def _abort_leftovers(self, write: Pending) -> None:
        """Superseded uploads go before the new version lands, so that none can complete after it."""
        for upload in write.leftovers:
            await self.abort(write.name, upload)
        if write.leftovers:
            await self._directory.drop_leftovers(write.name, write.leftovers)

    # -- checksums
    def _chosen(self, version: Version) -> tuple[str, str]:
        """Algorithm and type of the checksum that goes with a version: the client's own, so that the origin shows what
        the client said; where there is none, or the origin does not know it, that of the blocks; empty for none."""
        if not self._settings.send_checksums:
            return "", ""
        algorithm = next(iter(version.checksums), "")
        if version.multipart:
            fits = all(algorithm in part.checksums for part in version.parts)
        else:
            fits = version.checksum_type == FULL_OBJECT
        if algorithm and fits and self._knows.get(algorithm, True):
            return algorithm, version.checksum_type
        if all(part.body.blocks for part in version.parts) and self._knows.get(BLOCK_ALGORITHM, True):
            return BLOCK_ALGORITHM, FULL_OBJECT
        return "", ""

    def _may_not_know(self, algorithm: str, refused: OriginRefusedError) -> bool:
        """Whether to try again with another checksum: an origin that does not know the algorithm refuses the write."""
        if not algorithm or self._knows.get(algorithm, False) or refused.status not in (400, 501):
            return False
        if refused.status == 400 and refused.code not in _UNKNOWN_CHECKSUM_CODES:
            return False
        if algorithm not in self._knows:
            self._knows[algorithm] = False
            log.warning("the origin does not seem to know a checksum", algorithm=algorithm, code=refused.code)
        return True


def is_version(there: OriginObject | None, uid: str) -> bool:
    """Whether what the origin holds of a key is the gateway's version `uid`."""
    return there is not None and there.stamp is not None and there.stamp.uid == uid


def origin_changed(refused: OriginRefusedError, base: str) -> bool:
    """Whether a write on the condition of its base was refused since the origin holds something else by now, or another
    write of the key was under way. NoSuchKey answers an If-Match on a key that is gone; to a key that is to be new it
    is a refusal.

    https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes.html
    """
    if refused.code == "NoSuchKey":
        return base != NO_BASE
    return refused.status == 412 or refused.code == "ConditionalRequestConflict"


async def all_of(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run the calls beside each other. The first failure ends the others and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


async def abort_lost_uploads(directory: Directory, origin: OriginClient, name: ObjectName, since_s: float) -> int:
    """Abort uploads of exactly this key begun since a time that nobody knows: the answer that named them was lost. How
    many there were."""
    count = 0
    known = await directory.origin_upload_ids(name.bucket)
    for key, upload_id, initiated_s in await origin.list_uploads(name.bucket, name.key):
        if upload_id not in known and key == name.key and initiated_s >= since_s - INTENT_SLACK_S:
            await origin.abort_multipart_upload(name, upload_id)
            count += 1
    return count


def pin_part(memory: Memory, part: Part) -> AbstractContextManager[Pin | None]:
    """A pin on a part's bytes; None inside for an empty part.

    Raises:
        MissingBytesError: they are not in memory.
    """
    if part.body.size_bytes == 0:
        return nullcontext()
    pin = memory.pin(part.body.uid)
    if pin is None:
        raise MissingBytesError("the bytes are not in memory", body=part.body.uid)
    return pin


async def verify(parts: Sequence[Part], held: Sequence[Pin | None]) -> None:
    """Check the bytes in memory against the checksums kept since ingest (promise P5).

    Raises:
        IntegrityError: a block is missing or differs.
    """
    for part, pin in zip(parts, held, strict=True):
        for index in range(part.body.block_count):
            views = pin.block(index) if pin is not None else None
            if views is None:
                raise MissingBytesError("a block is missing in memory", body=part.body.uid, block=index)
            expected = part.body.block_checksum(index)
            if expected is None:
                continue
            value = 0
            for view in views:
                value = await asyncio.to_thread(block_checksum, view, value)
            if value != expected:
                raise IntegrityError("a block in memory was damaged", body=part.body.uid, block=index)


def stream(parts: Sequence[Part], held: Sequence[Pin | None]) -> Callable[[], AsyncIterator[bytes | memoryview]]:
    """The parts' bytes straight from memory, as often as a try needs them. Valid while the pins are held."""

    async def pieces() -> AsyncIterator[bytes | memoryview]:
        for part, pin in zip(parts, held, strict=True):
            for index in range(part.body.block_count):
                for view in (pin.block(index) if pin is not None else None) or ():
                    for start in range(0, len(view), SEND_BYTES):
                        yield view[start : start + SEND_BYTES]

    return pieces
