"""Requests to peers, over one pool of connections. Everything that goes wrong becomes a `PeerFaultError`."""

import secrets
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from aiohttp import (
    ClientConnectorError,
    ClientError,
    ClientResponse,
    ClientSession,
    ClientTimeout,
    ConnectionTimeoutError,
    DummyCookieJar,
    TCPConnector,
)
from yarl import URL

from tiergate.clock import Clock
from tiergate.config import Secret
from tiergate.model import Body, Node, ObjectName
from tiergate.observe.metrics import Metrics
from tiergate.replication.auth import STREAMED, Signable, authorization, digest
from tiergate.replication.base import Notice
from tiergate.replication.push import Push
from tiergate.replication.wire import (
    HELD,
    MAX_DOCUMENT_BYTES,
    NOTICES,
    PULL,
    Fault,
    Held,
    HeldAnswer,
    Notices,
    PeerFaultError,
    Pull,
    Pulled,
    Reason,
    Taken,
    block_target,
    decode,
    encode,
    give_back_target,
    push_target,
)

T = TypeVar("T")

KEEP_ALIVE_S = 15.0
"""How long a connection waits for its next request. The listener's own bound is longer."""

NAMES_KEPT_S = 10.0
"""How long the address of a host is believed."""

READ_BUFFER_BYTES = 1 << 20
"""How much of a block may wait in a connection before reading from the socket pauses."""

PULL_PATIENCE = 4
"""A peer that pulls may itself wait for peers that do not answer: it is silent for so many idle times."""


@dataclass(frozen=True, slots=True)
class ChannelSettings:
    """`sender`: this node's name. Requests are signed with `secret`, or go over `tls`, which then shows and checks
    certificates; one of the two, unless all nodes are on this machine. A peer is to be reached within
    `connect_timeout_s`, and given up after `idle_timeout_s` without progress. `connections_count` to each peer."""

    sender: str
    secret: Secret | None = None
    tls: ssl.SSLContext | None = None
    connect_timeout_s: float = 2.0
    idle_timeout_s: float = 10.0
    connections_count: int = 512


class PeerChannel:
    """Made in a running event loop; `close`d by whoever made it."""

    def __init__(self, settings: ChannelSettings, clock: Clock, metrics: Metrics) -> None:
        self._settings = settings
        self._clock = clock
        self._metrics = metrics
        self._scheme = "https" if settings.tls is not None else "http"
        self._patience = self._patient(settings.idle_timeout_s)
        self._pull_patience = self._patient(settings.idle_timeout_s * PULL_PATIENCE)
        self._session = ClientSession(
            connector=TCPConnector(
                limit=0,
                limit_per_host=settings.connections_count,
                keepalive_timeout=KEEP_ALIVE_S,
                ttl_dns_cache=int(NAMES_KEPT_S),
                ssl=settings.tls or True,
            ),
            cookie_jar=DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            read_bufsize=READ_BUFFER_BYTES,
            timeout=self._patience,
        )

    def _patient(self, idle_timeout_s: float) -> ClientTimeout:
        connect_s = self._settings.connect_timeout_s
        return ClientTimeout(total=None, connect=connect_s, sock_connect=connect_s, sock_read=idle_timeout_s)

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    def push(self, node: Node, name: ObjectName, holder: str, body_uid: str, size_bytes: int | None) -> Push:
        """Begin to send a body."""
        target = push_target(name, holder, body_uid, size_bytes)

        async def read(answer: ClientResponse) -> Taken:
            taken = self._decoded(node, await self._document(node, answer), Taken)
            self._metrics.pushed_bytes.inc(taken.size_bytes)
            return taken

        return Push(
            self._session,
            self._url(node, target),
            self._headers(node, "PUT", target, STREAMED),
            size_bytes,
            read,
            lambda reason, message: self.fault(node, reason, message),
            self._settings.connect_timeout_s,
            self._settings.idle_timeout_s,
        )

    async def block(self, node: Node, body_uid: str, index: int, size_bytes: int) -> AsyncGenerator[bytes]:
        """The bytes of a block, as many as it has.

        Raises:
            PeerFaultError: the peer does not have it, or does not send it in time.
        """
        target, left = block_target(body_uid, index), size_bytes
        waited_s = 0.0
        async with self._request(node, "GET", target) as answer:
            if answer.status != 200:
                await self._document(node, answer)
            while True:
                began_s = self._clock.monotonic_s()
                data, _ = await answer.content.readchunk()
                waited_s += self._clock.monotonic_s() - began_s
                left -= len(data)
                if left < 0 or (not data and left):
                    raise self.fault(node, Reason.BROKEN, "a block is not as long as it should be")
                if waited_s > self._settings.idle_timeout_s:
                    raise self.fault(node, Reason.SILENT, "a block comes too slowly")
                if not data:
                    return
                self._metrics.peer_read_bytes.inc(len(data))
                yield data

    async def pull(self, node: Node, pull: Pull) -> int:
        """Make a peer hold bodies; of which epoch it then speaks.

        Raises:
            PeerFaultError: it does not hold all of them.
        """
        async with self._request(node, "POST", PULL, encode(pull), self._pull_patience) as answer:
            pulled = self._decoded(node, await self._document(node, answer), Pulled)
        if pulled.fault:
            raise self.fault(node, reason_of(pulled.fault), "it could not pull bodies")
        return pulled.epoch

    async def notify(self, node: Node, notices: Sequence[Notice]) -> None:
        """Deliver notices.

        Raises:
            PeerFaultError: the peer did not take them.
        """
        async with self._request(node, "POST", NOTICES, encode(Notices(tuple(notices)))) as answer:
            await self._document(node, answer)

    async def held(self, node: Node, bodies: Sequence[Body]) -> tuple[bool, ...]:
        """Of each body, whether a peer has it whole in its memory.

        Raises:
            PeerFaultError: it does not say.
        """
        question = encode(Held(tuple((body.uid, body.size_bytes) for body in bodies)))
        async with self._request(node, "POST", HELD, question) as answer:
            is_held = self._decoded(node, await self._document(node, answer), HeldAnswer).is_held
        if len(is_held) != len(bodies):
            raise self.fault(node, Reason.BROKEN, "it answers for other bodies than was asked for")
        return is_held

    async def give_back(self, node: Node, holder: str, body_uid: str) -> None:
        """Tell a peer that it need not keep a body under `holder`.

        Raises:
            PeerFaultError: the peer did not hear it.
        """
        async with self._request(node, "DELETE", give_back_target(holder, body_uid)) as answer:
            await self._document(node, answer)

    def fault(self, node: Node, reason: Reason, message: str) -> PeerFaultError:
        """A failure of a peer, counted."""
        self._metrics.peer_failures.inc(1, reason.value)
        return PeerFaultError(reason, message, peer=node.name)

    # -- one request
    @asynccontextmanager
    async def _request(
        self, node: Node, method: str, target: str, body: bytes | None = None, patience: ClientTimeout | None = None
    ) -> AsyncIterator[ClientResponse]:
        headers = self._headers(node, method, target, digest(body or b""))
        try:
            async with self._session.request(
                method,
                self._url(node, target),
                data=body,
                headers=headers,
                allow_redirects=False,
                timeout=patience or self._patience,
            ) as answer:
                yield answer
        except (ClientConnectorError, ConnectionTimeoutError) as error:
            raise self.fault(node, Reason.UNREACHABLE, str(error)) from error
        except TimeoutError as error:
            raise self.fault(node, Reason.SILENT, "it does not answer") from error
        except (ClientError, OSError) as error:
            raise self.fault(node, Reason.UNREACHABLE, str(error) or type(error).__name__) from error

    async def _document(self, node: Node, answer: ClientResponse) -> bytes:
        """A successful answer's document.

        Raises:
            PeerFaultError: it is none.
        """
        pieces: list[bytes] = []
        size_bytes = 0
        async for data in answer.content.iter_any():
            size_bytes += len(data)
            if size_bytes > MAX_DOCUMENT_BYTES:
                raise self.fault(node, Reason.BROKEN, "its answer is too long")
            pieces.append(data)
        document = b"".join(pieces)
        if answer.status not in (200, 204):
            said = self._decoded(node, document, Fault)
            raise self.fault(node, reason_of(said.code), said.message)
        return document

    def _decoded(self, node: Node, document: bytes, kind: type[T]) -> T:
        try:
            return decode(document, type=kind)
        except msgspec.DecodeError as error:
            raise self.fault(node, Reason.BROKEN, "its answer makes no sense") from error

    def _headers(self, node: Node, method: str, target: str, payload: str) -> dict[str, str]:
        if self._settings.secret is None:
            return {}
        request = Signable(method, target, self._settings.sender, node.name, payload)
        nonce = secrets.token_hex(16)
        return {"Authorization": authorization(self._settings.secret, request, self._clock.wall_s(), nonce)}

    def _url(self, node: Node, target: str) -> URL:
        return URL(f"{self._scheme}://{node.about.address}{target}", encoded=True)


def reason_of(code: str) -> Reason:
    """A peer's word for what went wrong."""
    try:
        return Reason(code)
    except ValueError:
        return Reason.BROKEN
