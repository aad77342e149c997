"""GetObject and HeadObject: the current version's headers, and its bytes from the nearest tier that has them."""

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

from tiergate.engine.buckets import Buckets
from tiergate.engine.calls import Answer, Call
from tiergate.engine.current import Current, Resolver, no_such_key
from tiergate.engine.fills import Fills, ForeignVersionError, Route, Source, VanishedError
from tiergate.engine.forwarding import Forwarding
from tiergate.engine.grants import MAP_HEADER, Grants
from tiergate.engine.outage import Outage
from tiergate.engine.rooms import Rooms, bodies_of, log_name
from tiergate.errors import NotFoundError, OverloadedError, PeerError, RequestError, invariant
from tiergate.memory.memory import Pin
from tiergate.model import BLOCK_BYTES, Body, ObjectName, Record, State, Version
from tiergate.origin.stamp import DEFAULT_CONTENT_TYPE
from tiergate.s3.conditions import check_read, range_applies, read_conditions
from tiergate.s3.operations import render
from tiergate.s3.ranges import content_range, parse_range

T = TypeVar("T")

FOREIGN_ATTEMPTS_COUNT = 4
"""How often a read begins again because the object was replaced in the origin meanwhile."""

RESPONSE_OVERRIDES = (
    "cache-control",
    "content-disposition",
    "content-encoding",
    "content-language",
    "content-type",
    "expires",
)
"""https://docs.aws.amazon.com/AmazonS3/latest/API/API_GetObject.html: `response-<header>` overrides the header."""


class Openings:
    """Opens objects, wherever their bytes are."""

    def __init__(self, rooms: Rooms, resolver: Resolver, fills: Fills, outage: Outage) -> None:
        self._rooms = rooms
        self._resolver = resolver
        self._fills = fills
        self._outage = outage

    async def open(
        self, name: ObjectName, decide: Callable[[Current], T], span: Callable[[T], tuple[int, int]]
    ) -> "tuple[Current, T, ObjectStream]":
        """The current version of a key, what `decide` says of it, and its bytes in the `span` of that, which the
        caller closes.

        Raises:
            OverloadedError: the object keeps changing, its only copy is lost, or the origin does not answer.
            Exception: whatever `decide` raises.
        """
        for _ in range(FOREIGN_ATTEMPTS_COUNT):
            current = await self._resolver.current(name)
            decided = decide(current)
            stream = ObjectStream(self._rooms, self._fills, current, *span(decided))
            try:
                if not await stream.open():
                    async with self._outage.bounded(**log_name(name)):
                        await stream.open_far()
            except ForeignVersionError:
                await stream.close()
                await self._resolver.forget(name, current.version.uid)
                continue
            except VanishedError:
                await stream.close()
                if await self._stands(current):
                    raise self._lost(current) from None
                continue
            except BaseException:  # Cancelled too: pins are held until somebody closes the stream.
                await stream.close()
                raise
            return current, decided, stream
        raise OverloadedError("the object keeps changing in the origin", **log_name(name))

    async def _stands(self, current: Current) -> bool:
        """Whether nothing changed since: the version is where it was said to be."""
        seen = await self._rooms.directory.get(current.record.name)
        holders = seen.holders.get(current.version.uid, frozenset())
        return seen.guard == current.record.modified and holders == current.holders

    def _lost(self, current: Current) -> OverloadedError:
        name = current.record.name
        if self._rooms.replication.sources(current.holders):
            return OverloadedError("the nodes that have this version do not give it", **log_name(name))
        self._rooms.metrics.lost_reads.inc()
        return OverloadedError("the only copy of this version was lost", **log_name(name))

    async def read(self, name: ObjectName, start: int, end: int) -> tuple[Record, bytes]:
        """The bytes from `start` up to `end`, fewer where the object ends before, and the record of the version that
        they are of. They are few: all are held at once.

        Raises:
            NotFoundError: NoSuchKey, NoSuchBucket.
            TiergateError: as `open` and the stream's pieces do.
        """

        def span(current: Current) -> tuple[int, int]:
            size_bytes = current.version.size_bytes
            return min(start, size_bytes), max(start, min(end, size_bytes))

        current, _, stream = await self.open(name, span, lambda found: found)
        try:
            async with self._outage.bounded(**log_name(name)):
                return current.record, b"".join([bytes(piece) async for piece in stream.pieces()])
        finally:
            await stream.close()


class Reads:
    """The reading operations."""

    def __init__(
        self,
        rooms: Rooms,
        buckets: Buckets,
        resolver: Resolver,
        forwarding: Forwarding,
        openings: Openings,
        grants: Grants,
    ) -> None:
        self._rooms = rooms
        self._grants = grants
        self._buckets = buckets
        self._resolver = resolver
        self._forwarding = forwarding
        self._openings = openings

    async def head(self, call: Call) -> Answer:
        """HeadObject: conditions, ranges and part numbers as GetObject, no body."""
        try:
            current = await self._resolver.current(call.name)
        except NotFoundError:
            return await self._missing(call)
        if only_origin_knows(call, current.version):
            return await self._forwarding.settled(call, [call.name])
        status, headers, start, end = self._head_of(call, current)
        headers["x-tiergate-tier"] = self._tier(current)
        return Answer(status, headers, b"", end - start)

    async def get(self, call: Call) -> Answer:
        """GetObject. The first block is at hand before the answer begins, so its failure is a proper error."""

        def decide(current: Current) -> tuple[int, dict[str, str], int, int]:
            if only_origin_knows(call, current.version):
                raise OnlyOriginKnowsError
            status, headers, start, end = self._head_of(call, current)
            headers["x-tiergate-tier"] = self._tier(current)
            return status, headers, start, end

        try:
            current, (status, headers, start, end), stream = await self._openings.open(
                call.name, decide, lambda head: head[2:]
            )
        except OnlyOriginKnowsError:
            return await self._forwarding.settled(call, [call.name])
        except NotFoundError:
            return await self._missing(call)
        mapper = call.headers.get(MAP_HEADER)
        mapped = None
        if mapper is not None:
            try:
                mapped = self._grants.mapped(mapper, current.version, headers["ETag"], start, stream.spans)
            except BaseException:
                await stream.close()
                raise
        self._rooms.metrics.reads.inc(1, headers["x-tiergate-tier"])
        if mapped is not None:
            await stream.close()
            return mapped
        return Answer(status, headers, stream, end - start)

    async def _missing(self, call: Call) -> Answer:
        """What is said of a key that does not exist: in a versioned bucket the origin's answer names its delete marker.

        Raises:
            NotFoundError: NoSuchKey, NoSuchBucket.
        """
        if (await self._buckets.known(call.target.bucket)).versioned:
            return await self._forwarding.settled(call, [call.name])
        raise no_such_key(call.name)

    def _tier(self, current: Current) -> str:
        """The nearest tier that has what this node has not."""
        if self._rooms.holds_whole(current.version):
            return "memory"
        return route_of(self._rooms, current).tier

    def _head_of(self, call: Call, current: Current) -> tuple[int, dict[str, str], int, int]:
        """Status, headers and the half-open byte range of the answer."""
        version = current.version
        check_read(read_conditions(call.params), current.etags, version.modified_s)
        start, end, status = 0, version.size_bytes, 200
        number = call.params.get("PartNumber")
        if number is not None and call.params.get("Range"):
            raise RequestError("InvalidRequest", "Cannot specify both Range header and partNumber query parameter")
        if number is not None:
            start, end = part_range(version, number)
            status = 206
        else:
            applies = range_applies(call.headers.get("if-range"), current.etags, version.modified_s)
            wanted = parse_range(call.headers.get("range") if applies else None, version.size_bytes)
            if wanted is not None:
                start, end = wanted
                status = 206
        headers, _ = render(call.operation, self._members(version))
        if status == 200 and call.params.get("ChecksumMode") == "ENABLED" and version.checksums:
            # A range never carries the whole object's checksum: SDKs would compare it with the range. The names are
            # the origin's: it may know an algorithm that no model here has.
            headers |= {f"x-amz-checksum-{algorithm}": value for algorithm, value in version.checksums.items()}
            if version.checksum_type:
                headers["x-amz-checksum-type"] = version.checksum_type
        if status == 206 and version.size_bytes:
            headers["content-range"] = content_range(start, end, version.size_bytes)
        if number is not None and version.multipart:
            headers["x-amz-mp-parts-count"] = str(len(version.parts))
        headers.update(version.headers)
        headers.setdefault("content-type", DEFAULT_CONTENT_TYPE)
        for name in RESPONSE_OVERRIDES:
            override = call.query(f"response-{name}")
            if override is not None:
                headers[name] = override
        return status, headers, start, end

    def _members(self, version: Version) -> dict[str, Any]:
        members: dict[str, Any] = {
            "AcceptRanges": "bytes",
            "ETag": version.etag,
            "LastModified": version.modified_s,
            "Metadata": version.metadata,
        }
        if version.tagging:
            members["TagCount"] = version.tagging.count("&") + 1
        return members


def only_origin_knows(call: Call, version: Version) -> bool:
    """Whether the request is for a part of an object that was not written through the gateway."""
    return version.foreign and version.multipart and "PartNumber" in call.params


def part_range(version: Version, number: int) -> tuple[int, int]:
    """The byte range of part `number`; an object made by PutObject has one part.

    Raises:
        RequestError: InvalidPartNumber, as S3 answers (416).
    """
    if not version.multipart:
        if number != 1:
            raise RequestError("InvalidPartNumber", "The requested partnumber is not satisfiable")
        return 0, version.size_bytes
    offset = 0
    for part in version.parts:
        if part.number == number:
            return offset, offset + part.body.size_bytes
        offset += part.body.size_bytes
    raise RequestError("InvalidPartNumber", "The requested partnumber is not satisfiable")


class OnlyOriginKnowsError(Exception):
    """The request is for what only the origin can say of the object."""


def route_of(rooms: Rooms, current: Current) -> Route:
    """The way to a version's bytes that are not in this node's memory. The origin has only what is clean."""
    record = current.record
    origin_etag = record.origin_etag if record.state is State.CLEAN else None
    return Route(rooms.replication.sources(current.holders), origin_etag)


class ObjectStream:
    """The bytes [start, end) of one version. Everything it needs in memory is pinned from `open` to `close`, so an
    overwrite, a delete or an eviction meanwhile changes nothing for this reader. What others have is fetched on the
    way; one of them failing changes nothing either while another has it."""

    def __init__(self, rooms: Rooms, fills: Fills, current: Current, start: int, end: int) -> None:
        self._rooms = rooms
        self._fills = fills
        self._current = current
        self._route = route_of(rooms, current)
        self.spans = spans(bodies_of(current.version), start, end)
        """Which bytes of which body it gives, in order."""
        self._pins: dict[str, Pin] = {}
        self._ready: Pin | bytes | None = None
        self._served_bytes = {"memory": 0, "peer": 0, "origin": 0}

    async def open(self) -> bool:
        """Pin what is in memory and make sure of the first block; False where `open_far` must.

        Raises:
            VanishedError: bytes of an un-persisted version are nowhere: it was replaced just now, or lost.
        """
        memory = self._rooms.memory
        for body, _, _ in self.spans:
            pin = memory.pin(body.uid)
            if pin is not None:
                self._pins[body.uid] = pin
        if self._route.is_spent:
            self._demand_all()
        if not self.spans:
            return True
        body, start, _ = self.spans[0]
        if self._views(body, start // BLOCK_BYTES) is None:
            self._ready = await self._fills.peers_block(self._ahead(body, start // BLOCK_BYTES), start // BLOCK_BYTES)
            return self._ready is not None
        return True

    async def open_far(self) -> None:
        """Have the first block from the origin.

        Raises:
            VanishedError: it has not got it.
            ForeignVersionError and the errors of `Fills.block`.
        """
        body, start, _ = self.spans[0]
        self._ready = await self._fill(body, start // BLOCK_BYTES)

    def _demand_all(self) -> None:
        """Only memory has these bytes: without one of them there is nothing to begin."""
        for body, start, end in self.spans:
            for index in range(start // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
                if self._views(body, index) is None:
                    raise VanishedError(body.uid)

    async def close(self) -> None:
        """Let go of every pin."""
        if isinstance(self._ready, Pin):
            self._ready.release()
        for pin in self._pins.values():
            pin.release()
        self._pins.clear()
        for tier, size_bytes in self._served_bytes.items():
            if size_bytes:
                self._rooms.metrics.read_bytes.inc(size_bytes, tier)
        self._served_bytes.clear()

    async def pieces(self) -> AsyncIterator[bytes | memoryview]:
        for body, start, end in self.spans:
            for index in range(start // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
                low = max(0, start - index * BLOCK_BYTES)
                high = min(body.block_size_bytes(index), end - index * BLOCK_BYTES)
                # What `open` made sure of is the first block's, also when the pin from before finds that block by now.
                ready, self._ready = self._ready, None
                views = self._views(body, index)
                if views is not None:
                    if isinstance(ready, Pin):
                        ready.release()
                    self._served_bytes[self._route.tier if ready is not None else "memory"] += high - low
                    for view in cut(views, low, high):
                        yield view
                    continue
                filled = ready or await self._fill_midway(body, index)
                self._served_bytes[self._route.tier] += high - low
                if isinstance(filled, bytes):
                    yield memoryview(filled)[low:high]
                    continue
                try:
                    found = filled.block(index)
                    invariant(found is not None, "a pinned block is gone", body=body.uid, block=index)
                    for view in cut(found or (), low, high):
                        yield view
                finally:
                    filled.release()

    def _views(self, body: Body, index: int) -> Sequence[memoryview] | None:
        pin = self._pins.get(body.uid)
        return None if pin is None else pin.block(index)

    async def _fill_midway(self, body: Body, index: int) -> Pin | bytes:
        """As `_fill`, once the answer has begun. A version that the origin no longer holds is forgotten, so that the
        next reader is not told of it too.

        Raises:
            ForeignVersionError, PeerError: this answer cannot be finished.
        """
        try:
            return await self._fill(body, index)
        except VanishedError:
            await self._look_again()
        except ForeignVersionError:
            self._rooms.metrics.foreign_changes.inc()
            name, uid = self._current.record.name, self._current.version.uid
            self._rooms.let_go(await self._rooms.directory.forget(name, uid))
            raise
        try:
            return await self._fill(body, index)
        except VanishedError as error:
            raise PeerError(
                "the nodes that had this version are gone", **log_name(self._current.record.name)
            ) from error

    async def _look_again(self) -> None:
        """Nobody on the route has the bytes: find out who has by now, be it the origin."""
        seen = await self._rooms.directory.get(self._current.record.name)
        record, uid = seen.record, self._current.version.uid
        if record is not None and record.version is not None and record.version.uid == uid:
            self._current = Current(record, record.version, seen.holders.get(uid, frozenset()))
            self._route = route_of(self._rooms, self._current)

    async def _fill(self, body: Body, index: int) -> Pin | bytes:
        return await self._fills.block(self._ahead(body, index), index)

    def _ahead(self, body: Body, index: int) -> Source:
        """Where the body comes from; blocks from `index` on are on their way."""
        offset = next(at for at, other in bodies_of(self._current.version) if other.uid == body.uid)
        name, uid = self._current.record.name, self._current.version.uid
        source = Source(name, self._route, uid, body, offset)
        self._fills.prefetch(source, index, self._rooms.settings.fill_ahead_count)
        return source


def spans(bodies: Sequence[tuple[int, Body]], start: int, end: int) -> list[tuple[Body, int, int]]:
    """Which bytes of which body make up [start, end) of the object: (body, from, to) in the body's own offsets."""
    found = []
    for offset, body in bodies:
        low, high = max(start, offset), min(end, offset + body.size_bytes)
        if low < high:
            found.append((body, low - offset, high - offset))
    return found


def cut(views: Sequence[memoryview], low: int, high: int) -> list[memoryview]:
    """The bytes [low, high) of what the views hold one after the other, without copying."""
    found = []
    offset = 0
    for view in views:
        start, end = max(low - offset, 0), min(high - offset, len(view))
        if start < end:
            found.append(view[start:end])
        offset += len(view)
    return found
