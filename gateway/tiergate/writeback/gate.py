"""Grants the steps that can be seen in the origin, one look at the fence at a time.

A marker going in and a member of its set being replaced must not overlap. Among the writes of this process that is
seen to here: the marker's turn is decided on a fresh reading of what is pending, and a replaced member waits until no
marker of its set is on its way. With write-throughs, which other processes do, the directory sees to it (`Step`).
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from tiergate.checkpoints.markers import collide
from tiergate.clock import Clock
from tiergate.directory.base import Directory
from tiergate.errors import FencedError
from tiergate.model import NO_BASE, Kind, ObjectName, Pending, Role, Step
from tiergate.writeback.fence import Blocked, FenceMode, PendingView, blockers


class Gate:
    """The fence in action for a node's uploader, in the process that `holder` names. `slots` bounds how much is worked
    on at a time; a write that waits for its turn gives its slot away."""

    def __init__(
        self,
        directory: Directory,
        clock: Clock,
        fence_of: Callable[[ObjectName], FenceMode],
        quiet_s: float,
        holder: str,
        slots: asyncio.Semaphore,
    ) -> None:
        self._directory = directory
        self._clock = clock
        self._fence_of = fence_of
        self._quiet_s = quiet_s
        self._holder = holder
        self._slots = slots
        self._view = PendingView([])
        self._changed = asyncio.Event()
        self._through: list[Step] = []
        self._markers_going: dict[ObjectName, Step] = {}
        self.waiting: set[ObjectName] = set()
        """Writes in flight that wait for their turn and so need no slot."""
        self.on_wait: Callable[[], None] = lambda: None
        """Called when one more waits."""

    async def look(self) -> PendingView:
        """Read what is pending anew and let those waiting look again."""
        await self._read()
        self._notify()
        return self._view

    async def _read(self) -> None:
        self._view = PendingView(await self._directory.pending())
        # After what is pending: a write-through that is announced later sees that and waits.
        self._through = [step for step in await self._directory.steps() if step.through]

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
            step = self._markers_going.pop(write.name, None)
            if step is not None:
                await self._directory.end_step(step)
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
        step = self._markers_going[subject.name] = self._step(subject)
        is_granted = False
        try:
            is_begun = await self._directory.begin_step(step)
            await self._read()
            is_granted = is_begun and self.blocked(subject, self._view) is None
        finally:
            if not is_granted:
                del self._markers_going[subject.name]
                await self._directory.end_step(step)
            self._notify()
        return is_granted

    def _step(self, subject: Pending) -> Step:
        replaces = subject.base != NO_BASE
        return Step(subject.name, subject.uid, self._holder, subject.role, through=False, replaces=replaces)

    def _overlaps(self, subject: Pending) -> bool:
        """Whether a write-through or a marker is on its way that the step must not overlap with."""
        step = self._step(subject)
        return any(collide(step, other) for other in (*self._through, *self._markers_going.values()))

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
