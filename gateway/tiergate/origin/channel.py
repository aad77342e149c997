"""Signed requests to the origin: one try (`open`), or as many as the rules allow (`call`)."""

import hashlib
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from tiergate.clock import Clock
from tiergate.errors import OriginCredentialsError, OriginError, OriginExhaustedError
from tiergate.observe.logs import get_logger
from tiergate.observe.metrics import Metrics
from tiergate.origin.credentials import CredentialChain
from tiergate.origin.documents import Fault
from tiergate.origin.endpoint import Endpoint, OriginSettings
from tiergate.origin.refusals import error_of, fault_of, is_credential_fault, is_redirect
from tiergate.origin.retry import Retry, Tries
from tiergate.origin.signing import EMPTY_SHA256, Keys, sign
from tiergate.origin.wire import MAX_ERROR_BYTES, OriginAnswer, Stream, Wire

VIA_HEADER = "x-tiergate-via"
"""Names the node that sends to the origin. A gateway that receives it is its own origin, and must refuse."""

DEFAULT_REGION = "us-east-1"

TOLD_S = 5.0
"""How long the reason of a refused HEAD is believed before it is asked for again."""

COMPLAINT_INTERVAL_S = 60.0
"""How often the log says that our credentials are refused; the metric counts each time."""

T = TypeVar("T")
log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class OriginRequest:
    """A request to the origin before it is signed. An empty key names the bucket. `raw_query` is encoded
    canonically; `headers` are without Host, length and anything of a signature. `operation` names it in metrics."""

    method: str
    bucket: str
    key: str = ""
    raw_query: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes | Stream | None = None
    operation: str = "Forward"


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer that was no success: its error and body. `moved` says that it taught us the bucket's region,
    so that the same request should be sent once more."""

    error: OriginError
    body: bytes
    moved: bool


@dataclass(frozen=True, slots=True)
class Told:
    """Why a HEAD was refused, as another request told; believed until `until_s`."""

    bucket: str
    key: str
    fault: Fault | None
    until_s: float

    def speaks_of(self, request: OriginRequest) -> bool:
        """Whether it is true of another HEAD too: of any, where our credentials are refused."""
        return self.fault is not None or (self.bucket, self.key) == (request.bucket, request.key)


class Channel:
    """What the origin client and the forwarder share. Owns the connections."""

    def __init__(
        self,
        settings: OriginSettings,
        node_id: str,
        clock: Clock,
        chain: CredentialChain | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        """Reads the AWS profile's files for the region, when the settings name none.

        Raises:
            ConfigError: the endpoint is no URL.
        """
        self.chain = chain or CredentialChain(clock)
        region = settings.region or self.chain.region() or DEFAULT_REGION
        self._endpoint = Endpoint(settings.endpoint, region)
        self._node_id = node_id
        self._clock = clock
        self._metrics = metrics or Metrics()
        self._told: Told | None = None
        self._complained_s: float | None = None
        self._wire = Wire(settings.connect_timeout_s, settings.read_timeout_s, settings.max_connections_count)
        self.retry = Retry(
            clock,
            settings.attempts_count,
            settings.backoff_base_s,
            settings.backoff_cap_s,
            settings.retry_limit_s,
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._wire.close()

    async def open(self, request: OriginRequest) -> OriginAnswer:
        """Sign and send once; an answer of any status, which the caller closes.

        Raises:
            OriginTemporaryError: no answer.
            OriginCredentialsError: we have no credentials.
            Exception: whatever the body's own source raised.
        """
        url = self._endpoint.url(request.bucket, request.key, request.raw_query)
        headers = list(request.headers)
        if request.body is not None:
            size_bytes = request.body.size_bytes if isinstance(request.body, Stream) else len(request.body)
            headers.append(("Content-Length", str(size_bytes)))
        headers.append((VIA_HEADER, self._node_id))
        signed = sign(
            request.method,
            url,
            headers,
            _payload_hash(request.body),
            await self._keys(),
            self._endpoint.region_of(request.bucket),
            self._clock.wall_s(),
        )
        began_s = self._clock.monotonic_s()
        status = "none"
        try:
            answer = await self._wire.send(request.method, url, signed, request.body)
            status = str(answer.status)
            return answer
        finally:
            self._metrics.origin_requests.inc(1, request.operation, status)
            self._metrics.origin_seconds.observe(self._clock.monotonic_s() - began_s, request.operation)

    async def look_for_credentials(self) -> None:
        """Complain in the log if there are none, before anybody needs them."""
        with suppress(OriginCredentialsError):
            await self._keys()

    async def _keys(self) -> Keys:
        try:
            return await self.chain.frozen()
        except OriginCredentialsError as error:
            self._complain(error)
            raise

    def _complain(self, error: OriginCredentialsError) -> None:
        """Say that our own credentials are at fault: nobody else can mend that."""
        self._metrics.origin_refused_credentials.inc(1, error.code)
        now_s = self._clock.monotonic_s()
        if self._complained_s is None or now_s - self._complained_s >= COMPLAINT_INTERVAL_S:
            self._complained_s = now_s
            log.error(error.fault, reason=error.message)

    async def call(
        self,
        request: OriginRequest,
        read: Callable[[OriginAnswer], Awaitable[T]],
        tries: Tries | None = None,
    ) -> T:
        """Send, retry what is temporary, and `read` the successful answer, whose reading counts as part of
        the try.

        `read` closes the answer, or hands it on. A streamed body is begun anew for each try.

        Raises:
            OriginExhaustedError: temporary faults to the end.
            OriginRefusedError: the origin said no; OriginCredentialsError if for our keys.
            Exception: whatever the body's own source raised.
        """

        async def attempt() -> T:
            answer = await self.open(request)
            if answer.is_success:
                return await read(answer)
            refusal = await self.refusal(request, answer)
            if not refusal.moved:
                raise refusal.error
            answer = await self.open(request)
            if answer.is_success:
                return await read(answer)
            raise (await self.refusal(request, answer)).error

        return await self.run(request, attempt, tries)

    async def run(self, request: OriginRequest, attempt: Callable[[], Awaitable[T]], tries: Tries | None = None) -> T:
        """`attempt` at `request`, as often as the rules allow; counted.

        Raises:
            OriginExhaustedError: temporary faults to the end. And what else `attempt` raises.
        """
        tries = tries or Tries()
        before = tries.count
        try:
            return await self.retry.run(attempt, tries, method=request.method, bucket=request.bucket, key=request.key)
        except OriginExhaustedError:
            self._metrics.origin_exhausted.inc(1, request.operation)
            raise
        finally:
            if tries.count > before + 1:
                self._metrics.origin_retries.inc(tries.count - before - 1, request.operation)

    async def refusal(self, request: OriginRequest, answer: OriginAnswer) -> Refusal:
        """What an answer that is no success means. Reads and closes it; learns a bucket's region."""
        body = await answer.read(MAX_ERROR_BYTES)
        fault = fault_of(answer.status, answer.headers, body)
        moved = is_redirect(answer.status, fault) and self._endpoint.learn_region(request.bucket, fault.region)
        if request.method == "HEAD" and not moved:
            fault = await self._explain_head(request, answer.status, fault)
        error = error_of(answer.status, answer.headers, body, fault, bucket=request.bucket, key=request.key)
        if isinstance(error, OriginCredentialsError):
            self._complain(error)
            self.chain.forget()
        return Refusal(error, body, moved)

    async def _explain_head(self, request: OriginRequest, status: int, fault: Fault) -> Fault:
        """HEAD's answer has no body that would say what is wrong; ask for it where it matters."""
        if status == 404:
            if not request.key:
                return Fault("NoSuchBucket", fault.message, fault.region)
            question = OriginRequest("HEAD", request.bucket, operation="HeadBucket")
            async with _closing(await self.open(question)) as bucket:
                return Fault("NoSuchBucket", "", "") if bucket.status == 404 else fault
        if status in (400, 403):
            return await self._explain_refusal(request) or fault
        return fault

    async def _explain_refusal(self, request: OriginRequest) -> Fault | None:
        """What the origin has against our credentials, None if it is something else. Asked by a GET of the same, since
        only its answer has a body; not again for a while."""
        told, now_s = self._told, self._clock.monotonic_s()
        if told is not None and now_s < told.until_s and told.speaks_of(request):
            return told.fault
        question = OriginRequest("GET", request.bucket, raw_query="location=", operation="GetBucketLocation")
        if request.key:
            one_byte = (("range", "bytes=0-0"),)
            question = OriginRequest(
                "GET", request.bucket, request.key, request.raw_query, one_byte, operation="GetObject"
            )
        async with _closing(await self.open(question)) as answer:
            fault = None
            if not answer.is_success:
                found = fault_of(answer.status, answer.headers, await answer.read(MAX_ERROR_BYTES))
                fault = found if is_credential_fault(found.code) else None
        self._told = Told(request.bucket, request.key, fault, now_s + TOLD_S)
        return fault


class _closing:
    def __init__(self, answer: OriginAnswer) -> None:
        self._answer = answer

    async def __aenter__(self) -> OriginAnswer:
        return self._answer

    async def __aexit__(self, *_: object) -> None:
        await self._answer.close()


async def discard(answer: OriginAnswer) -> None:
    """Read an answer that says nothing but its status."""
    await answer.read(MAX_ERROR_BYTES)


def _payload_hash(body: bytes | Stream | None) -> str:
    if isinstance(body, Stream):
        return body.payload_hash
    return hashlib.sha256(body).hexdigest() if body else EMPTY_SHA256
