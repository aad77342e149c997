"""What the origin itself does: write-through where memory has no room, and forwarded operations.

A write-through is a commit like any other. It waits inside the request, bounded, for the fence and for earlier writes
of its key; then its bytes go to the origin as they arrive, and the acknowledgement says `origin`.
"""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace

from tiergate.directory.base import Intent, Seen
from tiergate.engine.acks import ACK_HEADER, ACK_ORIGIN
from tiergate.engine.calls import Answer, Call
from tiergate.engine.current import Current, Resolver
from tiergate.engine.forwarding import forward
from tiergate.engine.ground import Ground, WriteConditions
from tiergate.engine.identity import Description
from tiergate.engine.lasting import SettledBody
from tiergate.engine.outage import Outage
from tiergate.engine.owned import MAKES_VISIBLE
from tiergate.engine.proved import CheckedBody
from tiergate.engine.rooms import Rooms, log_name
from tiergate.engine.turn import Turn
from tiergate.errors import ConflictError, OriginRefusedError, OverloadedError, RequestError, TiergateError
from tiergate.model import (
    UNKNOWN_BASE,
    Kind,
    ObjectName,
    Part,
    Role,
    Version,
    new_uid,
)
from tiergate.observe.logs import get_logger
from tiergate.origin.client import Condition, PutAnswer
from tiergate.origin.stamp import described
from tiergate.s3.checksums import ALGORITHMS, HEADER_PREFIX
from tiergate.s3.conditions import COPY_SOURCE_PREFIX, check_write, has_conditions, restated
from tiergate.s3.copysource import parse_copy_source
from tiergate.s3.operations import parse
from tiergate.s3.target import percent_decode
from tiergate.s3.wire import http_date
from tiergate.writeback.recovery import doubt
from tiergate.writeback.sender import proof

log = get_logger(__name__)

COMMIT_ATTEMPTS_COUNT = 8

DOCUMENT_LIMIT_BYTES = 4 << 20

MANY = 1 << 30
"""More than can be pending."""

LISTINGS = frozenset({"ListObjects", "ListObjectsV2"})
"""Listings show what is pending; one that is forwarded, for a part that only the origin knows, must too."""

ATTRIBUTES = "GetObjectAttributes"
"""It names an object's ETag in its body."""

DELETIONS = frozenset({"DeleteObject", "DeleteObjects"})

READING_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class Through:
    """Writes and operations that the origin carries out."""

    def __init__(self, rooms: Rooms, outage: Outage, resolver: Resolver) -> None:
        self._rooms = rooms
        self._outage = outage
        self._resolver = resolver
        self.turn = Turn(rooms)

    # -- write-through of one object
    async def put(self, call: Call, described: Description, ground: Ground) -> Answer:
        """PutObject straight to the origin.

        Raises:
            OverloadedError: its turn did not come in time, or the origin failed in the middle.
        """
        size = call.body.size_bytes
        if size is None:
            raise OverloadedError("no room for a body of unknown length", **log_name(call.name))
        role = self._rooms.markers.role_of(call.name, size)
        async with self.turn.taken(call.name, role, ground.start_revision):
            self._rooms.metrics.through_writes.inc(1, "memory")
            headers = await self._put_now(call, described, ground, size, role)
        headers[ACK_HEADER] = ACK_ORIGIN
        return Answer(200, headers)

    async def _put_now(
        self, call: Call, described: Description, ground: Ground, size_bytes: int, role: Role
    ) -> dict[str, str]:
        """Send the body, commit, and say what the origin answered."""
        seen = await self._rooms.directory.get(call.name)
        now_s = self._rooms.clock.wall_s()
        stream = CheckedBody(call.body)
        draft = Version(
            new_uid(now_s), size_bytes, "", int(now_s), (), described.headers, described.metadata, described.tagging
        )
        condition = condition_of(call.name, seen, WriteConditions.of(call.params))
        try:
            answer = await self._rooms.origin.put_object(
                call.name, size_bytes, stream.pieces, upload_headers(draft, call), condition
            )
        except OriginRefusedError:
            raise
        except BaseException:
            await doubt(self._rooms.directory, call.name)
            raise
        intent = Intent(
            role,
            ground.start_revision,
            now_s,
            UNKNOWN_BASE,
            guard=seen.guard,
            conditional=ground.conditional,
        )
        await self.commit(call.name, self._version(draft, stream, answer), answer.etag, intent)
        # Not every origin repeats what it checked.
        checked = {f"{HEADER_PREFIX}{algorithm}": value for algorithm, value in stream.checksums.items()}
        return checked | dict(answer.headers)

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
            self._rooms.let_go(committed.replaced)
            self._rooms.wake()
            return
        raise OverloadedError("the key is written too often", **log_name(name))

    # -- forwarded operations
    async def forward(self, call: Call) -> Answer:
        """Pass a request on that concerns no object the gateway may hold. The wait for the answer to a reading one is
        bounded."""
        if call.target.key:
            call = await self._restated(call)
        if call.method not in READING_METHODS:
            return await forward(self._rooms, call)
        async with self._outage.bounded(call.target.bucket, key=call.target.key):
            return await forward(self._rooms, call)

    async def _known(self, name: ObjectName) -> Current | None:
        """The current version, unless it cannot be looked at without what the request brings (a customer's key)."""
        try:
            return await self._resolver.find(name)
        except OriginRefusedError:
            return None

    async def _restated(self, call: Call) -> Call:
        """The call with its conditions in terms of what the origin shows: clients know our ETags and times (P6).
        Conditions on a named version are the origin's own matter."""
        subjects = [("", call.name)] if call.query("versionId") is None else []
        subjects += [(COPY_SOURCE_PREFIX, name) for name in named_source(call, versions=False)]
        headers = call.headers
        for prefix, name in subjects:
            if not has_conditions(headers, prefix):
                continue
            current = await self._known(name)
            if current is not None and current.record.origin_etag:
                modified_s = current.version.modified_s
                headers = restated(headers, prefix, current.etags, current.record.origin_etag, modified_s)
        return replace(call, headers=headers)

    async def forward_any(self, call: Call) -> Answer:
        """Pass on a request of any kind, with what it needs settled first.

        Raises:
            RequestError: BucketNotEmpty, for the deletion of a bucket with un-persisted objects.
        """
        bucket, key = call.target.bucket, call.target.key
        if bucket and key:
            if call.operation in MAKES_VISIBLE:
                return await self.forward_write(call, [call.name, *renamed_sources(call)], named_source(call))
            answer = await self.forward_settled(call, [call.name, *named_source(call)])
            return await self._attributes(call, answer) if call.operation == ATTRIBUTES else answer
        if call.operation == "DeleteObjects":
            document = call.document or await call.body.read(DOCUMENT_LIMIT_BYTES)
            params = parse(call.operation, call.target, call.headers, document)
            names = [ObjectName(bucket, item["Key"]) for item in params["Delete"]["Objects"]]
            return await self.forward_settled(replace(call, document=document), names)
        if bucket and call.method == "DELETE" and not call.target.query:
            return await self._delete_bucket(call)
        if bucket and (call.query("versions") is not None or call.operation in LISTINGS):
            await self.turn.settle_prefix(bucket, call.query("prefix") or "")
        answer = await self.forward(call)
        if bucket and call.method not in READING_METHODS:
            await self._rooms.directory.forget_bucket(bucket)
        return answer

    async def _attributes(self, call: Call, answer: Answer) -> Answer:
        """The answer to GetObjectAttributes with the identity that GET and HEAD show (P6)."""
        if answer.status != 200 or isinstance(answer.body, bytes) or call.query("versionId") is not None:
            return answer
        current = await self._known(call.name)
        if current is None:
            return answer
        try:
            document = b"".join([bytes(piece) async for piece in answer.body.pieces()])
        finally:
            await answer.body.close()
        theirs, ours = (f"<ETag>{etag}</ETag>".encode() for etag in (current.record.origin_etag, current.version.etag))
        document = document.replace(theirs, ours)
        headers = answer.headers | {"content-length": str(len(document))}
        headers["last-modified"] = http_date(current.version.modified_s)
        return Answer(200, headers, document)

    async def _delete_bucket(self, call: Call) -> Answer:
        """DeleteBucket; of a bucket that is gone nothing is left here either."""
        rooms, bucket = self._rooms, call.target.bucket
        if any(write.kind is Kind.PUT for write in await rooms.directory.pending_under(bucket, "", MANY)):
            raise RequestError("BucketNotEmpty", "The bucket you tried to delete is not empty", bucket=bucket)
        await self.turn.settle_prefix(bucket, "")
        answer = await self.forward(call)
        await rooms.directory.forget_bucket(bucket)
        if answer.status < 300:
            for upload in await rooms.directory.list_uploads(bucket, ""):
                parts = await rooms.directory.abort_upload(upload.upload_id) or ()
                rooms.memory.drop(upload.upload_id, [part.body.uid for part in parts])
            for record in await rooms.directory.scan(bucket, "", "", MANY):
                rooms.let_go(await rooms.directory.forget(record.name, None))
        return answer

    async def forward_settled(self, call: Call, names: Sequence[ObjectName]) -> Answer:
        """Write back what is pending of `names`, pass the request on, then forget what it may have changed.

        Raises:
            OverloadedError: write-back did not finish in time.
        """
        if call.operation in DELETIONS and not names_versions(call):
            await self.turn.come_to_delete(names)
        else:
            await self.turn.settle(names)
        if call.method in READING_METHODS:
            return await self.forward(call)
        return await self._changing(call, names, AsyncExitStack())

    async def forward_write(
        self, call: Call, changed: Sequence[ObjectName], sources: Sequence[ObjectName] = ()
    ) -> Answer:
        """Pass on a request that makes the first of `changed` visible in the origin: it waits for the fence like any
        write. `sources` it only reads."""
        name = changed[0]
        start_revision = await self._rooms.directory.revision()
        await self.turn.settle([*sources, *changed[1:]])
        role = self._rooms.markers.role_of(name, call.body.size_bytes or 0)
        async with AsyncExitStack() as turn:
            await turn.enter_async_context(self.turn.taken(name, role, start_revision))
            return await self._changing(call, changed, turn.pop_all())

    async def _changing(self, call: Call, names: Sequence[ObjectName], turn: AsyncExitStack) -> Answer:
        """Pass a request on, forget what it may have changed, whatever became of it, and let go of its turn."""
        async with turn:
            turn.push_async_callback(self._forget, call, names)
            answer = await self.forward(call)
            answer.headers.setdefault(ACK_HEADER, ACK_ORIGIN)
            if answer.size_bytes is None and not isinstance(answer.body, bytes):
                # Its length unknown, the answer may have begun before the change was done.
                return replace(answer, body=SettledBody(answer.body, turn.pop_all().aclose))
            return answer

    async def _forget(self, call: Call, names: Sequence[ObjectName]) -> None:
        forgotten = []
        for name in names:
            version = await self._rooms.directory.forget(name, None)
            if version is not None:
                self._rooms.let_go(version)
                forgotten.append(name)
        self._rooms.wake()
        if call.operation not in DELETIONS:
            await self._learn(forgotten)

    async def _learn(self, names: Sequence[ObjectName]) -> None:
        """Know again at once what was known: listings show the identity of what is known, else the origin's (P6)."""
        for name in names:
            try:
                await self._resolver.find(name)
            except TiergateError as error:
                log.info("not known again", error=error, **log_name(name))


def names_versions(call: Call) -> bool:
    """Whether a deletion is of past versions: what is current stays."""
    return call.query("versionId") is not None or b"<VersionId>" in call.document


def renamed_sources(call: Call) -> list[ObjectName]:
    """The object that a RenameObject moves. Its key may come with the bucket's name before it: both readings count.

    https://docs.aws.amazon.com/AmazonS3/latest/API/API_RenameObject.html
    """
    header = call.headers.get("x-amz-rename-source")
    if not header:
        return []
    key, bucket = percent_decode(header).removeprefix("/"), call.target.bucket
    return [ObjectName(bucket, each) for each in {key, key.removeprefix(f"{bucket}/")} if each]


def named_source(call: Call, versions: bool = True) -> list[ObjectName]:
    """The source of a copy, which must be in the origin before the copy is done there; without `versions` not one of
    which a version is named."""
    header = call.headers.get("x-amz-copy-source")
    named = parse_copy_source(header) if header else None
    return [ObjectName(named[0], named[1])] if named and (versions or named[2] is None) else []


def upload_headers(version: Version, call: Call) -> dict[str, str]:
    """What the origin is told of a write-through: the object's own headers, what the client proves, our stamp."""
    headers = described(version, call.name)
    for name in call.headers:
        if name == "content-md5":
            headers[name] = call.headers[name]
        elif name.startswith(HEADER_PREFIX) and name.removeprefix(HEADER_PREFIX) in ALGORITHMS:
            headers |= proof(name.removeprefix(HEADER_PREFIX), call.headers[name])
    return headers


def condition_of(name: ObjectName, seen: Seen, conditions: WriteConditions) -> Condition:
    """A conditional write is decided on what is current here now; the origin must still hold just that.

    Raises:
        PreconditionError, NotFoundError: the condition does not hold.
    """
    if not conditions.any:
        return Condition.none()
    record = seen.record
    etags = Current(record, record.version).etags if record is not None and record.version is not None else None
    check_write(conditions.if_match, conditions.if_none_match, etags, name.bucket, name.key)
    return Condition.if_match(record.origin_etag) if record is not None else Condition.if_absent()
