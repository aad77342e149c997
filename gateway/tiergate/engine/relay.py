"""A request that is the origin's: re-signed, streamed there, and its answer streamed back as it is (promise P1)."""

from collections.abc import AsyncIterator
from http import HTTPStatus

from tiergate.engine.calls import Answer, Call, read_whole
from tiergate.engine.proved import ProvedBody
from tiergate.engine.rooms import Rooms
from tiergate.errors import RequestError
from tiergate.origin.forward import ForwardAnswer, ForwardRequest, Trailer
from tiergate.s3.checksums import HEADER_PREFIX

UNSTREAMED_METHODS = frozenset({"GET", "HEAD", "DELETE", "OPTIONS"})


class ForwardedBody:
    """The origin's body on its way back."""

    def __init__(self, answer: ForwardAnswer) -> None:
        self._answer = answer

    def pieces(self) -> AsyncIterator[bytes | memoryview]:
        return self._answer.pieces()

    async def close(self) -> None:
        await self._answer.close()


def trailer_of(body: ProvedBody, name: str) -> Trailer:
    """The checksum that follows the body, once its last piece was asked for."""

    async def value() -> str:
        return body.checksums[name.removeprefix(HEADER_PREFIX)]

    return Trailer(name, value)


async def relay(rooms: Rooms, call: Call) -> Answer:
    """Pass a request on. Settling what is pending, the fence and forgetting what changed are the caller's.

    Raises:
        RequestError: the body is malformed, or its length unknown.
        OriginError: no answer.
    """
    body, size, trailer = call.document or None, len(call.document), None
    stream: bytes | AsyncIterator[bytes | memoryview] | None = body
    if body is None and call.method not in UNSTREAMED_METHODS and call.body.size_bytes != 0:
        if call.body.size_bytes is None:
            raise RequestError("MissingContentLength", "You must provide the Content-Length HTTP header.")
        size = call.body.size_bytes
        proved = ProvedBody(call.body)
        stream = proved.pieces()
        if call.body.framing.trailer:
            trailer = trailer_of(proved, call.body.framing.trailer.lower())
    elif body is None and call.method not in UNSTREAMED_METHODS:
        await read_whole(call.body, 0)  # Nothing is in it, but what the client proved of nothing is checked too.
        stream = b""
    request = ForwardRequest(
        method=call.method,
        bucket=call.target.bucket,
        key=call.target.key,
        raw_query=call.raw_query,
        headers=tuple(call.headers.items()),
        content_length=size,
        body=stream,
        trailer=trailer,
    )
    answer = await rooms.forwarder.forward(request)
    rooms.metrics.forwarded_requests.inc(1, str(answer.status))
    headers: dict[str, str] = {}
    for name, value in answer.headers:
        lowered = name.lower()
        headers[lowered] = f"{headers[lowered]}, {value}" if lowered in headers else value
    if answer.status == HTTPStatus.NO_CONTENT:
        # It need not say that nothing follows, and who counts on the end of the answer must not get it too early.
        await answer.close()
        return Answer(answer.status, headers)
    length = headers.get("content-length")
    return Answer(answer.status, headers, ForwardedBody(answer), int(length) if length is not None else None)
