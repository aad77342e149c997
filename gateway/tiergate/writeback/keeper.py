"""Looks after what stays in memory by policy: what is superseded goes, what a run ends with goes to the origin.

One node does it for all, the housekeeper; whatever it was doing when it died, the next one finds in the plans.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from tiergate.checkpoints.markers import scope_of
from tiergate.checkpoints.recognition import set_prefix_of
from tiergate.clock import Clock
from tiergate.config import PrefixSettings
from tiergate.directory.base import Committed, Directory, Intent
from tiergate.errors import ConflictError, OriginError, TiergateError
from tiergate.model import LOST, UNKNOWN_BASE, Kind, ObjectName, Pending, Plan, Record, Role, Stage
from tiergate.observe.logs import get_logger
from tiergate.observe.metrics import Metrics
from tiergate.origin.client import OriginClient
from tiergate.writeback.promotion import MANY, Promotion, in_order

log = get_logger(__name__)

S = TypeVar("S")
T = TypeVar("T")

INTERVAL_S = 2.0
"""How often is looked."""

SCAN_COUNT = 1000
AT_ONCE_COUNT = 16
"""Deletions, or writes that are parked, under way at a time."""

PLANS_COUNT = 64
"""Of a run, so many plans are kept; older ones that nothing depends on are forgotten."""


@dataclass(slots=True)
class Found:
    """A set as it is now. `writes`: what of it is pending."""

    plan: Plan
    records: list[Record] = field(default_factory=list)
    writes: dict[ObjectName, Pending] = field(default_factory=dict)

    @property
    def newest_s(self) -> float:
        """When anything of it was written last."""
        times_s = [write.committed_s for write in self.writes.values()]
        return max((*times_s, *(record.version.modified_s for record in self.records if record.version)), default=0.0)

    @property
    def scopes(self) -> set[str]:
        """Prefixes under which all of it lies that is pending: its own, and the folders of other ranks."""
        prefix = self.plan.prefix
        return {prefix, *(scope_of(name.key) for name in self.writes if not name.key.startswith(prefix))}


Judge = Callable[[Found], Awaitable[bool]]
"""Whether a set is complete, in whatever tier."""


def is_sound(found: Found) -> bool:
    """Whether nothing of a set is lost, nor changed behind its marker. Pure."""
    writes = found.writes.values()
    return not any(write.quarantined == LOST or (write.role is Role.MARKER and write.disturbed_s) for write in writes)


def is_marked(found: Found) -> bool:
    """Whether a marker was written under the set's plan. Pure."""
    return any(
        record.role is Role.MARKER and record.version is not None and record.revision > found.plan.revision
        for record in found.records
    )


async def has_marker(found: Found) -> bool:
    """A judge that believes markers: no more is asked of a set than its marker."""
    return is_marked(found)


class Keeper:
    """The one of a node. `runs`: the prefixes with a policy. `is_complete`: judges a set of which nothing is
    lost. `quiet_s`: so long a set is left alone after its last write before it counts as complete. `released`:
    told of each object that went."""

    def __init__(
        self,
        directory: Directory,
        origin: OriginClient,
        promotion: Promotion,
        runs: Sequence[PrefixSettings],
        clock: Clock,
        metrics: Metrics,
        is_complete: Judge,
        quiet_s: float,
        keeps_house: Callable[[], bool],
        released: Callable[[ObjectName, Committed], None],
    ) -> None:
        self._directory = directory
        self._origin = origin
        self._promotion = promotion
        self._runs = [run for run in runs if run.persist is not None]
        self._clock = clock
        self._metrics = metrics
        self._is_complete = is_complete
        self._quiet_s = quiet_s
        self._keeps_house = keeps_house
        self._released = released
        self._gone: set[tuple[str, str, int]] = set()
        """Sets that were dropped and of which nothing is left."""

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            await self._clock.sleep(INTERVAL_S)
            try:
                await self.round()
            except TiergateError as error:
                log.warning("looking after sets in memory failed, tried again", error=error)
            except Exception as error:  # Whatever it is: nobody else would go on with it.
                log.exception("looking after sets in memory failed unexpectedly, tried again", error=error)

    async def round(self) -> None:
        """Look once.

        Raises:
            TiergateError: something could not be done; the next round goes on.
        """
        await self._owe_strays()
        if not self._keeps_house():
            return
        for run in self._runs:
            try:
                await self._keep(run)
            except OriginError as error:
                log.warning("what the origin has of a run cannot be asked now", prefix=run.prefix, error=error)

    async def promote_newest(self) -> None:
        """Before this node stops: of each run of which something is parked in its care, the newest complete set goes to
        the origin. A run that fails, or hangs, keeps no other from it."""
        await asyncio.gather(*(self._promote_newest_of(run) for run in self._runs))

    async def _promote_newest_of(self, run: PrefixSettings) -> None:
        try:
            if any(self._is_in(write.name, run) for write in await self._directory.parked()):
                look = await self._look(run)
                await self._fill(look)
                await self._promote_first(look, await self._newest_complete(look.newest_first(), quiet_s=0.0))
        except TiergateError as error:
            log.error("the newest set of a run in memory cannot be promoted", prefix=run.prefix, error=error)
        except Exception as error:  # Whatever it is: what else is owed must not suffer.
            log.exception("promoting the newest set of a run failed unexpectedly", prefix=run.prefix, error=error)

    def _is_in(self, name: ObjectName, run: PrefixSettings) -> bool:
        return name.bucket == run.bucket and self._promotion.run_of(name) == run.prefix

    async def _owe_strays(self) -> None:
        """What is parked where no policy is any more goes to the origin."""
        promotion = self._promotion
        strays = [
            write
            for write in await self._directory.parked()
            if promotion.run_of(write.name) is None and not promotion.is_by_itself(write.name)
        ]
        for bucket, scope in sorted({(write.name.bucket, scope_of(write.name.key)) for write in strays}):
            await self._promotion.under(bucket, scope)

    # -- one run
    async def _keep(self, run: PrefixSettings) -> None:
        look = await self._look(run)
        for prefix in sorted(look.orphans):
            if await self._directory.get_plan(run.bucket, prefix) is None:
                # A directory that forgot was told of it, and not what was planned.
                await self._promotion.under(run.bucket, prefix)
        for found in look.newest_first():
            stage = found.plan.stage
            is_parked = any(write.parked for write in found.writes.values())
            if stage in (Stage.PROMOTING, Stage.PARKING) or (stage is Stage.SENT and is_parked):
                await self._promotion.promote(found.plan)
            elif stage is Stage.DROPPED:
                await self._finish_drop(found.plan)
        await self._drop_superseded(look)
        await self._promote_idle(look)
        for found in look.newest_first()[PLANS_COUNT:]:
            is_over = found.plan.stage is Stage.SENT or self._name_of(found.plan) in self._gone
            if is_over and not found.writes:
                await self._directory.change_plan(found.plan, None)
        await self._promote_pointers(look)
        if run.skip_superseded:
            await self._skip_superseded(look)

    async def _look(self, run: PrefixSettings) -> "Look":
        plans = await self._directory.plans(run.bucket, run.prefix)
        sets = {plan.prefix: Found(plan) for plan in plans if plan.run == run.prefix}
        look = Look(run, sets)
        for write in await self._directory.pending_under(run.bucket, run.prefix, MANY):
            prefix = set_prefix_of(write.name.key, run.prefix)
            if prefix in sets:
                sets[prefix].writes[write.name] = write
            elif not prefix:
                look.loose.append(write)
            elif write.parked:
                look.orphans.add(prefix)
        return look

    async def _fill(self, look: "Look") -> None:
        """Read all records of the run, once."""
        after = ""
        while not look.is_filled:
            records = await self._directory.scan(look.run.bucket, look.run.prefix, after, SCAN_COUNT)
            for record in records:
                found = look.sets.get(set_prefix_of(record.name.key, look.run.prefix))
                if found is not None and record.version is not None:
                    found.records.append(record)
            look.is_filled = len(records) < SCAN_COUNT
            after = records[-1].name.key if records else ""

    async def _complete(self, found: Found, quiet_s: float) -> bool:
        if found.plan.stage is Stage.DROPPED or not found.records or not is_sound(found):
            return False
        return found.newest_s + quiet_s <= self._clock.wall_s() and await self._is_complete(found)

    async def _newest_complete(self, sets: Sequence[Found], quiet_s: float) -> Found | None:
        for found in sets:
            if await self._complete(found, quiet_s):
                return found
        return None

    async def _drop_superseded(self, look: "Look") -> None:
        """Drop what stays in memory behind so many newer complete sets, unless any of it is pinned; whether it is whole
        does not matter."""
        standing = [found for found in look.newest_first() if found.plan.stage is not Stage.DROPPED]
        keep_count = look.run.keep_count
        if not any(found.plan.stage is Stage.KEPT for found in standing[keep_count:]):
            return
        await self._fill(look)
        pins = await self._directory.pinned_prefixes()
        complete_count = 0
        for found in standing:
            if complete_count >= keep_count and found.plan.stage is Stage.KEPT:
                if any(pin.meets(found.plan.bucket, found.plan.prefix) for pin in pins):
                    continue
                dropped = await self._directory.drop_plan(found.plan)
                if dropped is not None:
                    log.info("a superseded set is dropped", bucket=dropped.bucket, prefix=dropped.prefix)
                    self._metrics.dropped_sets.inc()
                    found.plan = dropped
                    await self._finish_drop(dropped)
            elif complete_count < keep_count and await self._complete(found, self._quiet_s):
                complete_count += 1

    async def _finish_drop(self, plan: Plan) -> None:
        """Delete what is left of a dropped set: what speaks for it first."""
        if self._name_of(plan) in self._gone:
            return
        records = [record for record in await self._records_of(plan) if record.revision < plan.dropped]
        speaking = [record for record in records if record.role in (Role.MARKER, Role.POINTER)]
        for record in sorted(speaking, key=lambda record: (record.role is Role.MARKER, record.name.key.count("/"))):
            await self._delete(record)
        rest = [record for record in records if record.role not in (Role.MARKER, Role.POINTER)]
        await in_parts(rest, self._delete)
        self._gone.add(self._name_of(plan))

    async def _records_of(self, plan: Plan) -> list[Record]:
        found: list[Record] = []
        after = ""
        while records := await self._directory.scan(plan.bucket, plan.run, after, SCAN_COUNT):
            found += [each for each in records if set_prefix_of(each.name.key, plan.run) == plan.prefix]
            after = records[-1].name.key
        return [record for record in found if record.version is not None]

    async def _delete(self, record: Record) -> None:
        now_s, revision = self._clock.wall_s(), await self._directory.revision()
        intent = Intent(record.role, revision, now_s, UNKNOWN_BASE, guard=record.modified)
        try:
            committed = await self._directory.delete(record.name, intent)
        except ConflictError:
            return  # Somebody wrote it anew, or deleted it.
        if committed is not None:
            self._released(record.name, committed)

    @staticmethod
    def _name_of(plan: Plan) -> tuple[str, str, int]:
        return plan.bucket, plan.prefix, plan.revision

    # -- to the origin
    async def _promote_idle(self, look: "Look") -> None:
        idle_s, now_s = look.run.promote_idle_s, self._clock.wall_s()
        if not idle_s or not any(found.plan.stage is Stage.KEPT for found in look.sets.values()):
            return
        writes = [*look.loose, *(write for found in look.sets.values() for write in found.writes.values())]
        newest_s = max((write.committed_s for write in writes), default=0.0)
        newest_s = max([newest_s, *(found.plan.decided_s for found in look.sets.values())])
        for upload in await self._directory.list_uploads(look.run.bucket, look.run.prefix):
            newest_s = max(newest_s, upload.started_s)
        if newest_s + idle_s > now_s:
            return
        await self._fill(look)
        if max(found.newest_s for found in look.sets.values()) + idle_s <= now_s:
            await self._promote_first(look, await self._newest_complete(look.newest_first(), self._quiet_s))

    async def _promote_first(self, look: "Look", newest: Found | None) -> None:
        if newest is not None and newest.plan.stage is Stage.KEPT:
            await self._promotion.promote(newest.plan)
            newest.plan = replace(newest.plan, stage=Stage.SENT)
            await self._promote_pointers(look)

    async def _promote_pointers(self, look: "Look") -> None:
        """Pointers go when all that they name does."""
        for write in look.loose:
            if write.parked and all([await self._is_sent(look, prefix) for prefix in write.points_to]):
                await self._promotion.owe(write.name)

    async def _is_sent(self, look: "Look", prefix: str) -> bool:
        plan = await self._directory.get_plan(look.run.bucket, prefix)
        if plan is not None:
            return plan.stage is Stage.SENT and not await self._promotion.parked_of(plan)
        if await self._directory.scan(look.run.bucket, prefix, "", 1):
            return True
        return not await self._is_absent(look.run, prefix)

    async def _is_absent(self, run: PrefixSettings, prefix: str) -> bool:
        """Whether the origin has nothing under a prefix where the directory knows of nothing in it."""
        return run.exclusive or not (await self._origin.list_objects(run.bucket, prefix, max_keys=1)).entries

    # -- out of its way
    async def _skip_superseded(self, look: "Look") -> None:
        """Leave in memory what write-back has not begun and a newer complete set makes superfluous there."""
        sent = [found for found in look.newest_first() if found.plan.stage is Stage.SENT]
        waiting = [found for found in sent if found.writes and all(map(is_untouched, found.writes.values()))]
        if len(sent) < 2 or not waiting:
            return
        await self._fill(look)
        newest = await self._newest_complete(look.newest_first(), self._quiet_s)
        for found in waiting:
            if newest is None or found.plan.ordinal >= newest.plan.ordinal or len(found.records) != len(found.writes):
                continue
            is_named = any(found.plan.prefix in write.points_to for write in look.loose if not write.parked)
            if is_named or not await self._complete(found, self._quiet_s):
                continue
            if all([await self._is_absent(look.run, scope) for scope in sorted(found.scopes)]):
                await self._park(found)

    async def _park(self, found: Found) -> None:
        """All of a set, or nothing: what speaks for it first, so that nothing does without it."""
        plan, parking = found.plan, replace(found.plan, stage=Stage.PARKING)
        if not await self._directory.change_plan(plan, parking):
            return
        loose = await self._directory.pending_under(plan.bucket, plan.run, MANY)
        is_named = any(plan.prefix in write.points_to and not write.parked for write in loose)
        is_done = not is_named and await self._park_all(found.writes, parking)
        is_done = is_done and await self._directory.change_plan(parking, replace(plan, stage=Stage.KEPT))
        is_done = is_done and len(await self._promotion.parked_of(plan)) == len(await self._records_of(plan))
        if not is_done:
            await self._promotion.promote(plan)
            return
        self._metrics.skipped_sets.inc()
        log.info("a superseded set is left in memory", bucket=plan.bucket, prefix=plan.prefix)

    async def _park_all(self, writes: Mapping[ObjectName, Pending], parking: Plan) -> bool:
        ordered = in_order(writes.values())
        for write in reversed([each for each in ordered if each.role in (Role.MARKER, Role.POINTER)]):
            if not await self._directory.park(write.name, write.uid, parking):
                return False
        rest = [each for each in ordered if each.role not in (Role.MARKER, Role.POINTER)]

        async def park(write: Pending) -> bool:
            return await self._directory.park(write.name, write.uid, parking)

        return all(await in_parts(rest, park))


@dataclass(slots=True)
class Look:
    """A run at one time. `loose`: what is pending right in it. `orphans`: sets without a plan of which something is
    parked. Records are read when they are needed."""

    run: PrefixSettings
    sets: dict[str, Found]
    loose: list[Pending] = field(default_factory=list)
    orphans: set[str] = field(default_factory=set)
    is_filled: bool = False

    def newest_first(self) -> list[Found]:
        """Its sets, by when they began."""
        return sorted(self.sets.values(), key=lambda found: -found.plan.ordinal)


def is_untouched(write: Pending) -> bool:
    """Whether write-back has done nothing about a put yet."""
    return write.kind is Kind.PUT and not (write.begun or write.parked or write.quarantined or write.withdrawn)


async def in_parts(items: Sequence[S], work: Callable[[S], Awaitable[T]]) -> list[T]:
    """The results for all, some at a time; one that fails ends it when those beside it are done."""
    found: list[T] = []
    for start in range(0, len(items), AT_ONCE_COUNT):
        part = [work(item) for item in items[start : start + AT_ONCE_COUNT]]
        for result in await asyncio.gather(*part, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result
            found.append(result)
    return found
