"""UploadPartCopy: a source's bytes, or a range of them, become a part; from any tier, none through the client."""

from collections.abc import AsyncIterator, Mapping
from typing import Any
from urllib.parse import quote

from tiergate.engine.acks import ACK_HEADER
from tiergate.engine.buckets import Buckets
from tiergate.engine.calls import Answer, Call, Framing, Outgoing
from tiergate.engine.copies import LARGEST_COPY_BYTES, too_large_to_copy
from tiergate.engine.current import Current
from tiergate.engine.forwarding import Forwarding
from tiergate.engine.intake import Intake
from tiergate.engine.multipart import Multipart, part_ack
from tiergate.engine.parts import part_members, part_number
from tiergate.engine.reads import Openings
from tiergate.engine.rooms import Rooms
from tiergate.engine.spill import Spill
from tiergate.errors import (
    MemoryFullError,
    OriginRefusedError,
    PreconditionError,
    RequestError,
    TooFewCopiesError,
)
from tiergate.model import ObjectName, Part, Upload, Version, new_uid
from tiergate.origin.answers import lower_names
from tiergate.origin.forward import ForwardAnswer, ForwardRequest
from tiergate.origin.refusals import fault_of
from tiergate.origin.wire import MAX_ERROR_BYTES
from tiergate.s3.conditions import COPY_SOURCE_PREFIX, check_copy_source, copy_source_conditions
from tiergate.s3.copysource import parse_copy_source
from tiergate.s3.operations import render
from tiergate.s3.ranges import parse_copy_range

VERSION_HEADER = "x-amz-version-id"
NULL_VERSION = "null"
"""https://docs.aws.amazon.com/AmazonS3/latest/userguide/Versioning.html: the version of an object in a bucket without
versions."""


class SourceBody:
    """The bytes of a copy's source as a body that arrives (implements `engine.calls.IncomingBody`)."""

    def __init__(self, stream: Outgoing, size_bytes: int, version_id: str, part_etag: str = "") -> None:
        self._stream = stream
        self.size_bytes: int | None = size_bytes
        self.version_id = version_id
        self.part_etag = part_etag
        """The ETag of the source's part that these bytes are, if they are just one."""
        self.framing = Framing(chunked=False)

    def pieces(self) -> AsyncIterator[bytes | memoryview]:
        """The bytes, once."""
        return self._stream.pieces()

    async def verify(self) -> dict[str, str]:
        """Nobody claims anything: whoever reads the source checks it."""
        return {}

    async def close(self) -> None:
        """Let go of the source."""
        await self._stream.close()


class PartCopies:
    """UploadPartCopy."""

    def __init__(
        self,
        rooms: Rooms,
        buckets: Buckets,
        intake: Intake,
        forwarding: Forwarding,
        openings: Openings,
        multipart: Multipart,
        spill: Spill,
    ) -> None:
        self._rooms = rooms
        self._buckets = buckets
        self._intake = intake
        self._forwarding = forwarding
        self._openings = openings
        self._multipart = multipart
        self._spill = spill

    async def part(self, call: Call) -> Answer:
        """UploadPartCopy into memory; without room, the part goes on to the origin as an uploaded one would."""
        number = part_number(call)
        named = parse_copy_source(call.headers["x-amz-copy-source"])
        upload = await self._multipart.upload_of(call)
        if upload is None:
            return await self._multipart.foreign(call)
        if named is None:
            raise RequestError("NotImplemented", "A copy through an access point into this upload is not supported")
        source, version_id = ObjectName(*named[:2]), named[2]
        bucket = await self._buckets.known(source.bucket)
        if version_id == NULL_VERSION and not bucket.versioned:
            version_id = None
        await self._intake.admit()
        body = await (self._current(call, source) if version_id is None else self._past(call, source, version_id))
        try:
            part = await self._kept(call, upload, number, body)
        finally:
            await body.close()
        output: dict[str, Any] = {"CopyPartResult": part_members(part) | {"LastModified": part.modified_s}}
        if body.version_id:
            output["CopySourceVersionId"] = body.version_id
        headers, answer = render(call.operation, output)
        headers[ACK_HEADER] = part_ack(part)
        return Answer(200, headers, answer)

    async def _kept(self, call: Call, upload: Upload, number: int, body: SourceBody) -> Part:
        uid, size_bytes = new_uid(self._rooms.clock.wall_s()), body.size_bytes or 0
        try:
            arrival = self._multipart.reserve(upload, uid, size_bytes)
        except (MemoryFullError, TooFewCopiesError):
            return await self._spill.part_through(body, upload, number, uid)
        async with arrival:
            taken = await self._intake.copy(call.name, body.pieces(), arrival, size_bytes)
            return await self._multipart.keep_part(upload, number, arrival, taken, body.part_etag)

    async def _current(self, call: Call, source: ObjectName) -> SourceBody:
        """The source as it is now, from the nearest tier.

        Raises:
            RequestError: its conditions do not hold, or the range is none of it.
        """

        def decide(current: Current) -> tuple[int, int]:
            size_bytes = current.version.size_bytes
            check_copy_source(copy_source_conditions(call.params), current.etags, current.version.modified_s)
            start, end = parse_copy_range(call.params.get("CopySourceRange"), size_bytes) or (0, size_bytes)
            if end - start > LARGEST_COPY_BYTES:
                raise too_large_to_copy()
            return start, end

        current, (start, end), stream = await self._openings.open(source, decide, lambda span: span)
        version = current.version
        return SourceBody(
            stream, end - start, version.headers.get(VERSION_HEADER, ""), etag_of_part(version, start, end)
        )

    async def _past(self, call: Call, source: ObjectName, version_id: str) -> SourceBody:
        """A named version of the source, which only the origin has.

        Raises:
            PreconditionError, RequestError: as `_current`.
            OriginRefusedError: there is no such version.
        """
        await self._forwarding.turn.settle([source])
        wanted = call.params.get("CopySourceRange")
        headers = {"range": wanted} if wanted and parse_copy_range(wanted, 1 << 62) else {}
        headers |= conditions_on(call.headers)
        query = f"versionId={quote(version_id, safe='')}"
        request = ForwardRequest("GET", source.bucket, source.key, query, tuple(headers.items()))
        answer = await self._rooms.forwarder.forward(request)
        try:
            size_bytes = await answered_bytes(answer, wanted)
        except BaseException:  # Cancelled too: an open answer keeps its connection.
            await answer.close()
            raise
        return SourceBody(answer, size_bytes, version_id)


def etag_of_part(version: Version, start: int, end: int) -> str:
    """The ETag of the part that is just the bytes [start, end) of a version; "" if none is. The same bytes as a part
    have the same ETag, so that a copy part by part has that of its source."""
    offset = 0
    for part in version.parts:
        if (offset, offset + part.body.size_bytes) == (start, end) and version.multipart and not version.foreign:
            return part.etag
        offset += part.body.size_bytes
    return ""


def conditions_on(headers: Mapping[str, str]) -> dict[str, str]:
    """The conditions on a copy's source as those of a read."""
    found = {name.removeprefix(COPY_SOURCE_PREFIX): value for name, value in headers.items()}
    return {name: value for name, value in found.items() if name.startswith("if-") and name not in headers}


async def answered_bytes(answer: ForwardAnswer, wanted: str | None) -> int:
    """How long the body of the origin's answer to a read is that stands for a copy.

    Raises:
        PreconditionError: PreconditionFailed, also where a read would answer 304.
        RequestError: InvalidRange, where it is shorter than the range that is wanted.
        OriginRefusedError: as the origin says.
    """
    headers = lower_names(answer.headers)
    if answer.status in (304, 412):
        raise PreconditionError("PreconditionFailed")
    if answer.status not in (200, 206):
        body = b""
        async for piece in answer.pieces():
            body = (body + piece)[:MAX_ERROR_BYTES]
        fault = fault_of(answer.status, answer.headers, body)
        raise OriginRefusedError(answer.status, fault.code, fault.message, body, headers)
    length = headers.get("content-length", "")
    size_bytes = int(length) if length.isascii() and length.isdigit() else 0
    span = parse_copy_range(wanted, 1 << 62)
    if span is not None and size_bytes != span[1] - span[0]:
        raise RequestError("InvalidRange", range_requested=wanted)
    if size_bytes > LARGEST_COPY_BYTES:
        raise too_large_to_copy()
    return size_bytes
