"""CopyObject: from any tier into memory, no bytes through the client.

A copy of bytes that are in memory shares them. A copy whose source lies only in the origin is done there.
"""

import base64
from contextlib import suppress
from functools import partial
from typing import Any

from tiergate.engine.acks import ACK_HEADER, memory_ack
from tiergate.engine.afterwards import Afterwards
from tiergate.engine.buckets import Buckets
from tiergate.engine.calls import Answer, Call
from tiergate.engine.current import Current, Resolver
from tiergate.engine.digests import NotInMemoryError, object_digest
from tiergate.engine.forwarding import Forwarding
from tiergate.engine.ground import WriteConditions
from tiergate.engine.holding import Holding
from tiergate.engine.identity import Description
from tiergate.engine.intake import Intake
from tiergate.engine.persisting import wish_of
from tiergate.engine.rooms import Rooms
from tiergate.engine.writes import Writes
from tiergate.errors import MemoryFullError, RequestError
from tiergate.model import Body, ObjectName, Version, new_uid
from tiergate.replication.base import Notice
from tiergate.s3.checksums import ALGORITHMS, FULL_OBJECT
from tiergate.s3.conditions import check_copy_source, copy_source_conditions
from tiergate.s3.copysource import parse_copy_source
from tiergate.s3.etag import opaque_etag
from tiergate.s3.operations import render

CHANGES_OF_ITSELF = frozenset(
    {"StorageClass", "WebsiteRedirectLocation", "ServerSideEncryption", "SSEKMSKeyId", "BucketKeyEnabled"}
)
"""What an object may be copied to itself for, beside new metadata."""

LARGEST_COPY_BYTES = 5 << 30
"""https://docs.aws.amazon.com/AmazonS3/latest/API/API_CopyObject.html"""


def too_large_to_copy() -> RequestError:
    """S3's answer for a source that takes more than one request to copy."""
    return RequestError(
        "InvalidRequest",
        f"The specified copy source is larger than the maximum allowable size for a copy source: {LARGEST_COPY_BYTES}",
    )


class Copies:
    """CopyObject."""

    def __init__(
        self,
        rooms: Rooms,
        buckets: Buckets,
        resolver: Resolver,
        intake: Intake,
        forwarding: Forwarding,
        writes: Writes,
        afterwards: Afterwards,
    ) -> None:
        self._rooms = rooms
        self._buckets = buckets
        self._resolver = resolver
        self._intake = intake
        self._forwarding = forwarding
        self._writes = writes
        self._afterwards = afterwards

    async def copy(self, call: Call) -> Answer:
        """CopyObject."""
        named = parse_copy_source(call.headers["x-amz-copy-source"])
        if named is None:
            return await self._forwarding.write(call, [call.name])
        source, version_id = ObjectName(*named[:2]), named[2]
        bucket = await self._buckets.known(call.target.bucket)
        source_bucket = await self._buckets.known(source.bucket)
        if version_id is not None or bucket.versioned or source_bucket.versioned:
            return await self._forwarding.write(call, [call.name], [source])
        current = await self._resolver.current(source)
        check_copy_source(copy_source_conditions(call.params), current.etags, current.version.modified_s)
        await self._intake.admit()
        version = await self._described(call, source, current)
        wish = wish_of(call.headers, version.metadata if version is not None else {})
        if version is None or not self._can_share(call.name, current, version):
            return await self._forwarding.write(call, [call.name], [source])
        async with self._holding(call.name, version) as holding:
            is_shared, parked = await self._share(call.name, current, version, holding), False
            if is_shared:
                conditions = WriteConditions.of(call.params)
                ground = await self._writes.ground(call.name, conditions)
                committed = await self._writes.commit(call.name, version, conditions, ground, holding, wish)
                parked = committed.parked
        if not is_shared:
            return await self._forwarding.write(call, [call.name], [source])
        result: dict[str, Any] = {"ETag": version.etag, "LastModified": version.modified_s}
        for algorithm, value in version.checksums.items():
            result[f"Checksum{algorithm.upper()}"] = value
        if version.checksums:
            result["ChecksumType"] = version.checksum_type
        headers, body = render(call.operation, {"CopyObjectResult": result})
        headers[ACK_HEADER] = memory_ack(holding.copies.count, parked=parked)
        return Answer(200, headers, body)

    async def _described(self, call: Call, source: ObjectName, current: Current) -> Version | None:
        """The version the copy makes; None if its checksum cannot be computed here.

        Raises:
            RequestError: InvalidRequest, EntityTooLarge.
        """
        old = current.version
        replace = call.params.get("MetadataDirective") == "REPLACE"
        described = Description.of(call.headers, call.params)
        if source == call.name and not replace and not call.params.keys() & CHANGES_OF_ITSELF:
            raise RequestError(
                "InvalidRequest",
                "This copy request is illegal because it is trying to copy an object to itself without changing the "
                "object's metadata, storage class, website redirect location or encryption attributes.",
            )
        if old.size_bytes > LARGEST_COPY_BYTES:
            raise too_large_to_copy()
        if call.params.get("TaggingDirective") == "REPLACE":
            tagging: str | None = described.tagging
        else:
            # An origin-only object's tags are the origin's to copy.
            tagging = None if old.foreign else old.tagging
        if tagging is None:
            return None
        headers = {name: value for name, value in described.headers.items() if name.startswith("x-amz-")}
        if replace:
            headers = described.headers
        else:
            headers |= {name: value for name, value in old.headers.items() if not name.startswith("x-amz-")}
        now_s = self._rooms.clock.wall_s()
        uid = new_uid(now_s)
        etag = old.etag
        if "-" in etag:
            etag = opaque_etag(uid)
            if self._intake.wants_md5(call.name, old.size_bytes):
                with suppress(NotInMemoryError):
                    etag = base64.b64decode(await object_digest(self._rooms.memory, old, "md5")).hex()
        checksums = old.checksums if old.checksum_type == FULL_OBJECT else {}
        algorithm = (call.params.get("ChecksumAlgorithm") or "").lower()
        if algorithm and algorithm not in checksums:
            if algorithm not in ALGORITHMS:
                return None
            try:
                checksums = {algorithm: await object_digest(self._rooms.memory, old, algorithm)}
            except NotInMemoryError:
                return None
        return Version(
            uid=uid,
            size_bytes=old.size_bytes,
            etag=etag,
            modified_s=int(now_s),
            parts=old.parts,
            headers=headers,
            metadata=described.metadata if replace else old.metadata,
            tagging=tagging,
            checksums=checksums,
            checksum_type=FULL_OBJECT if checksums else "",
        )

    def _can_share(self, name: ObjectName, current: Current, version: Version) -> bool:
        """Hold the source's bytes for the copy where they are in memory; where they are not, or not all, whether
        others have them. False too if there are too few nodes for the copies."""
        rooms = self._rooms
        if not self._intake.has_nodes(name):
            return False
        if rooms.memory.hold_all([body.uid for body in filled(version)], version.uid, dirty=True):
            return True
        return bool(rooms.replication.sources(current.holders))

    async def _share(self, name: ObjectName, current: Current, version: Version, holding: Holding) -> bool:
        """Have the copy's bytes held by this node and enough others; False, with nothing held, if they are elsewhere
        and find no room here.

        Raises:
            TooFewCopiesError: as `Holding.spread`.
        """
        bodies = filled(version)
        at = {body.uid: sorted(current.holders) for body in bodies}
        try:
            await holding.spread(bodies, self._rooms.copies_count(name), at)
        except MemoryFullError:
            await holding.give_back()
            return False
        return True

    def _holding(self, name: ObjectName, version: Version) -> Holding:
        known = partial(self._writes.is_current, name, version.uid)

        async def undo() -> None:
            body_uids = [body.uid for body in filled(version)]
            self._rooms.memory.drop(version.uid, body_uids)
            self._rooms.replication.notice(holding.copies.holders, [Notice(name, version.uid, tuple(body_uids))])

        holding = Holding(self._rooms, self._afterwards, name, version.uid, known, undo)
        return holding


def filled(version: Version) -> list[Body]:
    """The version's bodies that have bytes."""
    return [part.body for part in version.parts if part.body.size_bytes]
