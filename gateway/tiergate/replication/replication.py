"""`Replication` over the peers of a cluster."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress

from tiergate.clock import Clock
from tiergate.errors import PeerError
from tiergate.model import Body, Holder, Node, ObjectName
from tiergate.observe.metrics import Metrics
from tiergate.replication.base import PROMISE, Copies, Copying, Notice
from tiergate.replication.channel import PeerChannel
from tiergate.replication.copying import PeerCopying
from tiergate.replication.fetching import Fetching
from tiergate.replication.notices import NoticeQueues
from tiergate.replication.roster import Roster
from tiergate.replication.seams import HoldingMemory
from tiergate.replication.spreading import Spreading
from tiergate.replication.wire import HELD_BODIES_COUNT, PeerFaultError, Reason

DEFAULT_COPIES_COUNT = 2

GIVE_BACKS_COUNT = 64
"""Messages of what peers need not keep that may be under way. Beyond that it is left to their sweep."""


class PeerReplication:
    """Implements `Replication`. Made in a running event loop; `channel` is closed by whoever made it, after `close`."""

    def __init__(
        self,
        memory: HoldingMemory,
        channel: PeerChannel,
        roster: Roster,
        clock: Clock,
        metrics: Metrics,
        commit_s: float = PROMISE.commit_s,
    ) -> None:
        self._memory = memory
        self._channel = channel
        self._roster = roster
        self._clock = clock
        self._commit_s = commit_s
        self.fetching = Fetching(memory, channel, roster, clock, metrics)
        """Also for what peers make this node pull."""
        self._spreading = Spreading(self.fetching, channel, roster, clock, commit_s)
        self._notices = NoticeQueues(channel, roster, metrics)
        self._background: set[asyncio.Task[None]] = set()

    @property
    def me(self) -> Holder | None:
        return self._roster.me()

    def rule(self, asked_count: int | None) -> int:
        if asked_count is not None:
            return asked_count
        return DEFAULT_COPIES_COUNT if self._roster.others() else 1

    def can_reach(self, copies_count: int) -> bool:
        return copies_count <= 1 + len(self._roster.others())

    def is_ready(self, copies_count: int) -> bool:
        return copies_count <= 1 + sum(not self._roster.is_shunned(node.name) for node in self._roster.others())

    def begin(self, name: ObjectName, holder: str, body_uid: str, size_bytes: int | None, copies_count: int) -> Copying:
        """See `Replication.begin`.

        Raises:
            MembershipOverError: this node is no member now.
        """
        return PeerCopying(
            self._memory,
            self._channel,
            self._roster,
            self._clock,
            self._give_back,
            name,
            holder,
            body_uid,
            size_bytes,
            copies_count - 1,
            self._commit_s,
        )

    async def spread(
        self,
        name: ObjectName,
        holder: str,
        bodies: Sequence[Body],
        copies_count: int,
        at: Mapping[str, Sequence[Holder]],
    ) -> Copies:
        """See `Replication.spread`. Where it raises, what this node holds under `holder` is the caller's to drop; what
        others took goes with their sweep, since some of it may have been there before."""
        return await self._spreading.spread(name, holder, bodies, copies_count, at)

    def sources(self, holders: Iterable[Holder]) -> list[Holder]:
        return self._roster.nearest(holders)

    async def read(self, source: Holder, body: Body, index: int) -> AsyncGenerator[bytes]:
        node = self._roster.node_of(source)
        if node is None:
            raise PeerError("the node is gone", peer=source.node)
        pieces = self._channel.block(node, body.uid, index, body.block_size_bytes(index))
        try:
            async with aclosing(pieces):
                async for piece in pieces:
                    yield piece
        except PeerFaultError as error:
            if error.reason is not Reason.MISSING:
                self._roster.shun(node.name)
            raise

    async def held(self, source: Holder, bodies: Sequence[Body]) -> set[str]:
        found: set[str] = set()
        node = self._roster.node_of(source)
        if node is None:
            return found
        with suppress(PeerFaultError):  # Counted where it was raised.
            for start in range(0, len(bodies), HELD_BODIES_COUNT):
                part = bodies[start : start + HELD_BODIES_COUNT]
                answer = await self._channel.held(node, part)
                found |= {body.uid for body, is_held in zip(part, answer, strict=True) if is_held}
        return found

    async def have_dropped(self, source: Holder, holder: str, body_uids: Sequence[str]) -> None:
        node = self._roster.node_of(source)
        if node is None:
            raise PeerError("the node is gone", peer=source.node)
        for body_uid in body_uids:
            await self._channel.give_back(node, holder, body_uid)

    def notice(self, holders: Iterable[Holder], notices: Sequence[Notice]) -> None:
        self._notices.put(holders, notices)

    async def close(self) -> None:
        await self._notices.close()
        tasks = list(self._background)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _give_back(self, node: Node, holder: str, body_uid: str) -> None:
        if len(self._background) < GIVE_BACKS_COUNT:
            task = asyncio.create_task(self._tell_given_back(node, holder, body_uid))
            self._background.add(task)
            task.add_done_callback(self._background.discard)

    async def _tell_given_back(self, node: Node, holder: str, body_uid: str) -> None:
        with suppress(PeerFaultError):  # Counted where it was raised; the peer's sweep does without.
            await self._channel.give_back(node, holder, body_uid)
