"""A proxy in front of an origin that keeps a record of every request and makes faults at chosen places.

It passes on the bytes as they come, so paths, signatures and bodies stay what the client sent. A fault is
addressed by operation, key and occurrence ("the third UploadPart of key k"), and waiting is done at gates,
not by sleeping."""

import asyncio
import re
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Self
from urllib.parse import unquote, unquote_plus, urlsplit

from tiergate.clock import SystemClock
from tiergate.testing.relay import MAX_HEAD_BYTES, Head, read_body, read_head
from tiergate.testing.rules import (
    WAIT_TIMEOUT_S,
    Action,
    Answer,
    Corrupt,
    Cut,
    Hold,
    Rule,
    Seen,
    Slow,
    Truncate,
    operation_of,
)

_UPLOAD_ID = re.compile(rb"<UploadId>([^<]+)</UploadId>")
_ETAG = re.compile(rb"<ETag>(?:&quot;|&#34;|\")?([^<&\"]+)")
_TELLING = ("CreateMultipartUpload", "CompleteMultipartUpload", "CopyObject")
"""Operations whose answer's body says what the record wants to know."""


@dataclass
class _Exchange:
    """One request on its way through."""

    seen: Seen
    head: Head
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class FaultyOrigin:
    """The proxy, in a thread with its own event loop. A context manager; `endpoint` is for the gateway,
    `origin` is what stands behind it, `host` and `port` where it listens (0: any port)."""

    TAKES_ALL = False
    """Whether a connection whose request was answered early goes on, after the rest of its body; else it ends."""

    def __init__(self, origin: str, host: str = "127.0.0.1", port: int = 0) -> None:
        self.origin = origin
        self._address = address_of(origin)
        self._host = host
        self._clock = SystemClock()
        self._changed = threading.Condition()
        self._seen: list[Seen] = []
        self._rules: list[Rule] = []
        self._port = port
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name="faulty-origin", daemon=True)
        self._started = threading.Event()
        self._stopping = asyncio.Event()

    # -- for tests
    @property
    def endpoint(self) -> str:
        """The URL it listens at."""
        return f"http://{self._host}:{self._port}"

    @property
    def requests(self) -> list[Seen]:
        """Every request so far, in the order their heads came."""
        with self._changed:
            return list(self._seen)

    def seen(self, operation: str, key: str | None = None) -> list[Seen]:
        """The requests of one operation, as AWS calls it, and key."""
        return [each for each in self.requests if each.operation == operation and (key is None or each.key == key)]

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
        server = await asyncio.start_server(self._accept, self._host, self._port, limit=MAX_HEAD_BYTES)
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
                upload_id=values.get("uploadId", ""),
            )
            self._seen.append(seen)
            taken = [rule for rule in self._rules if rule.takes(seen)]
            seen.fault = taken[0].action if taken else None
            self._changed.notify_all()
        return seen

    def _finish(self, exchange: _Exchange) -> None:
        with self._changed:
            exchange.seen.finished_s = self._clock.monotonic_s()
            self._changed.notify_all()

    # -- one request
    async def _exchange(self, exchange: _Exchange) -> bool:
        """Serve a request; whether the connection goes on."""
        fault = exchange.seen.fault
        if isinstance(fault, Hold) and not fault.after_origin:
            await fault.gate.pass_through()
        if isinstance(fault, Slow):
            await self._clock.sleep(fault.seconds)
        if isinstance(fault, Cut) and not fault.after_origin:
            return _reset(exchange.writer)
        if isinstance(fault, Answer) and not fault.after_origin:
            if fault.early:
                await self._answer(exchange, fault)
                return False
            await self._swallow(exchange)
            return await self._answer(exchange, fault)
        origin_reader, origin_writer = await asyncio.open_connection(*self._target(exchange.seen), limit=MAX_HEAD_BYTES)
        try:
            return await self._through(exchange, origin_reader, origin_writer)
        finally:
            origin_writer.close()

    def _target(self, seen: Seen) -> tuple[str, int]:
        """Where a request goes on to."""
        return self._address

    async def _swallow(self, exchange: _Exchange) -> None:
        if exchange.head.header("expect"):
            exchange.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        async for _, payload in read_body(exchange.reader, exchange.head, until_close=False):
            self._count(exchange, payload)
        exchange.seen.is_whole = True

    def _count(self, exchange: _Exchange, payload: bytes) -> None:
        exchange.seen.digest.update(payload)
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

    async def _through(self, exchange: _Exchange, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        writer.write(exchange.head.raw)
        sending = asyncio.get_running_loop().create_task(self._send_body(exchange, writer))
        try:
            goes_on = await self._relay_answer(exchange, reader)
            if goes_on and self.TAKES_ALL:
                await sending
            is_whole = sending.done() or (str(exchange.seen.body_bytes) == exchange.head.header("content-length"))
        finally:
            # An origin that answers early wants no more of the body.
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        return goes_on and is_whole

    async def _send_body(self, exchange: _Exchange, writer: asyncio.StreamWriter) -> None:
        try:
            async for raw, payload in read_body(exchange.reader, exchange.head, until_close=False):
                self._count(exchange, payload)
                writer.write(raw)
                await writer.drain()
            exchange.seen.is_whole = True
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
                seen.origin_etag = head.header("etag").strip('"')
                break
            writer.write(head.raw)
        has_body = seen.method != "HEAD" and seen.origin_status not in (204, 304)
        body = read_body(reader, head, until_close=True) if has_body else _nothing()
        if seen.operation in _TELLING and seen.origin_status == 200:
            body = _noting(seen, body)
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


def address_of(endpoint: str) -> tuple[str, int]:
    """Host and port of a URL.

    Raises:
        ValueError: it is not plain HTTP, or names no port.
    """
    parts = urlsplit(endpoint)
    if parts.hostname is None or parts.port is None or parts.scheme != "http":
        raise ValueError(f"not a plain HTTP endpoint with a port: {endpoint}")
    return parts.hostname, parts.port


async def _noting(seen: Seen, body: AsyncIterator[tuple[bytes, bytes]]) -> AsyncIterator[tuple[bytes, bytes]]:
    """Pass on an answer, and note the upload and the ETag that it tells."""
    whole = b""
    async for raw, payload in body:
        whole += payload
        if found := _UPLOAD_ID.search(whole):
            seen.upload_id = found[1].decode()
        if found := _ETAG.search(whole):
            seen.origin_etag = found[1].decode()
        yield raw, payload


def _damaged(raw: bytes, payload: bytes, offset: int, fault: Action | None) -> bytes:
    if not isinstance(fault, Corrupt) or not offset <= fault.offset_bytes < offset + len(payload):
        return raw
    at = raw.index(payload) + fault.offset_bytes - offset
    return raw[:at] + bytes([raw[at] ^ 0xFF]) + raw[at + 1 :]


async def _nothing() -> AsyncIterator[tuple[bytes, bytes]]:
    return
    yield b"", b""


def _reset(writer: asyncio.StreamWriter) -> bool:
    """Close with a reset, not with an orderly end."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
    return False
