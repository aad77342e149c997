"""An answer's body on its way to the client, out of memory that is pinned for it."""

import asyncio
from collections.abc import Mapping

from aiohttp import web

from tiergate.engine.calls import Outgoing
from tiergate.errors import TiergateError
from tiergate.observe.logs import get_logger
from tiergate.server.bodies import ClientGoneError, abort

log = get_logger(__name__)

SEND_BYTES = 1 << 20
COPIED_BYTES = 64 << 10
"""aiohttp waits for the socket only after more than this; smaller pieces are copied, so that a transport never holds
a view on memory that is no longer pinned."""


class BrokenOffError(ConnectionError):
    """The answer ended after its head: only closing the connection can still tell the client."""


async def send_body(
    request: web.BaseRequest,
    response: web.StreamResponse,
    body: Outgoing,
    idle_timeout_s: float,
    about: Mapping[str, object],
) -> int:
    """Send the head of an answer and, but for a HEAD request, its body, which is closed whatever happens; how many
    bytes went. `about`: what the log says of the request.

    Raises:
        ClientGoneError: nobody takes it any more.
        BrokenOffError: the rest of the body cannot be had.
    """
    sent_bytes = 0
    try:
        await response.prepare(request)
        if request.method != "HEAD":
            transport = request.transport
            if transport is None:
                raise ClientGoneError("connection lost")
            # With no room for waiting bytes, a write returns once the kernel has them all.
            transport.set_write_buffer_limits(high=0)
            async for piece in body.pieces():
                for start in range(0, len(piece), SEND_BYTES):
                    part = piece[start : start + SEND_BYTES]
                    async with asyncio.timeout(idle_timeout_s):
                        await response.write(part if len(part) > COPIED_BYTES else bytes(part))
                    sent_bytes += len(part)
        await response.write_eof()
    except ConnectionError as error:
        raise ClientGoneError("connection lost") from error
    except TimeoutError as error:
        log.info("the client stopped reading", **about)
        abort(request)
        raise ClientGoneError("the client stopped reading") from error
    except TiergateError as error:
        # The head is out: only a broken connection can still say that the body is not whole.
        log.error("answer broken off", error=f"{type(error).__name__}: {error}", **about)
        abort(request)
        raise BrokenOffError("answer broken off") from error
    finally:
        await body.close()
    return sent_bytes
