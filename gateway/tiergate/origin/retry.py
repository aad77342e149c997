"""The one place where a call to the origin is tried again."""

import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tiergate.clock import Clock
from tiergate.errors import OriginExhaustedError, OriginTemporaryError

T = TypeVar("T")


class OriginBusyError(OriginTemporaryError):
    """The origin answered with a temporary status. `retry_after_s` is what it asked for, 0 if nothing."""

    def __init__(self, message: str, status: int, code: str, retry_after_s: float, **context: object) -> None:
        super().__init__(message, status=status, code=code, **context)
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s


class Tries:
    """Counts the tries of one call."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Retry:
    """Full jitter: each wait is a random share of a bound that doubles.

    https://aws.amazon.com/builders-library/timeouts-retries-and-backoff-with-jitter/
    """

    def __init__(self, clock: Clock, attempts_count: int, base_s: float, cap_s: float, limit_s: float) -> None:
        self._clock = clock
        self._attempts_count = attempts_count
        self._base_s = base_s
        self._cap_s = cap_s
        self._limit_s = limit_s
        self._random = random.Random()

    @property
    def attempts_count(self) -> int:
        return self._attempts_count

    async def run(self, attempt: Callable[[], Awaitable[T]], tries: Tries | None = None, **context: object) -> T:
        """Call `attempt` until it does not end in a temporary error.

        Raises:
            OriginExhaustedError: the tries or the time are used up; its cause is the last temporary error.
        """
        tries = tries or Tries()
        started_s = self._clock.monotonic_s()
        while True:
            tries.count += 1
            try:
                return await attempt()
            except OriginTemporaryError as error:
                wait_s = self._wait_s(tries.count, error)
                spent_s = self._clock.monotonic_s() - started_s
                if tries.count >= self._attempts_count or spent_s + wait_s > self._limit_s:
                    facts = error.context | context | {"attempts": tries.count}
                    raise OriginExhaustedError(error.message, **facts) from error
            await self._clock.sleep(wait_s)

    def _wait_s(self, tried: int, error: OriginTemporaryError) -> float:
        bound_s = min(self._cap_s, self._base_s * 2 ** min(tried - 1, 30))
        asked_s = error.retry_after_s if isinstance(error, OriginBusyError) else 0.0
        return max(self._random.uniform(0, bound_s), min(asked_s, self._cap_s))
