"""Which writes stay in memory by policy, decided as they are committed (see `tiergate.policy.persistence`)."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace

from tiergate.checkpoints.recognition import pointed_by, set_prefix_of
from tiergate.config import Persist, PrefixSettings
from tiergate.directory.base import Intent
from tiergate.engine.outage import Outage
from tiergate.engine.rooms import Rooms
from tiergate.errors import InvariantError, OriginError, RequestError
from tiergate.model import NO_BASE, UNKNOWN_BASE, ObjectName, Plan, Role, Run, Stage, Version
from tiergate.origin.answers import OriginPage
from tiergate.policy.persistence import Beginning, Wish, stays
from tiergate.writeback.promotion import MANY, Promotion

PERSIST_HEADER = "x-tiergate-persist"
PERSIST_METADATA = "tiergate-persist"
"""How a client says what it wishes; where it is no header, as metadata of the object."""

POINTER_LIMIT_BYTES = 1 << 20
"""A pointer that is longer is not read; it stays in memory while any set of its run does."""

SCAN_COUNT = 1000


@dataclass(frozen=True, slots=True)
class Kept:
    """What a policy says of a write; nothing where there is none."""

    plan: Plan | None = None
    parked: bool = False
    points_to: tuple[str, ...] = ()
    by_itself: bool = False
    """It belongs to no set, and the origin has nothing of its key."""

    def of(self, intent: Intent) -> Intent:
        """The intent of a commit under it. Where a set is kept the origin has nothing of it."""
        is_kept = self.by_itself or (self.plan is not None and self.plan.parks(intent.role))
        base = NO_BASE if is_kept and intent.base == UNKNOWN_BASE else intent.base
        return replace(intent, base=base, parked=self.parked, plan=self.plan, points_to=self.points_to)


NOT_KEPT = Kept()


def wish_of(headers: Mapping[str, str], metadata: Mapping[str, str]) -> Wish | None:
    """What a client says of the set that it writes.

    Raises:
        RequestError: InvalidArgument, for a header with another value.
    """
    for said, is_strict in ((headers.get(PERSIST_HEADER), True), (metadata.get(PERSIST_METADATA), False)):
        if said is None:
            continue
        if said.strip().lower() in tuple(Wish):
            return Wish(said.strip().lower())
        if is_strict:
            raise RequestError("InvalidArgument", f"{PERSIST_HEADER} is neither memory nor s3")
    return None


class Persisting:
    """Asked before each commit of a version."""

    def __init__(self, rooms: Rooms, outage: Outage, promotion: Promotion) -> None:
        self._rooms = rooms
        self._outage = outage
        self._promotion = promotion

    def policy_of(self, name: ObjectName) -> PrefixSettings | None:
        """The settings of the run that a key belongs to; None for one without a policy."""
        policy = self._rooms.settings.prefix_for(name.bucket, name.key)
        return policy if policy.persist is not None else None

    async def kept(
        self, name: ObjectName, role: Role, version: Version, wish: Wish | None, over: Plan | None = None
    ) -> Kept:
        """What the policy says of a version about to be committed. `over`: the plan that it found to be over."""
        if self._rooms.is_memory_only(name):
            return await self._alone(name)
        policy = self.policy_of(name)
        if policy is None:
            return NOT_KEPT
        prefix = set_prefix_of(name.key, policy.prefix)
        if prefix:
            plan = await self.plan(name.bucket, prefix, policy, wish, over)
            if plan.parks(role) and not await self._is_free(name, plan, policy):
                await self._promotion.promote(plan)
                plan = await self._rooms.directory.get_plan(name.bucket, prefix) or plan
            return Kept(plan)
        if role is not Role.POINTER:
            return NOT_KEPT
        if version.size_bytes > POINTER_LIMIT_BYTES:
            plans = await self._rooms.directory.plans(name.bucket, policy.prefix)
            return Kept(points_to=tuple(plan.prefix for plan in plans if plan.stage is not Stage.DROPPED))
        return await self._pointer(name, self._body_of(version), policy)

    async def _alone(self, name: ObjectName) -> Kept:
        """Where objects stay in memory each by itself. One that somebody promoted is the origin's matter from then on,
        and so is what comes after it."""
        seen = await self._rooms.directory.get(name)
        may_stay = seen.pending.parked if seen.pending is not None else seen.record is None
        return Kept(parked=may_stay, by_itself=may_stay)

    async def begun(self, name: ObjectName, wish: Wish | None) -> None:
        """An upload begins whose client says what it wishes, which decides for its set if nothing did."""
        policy = self.policy_of(name)
        prefix = set_prefix_of(name.key, policy.prefix) if policy is not None else ""
        if policy is not None and prefix and wish is not None:
            await self.plan(name.bucket, prefix, policy, wish)

    async def is_parked(self, name: ObjectName, uid: str) -> bool:
        """Whether a version that was committed stays in memory now."""
        if self.policy_of(name) is None and not self._rooms.is_memory_only(name):
            return False
        pending = (await self._rooms.directory.get(name)).pending
        return pending is not None and pending.uid == uid and pending.parked

    async def make_way(self, name: ObjectName) -> None:
        """A write of a set that is kept cannot be: then nothing of the set is."""
        if self._rooms.is_memory_only(name):
            return  # It is no set; what became of the key meanwhile is looked at anew.
        await self._promotion.clear(name, self._rooms.role_of(name, 0))

    async def plan(
        self, bucket: str, prefix: str, policy: PrefixSettings, wish: Wish | None, over: Plan | None = None
    ) -> Plan:
        """The plan of a set, decided now if it has none that holds."""
        directory, now_s = self._rooms.directory, self._rooms.clock.wall_s()
        plan = await directory.get_plan(bucket, prefix)
        is_over = over is not None and plan is not None and plan.revision == over.revision
        if plan is None or plan.stage is Stage.DROPPED or is_over:
            persist = policy.persist or Persist()
            may_park = await self._may_park(bucket, prefix, policy, wish)
            instead_of = over.revision if over is not None else 0
            plan = await directory.decide(
                Beginning(bucket, prefix, policy.prefix, persist, now_s, may_park, wish, instead_of)
            )
            if plan.stage is Stage.SENT:
                # What a directory that forgot was told of lies there without a plan.
                await self._promotion.under(bucket, prefix)
        if plan.stage is Stage.PROMOTING or (wish is Wish.S3 and plan.stage is not Stage.SENT):
            await self._promotion.promote(plan)
            plan = await directory.get_plan(bucket, prefix) or plan
        return plan

    async def _may_park(self, bucket: str, prefix: str, policy: PrefixSettings, wish: Wish | None) -> bool:
        """Whether the origin holds nothing under a set's prefix and is owed nothing there; False, too, where it would
        make no difference, or cannot be known now."""
        directory, persist = self._rooms.directory, policy.persist
        run = await directory.get_run(bucket, policy.prefix) or Run(bucket, policy.prefix)
        if persist is None or not stays(persist, run, self._rooms.clock.wall_s(), wish):
            return False
        parked = {write.name for write in await directory.pending_under(bucket, prefix, MANY) if write.parked}
        after = ""
        while records := await directory.scan(bucket, prefix, after, SCAN_COUNT):
            if any(record.name not in parked for record in records):
                return False
            after = records[-1].name.key
        return await self._is_absent(bucket, prefix, policy)

    async def _is_free(self, name: ObjectName, plan: Plan, policy: PrefixSettings) -> bool:
        """Whether the origin surely has nothing of a key of a set that is kept. It was asked when that was decided, but
        not about the folders of all ranks."""
        if name.key.startswith(plan.prefix):
            return True
        if (await self._rooms.directory.get(name)).record is not None:
            return True  # The commit looks at it.
        return await self._is_absent(name.bucket, name.key, policy)

    async def _is_absent(self, bucket: str, prefix: str, policy: PrefixSettings) -> bool:
        """Whether the origin surely has nothing under a prefix of which the directory knows nothing there."""
        if policy.exclusive:
            return True
        try:
            return not await self._is_listed(bucket, prefix)
        except OriginError:
            return False

    async def _is_listed(self, bucket: str, prefix: str) -> bool:
        async def listed() -> OriginPage:
            return await self._rooms.origin.list_objects(bucket, prefix, max_keys=1)

        return bool((await self._outage.ask(bucket, listed)).entries)

    async def _pointer(self, name: ObjectName, body: bytes, policy: PrefixSettings) -> Kept:
        """A pointer goes to the origin when all that it names is there, or owed."""
        sets = {set_prefix_of(prefix, policy.prefix) for prefix in pointed_by(name.key, body)} - {""}
        is_dangling = False
        for prefix in sorted(sets):
            if await self._rooms.directory.get_plan(name.bucket, prefix) is not None:
                continue  # The commit looks at it.
            known = await self._rooms.directory.scan(name.bucket, prefix, "", 1)
            is_dangling = is_dangling or (not known and not await self._is_there(name.bucket, prefix, policy))
        return Kept(parked=is_dangling, points_to=tuple(sorted(sets)))

    async def _is_there(self, bucket: str, prefix: str, policy: PrefixSettings) -> bool:
        """Whether the origin surely has something under a prefix of which the directory knows nothing there."""
        if policy.exclusive:
            return False
        try:
            return await self._is_listed(bucket, prefix)
        except OriginError:
            return False  # It is looked at again later.

    def _body_of(self, version: Version) -> bytes:
        """The bytes of a version that are whole in memory."""
        found = bytearray()
        for part in version.parts:
            if not part.body.size_bytes:
                continue
            pin = self._rooms.memory.pin(part.body.uid)
            with pin or nullcontext():
                for index in range(part.body.block_count):
                    views = pin.block(index) if pin is not None else None
                    if views is None:
                        raise InvariantError("what is about to be committed is not held", body=part.body.uid)
                    for view in views:
                        found += view
        return bytes(found)
