"""The end of a node that is told to stop: what it owes goes to the origin, newest checkpoints first, then to peers.

Whatever is left after that is named, since it is in this node's memory folder only.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tiergate.checkpoints.markers import is_within, scope_of
from tiergate.child import LEFT_BEHIND_STATUS
from tiergate.clock import Clock
from tiergate.directory.base import ClusterDirectory, Directory
from tiergate.errors import FencedError, OverloadedError, TiergateError
from tiergate.model import Holder, Kind, Live, ObjectName, Pending
from tiergate.observe.logs import get_logger
from tiergate.policy.rendezvous import ranked
from tiergate.s3.uri import uri_of
from tiergate.writeback.copier import Copier
from tiergate.writeback.gate import is_marker_put
from tiergate.writeback.standing import Standing
from tiergate.writeback.uploader import Uploader, context

log = get_logger(__name__)

LOOK_S = 0.1


def newest_first(owed: Sequence[Pending]) -> list[Pending]:
    """The members and the marker of the newest complete checkpoint, then of the one before it; what belongs to none
    comes last, oldest first. Pure."""
    by_place = sorted(owed, key=lambda write: write.place)
    markers = sorted((write for write in owed if is_marker_put(write)), key=lambda write: -write.revision)
    found: dict[ObjectName, Pending] = {}
    for marker in markers:
        scope = scope_of(marker.name.key)
        for write in by_place:
            is_member = write.name.bucket == marker.name.bucket and is_within(write.name.key, scope)
            if is_member and write.place <= marker.revision and write.name != marker.name:
                found.setdefault(write.name, write)
        found.setdefault(marker.name, marker)
    return [*found.values(), *(write for write in by_place if write.name not in found)]


@dataclass(slots=True)
class Amount:
    """Writes, and the bytes of the puts among them."""

    count: int = 0
    size_bytes: int = 0

    def add(self, write: Pending) -> None:
        self.count += 1
        self.size_bytes += write.size_bytes


@dataclass(slots=True)
class Report:
    """What became of what was owed: sent to the origin, handed over to nodes that hold it, left here alone. `sets` are
    the places of checkpoints of which something was left."""

    sent: Amount = field(default_factory=Amount)
    handed_over: Amount = field(default_factory=Amount)
    left: Amount = field(default_factory=Amount)
    sets: list[str] = field(default_factory=list)
    given: set[str] = field(default_factory=set)
    """The uids of what was handed over."""

    def leave(self, write: Pending) -> None:
        self.left.add(write)
        place = uri_of(write.name.bucket, scope_of(write.name.key))
        if place not in self.sets:
            self.sets.append(place)

    @property
    def status(self) -> int:
        """The exit status of the node."""
        return LEFT_BEHIND_STATUS if self.left.count else 0

    def tell(self) -> None:
        """One line in the log."""
        facts: dict[str, object] = {
            "sent": self.sent.count,
            "sent_bytes": self.sent.size_bytes,
            "handed_over": self.handed_over.count,
            "handed_over_bytes": self.handed_over.size_bytes,
            "left": self.left.count,
            "left_bytes": self.left.size_bytes,
        }
        if self.left.count:
            log.error("stopping: this is in the memory folder of this node only", sets=self.sets[:20], **facts)
        else:
            log.info("stopping: nothing is in the memory folder of this node only", **facts)


class Drain:
    """Two parts: `to_origin` beside the running uploader, `to_peers` when that has stopped. `cluster`: whom to hand
    over to, None for a node alone."""

    def __init__(
        self,
        directory: Directory,
        uploader: Uploader,
        clock: Clock,
        standing: Standing,
        cluster: "Peers | None" = None,
    ) -> None:
        self._directory = directory
        self._uploader = uploader
        self._clock = clock
        self._standing = standing
        self._cluster = cluster

    async def to_origin(
        self, drain_s: float, report: Report, promoting: "asyncio.Task[None] | None" = None
    ) -> list[Pending]:
        """Let the running uploader send, newest checkpoints first, until nothing that it may send is owed or `drain_s`
        is over; what is owed then. The caller then stops it. While `promoting` runs, more may come to be owed.

        Raises:
            OverloadedError: the directory does not answer, and it is over.
        """
        self._uploader.in_order = newest_first
        self._uploader.hurry()
        until_s = self._clock.monotonic_s() + drain_s
        seen: dict[str, Pending] = {}
        is_all = is_promoted = promoting is None
        while True:
            # One round later: the uploader has looked by then.
            is_all, is_promoted = is_promoted, promoting is None or promoting.done()
            try:
                owed = await self._directory.pending()
            except OverloadedError as error:
                if self._clock.monotonic_s() >= until_s:
                    raise
                log.warning("what is owed cannot be read, tried again", error=error)
                await self._clock.sleep(LOOK_S)
                continue
            now = {write.uid: write for write in owed}
            for uid, write in seen.items():
                if uid not in now:
                    report.sent.add(write)
            seen = now
            stays = self._uploader.stays(owed)
            if is_all and all(write.quarantined or write.uid in stays for write in owed):
                return owed
            if self._clock.monotonic_s() >= until_s:
                return owed
            await self._clock.sleep(LOOK_S)

    async def to_peers(self, report: Report) -> None:
        """With the uploader at rest: hand over what is still owed, or kept in memory only, and count what is left."""
        for write in await self._kept():
            if self._cluster is not None and await self._hand_over(self._cluster, write):
                report.handed_over.add(write)
                report.given.add(write.uid)
            else:
                report.leave(write)

    async def count_left(self, report: Report) -> None:
        """Where the drain did not come to its end: count what is owed and was not handed over.

        Raises:
            OverloadedError: the directory does not answer.
        """
        kept = await self._kept()
        report.left, report.sets = Amount(), []
        for write in kept:
            if write.uid not in report.given:
                report.leave(write)

    async def _kept(self) -> list[Pending]:
        return [*newest_first(await self._directory.pending()), *await self._directory.parked()]

    async def _hand_over(self, cluster: "Peers", write: Pending) -> bool:
        """Whether another node has what is needed to bring the write to the origin."""
        try:
            others = await cluster.fit_for(write, self._standing)
            if not others:
                return False
            for other in others:
                try:
                    await cluster.directory.give(write.name, write.uid, other)
                    return True
                except FencedError:
                    return True  # It is another's already.
                except TiergateError as error:
                    log.warning("a write could not be handed over", node=other.node, error=error, **context(write))
            # Its holders take it over once this node is gone.
            return write.kind is Kind.PUT
        except TiergateError as error:
            log.warning("a write could not be handed over", error=error, **context(write))
            return False


@dataclass(frozen=True, slots=True)
class Peers:
    """Whom a node that stops can hand over to."""

    directory: ClusterDirectory
    copier: Copier
    live: Callable[[], Live]

    async def fit_for(self, write: Pending, standing: Standing) -> list[Holder]:
        """The living nodes that could bring a write to the origin, best first; others get the bytes if none has them.

        Raises:
            OverloadedError: there are none.
        """
        me, live = {standing.me()}, self.live()
        if write.kind is Kind.DELETE:
            fit = {node.holder for node in live.nodes.values()} - me
        else:
            fit = await self._holding(write, live) - me
            if not fit:
                seen = await self.directory.get(write.name)
                version = seen.record.version if seen.record else None
                if version is None or version.uid != write.uid:
                    return []
                await self.copier.copy(write.name, version)
                fit = await self._holding(write, live) - me
        by_name = {each.node: each for each in fit}
        return [by_name[node] for node in ranked(write.uid, by_name)]

    async def _holding(self, write: Pending, live: Live) -> set[Holder]:
        return live.still((await self.directory.get(write.name)).holders.get(write.uid, frozenset()))
