"""The protocol of SageMaker HyperPod's memory daemon, as the package amzn-sagemaker-checkpointing speaks it.

Paths, headers and documents are the protocol's; what they ask for is done by `engine.shards`. It has no credentials:
who may ask is told by where they connect from.
"""

import asyncio
import ipaddress
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from tiergate.checkpoints.shards import HEAD_BYTES, NAMESPACE, ShardName
from tiergate.config import Settings
from tiergate.engine.calls import Framing, Outgoing
from tiergate.engine.shards import CHECKSUM, Shards
from tiergate.errors import (
    InvariantError,
    MemoryFullError,
    NotFoundError,
    OriginError,
    OverloadedError,
    RequestError,
    TiergateError,
)
from tiergate.observe.logs import get_logger, log_context
from tiergate.observe.metrics import Metrics
from tiergate.s3.bodyverifier import BodyVerifier
from tiergate.s3.checksums import HEADER_PREFIX
from tiergate.s3.sigv4 import UNSIGNED_PAYLOAD
from tiergate.server.app import new_request_id
from tiergate.server.bodies import ClientGoneError, WireBody, is_spent
from tiergate.server.sending import BrokenOffError, send_body

log = get_logger(__name__)

META_HEADER = "Shard-Meta"
ALGORITHM = "xxh3_128"
"""The only one that there is."""

LARGEST = 10**18
"""No rank, step or count is."""

NO_SHARD = ShardName("", 0, 0)

Bytes = bytes | memoryview


class RefusedError(RequestError):
    """A request that the protocol does not have, or not like that. `status` is the answer's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__("InvalidRequest", message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Ask:
    """What a request is for. `operation` is its name in metrics; what it has no use for is empty."""

    operation: str
    namespace: str = ""
    shard: ShardName = NO_SHARD


_OPERATIONS: Mapping[str, Mapping[str, str]] = {
    "health": {"GET": "health"},
    "reset": {"POST": "reset"},
    "latest": {"GET": "latest"},
    "namespace": {"GET": "get_namespace", "POST": "create_namespace", "DELETE": "drop_namespace"},
    "shard": {"GET": "get_shard", "POST": "put_shard", "DELETE": "delete_shard"},
}


def asked(method: str, path: str) -> Ask:
    """What a method and a decoded path ask for. Pure.

    Raises:
        RefusedError: 404 for another path, 405 for another method, 400 for what is no namespace, rank or step.
    """
    match path.split("/"):
        case ["", "health"]:
            return Ask(_operation(method, "health"))
        case ["", "v1", "cp", "cluster", "reset"]:
            return Ask(_operation(method, "reset"))
        case ["", "v1", "cp", "namespaces", namespace]:
            return Ask(_operation(method, "namespace"), _namespace(namespace))
        case ["", "v1", "cp", "checkpoints", namespace, "latest"]:
            return Ask(_operation(method, "latest"), _namespace(namespace))
        case ["", "v1", "cp", "checkpoints", namespace, rank, step]:
            operation = _operation(method, "shard")
            shard = ShardName(_namespace(namespace), number("rank", rank), number("step", step))
            return Ask(operation, namespace, shard)
    raise RefusedError(404, "there is no such path")


def _operation(method: str, kind: str) -> str:
    operation = _OPERATIONS[kind].get(method)
    if operation is None:
        raise RefusedError(405, f"{method} is not done here")
    return operation


def _namespace(text: str) -> str:
    if not NAMESPACE.fullmatch(text):
        raise RefusedError(400, "a namespace has letters, digits, - and _ only")
    return text


def number(name: str, text: str | None, least: int = 0) -> int:
    """A number of a path or a query.

    Raises:
        RefusedError: 400, it is none, or less than `least`.
    """
    if text is None or not (text.isascii() and text.isdigit()) or len(text) > 18:
        raise RefusedError(400, f"{name} is not a number")
    if int(text) < least:
        raise RefusedError(400, f"{name} is less than {least}")
    return int(text)


def claimed_checksum(header: str | None) -> str | None:
    """The base64 XXH3-128 that a Shard-Meta header says; None where there is no header. Pure.

    Raises:
        RefusedError: 400, it says something else.
    """
    if header is None:
        return None
    try:
        said = json.loads(header)
    except ValueError as error:
        raise RefusedError(400, f"{META_HEADER} is not JSON") from error
    if not isinstance(said, dict) or not isinstance(said.get("checksum"), str):
        raise RefusedError(400, f"{META_HEADER} has no checksum")
    if said.get("algorithm", ALGORITHM) != ALGORITHM:
        raise RefusedError(400, f"the only algorithm is {ALGORITHM}")
    return str(said["checksum"])


def shard_meta(checksum: str) -> str:
    """The Shard-Meta header that says a checksum. Pure."""
    return json.dumps({"checksum": checksum, "algorithm": ALGORITHM})


def status_of(error: Exception) -> int:
    """The HTTP status that says what went wrong. Pure."""
    match error:
        case RefusedError():
            return error.status
        case NotFoundError():
            # The bucket is the operator's to make, and none of the client's affair.
            return 404 if error.code == "NoSuchKey" else 503
        case RequestError():
            return 413 if error.code == "EntityTooLarge" else 400
        case MemoryFullError():
            return 507
        case OverloadedError():
            return 503
        case OriginError():
            return 502
    return 500


class PeekedBody:
    """A body of which the beginning is looked at first (implements `IncomingBody`)."""

    def __init__(self, body: WireBody) -> None:
        self._body = body
        self._rest = body.pieces()
        self._read: list[Bytes] = []

    @property
    def size_bytes(self) -> int | None:
        return self._body.size_bytes

    @property
    def framing(self) -> Framing:
        return self._body.framing

    async def head(self) -> bytes:
        """The first bytes, fewer where there are no more. To be called before `pieces`."""
        while sum(map(len, self._read)) < HEAD_BYTES and (piece := await anext(self._rest, None)) is not None:
            self._read.append(piece)
        return b"".join(self._read)[:HEAD_BYTES]

    async def pieces(self) -> AsyncIterator[Bytes]:
        for piece in self._read:
            yield piece
        self._read.clear()
        async for piece in self._rest:
            yield piece

    async def verify(self) -> dict[str, str]:
        return await self._body.verify()


class Daemon:
    """Answers the requests of one process."""

    def __init__(self, shards: Shards, settings: Settings, metrics: Metrics) -> None:
        self._shards = shards
        self._idle_timeout_s = settings.body_idle_timeout_s
        self._metrics = metrics
        self._allowed = [ipaddress.ip_network(network) for network in settings.daemon_allow]
        self._done: Mapping[str, Callable[[web.BaseRequest, Ask, str], Awaitable[web.StreamResponse]]] = {
            "health": self._health,
            "reset": self._reset,
            "latest": self._latest,
            "get_namespace": self._get_namespace,
            "create_namespace": self._create_namespace,
            "drop_namespace": self._drop_namespace,
            "get_shard": self._get_shard,
            "put_shard": self._put_shard,
            "delete_shard": self._delete_shard,
        }

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """One request, from its head to the last byte of its answer.

        Raises:
            ConnectionError: the client is gone, or the answer broke off after its head: the connection is closed.
        """
        request_id, operation, status = new_request_id(), "unknown", 0
        self._metrics.active_requests.inc()
        try:
            with log_context(request_id=request_id):
                self._admit(request)
                ask = asked(request.method, request.path)
                operation = ask.operation
                response = await self._done[operation](request, ask, request_id)
                status = response.status
                return response
        except (ClientGoneError, asyncio.CancelledError):
            self._metrics.broken_requests.inc(1, "client")
            raise
        except BrokenOffError:
            self._metrics.broken_requests.inc(1, "gateway")
            raise
        except Exception as error:
            status = status_of(error)
            return self._refusal(request, error, status, operation)
        finally:
            self._metrics.daemon_requests.inc(1, operation, str(status))
            self._metrics.active_requests.inc(-1)

    def _admit(self, request: web.BaseRequest) -> None:
        if self._allowed and not is_within(request.remote, self._allowed):
            raise RefusedError(403, "this host is in none of the networks that daemon_allow names")

    # -- what there is to ask for
    async def _health(self, request: web.BaseRequest, _: Ask, __: str) -> web.StreamResponse:
        return said(request, {"status": "ok"})

    async def _reset(self, request: web.BaseRequest, _: Ask, request_id: str) -> web.StreamResponse:
        await self._shards.reset(request_id)
        return said(request, {})

    async def _latest(self, request: web.BaseRequest, ask: Ask, _: str) -> web.StreamResponse:
        limit = request.query.get("limit")
        limit_count = None if limit is None else number("limit", limit)
        return said(request, await self._shards.latest(ask.namespace, limit_count))

    async def _get_namespace(self, request: web.BaseRequest, ask: Ask, _: str) -> web.StreamResponse:
        found = await self._shards.namespace(ask.namespace)
        if found is None:
            raise RefusedError(404, f"there is no namespace {ask.namespace}")
        return said(request, {"num_ranks": found.ranks_count, "steps_to_retain_per_rank": found.steps_retained_count})

    async def _create_namespace(self, request: web.BaseRequest, ask: Ask, request_id: str) -> web.StreamResponse:
        ranks_count = number("num_ranks", request.query.get("num_ranks"), 1)
        retained_count = number("steps_retained", request.query.get("steps_retained"), 1)
        if not await self._shards.create(ask.namespace, ranks_count, retained_count, request_id):
            raise RefusedError(409, f"there is a namespace {ask.namespace} already")
        return said(request, {"num_ranks": ranks_count, "steps_to_retain_per_rank": retained_count})

    async def _drop_namespace(self, request: web.BaseRequest, ask: Ask, request_id: str) -> web.StreamResponse:
        if not await self._shards.drop(ask.namespace, request_id):
            raise RefusedError(404, f"there is no namespace {ask.namespace}")
        return said(request, {})

    async def _put_shard(self, request: web.BaseRequest, ask: Ask, request_id: str) -> web.StreamResponse:
        body = self._body(request, claimed_checksum(request.headers.get(META_HEADER)))
        try:
            peeked = PeekedBody(body)
            await self._shards.put(ask.shard, peeked.head, peeked, request_id)
        finally:
            await body.close()
        return said(request, {})

    async def _get_shard(self, request: web.BaseRequest, ask: Ask, request_id: str) -> web.StreamResponse:
        opened = await self._shards.get(ask.shard, request_id)
        headers = {"Content-Type": "application/octet-stream", "Server": "tiergate"}
        if opened.checksum:
            headers[META_HEADER] = shard_meta(opened.checksum)
        response = web.StreamResponse(headers=headers)
        response.content_length = opened.answer.size_bytes
        if is_spent(request, None):
            response.force_close()
        about = {"operation": ask.operation, "namespace": ask.namespace}
        body = opened.answer.body
        sent_bytes = await send_body(request, response, streamed(body), self._idle_timeout_s, about)
        self._metrics.served_bytes.inc(sent_bytes)
        return response

    async def _delete_shard(self, request: web.BaseRequest, ask: Ask, request_id: str) -> web.StreamResponse:
        await self._shards.delete(ask.shard, request_id)
        return said(request, {})

    def _body(self, request: web.BaseRequest, checksum: str | None) -> WireBody:
        if request.headers.get("Transfer-Encoding", "chunked").strip().lower() != "chunked":
            raise RefusedError(501, "the only transfer coding is chunked")
        size_bytes = request.content_length
        if size_bytes is None and "Transfer-Encoding" not in request.headers:
            size_bytes = 0
        claimed = [] if checksum is None else [(HEADER_PREFIX + CHECKSUM, checksum)]
        verifier = BodyVerifier(claimed, UNSIGNED_PAYLOAD, also=(CHECKSUM,))
        return WireBody(
            request, size_bytes, size_bytes, None, verifier, Framing(chunked=False), False, self._idle_timeout_s
        )

    def _refusal(self, request: web.BaseRequest, error: Exception, status: int, operation: str) -> web.StreamResponse:
        if status == 500:
            self._metrics.broken_invariants.inc()
            log.exception("internal error", error=error, operation=operation, path=request.path)
            message = "internal error"
        else:
            message = error.message if isinstance(error, TiergateError) else str(error)
            log.info("refused", reason=message, status=status, operation=operation, path=request.path)
        response = said(request, {"error": message}, status)
        if isinstance(error, OverloadedError):
            response.headers["Retry-After"] = str(error.retry_after_s)
        return response


def said(request: web.BaseRequest, document: Any, status: int = 200) -> web.Response:
    """An answer of JSON, on a connection that ends if it must."""
    response = web.json_response(document, status=status)
    response.headers["Server"] = "tiergate"
    if is_spent(request, None):
        response.force_close()
    return response


def streamed(body: bytes | Outgoing) -> Outgoing:
    """The stream that the answer of a read has.

    Raises:
        InvariantError: it has none.
    """
    if isinstance(body, bytes):
        raise InvariantError("a read is answered by a stream")
    return body


def is_within(address: str | None, networks: Sequence[ipaddress.IPv4Network | ipaddress.IPv6Network]) -> bool:
    """Whether an IP address is in one of the networks; an IPv4 address also where IPv6 wraps it. Pure."""
    try:
        found = ipaddress.ip_address((address or "").partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(found, "ipv4_mapped", None)
    return any((mapped or found) in network for network in networks)
