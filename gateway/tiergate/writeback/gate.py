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
from tiergate.errors import FencedError
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
        self._changed = asyncio.Event()
        self._markers_going: set[ObjectName] = set()
        self.waiting: set[ObjectName] = set()
        """Writes in flight that wait for their turn and so need no slot."""
        self.on_wait: Callable[[], None] = lambda: None
        """Called when one more waits."""

    async def look(self) -> PendingView:
        """Read what is pending anew and let those waiting look again."""
        self._view = PendingView(await self._directory.pending())
        self._notify()
        return self._view

    def blocked(self, write: Pending, view: PendingView) -> Blocked | None:
        """What the write waits for in `view`, None if it may go."""
        return blockers(write, view, self._fence_of(write.name), self._clock.wall_s(), self._quiet_s)

    @asynccontextmanager
    async def visible(self, write: Pending) -> AsyncIterator[None]:
        """Wait for the write's turn; while inside, its visible step is under way. The caller holds a slot.

        Raises:
            FencedError: the write was superseded meanwhile and must not be seen any more.
        """
        await self._come(write)
        try:
            yield
        finally:
            if write.name in self._markers_going:
                self._markers_going.discard(write.name)
                self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _come(self, write: Pending) -> None:
        while True:
            # As it stands now: a marker may have been disturbed, or superseded, since it was begun.
            subject = (await self._directory.get(write.name)).pending
            if subject is None or subject.uid != write.uid:
                raise FencedError("superseded", key=write.name.key)
            if self._seems_free(subject) and await self._take_turn(subject):
                return
            await self._wait_without_slot(subject)

    def _seems_free(self, subject: Pending) -> bool:
        """What the last look says."""
        return self.blocked(subject, self._view) is None and not self._overlaps(subject)

    async def _take_turn(self, subject: Pending) -> bool:
        """Take the turn that `_seems_free` offers. Nothing is awaited between that and this, except by markers, which
        are seen by others while they look once more: what was committed since the last look is not in the view."""
        if subject.role is not Role.MARKER or subject.kind is not Kind.PUT:
            return True
        self._markers_going.add(subject.name)
        is_granted = False
        try:
            fresh = PendingView(await self._directory.pending())
            self._view = fresh
            is_granted = self.blocked(subject, fresh) is None
        finally:
            if not is_granted:
                self._markers_going.discard(subject.name)
            self._notify()
        return is_granted

    def _overlaps(self, subject: Pending) -> bool:
        """Whether a marker is on its way whose set would change. A marker is no member of the set it speaks for, a
        pointer of none."""
        if subject.base == NO_BASE or subject.role is Role.POINTER:
            return False
        name = subject.name
        return any(
            marker.bucket == name.bucket
            and name.key.startswith(scope_of(marker.key))
            and not (subject.role is Role.MARKER and scope_of(marker.key) == scope_of(name.key))
            for marker in self._markers_going
        )

    async def _wait_without_slot(self, subject: Pending) -> None:
        """Wait until the last look says that the turn may have come; somebody else may work meanwhile."""
        self.waiting.add(subject.name)
        self._slots.release()
        self.on_wait()
        try:
            while not self._seems_free(subject):
                await self._changed.wait()
                if subject.uid != self._uid_seen(subject.name):
                    break
        finally:
            # Whoever called gives the slot back in the end, also when this is cancelled.
            await self._slots.acquire()
            self.waiting.discard(subject.name)

    def _uid_seen(self, name: ObjectName) -> str:
        found = self._view.find(name)
        return found.uid if found is not None else ""
