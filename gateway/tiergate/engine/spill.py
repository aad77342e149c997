"""Multipart uploads that memory has no room for: their parts go on to the origin, and only the completion is ours.

An object larger than the budget, or many uploads at once, thus still arrive; the acknowledgement of such a completion
says `origin`, since that is where the bytes are.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial

from tiergate.directory.base import Intent
from tiergate.engine.afterwards import Afterwards
from tiergate.engine.calls import IncomingBody
from tiergate.engine.ground import Ground, WriteConditions
from tiergate.engine.proved import CheckedBody
from tiergate.engine.rooms import Rooms, log_name
from tiergate.engine.through import Through, condition_of
from tiergate.errors import (
    IntegrityError,
    NotFoundError,
    OriginError,
    OriginRefusedError,
    OverloadedError,
    TiergateError,
)
from tiergate.model import ObjectName, OriginUpload, Part, Role, Step, Upload, Version, new_uid
from tiergate.observe.logs import get_logger
from tiergate.origin.client import Condition
from tiergate.origin.retry import Tries
from tiergate.origin.stamp import described
from tiergate.writeback.sender import abort_lost_uploads, pin_part, stream, verify

log = get_logger(__name__)


class Spill:
    """Moves parts to the origin and completes uploads there."""

    def __init__(self, rooms: Rooms, through: Through, afterwards: Afterwards) -> None:
        self._rooms = rooms
        self._through = through
        self._afterwards = afterwards

    async def part_through(self, body: IncomingBody, upload: Upload, number: int, uid: str) -> Part:
        """Stream a part that memory has no room for straight to the origin's upload, and make room by moving this
        upload's other parts after it."""
        size = body.size_bytes
        if size is None:
            raise OverloadedError("no room for a body of unknown length", **log_name(upload.name))
        spill_id = await self._begun(upload)
        self._rooms.metrics.through_writes.inc(1, "part")
        proved = CheckedBody(body)
        async with self._alone(upload, number):
            etag = await self._rooms.origin.upload_part(upload.name, spill_id, number, size, proved.pieces, {})
            now_s = int(self._rooms.clock.wall_s())
            part = Part(number, proved.body_of(uid, size), etag, now_s, proved.checksums, spilled_etag=etag)
            replaced = await self._rooms.directory.put_part(upload.upload_id, part)
        if replaced is not None:
            self._rooms.drop_parts(upload.name, upload.upload_id, [replaced])
        await self._move_one(upload, spill_id)
        return part

    async def _begun(self, upload: Upload) -> str:
        """The origin's upload that carries this one's spilled parts; begun by the first of them."""
        current = await self._rooms.directory.get_upload(upload.upload_id)
        if current is not None and current.spill_id:
            return current.spill_id
        return await self._afterwards.carry(self._begin(upload))

    async def _begin(self, upload: Upload) -> str:
        """Begin an upload in the origin, unless another part is faster."""
        headers = described(upload.version, upload.name)
        tries, started_s = Tries(), self._rooms.clock.wall_s()
        created = await self._rooms.origin.create_multipart_upload(upload.name, headers, tries)
        try:
            kept = await self._note(upload, created)
        except NotFoundError:
            raise
        except TiergateError:
            # It may be this one that later parts go to; where it is not, it is aborted.
            self._afterwards.add(partial(self._noted, upload, created))
            raise
        if tries.count > 1:
            lost_count = await abort_lost_uploads(self._rooms.directory, self._rooms.origin, upload.name, started_s)
            self._rooms.metrics.aborted_uploads.inc(lost_count)
        return kept

    async def _note(self, upload: Upload, created: str) -> str:
        """Have the directory know that `created` carries the upload's spilled parts, or end it in the origin where
        another one does; the one that does.

        Raises:
            NotFoundError: the upload ended meanwhile, and so did `created`.
        """
        try:
            kept = await self._rooms.directory.note_spill(upload.upload_id, created)
        except NotFoundError:
            await self._drop(upload.name, created)
            raise
        if kept != created:
            await self._drop(upload.name, created)
        return kept

    async def _noted(self, upload: Upload, created: str) -> bool:
        with suppress(NotFoundError):
            await self._note(upload, created)
        return True

    async def _drop(self, name: ObjectName, spill_id: str) -> None:
        async def dropped() -> bool:
            await self._rooms.origin.abort_multipart_upload(name, spill_id)
            return True

        await self._through.turn.or_later(dropped)

    async def _move_one(self, upload: Upload, spill_id: str) -> None:
        for part in await self._rooms.directory.list_parts(upload.upload_id):
            if not part.spilled_etag and self._rooms.memory.holds_whole(part.body):
                await self._moved(upload, spill_id, part)
                return

    @asynccontextmanager
    async def _alone(self, upload: Upload, number: int) -> AsyncIterator[None]:
        """While inside, nobody else sends the origin a part of this number: what is sent last is what counts there."""
        name = ObjectName(upload.name.bucket, f"{upload.name.key}?uploadId={upload.upload_id}&partNumber={number}")
        uid = new_uid(self._rooms.clock.wall_s())
        step = Step(name, uid, self._rooms.step_holder, Role.POINTER, through=True, replaces=False)
        turn = self._through.turn
        try:
            await turn.wait(upload.name, partial(self._rooms.directory.begin_step, step))
            yield
        finally:
            await turn.end(step)

    async def _moved(self, upload: Upload, spill_id: str, part: Part) -> Part:
        """The part as it is once the origin's upload has it: moved now, or by somebody else."""
        async with self._alone(upload, part.number):
            for current in await self._rooms.directory.list_parts(upload.upload_id):
                if current.number == part.number and current.body.uid == part.body.uid and current.spilled_etag:
                    return current
            return await self._move(upload, spill_id, part)

    async def _move(self, upload: Upload, spill_id: str, part: Part) -> Part:
        """Send a part that is in memory to the origin's upload; its memory is free afterwards."""
        if part.at and not self._rooms.memory.holds_whole(part.body):
            await self._rooms.replication.spread(
                upload.name, upload.upload_id, [part.body], 1, {part.body.uid: part.at}
            )
            # It is the upload's here now as it is elsewhere.
            self._rooms.memory.confirm(upload.upload_id, [part.body.uid])
        with pin_part(self._rooms.memory, part) as pin:
            try:
                await verify([part], [pin])
            except IntegrityError:
                self._rooms.metrics.integrity_failures.inc(1, "memory")
                raise
            etag = await self._rooms.origin.upload_part(
                upload.name, spill_id, part.number, part.body.size_bytes, stream([part], [pin]), {}
            )
        moved = Part(part.number, part.body, part.etag, part.modified_s, part.checksums, spilled_etag=etag)
        if await self._rooms.directory.move_part(upload.upload_id, part, moved):
            self._rooms.drop_parts(upload.name, upload.upload_id, [part])
        return moved

    async def complete(
        self,
        upload: Upload,
        version: Version,
        chosen: Sequence[Part],
        listed: Sequence[tuple[int, str]],
        role: Role,
        ground: Ground,
        conditions: WriteConditions,
    ) -> Version:
        """Complete the upload in the origin, inside the request, and commit it as written through. The ETag is the
        origin's: its parts' are. `chosen`: the version's parts, with where they are.

        Raises:
            OverloadedError: its turn did not come in time.
            OriginError: the origin failed; the upload stands and may be completed again.
        """
        spill_id = await self._begun(upload)
        parts = [part if part.spilled_etag else await self._moved(upload, spill_id, part) for part in chosen]
        pairs = [(part.number, part.spilled_etag) for part in parts]
        async with self._through.turn.taken(upload.name, role, ground.start_revision) as base:
            seen = await self._rooms.directory.get(upload.name)
            condition = condition_of(upload.name, seen, conditions, base)
            try:
                etag = await self._completed(upload, version, spill_id, pairs, condition)
            except OriginRefusedError as refused:
                if not conditions.any:
                    await self._through.check_base(upload.name, refused, base)
                raise
            version = replace(version, etag=etag)
            intent = Intent(
                role=role,
                start_revision=ground.start_revision,
                now_s=self._rooms.clock.wall_s(),
                base=ground.base,
                guard=seen.guard,
                conditional=ground.conditional,
            )
            await self._through.commit(upload.name, version, version.etag, intent)
        await self._rooms.directory.end_spilled(upload.upload_id, version, listed, self._rooms.clock.wall_s())
        return version

    async def _completed(
        self, upload: Upload, version: Version, spill_id: str, parts: Sequence[tuple[int, str]], condition: Condition
    ) -> str:
        """Complete the upload in the origin; the ETag."""
        try:
            done = await self._rooms.origin.complete_multipart_upload(upload.name, spill_id, parts, {}, condition)
            return done.etag
        except OriginRefusedError:
            landed = await self.landed(upload.name, version.uid)
            if landed is None:
                raise
            return landed  # An earlier try of this completion got there, and its answer was lost.
        except BaseException:  # Cancelled, most likely: the client left, and the origin may go on.
            await self._through.turn.doubt(upload.name)
            raise

    async def landed(self, name: ObjectName, uid: str) -> str | None:
        """The ETag of the origin's object, if it is the version of that uid."""
        there = await self._rooms.origin.head_object(name)
        return there.etag if there is not None and there.stamp is not None and there.stamp.uid == uid else None

    async def abandon(self, upload: Upload) -> None:
        """Abort what an aborted upload had in the origin; where that fails now, it stays an orphan for write-back to
        abort."""
        if not upload.spill_id:
            return
        spilled = OriginUpload(upload.spill_id, upload.started_s)
        try:
            await self._rooms.origin.abort_multipart_upload(upload.name, upload.spill_id)
        except OriginError as error:
            log.warning("an aborted upload is still in the origin", error=error, **log_name(upload.name))
        else:
            await self._rooms.directory.drop_leftovers(upload.name, [spilled])
