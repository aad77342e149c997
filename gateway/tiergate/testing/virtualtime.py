"""An event loop whose time goes by only while nobody has anything to do: hours pass in an instant, and every run with
the same seed is the same. For code that waits on nothing but timers and on each other: no sockets, threads, children.
"""

import asyncio
import selectors
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


class StuckError(Exception):
    """Nobody can go on, and no timer would change that."""


class _Selector(selectors.BaseSelector):
    """Instead of waiting, moves the time on."""

    def __init__(self) -> None:
        self._keys: dict[int, selectors.SelectorKey] = {}
        self.now_s = 0.0

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        number = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        self._keys[number] = selectors.SelectorKey(fileobj, number, events, data)
        return self._keys[number]

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj if isinstance(fileobj, int) else fileobj.fileno())

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise StuckError
        if timeout > 0:
            self.now_s += timeout
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys


class VirtualLoop(asyncio.SelectorEventLoop):
    """See the module."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now_s


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """Like `asyncio.run`, in virtual time.

    Raises:
        StuckError: what runs waits for something that cannot happen.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


class VirtualClock:
    """The clock of code that runs there. `start_s`: the wall time at its beginning."""

    def __init__(self, start_s: float = 1_000_000.0) -> None:
        self._start_s = start_s

    def wall_s(self) -> float:
        return self._start_s + self.monotonic_s()

    def monotonic_s(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
