"""The one way in and out of the routes for other nodes: who asks, how many at a time, and how a refusal looks."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from aiohttp import web

from tiergate.clock import Clock
from tiergate.config import Secret
from tiergate.errors import InvariantError, MemoryFullError, OverloadedError, RequestError, TiergateError
from tiergate.observe.logs import get_logger
from tiergate.observe.metrics import Metrics
from tiergate.replication.auth import digest, verify
from tiergate.replication.wire import Fault, PeerFaultError, Reason, decode, encode

log = get_logger(__name__)

T = TypeVar("T")

JSON = "application/json"

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")

STATUSES = {
    Reason.FULL: 507,
    Reason.REFUSED: 403,
    Reason.BUSY: 503,
    Reason.MISSING: 404,
    Reason.MISMATCH: 409,
    Reason.BROKEN: 400,
    Reason.SILENT: 408,
}


class PeerEdge:
    """What all routes have in common."""

    def __init__(
        self, secret: Secret | None, own_name: str, clock: Clock, metrics: Metrics, idle_timeout_s: float
    ) -> None:
        self._secret = secret
        self._own_name = own_name
        self._clock = clock
        self._metrics = metrics
        self._idle_timeout_s = idle_timeout_s

    def guarded(
        self, handler: Callable[[web.Request, str], Awaitable[web.StreamResponse]], slots: asyncio.Semaphore
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """The one way in and out of a route. What was signed of the body is the handler's to look at."""

        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                signed = self._authenticated(request)
                if slots.locked():
                    raise PeerFaultError(Reason.BUSY, "too many requests of this kind")
                async with slots:
                    answer = await handler(request, signed)
                log.debug("done for a peer", method=request.method, target=request.raw_path, status=answer.status)
                return answer
            except (TiergateError, web.HTTPRequestEntityTooLarge) as error:
                return self._refusal(request, error)
            except (ConnectionError, TimeoutError) as error:
                log.debug("a peer went away", error=error, method=request.method, target=request.raw_path)
                if request.transport is not None and not request.transport.is_closing():
                    request.transport.abort()
                return web.Response(status=408)  # Nobody gets it; aiohttp takes an error for one of the handler's.

        return handle

    def _authenticated(self, request: web.Request) -> str:
        """What is signed of the body.

        Raises:
            RequestError: it is not from a node of the cluster.
        """
        if self._secret is None:
            return ""
        header = request.headers.get("Authorization", "")
        try:
            signable = verify(
                self._secret, header, request.method, request.raw_path, self._own_name, self._clock.wall_s()
            )
        except RequestError:
            self._metrics.refused_peers.inc()
            raise
        return signable.payload

    def _refusal(self, request: web.Request, error: Exception) -> web.Response:
        reason = reason_of(error)
        if isinstance(error, InvariantError):
            self._metrics.broken_invariants.inc()
            log.exception("internal error", error=error, method=request.method, target=request.raw_path)
        else:
            log.debug("refused a peer", error=error, reason=reason, method=request.method, target=request.raw_path)
        status = 500 if isinstance(error, InvariantError) else STATUSES.get(reason, 500)
        answer = web.Response(status=status, body=encode(Fault(reason, str(error))), content_type=JSON)
        if not request.content.is_eof():
            answer.force_close()  # The rest of a body that nobody wants is not worth reading.
        return answer

    async def document(self, request: web.Request, signed: str, kind: type[T]) -> T:
        """A request's body. `signed` is what was signed of it.

        Raises:
            PeerFaultError: it is not what it should be, or does not come.
            RequestError: it is not what was signed.
        """
        try:
            async with asyncio.timeout(self._idle_timeout_s):
                data = await request.read()
        except TimeoutError as error:
            raise PeerFaultError(Reason.SILENT, "the request does not come") from error
        except (web.RequestPayloadError, ConnectionError) as error:
            raise PeerFaultError(Reason.BROKEN, "the request ended early") from error
        if self._secret is not None and signed != digest(data):
            self._metrics.refused_peers.inc()
            raise RequestError("AccessDenied", "the request is not what was signed")
        try:
            return decode(data, type=kind)
        except msgspec.DecodeError as error:
            raise PeerFaultError(Reason.BROKEN, "the request makes no sense") from error


def named(text: str) -> str:
    """A name of a body or of a holder.

    Raises:
        PeerFaultError: it cannot be one.
    """
    if not _NAME.fullmatch(text):
        raise PeerFaultError(Reason.BROKEN, "not a name")
    return text


def number(text: str) -> int:
    """A count in a URL.

    Raises:
        PeerFaultError: it is none.
    """
    if not (text.isascii() and text.isdigit() and len(text) <= 15):
        raise PeerFaultError(Reason.BROKEN, "not a number")
    return int(text)


def reason_of(error: Exception) -> Reason:
    """What a peer is told of an error."""
    match error:
        case PeerFaultError():
            return error.reason
        case MemoryFullError():
            return Reason.FULL
        case OverloadedError():
            return Reason.BUSY
        case RequestError():
            return Reason.REFUSED
        case _:
            return Reason.BROKEN
