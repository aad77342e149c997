"""The one way in and the one way out of the S3 face.

In: request id, loop check, signature, operation, body. Out: status, headers, body, metric, log line. Whatever goes
wrong in between becomes S3's error document here, and nowhere else.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from tiergate.clock import Clock
from tiergate.config import Settings
from tiergate.engine.calls import Answer, Call, Framing, Outgoing
from tiergate.engine.service import DOCUMENT_OPERATIONS, FORWARD, Service
from tiergate.errors import InvariantError, RequestError, TiergateError
from tiergate.observe.logs import get_logger, log_context
from tiergate.observe.metrics import Metrics
from tiergate.s3.auth import authenticate, headers_in_query
from tiergate.s3.bodyverifier import BodyVerifier, unknown_algorithms
from tiergate.s3.chunked import ChunkedDecoder, is_chunked
from tiergate.s3.errors import error_code, render_error
from tiergate.s3.operations import Target, fold_headers, parse, resolve, split_target, unknown_parts
from tiergate.s3.sigv4 import Head, SecretFor, Verified, describe
from tiergate.server.bodies import ClientGoneError, WireBody

log = get_logger(__name__)

VIA_HEADER = "x-tiergate-via"

DOCUMENT_LIMIT_BYTES = 4 << 20
"""Largest XML document read into memory; S3's own limits are below it."""

SEND_BYTES = 1 << 20
COPIED_BYTES = 64 << 10
"""aiohttp waits for the socket only after more than this; smaller pieces are copied, so that a transport never holds
a view on memory that is no longer pinned."""

SIGNING_PARAMETERS = frozenset(
    {
        "x-amz-algorithm",
        "x-amz-credential",
        "x-amz-date",
        "x-amz-expires",
        "x-amz-security-token",
        "x-amz-signature",
        "x-amz-signedheaders",
        "x-amz-content-sha256",
        "awsaccesskeyid",
        "signature",
        "expires",
    }
)


@dataclass(slots=True)
class Story:
    """What is told of a request when it ends."""

    request_id: str
    started_s: float
    operation: str = "Unknown"
    resource: str = ""
    sent_bytes: int = 0


class Pipeline:
    """Answers the requests of one process. `secret_for` is None when any signature is accepted."""

    def __init__(
        self,
        service: Service,
        settings: Settings,
        secret_for: SecretFor | None,
        clock: Clock,
        metrics: Metrics,
        node_id: str,
    ) -> None:
        self._service = service
        self._settings = settings
        self._secret_for = secret_for
        self._clock = clock
        self._metrics = metrics
        self._node_id = node_id

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """One request, from its head to the last byte of its answer.

        Raises:
            ConnectionError: the client is gone, or the answer broke off after its head: the connection is closed.
        """
        story = Story(secrets.token_hex(8).upper(), self._clock.monotonic_s())
        self._metrics.active_requests.inc()
        status = 0
        body: WireBody | None = None
        try:
            with log_context(request_id=story.request_id):
                try:
                    head = Head(request.method, request.raw_path, tuple(request.headers.items()))
                    story.resource = head.raw_path
                    verified, target, headers = self._admit(request, head)
                    body = self._body(request, head, verified, headers)
                    call = await self._call(request, head, target, headers, body, story)
                    answer = await self._service.answer(call)
                    status = answer.status
                    return await self._send(request, answer, story)
                except ClientGoneError:
                    self._metrics.broken_requests.inc(1, "client")
                    raise
                except Exception as error:
                    response = self._refusal(request, error, story)
                    status = response.status
                    return response
        finally:
            if body is not None:
                await body.close()
            self._metrics.active_requests.inc(-1)
            self._metrics.requests.inc(1, story.operation, str(status))
            took_s = self._clock.monotonic_s() - story.started_s
            self._metrics.request_seconds.observe(took_s, story.operation)

    # -- in
    def _admit(self, request: web.BaseRequest, head: Head) -> tuple[Verified, Target, dict[str, str]]:
        """Who asks for what; the headers, lower case, with those a presigned URL carries in its query."""
        if self._node_id in request.headers.get(VIA_HEADER, ""):
            self._metrics.refused_loops.inc()
            raise RequestError(
                "InvalidRequest", "This request came from this gateway: its origin points at itself."
            )
        target = split_target(head.raw_target, request.headers.get("Host", ""), self._settings.host_suffixes)
        host_bucket = target.bucket if not head.raw_path.startswith(f"/{target.bucket}") else None
        verified = self._verify(head, host_bucket)
        headers = fold_headers(request.headers)
        if verified.presigned:
            headers = headers_in_query(head) | headers
        return verified, target, headers

    def _verify(self, head: Head, host_bucket: str | None) -> Verified:
        secret_for = self._secret_for
        if secret_for is None:
            return describe(head)
        try:
            verified = authenticate(head, secret_for, self._clock.wall_s(), host_bucket=host_bucket)
        except RequestError as refused:
            self._metrics.refused_signatures.inc(1, refused.code)
            raise
        if verified is None:
            self._metrics.refused_signatures.inc(1, "AccessDenied")
            raise RequestError("AccessDenied", "Access Denied")
        return verified

    def _body(
        self, request: web.BaseRequest, head: Head, verified: Verified, headers: Mapping[str, str]
    ) -> WireBody:
        has_length = "content-length" in headers
        wire_bytes = int(headers["content-length"]) if has_length else None
        size_bytes = wire_bytes
        if not has_length and "transfer-encoding" not in headers:
            wire_bytes = size_bytes = 0
        decoder, trailer = None, ""
        if is_chunked(verified.payload):
            size_bytes = declared_length(headers)
            trailer = headers.get("x-amz-trailer", "")
            decoder = ChunkedDecoder(size_bytes, verified.chunk_signer, trailer.split(",") if trailer else ())
        # A completion's checksum headers speak of the object; an algorithm unknown here is the origin's to check.
        completes = request.method == "POST" and "uploadId" in head.raw_query
        verifier = BodyVerifier(
            head.headers,
            verified.payload,
            object_checksums=not completes and not unknown_algorithms(head.headers),
        )
        return WireBody(
            request,
            size_bytes,
            wire_bytes,
            decoder,
            verifier,
            Framing(decoder is not None, trailer.strip()),
            verified.chunk_signer is not None,
            self._settings.body_idle_timeout_s,
        )

    async def _call(
        self,
        request: web.BaseRequest,
        head: Head,
        target: Target,
        headers: dict[str, str],
        body: WireBody,
        story: Story,
    ) -> Call:
        operation = resolve(request.method, target, headers)
        story.operation = operation or FORWARD
        forwards = (
            operation is None
            or not self._service.owns(operation)
            or unknown_parts(operation, target, headers)
            or unknown_algorithms(headers.items())
        )
        document = b""
        params: dict[str, Any] = {}
        if not forwards and operation is not None:
            if operation in DOCUMENT_OPERATIONS:
                document = await body.read(DOCUMENT_LIMIT_BYTES)
            params = parse(operation, target, headers, document)
        return Call(
            operation=operation or FORWARD,
            method=request.method,
            target=target,
            raw_query=unsigned_query(head.raw_query),
            headers=headers,
            params=params,
            body=body,
            request_id=story.request_id,
            document=document,
            forwards=bool(forwards),
        )

    # -- out
    async def _send(self, request: web.BaseRequest, answer: Answer, story: Story) -> web.StreamResponse:
        headers = {"x-amz-request-id": story.request_id, "x-amz-id-2": self._node_id, "Server": "tiergate"}
        headers |= answer.headers
        if isinstance(answer.body, bytes):
            return await self._send_whole(request, answer, answer.body, headers)
        response = web.StreamResponse(status=answer.status, headers=headers)
        response.content_length = answer.size_bytes
        try:
            await response.prepare(request)
            if request.method != "HEAD":
                await self._stream(request, response, answer.body, story)
            await response.write_eof()
        except ConnectionError as error:
            raise ClientGoneError("connection lost") from error
        except TiergateError as error:
            # The head is out: only a broken connection can still say that the body is not whole.
            self._metrics.broken_requests.inc(1, "gateway")
            log.error(
                "answer broken off", operation=story.operation, error=f"{type(error).__name__}: {error}"
            )
            raise ConnectionError("answer broken off") from error
        finally:
            await answer.body.close()
        self._metrics.served_bytes.inc(story.sent_bytes)
        return response

    async def _send_whole(
        self, request: web.BaseRequest, answer: Answer, body: bytes, headers: dict[str, str]
    ) -> web.StreamResponse:
        if request.method == "HEAD" or answer.status in (204, 304):
            response = web.StreamResponse(status=answer.status, headers=headers)
            if request.method == "HEAD" and answer.size_bytes is not None:
                response.content_length = answer.size_bytes
        else:
            response = web.Response(status=answer.status, headers=headers, body=body)
        return response

    async def _stream(
        self, request: web.BaseRequest, response: web.StreamResponse, body: Outgoing, story: Story
    ) -> None:
        transport = request.transport
        if transport is None:
            raise ClientGoneError("connection lost")
        # With no room for waiting bytes, a write returns once the kernel has them all.
        transport.set_write_buffer_limits(high=0)
        async for piece in body.pieces():
            for start in range(0, len(piece), SEND_BYTES):
                part = piece[start : start + SEND_BYTES]
                await response.write(part if len(part) > COPIED_BYTES else bytes(part))
                story.sent_bytes += len(part)

    def _refusal(self, request: web.BaseRequest, error: Exception, story: Story) -> web.StreamResponse:
        code = error_code(error)
        if isinstance(error, InvariantError) or not isinstance(error, TiergateError):
            self._metrics.broken_invariants.inc()
            log.exception("internal error", error=error, operation=story.operation, resource=story.resource)
        else:
            fields = error.context | {"operation": story.operation, "resource": story.resource}
            log.info("refused", code=code, reason=error.message, **fields)
        answer = render_error(error, story.resource, story.request_id, self._node_id)
        headers = {"x-amz-request-id": story.request_id, "x-amz-id-2": self._node_id, "Server": "tiergate"}
        headers |= answer.headers
        if request.method == "HEAD" or answer.status == 304:
            return web.StreamResponse(status=answer.status, headers=headers)
        return web.Response(status=answer.status, headers=headers, body=answer.body)


def declared_length(headers: Mapping[str, str]) -> int | None:
    """x-amz-decoded-content-length, None if absent.

    Raises:
        RequestError: InvalidArgument.
    """
    text = headers.get("x-amz-decoded-content-length")
    if text is None:
        return None
    if not text.isascii() or not text.isdigit():
        raise RequestError("InvalidArgument", "x-amz-decoded-content-length is not a number")
    return int(text)


def unsigned_query(raw_query: str) -> str:
    """The query as the client wrote it, without the parameters that sign it."""
    kept = [pair for pair in raw_query.split("&") if pair.partition("=")[0].lower() not in SIGNING_PARAMETERS]
    return "&".join(kept)
