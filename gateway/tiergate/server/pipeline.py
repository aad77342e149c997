"""The one way in and the one way out of the S3 face.

In: request id, loop check, signature, operation, body. Out: status, headers, body, metric, log line. Whatever goes
wrong in between becomes S3's error document here, and nowhere else.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import HttpVersion10, web

from tiergate.clock import Clock
from tiergate.config import Settings
from tiergate.engine.calls import Answer, Call, Framing, read_whole
from tiergate.engine.grants import BODY_HEADER
from tiergate.engine.service import DOCUMENT_OPERATIONS, FORWARD, Service
from tiergate.errors import InvariantError, RequestError, TiergateError
from tiergate.observe.logs import get_logger, log_context
from tiergate.observe.metrics import Metrics
from tiergate.s3.auth import authenticate, headers_in_query
from tiergate.s3.bodyverifier import BodyVerifier, unknown_algorithms
from tiergate.s3.chunked import ChunkedDecoder, is_chunked
from tiergate.s3.errors import error_code, render_error
from tiergate.s3.operations import Target, fold_headers, parse, resolve, split_target, unknown_parts
from tiergate.s3.postpolicy import check_signature
from tiergate.s3.sigv4 import UNSIGNED_PAYLOAD, Head, SecretFor, Verified, describe
from tiergate.server.app import header_too_large, new_request_id, standard_headers
from tiergate.server.bodies import ClientGoneError, WireBody, is_spent
from tiergate.server.forms import OPERATION as FORM_OPERATION
from tiergate.server.forms import form_boundary, read_form
from tiergate.server.own import PREFIX, OwnRequests, verb_of
from tiergate.server.sending import BrokenOffError, send_body

log = get_logger(__name__)

VIA_HEADER = "x-tiergate-via"

DOCUMENT_LIMIT_BYTES = 4 << 20
"""Largest XML document read into memory; S3's own limits are below it."""

METHODS = frozenset({"GET", "HEAD", "PUT", "POST", "DELETE", "OPTIONS"})
"""S3 has no others: https://docs.aws.amazon.com/AmazonS3/latest/API/API_Operations_Amazon_Simple_Storage_Service.html"""

CHUNKED = "chunked"
"""The only transfer coding: a body in another would be stored coded."""

OWN_HEADERS = frozenset({"server", "date"})
"""They speak of the connection, which is ours also where the answer is the origin's."""

BODILESS = frozenset({204, 304})

LENGTH_OPERATIONS = frozenset({"PutObject", "UploadPart"})
"""They need a length, or a transfer coding that delimits the body: nothing at all is more likely a broken client."""

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
        own: OwnRequests | None = None,
    ) -> None:
        """`own`: the requests of our own that are answered beside S3's."""
        self._own = own or OwnRequests()
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
        story = Story(new_request_id(), self._clock.monotonic_s())
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
                    boundary = form_boundary(request.method, target, headers)
                    verb = verb_of(target)
                    if verb is not None:
                        answer = await self._own_answer(verb, request.method, target, headers, body, story)
                    elif boundary is None:
                        signed = bool(verified.access_key)
                        call = await self._call(request, head, target, headers, body, signed, story)
                        answer = await self._service.answer(call)
                    else:
                        answer = await self._post(body, boundary, target, headers, verified, story)
                    status = answer.status
                    return await self._send(request, answer, body, story)
                except ClientGoneError:
                    self._metrics.broken_requests.inc(1, "client")
                    raise
                except asyncio.CancelledError:
                    if request.transport is None:  # Its connection was lost.
                        self._metrics.broken_requests.inc(1, "client")
                    raise
                except BrokenOffError:
                    self._metrics.broken_requests.inc(1, "gateway")
                    raise
                except Exception as error:
                    response = self._refusal(request, error, body, story)
                    status = response.status
                    return response
        finally:
            if body is not None:
                await body.close()
            self._metrics.requests.inc(1, story.operation, str(status))
            took_s = self._clock.monotonic_s() - story.started_s
            self._metrics.request_seconds.observe(took_s, story.operation)
            # Last: who sees no request in progress sees all of them counted.
            self._metrics.active_requests.inc(-1)

    # -- in
    def _admit(self, request: web.BaseRequest, head: Head) -> tuple[Verified, Target, dict[str, str]]:
        """Who asks for what; the headers, lower case, with those a presigned URL carries in its query."""
        if self._node_id in request.headers.get(VIA_HEADER, ""):
            self._metrics.refused_loops.inc()
            raise RequestError("InvalidRequest", "This request came from this gateway: its origin points at itself.")
        if sum(len(name) + len(value) + 4 for name, value in request.raw_headers) > self._settings.max_header_bytes:
            raise header_too_large()
        if request.version < HttpVersion10:
            raise RequestError("BadRequest", "An error occurred when parsing the HTTP request.")
        if request.method not in METHODS:
            raise RequestError("MethodNotAllowed", method=request.method, resource_type="OBJECT")
        if request.headers.get("Transfer-Encoding", CHUNKED).strip().lower() != CHUNKED:
            raise RequestError("NotImplemented", header="Transfer-Encoding")
        target = split_target(head.raw_target, request.headers.get("Host", ""), self._settings.host_suffixes)
        host_bucket = target.bucket if not head.raw_path.startswith(f"/{target.bucket}") else None
        headers = fold_headers(request.headers)
        is_form = verb_of(target) is None and form_boundary(request.method, target, headers) is not None
        verified = self._verify(head, host_bucket, is_form)
        if verified.presigned:
            headers = headers_in_query(head) | headers
        return verified, target, headers

    def _verify(self, head: Head, host_bucket: str | None, is_form: bool) -> Verified:
        secret_for = self._secret_for
        if secret_for is None:
            return describe(head)
        try:
            verified = authenticate(
                head,
                secret_for,
                self._clock.wall_s(),
                host_bucket=host_bucket,
                max_skew_s=self._settings.clock_skew_s,
            )
        except RequestError as refused:
            self._metrics.refused_signatures.inc(1, refused.code)
            raise
        if verified is not None:
            return verified
        if is_form:
            return Verified("", UNSIGNED_PAYLOAD)  # It is signed in its fields, if at all.
        self._metrics.refused_signatures.inc(1, "AccessDenied")
        raise RequestError("AccessDenied", "Access Denied")

    async def _own_answer(
        self, verb: str, method: str, target: Target, headers: dict[str, str], body: WireBody, story: Story
    ) -> Answer:
        if verb in self._own.verbs:
            story.operation = PREFIX + verb
        call = Call(story.operation, method, target, "", headers, {}, body, story.request_id)
        return await self._own.answer(verb, call)

    async def _post(
        self,
        body: WireBody,
        boundary: str,
        target: Target,
        headers: Mapping[str, str],
        verified: Verified,
        story: Story,
    ) -> Answer:
        """A browser's form upload."""
        story.operation = FORM_OPERATION
        secret_for = None if verified.access_key else self._secret_for

        def admit(fields: Mapping[str, str]) -> None:
            if secret_for is None:
                return
            try:
                check_signature(fields, secret_for)
            except RequestError as refused:
                self._metrics.refused_signatures.inc(1, refused.code)
                raise

        now_s = self._clock.wall_s()
        form = await read_form(body, boundary, target.bucket, headers, story.request_id, admit, now_s)
        return form.answered(await self._service.answer(form.call))

    def _body(self, request: web.BaseRequest, head: Head, verified: Verified, headers: Mapping[str, str]) -> WireBody:
        has_length = "content-length" in headers
        wire_bytes = int(headers["content-length"]) if has_length else None
        size_bytes = wire_bytes
        if not has_length and "transfer-encoding" not in headers:
            wire_bytes = size_bytes = 0
        decoder, trailer = None, ""
        if is_chunked(verified.payload):
            size_bytes = declared_length(headers)
            if size_bytes is None:
                raise RequestError("MissingContentLength")
            trailer = headers.get("x-amz-trailer", "")
            decoder = ChunkedDecoder(size_bytes, verified.chunk_signer, trailer.split(",") if trailer else ())
        # Checksum headers speak of the object, not of the request's own body, where it completes an upload or names a
        # body that is in memory already; an algorithm unknown here is the origin's to check.
        speaks_of_object = BODY_HEADER in headers or (request.method == "POST" and "uploadId" in head.raw_query)
        verifier = BodyVerifier(
            head.headers,
            verified.payload,
            object_checksums=not speaks_of_object and not unknown_algorithms(head.headers),
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
        signed: bool,
        story: Story,
    ) -> Call:
        operation = resolve(request.method, target, headers)
        story.operation = operation or FORWARD
        if operation in LENGTH_OPERATIONS and not {"content-length", "transfer-encoding"} & headers.keys():
            raise RequestError("MissingContentLength")
        forwards = (
            operation is None
            or not self._service.owns(operation)
            or unknown_parts(operation, target, headers)
            or unknown_algorithms(headers.items())
        )
        if not signed and any(name.startswith("response-") for name, _ in target.query):
            message = "Request specific response headers cannot be used for anonymous GET requests."
            raise RequestError("InvalidRequest", message)
        document = b""
        params: dict[str, Any] = {}
        if not forwards and operation is not None:
            if operation in DOCUMENT_OPERATIONS:
                document = await read_whole(body, DOCUMENT_LIMIT_BYTES)
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
    async def _send(
        self, request: web.BaseRequest, answer: Answer, received: WireBody, story: Story
    ) -> web.StreamResponse:
        if isinstance(answer.body, bytes):
            return self._whole(request, answer.status, answer.headers, answer.body, answer.size_bytes, received, story)
        response = self._begun(request, answer.status, answer.headers, received, story)
        response.content_length = answer.size_bytes
        about = {"operation": story.operation, "resource": story.resource}
        sent_bytes = await send_body(request, response, answer.body, self._settings.body_idle_timeout_s, about)
        self._metrics.served_bytes.inc(sent_bytes)
        return response

    def _whole(
        self,
        request: web.BaseRequest,
        status: int,
        headers: Mapping[str, str],
        body: bytes,
        size_bytes: int | None,
        received: WireBody | None,
        story: Story,
    ) -> web.StreamResponse:
        """An answer whose body is at hand. `size_bytes` is what a HEAD answer says of the body it does not have."""
        response = self._begun(request, status, headers, received, story)
        if request.method == "HEAD":
            response.content_length = size_bytes
        elif status not in BODILESS:
            whole = web.Response(status=status, headers=response.headers, body=body)
            if response.keep_alive is False:
                whole.force_close()
            return whole
        return response

    def _begun(
        self,
        request: web.BaseRequest,
        status: int,
        headers: Mapping[str, str],
        received: WireBody | None,
        story: Story,
    ) -> web.StreamResponse:
        """A response with the headers that all have, on a connection that ends if it must."""
        passed = {name: value for name, value in headers.items() if name.lower() not in OWN_HEADERS}
        response = web.StreamResponse(status=status, headers=passed)
        for name, value in standard_headers(story.request_id, self._node_id).items():
            response.headers.setdefault(name, value)
        if is_spent(request, received):
            response.force_close()
        return response

    def _refusal(
        self, request: web.BaseRequest, error: Exception, received: WireBody | None, story: Story
    ) -> web.StreamResponse:
        code = error_code(error)
        if isinstance(error, InvariantError) or not isinstance(error, TiergateError):
            self._metrics.broken_invariants.inc()
            log.exception("internal error", error=error, operation=story.operation, resource=story.resource)
        else:
            # An error from further in may know its reason better.
            fields = {"reason": error.message} | error.context
            log.info("refused", **(fields | {"code": code, "operation": story.operation, "resource": story.resource}))
        answer = render_error(error, story.resource, story.request_id, self._node_id)
        return self._whole(request, answer.status, answer.headers, answer.body, None, received, story)


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
