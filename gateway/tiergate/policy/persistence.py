"""Which sets of a run go to the origin, and which stay in memory. Pure.

The first write of a set decides for all of it. A set stays in memory only if the origin knows nothing under its prefix,
so that nothing of it ever needs to be taken away there.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from tiergate.config import Persist
from tiergate.model import Plan, Run, Stage


class Wish(StrEnum):
    """What a client says of a set that it begins."""

    MEMORY = "memory"
    S3 = "s3"


@dataclass(frozen=True, slots=True)
class Beginning:
    """A set that a write begins, under the policy of its run. `may_park`: the origin holds nothing under its prefix and
    is owed nothing there. `instead_of`: the plan, by its revision, that is over."""

    bucket: str
    prefix: str
    run: str
    persist: Persist
    now_s: float
    may_park: bool
    wish: Wish | None = None
    instead_of: int = 0


def stays(persist: Persist, run: Run, now_s: float, wish: Wish | None = None) -> bool:
    """Whether the next set of a run stays in memory. Of a run that counts sets, the first goes to the origin, then the
    one that is `every_count` after the last that did; by time likewise."""
    if wish is not None:
        return wish is Wish.MEMORY
    if not persist.every_count and not persist.every_s:
        return True
    if not run.persisted_ordinal:
        return False
    is_counted = run.count + 1 - run.persisted_ordinal >= persist.every_count > 0
    is_timed = 0.0 < persist.every_s <= now_s - run.persisted_s
    return not (is_counted or is_timed)


def begin(beginning: Beginning, before: Plan | None, run: Run, revision: int) -> tuple[Plan, Run]:
    """The plan of a set that begins at a revision, in the place of another if there was one, and its run then."""
    parked = beginning.may_park and stays(beginning.persist, run, beginning.now_s, beginning.wish)
    stage = Stage.KEPT if parked else Stage.SENT
    if not parked and before is not None and before.stage is not Stage.SENT:
        # What is in memory from before goes along, ahead of the new marker.
        stage = Stage.PROMOTING
    plan = Plan(
        bucket=beginning.bucket,
        prefix=beginning.prefix,
        run=beginning.run,
        stage=stage,
        ordinal=run.count + 1,
        revision=revision,
        decided_s=beginning.now_s,
    )
    run = replace(run, count=plan.ordinal)
    if not parked:
        run = replace(run, persisted_ordinal=plan.ordinal, persisted_s=beginning.now_s)
    return plan, run
