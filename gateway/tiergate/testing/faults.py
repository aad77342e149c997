"""A proxy in front of an origin that keeps a record of every request and makes faults at chosen places.

It passes on the bytes as they come, so paths, signatures and bodies stay what the client sent. A fault is
addressed by operation, key and occurrence ("the third UploadPart of key k"), and waiting is done at gates,
not by sleeping."""

import asyncio
import hashlib
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import unquote, unquote_plus, urlsplit

from tiergate.clock import SystemClock
from tiergate.testing.relay import MAX_HEAD_BYTES, Head, read_body, read_head

WAIT_TIMEOUT_S = 30.0
"""How long a test waits at most for something that must happen."""

_SUB_RESOURCES = (
    ("POST", "uploads", "CreateMultipartUpload"),
    ("PUT", "uploadId", "UploadPart"),
    ("POST", "uploadId", "CompleteMultipartUpload"),
    ("DELETE", "uploadId", "AbortMultipartUpload"),
    ("GET", "uploadId", "ListParts"),
    ("GET", "uploads", "ListMultipartUploads"),
    ("GET", "list-type", "ListObjectsV2"),
    ("GET", "location", "GetBucketLocation"),
    ("GET", "versioning", "GetBucketVersioning"),
    ("PUT", "versioning", "PutBucketVersioning"),
    ("GET", "tagging", "GetObjectTagging"),
    ("PUT", "tagging", "PutObjectTagging"),
    ("POST", "delete", "DeleteObjects"),
)
_OBJECT = {"GET": "GetObject", "HEAD": "HeadObject", "PUT": "PutObject", "DELETE": "DeleteObject"}
_BUCKET = {"GET": "ListObjects", "HEAD": "HeadBucket", "PUT": "CreateBucket", "DELETE": "DeleteBucket"}
_COPIES = {"PutObject": "CopyObject", "UploadPart": "UploadPartCopy"}


@dataclass
class Seen:
    """One request. `raw_target` is its path and query byte for byte; times are monotonic seconds; `status`
    is what the client got, `origin_status` what the origin said (None: nothing yet, or nothing at all).
    `body_sha256` is of the payload as sent, an aws-chunked framing included."""

    number: int
    method: str
    raw_target: str
    bucket: str
    key: str
    query: dict[str, str]
    operation: str
    headers: dict[str, str]
    started_s: float
    finished_s: float | None = None
    status: int | None = None
    origin_status: int | None = None
    body_bytes: int = 0
    body_sha256: str = ""
    fault: "Action | None" = None

    @property
    def raw_path(self) -> str:
        """The path byte for byte."""
        return self.raw_target.partition("?")[0]


class Gate:
    """A barrier: requests wait at it until it is released. Usable from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_open = False
        self._reached = threading.Event()
        self._waiting: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}

    def release(self) -> None:
        """Let everybody through, now and later."""
        with self._lock:
            self._is_open = True
            for event, loop in self._waiting.items():
                loop.call_soon_threadsafe(event.set)

    def wait_reached(self) -> None:
        """Block until a request has come to the gate.

        Raises:
            TimeoutError: none came.
        """
        if not self._reached.wait(WAIT_TIMEOUT_S):
            raise TimeoutError("no request came to the gate")

    async def reached(self) -> None:
        """As `wait_reached`, without blocking the event loop."""
        await asyncio.to_thread(self.wait_reached)

    async def pass_through(self) -> None:
        """Wait at the gate."""
        event = asyncio.Event()
        with self._lock:
            self._reached.set()
            if self._is_open:
                return
            self._waiting[event] = asyncio.get_running_loop()
        try:
            await event.wait()
        finally:
            with self._lock:
                self._waiting.pop(event, None)


@dataclass(frozen=True)
class Answer:
    """Answer in the origin's place. `after_origin`: only once the origin has done it (its answer is lost).
    `early`: without reading the request's body, then close."""

    status: int
    code: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    after_origin: bool = False
    early: bool = False


@dataclass(frozen=True)
class Cut:
    """Reset the connection: before the origin saw the request, or once it has done it (the answer is
    lost)."""

    after_origin: bool = False


@dataclass(frozen=True)
class Truncate:
    """Close the connection after so many bytes of the answer's body."""

    body_bytes: int


@dataclass(frozen=True)
class Corrupt:
    """Invert the byte at this offset of the answer's body."""

    offset_bytes: int


@dataclass(frozen=True)
class Hold:
    """Wait at the gate, before the origin sees the request or before the client sees the answer; then go
    on."""

    gate: Gate
    after_origin: bool = False


Action = Answer | Cut | Truncate | Corrupt | Hold


@dataclass
class Rule:
    """A fault and where it happens: the `nth` request (from 1) that fits, and those after it until it has
    happened `times` (None: always)."""

    action: Action
    fits: Callable[[Seen], bool]
    nth: int = 1
    times: int | None = 1
    matched: int = 0

    def takes(self, seen: Seen) -> bool:
        """Count a request, and say whether the fault happens to it."""
        if not self.fits(seen):
            return False
        self.matched += 1
        after = self.matched - self.nth
        return after >= 0 and (self.times is None or after < self.times)


@dataclass
class _Exchange:
    """One request on its way through."""

    seen: Seen
    head: Head
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    digest: "hashlib._Hash" = field(default_factory=hashlib.sha256)


class FaultyOrigin:
    """The proxy, in a thread with its own event loop. A context manager; `endpoint` is for the gateway,
    `origin` is what stands behind it."""

    def __init__(self, origin: str) -> None:
        parts = urlsplit(origin)
        if parts.hostname is None or parts.port is None or parts.scheme != "http":
            raise ValueError(f"not a plain HTTP endpoint with a port: {origin}")
        self.origin = origin
        self._address = (parts.hostname, parts.port)
        self._clock = SystemClock()
        self._changed = threading.Condition()
        self._seen: list[Seen] = []
        self._rules: list[Rule] = []
        self._port = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name="faulty-origin", daemon=True)
        self._started = threading.Event()

    # -- for tests
    @property
    def endpoint(self) -> str:
        """The URL it listens at."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def requests(self) -> list[Seen]:
        """Every request so far, in the order their heads came."""
        with self._changed:
            return list(self._seen)

    def seen(self, operation: str, key: str | None = None) -> list[Seen]:
        """The requests of one operation, as AWS calls it, and key."""
        return [
            each for each in self.requests if each.operation == operation and (key is None or each.key == key)
        ]

    def forget(self) -> None:
        """Empty the record; rules stay."""
        with self._changed:
            self._seen.clear()

    def inject(
        self,
        action: Action,
        operation: str | None = None,
        key: str | None = None,
        method: str | None = None,
        where: Callable[[Seen], bool] | None = None,
        nth: int = 1,
        times: int | None = 1,
    ) -> Rule:
        """Make a fault happen to requests that fit all that is given. The first rule that takes a request
        has it."""

        def fits(seen: Seen) -> bool:
            return (
                operation in (None, seen.operation)
                and key in (None, seen.key)
                and method in (None, seen.method)
                and (where is None or where(seen))
            )

        rule = Rule(action, fits, nth, times)
        with self._changed:
            self._rules.append(rule)
        return rule

    def heal(self) -> None:
        """Remove all rules. Requests that wait at a gate wait on."""
        with self._changed:
            self._rules.clear()

    def wait_finished(self, operation: str, key: str | None = None, count: int = 1) -> None:
        """Block until `count` requests of an operation are through.

        Raises:
            TimeoutError: it does not happen.
        """

        def done() -> bool:
            fitting = [each for each in self._seen if each.operation == operation and key in (None, each.key)]
            return sum(each.finished_s is not None for each in fitting) >= count

        with self._changed:
            if not self._changed.wait_for(done, WAIT_TIMEOUT_S):
                raise TimeoutError(f"{operation} of {key!r} did not happen {count} times")

    # -- its life
    def __enter__(self) -> Self:
        self._thread.start()
        if not self._started.wait(WAIT_TIMEOUT_S):
            raise TimeoutError("the proxy did not start")
        return self

    def __exit__(self, *_: object) -> None:
        loop = self._loop
        if loop is not None:
            loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(WAIT_TIMEOUT_S)

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=MAX_HEAD_BYTES)
        self._port = server.sockets[0].getsockname()[1]
        self._started.set()
        await self._stopping.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await server.wait_closed()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._connection(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (head := await read_head(reader)) is not None:
                exchange = _Exchange(self._record(head), head, reader, writer)
                try:
                    goes_on = await self._exchange(exchange)
                except ConnectionError:
                    goes_on = False
                finally:
                    self._finish(exchange)
                if not goes_on:
                    break
        finally:
            writer.close()

    # -- the record
    def _record(self, head: Head) -> Seen:
        method, target, _ = head.start
        path, _, query = target.partition("?")
        bucket, _, key = path.removeprefix("/").partition("/")
        pairs = (piece.partition("=") for piece in query.split("&") if piece)
        values = {unquote_plus(name): unquote_plus(value) for name, _, value in pairs}
        headers = dict(head.headers)
        operation = operation_of(method, unquote(key), values, headers)
        with self._changed:
            number = len(self._seen) + 1
            seen = Seen(
                number,
                method,
                target,
                unquote(bucket),
                unquote(key),
                values,
                operation,
                headers,
                self._clock.monotonic_s(),
            )
            self._seen.append(seen)
            taken = [rule for rule in self._rules if rule.takes(seen)]
            seen.fault = taken[0].action if taken else None
            self._changed.notify_all()
        return seen

    def _finish(self, exchange: _Exchange) -> None:
        with self._changed:
            exchange.seen.body_sha256 = exchange.digest.hexdigest()
            exchange.seen.finished_s = self._clock.monotonic_s()
            self._changed.notify_all()

    # -- one request
    async def _exchange(self, exchange: _Exchange) -> bool:
        """Serve a request; whether the connection goes on."""
        fault = exchange.seen.fault
        if isinstance(fault, Hold) and not fault.after_origin:
            await fault.gate.pass_through()
        if isinstance(fault, Cut) and not fault.after_origin:
            return _reset(exchange.writer)
        if isinstance(fault, Answer) and not fault.after_origin:
            if fault.early:
                await self._answer(exchange, fault)
                return False
            await self._swallow(exchange)
            return await self._answer(exchange, fault)
        origin_reader, origin_writer = await asyncio.open_connection(*self._address, limit=MAX_HEAD_BYTES)
        try:
            return await self._through(exchange, origin_reader, origin_writer)
        finally:
            origin_writer.close()

    async def _swallow(self, exchange: _Exchange) -> None:
        if exchange.head.header("expect"):
            exchange.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        async for _, payload in read_body(exchange.reader, exchange.head, until_close=False):
            self._count(exchange, payload)

    def _count(self, exchange: _Exchange, payload: bytes) -> None:
        exchange.digest.update(payload)
        exchange.seen.body_bytes += len(payload)

    async def _answer(self, exchange: _Exchange, answer: Answer) -> bool:
        body = b""
        if answer.code and exchange.seen.method != "HEAD":
            body = f"<Error><Code>{answer.code}</Code><Message>injected</Message></Error>".encode()
        lines = [f"HTTP/1.1 {answer.status} Injected", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in answer.headers]
        exchange.seen.status = answer.status
        exchange.writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
        await exchange.writer.drain()
        return True

    async def _through(
        self, exchange: _Exchange, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        writer.write(exchange.head.raw)
        async with asyncio.TaskGroup() as group:
            sending = group.create_task(self._send_body(exchange, writer))
            goes_on = await self._relay_answer(exchange, reader)
            # An origin that answers early wants no more; the rest of the body would be taken for a request.
            is_whole = sending.done()
            sending.cancel()
        return goes_on and is_whole

    async def _send_body(self, exchange: _Exchange, writer: asyncio.StreamWriter) -> None:
        try:
            async for raw, payload in read_body(exchange.reader, exchange.head, until_close=False):
                self._count(exchange, payload)
                writer.write(raw)
                await writer.drain()
        except ConnectionError:
            # Whichever side left, the origin must see its request end.
            writer.close()

    async def _relay_answer(self, exchange: _Exchange, reader: asyncio.StreamReader) -> bool:
        seen, fault, writer = exchange.seen, exchange.seen.fault, exchange.writer
        while True:
            head = await read_head(reader)
            if head is None:
                return False
            seen.origin_status = int(head.start[1])
            if seen.origin_status >= 200:
                break
            writer.write(head.raw)
        has_body = seen.method != "HEAD" and seen.origin_status not in (204, 304)
        body = read_body(reader, head, until_close=True) if has_body else _nothing()
        if isinstance(fault, Cut | Answer):
            async for _ in body:
                pass  # The origin is done once its answer is whole.
            return _reset(writer) if isinstance(fault, Cut) else await self._answer(exchange, fault)
        if isinstance(fault, Hold) and fault.after_origin:
            await fault.gate.pass_through()
        seen.status = seen.origin_status
        writer.write(head.raw)
        offset = 0
        async for raw, payload in body:
            if isinstance(fault, Truncate) and offset + len(payload) > fault.body_bytes:
                writer.write(payload[: fault.body_bytes - offset])
                await writer.drain()
                return False
            writer.write(_damaged(raw, payload, offset, fault))
            offset += len(payload)
            await writer.drain()
        await writer.drain()
        has_length = not has_body or head.header("content-length") or head.header("transfer-encoding")
        return bool(has_length) and not head.is_last


def operation_of(method: str, key: str, query: dict[str, str], headers: dict[str, str]) -> str:
    """What AWS calls a request; `METHOD:sub-resource` for one that has no name here."""
    for needed, name, operation in _SUB_RESOURCES:
        if method == needed and name in query:
            return _COPIES.get(operation, operation) if "x-amz-copy-source" in headers else operation
    bare = [name for name in query if "-" not in name and query[name] == ""]
    if bare:
        return f"{method}:{bare[0]}"
    operation = (_OBJECT if key else _BUCKET).get(method, method)
    return _COPIES.get(operation, operation) if "x-amz-copy-source" in headers else operation


def _damaged(raw: bytes, payload: bytes, offset: int, fault: Action | None) -> bytes:
    if not isinstance(fault, Corrupt) or not offset <= fault.offset_bytes < offset + len(payload):
        return raw
    at = raw.index(payload) + fault.offset_bytes - offset
    return raw[:at] + bytes([raw[at] ^ 0xFF]) + raw[at + 1 :]


async def _nothing() -> AsyncIterator[tuple[bytes, bytes]]:
    for nothing in ():
        yield nothing


def _reset(writer: asyncio.StreamWriter) -> bool:
    """Close with a reset, not with an orderly end."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
    return False
