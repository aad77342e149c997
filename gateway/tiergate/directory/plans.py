"""Which sets stay in memory: transitions of their plans, and what those mean for a write. See `transitions`."""

from collections.abc import Sequence
from dataclasses import replace

from tiergate.checkpoints.markers import ancestor_scopes
from tiergate.directory.base import Intent
from tiergate.directory.view import Rows
from tiergate.errors import PlanOverError
from tiergate.model import ObjectName, Pending, Plan, Record, Role, Run, Stage
from tiergate.policy.persistence import Beginning, begin


def decide(rows: Rows, beginning: Beginning) -> Plan:
    """The plan of a set; decided now if there is none, or only one that is over."""
    before = rows.plan(beginning.bucket, beginning.prefix)
    if before is not None and before.stage is not Stage.DROPPED and before.revision != beginning.instead_of:
        return before
    run = rows.run(beginning.bucket, beginning.run) or Run(beginning.bucket, beginning.run)
    plan, run = begin(beginning, before, run, rows.next_revision())
    rows.put_plan(plan)
    rows.put_run(run)
    return plan


def change(rows: Rows, before: Plan, after: Plan | None) -> bool:
    """Replace a plan, or forget it, if it still is what it was."""
    if rows.plan(before.bucket, before.prefix) != before:
        return False
    if after is None:
        rows.drop_plan(before)
    else:
        rows.put_plan(after)
    return True


def drop(rows: Rows, before: Plan) -> Plan | None:
    """End a plan whose set goes: what was committed before belongs to it, what comes later does not."""
    dropped = replace(before, stage=Stage.DROPPED, dropped=rows.next_revision())
    return dropped if change(rows, before, dropped) else None


def asks_to_park(rows: Rows, name: ObjectName, old: Record | None, intent: Intent) -> bool:
    """Whether a write is to stay in memory, as the plans have it now.

    Raises:
        PlanOverError: its set's plan is over, or another one.
    """
    if intent.plan is None:
        return intent.parked or _keep_any(rows, name.bucket, intent.points_to)
    plan = rows.plan(name.bucket, intent.plan.prefix)
    if (
        plan is None
        or plan.stage is Stage.DROPPED
        or plan.revision != intent.plan.revision
        or _is_anew(rows, name, old, plan, intent)
    ):
        raise PlanOverError("the set has another plan now", bucket=name.bucket, prefix=intent.plan.prefix)
    return plan.parks(intent.role)


def keep_any(rows: Rows, pointer: Pending) -> bool:
    """Whether one of the sets that a pointer names does not go to the origin."""
    return _keep_any(rows, pointer.name.bucket, pointer.points_to)


def _keep_any(rows: Rows, bucket: str, prefixes: Sequence[str]) -> bool:
    plans = [rows.plan(bucket, prefix) for prefix in prefixes]
    return any(plan is not None and plan.stage is not Stage.SENT for plan in plans)


def _is_anew(rows: Rows, name: ObjectName, old: Record | None, plan: Plan, intent: Intent) -> bool:
    """Whether a member is written again though the set was marked whole: then another set begins in its place."""
    if plan.stage is not Stage.KEPT or intent.role in (Role.MARKER, Role.POINTER):
        return False
    if old is None or old.version is None or old.revision <= plan.revision:
        return False
    for scope in ancestor_scopes(name.key):
        if not scope.startswith(plan.prefix):
            continue
        for marker in rows.marker_names(name.bucket, scope):
            record = rows.record(marker)
            if record is not None and record.version is not None and record.revision > plan.revision:
                return True
    return False
