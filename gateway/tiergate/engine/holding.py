"""The bytes of a write until the directory knows of them: on this node and, in a cluster, on peers."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Self, TypeVar

from tiergate.engine.afterwards import Afterwards, to_its_end
from tiergate.engine.rooms import Rooms, log_name
from tiergate.errors import HolderLostError, OutcomeUnknownError, TooFewCopiesError
from tiergate.model import Body, Holder, ObjectName
from tiergate.observe.logs import get_logger
from tiergate.replication.base import Copies

COMMITS_COUNT = 4
"""How often a commit is tried while nodes that hold its copies go away."""

DOUBT_S = 30.0
"""A commit whose outcome is unknown did not happen if the directory, once it answers again, has not got it for so
long: nothing that was sent before is under way any more."""

log = get_logger(__name__)

T = TypeVar("T")


class Holding:
    """Bytes held for a write that is not committed yet. A context: left by an error it gives them back, here and on
    peers. Not where the commit may have happened all the same: the bytes are kept then, and the directory is asked
    later what became of it.

    `known` asks it whether it knows of the bytes; `undo` gives them back.
    """

    def __init__(
        self,
        rooms: Rooms,
        afterwards: Afterwards,
        name: ObjectName,
        holder: str,
        known: Callable[[], Awaitable[bool]],
        undo: Callable[[], Awaitable[None]],
    ) -> None:
        self._rooms = rooms
        self._afterwards = afterwards
        self._name = name
        self._holder = holder
        self._known = known
        self._undo = undo
        self._bodies: Sequence[Body] = ()
        self._copies_count = 1
        self._is_known = False
        self._in_doubt = False
        self._absent_since_s: float | None = None
        self.copies = Copies()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or self._is_known:
            return
        if self._in_doubt:
            log.warning("it is not known whether a commit happened, its bytes are kept", **log_name(self._name))
            self._afterwards.add(self._settled)
        else:
            await to_its_end(self.give_back())

    async def give_back(self) -> None:
        """Let go of the bytes, here and on peers."""
        await self._undo()

    def held(self, bodies: Sequence[Body], copies: Copies, copies_count: int) -> None:
        """The bodies are whole here and where `copies` says, on `copies_count` nodes by the rule."""
        self._bodies, self.copies, self._copies_count = bodies, copies, copies_count

    async def spread(self, bodies: Sequence[Body], copies_count: int, at: Mapping[str, Sequence[Holder]]) -> None:
        """Have the bodies whole here and on enough others; `at`: where each is now.

        Raises:
            TooFewCopiesError, MemoryFullError: as `Replication.spread`.
        """
        copies = await self._rooms.replication.spread(self._name, self._holder, bodies, copies_count, at)
        self.held(bodies, copies, copies_count)

    async def commit(self, attempt: Callable[[tuple[Holder, ...]], Awaitable[T]]) -> T:
        """Run a commit, given who holds the bytes; where one of them is lost, with another in its place.

        Raises:
            TooFewCopiesError: nobody takes its place, or they keep going away.
        """
        for _ in range(COMMITS_COUNT):
            if self._rooms.clock.monotonic_s() < self.copies.until_s:
                try:
                    return await self._attempt(attempt)
                except HolderLostError as error:
                    log.info("a copy was lost before its commit", error=error, **log_name(self._name))
            at = {body.uid: self.copies.holders for body in self._bodies}
            await self.spread(self._bodies, self._copies_count, at)
        raise TooFewCopiesError("the nodes that hold the copies keep going away", **log_name(self._name))

    async def _attempt(self, attempt: Callable[[tuple[Holder, ...]], Awaitable[T]]) -> T:
        try:
            result = await attempt(self.copies.holders)
        except OutcomeUnknownError:
            self._in_doubt = True
            raise
        except asyncio.CancelledError:
            # What is on its way to a cluster's directory may arrive; alone it has happened whole or not at all.
            self._in_doubt = not self._rooms.is_alone
            raise
        self._is_known = True
        return result

    async def _settled(self) -> bool:
        """Find out what became of the commit; whether that is known now."""
        if await self._known():
            self._rooms.memory.confirm(self._holder, [body.uid for body in self._bodies])
            self._rooms.wake()
            return True
        now_s = self._rooms.clock.monotonic_s()
        if self._absent_since_s is None:
            self._absent_since_s = now_s
        if now_s - self._absent_since_s < DOUBT_S:
            return False
        await self.give_back()
        return True
