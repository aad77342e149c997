"""Write-through: an object that memory has no room for, or too few nodes are left to copy, or of a versioned bucket,
goes straight to the origin.

It is a commit like any other. It waits inside the request, bounded, for the fence and for earlier writes
of its key; then its bytes go to the origin as they arrive, and the acknowledgement says `origin`.
"""

from tiergate.config import FenceMode
from tiergate.directory.base import Intent, Seen
from tiergate.engine.acks import ACK_HEADER, ACK_ORIGIN
from tiergate.engine.calls import Answer, Call
from tiergate.engine.current import Current
from tiergate.engine.ground import Ground, WriteConditions
from tiergate.engine.identity import Description
from tiergate.engine.outage import Outage
from tiergate.engine.proved import CheckedBody
from tiergate.engine.rooms import Rooms, log_name
from tiergate.engine.turn import Turn
from tiergate.errors import ConflictError, OriginRefusedError, OverloadedError, invariant
from tiergate.model import (
    NO_BASE,
    UNKNOWN_BASE,
    ObjectName,
    Part,
    Role,
    Version,
    new_uid,
)
from tiergate.origin.client import Condition, PutAnswer
from tiergate.origin.stamp import described
from tiergate.s3.checksums import ALGORITHMS, HEADER_PREFIX
from tiergate.s3.conditions import check_write
from tiergate.writeback.proofs import proof
from tiergate.writeback.sender import origin_changed

COMMIT_ATTEMPTS_COUNT = 8


class Through:
    """Writes straight to the origin."""

    def __init__(self, rooms: Rooms, outage: Outage, turn: Turn) -> None:
        self._rooms = rooms
        self._outage = outage
        self.turn = turn

    async def put(self, call: Call, described: Description, ground: Ground, reason: str = "memory") -> Answer:
        """PutObject straight to the origin. `reason`: for the metric.

        Raises:
            OverloadedError: its turn did not come in time, or the origin failed in the middle.
        """
        size = call.body.size_bytes
        if size is None:
            raise OverloadedError("no room for a body of unknown length", **log_name(call.name))
        role = self._rooms.markers.role_of(call.name, size)
        with self._outage.noticed(call.name.bucket):
            async with self.turn.taken(call.name, role, ground.start_revision) as base:
                self._rooms.metrics.through_writes.inc(1, reason)
                headers = await self._put_now(call, described, ground, size, role, base)
        headers[ACK_HEADER] = ACK_ORIGIN
        return Answer(200, headers)

    async def _put_now(
        self, call: Call, described: Description, ground: Ground, size_bytes: int, role: Role, base: str
    ) -> dict[str, str]:
        """Send the body, commit, and say what the origin answered."""
        seen = await self._rooms.directory.get(call.name)
        stream = CheckedBody(call.body)
        draft = self._draft(size_bytes, described)
        conditions = WriteConditions.of(call.params)
        condition = condition_of(call.name, seen, conditions, base)
        intent = Intent(
            role,
            ground.start_revision,
            self._rooms.clock.wall_s(),
            UNKNOWN_BASE,
            guard=seen.guard,
            conditional=ground.conditional,
        )
        try:
            answer = await self._rooms.origin.put_object(
                call.name, size_bytes, stream.pieces, upload_headers(draft, call), condition
            )
            await self.commit(call.name, self._version(draft, stream, answer), answer.etag, intent)
        except OriginRefusedError as refused:
            if not conditions.any:
                await self.check_base(call.name, refused, base)
            raise
        except BaseException:  # Cancelled, most likely: the client left, and the origin may go on.
            await self.turn.doubt(call.name)
            raise
        return self._answered(stream, answer)

    def _draft(self, size_bytes: int, described: Description) -> Version:
        now_s = self._rooms.clock.wall_s()
        return Version(
            new_uid(now_s), size_bytes, "", int(now_s), (), described.headers, described.metadata, described.tagging
        )

    def _answered(self, stream: CheckedBody, answer: PutAnswer) -> dict[str, str]:
        # Not every origin repeats what it checked.
        checked = {f"{HEADER_PREFIX}{algorithm}": value for algorithm, value in stream.checksums.items()}
        return checked | dict(answer.headers)

    def may_put_unrecorded(self, call: Call) -> bool:
        """Whether a PutObject may go to the origin while the directory does not answer. Of a prefix declared immutable
        there is no other version that it could get in the way of, as long as the origin sees to it that there is none.
        And the fence must let it pass whatever is pending: what would have to wait for other objects cannot know
        whether they are there."""
        name = call.name
        fence, size_bytes = self._rooms.fence_of(name), call.body.size_bytes
        if size_bytes is None or not self._rooms.settings.prefix_for(name.bucket, name.key).immutable:
            return False
        if not self._rooms.origin.conditional_writes or call.params.get("IfMatch") is not None:
            return False
        is_large = self._rooms.markers.role_of(name, size_bytes) is Role.LARGE
        return fence is FenceMode.OFF or (fence is FenceMode.AUTO and is_large)

    async def put_unrecorded(self, call: Call, described: Description) -> Answer:
        """PutObject of a key that the origin must not have, straight to it and past the directory: whoever reads it
        next adopts it.

        Raises:
            PreconditionError, OriginRefusedError: the origin has the key.
        """
        size_bytes = call.body.size_bytes
        invariant(size_bytes is not None, "a body of unknown length", **log_name(call.name))
        stream = CheckedBody(call.body)
        draft = self._draft(size_bytes or 0, described)
        self._rooms.metrics.through_writes.inc(1, "directory")
        answer = await self._rooms.origin.put_object(
            call.name, draft.size_bytes, stream.pieces, upload_headers(draft, call), Condition.if_absent()
        )
        return Answer(200, self._answered(stream, answer) | {ACK_HEADER: ACK_ORIGIN})

    def _version(self, draft: Version, stream: CheckedBody, answer: PutAnswer) -> Version:
        body = stream.body_of(draft.uid, draft.size_bytes)
        headers = dict(draft.headers)
        if answer.version_id:
            headers["x-amz-version-id"] = answer.version_id
        return Version(
            uid=draft.uid,
            size_bytes=draft.size_bytes,
            etag=answer.etag,
            modified_s=draft.modified_s,
            parts=(Part(1, body, answer.etag, draft.modified_s, stream.checksums),),
            headers=headers,
            metadata=draft.metadata,
            tagging=draft.tagging,
            checksums=stream.checksums,
            checksum_type="FULL_OBJECT" if stream.checksums else "",
        )

    async def check_base(self, name: ObjectName, refused: OriginRefusedError, base: str) -> None:
        """After the refusal of a write without conditions of its own: was it that the origin holds something else?

        Raises:
            OverloadedError: it was; what was known of the key is forgotten, and the next try finds what is there.
        """
        if origin_changed(refused, base):
            self._rooms.let_go(await self._rooms.directory.forget(name, None))
            raise OverloadedError("the origin's object was changed", retry_after_s=1, **log_name(name)) from refused

    async def commit(self, name: ObjectName, version: Version, origin_etag: str, intent: Intent) -> None:
        """Commit what the origin took. If somebody wrote the key meanwhile, the origin says who came last."""
        for _ in range(COMMIT_ATTEMPTS_COUNT):
            try:
                committed = await self._rooms.directory.put_through(name, version, origin_etag, intent)
            except ConflictError:
                self._rooms.metrics.conflicts.inc()
                seen = await self._rooms.directory.get(name)
                if seen.pending is not None:
                    # It was committed after ours reached the origin, and replaces it there: ours came before.
                    return
                there = await self._rooms.origin.head_object(name)
                if there is None or there.etag != origin_etag:
                    return
                intent = Intent(
                    intent.role,
                    intent.start_revision,
                    intent.now_s,
                    intent.base,
                    seen.guard,
                    intent.conditional,
                )
                continue
            self._rooms.replaced(name, committed)
            self._rooms.wake()
            return
        raise OverloadedError("the key is written too often", **log_name(name))


def upload_headers(version: Version, call: Call) -> dict[str, str]:
    """What the origin is told of a write-through: the object's own headers, what the client proves, our stamp."""
    headers = described(version, call.name)
    for name in call.headers:
        if name == "content-md5":
            headers[name] = call.headers[name]
        elif name.startswith(HEADER_PREFIX) and name.removeprefix(HEADER_PREFIX) in ALGORITHMS:
            headers |= proof(name.removeprefix(HEADER_PREFIX), call.headers[name])
    return headers


def condition_of(name: ObjectName, seen: Seen, conditions: WriteConditions, base: str) -> Condition:
    """A conditional write is decided on what is current here now; the origin must still hold just that. Any other must
    find its base, so that one that lands late overwrites nothing newer.

    Raises:
        PreconditionError, NotFoundError: the condition does not hold.
    """
    if not conditions.any:
        if base == UNKNOWN_BASE:
            return Condition.none()
        return Condition.if_match(base) if base != NO_BASE else Condition.if_absent()
    record = seen.record
    etags = Current(record, record.version).etags if record is not None and record.version is not None else None
    check_write(conditions.if_match, conditions.if_none_match, etags, name.bucket, name.key)
    return Condition.if_match(record.origin_etag) if record is not None else Condition.if_absent()
