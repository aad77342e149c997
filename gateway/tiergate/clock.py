"""The only place that reads a clock; everything else is handed a `Clock`."""

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Wall time for what users see, monotonic time for durations, and the sleep that goes with both."""

    def wall_s(self) -> float:
        """Seconds since the Unix epoch; may jump."""
        ...

    def monotonic_s(self) -> float:
        """Seconds since an arbitrary start; never goes back, comparable over processes of one boot."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait `seconds` of monotonic time."""
        ...


class SystemClock:
    """The clock of this machine."""

    def wall_s(self) -> float:
        return time.time()

    def monotonic_s(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
