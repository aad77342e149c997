"""The routes for the other nodes of a cluster: take a body, give a block, pull bodies, look at what was replaced.

Each does no more the second time than it did the first, so a request that comes twice harms nothing.
"""

import asyncio
from collections.abc import Callable

from aiohttp import web

from tiergate.clock import Clock
from tiergate.config import Secret
from tiergate.directory.base import Directory
from tiergate.errors import InvariantError, MemoryFullError, RequestError
from tiergate.memory.memory import Memory, Receiving
from tiergate.model import BLOCK_CHECKSUM_BYTES, Body, Kind, Node, ObjectName, State
from tiergate.observe.logs import get_logger
from tiergate.observe.metrics import Metrics
from tiergate.replication.base import Notice
from tiergate.replication.fetching import Fetching
from tiergate.replication.roster import Roster
from tiergate.replication.sums import BlockSums, sum_of
from tiergate.replication.wire import (
    BODIES,
    HELD,
    HELD_BODIES_COUNT,
    MAX_DOCUMENT_BYTES,
    NOTICES,
    NOTICES_COUNT,
    PULL,
    PULL_BODIES_COUNT,
    Held,
    HeldAnswer,
    Notices,
    PeerFaultError,
    Pull,
    Pulled,
    Reason,
    Taken,
    encode,
)
from tiergate.s3.target import check_key
from tiergate.server.bodies import IdleWatch
from tiergate.server.peeredge import JSON, PeerEdge, named, number, reason_of

log = get_logger(__name__)


READ_BUFFER_BYTES = 1 << 20
"""How much of a body may wait in a connection before reading from the socket pauses."""

KEEP_ALIVE_S = 75.0
"""How long an idle connection is kept: longer than peers keep theirs, so that it is they who close it."""

PUSHES_COUNT, READS_COUNT, PULLS_COUNT, DOCUMENTS_COUNT = 1024, 1024, 16, 64
"""Requests of each kind that one process does at a time; one more is told to come later."""

SEND_BYTES = 1 << 20
COPIED_BYTES = 64 << 10
"""aiohttp waits for the socket only after more than this; smaller pieces are copied, so that a transport never holds
a view on memory that is no longer pinned."""


class Peers:
    """Answers the other nodes. Not reachable through the S3 port."""

    def __init__(
        self,
        memory: Memory,
        directory: Directory,
        fetching: Fetching,
        roster: Roster,
        clock: Clock,
        metrics: Metrics,
        secret: Secret | None,
        max_body_bytes: int,
        idle_timeout_s: float,
    ) -> None:
        """`secret` is that of the cluster; None where the listener speaks mutual TLS, or this machine alone reaches it.
        A peer that sends or takes nothing of a body for `idle_timeout_s` is given up."""
        self._memory = memory
        self._directory = directory
        self._fetching = fetching
        self._roster = roster
        self._metrics = metrics
        self._edge = PeerEdge(secret, roster.name, clock, metrics, idle_timeout_s)
        self._max_body_bytes = max_body_bytes
        self._idle_timeout_s = idle_timeout_s

    def runner(self, shutdown_timeout_s: float) -> web.AppRunner:
        """For a site that listens for peers; the caller sets it up and cleans it up, which waits for what is in
        progress for up to `shutdown_timeout_s`."""
        return web.AppRunner(
            self.app(),
            handle_signals=False,
            shutdown_timeout=shutdown_timeout_s,
            access_log=None,
            auto_decompress=False,
            handler_cancellation=True,
            keepalive_timeout=KEEP_ALIVE_S,
            read_bufsize=READ_BUFFER_BYTES,
        )

    def app(self) -> web.Application:
        """The routes."""
        app = web.Application(client_max_size=MAX_DOCUMENT_BYTES)
        body = BODIES + "{uid}"
        documents = asyncio.Semaphore(DOCUMENTS_COUNT)
        app.add_routes(
            [
                web.put(body, self._edge.guarded(self._put, asyncio.Semaphore(PUSHES_COUNT))),
                web.delete(body, self._edge.guarded(self._delete, documents)),
                web.get(body + "/blocks/{index}", self._edge.guarded(self._block, asyncio.Semaphore(READS_COUNT))),
                web.post(PULL, self._edge.guarded(self._pull, asyncio.Semaphore(PULLS_COUNT))),
                web.post(HELD, self._edge.guarded(self._held, documents)),
                web.post(NOTICES, self._edge.guarded(self._notices, documents)),
            ]
        )
        return app

    # -- bodies
    async def _put(self, request: web.Request, _: str) -> web.Response:
        """Take a body in. It is the node's from then on, dirty under its holder, until the directory says otherwise or
        the sweep finds that it never learnt of it."""
        uid, holder = named(request.match_info["uid"]), named(request.query.get("holder", ""))
        size_bytes = number(request.query["size"]) if "size" in request.query else None
        if (size_bytes or 0) > self._max_body_bytes:
            raise PeerFaultError(Reason.FULL, "the body is larger than bodies may be here")
        if size_bytes not in (None, request.content_length):
            raise PeerFaultError(Reason.BROKEN, "the body is not as long as was said")
        epoch = self._roster.me().epoch
        receiving = self._reception(uid, holder, size_bytes)
        if receiving is None:
            body = await self._compare(request, uid, holder)
        else:
            body = await self._receive(request, receiving)
            self._metrics.taken_bytes.inc(body.size_bytes)
        self._memory.confirm(holder, [uid])
        return document(Taken(body.size_bytes, body.blocks, epoch))

    def _reception(self, uid: str, holder: str, size_bytes: int | None) -> Receiving | None:
        """Room for a body; None if it is here.

        Raises:
            MemoryFullError: there is none.
            PeerFaultError: somebody is receiving it.
        """
        pin = self._memory.pin(uid)
        if pin is not None:
            pin.release()
            return None
        try:
            if size_bytes is None:
                return self._memory.receive_unsized(uid, holder, self._max_body_bytes)
            return self._memory.receive(uid, size_bytes, holder)
        except InvariantError:
            if self._memory.is_known(uid):
                raise PeerFaultError(Reason.BUSY, "somebody is receiving the body", uid=uid) from None
            raise

    async def _receive(self, request: web.Request, receiving: Receiving) -> Body:
        try:
            await self._pour(request, receiving.write)
            return receiving.seal()
        except BaseException:  # Cancelled too, as when the peer leaves: the room was reserved for nothing.
            receiving.abort()
            raise

    async def _compare(self, request: web.Request, uid: str, holder: str) -> Body:
        """Take a body that is here already: the answer is the same, if it is the same.

        Raises:
            PeerFaultError: it is another one, or no longer whole.
        """
        sums = BlockSums()
        await self._pour(request, sums.write)
        body = Body(uid, sums.size_bytes, sums.blocks())
        pin = self._memory.pin(uid)
        if pin is not None:
            with pin:
                is_same = pin.block(body.block_count) is None
                for index in range(body.block_count):
                    views = pin.block(index) if is_same else None
                    is_same = (
                        views is not None
                        and sum(map(len, views)) == body.block_size_bytes(index)
                        and sum_of(views) == body.block_checksum(index)
                    )
                    await asyncio.sleep(0)  # A large body takes a while; others want their turn.
                if is_same and self._memory.hold(uid, holder, dirty=True):
                    return body
        raise PeerFaultError(Reason.MISMATCH, "another body of this name is here", uid=uid)

    async def _pour(self, request: web.Request, write: Callable[[bytes], None]) -> None:
        """Write what arrives.

        Raises:
            PeerFaultError: it ends early, or comes too slowly.
        """
        content = request.content
        with IdleWatch(content, self._idle_timeout_s) as watch:
            while True:
                watch.waiting_since_s = watch.time_s()
                try:
                    data, _ = await content.readchunk()
                except TimeoutError as error:
                    raise PeerFaultError(Reason.SILENT, "the body does not come") from error
                except (web.RequestPayloadError, ConnectionError) as error:
                    raise PeerFaultError(Reason.BROKEN, "the body ended early") from error
                watch.waiting_since_s = None
                if not data and content.at_eof():
                    return
                write(data)

    async def _delete(self, request: web.Request, _: str) -> web.Response:
        """A holder lets go of a body that was never committed."""
        self._memory.drop(named(request.query.get("holder", "")), [named(request.match_info["uid"])])
        return web.Response(status=204)

    async def _block(self, request: web.Request, _: str) -> web.StreamResponse:
        uid, index = named(request.match_info["uid"]), number(request.match_info["index"][:9])
        pin = self._memory.pin(uid)
        if pin is None:
            raise PeerFaultError(Reason.MISSING, "the body is not here", uid=uid)
        with pin:
            views = pin.block(index)
            if views is None:
                raise PeerFaultError(Reason.MISSING, "the block is not here", uid=uid, index=index)
            return await self._send(request, views)

    async def _send(self, request: web.Request, views: list[memoryview]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
        response.content_length = sum(map(len, views))
        transport = request.transport
        if transport is None:
            raise PeerFaultError(Reason.UNREACHABLE, "the peer is gone")
        is_tls = transport.get_extra_info("sslcontext") is not None
        if not is_tls:
            # With no room for waiting bytes, a write returns once the kernel has them all. (TLS never resumes then.)
            transport.set_write_buffer_limits(high=0)
        try:
            async with asyncio.timeout(self._idle_timeout_s):
                await response.prepare(request)
                for view in views:
                    for start in range(0, len(view), SEND_BYTES):
                        piece = view[start : start + SEND_BYTES]
                        is_copied = is_tls or len(piece) <= COPIED_BYTES
                        await response.write(bytes(piece) if is_copied else piece)
                await response.write_eof()
        except BaseException:  # Cancelled too: whatever ended it, the pin goes with this request.
            if transport.get_write_buffer_size():
                transport.abort()  # What it has not sent may be memory that is not pinned any more.
            raise
        self._metrics.peer_served_bytes.inc(response.content_length)
        return response

    async def _held(self, request: web.Request, signed: str) -> web.Response:
        """Which bodies are here whole now."""
        asked = await self._edge.document(request, signed, Held)
        if len(asked.bodies) > HELD_BODIES_COUNT:
            raise PeerFaultError(Reason.BROKEN, "too many bodies")
        bodies = [Body(named(uid), size_bytes) for uid, size_bytes in asked.bodies]
        for body in bodies:
            check_shape(body, self._max_body_bytes)
        return document(HeldAnswer(tuple(map(self._memory.holds_whole, bodies))))

    # -- pulls
    async def _pull(self, request: web.Request, signed: str) -> web.StreamResponse:
        """Hold bodies that others have. As this may take long, a space goes out with each block."""
        pull = await self._edge.document(request, signed, Pull)
        if len(pull.bodies) > PULL_BODIES_COUNT or len(pull.at) != len(pull.bodies):
            raise PeerFaultError(Reason.BROKEN, "too many bodies, or not each with its sources")
        uids = [body.uid for body in pull.bodies if body.size_bytes]
        for body in pull.bodies:
            named(body.uid)
            check_shape(body, self._max_body_bytes)
        holder, epoch = named(pull.holder), self._roster.me().epoch
        response = web.StreamResponse(headers={"Content-Type": JSON})
        await response.prepare(request)

        async def show() -> None:
            async with asyncio.timeout(self._idle_timeout_s):
                await response.write(b" ")

        fault = ""
        try:
            for body, at in zip(pull.bodies, pull.at, strict=True):
                before = self._memory.holds_whole(body)
                await self._fetching.hold(body, holder, self._sources(at), show)
                self._metrics.pulled_bytes.inc(0 if before else body.size_bytes)
            # Once more in one go: the promise to keep them begins now for all.
            if not self._memory.hold_all(uids, holder, dirty=True):
                fault = Reason.BUSY.value
        except (PeerFaultError, MemoryFullError) as error:
            fault = reason_of(error).value
            log.debug("a pull failed", error=error, holder=holder)
        finally:
            self._memory.confirm(holder, uids)  # What is held is the node's, not this process'.
        await response.write_eof(encode(Pulled(epoch, fault)))
        return response

    def _sources(self, names: tuple[str, ...]) -> list[Node]:
        nodes = self._roster.live().nodes
        return [nodes[name] for name in names if name in nodes and name != self._roster.name]

    # -- notices
    async def _notices(self, request: web.Request, signed: str) -> web.Response:
        """Look at what others say was replaced or persisted, and let what nobody is owed be evicted."""
        said = await self._edge.document(request, signed, Notices)
        if len(said.notices) > NOTICES_COUNT:
            raise PeerFaultError(Reason.BROKEN, "too many notices")
        for notice in said.notices:
            check_object(notice.name)
            for uid in (notice.uid, *notice.body_uids):
                named(uid)
        for notice in said.notices:
            await self._look_at(notice)
        return web.Response(status=204)

    async def _look_at(self, notice: Notice) -> None:
        seen = await self._directory.get(notice.name)
        record, pending = seen.record, seen.pending
        if pending is not None and pending.kind is Kind.PUT and pending.uid == notice.uid:
            return
        current = record.version if record is not None and record.state is State.DIRTY else None
        if current is not None and current.uid == notice.uid:
            return
        kept: set[str] = set()
        if await self._directory.get_upload(notice.uid) is not None:
            kept = {part.body.uid for part in await self._directory.list_parts(notice.uid)}
        self._memory.clean(notice.uid, [uid for uid in notice.body_uids if uid not in kept])


def check_object(name: ObjectName) -> None:
    """Raises:
    PeerFaultError: there cannot be such an object.
    """
    try:
        check_key(name.key)
    except RequestError as error:
        raise PeerFaultError(Reason.BROKEN, "not a key") from error
    if not name.bucket or not name.key or "/" in name.bucket or "\0" in name.bucket:
        raise PeerFaultError(Reason.BROKEN, "not an object")


def check_shape(body: Body, max_body_bytes: int) -> None:
    """Raises:
    PeerFaultError: there cannot be such a body.
    """
    if not 0 <= body.size_bytes <= max_body_bytes:
        raise PeerFaultError(Reason.FULL, "the body is larger than bodies may be here")
    if len(body.blocks) not in (0, body.block_count * BLOCK_CHECKSUM_BYTES):
        raise PeerFaultError(Reason.BROKEN, "not as many checksums as blocks")


def document(answer: Taken | HeldAnswer) -> web.Response:
    """An answer as JSON."""
    return web.Response(body=encode(answer), content_type=JSON)
