"""Waiting inside a request for what must reach the origin first: bounded, and named when it does not come."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial

from tiergate.checkpoints.markers import scope_of
from tiergate.config import FenceMode
from tiergate.directory.base import Intent
from tiergate.engine.afterwards import Afterwards
from tiergate.engine.rooms import Rooms, log_name
from tiergate.errors import FencedError, OriginError, OverloadedError, TiergateError
from tiergate.model import NO_BASE, UNKNOWN_BASE, Actor, Kind, ObjectName, Pending, Role, Step, new_uid
from tiergate.observe.logs import get_logger
from tiergate.writeback.fence import PendingView, blockers
from tiergate.writeback.holds import sets_around
from tiergate.writeback.promotion import Promotion
from tiergate.writeback.recovery import doubt
from tiergate.writeback.renewal import held_by, may_be_held

FIRST_LOOK_S = 0.005
LAST_LOOK_S = 0.25

log = get_logger(__name__)

FAR_REVISION = 1 << 62
"""The place of a write that is not committed yet: after everything."""


class Turn:
    """Lets a request wait for write-back. The directory is shared by all processes of the node, so it is looked at
    again and again, ever less often, until the bound."""

    def __init__(self, rooms: Rooms, afterwards: Afterwards, promotion: Promotion) -> None:
        self._rooms = rooms
        self._afterwards = afterwards
        self._promotion = promotion

    async def settle(self, names: Sequence[ObjectName]) -> None:
        """Wait until nothing is pending of any of `names`; what stays in memory by policy no longer does.

        Raises:
            OverloadedError: not in time, or one of them is quarantined.
        """
        for name in names:
            await self._promotion.owe(name)
        for name in names:
            await self.wait(name, partial(self._is_settled, name))

    async def come_to_delete(self, names: Sequence[ObjectName], past: Collection[ObjectName]) -> None:
        """Wait until nothing is pending of any of `names`, and no marker of a set that they belong to is in the origin.
        A marker among them that was withdrawn does not come back, unless it is of `past`, where only a version goes.

        Raises:
            OverloadedError: not in time.
            OriginError: a marker could not be withdrawn.
        """
        directory, markers = self._rooms.directory, self._rooms.markers
        for name in self._one_of_each_set(names):
            await self._clear_way_to_delete(name)
        for name in names:
            seen = await directory.get(name)
            if name not in past and seen.pending is not None and seen.pending.withdrawn:
                now_s = self._rooms.clock.wall_s()
                intent = Intent(markers.role_of(name, 0), seen.revision, now_s, UNKNOWN_BASE)
                self._rooms.replaced(name, await directory.delete(name, intent))
        self._rooms.wake()
        await self.settle(names)

    def _one_of_each_set(self, names: Sequence[ObjectName]) -> Collection[ObjectName]:
        """What lies in one folder has the same markers around it, but for those of its own scope a marker."""
        roles = {name: self._rooms.markers.role_of(name, 0) for name in names}
        sets = {
            (name.bucket, scope_of(name.key), role is Role.MARKER): name
            for name, role in roles.items()
            if role is not Role.POINTER
        }
        return sets.values()

    async def _clear_way_to_delete(self, name: ObjectName) -> None:
        """Nothing is pending of `name` that would hold a marker back: one that goes in while it is withdrawn would be
        clean, and gone. To it any name is a member of its set."""
        uid = new_uid(self._rooms.clock.wall_s())
        step = Step(name, uid, self._rooms.step_holder, Role.SMALL, through=True, replaces=True)
        try:
            await self.wait(name, partial(self._rooms.directory.begin_step, step))
            await self._rooms.withdrawals.clear_way(name, Actor.parse(step.holder).holder, deleting=True)
        finally:
            await self.end(step)

    async def settle_prefix(self, bucket: str, prefix: str) -> None:
        """Wait until nothing is pending under a prefix; as `settle`.

        Raises:
            OverloadedError: not in time.
        """

        async def settled() -> bool:
            pending = await self._rooms.directory.pending_under(bucket, prefix, 1)
            for write in pending:
                await self._end_holds(write)
            return not pending

        await self._promotion.under(bucket, prefix)
        await self.wait(ObjectName(bucket, prefix), settled)

    @asynccontextmanager
    async def taken(self, name: ObjectName, role: Role, start_revision: int) -> AsyncIterator[str]:
        """Wait until `name` may become visible in the origin: earlier writes of the key are settled, the fence is open,
        and no marker stands that the write would make untrue. None returns, and nothing else of the key goes, before
        the block ends. Gives the base, what the origin holds of the key.

        Raises:
            OverloadedError: not in time.
            OriginError: a marker could not be withdrawn.
        """
        now_s = self._rooms.clock.wall_s()
        step = Step(name, new_uid(now_s), self._rooms.step_holder, role, through=True, replaces=True)
        subject = Pending(
            name=name,
            uid=step.uid,
            kind=Kind.PUT,
            role=role,
            place=FAR_REVISION,
            revision=FAR_REVISION,
            start_revision=start_revision,
            committed_s=now_s,
            size_bytes=0,
        )
        await self._promotion.clear(name, role)
        await self._end_quiet(name)
        try:
            await self.wait(name, partial(self._begins, step, subject))
            base = await self._base(name)
            if base == NO_BASE:
                await self._rooms.directory.begin_step(replace(step, replaces=False))
            else:
                await self._rooms.withdrawals.clear_way(name, Actor.parse(step.holder).holder)
            yield base
        finally:
            await self.end(step)
            self._rooms.wake()

    async def end(self, step: Step) -> None:
        """The step is over, whatever became of it. Where the directory does not take that now, it does later."""

        async def ended() -> bool:
            await self._rooms.directory.end_step(step)
            return True

        await self.or_later(ended)

    async def doubt(self, name: ObjectName) -> None:
        """The origin may or may not have taken a write of the key that nobody acknowledged: it is asked before the next
        read. As `end`."""

        async def doubted() -> bool:
            await doubt(self._rooms.directory, name)
            if self._rooms.markers.role_of(name, 0) is Role.MARKER:
                await self._rooms.withdrawals.learn(name)  # What nobody knows of, nobody would withdraw.
            return True

        await self.or_later(doubted)

    async def or_later(self, work: Callable[[], Awaitable[bool]]) -> None:
        """Do it now; where that does not work, again and again in the background."""
        try:
            await work()
        except TiergateError as error:
            log.warning("left for later", error=error)
            self._afterwards.add(work)
        except asyncio.CancelledError:
            self._afterwards.add(work)
            raise

    async def _begins(self, step: Step, subject: Pending) -> bool:
        """Take the turn if it has come. What is committed before the step is announced is seen by the second look;
        write-back of what is committed later sees the step."""
        if not await self._is_open(subject) or not await self._rooms.directory.begin_step(step):
            return False
        if await self._is_open(subject):
            return True
        await self._rooms.directory.end_step(step)
        return False

    async def _is_open(self, subject: Pending) -> bool:
        if not await self._is_settled(subject.name):
            return False
        pending = await self._rooms.directory.beside([subject])
        mode, quiet_s = self._rooms.fence_of(subject.name), self._rooms.settings.marker_quiet_s
        is_open = blockers(subject, PendingView(pending), mode, self._rooms.clock.wall_s(), quiet_s) is None
        if not is_open:
            await self._end_hold(subject, pending)
        return is_open

    async def _end_holds(self, write: Pending) -> None:
        """A request waits for the write: see `_end_hold`."""
        await self._end_hold(write, [write, *await self._rooms.directory.beside([write])])

    async def _end_hold(self, subject: Pending, pending: Sequence[Pending]) -> None:
        """A request waits for `subject`, and so perhaps for what is held until the marker of its set is written anew,
        which may be what the request is about: the marker is withdrawn now, and nothing is held any more. One of
        `pending` at a time; who waits looks again."""
        is_strict = self._rooms.fence_of(subject.name) is FenceMode.STRICT
        scope = "" if is_strict else scope_of(subject.name.key)
        for write in pending:
            if write.name.bucket != subject.name.bucket or not write.name.key.startswith(scope):
                continue
            if not may_be_held(write) or self._rooms.fence_of(write.name) is FenceMode.OFF:
                continue
            if held_by(write, await sets_around(self._rooms.directory, write)) is not None:
                await self._withdraw_for(write.name)
                return

    async def _withdraw_for(self, name: ObjectName) -> None:
        """Withdraw the markers of a write that is held, unless one is on its way just now."""
        uid = new_uid(self._rooms.clock.wall_s())
        step = Step(name, uid, self._rooms.step_holder, Role.SMALL, through=True, replaces=True)
        try:
            if await self._rooms.directory.begin_step(step):
                await self._rooms.withdrawals.clear_way(name, Actor.parse(step.holder).holder)
        except (OriginError, OverloadedError) as error:
            log.warning("what is held for a set could not be let go yet", error=error, **log_name(name))
        finally:
            await self.end(step)

    async def _end_quiet(self, name: ObjectName) -> None:
        """A withdrawn marker stays away while more may come for its set; who speaks of the marker itself says that no
        more does. So it need not be waited for longer than its set."""
        pending = (await self._rooms.directory.get(name)).pending
        if pending is not None and pending.disturbed_s:
            with suppress(FencedError):  # Another node owns it; there it waits as long as it does.
                await self._rooms.directory.settled_set(name, pending.uid)
            self._rooms.wake()

    async def _base(self, name: ObjectName) -> str:
        record = (await self._rooms.directory.get(name)).record
        if record is not None:
            return record.origin_etag or UNKNOWN_BASE
        there = await self._rooms.origin.head_object(name)
        return there.etag if there else NO_BASE

    async def _is_settled(self, name: ObjectName) -> bool:
        pending = (await self._rooms.directory.get(name)).pending
        if pending is not None and pending.quarantined:
            raise OverloadedError("an earlier write of this key is quarantined", retry_after_s=30, **log_name(name))
        if pending is not None:
            await self._end_holds(pending)
        return pending is None

    async def wait(self, name: ObjectName, done: Callable[[], Awaitable[bool]]) -> None:
        """Look again and again, ever less often, until `done`.

        Raises:
            OverloadedError: not within `through_wait`.
        """
        clock = self._rooms.clock
        deadline_s = clock.monotonic_s() + self._rooms.settings.through_wait_s
        look_s = FIRST_LOOK_S
        while not await done():
            if clock.monotonic_s() >= deadline_s:
                raise OverloadedError("what must reach the origin first did not", retry_after_s=5, **log_name(name))
            self._rooms.wake()
            await clock.sleep(look_s)
            look_s = min(look_s * 2, LAST_LOOK_S)
