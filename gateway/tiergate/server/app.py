"""The aiohttp server of one process: connections, limits, and S3's own words where the parser refuses a request."""

import re
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage, LineTooLong
from aiohttp.web_protocol import RequestHandler

from tiergate.errors import RequestError
from tiergate.s3.errors import render_error

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

READ_BUFFER_BYTES = 1 << 20
"""How much of a body may wait in a connection before reading from the socket pauses."""


class S3Connection(RequestHandler):
    """A connection whose protocol errors are S3 documents."""

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
        error = protocol_error(status, exc)
        answer = render_error(error, "", secrets.token_hex(8).upper(), "tiergate")
        response = web.Response(status=answer.status, headers=answer.headers, body=answer.body)
        response.force_close()
        return response


def protocol_error(status: int, exc: BaseException | None) -> Exception:
    """S3's word for what the HTTP parser refuses."""
    if isinstance(exc, LineTooLong):
        if re.search(r"header|field", str(exc.message), re.I):
            return RequestError(
                "RequestHeaderSectionTooLarge", "Your request header section exceeds the maximum size."
            )
        return RequestError("InvalidURI", "Couldn't parse the specified URI.")
    if isinstance(exc, BadHttpMessage) or status < 500:
        return RequestError("BadRequest", "An error occurred when parsing the HTTP request.")
    return exc if isinstance(exc, Exception) else RuntimeError("handler failed")


class S3Server(web.Server):
    """Makes `S3Connection`s."""

    def __init__(self, handler: Handler, max_header_bytes: int, idle_timeout_s: float) -> None:
        super().__init__(handler, handler_cancellation=True)
        self._connection_settings: dict[str, Any] = {
            "auto_decompress": False,
            "max_line_size": max_header_bytes,
            "max_field_size": max_header_bytes,
            "read_bufsize": READ_BUFFER_BYTES,
            "keepalive_timeout": idle_timeout_s,
            "access_log": None,
        }

    def __call__(self) -> S3Connection:
        return S3Connection(self, loop=self._loop, **self._connection_settings)
