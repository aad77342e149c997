"""Answers that begin before their outcome is known, as S3's own do for what may take minutes.

White space keeps the connection alive until the document comes; a failure by then is an Error document under the status
200. https://docs.aws.amazon.com/AmazonS3/latest/API/API_CompleteMultipartUpload.html
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

from tiergate.engine.acks import ACK_HEADER
from tiergate.engine.calls import Answer, Outgoing
from tiergate.errors import TiergateError
from tiergate.s3.errors import render_error

FIRST_S = 5.0
"""How long an outcome is waited for before the answer begins without it."""

INTERVAL_S = 5.0
"""How long an answer that has begun is silent at most. Clients give up after a minute or so."""

DECLARATION = b'<?xml version="1.0" encoding="UTF-8"?>\n'
"""Nothing may stand before it, so it goes out first."""

BLANK = b" "


class SettledBody:
    """A body of the origin's whose last piece is held back until `settle` is done (which may be asked for twice): what
    the answer tells of is then what the next reader finds."""

    def __init__(self, body: Outgoing, settle: Callable[[], Awaitable[None]]) -> None:
        self._body = body
        self._settle = settle

    async def pieces(self) -> AsyncIterator[bytes | memoryview]:
        held: bytes | memoryview | None = None
        async for piece in self._body.pieces():
            if held is not None:
                yield held
            held = bytes(piece)
        await self._settle()
        if held is not None:
            yield held

    async def close(self) -> None:
        """Settle, whatever became of the answer: the origin may have done its part."""
        try:
            await self._settle()
        finally:
            await self._body.close()


class PendingBody:
    """The body of an answer whose outcome is still to come. Owns the task that brings it; `close` ends that."""

    def __init__(self, task: "asyncio.Task[Answer]", resource: str, request_id: str) -> None:
        self._task = task
        self._resource = resource
        self._request_id = request_id

    async def pieces(self) -> AsyncIterator[bytes | memoryview]:
        yield DECLARATION
        while not self._task.done():
            await asyncio.wait({self._task}, timeout=INTERVAL_S)
            if not self._task.done():
                yield BLANK
        try:
            document = self._task.result().body
        except TiergateError as error:
            document = render_error(error, self._resource, self._request_id, "").body
        yield document.removeprefix(DECLARATION) if isinstance(document, bytes) else b""

    async def close(self) -> None:
        await ended(self._task)


async def patient(work: Coroutine[Any, Any, Answer], ack: str, resource: str, request_id: str) -> Answer:
    """The answer that `work` returns; where it takes long, one that begins now and ends with that. `ack` is what it
    will have been acknowledged under.

    Raises:
        TiergateError: what `work` raises before that.
    """
    task = asyncio.create_task(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=FIRST_S)
    except asyncio.CancelledError:
        await ended(task)
        raise
    if done:
        return task.result()
    return Answer(200, {"content-type": "application/xml", ACK_HEADER: ack}, PendingBody(task, resource, request_id))


async def ended(task: "asyncio.Task[Answer]") -> None:
    """Cancel a task that nobody waits for any more, and wait for its end."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
