"""Notices on their way to other nodes: queued by node, sent together, dropped where that does not work."""

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence

from tiergate.model import Holder
from tiergate.observe.metrics import Metrics
from tiergate.replication.base import Notice
from tiergate.replication.channel import PeerChannel
from tiergate.replication.roster import Roster
from tiergate.replication.wire import NOTICES_COUNT, PeerFaultError

QUEUED_COUNT = 10_000
"""Notices that may wait for one node."""


class NoticeQueues:
    """The notices of this process. Owns its tasks, one for each node with something waiting; `close` ends them."""

    def __init__(self, channel: PeerChannel, roster: Roster, metrics: Metrics) -> None:
        self._channel = channel
        self._roster = roster
        self._metrics = metrics
        self._queues: dict[Holder, deque[Notice]] = {}
        self._tasks: dict[Holder, asyncio.Task[None]] = {}

    def put(self, holders: Iterable[Holder], notices: Sequence[Notice]) -> None:
        """Tell holders, soon."""
        for holder in self._roster.nearest(holders):
            queue = self._queues.setdefault(holder, deque())
            room = max(0, QUEUED_COUNT - len(queue))
            queue.extend(notices[:room])
            self._drop(len(notices[room:]))
            if queue and holder not in self._tasks:
                self._tasks[holder] = asyncio.create_task(self._send(holder, queue))

    async def close(self) -> None:
        """End what runs; what waits is dropped."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _send(self, holder: Holder, queue: deque[Notice]) -> None:
        try:
            while queue:
                batch = [queue.popleft() for _ in range(min(NOTICES_COUNT, len(queue)))]
                node = self._roster.node_of(holder)
                try:
                    if node is not None:
                        await self._channel.notify(node, batch)
                        continue
                except PeerFaultError:
                    pass  # Counted where it was raised.
                self._drop(len(batch) + len(queue))
                queue.clear()
        finally:
            self._drop(len(queue))
            del self._tasks[holder], self._queues[holder]

    def _drop(self, count: int) -> None:
        if count:
            self._metrics.dropped_notices.inc(count)
