"""The forwarder: a client's request goes on to the origin under our signature, and its answer comes back as
it is.

Nothing is dropped but what belongs to one connection or to the client's signature (promise P1).
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from tiergate.errors import OriginCredentialsError, OriginTemporaryError, RequestError
from tiergate.model import ObjectName
from tiergate.origin.channel import VIA_HEADER, Channel, OriginRequest
from tiergate.origin.endpoint import canonical_query
from tiergate.origin.framing import Trailer, framed, framed_size_bytes
from tiergate.origin.retry import OriginBusyError, Tries
from tiergate.origin.signing import UNSIGNED_TRAILER
from tiergate.origin.stamp import STAMP_HEADER, parse_stamp
from tiergate.origin.wire import OriginAnswer, Stream
from tiergate.s3.wire import decode_header_text, http_date, quote_etag

__all__ = ["ForwardAnswer", "ForwardRequest", "Forwarder", "Trailer"]

_IDEMPOTENT = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PUT"})
_CONDITIONS = frozenset({"if-match", "if-none-match"})
"""A repeated write would meet what its first try wrote, and fail."""

_PER_CONNECTION = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
"""https://www.rfc-editor.org/rfc/rfc9110.html#name-connection"""

_REPLACED = frozenset(
    {
        "authorization",
        "content-length",
        "date",
        "expect",
        "host",
        "x-amz-content-sha256",
        "x-amz-date",
        "x-amz-decoded-content-length",
        "x-amz-security-token",
        "x-amz-trailer",
        VIA_HEADER,
    }
)
_MAY_BE_OURS = frozenset({301, 307, 400, 403})
"""Statuses that may be about our signature or region rather than about the client's request."""


@dataclass(frozen=True, slots=True)
class ForwardRequest:
    """A client's request, without its signature.

    `raw_query` is as the client sent it, without authentication parameters. `headers` are the client's.
    `body` is decoded (no aws-chunked framing) and `content_length` is its length in bytes, needed for a
    stream. With a `trailer` the body is framed anew and the checksum follows it; else it is sent plain."""

    method: str
    bucket: str
    key: str
    raw_query: str = ""
    headers: Sequence[tuple[str, str]] = ()
    content_length: int | None = None
    body: bytes | AsyncIterator[bytes | memoryview] | None = None
    trailer: Trailer | None = None


class ForwardAnswer:
    """The origin's answer about an object, any status. `headers` are what the client may see, Content-Length
    included. The caller closes it."""

    def __init__(self, answer: OriginAnswer, name: ObjectName, body: bytes | None = None) -> None:
        self._answer = answer
        self._body = body
        self.status = answer.status
        self.reason = answer.reason
        self.headers = _shown(answer.headers, name)

    def pieces(self) -> AsyncIterator[bytes]:
        """The body as the origin sends it, not decompressed. Read it once.

        Raises:
            OriginTemporaryError: it broke off; the client's connection must be closed then.
        """
        return self._answer.pieces() if self._body is None else _once(self._body)

    async def close(self) -> None:
        """Let the connection go; dropped if the body was not read to its end."""
        await self._answer.close()


class Forwarder:
    """Forwards over a channel that somebody else owns. Holds nothing between calls."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def forward(self, request: ForwardRequest) -> ForwardAnswer:
        """Send the request on. Tried again only if that can change nothing (no stream, an idempotent method,
        no condition); the last answer is returned even if it is a 503.

        Raises:
            RequestError: MissingContentLength, InvalidRequest (an unknown trailer).
            OriginTemporaryError, OriginExhaustedError: no answer.
            OriginCredentialsError: the origin refuses our keys, which is not the client's fault.
            Exception: whatever the body's own source raised.
        """
        outgoing = _outgoing(request)
        tries = Tries()
        retry = self._channel.retry
        repeatable = _is_repeatable(outgoing)

        async def attempt() -> ForwardAnswer:
            may_retry = repeatable and tries.count < retry.attempts_count
            return await self._try(outgoing, may_retry, may_move=True)

        if not repeatable:
            return await attempt()
        return await self._channel.run(outgoing, attempt, tries)

    async def _try(self, outgoing: OriginRequest, may_retry: bool, may_move: bool) -> ForwardAnswer:
        answer = await self._channel.open(outgoing)
        is_fault = answer.status >= 500 and may_retry
        if not is_fault and answer.status not in _MAY_BE_OURS:
            return ForwardAnswer(answer, ObjectName(outgoing.bucket, outgoing.key))
        refusal = await self._channel.refusal(outgoing, answer)
        if refusal.moved:
            if isinstance(outgoing.body, Stream):
                raise OriginTemporaryError("the bucket's region was just learnt", bucket=outgoing.bucket)
            if may_move:
                return await self._try(outgoing, may_retry, may_move=False)
        if isinstance(refusal.error, OriginCredentialsError) or (
            may_retry and isinstance(refusal.error, OriginBusyError)
        ):
            raise refusal.error
        return ForwardAnswer(answer, ObjectName(outgoing.bucket, outgoing.key), refusal.body)


def _outgoing(request: ForwardRequest) -> OriginRequest:
    headers = _without_connection(request.headers)
    headers = [(name, decode_header_text(value)) for name, value in headers if name.lower() not in _REPLACED]
    body: bytes | Stream | None
    if request.body is None or isinstance(request.body, bytes):
        headers, body = _recoded(headers, None), request.body
    else:
        if request.content_length is None:
            raise RequestError("MissingContentLength", "You must provide the Content-Length HTTP header.")
        headers = _recoded(headers, request.trailer)
        body = _stream(request.body, request.content_length, request.trailer)
        if request.trailer is not None:
            headers.append(("x-amz-decoded-content-length", str(request.content_length)))
            headers.append(("x-amz-trailer", request.trailer.name))
    query = canonical_query(request.raw_query)
    return OriginRequest(request.method, request.bucket, request.key, query, tuple(headers), body)


def _stream(pieces: AsyncIterator[bytes | memoryview], size_bytes: int, trailer: Trailer | None) -> Stream:
    if trailer is None:
        return Stream(size_bytes, lambda: pieces)
    total = framed_size_bytes(size_bytes, trailer.name)
    return Stream(total, lambda: framed(pieces, size_bytes, trailer), UNSIGNED_TRAILER)


def _recoded(headers: list[tuple[str, str]], trailer: Trailer | None) -> list[tuple[str, str]]:
    """Content-Encoding says aws-chunked exactly if the body is sent so; and S3 refuses an announced checksum
    algorithm without its checksum."""
    names = {name.lower() for name, _ in headers}
    has_checksum = trailer is not None or any(
        name.startswith("x-amz-checksum-") and name not in ("x-amz-checksum-mode", "x-amz-checksum-type")
        for name in names
    )
    found = [("Content-Encoding", "aws-chunked")] if trailer is not None else []
    for name, value in headers:
        low = name.lower()
        if low == "content-encoding":
            codings = [coding.strip() for coding in value.split(",")]
            value = ",".join(coding for coding in codings if coding and coding.lower() != "aws-chunked")
            if not value:
                continue
            if trailer is not None:
                found[0] = (found[0][0], f"{found[0][1]},{value}")
                continue
        if low == "x-amz-sdk-checksum-algorithm" and not has_checksum:
            continue
        found.append((name, value))
    return found


def _without_connection(headers: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    named = set(_PER_CONNECTION)
    for name, value in headers:
        if name.lower() == "connection":
            named |= {option.strip().lower() for option in value.split(",")}
    return [(name, value) for name, value in headers if name.lower() not in named]


def _shown(headers: Sequence[tuple[str, str]], name: ObjectName) -> list[tuple[str, str]]:
    """Without our stamp, and with the identity that it carries (promise P6): the object looks as it does when it is
    not forwarded."""
    own: dict[str, str] = {}
    found: list[tuple[str, str]] = []
    for label, value in _without_connection(headers):
        stamp = parse_stamp(value) if label.lower() == STAMP_HEADER else None
        if stamp is None:
            found.append((label, value))
        elif stamp.is_of(name):
            own = {"etag": quote_etag(stamp.etag)} if stamp.etag else {}
            own["last-modified"] = http_date(stamp.modified_s)
    return [(label, own.get(label.lower(), value)) for label, value in found]


def _is_repeatable(request: OriginRequest) -> bool:
    is_read = request.method in ("GET", "HEAD", "OPTIONS")
    is_conditional = any(name.lower() in _CONDITIONS for name, _ in request.headers)
    is_whole = not isinstance(request.body, Stream)
    return is_whole and request.method in _IDEMPOTENT and (is_read or not is_conditional)


async def _once(body: bytes) -> AsyncIterator[bytes]:
    if body:
        yield body
