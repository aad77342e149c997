"""Many questions of one request to the directory, some at a time where each takes a way over a network."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from tiergate.engine.rooms import Rooms

AT_ONCE_COUNT = 32
"""Questions of one request under way in a cluster. Alone the directory is at hand, and they go one by one."""

S = TypeVar("S")
T = TypeVar("T")


async def for_each(rooms: Rooms, items: Sequence[S], work: Callable[[S], Awaitable[T]]) -> list[T]:
    """What `work` returns for each of the items, in their order. One that fails ends it; those beside it are done."""
    if rooms.is_alone:
        return [await work(item) for item in items]

    async def done(item: S) -> tuple[T]:
        return (await work(item),)  # What it returns may be an error, too, which is none of ours.

    found: list[T] = []
    for start in range(0, len(items), AT_ONCE_COUNT):
        part = [done(item) for item in items[start : start + AT_ONCE_COUNT]]
        for result in await asyncio.gather(*part, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result
            found += result
    return found
