"""The aiohttp server of one process: connections, limits, and S3's own words where the parser refuses a request."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.helpers import set_exception
from aiohttp.http_exceptions import BadHttpMessage, LineTooLong
from aiohttp.web_protocol import RequestHandler, _ErrInfo

from tiergate.errors import OverloadedError, RequestError
from tiergate.observe.logs import get_logger
from tiergate.observe.metrics import Metrics
from tiergate.s3.errors import render_error

log = get_logger(__name__)

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

MAX_HEADERS = 1024
"""More than fit S3's 2 KiB of user metadata, were each of them a few bytes."""

READ_BUFFER_BYTES = 1 << 20
"""How much of a body may wait in a connection before reading from the socket pauses."""


LAST_S = 1.0
"""So long a request may take to end once it is told that its time is over."""

EXCESS_HEADER_TIMEOUT_S = 2.0
"""How long a connection beyond the bound may take to send the request that is answered 503."""


class S3Connection(RequestHandler):
    """A connection whose protocol errors are S3 documents."""

    __slots__ = ("_excess", "_node_id", "_s3_server")

    def __init__(self, server: "S3Server", node_id: str, **settings: Any) -> None:
        super().__init__(server, **settings)
        self._s3_server = server
        self._node_id = node_id
        self._excess: asyncio.TimerHandle | None = None

    @property
    def is_excess(self) -> bool:
        """Whether it is one more than there may be."""
        return self._excess is not None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        open_count = self._s3_server.count(1)
        limit = self._s3_server.connections_count
        if open_count > limit:
            # Only an answer tells a client to slow down; but those that wait for one are bounded too.
            wait_s = EXCESS_HEADER_TIMEOUT_S if open_count <= 2 * limit else 0.0
            self._excess = asyncio.get_running_loop().call_later(wait_s, self.force_close)
            self._s3_server.metrics.refused_connections.inc()

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._s3_server.count(-1)
        if self._excess is not None:
            self._excess.cancel()

    def data_received(self, data: bytes) -> None:
        closing, is_forced = self._close, self._force_close
        if closing and not is_forced and self._is_busy:
            # aiohttp would drop the rest of a body; what is pipelined behind it is not answered any more.
            self._close = False
            try:
                super().data_received(data)
            finally:
                self._close = True
        else:
            super().data_received(data)
        if self._messages and isinstance(self._messages[-1][0], _ErrInfo):
            self._break_body()

    @property
    def _is_busy(self) -> bool:
        """Whether a request has come that is not done with: the connection does not wait for the next one."""
        task = self._task_handler
        return bool(self._messages) or (self._waiter is None and task is not None and not task.done())

    async def shutdown(self, timeout: float | None = 15.0) -> None:  # noqa: ASYNC109 - as aiohttp has it
        """End an idle connection at once, a busy one after its request, and one that takes longer than `timeout` in the
        middle of it."""
        self.close()
        task = self._task_handler
        if task is not None:
            await asyncio.wait((task,), timeout=timeout)
        await super().shutdown(LAST_S)
        if task is not None:
            await asyncio.wait((task,), timeout=LAST_S)

    def _break_body(self) -> None:
        """Tell the reader of a body whose HTTP framing failed after its head had been handed out.

        aiohttp only queues the error, behind the request that waits for the rest of that body.
        """
        queued = [payload for message, payload in self._messages if not isinstance(message, _ErrInfo)]
        if queued:
            payload = queued[-1]
        elif self._current_request is not None:
            payload = self._current_request.content
        else:
            return
        if not payload.is_eof() and payload.exception() is None:
            set_exception(payload, web.RequestPayloadError("malformed chunked body"))
            payload.feed_eof()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What aiohttp calls for a request it cannot parse, or a handler that failed; closes the connection.

        Raises:
            ConnectionError: the answer had begun already.
        """
        if request.writer.output_size > 0:
            raise ConnectionError("the answer had begun already")
        error = protocol_error(status, exc, self.max_line_size)
        request_id = new_request_id()
        answer = render_error(error, "", request_id, self._node_id)
        response = web.Response(status=answer.status, headers=answer.headers, body=answer.body)
        response.headers.update(standard_headers(request_id, self._node_id))
        response.force_close()
        if isinstance(error, RequestError):
            log.info("refused", code=error.code, reason=error.message)
        else:
            log.error("a handler failed", error=f"{type(error).__name__}: {error}")
        return response


def new_request_id() -> str:
    """A fresh request id, of the form S3's have."""
    return secrets.token_hex(8).upper()


def standard_headers(request_id: str, node_id: str) -> dict[str, str]:
    """What every answer carries."""
    return {"x-amz-request-id": request_id, "x-amz-id-2": node_id, "Server": "tiergate"}


def protocol_error(status: int, exc: BaseException | None, line_limit_bytes: int) -> Exception:
    """S3's word for what the HTTP parser refuses."""
    if isinstance(exc, LineTooLong):
        limit_bytes = exc.args[1] if exc.args else line_limit_bytes
        return header_too_large() if limit_bytes != line_limit_bytes else RequestError("InvalidURI")
    if isinstance(exc, BadHttpMessage) or status < 500:
        return RequestError("BadRequest", "An error occurred when parsing the HTTP request.")
    return exc if isinstance(exc, Exception) else RuntimeError("handler failed")


def header_too_large() -> RequestError:
    """S3's word for too much before the body."""
    return RequestError("RequestHeaderSectionTooLarge", "Your request header section exceeds the maximum size.")


class S3Server(web.Server):
    """Makes `S3Connection`s."""

    def __init__(
        self,
        handler: Handler,
        node_id: str,
        metrics: Metrics,
        *,
        max_header_bytes: int,
        idle_timeout_s: float,
        connections_count: int,
    ) -> None:
        """`connections_count` connections are served at a time. One beyond it is answered 503 SlowDown and closed."""
        super().__init__(self._admitted, handler_cancellation=True)
        self._handler = handler
        self._node_id = node_id
        self._open_count = 0
        self.metrics = metrics
        self.connections_count = connections_count
        self._connection_settings: dict[str, Any] = {
            "auto_decompress": False,
            "max_line_size": max_header_bytes,
            "max_field_size": max_header_bytes + 1,  # another number, to tell which of the two was too long
            "max_headers": MAX_HEADERS,
            "read_bufsize": READ_BUFFER_BYTES,
            "keepalive_timeout": idle_timeout_s,
            "access_log": None,
        }

    def __call__(self) -> S3Connection:
        return S3Connection(self, self._node_id, loop=self._loop, **self._connection_settings)

    def count(self, change: int) -> int:
        """Note that a connection was opened or closed; how many there are now."""
        self._open_count += change
        self.metrics.active_connections.inc(change)
        return self._open_count

    async def _admitted(self, request: web.BaseRequest) -> web.StreamResponse:
        if not (isinstance(request.protocol, S3Connection) and request.protocol.is_excess):
            return await self._handler(request)
        request_id = new_request_id()
        log.info("refused", code="SlowDown", reason="too many connections", request_id=request_id)
        error = OverloadedError("too many connections")
        answer = render_error(error, request.rel_url.raw_path, request_id, self._node_id)
        response = web.Response(status=answer.status, headers=answer.headers, body=answer.body)
        response.headers.update(standard_headers(request_id, self._node_id))
        response.force_close()
        return response
