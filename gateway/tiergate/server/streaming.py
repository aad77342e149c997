"""Long work that somebody asked for on the admin address: an answer of JSON lines says how far it is, to its end."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

from aiohttp import web

from tiergate.errors import NotFoundError, OverloadedError, RequestError, TiergateError
from tiergate.observe.logs import get_logger

PROGRESS_INTERVAL_S = 0.5
"""How often is said how far it is."""

log = get_logger(__name__)


class Stream:
    """Work of one kind (`what`), one at a time; it ends with the request."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._task: asyncio.Task[None] | None = None

    async def answer(
        self, request: web.Request, work: Coroutine[Any, Any, None], line: Callable[[bool, str], dict[str, Any]]
    ) -> web.StreamResponse:
        """Do the work, and answer with a line now and then. `line` is told whether it is over, and why before its end
        (empty otherwise). What fails at once is an error's answer."""
        if self._task is not None:
            work.close()
            return web.json_response({"error": f"another {self._what} is running"}, status=409)
        task = self._task = asyncio.create_task(work)
        try:
            await asyncio.wait((task,), timeout=PROGRESS_INTERVAL_S)
            if task.done() and not task.cancelled() and isinstance(error := task.exception(), TiergateError):
                return web.json_response({"error": error.message}, status=status_of(error))
            return await self._show(request, task, line)
        finally:
            task.cancel()
            await asyncio.wait((task,))
            self._task = None

    async def _show(
        self, request: web.Request, task: asyncio.Task[None], line: Callable[[bool, str], dict[str, Any]]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/jsonl"})
        await response.prepare(request)
        is_over = False
        try:
            while not is_over:
                is_over = task.done()
                shown = line(is_over, self._fault_of(task) if is_over else "")
                await response.write(json.dumps(shown).encode() + b"\n")
                await asyncio.wait((task,), timeout=0.0 if is_over else PROGRESS_INTERVAL_S)
            await response.write_eof()
        except ConnectionResetError:
            log.info(f"a {self._what} ends: nobody follows it any more")
        return response

    async def end(self, _: web.Application) -> None:
        """Cancel the work: the node stops."""
        if self._task is not None:
            self._task.cancel()

    def _fault_of(self, task: asyncio.Task[None]) -> str:
        """Why the work ended before its end; empty if it did not."""
        try:
            task.result()
        except asyncio.CancelledError:
            return "the node stops"
        except TiergateError as error:
            return error.message
        except Exception as error:
            log.exception(f"a {self._what} failed unexpectedly", error=error)
            return f"{type(error).__name__}: {error}"
        return ""


def status_of(error: TiergateError) -> int:
    """The HTTP status that says what went wrong."""
    if isinstance(error, RequestError):
        return 404 if isinstance(error, NotFoundError) else 400
    return 503 if isinstance(error, OverloadedError) else 502
