"""PutObject, DeleteObject and DeleteObjects: bytes into memory, one commit, then the acknowledgement."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from tiergate.directory.base import Committed, Intent, Seen
from tiergate.engine.acks import ACK_HEADER, memory_ack
from tiergate.engine.atonce import for_each
from tiergate.engine.buckets import Buckets
from tiergate.engine.calls import Answer, Call
from tiergate.engine.current import Resolver
from tiergate.engine.forwarding import Forwarding
from tiergate.engine.granted import granted_of
from tiergate.engine.ground import Ground, WriteConditions
from tiergate.engine.holding import Holding
from tiergate.engine.identity import KEPT_HEADERS, Description, put_etag, put_version
from tiergate.engine.intake import Intake
from tiergate.engine.persisting import NOT_KEPT, Kept, Persisting, wish_of
from tiergate.engine.rooms import Rooms, log_name
from tiergate.engine.through import Through
from tiergate.errors import (
    ConflictError,
    DirectoryUnavailableError,
    FencedError,
    MembershipOverError,
    MemoryFullError,
    NotParkableError,
    OverloadedError,
    PartsChangedError,
    PlanOverError,
    RequestError,
    TiergateError,
    TooFewCopiesError,
)
from tiergate.model import NO_BASE, UNKNOWN_BASE, Bucket, Holder, ObjectName, Plan, Role, Version, new_uid
from tiergate.policy.persistence import Wish
from tiergate.s3.conditions import check_write
from tiergate.s3.errors import error_code, error_message
from tiergate.s3.operations import render
from tiergate.s3.target import check_key

CONDITION_ATTEMPTS_COUNT = 16
"""How often a condition is decided anew because the record changed between the look and the commit."""


class Writes:
    """The writing operations on whole objects."""

    def __init__(
        self,
        rooms: Rooms,
        buckets: Buckets,
        resolver: Resolver,
        intake: Intake,
        through: Through,
        forwarding: Forwarding,
        persisting: Persisting,
    ) -> None:
        self._rooms = rooms
        self._buckets = buckets
        self._resolver = resolver
        self._intake = intake
        self._through = through
        self._forwarding = forwarding
        self._persisting = persisting

    async def put(self, call: Call) -> Answer:
        """PutObject. Where memory has no room, too few nodes are left for the copies, or the bucket is versioned, the
        write goes through to the origin, unless it is to be in memory only.

        Raises:
            MemoryFullError, TooFewCopiesError: it is.
        """
        memory_only = self._rooms.is_memory_only(call.name)
        conditions = WriteConditions.of(call.params)
        wish = wish_of(call.headers, call.params.get("Metadata") or {})
        try:
            bucket, described, ground = await self._admitted(call, conditions)
        except DirectoryUnavailableError:
            if not self._through.may_put_unrecorded(call):
                raise
            return await self._through.put_unrecorded(call, Description.of(call.headers, call.params))
        if bucket.versioned and not memory_only:
            return await self._through.put(call, described, ground)
        granted = granted_of(call.body)
        uid = granted.uid if granted is not None else new_uid(self._rooms.clock.wall_s())
        self._intake.check_size(call.name, call.body.size_bytes)
        try:
            arrival = self._intake.reserve(
                call.name, uid, uid, call.body.size_bytes, partial(self.is_current, call.name, uid), granted
            )
        except MemoryFullError:
            if memory_only:
                raise
            return await self._through.put(call, described, ground)
        except TooFewCopiesError:
            if memory_only:
                raise
            return await self._through.put(call, described, ground, "copies")
        async with arrival:
            taken = await self._intake.take(call.name, call.body, arrival)
            version = put_version(
                uid,
                taken.body,
                put_etag(taken.body, taken.md5_hex),
                int(self._rooms.clock.wall_s()),
                described,
                taken.checksums,
            )
            committed = await self.commit(call.name, version, conditions, ground, arrival, wish)
        headers, _ = render("PutObject", put_members(version))
        headers.update({name: version.headers[name] for name in KEPT_HEADERS[2:] if name in version.headers})
        headers[ACK_HEADER] = memory_ack(arrival.copies.count, parked=committed.parked)
        return Answer(200, headers)

    async def _admitted(self, call: Call, conditions: WriteConditions) -> tuple[Bucket, Description, Ground]:
        """What is decided, and asked of the directory, before the body is touched.

        Raises:
            OverloadedError: as `Intake.admit`.
            Exception: as `Buckets.known` and `ground`.
        """
        seen = await self._rooms.directory.get(call.name)
        bucket = await self._buckets.known(call.target.bucket, seen.bucket)
        described = Description.of(call.headers, call.params)
        ground = await self.ground(call.name, conditions, seen)
        if not bucket.versioned and not self._rooms.is_memory_only(call.name):
            await self._intake.admit()
        return bucket, described, ground

    async def is_current(self, name: ObjectName, uid: str) -> bool:
        """Whether the directory has this version of the key."""
        record = (await self._rooms.directory.get(name)).record
        return record is not None and record.version is not None and record.version.uid == uid

    async def ground(self, name: ObjectName, conditions: WriteConditions, seen: Seen | None = None) -> Ground:
        """Look at what the key holds now and decide the condition on it; the origin is asked about a key without a
        record only when there is a condition. `seen`: a look that this request has taken.

        Raises:
            PreconditionError, NotFoundError: the condition does not hold.
            OverloadedError: the key changes faster than the condition can be decided.
        """
        seen = seen or await self._rooms.directory.get(name)
        start_revision = seen.revision
        if not conditions.any:
            return Ground(start_revision, None, UNKNOWN_BASE, False)
        for _ in range(CONDITION_ATTEMPTS_COUNT):
            found = await self._resolver.judge(name, seen)
            seen = await self._rooms.directory.get(name)
            # The guard must stand for what the condition is decided on, not for a write that came meanwhile.
            held = seen.record.version if seen.record else None
            if (held.uid if held else None) == (found.version.uid if found else None):
                etags = found.etags if found else None
                check_write(conditions.if_match, conditions.if_none_match, etags, name.bucket, name.key)
                base = UNKNOWN_BASE if seen.record else NO_BASE
                return Ground(start_revision, seen.guard, base, True)
        raise too_often(name)

    async def commit(
        self,
        name: ObjectName,
        version: Version,
        conditions: WriteConditions,
        ground: Ground,
        holding: Holding,
        wish: Wish | None,
    ) -> Committed:
        """Commit a version whose bytes are held under its uid; on return it is acknowledged ground."""

        async def attempt(intent: Intent) -> Committed:
            return await self._rooms.directory.put(name, version, intent)

        role = self._rooms.markers.role_of(name, version.size_bytes)
        policy = partial(self._persisting.kept, name, role, version, wish)
        committed = await self.guarded(name, role, conditions, ground, attempt, holding, policy)
        self.committed(name, version, committed)
        return committed

    async def guarded(
        self,
        name: ObjectName,
        role: Role,
        conditions: WriteConditions,
        ground: Ground,
        attempt: Callable[[Intent], Awaitable[Committed]],
        holding: Holding | None = None,
        policy: Callable[[Plan | None], Awaitable[Kept]] | None = None,
    ) -> Committed:
        """Run a commit under its condition, deciding anew while other writers get in between. `holding`: the bytes of
        what is committed. `policy`: what is said of it by that, given the plan that turned out to be over.

        Raises:
            PreconditionError: another writer won.
            PartsChangedError: what is committed must be made up anew.
            OverloadedError: the key changes faster than the condition can be decided, or as `Holding.commit`.
        """
        start_revision, over = ground.start_revision, None
        for _ in range(CONDITION_ATTEMPTS_COUNT):
            kept = await policy(over) if policy is not None else NOT_KEPT
            intent = Intent(
                role=role,
                start_revision=start_revision,
                now_s=self._rooms.clock.wall_s(),
                base=ground.base,
                guard=ground.guard,
                conditional=ground.conditional,
            )
            intent = kept.of(intent)

            async def held_by(holders: tuple[Holder, ...], intent: Intent = intent) -> Committed:
                return await attempt(replace(intent, holders=holders) if holders else intent)

            try:
                return await (holding.commit(held_by) if holding is not None else attempt(intent))
            except PartsChangedError:
                raise
            except PlanOverError:
                over = kept.plan
            except NotParkableError:
                await self._persisting.make_way(name)
            except ConflictError:
                self._rooms.metrics.conflicts.inc()
                ground = await self.ground(name, conditions)
        raise too_often(name)

    def committed(self, name: ObjectName, version: Version, committed: Committed) -> None:
        """After the commit: the bytes are the directory's now, those of the replaced version may go."""
        self._rooms.memory.confirm(version.uid)
        self._rooms.replaced(name, committed)
        self._rooms.wake()

    async def delete(self, call: Call) -> Answer:
        """DeleteObject of the current version; the origin's copy is hidden at once and deleted soon after."""
        seen = await self._rooms.directory.get(call.name)
        bucket = await self._buckets.known(call.target.bucket, seen.bucket)
        conditions = WriteConditions.of(call.params)
        versioned = bucket.versioned and not self._rooms.is_memory_only(call.name)
        if versioned or "IfMatchLastModifiedTime" in call.params or "IfMatchSize" in call.params:
            return await self._forwarding.settled(call, [call.name])
        ground = await self.ground(call.name, conditions, seen)
        await self._delete(call.name, conditions, ground)
        return Answer(204, {ACK_HEADER: self._deletion_ack([call.name])})

    def _deletion_ack(self, names: Sequence[ObjectName]) -> str:
        """The rule that deletions met. A deletion has no bytes: it is in the directory, and nothing else. That of a
        cluster outlives any of its nodes, as many as may be, so a deletion meets whatever rule its key's writes are
        held to, and names that one, the least of them where there are several. Alone, the directory is this node's."""
        if self._rooms.is_alone:
            return memory_ack(1)
        return memory_ack(min(self._rooms.copies_count(name) for name in names))

    async def _delete(self, name: ObjectName, conditions: WriteConditions, ground: Ground) -> None:
        async def attempt(intent: Intent) -> Committed:
            done = await self._rooms.directory.delete(name, intent)
            return done or Committed(ground.start_revision, None)

        role = self._rooms.markers.role_of(name, 0)
        committed = await self.guarded(name, role, conditions, ground, attempt)
        self._rooms.replaced(name, committed)
        self._rooms.wake()

    async def delete_many(self, call: Call) -> Answer:
        """DeleteObjects: each key stands for itself, as in S3."""
        bucket = await self._buckets.known(call.target.bucket)
        wanted = call.params["Delete"]["Objects"]
        if not 1 <= len(wanted) <= 1000 or not all(item["Key"] for item in wanted):
            raise RequestError("MalformedXML", "The XML you provided was not well-formed")
        names = [ObjectName(call.target.bucket, item["Key"]) for item in wanted]
        plain = all(item.keys() <= {"Key", "ETag"} for item in wanted)
        versioned = bucket.versioned and not all(map(self._rooms.is_memory_only, names))
        if versioned or not plain or "MFA" in call.params:
            return await self._forwarding.settled(call, names)
        deleted: list[dict[str, Any]] = []
        errors: list[dict[str, Any]] = []

        async def delete(pair: tuple[ObjectName, dict[str, Any]]) -> TiergateError | None:
            name, item = pair
            try:
                check_key(name.key)
                conditions = WriteConditions(if_match=item.get("ETag"))
                ground = await self.ground(name, conditions)
                await self._delete(name, conditions, ground)
            except (DirectoryUnavailableError, FencedError, MembershipOverError):
                raise  # It is so for all keys, and what is deleted already may be deleted again.
            except TiergateError as error:
                return error
            return None

        pairs = list(zip(names, wanted, strict=True))
        for name, error in zip(names, await for_each(self._rooms, pairs, delete), strict=True):
            if error is None:
                deleted.append({"Key": name.key})
            else:
                errors.append({"Key": name.key, "Code": error_code(error), "Message": error_message(error)})
        if call.params["Delete"].get("Quiet"):
            deleted = []
        headers, body = render("DeleteObjects", {"Deleted": deleted, "Errors": errors})
        headers[ACK_HEADER] = self._deletion_ack(names)
        return Answer(200, headers, body)


def too_often(name: ObjectName) -> OverloadedError:
    """A condition on a key that changes faster than it can be decided."""
    return OverloadedError("the key is written too often to decide a condition", **log_name(name))


def put_members(version: Version) -> dict[str, Any]:
    """The output members of PutObject for a version."""
    members: dict[str, Any] = {"ETag": version.etag}
    for algorithm, value in version.checksums.items():
        members[f"Checksum{algorithm.upper()}"] = value
    if version.checksums:
        members["ChecksumType"] = version.checksum_type
    return members
