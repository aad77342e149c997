"""An origin that does not answer must not stall what this node can answer without it (promise P12).

Questions whose answer is only wanted for freshness are asked with little patience. After the first one that fails,
nobody waits any more; one task per process looks whether the origin is back.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

from tiergate.clock import Clock
from tiergate.errors import (
    OriginCredentialsError,
    OriginExhaustedError,
    OriginRefusedError,
    OriginTemporaryError,
    OverloadedError,
)
from tiergate.observe.logs import get_logger
from tiergate.origin.client import OriginClient

PATIENCE_S = 2.0
"""How long a request waits for the origin's word on something that memory or the directory could answer."""

BOUND_S = 20.0
"""How long a request waits for what only the origin can answer."""

AWAY_BOUND_S = 5.0
"""The same while the origin is known to be away."""

PROBE_INTERVAL_S = 1.0

AWAY = (OriginTemporaryError, OriginExhaustedError, OriginCredentialsError, TimeoutError)
"""What means that the origin cannot be had now. It refusing our own keys is no client's fault either."""

log = get_logger(__name__)

T = TypeVar("T")


class OriginAwayError(OriginTemporaryError):
    """The origin does not answer now."""


def _what(error: BaseException) -> str:
    if isinstance(error, OriginCredentialsError):
        return error.fault
    return "the origin does not answer"


class Outage:
    """What this process knows of the origin's absence. Owns the task that waits for its return; `close` ends it."""

    def __init__(self, origin: OriginClient, clock: Clock) -> None:
        self._origin = origin
        self._clock = clock
        self._prober: asyncio.Task[None] | None = None

    @property
    def is_on(self) -> bool:
        """Whether the origin was found away, and not found back yet."""
        return self._prober is not None

    async def ask(self, bucket: str, question: Callable[[], Awaitable[T]]) -> T:
        """The origin's answer, if it comes soon.

        Raises:
            OriginAwayError: it does not, or the origin is known to be away.
            OriginRefusedError: as the question.
        """
        if self.is_on:
            raise OriginAwayError("the origin is away")
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await question()
        except AWAY as error:
            self._begin(bucket, error)
            raise OriginAwayError(_what(error)) from error

    @asynccontextmanager
    async def bounded(self, bucket: str, **context: Any) -> AsyncIterator[None]:
        """What only the origin can answer gets a bounded time, shorter than clients wait: they hear 503 and retry.

        Raises:
            OverloadedError: the origin did not answer.
        """
        try:
            async with asyncio.timeout(AWAY_BOUND_S if self.is_on else BOUND_S):
                yield
        except AWAY as error:
            self._begin(bucket, error)
            raise OverloadedError(_what(error), bucket=bucket, **context) from error

    @contextmanager
    def noticed(self, bucket: str) -> Iterator[None]:
        """What only the origin can do, for as long as it takes; that it is away is known from then on."""
        try:
            yield
        except AWAY as error:
            self._begin(bucket, error)
            raise

    def _begin(self, bucket: str, error: BaseException) -> None:
        if self._prober is None:
            log.error(f"{_what(error)}; serving what is known", error=error)
            self._prober = asyncio.create_task(self._probe(bucket))

    async def _probe(self, bucket: str) -> None:
        """Any answer at all means that the origin is back."""
        began_s = self._clock.monotonic_s()
        while True:
            await self._clock.sleep(PROBE_INTERVAL_S)
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await self._origin.get_bucket(bucket, self._clock.wall_s())
                break
            except AWAY:
                continue
            except OriginRefusedError:
                break
        log.info("the origin answers again", after_s=round(self._clock.monotonic_s() - began_s, 1))
        self._prober = None

    async def close(self) -> None:
        """End the probing."""
        if self._prober is not None:
            self._prober.cancel()
            await asyncio.gather(self._prober, return_exceptions=True)
