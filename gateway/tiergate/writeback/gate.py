"""Grants the steps that can be seen in the origin, one look at the fence at a time.

A marker going in and a member of its set being replaced must not overlap. Among the writes of this process that is
seen to here: the marker's turn is decided on a fresh reading of what is pending, and each waits until the other is not
on its way, also where no fence holds it back: a marker that goes in while it is withdrawn would be clean, and gone.
With write-throughs, which other processes do, and with other nodes the directory sees to it (`Step`): markers announce
themselves always, and what replaces something where nodes share an origin.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from tiergate.checkpoints.markers import collide
from tiergate.clock import Clock
from tiergate.directory.base import Directory
from tiergate.errors import FencedError, OverloadedError
from tiergate.model import NO_BASE, Actor, Kind, ObjectName, Pending, Role, Step
from tiergate.observe.logs import get_logger
from tiergate.writeback.fence import Blocked, FenceMode, PendingView, blockers
from tiergate.writeback.holds import HoldBounds, Holds
from tiergate.writeback.standing import Standing

log = get_logger(__name__)


class Gate:
    """The fence in action for a node's uploader. `slots` bounds how much is worked on at a time; a write that waits for
    its turn gives its slot away."""

    def __init__(
        self,
        directory: Directory,
        clock: Clock,
        fence_of: Callable[[ObjectName], FenceMode],
        quiet_s: float,
        hold: HoldBounds,
        standing: Standing,
        slots: asyncio.Semaphore,
    ) -> None:
        self._directory = directory
        self._clock = clock
        self._fence_of = fence_of
        self._quiet_s = quiet_s
        self._standing = standing
        self._slots = slots
        self.holds = Holds(directory, clock, fence_of, hold)
        self._view = PendingView([])
        self._changed = asyncio.Event()
        self._steps: list[Step] = []
        self._announced: list[Step] = []
        self._going: dict[ObjectName, Step] = {}
        self._present: Counter[str] = Counter()
        """Uids of the writes that are inside `visible`."""
        self.waiting: set[ObjectName] = set()
        """Writes in flight that wait for their turn and so need no slot."""
        self.on_wait: Callable[[], None] = lambda: None
        """Called when one more waits."""

    @property
    def is_shared(self) -> bool:
        """Whether other nodes write into the origin too, so that what holds a write back may go without a word."""
        return self._standing.is_shared

    async def look(self) -> list[Pending]:
        """Read anew what this node owes and what that waits for; let those waiting look again. What is owed, by
        place."""
        own = await self._read()
        await self._end_stale()
        self._notify()
        return own

    async def _read(self) -> list[Pending]:
        own = await self._directory.pending()
        strict = {write.name.bucket for write in own if self._fence_of(write.name) is FenceMode.STRICT}
        beside = await self._directory.beside(own, strict) if self.is_shared else own
        await self.holds.look(own)
        self._view = self.view_of(beside)
        # After what is pending: a step that is announced later sees that and waits.
        steps = await self._directory.steps()
        self._steps = [step for step in steps if step.through or not self._is_own(step)]
        self._announced = [step for step in steps if not step.through]
        return own

    def view_of(self, pending: Sequence[Pending]) -> PendingView:
        """What the fence looks at, with sets as they were known last."""
        return PendingView(pending, self.holds.sets)

    def _is_own(self, step: Step) -> bool:
        return Actor.parse(step.holder).token == self._standing.token

    async def _end_stale(self) -> None:
        """End what is announced for this process, or for this node as a whole, and is not under way: the word that it
        was over got lost, or another node superseded a write that had begun here."""
        for step in self._announced:
            actor = Actor.parse(step.holder)
            is_mine = self._is_own(step) or (not actor.token and _node(actor) == _node(self._standing.actor))
            if is_mine and not self._present[written(step)]:
                await self._directory.end_step(step)

    def blocked(self, write: Pending, view: PendingView | None = None) -> Blocked | None:
        """What the write waits for in `view` (None: at the last look), None if it may go."""
        at = self._view if view is None else view
        return blockers(write, at, self._fence_of(write.name), self._clock.wall_s(), self._quiet_s)

    @asynccontextmanager
    async def visible(self, write: Pending) -> AsyncIterator[None]:
        """Wait for the write's turn; while inside, its visible step is under way. The caller holds a slot.

        Raises:
            FencedError: the write was superseded meanwhile and must not be seen any more.
            MembershipOverError: this node must change nothing now.
        """
        self._present[write.uid] += 1
        try:
            await self._come(write)
            yield
        finally:
            step = self._going.pop(write.name, None)
            try:
                if step is not None and self._is_announced(write):
                    await self._end(step)
            finally:
                self._present[write.uid] -= 1
                self._present += Counter()  # Forgets what is at zero.
                self._notify()

    async def _end(self, step: Step) -> None:
        try:
            await self._directory.end_step(step)
        except OverloadedError as error:
            # It happened or it did not; a later look ends the announcement.
            log.warning("a step's end could not be told yet", bucket=step.name.bucket, key=step.name.key, error=error)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _come(self, write: Pending) -> None:
        while True:
            # As it stands now: a marker may have been disturbed, or superseded, since it was begun.
            subject = (await self._directory.get(write.name)).pending
            if subject is None or subject.uid != write.uid or not self._is_mine(subject):
                raise FencedError("superseded", key=write.name.key)
            await self.holds.ask(subject)
            self._standing.check(subject.owner)
            if self._seems_free(subject) and await self._take_turn(subject):
                return
            await self._wait_without_slot(subject)

    def _is_mine(self, subject: Pending) -> bool:
        return subject.owner is None or subject.owner == self._standing.me()

    def _seems_free(self, subject: Pending) -> bool:
        """What the last look says."""
        return self.blocked(subject) is None and not self._overlaps(subject)

    async def _take_turn(self, subject: Pending) -> bool:
        """Take the turn that `_seems_free` offers. Nothing is awaited between that and this, except by what announces
        itself, which is seen by others while it looks once more: what was committed since the last look is not in the
        view."""
        if not overlaps_anything(subject):
            return True
        step = self._going[subject.name] = self._step(subject)
        if not self._is_announced(subject):
            return True
        is_granted = False
        try:
            is_granted = await self._directory.begin_step(step)
            if not is_granted or is_marker_put(subject):
                await self._read()
                is_granted = is_granted and self.blocked(subject) is None
        finally:
            if not is_granted:
                del self._going[subject.name]
                await self._end(step)
            self._notify()
        return is_granted

    def _is_announced(self, subject: Pending) -> bool:
        """A marker going in; and, where a marker may go in from another node, what makes it untrue."""
        return self.is_shared or is_marker_put(subject)

    def _step(self, subject: Pending) -> Step:
        holder, replaces = str(self._standing.actor), subject.base != NO_BASE
        return Step(subject.name, f"{subject.uid}@{holder}", holder, subject.role, through=False, replaces=replaces)

    def _overlaps(self, subject: Pending) -> bool:
        """Whether something is on its way that the step must not overlap with."""
        step = self._step(subject)
        return any(collide(step, other) for other in (*self._steps, *self._going.values()))

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


def is_marker_put(write: Pending) -> bool:
    """Whether the write, once seen, says that its set is whole."""
    return write.role is Role.MARKER and write.kind is Kind.PUT


def overlaps_anything(write: Pending) -> bool:
    """Whether there may be something that the write must not overlap with: a marker goes in, or may become untrue."""
    return is_marker_put(write) or (write.role is not Role.POINTER and write.base != NO_BASE)


def written(step: Step) -> str:
    """The uid of the write that a step of write-back brings to the origin."""
    return step.uid.removesuffix(f"@{step.holder}")


def _node(actor: Actor) -> str:
    return actor.holder.node if actor.holder else ""
