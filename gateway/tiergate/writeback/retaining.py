"""Which sets stay in this node's memory: looks again and again at what is there, and tells memory how to evict it."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tiergate.checkpoints.layouts import layout_named
from tiergate.checkpoints.markers import Markers
from tiergate.checkpoints.recognition import set_prefix_of, sets_of
from tiergate.checkpoints.retention import HeldSet, Keep, group_of, keeps, within
from tiergate.clock import Clock
from tiergate.config.settings import PrefixSettings
from tiergate.directory.base import ClusterDirectory, Directory
from tiergate.errors import OverloadedError, RequestError, TiergateError
from tiergate.memory.memory import BodyFound, Level, Memory, Rank
from tiergate.model import Body, Holder, ObjectName, PinnedPrefix, Record, Role, State
from tiergate.observe.logs import get_logger
from tiergate.observe.metrics import Metrics
from tiergate.s3.uri import uri_of

log = get_logger(__name__)

OBJECTS_COUNT = 100_000
"""Objects of one prefix that are looked at. Of one that has more, nothing is retained."""

PAGE_COUNT = 1000
PINS_COUNT = 1000

PAUSE_S = 1.0
"""The least time between two looks."""

NOTHING_S = 10.0
"""The same where nothing is to be retained: another node may pin something."""

IDLE_SHARE = 5
"""A look that took long is followed by a pause so many times as long."""

_LEVELS = {
    Keep.SURPLUS: Level.FIRST,
    Keep.KEPT: Level.LATE,
    Keep.NEWEST: Level.LAST,
    Keep.OWED: Level.PINNED,
    Keep.PINNED: Level.PINNED,
}


@dataclass(frozen=True, slots=True)
class HeldObject:
    """An object that this node's memory should have. `is_marker` ones may lie on other nodes: without `bodies`."""

    key: str
    revision: int
    is_marker: bool
    is_owed: bool
    bodies: tuple[Body, ...]


@dataclass(frozen=True, slots=True)
class RunReport:
    """A run's sets in this memory, by what becomes of them."""

    uri: str
    keep_count: int
    sets: Mapping[HeldSet, Keep]


@dataclass(frozen=True, slots=True)
class PinReport:
    """A pinned prefix, how much of it is in this memory, and whether that is within the limit."""

    pinned: PinnedPrefix
    size_bytes: int
    is_kept: bool


@dataclass(frozen=True, slots=True)
class RetentionReport:
    """What the last look found. `fault`: why there was no newer one."""

    runs: tuple[RunReport, ...] = ()
    pins: tuple[PinReport, ...] = ()
    pinned_bytes: int = 0
    limit_bytes: int = 0
    fault: str = ""


class Held:
    """What this node's memory should have under a prefix, as the directory says. `me`: this node as a member of a
    cluster; None where it is alone, and all that there is should be here."""

    def __init__(
        self,
        directory: Directory,
        memory: Memory,
        cluster: ClusterDirectory | None = None,
        me: Callable[[], Holder | None] = lambda: None,
    ) -> None:
        self._directory = directory
        self._memory = memory
        self._cluster = cluster
        self._me = me
        self._known: dict[str, HeldObject] = {}

    async def under(self, bucket: str, prefix: str) -> list[HeldObject]:
        """Raises:
        RequestError: there are too many.
        OverloadedError: the directory does not answer.
        """
        if self._cluster is None:
            return await self._alone(bucket, prefix)
        return await self._of_member(self._cluster, bucket, prefix)

    async def _alone(self, bucket: str, prefix: str) -> list[HeldObject]:
        found: list[HeldObject] = []
        after, count = "", 0
        while page := await self._directory.scan(bucket, prefix, after, PAGE_COUNT):
            after, count = page[-1].name.key, count + len(page)
            check_count(count)
            found += (held_of(record) for record in page if record.version is not None)
            if len(page) < PAGE_COUNT:
                break
            await asyncio.sleep(0)
        return found

    async def _of_member(self, cluster: ClusterDirectory, bucket: str, prefix: str) -> list[HeldObject]:
        me = self._me()
        if me is None:
            raise OverloadedError("this node is no member now")
        dirty = self._memory.dirty_holders()
        found: list[HeldObject] = []
        known: dict[str, HeldObject] = {}
        for each in await cluster.held_by(me.node):
            if each.epoch != me.epoch or each.name.bucket != bucket or not each.name.key.startswith(prefix):
                continue
            held = self._known.get(each.uid) or await self._read(each.name, each.uid)
            if held is None:
                continue
            check_count(len(known))
            known[each.uid] = held
            found.append(replace(held, is_owed=each.uid in dirty))
        self._known.update(known)
        here = self._memory.found([body.uid for held in found for body in held.bodies])
        return [held for held in found if any(body.uid in here for body in held.bodies)]

    async def _read(self, name: ObjectName, uid: str) -> HeldObject | None:
        record = (await self._directory.get(name)).record
        if record is None or record.version is None or record.version.uid != uid:
            return None
        return held_of(record)

    async def markers(self, bucket: str, prefix: str) -> list[HeldObject]:
        """The markers right in a set's folder, wherever their bytes are; alone they were found already."""
        if self._cluster is None:
            return []
        seen = await self._cluster.standing_markers(bucket, [prefix])
        records = [each.record for each in seen if each.record is not None and each.record.version is not None]
        return [replace(held_of(record), is_owed=False, bodies=()) for record in records]

    def forget(self) -> None:
        """Between two looks: keep no more than the last one's."""
        if len(self._known) > 2 * OBJECTS_COUNT:
            self._known.clear()


def held_of(record: Record) -> HeldObject:
    """The object of a record that has a version."""
    bodies = tuple(part.body for part in record.version.parts) if record.version is not None else ()
    is_owed = record.state is State.DIRTY
    return HeldObject(record.name.key, record.revision, record.role is Role.MARKER, is_owed, bodies)


def check_count(count: int) -> None:
    """Raises:
    RequestError: these are too many objects to look at.
    """
    if count > OBJECTS_COUNT:
        raise RequestError("InvalidRequest", f"more than {OBJECTS_COUNT} objects: none of them is retained")


class Retaining:
    """The one of a node. `limit_bytes`: how much may be pinned."""

    def __init__(
        self,
        directory: Directory,
        memory: Memory,
        markers: Markers,
        held: Held,
        prefixes: Sequence[PrefixSettings],
        limit_bytes: int,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        self._directory = directory
        self._memory = memory
        self._markers = markers
        self._held = held
        self._prefixes = prefixes
        self._runs = [each for each in prefixes if each.is_run]
        self._limit_bytes = limit_bytes
        self._clock = clock
        self._metrics = metrics
        self._changed = asyncio.Event()
        self._seen: tuple[int, int, int] | None = None
        self.report = RetentionReport(limit_bytes=limit_bytes)

    # -- pins
    async def pin(self, bucket: str, prefix: str) -> int:
        """Pin a prefix; how much of it is in this memory.

        Raises:
            RequestError: memory would hold more pinned bytes than it may, or too many prefixes are pinned.
            OverloadedError: the directory does not answer.
        """
        pins = await self._directory.pinned_prefixes()
        others = [each for each in pins if (each.bucket, each.prefix) != (bucket, prefix)]
        if len(others) >= PINS_COUNT:
            raise RequestError("InvalidRequest", f"{PINS_COUNT} prefixes are pinned already")
        sizes = [sum((await self._bodies_of(each.bucket, each.prefix)).values()) for each in others]
        own_bytes = sum((await self._bodies_of(bucket, prefix)).values())
        if sum(sizes) + own_bytes > self._limit_bytes:
            raise RequestError(
                "InvalidRequest",
                f"{own_bytes} bytes beside the {sum(sizes)} that are pinned already are more than pinned_limit allows"
                f" ({self._limit_bytes})",
            )
        await self._directory.pin_prefix(PinnedPrefix(bucket, prefix, self._clock.wall_s()))
        self.wake()
        return own_bytes

    async def unpin(self, bucket: str, prefix: str) -> bool:
        """Let go of a pinned prefix; False if it was not.

        Raises:
            OverloadedError: the directory does not answer.
        """
        was_pinned = await self._directory.unpin_prefix(bucket, prefix)
        self.wake()
        return was_pinned

    async def _bodies_of(self, bucket: str, prefix: str) -> dict[str, int]:
        """The bodies under a prefix that are here, with their sizes."""
        here = await self._found(await self._held.under(bucket, prefix))
        return {uid: found.size_bytes for uid, found in here.items()}

    async def _found(self, held: Iterable[HeldObject]) -> dict[str, BodyFound]:
        """What is here of the bodies of objects."""
        uids = [body.uid for each in held for body in each.bodies]
        found: dict[str, BodyFound] = {}
        for start in range(0, len(uids), PAGE_COUNT):
            found |= self._memory.found(uids[start : start + PAGE_COUNT])
            await asyncio.sleep(0)
        return found

    # -- looking
    def wake(self) -> None:
        """Something changed that a look may depend on."""
        self._seen = None
        self._changed.set()

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            began_s, least_s = self._clock.monotonic_s(), PAUSE_S
            self._changed.clear()
            try:
                await self.round()
                if not self._runs and not self.report.pins:
                    least_s = NOTHING_S
            except TiergateError as error:
                self.report = replace(self.report, fault=error.message)
                log.warning("what is to stay in memory could not be told, tried again", error=error)
            except Exception as error:  # Whatever it is: nobody else would go on with it.
                log.exception("telling what is to stay in memory failed unexpectedly, tried again", error=error)
            pause_s = max(least_s, IDLE_SHARE * (self._clock.monotonic_s() - began_s))
            try:
                async with asyncio.timeout(pause_s):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def round(self) -> None:
        """Look once, if anything changed.

        Raises:
            OverloadedError: the directory does not answer.
        """
        while self._memory.evict_going():
            await self._clock.sleep(0)
        judged_s, stats = self._clock.monotonic_s(), self._memory.stats()
        seen = (await self._directory.revision(), stats.evictions, stats.used_bytes)
        if seen == self._seen:
            return
        ranks: dict[str, Rank] = {}
        faults: list[str] = []
        runs = await self._rank_runs(ranks, faults)
        pins = await self._rank_pins(ranks, faults)
        self._memory.rank(ranks, judged_s)
        pinned_bytes = sum(each.size_bytes for each in pins if each.is_kept)
        self.report = RetentionReport(tuple(runs), tuple(pins), pinned_bytes, self._limit_bytes, "; ".join(faults))
        self._metrics.pinned_set_bytes.set(pinned_bytes)
        judged = [(each, keep) for run in runs for each, keep in run.sets.items()]
        kept = [each for each, keep in judged if each.is_complete and keep is not Keep.SURPLUS]
        self._metrics.kept_sets.set(len(kept))
        self._metrics.kept_set_bytes.set(sum(each.size_bytes for each in kept))
        self._held.forget()
        self._seen = seen

    async def _rank_runs(self, ranks: dict[str, Rank], faults: list[str]) -> list[RunReport]:
        reports: list[RunReport] = []
        for run in self._runs:
            try:
                sets = await self._sets_of(run)
            except RequestError as error:
                faults.append(f"{uri_of(run.bucket, run.prefix)}: {error.message}")
                continue
            judged = keeps(sets, run.keep_count)
            for each, keep in judged.items():
                rank = Rank(_LEVELS[keep], each.order, group_of(each.bucket, each.prefix))
                raise_to(ranks, (body.uid for held in sets[each] for body in held.bodies), rank)
            reports.append(RunReport(uri_of(run.bucket, run.prefix), run.keep_count, judged))
            await asyncio.sleep(0)
        return reports

    async def _sets_of(self, run: PrefixSettings) -> dict[HeldSet, list[HeldObject]]:
        groups: dict[str, list[HeldObject]] = {}
        # What another table speaks of is none of this run.
        inner = tuple(each.prefix for each in self._prefixes if each.bucket == run.bucket and is_inside(each, run))
        for number, held in enumerate(await self._held.under(run.bucket, run.prefix)):
            prefix = set_prefix_of(held.key, run.prefix)
            if prefix and not held.key.startswith(inner):
                groups.setdefault(prefix, []).append(held)
            if number % PAGE_COUNT == 0:
                await asyncio.sleep(0)
        here = await self._found(held for group in groups.values() for held in group)
        found: dict[HeldSet, list[HeldObject]] = {}
        for prefix, group in groups.items():
            bodies = {body.uid: body for held in group for body in held.bodies}
            size_bytes = sum(here[uid].size_bytes for uid in bodies if uid in here)
            if not any(uid in here for uid in bodies):
                continue
            every = group + await self._held.markers(run.bucket, prefix)
            marked = [held.revision for held in every if held.is_marker]
            is_owed = any(held.is_owed for held in group)
            each = HeldSet(
                run.bucket,
                prefix,
                max(marked or [held.revision for held in every]),
                size_bytes,
                is_marked=bool(marked) or (not is_owed and not self._needs_marker(run.bucket, group)),
                is_whole=all(uid in here and here[uid].is_whole for uid, body in bodies.items() if body.size_bytes),
                is_owed=is_owed,
            )
            found[each] = group
        return found

    def _needs_marker(self, bucket: str, group: Iterable[HeldObject]) -> bool:
        """Whether something is yet to say that a set without a marker is whole."""
        layouts = [layout_named(name.layout) for name in sets_of(bucket, (held.key for held in group), self._markers)]
        return any(layout is None or layout.markers for layout in layouts)

    async def _rank_pins(self, ranks: dict[str, Rank], faults: list[str]) -> list[PinReport]:
        pins = await self._directory.pinned_prefixes()
        bodies: dict[PinnedPrefix, dict[str, int]] = {}
        for each in pins:
            try:
                bodies[each] = await self._bodies_of(each.bucket, each.prefix)
            except RequestError as error:
                faults.append(f"{place_of(each)}: {error.message}")
                bodies[each] = {}
        sizes = {place_of(each): sum(found.values()) for each, found in bodies.items()}
        kept = within(sizes, [place_of(each) for each in pins], self._limit_bytes)
        for each in pins:
            if place_of(each) in kept:
                raise_to(ranks, bodies[each], Rank(Level.PINNED, 0, group_of(each.bucket, each.prefix)))
        return [PinReport(each, sizes[place_of(each)], place_of(each) in kept) for each in pins]


def is_inside(prefix: PrefixSettings, other: PrefixSettings) -> bool:
    """Whether a prefix begins with another one, and goes on."""
    return len(prefix.prefix) > len(other.prefix) and prefix.prefix.startswith(other.prefix)


def raise_to(ranks: dict[str, Rank], body_uids: Iterable[str], rank: Rank) -> None:
    """Give bodies a rank. One that sets share goes with that which goes last."""
    for uid in body_uids:
        before = ranks.get(uid)
        if before is None or (before.level, before.order) < (rank.level, rank.order):
            ranks[uid] = rank


def place_of(pinned: PinnedPrefix) -> str:
    """A pinned prefix as people write it."""
    return uri_of(pinned.bucket, pinned.prefix)
