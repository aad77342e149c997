"""The client's multipart uploads: parts into memory, one commit at the end.

The upload's id is the uid of the version it will become, so the parts' bytes are held under one name from the first
byte to the last overwrite. Uploads that the gateway did not begin are the origin's: their requests are forwarded.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from tiergate.directory.base import Committed, Finished, Intent
from tiergate.engine.acks import ACK_HEADER, ACK_ORIGIN, memory_ack
from tiergate.engine.afterwards import Afterwards
from tiergate.engine.buckets import Buckets
from tiergate.engine.calls import Answer, Call
from tiergate.engine.digests import bodies_digest
from tiergate.engine.forwarding import READING_METHODS, Forwarding, named_source
from tiergate.engine.granted import granted_of
from tiergate.engine.ground import WriteConditions
from tiergate.engine.holding import Holding
from tiergate.engine.identity import Description, completed_version, part_etag
from tiergate.engine.intake import Arrival, Intake, Taken
from tiergate.engine.lasting import patient
from tiergate.engine.listing import owned_by
from tiergate.engine.parts import (
    check_completion,
    check_part_algorithm,
    chosen_parts,
    listed_part,
    object_checksums,
    part_members,
    part_number,
    wanted_parts,
)
from tiergate.engine.persisting import Persisting, wish_of
from tiergate.engine.rooms import Rooms
from tiergate.engine.spill import Spill
from tiergate.engine.writes import Writes, put_members
from tiergate.errors import (
    MemoryFullError,
    NotFoundError,
    OverloadedError,
    PartsChangedError,
    RequestError,
    TooFewCopiesError,
)
from tiergate.memory.sharing import Granted
from tiergate.model import Holder, Part, Upload, Version, new_uid
from tiergate.replication.base import Copies, Notice
from tiergate.s3.checksums import ALGORITHMS
from tiergate.s3.etag import unquote
from tiergate.s3.operations import render

COMPLETE_ATTEMPTS_COUNT = 5
"""So often a completion is judged while parts of its upload are replaced or moved."""

UPLOAD_MARK = "tiergate."
"""How the ids of uploads begin that the gateway itself carries out."""


def no_such_upload(upload_id: str) -> NotFoundError:
    """S3's answer for an upload that does not exist, was aborted or has another key."""
    return NotFoundError(
        "NoSuchUpload",
        "The specified upload does not exist. The upload ID may be invalid, or the upload may have been aborted or "
        "completed.",
        upload_id=upload_id,
    )


class Multipart:
    """The six multipart operations (UploadPartCopy lives with the copies)."""

    def __init__(
        self,
        rooms: Rooms,
        buckets: Buckets,
        intake: Intake,
        forwarding: Forwarding,
        writes: Writes,
        spill: Spill,
        afterwards: Afterwards,
        persisting: Persisting,
    ) -> None:
        self._rooms = rooms
        self._buckets = buckets
        self._intake = intake
        self._forwarding = forwarding
        self._writes = writes
        self._spill = spill
        self._afterwards = afterwards
        self._persisting = persisting

    async def upload_of(self, call: Call) -> Upload | None:
        """The gateway's upload that the request names; None for one that the gateway did not begin."""
        upload = await self._rooms.directory.get_upload(call.params["UploadId"])
        return upload if upload is not None and upload.name == call.name else None

    async def create(self, call: Call) -> Answer:
        """CreateMultipartUpload. In a versioned bucket the upload is the origin's own."""
        bucket = await self._buckets.known(call.target.bucket)
        if bucket.versioned:
            return await self._forwarding.plain(call)
        algorithm = (call.params.get("ChecksumAlgorithm") or "").lower()
        if algorithm and algorithm not in ALGORITHMS:
            return await self._forwarding.plain(call)
        kind = call.params.get("ChecksumType") or (ALGORITHMS[algorithm].types[0] if algorithm else "")
        if algorithm and kind not in ALGORITHMS[algorithm].types:
            raise RequestError(
                "InvalidRequest",
                f"The {kind} checksum type cannot be used with the {algorithm} checksum algorithm.",
            )
        described = Description.of(call.headers, call.params)
        await self._persisting.begun(call.name, wish_of(call.headers, described.metadata))
        now_s = self._rooms.clock.wall_s()
        uid = UPLOAD_MARK + new_uid(now_s)
        version = Version(
            uid,
            0,
            "",
            int(now_s),
            (),
            described.headers,
            described.metadata,
            described.tagging,
            multipart=True,
        )
        await self._rooms.directory.create_upload(Upload(uid, call.name, version, now_s, algorithm, kind))
        output = {"Bucket": call.target.bucket, "Key": call.target.key, "UploadId": uid}
        if algorithm:
            output |= {"ChecksumAlgorithm": algorithm.upper(), "ChecksumType": kind}
        headers, body = render(call.operation, output)
        return Answer(200, headers, body)

    async def upload_part(self, call: Call) -> Answer:
        """UploadPart into memory; without room, or nodes for the copies, parts of this very upload move on to the
        origin."""
        number = part_number(call)
        upload = await self.upload_of(call)
        if upload is None:
            return await self.foreign(call)
        check_part_algorithm(upload, call.headers)
        await self._intake.admit()
        self._intake.check_size(call.name, call.body.size_bytes)
        granted = granted_of(call.body)
        uid = granted.uid if granted is not None else new_uid(self._rooms.clock.wall_s())
        try:
            arrival = self.reserve(upload, uid, call.body.size_bytes, granted)
        except (MemoryFullError, TooFewCopiesError):
            part = await self._spill.part_through(call.body, upload, number, uid)
        else:
            async with arrival:
                taken = await self._intake.take(call.name, call.body, arrival)
                part = await self.keep_part(upload, number, arrival, taken)
        headers, _ = render(call.operation, part_members(part))
        headers[ACK_HEADER] = part_ack(part)
        return Answer(200, headers)

    def reserve(self, upload: Upload, uid: str, size_bytes: int | None, granted: Granted | None = None) -> Arrival:
        """Room for a part's body; as `Intake.reserve`."""
        known = partial(self._knows_part, upload, uid)
        return self._intake.reserve(upload.name, uid, upload.upload_id, size_bytes, known, granted)

    async def _knows_part(self, upload: Upload, uid: str) -> bool:
        """Whether the directory has a part: of the upload, or of the version that it became."""
        directory = self._rooms.directory
        if any(part.body.uid == uid for part in await directory.list_parts(upload.upload_id)):
            return True
        record = (await directory.get(upload.name)).record
        version = record.version if record is not None else None
        if version is None or version.uid != upload.upload_id:
            return False
        return any(part.body.uid == uid for part in version.parts)

    async def keep_part(
        self, upload: Upload, number: int, arrival: Arrival, taken: Taken, known_etag: str = ""
    ) -> Part:
        """Record a part whose bytes are sealed in memory, with the checksum of the upload's algorithm; a part it
        replaces lets its bytes go. `known_etag` is the ETag that the same bytes have as a part elsewhere.

        Raises:
            NotFoundError: the upload ended meanwhile.
        """
        body, checksums = taken.body, taken.checksums
        if upload.algorithm and upload.algorithm not in checksums:
            checksums = {upload.algorithm: await bodies_digest(self._rooms.memory, [body], upload.algorithm)}
        now_s = int(self._rooms.clock.wall_s())
        part = Part(number, body, part_etag(body, taken.md5_hex or known_etag), now_s, checksums)

        async def attempt(holders: tuple[Holder, ...]) -> tuple[Part, Part | None]:
            kept = replace(part, at=holders)
            return kept, await self._rooms.directory.put_part(upload.upload_id, kept)

        kept, replaced = await arrival.commit(attempt)
        self._rooms.memory.confirm(upload.upload_id, [body.uid])
        if replaced is not None:
            self._rooms.drop_parts(upload.name, upload.upload_id, [replaced])
        return kept

    async def abort(self, call: Call) -> Answer:
        """AbortMultipartUpload: the parts' memory is free when this returns."""
        upload = await self.upload_of(call)
        if upload is None:
            return await self.foreign(call)
        parts = await self._rooms.directory.abort_upload(upload.upload_id)
        if parts is None:
            raise no_such_upload(upload.upload_id)
        self._rooms.drop_parts(upload.name, upload.upload_id, parts)
        await self._spill.abandon(upload)
        self._rooms.wake()
        return Answer(204)

    async def complete(self, call: Call) -> Answer:
        """CompleteMultipartUpload; said twice, it answers the same twice."""
        upload_id = call.params["UploadId"]
        listed = wanted_parts(call.params)
        for _ in range(COMPLETE_ATTEMPTS_COUNT):
            upload = await self.upload_of(call)
            if upload is None:
                finished = await self._rooms.directory.finished_upload(upload_id)
                if finished is not None and finished.name == call.name:
                    return await self._finished_answer(call, finished, listed)
                return await self.foreign(call)
            await self._intake.admit()
            with suppress(PartsChangedError):
                return await self._complete(call, upload, listed)
        raise OverloadedError("parts are replaced while they are completed", upload_id=upload_id)

    async def _complete(self, call: Call, upload: Upload, listed: Sequence[dict[str, Any]]) -> Answer:
        """Complete the parts as they are now.

        Raises:
            PartsChangedError: some were replaced meanwhile.
        """
        upload_id, params = upload.upload_id, call.params
        conditions = WriteConditions.of(params)
        if conditions.any and upload.spill_id and await self._spill.landed(call.name, upload.version.uid):
            conditions = WriteConditions.of({})  # An earlier try of this completion met them and got there.
        ground = await self._writes.ground(call.name, conditions)
        held = await self._rooms.directory.list_parts(upload_id)
        parts = chosen_parts(upload_id, held, listed)
        check_completion(upload, parts, listed, params)
        checksums, kind = object_checksums(upload, parts, params)
        modified_s = int(self._rooms.clock.wall_s())
        version = completed_version(upload.version, parts, modified_s, checksums, kind)
        role = self._rooms.markers.role_of(call.name, version.size_bytes)
        pairs = [(part.number, part.etag) for part in parts]
        used = {part.body.uid for part in parts}
        unused = [part for part in held if part.body.uid not in used]

        async def through() -> Answer:
            done = await self._spill.complete(upload, version, parts, pairs, role, ground, conditions)
            self._rooms.drop_parts(call.name, upload_id, unused)
            return self._complete_answer(call, done.etag, put_members(done), ACK_ORIGIN)

        copies_count = self._rooms.copies_count(call.name)
        if any(part.spilled_etag for part in held) or not self._intake.has_nodes(call.name):
            return await patient(through(), ACK_ORIGIN, call.target.resource, call.request_id)

        async def attempt(intent: Intent) -> Committed:
            return await self._rooms.directory.finish_upload(upload_id, version, pairs, intent)

        wish = wish_of(call.headers, version.metadata)
        policy = partial(self._persisting.kept, call.name, role, version, wish)

        async def here() -> Answer:
            async with self._gathering(upload, parts) as holding:
                at = {part.body.uid: part.at for part in parts}
                await holding.spread([part.body for part in parts], copies_count, at)
                committed = await self._writes.guarded(call.name, role, conditions, ground, attempt, holding, policy)
            self._writes.committed(call.name, version, committed)
            self._rooms.drop_parts(call.name, upload_id, unused)
            self._release(upload, parts, holding.copies)
            ack = memory_ack(holding.copies.count, parked=committed.parked)
            return self._complete_answer(call, version.etag, put_members(version), ack)

        if self._rooms.is_alone:
            return await here()
        # Parts may have to come from other nodes first.
        plan = (await policy(None)).plan
        ack = memory_ack(copies_count, parked=plan is not None and plan.parks(role))
        return await patient(here(), ack, call.target.resource, call.request_id)

    def _release(self, upload: Upload, parts: Sequence[Part], copies: Copies) -> None:
        """Tell those that hold parts, and are no holders of the whole."""
        at: dict[Holder, list[str]] = {}
        for part in parts:
            for holder in part.at:
                if holder not in copies.holders:
                    at.setdefault(holder, []).append(part.body.uid)
        for holder, body_uids in at.items():
            notice = Notice(upload.name, upload.upload_id, tuple(body_uids))
            self._rooms.replication.notice([holder], [notice])

    def _gathering(self, upload: Upload, parts: Sequence[Part]) -> Holding:
        """The bytes of an upload, to be held here and on enough other nodes. They are the upload's, whatever becomes of
        its completion: nothing is given back, nothing is in doubt, and they live as long as it or its version does."""

        async def known() -> bool:
            return True

        async def undo() -> None:
            self._rooms.memory.confirm(upload.upload_id, [part.body.uid for part in parts])

        return Holding(self._rooms, self._afterwards, upload.name, upload.upload_id, known, undo)

    async def _finished_answer(self, call: Call, finished: Finished, listed: Sequence[dict[str, Any]]) -> Answer:
        again = [(item["PartNumber"], unquote(item["ETag"])) for item in listed]
        if again != list(finished.parts):
            raise no_such_upload(call.params["UploadId"])
        parked = await self._persisting.is_parked(call.name, finished.version_uid)
        ack = ACK_ORIGIN if finished.through else memory_ack(self._rooms.copies_count(call.name), parked=parked)
        return self._complete_answer(call, finished.etag, {}, ack)

    def _complete_answer(self, call: Call, etag: str, members: dict[str, Any], ack: str) -> Answer:
        bucket, key = call.target.bucket, call.target.key
        location = f"http://{call.headers.get('host', '')}/{bucket}/{key}"
        output = members | {"Bucket": bucket, "Key": key, "ETag": etag, "Location": location}
        headers, body = render(call.operation, output)
        headers[ACK_HEADER] = ack
        return Answer(200, headers, body)

    async def list_parts(self, call: Call) -> Answer:
        """ListParts, by number."""
        upload = await self.upload_of(call)
        if upload is None:
            return await self.foreign(call)
        after = int(call.params.get("PartNumberMarker") or 0)
        limit = min(call.params.get("MaxParts", 1000), 1000)
        parts = [part for part in await self._rooms.directory.list_parts(upload.upload_id) if part.number > after]
        page, truncated = parts[:limit], len(parts) > limit > 0
        output: dict[str, Any] = {
            "Bucket": call.target.bucket,
            "Key": call.target.key,
            "UploadId": upload.upload_id,
            "PartNumberMarker": after,
            "NextPartNumberMarker": page[-1].number if page else 0,
            "MaxParts": limit,
            "IsTruncated": truncated,
            "Parts": [listed_part(part) for part in page],
            "StorageClass": upload.version.headers.get("x-amz-storage-class", "STANDARD"),
        }
        output |= owned_by(await self._buckets.owner(call.target.bucket))
        if upload.algorithm:
            output |= {"ChecksumAlgorithm": upload.algorithm.upper(), "ChecksumType": upload.checksum_type}
        headers, body = render(call.operation, output)
        return Answer(200, headers, body)

    async def foreign(self, call: Call) -> Answer:
        """An upload that the gateway did not begin belongs to the origin; one that it did is over."""
        if call.params["UploadId"].startswith(UPLOAD_MARK):
            raise no_such_upload(call.params["UploadId"])
        if call.operation == "CompleteMultipartUpload":
            return await self._forwarding.write(call, [call.name])
        # Parts change no object; the source of a copied one must be there.
        await self._forwarding.turn.settle(named_source(call))
        answer = await self._forwarding.plain(call)
        if call.method not in READING_METHODS:
            answer.headers.setdefault(ACK_HEADER, ACK_ORIGIN)
        return answer

    async def concerns_own(self, call: Call) -> bool:
        """Whether a request is about uploads that the gateway carries out itself, or would list some."""
        if call.operation == "ListMultipartUploads":
            prefix = call.query("prefix") or ""
            return bool(await self._rooms.directory.list_uploads(call.target.bucket, prefix))
        return (call.query("uploadId") or "").startswith(UPLOAD_MARK)


def part_ack(part: Part) -> str:
    """The rule under which a part was acknowledged."""
    return ACK_ORIGIN if part.spilled_etag else memory_ack(max(1, len(part.at)))
