"""Objects on their way: bytes go straight into the node's memory where it gives room, else over HTTP; what was not
acknowledged is kept, so that it can be sent elsewhere when the gateway is gone."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError

from tiergate_adapters.lacking import lacking, speaks_for_others
from tiergate_adapters.route import PERSIST_HEADER, UnreachableError, is_unreachable, log
from tiergate_adapters.slabs import MemoryFile, Room, Share, drop_share

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tiergate_adapters.route import Route

SMALL_BYTES = 1 << 20
"""An object up to this long is sent in one request: a grant would be one more."""

ROOM_BYTES = (16 << 20, 64 << 20)
"""How much room is asked for at a time: of an object whose length nobody said first the one, then the other."""

ROOM_SHARE = 16
"""A part takes at most this share of the node's memory, but never less than the first of `ROOM_BYTES`."""

LEAST_PART_BYTES = 5 << 20
"""S3's bound for all parts but the last."""

PART_BYTES = 64 << 20
"""What is sent over HTTP at a time."""

SENDING_COUNT = 2
"""Parts that are being sent while the next one is filled."""

UNSAID_COUNT = 4096
"""So many things that a node could not be told are told it later."""

LEASE_HEADER = "x-tiergate-lease"
BODY_HEADER = "x-tiergate-body"
SIZE_HEADER = "x-tiergate-size"
ACK_HEADER = "x-tiergate-ack"


class HeapRoom:
    """Room in this process's own memory, for what goes over HTTP."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._held = bytearray()

    @property
    def used_bytes(self) -> int:
        return len(self._held)

    def write(self, data: memoryview) -> int:
        """Take what there is room for; how much that is."""
        taken = min(len(data), self._limit_bytes - len(self._held))
        self._held += data[:taken]
        return taken

    def views(self) -> list[memoryview]:
        """What was written."""
        return [memoryview(self._held).toreadonly()] if self._held else []

    def body(self) -> bytearray:
        """What was written, as clients take it."""
        return self._held


@dataclass(frozen=True, slots=True)
class Asked:
    """What came of asking for room: `room`, or why there is none, the `code` of the answer or the `error` instead."""

    room: Room | None = None
    code: str = ""
    error: BotoCoreError | HTTPClientError | None = None


@dataclass(slots=True)
class SentPart:
    """A part that is full. `room`: None once its bytes were let go, being acknowledged. `done` gives its ETag."""

    number: int
    room: Room | HeapRoom | None
    done: Future[str] = field(default_factory=lambda: Future())


class Upload:
    """One object from its first byte to its last, under the `bucket` and `key`. One thread at a time."""

    def __init__(
        self, route: Route, bucket: str, key: str, size_bytes: int | None, metadata: Mapping[str, str]
    ) -> None:
        self._route = route
        self._named = {"Bucket": bucket, "Key": key}
        self._metadata = dict(metadata)
        self._is_marker = speaks_for_others(bucket, key)
        self._size_bytes = size_bytes
        self._upload_id = ""
        self._parts: list[SentPart] = []
        self._room: Room | HeapRoom = HeapRoom(SMALL_BYTES)
        self._granted: list[Room] = []
        self._ahead: Future[Asked] | None = None
        self._tags: list[tuple[Share, str]] = []
        self._share: Share | None = None
        self._may_share = True
        self._at_s3 = False
        self._written_bytes = 0
        self._pid = os.getpid()
        self.etag = ""
        self.ack = ""

    # -- writing

    def write(self, data: memoryview) -> None:
        """Take bytes.

        Raises:
            ClientError, BotoCoreError, UnreachableError: they cannot be sent anywhere.
        """
        self._check_process()
        self._written_bytes += len(data)
        while len(data):
            data = data[self._room.write(data) :]
            if len(data):
                self._next_room(len(data))

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise RuntimeError("an object is written by the process that began it")

    def _next_room(self, wanted_bytes: int) -> None:
        """Go on with more room, since what there was is full."""
        full = self._room
        if not self._parts and isinstance(full, HeapRoom) and full.used_bytes <= SMALL_BYTES:
            # It is no small object, so that its beginning moves to where the rest goes.
            self._room = self._room_for(full.used_bytes + wanted_bytes)
            for view in full.views():
                self._room.write(view)
            return
        self._send(full)
        self._room = self._room_for(wanted_bytes)

    def _room_for(self, wanted_bytes: int) -> Room | HeapRoom:
        return self._shared_room(wanted_bytes) or HeapRoom(PART_BYTES)

    def _shared_room(self, wanted_bytes: int) -> Room | None:
        """Room in the node's memory; None where there is none for us."""
        if not self._may_share or self._at_s3:
            return None
        self._share = share = self._share or self._route.share()
        if share is None:
            self._may_share = False
            self._route.note("memory", "the memory of the node cannot be shared, bytes are sent to it")
            return None
        ahead, self._ahead = self._ahead, None
        asked = ahead.result() if ahead is not None else Asked()
        if asked.room is None:  # Once more: a moment ago there may have been no room yet.
            asked = self._ask(share, *self._wish(share, wanted_bytes))
        if asked.error is not None:
            self._route.note_down(self._route.gateways()[0], asked.error)
            self._may_share = False
        elif asked.room is None:
            self._refused(share, asked.code)
        else:
            self._route.forget("memory")
            self._granted.append(asked.room)
            if self._left_bytes > 0:
                # While this is filled: laying room out, and mapping it, takes about as long.
                self._ahead = senders().submit(self._ask, share, *self._wish(share, 0))
        return asked.room

    @property
    def _left_bytes(self) -> int:
        """What there is no room for yet; 0 where nobody said how much it is, or it is more than was said."""
        return max(0, (self._size_bytes or 0) - sum(each.size_bytes for each in self._granted))

    def _wish(self, share: Share, wanted_bytes: int) -> tuple[int, str]:
        """How much room to ask for next, and the name to let go of it by."""
        size_bytes = max(ROOM_BYTES[min(len(self._granted), 1)], min(wanted_bytes, ROOM_BYTES[1]))
        if self._left_bytes:
            size_bytes = max(LEAST_PART_BYTES, min(ROOM_BYTES[1], self._left_bytes))
        tag = secrets.token_hex(8)
        self._tags.append((share, tag))  # At once: the answer may be lost.
        return min(size_bytes, max(ROOM_BYTES[0], share.memory.slab_bytes // ROOM_SHARE)), tag

    def _ask(self, share: Share, size_bytes: int, tag: str) -> Asked:
        """Ask for room. May run in a thread of its own."""
        query = {"x-tiergate-grant": tag, "size": str(size_bytes)}
        try:
            reply = self._route.ask("POST", *self._names, query=query, headers={LEASE_HEADER: share.token})
        except (BotoCoreError, HTTPClientError) as error:
            return Asked(error=error)
        document = reply.document()
        if document is None:
            return Asked(code=reply.code)
        extents = [(offset, length) for block in document["extents"] for offset, length in block]
        try:
            return Asked(Room(share, document["grant"], extents, size_bytes, tag))
        except (OSError, ValueError) as mapping:
            return Asked(code=f"it cannot be mapped: {mapping}")

    def _refused(self, share: Share, code: str) -> None:
        """No room for now, or none for us at all: what is acknowledged need not stay for our sake."""
        self._route.note("memory", f"the node gives no room in its memory ({code}), bytes are sent to it")
        self._may_share = False
        if code == "InvalidLease":
            drop_share(share)
            self._route.look(again=True)
        self._let_go(acknowledged_only=True)

    @property
    def _names(self) -> tuple[str, str]:
        return self._named["Bucket"], self._named["Key"]

    # -- sending

    def _send(self, room: Room | HeapRoom) -> None:
        """Have a full part sent, in the background."""
        self._wait_for_turn()
        if not self._upload_id:
            self._begin()
        part = SentPart(len(self._parts) + 1, room)
        self._parts.append(part)
        self._submit(part)

    def _submit(self, part: SentPart) -> None:
        part.done = senders().submit(self._sent, part, self._upload_id, self._at_s3)

    def _wait_for_turn(self) -> None:
        under_way = [part for part in self._parts if not part.done.done()]
        for part in under_way[: max(0, len(under_way) + 1 - SENDING_COUNT)]:
            part.done.exception()
        failed = next(
            (part.done.exception() for part in self._parts if part.done.done() and part.done.exception()), None
        )
        if failed is not None:
            self._move(failed)
        for part in self._parts:
            if part.done.done() and isinstance(part.room, HeapRoom) and not self._is_marker:
                part.room = None  # It is acknowledged. What is in the node's memory stays: it costs nothing more.

    def _begin(self) -> None:
        def create(client: Any) -> str:
            upload_id: str = client.create_multipart_upload(**self._named, Metadata=self._metadata)["UploadId"]
            return upload_id

        try:
            self._upload_id = self._call("an upload begins", create)
        except UnreachableError:
            if self._at_s3 or self._route.s3() is None:
                raise
            self._at_s3 = True
            self._upload_id = self._call("an upload begins", create)

    def _call(self, what: str, ask: Any) -> Any:
        what = f"s3://{self._named['Bucket']}/{self._named['Key']}: {what}"
        if self._at_s3:
            return self._route.at_s3(what, ask)
        if self._route.s3() is not None and all(map(self._route.is_down, self._route.gateways())):
            raise UnreachableError(f"{what}: no gateway answered a moment ago")
        return self._route.change(what, ask)

    def _sent(self, part: SentPart, upload_id: str, at_s3: bool) -> str:
        """Send one part; its ETag. Runs in a thread of its own."""
        room = part.room
        assert room is not None
        query = {"partNumber": str(part.number), "uploadId": upload_id}
        if isinstance(room, Room) and not at_s3:
            etag = self._put_room(room, query)
            if etag:
                return etag

        def send(client: Any) -> str:
            answer = client.upload_part(**self._named, UploadId=upload_id, PartNumber=part.number, Body=body_of(room))
            etag: str = answer["ETag"]
            return etag

        found: str = self._call(f"part {part.number} is sent", send)
        return found

    def _put_room(self, room: Room, query: dict[str, str]) -> str:
        """Have the node take what it gave room for; the ETag, empty if it does not."""
        headers = {LEASE_HEADER: room.share.token, BODY_HEADER: room.grant, SIZE_HEADER: str(room.used_bytes)}
        if self._route.persist is not None:
            headers[PERSIST_HEADER] = self._route.persist
        if not query:  # of an upload in parts, its beginning said so
            headers |= {f"x-amz-meta-{name}": value for name, value in self._metadata.items()}
        try:
            reply = self._route.ask("PUT", *self._names, query=query, headers=headers)
        except (BotoCoreError, HTTPClientError) as error:
            log.info("the gateway did not take a body from memory, it is sent: %s", error)
            return ""
        # Anybody else takes a request without a body for an empty one: what is sent then replaces that.
        if reply.is_done and reply.is_gateways and ACK_HEADER in reply.headers:
            self.ack = reply.headers[ACK_HEADER]
            return reply.headers["etag"]
        log.info("the gateway does not take a body from memory, it is sent: %s", reply.code)
        return ""

    # -- going elsewhere

    def _move(self, cause: BaseException) -> None:
        """Nobody took a part: begin anew with S3 itself, with all there is so far.

        Raises:
            BaseException: `cause`, if it does not say that nobody answers; or if bytes of acknowledged parts are gone.
        """
        if not is_gone(cause) or self._at_s3 or any(part.room is None for part in self._parts):
            raise cause
        if self._route.s3() is None:
            raise cause
        log.info("s3://%s/%s goes to S3 itself: %s", *self._names, cause)
        for part in self._parts:
            part.done.exception()
        self._abandon(self._upload_id)
        self._upload_id, self._at_s3 = "", True
        self._begin()
        for part in self._parts:
            self._submit(part)
            part.done.result()

    def _abandon(self, upload_id: str) -> None:
        """Abort an upload if anybody is there to hear it."""
        if not upload_id:
            return
        try:
            self._call(
                "an upload is aborted", lambda client: client.abort_multipart_upload(**self._named, UploadId=upload_id)
            )
        except (ClientError, BotoCoreError, UnreachableError) as error:
            log.info("an upload of s3://%s/%s is left behind: %s", *self._names, error)

    # -- the end

    def close(self) -> None:
        """Commit.

        Raises:
            RuntimeError: another process began it.
            ClientError, BotoCoreError, UnreachableError: it is not acknowledged.
        """
        self._check_process()
        if not self._parts:
            self.etag = self._put_whole()
        else:
            self._finish_parts()
        if self.ack:
            self._route.note_acknowledged(*self._names, self._written_bytes)
        self._let_go()

    def _finish_parts(self) -> None:
        if self._room.used_bytes:
            self._send(self._room)
        try:
            self.etag = self._completed()
        except Exception as error:
            self._move(error)
            self.etag = self._completed()

    def _put_whole(self) -> str:
        room = self._room
        if isinstance(room, Room):
            etag = self._put_room(room, {})
            if etag:
                return etag

        def put(client: Any) -> str:
            answer = client.put_object(**self._named, Metadata=self._metadata, Body=body_of(room))
            self.ack = ack_of(answer)
            etag: str = answer["ETag"]
            return etag

        try:
            found: str = self._call("it is put", put)
        except UnreachableError:
            if self._route.s3() is None:
                raise
            log.info("s3://%s/%s goes to S3 itself: no gateway answers", *self._names)
            self._at_s3 = True
            self._check_marker()
            found = self._call("it is put", put)
        return found

    def _completed(self) -> str:
        listed = [{"PartNumber": part.number, "ETag": part.done.result()} for part in self._parts]
        if self._at_s3:
            self._check_marker()

        def complete(client: Any) -> str:
            answer = client.complete_multipart_upload(
                **self._named, UploadId=self._upload_id, MultipartUpload={"Parts": listed}
            )
            self.ack = ack_of(answer)
            etag: str = answer["ETag"]
            return etag

        found: str = self._call("it is completed", complete)
        return found

    def _check_marker(self) -> None:
        """Before an object appears in S3 past the gateways, which would hold a marker back until its set is there.

        Raises:
            UnreachableError: it speaks for objects that S3 lacks: those are still a gateway's to bring there.
        """
        if not self._is_marker:
            return
        rooms = [part.room for part in self._parts] or [self._room]
        body = b"".join(bytes(view) for room in rooms if room is not None for view in room.views())
        known = self._route.acknowledged(self._named["Bucket"])
        missing = self._route.at_s3("its set is looked at", lambda client: lacking(client, *self._names, body, known))
        if missing:
            where = f"s3://{self._named['Bucket']}/{self._named['Key']}"
            raise UnreachableError(
                f"{where} is not put into S3 while no gateway answers: S3 lacks {missing[0]} of its set"
                f" ({len(missing)} in all)"
            )

    def drop(self) -> None:
        """Nobody will finish it: give its room back, without waiting for anything."""
        with contextlib.suppress(RuntimeError):  # While the interpreter ends nothing is begun; the lease ends too.
            self._let_go()

    def abort(self) -> None:
        """Give it up; what can be given back is. Only the process that began it can."""
        if self._pid != os.getpid():
            return
        for part in self._parts:
            part.done.exception()
        self._abandon(self._upload_id)
        self._let_go()

    def _let_go(self, *, acknowledged_only: bool = False) -> None:
        """Give up the room that was had, as well as it goes: what is left goes with this process."""
        kept: set[str] = set()
        for part in self._parts:
            if acknowledged_only and (not part.done.done() or part.done.exception()):
                kept |= {part.room.tag} if isinstance(part.room, Room) else set()
            elif isinstance(part.room, Room):
                part.room = None
        if acknowledged_only and isinstance(self._room, Room):
            kept.add(self._room.tag)
        going = [(share, "", tag) for share, tag in self._tags if tag not in kept]
        self._tags = [(share, tag) for share, tag in self._tags if tag in kept]
        ahead, self._ahead = self._ahead, None
        release(self._route, going, ahead)


def ack_of(answer: Any) -> str:
    """The rule under which a write was acknowledged; empty for an answer that is no gateway's."""
    found: str = answer["ResponseMetadata"]["HTTPHeaders"].get(ACK_HEADER, "")
    return found


def body_of(room: Room | HeapRoom) -> bytearray | MemoryFile:
    """What was written, as clients take it."""
    return room.body() if isinstance(room, HeapRoom) else MemoryFile(room.views())


def is_gone(error: BaseException) -> bool:
    """Whether an error says that the gateway is gone."""
    return isinstance(error, UnreachableError) or is_unreachable(error)


def release(route: Route, pins: Sequence[tuple[Share, str, str]], after: Future[Asked] | None = None) -> None:
    """Let go of pins (body, name) on the node's memory, `after` something that may still bring one of them. Where it
    cannot be said they go with this process. What this process has of its parent stays its parent's."""
    by_share: dict[int, tuple[Share, list[tuple[str, str]]]] = {}
    for share, body_uid, tag in pins:
        by_share.setdefault(id(share), (share, []))[1].append((body_uid, tag))
    for share, named in by_share.values():
        if share.is_ours:
            senders().submit(_released, route, share, named, after)


def _released(route: Route, share: Share, pins: Sequence[tuple[str, str]], after: Future[Asked] | None) -> None:
    if after is not None:
        wait((after,))  # Begun before this, so that a thread has it already.
    unsaid, share.unsaid = share.unsaid, []
    pins = [*unsaid, *pins]
    body = json.dumps({"pins": pins}).encode()
    try:
        route.ask("POST", query={"x-tiergate-release": ""}, headers={LEASE_HEADER: share.token}, body=body)
    except (BotoCoreError, HTTPClientError) as error:
        share.unsaid = [*share.unsaid, *pins][-UNSAID_COUNT:]
        log.info("the node was not told what is needed no more: %s", error)


_senders: ThreadPoolExecutor | None = None
_lock = threading.Lock()


def senders() -> ThreadPoolExecutor:
    """The threads of this process that send in the background."""
    global _senders
    with _lock:
        if _senders is None:
            _senders = ThreadPoolExecutor(8, "tiergate-send")
        return _senders


def _forget() -> None:
    global _senders, _lock
    _senders, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)
