"""Seeing to it that bodies which exist somewhere are on enough nodes: this one fetches, others are told to pull."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence

from tiergate.clock import Clock
from tiergate.errors import TooFewCopiesError
from tiergate.model import Body, Holder, Node, ObjectName
from tiergate.replication.base import Copies
from tiergate.replication.channel import PeerChannel
from tiergate.replication.copying import REPLACEMENTS_COUNT
from tiergate.replication.fetching import Fetching
from tiergate.replication.roster import Roster
from tiergate.replication.wire import PULL_BODIES_COUNT, PeerFaultError, Pull

FRESH_SHARE = 1 / 3
"""A pull that took longer than this part of the time to commit is asked for once more: what it began with may have been
promised for too long."""

PULL_ROUNDS_COUNT = 3

At = Mapping[str, Sequence[Holder]]


class Spreading:
    """Spreads bodies."""

    def __init__(self, fetching: Fetching, channel: PeerChannel, roster: Roster, clock: Clock, commit_s: float) -> None:
        self._fetching = fetching
        self._channel = channel
        self._roster = roster
        self._clock = clock
        self._commit_s = commit_s

    async def spread(self, name: ObjectName, holder: str, bodies: Sequence[Body], copies_count: int, at: At) -> Copies:
        """See `Replication.spread`."""
        wanted = [body for body in bodies if body.size_bytes]
        me = self._roster.me()
        for body in wanted:
            try:
                await self._fetching.hold(body, holder, self._nodes(at.get(body.uid, ())))
            except PeerFaultError as error:
                raise TooFewCopiesError(
                    "a part of it is on no node that answers", bucket=name.bucket, key=name.key, body=body.uid
                ) from error
        if copies_count <= 1:
            return Copies((me,))
        return await self._to_others(name, holder, wanted, copies_count, at)

    async def _to_others(
        self, name: ObjectName, holder: str, bodies: Sequence[Body], copies_count: int, at: At
    ) -> Copies:
        """Raises TooFewCopiesError."""
        candidates = self._candidates(holder, bodies, at)[: copies_count - 1 + REPLACEMENTS_COUNT]
        held: list[tuple[Holder, float]] = []
        while len(held) < copies_count - 1:
            batch, candidates = candidates[: copies_count - 1 - len(held)], candidates[copies_count - 1 - len(held) :]
            if not batch:
                raise TooFewCopiesError(
                    "not enough nodes took a copy",
                    bucket=name.bucket,
                    key=name.key,
                    copies=1 + len(held),
                    wanted=copies_count,
                )
            outcomes = await asyncio.gather(*(self._pulled(node, holder, bodies, at) for node in batch))
            held += [outcome for outcome in outcomes if outcome is not None]
        until_s = min(asked_s for _, asked_s in held) + self._commit_s
        return Copies((self._roster.me(), *(each for each, _ in held)), until_s)

    def _candidates(self, holder: str, bodies: Sequence[Body], at: At) -> list[Node]:
        """The others: first who did not fail lately, of those who has most already, of equals by their place."""
        live = self._roster.live()
        there = Counter[str]()
        for body in bodies:
            for each in live.still(at.get(body.uid, ())):
                there[each.node] += body.size_bytes
        found = self._roster.places(holder)
        return sorted(found, key=lambda node: (self._roster.is_shunned(node.name), -there[node.name]))

    async def _pulled(self, node: Node, holder: str, bodies: Sequence[Body], at: At) -> tuple[Holder, float] | None:
        """Make a node hold all bodies; the holder it is then, and when it was asked. None if it fails."""
        asked_s, epoch = self._clock.monotonic_s(), node.epoch
        try:
            for _ in range(PULL_ROUNDS_COUNT):
                asked_s = self._clock.monotonic_s()
                for start in range(0, len(bodies), PULL_BODIES_COUNT):
                    some = tuple(bodies[start : start + PULL_BODIES_COUNT])
                    sources = tuple(self._names(at.get(body.uid, ()), node) for body in some)
                    epoch = await self._channel.pull(node, Pull(holder, some, sources))
                if self._clock.monotonic_s() - asked_s < self._commit_s * FRESH_SHARE:
                    break
        except PeerFaultError:
            self._roster.shun(node.name)
            return None
        return Holder(node.name, epoch), asked_s

    def _nodes(self, holders: Sequence[Holder]) -> list[Node]:
        found = (self._roster.node_of(each) for each in self._roster.nearest(holders))
        return [node for node in found if node is not None]

    def _names(self, holders: Sequence[Holder], node: Node) -> tuple[str, ...]:
        """Who can send a body to `node`: this node, and the others that have it."""
        others = (each.name for each in self._nodes(holders))
        return (self._roster.name, *(name for name in others if name != node.name))
