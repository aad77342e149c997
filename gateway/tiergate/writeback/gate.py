"""Grants the steps that can be seen in the origin, one look at the fence at a time.

A marker going in and a member of its set being replaced must not overlap: the marker's turn is decided on a fresh
reading of what is pending, and a replaced member waits until no marker of its set is on its way.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from tiergate.checkpoints.markers import scope_of
from tiergate.clock import Clock
from tiergate.directory.base import Directory
from tiergate.model import NO_BASE, Kind, ObjectName, Pending, Role
from tiergate.writeback.fence import Blocked, FenceMode, PendingView, blockers


class Gate:
    """The fence in action for one node's uploader. `slots` bounds how much is worked on at a time; a write that waits
    for its turn gives its slot away."""

    def __init__(
        self,
        directory: Directory,
        clock: Clock,
        fence_of: Callable[[ObjectName], FenceMode],
        quiet_s: float,
        slots: asyncio.Semaphore,
    ) -> None:
        self._directory = directory
        self._clock = clock
        self._fence_of = fence_of
        self._quiet_s = quiet_s
        self._slots = slots
        self._view = PendingView([])
        self._turn = asyncio.Condition()
        self._markers_going: set[ObjectName] = set()
        self.waiting: set[ObjectName] = set()
        """Writes in flight that wait for their turn and so need no slot."""

    async def look(self) -> PendingView:
        """Read what is pending anew and let those waiting look again."""
        view = PendingView(await self._directory.pending())
        async with self._turn:
            self._view = view
            self._turn.notify_all()
        return view

    def blocked(self, write: Pending, view: PendingView) -> Blocked | None:
        """What the write waits for in `view`, None if it may go."""
        return blockers(write, view, self._fence_of(write.name), self._clock.wall_s(), self._quiet_s)

    @asynccontextmanager
    async def visible(self, write: Pending) -> AsyncIterator[None]:
        """Wait for the write's turn; while inside, its visible step is under way."""
        is_marker = write.role is Role.MARKER and write.kind is Kind.PUT
        async with self._turn:
            while not await self._may_go_now(write, is_marker):
                await self._wait_without_slot(write)
            if is_marker:
                self._markers_going.add(write.name)
        try:
            yield
        finally:
            self._markers_going.discard(write.name)
            async with self._turn:
                self._turn.notify_all()

    async def _may_go_now(self, write: Pending, is_marker: bool) -> bool:
        if not self._may_go(write, is_marker):
            return False
        # What was committed since the last look is not in the view yet.
        fresh = PendingView(await self._directory.pending()) if is_marker else self._view
        return self.blocked(write, fresh) is None

    async def _wait_without_slot(self, write: Pending) -> None:
        """Wait for the next look; somebody else may work meanwhile."""
        self.waiting.add(write.name)
        self._slots.release()
        try:
            await self._turn.wait()
        finally:
            self.waiting.discard(write.name)
            await self._slots.acquire()

    def _may_go(self, write: Pending, is_marker: bool) -> bool:
        if self.blocked(write, self._view) is not None:
            return False
        if is_marker or write.base == NO_BASE:
            return True
        return not any(
            marker.bucket == write.name.bucket and write.name.key.startswith(scope_of(marker.key))
            for marker in self._markers_going
            if marker != write.name
        )
