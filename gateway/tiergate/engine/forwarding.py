"""Forwarded operations: what the gateway does not do itself, the origin does, at the right moment (promises P1 and P4).

What they need is written back first; what they change is forgotten here; what they make visible passes the fence.
"""

from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from functools import partial

from tiergate.engine.acks import ACK_HEADER, ACK_ORIGIN
from tiergate.engine.calls import Answer, Call, read_whole
from tiergate.engine.current import Current, Resolver
from tiergate.engine.lasting import SettledBody
from tiergate.engine.outage import Outage
from tiergate.engine.owned import MAKES_VISIBLE
from tiergate.engine.relay import relay
from tiergate.engine.rooms import Rooms
from tiergate.engine.turn import Turn
from tiergate.errors import OriginRefusedError, RequestError
from tiergate.model import Kind, ObjectName, Role
from tiergate.s3.conditions import COPY_SOURCE_PREFIX, has_conditions, restated
from tiergate.s3.copysource import parse_copy_source
from tiergate.s3.operations import parse
from tiergate.s3.target import percent_decode
from tiergate.s3.wire import http_date

DOCUMENT_LIMIT_BYTES = 4 << 20

MANY = 1 << 30
"""More than can be pending."""

LISTINGS = frozenset({"ListObjects", "ListObjectsV2"})
"""Listings show what is pending; one that is forwarded, for a part that only the origin knows, must too."""

ATTRIBUTES = "GetObjectAttributes"
"""It names an object's ETag in its body."""

DELETIONS = frozenset({"DeleteObject", "DeleteObjects"})

READING_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class Forwarding:
    """Passes requests on."""

    def __init__(self, rooms: Rooms, outage: Outage, resolver: Resolver, turn: Turn) -> None:
        self._rooms = rooms
        self._outage = outage
        self._resolver = resolver
        self.turn = turn

    async def plain(self, call: Call) -> Answer:
        """Pass a request on that concerns no object the gateway may hold. The wait for the answer to a reading one is
        bounded."""
        if call.target.key:
            call = await self._restated(call)
        if call.method not in READING_METHODS:
            return await relay(self._rooms, call)
        async with self._outage.bounded(call.target.bucket, key=call.target.key):
            return await relay(self._rooms, call)

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

    async def any(self, call: Call) -> Answer:
        """Pass on a request of any kind, with what it needs settled first.

        Raises:
            RequestError: BucketNotEmpty, for the deletion of a bucket with un-persisted objects.
        """
        bucket, key = call.target.bucket, call.target.key
        if bucket and key:
            if call.operation in MAKES_VISIBLE:
                return await self.write(call, [call.name, *renamed_sources(call)], named_source(call))
            answer = await self.settled(call, [call.name, *named_source(call)])
            return await self._attributes(call, answer) if call.operation == ATTRIBUTES else answer
        if call.operation == "DeleteObjects":
            document = call.document or await read_whole(call.body, DOCUMENT_LIMIT_BYTES)
            params = parse(call.operation, call.target, call.headers, document)
            names = [ObjectName(bucket, item["Key"]) for item in params["Delete"]["Objects"]]
            return await self.settled(replace(call, document=document), names)
        if bucket and call.method == "DELETE" and not call.target.query:
            return await self._delete_bucket(call)
        if bucket and (call.query("versions") is not None or call.operation in LISTINGS):
            await self.turn.settle_prefix(bucket, call.query("prefix") or "")
        answer = await self.plain(call)
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
        answer = await self.plain(call)
        await rooms.directory.forget_bucket(bucket)
        if answer.status < 300:
            for upload in await rooms.directory.list_uploads(bucket, ""):
                parts = await rooms.directory.abort_upload(upload.upload_id) or ()
                rooms.drop_parts(upload.name, upload.upload_id, parts)
            for record in await rooms.directory.scan(bucket, "", "", MANY):
                rooms.let_go(await rooms.directory.forget(record.name, None))
        return answer

    async def settled(self, call: Call, names: Sequence[ObjectName]) -> Answer:
        """Write back what is pending of `names`, pass the request on, then forget what it may have changed.

        Raises:
            OverloadedError: write-back did not finish in time.
        """
        if call.operation in DELETIONS:
            await self.turn.come_to_delete(names, past=named_versions(call))
        else:
            await self.turn.settle(names)
        if call.method in READING_METHODS:
            return await self.plain(call)
        return await self._changing(call, names, AsyncExitStack())

    async def write(self, call: Call, changed: Sequence[ObjectName], sources: Sequence[ObjectName] = ()) -> Answer:
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
            answer = await self.plain(call)
            answer.headers.setdefault(ACK_HEADER, ACK_ORIGIN)
            if answer.size_bytes is None and answer.status != 204 and not isinstance(answer.body, bytes):
                # Its length unknown, the answer may have begun before the change was done. (A 204 ends with its head.)
                return replace(answer, body=SettledBody(answer.body, turn.pop_all().aclose))
            return answer

    async def _forget(self, call: Call, names: Sequence[ObjectName]) -> None:
        for name in names:
            version = await self._rooms.directory.forget(name, None)
            if version is not None:
                self._rooms.let_go(version)
            is_marker = self._rooms.markers.role_of(name, 0) is Role.MARKER
            if call.operation not in DELETIONS and (version is not None or is_marker):
                await self.turn.or_later(partial(self._learnt, name))
        self._rooms.wake()

    async def _learnt(self, name: ObjectName) -> bool:
        """Know at once what was known before, as listings show the identity of what is known, else the origin's (P6);
        and every marker, as it must be withdrawn before a member of its set changes (P4)."""
        with suppress(OriginRefusedError):  # It cannot be looked at without what the request brought.
            await self._resolver.find(name)
        return True


def named_versions(call: Call) -> set[ObjectName]:
    """The keys of which a deletion names a version: the current one may be meant, or stay."""
    if call.operation == "DeleteObject":
        return {call.name} if call.query("versionId") is not None else set()
    items = parse(call.operation, call.target, call.headers, call.document)["Delete"]["Objects"]
    return {ObjectName(call.target.bucket, item["Key"]) for item in items if item.get("VersionId")}


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
