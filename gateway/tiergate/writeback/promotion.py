"""Sets that stay in memory by policy, on their way to the origin; any process may begin it, and any end it.

The order is what keeps a marker behind its set: once the plan says `promoting`, nothing new of the set is parked but
markers and pointers; then all else that is parked is owed; then the plan says `sent`, and nothing at all is parked any
more; then markers and pointers are owed, the innermost first. Write-back's fence does the rest.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from tiergate.checkpoints.markers import is_within, reach_of, scope_of
from tiergate.checkpoints.recognition import set_prefix_of
from tiergate.clock import Clock
from tiergate.config import PrefixSettings
from tiergate.directory.base import Directory
from tiergate.model import ObjectName, Pending, Plan, Role, Stage
from tiergate.observe.logs import get_logger
from tiergate.observe.metrics import Metrics

log = get_logger(__name__)

MANY = 1 << 30
"""More than can be pending."""

SPEAKING = (Role.MARKER, Role.POINTER)


class Promotion:
    """One for a process. `policy_of`: the settings that hold for a key. `on_promoted`: something is owed now."""

    def __init__(
        self,
        directory: Directory,
        policy_of: Callable[[str, str], PrefixSettings],
        clock: Clock,
        metrics: Metrics,
        on_promoted: Callable[[], None],
    ) -> None:
        self._directory = directory
        self._policy_of = policy_of
        self._clock = clock
        self._metrics = metrics
        self._on_promoted = on_promoted

    def run_of(self, name: ObjectName) -> str | None:
        """The prefix of the run that a key belongs to; None where no policy is."""
        policy = self._policy_of(name.bucket, name.key)
        return None if policy.persist is None else policy.prefix

    def is_by_itself(self, name: ObjectName) -> bool:
        """Whether a key's objects stay in memory without a run or a set."""
        return self._policy_of(name.bucket, name.key).is_memory_only

    async def owe(self, name: ObjectName) -> None:
        """See that what is pending of a key does not stay in memory, nor its set, nor any that it names."""
        pending = (await self._directory.get(name)).pending
        if pending is None or not pending.parked:
            return
        if self.is_by_itself(name):
            await self._owe([pending])
            return
        run = self.run_of(name)
        own = set_prefix_of(name.key, run) if run is not None else ""
        for prefix in sorted({*pending.points_to, own} - {""}):
            await self._promote_set(name.bucket, prefix)
        if run is not None and not own:
            await self._owe([pending])
            return
        pending = (await self._directory.get(name)).pending
        if pending is not None and pending.parked:
            # Nobody knows of a plan: what it may speak for goes first.
            await self.under(name.bucket, own or scope_of(name.key))

    async def clear(self, name: ObjectName, role: Role) -> None:
        """See that a key can be written straight to the origin: nothing of its set stays in memory. Of a pointer right
        in a run nobody knows before what it will name: nothing of the run does."""
        run = self.run_of(name)
        if run is not None:
            prefix = set_prefix_of(name.key, run)
            if prefix:
                await self.under(name.bucket, prefix)
            elif role is Role.POINTER:
                await self.under(name.bucket, run)
        await self.owe(name)

    async def _promote_set(self, bucket: str, prefix: str) -> None:
        plan = await self._directory.get_plan(bucket, prefix)
        if plan is not None:
            await self.promote(plan)

    async def under(self, bucket: str, prefix: str) -> int:
        """Bring all that stays in memory under a prefix to the origin; how many writes that were."""
        parked = await self._parked_under(bucket, prefix)
        plans: dict[tuple[str, str], Plan] = {(plan.run, plan.prefix): plan for plan in await self._plans(parked)}
        plans |= {(plan.run, plan.prefix): plan for plan in await self._directory.plans(bucket, prefix)}
        count = 0
        for plan in sorted(plans.values(), key=lambda plan: plan.ordinal):
            count += await self.promote(plan)
        return count + await self._owe(in_order(await self._parked_under(bucket, prefix)))

    async def _parked_under(self, bucket: str, prefix: str) -> list[Pending]:
        """What is parked under a prefix, and what of a set that it is the prefix of lies elsewhere."""
        writes = await self._directory.pending_under(bucket, reach_of(prefix), MANY)
        return [write for write in writes if write.parked and is_within(write.name.key, prefix)]

    async def _plans(self, parked: Iterable[Pending]) -> list[Plan]:
        places = {
            (write.name.bucket, set_prefix_of(write.name.key, run))
            for write in parked
            if (run := self.run_of(write.name)) is not None
        }
        found = [await self._directory.get_plan(*place) for place in sorted(places) if place[1]]
        return [plan for plan in found if plan is not None]

    async def promote(self, plan: Plan) -> int:
        """Bring a set to the origin, unless it was dropped; how many writes that were. One that is on its way already
        is seen through."""
        count = 0
        while True:
            current = await self._directory.get_plan(plan.bucket, plan.prefix)
            if current is None or current.stage is Stage.DROPPED:
                return count
            if current.stage is Stage.SENT:
                break
            promoting = replace(current, stage=Stage.PROMOTING)
            if current != promoting and not await self._directory.change_plan(current, promoting):
                continue
            members = [write for write in await self.parked_of(plan) if write.role not in SPEAKING]
            count += await self._owe(members)
            if await self._directory.change_plan(promoting, replace(promoting, stage=Stage.SENT)):
                self._metrics.promoted_sets.inc()
                log.info("a set that was kept in memory goes to the origin", bucket=plan.bucket, prefix=plan.prefix)
        return count + await self._owe(in_order(await self.parked_of(plan)))

    async def parked_of(self, plan: Plan) -> list[Pending]:
        """What of a set is parked. (Its objects may lie in several folders of the run.)"""
        writes = await self._directory.pending_under(plan.bucket, plan.run, MANY)
        return [write for write in writes if write.parked and set_prefix_of(write.name.key, plan.run) == plan.prefix]

    async def _owe(self, parked: Sequence[Pending]) -> int:
        if not parked:
            return 0
        count = await self._directory.promote(parked, self._clock.wall_s())
        self._on_promoted()
        return count


def in_order(parked: Iterable[Pending]) -> list[Pending]:
    """Members first, then what speaks for them: the innermost first, pointers behind the markers beside them."""

    def turn(write: Pending) -> tuple[bool, int, bool, int]:
        is_speaking = write.role in SPEAKING
        return is_speaking, -write.name.key.count("/"), write.role is Role.POINTER, write.revision

    return sorted(parked, key=turn)
