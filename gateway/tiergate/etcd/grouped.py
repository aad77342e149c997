"""Reads of a process, in groups: one is under way, the next takes all that was asked for meanwhile. Most of what etcd
spends on a read it spends once for each transaction, whatever is read in it.

Nobody waits for long who would not have waited at etcd: that, too, asks its leader for one group of reads at a time.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from tiergate.errors import DirectoryUnavailableError, TiergateError
from tiergate.etcd.values import Outcome, Range

GROUP_COUNT = 128
"""Ranges in one read: what etcd takes unless told otherwise (`--max-txn-ops`)."""


def may_join(ranges: Sequence[Range]) -> bool:
    """Whether a read is short enough for others to wait for: no pages of long ranges, and no counts of them."""
    return 0 < len(ranges) <= GROUP_COUNT and not any(each.limit or each.count_only for each in ranges)


@dataclass(frozen=True, slots=True)
class _Waiting:
    ranges: tuple[Range, ...]
    done: asyncio.Future[Outcome | None]


class GroupedReads:
    """Those of a client. `send`: read once, all of one revision."""

    def __init__(self, send: Callable[[Sequence[Range]], Awaitable[Outcome]]) -> None:
        self._send = send
        self._waiting: deque[_Waiting] = deque()
        self._task: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Stop; what waits or is under way is cancelled."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._cancel(self._waiting)  # by a task that never began

    async def read(self, ranges: tuple[Range, ...]) -> Outcome | None:
        """Read with others, tried once, and begun after this call. None: the group was refused, perhaps for something
        that another asked for; what asks alone hears what is meant for it.

        Raises:
            DirectoryUnavailableError: no answer.
            TiergateError: nobody else was in the group, and it was refused.
        """
        waiting = _Waiting(ranges, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if self._task is None or self._task.done():
            # It begins once everything that can run now has asked.
            self._task = asyncio.create_task(self._work())
        return await waiting.done

    async def _work(self) -> None:
        group: list[_Waiting] = []
        try:
            while group := self._take():
                await self._read(group)
        finally:
            self._cancel(group)
            self._cancel(self._waiting)

    def _cancel(self, reads: Iterable[_Waiting]) -> None:
        for each in reads:
            each.done.cancel()

    def _take(self) -> list[_Waiting]:
        """What goes together next, without those who gave up."""
        taken: list[_Waiting] = []
        count = 0
        while self._waiting and count + len(self._waiting[0].ranges) <= GROUP_COUNT:
            each = self._waiting.popleft()
            if not each.done.done():
                taken.append(each)
                count += len(each.ranges)
        return taken

    async def _read(self, group: Sequence[_Waiting]) -> None:
        try:
            outcome = await self._send([wanted for each in group for wanted in each.ranges])
        except Exception as error:
            is_for_all = len(group) == 1 or isinstance(error, DirectoryUnavailableError)
            for each in group:
                if each.done.done():
                    continue
                if is_for_all or not isinstance(error, TiergateError):
                    each.done.set_exception(error)
                else:
                    each.done.set_result(None)
            return
        start = 0
        for each in group:
            end = start + len(each.ranges)
            if not each.done.done():
                each.done.set_result(Outcome(outcome.succeeded, outcome.answers[start:end], outcome.revision))
            start = end
