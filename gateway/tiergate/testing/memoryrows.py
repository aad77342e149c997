"""The rows of a cluster's directory in the heap: dictionaries under the shared transitions, copied for each change."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from itertools import count
from typing import Any, TypeVar

from tiergate.checkpoints.markers import scope_of
from tiergate.directory.base import Finished
from tiergate.errors import HolderLostError, MembershipOverError
from tiergate.model import (
    Agreement,
    Bucket,
    Holder,
    Live,
    Node,
    ObjectName,
    OriginUpload,
    Part,
    Pending,
    PinnedPrefix,
    Plan,
    QuarantinedSet,
    Record,
    Role,
    Run,
    Step,
    Upload,
)

T = TypeVar("T")


@dataclass(slots=True)
class Tables:
    """All rows. `holders`: by object and uid, node to epoch."""

    revision: int = 0
    records: dict[ObjectName, Record] = field(default_factory=dict)
    pending: dict[ObjectName, Pending] = field(default_factory=dict)
    drops: dict[ObjectName, int] = field(default_factory=dict)
    orphans: dict[tuple[ObjectName, OriginUpload], None] = field(default_factory=dict)
    steps: dict[tuple[str, str], Step] = field(default_factory=dict)
    uploads: dict[str, Upload] = field(default_factory=dict)
    parts: dict[tuple[str, int], Part] = field(default_factory=dict)
    finished: dict[str, Finished] = field(default_factory=dict)
    buckets: dict[str, Bucket] = field(default_factory=dict)
    pins: dict[tuple[str, str], PinnedPrefix] = field(default_factory=dict)
    quarantined: dict[tuple[str, str], QuarantinedSet] = field(default_factory=dict)
    agreed: dict[tuple[str, str, str], Agreement] = field(default_factory=dict)
    plans: dict[tuple[str, str], Plan] = field(default_factory=dict)
    runs: dict[tuple[str, str], Run] = field(default_factory=dict)
    holders: dict[tuple[ObjectName, str], dict[str, int]] = field(default_factory=dict)

    def copy(self) -> "Tables":
        """One that may be changed."""
        names = [each.name for each in fields(self) if each.name not in ("revision", "holders")]
        copies: dict[str, Any] = {name: dict(getattr(self, name)) for name in names}
        return Tables(
            revision=self.revision, holders={key: dict(nodes) for key, nodes in self.holders.items()}, **copies
        )


class State:
    """What the nodes share: the rows, and who is a member. `on_commit` is told of each commit of a version (its uid) or
    a deletion ("") and `on_hold` of each holder that is noted."""

    def __init__(self) -> None:
        self.tables = Tables()
        self.numbers = count(1)
        self.nodes: dict[str, Node] = {}
        self.on_commit: Callable[[ObjectName, str, int], None] = lambda name, uid, revision: None
        self.on_hold: Callable[[str, str], None] = lambda uid, node: None
        self.on_persisted: Callable[[Pending], None] = lambda write: None

    @property
    def live(self) -> Live:
        """The members now."""
        return Live(self.tables.revision, dict(self.nodes))

    def transact(self, me: Holder | None, transition: Callable[["MemoryRows"], T]) -> T:
        """Do all of it or, when it raises, nothing.

        Raises:
            MembershipOverError: `me` is no member.
        """
        if me is not None and not self.live.still([me]):
            raise MembershipOverError("the membership is over")
        rows = MemoryRows(self.tables.copy(), me)
        result = transition(rows)
        self.tables = rows.tables
        return result

    def hold(self, rows: "MemoryRows", name: ObjectName, uid: str, holders: Iterable[Holder]) -> None:
        """Note holders.

        Raises:
            HolderLostError: one of them is no member of that epoch.
        """
        for holder in holders:
            if not self.live.still([holder]):
                raise HolderLostError("a node that was to hold a copy is gone", node=holder.node)
            rows.tables.holders.setdefault((name, uid), {})[holder.node] = holder.epoch
            self.on_hold(uid, holder.node)


class MemoryRows:
    """Implements `tiergate.directory.view.Rows`; see there."""

    def __init__(self, tables: Tables, me: Holder | None) -> None:
        self.tables = tables
        self._me = me
        self._next = 0

    @property
    def me(self) -> Holder | None:
        return self._me

    def next_revision(self) -> int:
        if not self._next:
            self.tables.revision += 1
            self._next = self.tables.revision
        return self._next

    def record(self, name: ObjectName) -> Record | None:
        return self.tables.records.get(name)

    def put_record(self, record: Record) -> None:
        self._unheld(record.name, record.version.uid if record.version else None)
        self.tables.records[record.name] = record

    def _unheld(self, name: ObjectName, keep_uid: str | None) -> None:
        old = self.record(name)
        if old is not None and old.version is not None and old.version.uid != keep_uid:
            self.tables.holders.pop((name, old.version.uid), None)

    def touch_record(self, record: Record) -> None:
        self.tables.records[record.name] = record

    def drop_record(self, name: ObjectName) -> None:
        self._unheld(name, None)
        self.tables.drops[name] = self.drops(name) + 1
        self.tables.records.pop(name, None)

    def drops(self, name: ObjectName) -> int:
        return self.tables.drops.get(name, 0)

    def marker_names(self, bucket: str, scope: str) -> list[ObjectName]:
        markers = (name for name, record in self.tables.records.items() if record.role is Role.MARKER)
        return sorted(name for name in markers if name.bucket == bucket and scope_of(name.key) == scope)

    def pending(self, name: ObjectName) -> Pending | None:
        return self.tables.pending.get(name)

    def put_pending(self, write: Pending) -> None:
        self.tables.pending[write.name] = write

    def disturb(self, write: Pending) -> None:
        self.put_pending(write)

    def drop_pending(self, name: ObjectName) -> None:
        self.tables.pending.pop(name, None)

    def orphan(self, name: ObjectName, upload: OriginUpload) -> None:
        self.tables.orphans[name, upload] = None

    def drop_orphan(self, name: ObjectName, upload: OriginUpload) -> None:
        self.tables.orphans.pop((name, upload), None)

    def plan(self, bucket: str, prefix: str) -> Plan | None:
        return self.tables.plans.get((bucket, prefix))

    def put_plan(self, plan: Plan) -> None:
        self.tables.plans[plan.bucket, plan.prefix] = plan

    def drop_plan(self, plan: Plan) -> None:
        del self.tables.plans[plan.bucket, plan.prefix]

    def run(self, bucket: str, prefix: str) -> Run | None:
        return self.tables.runs.get((bucket, prefix))

    def put_run(self, run: Run) -> None:
        self.tables.runs[run.bucket, run.prefix] = run

    def steps_near(self, step: Step) -> list[Step]:
        return list(self.tables.steps.values())

    def put_step(self, step: Step) -> None:
        self.tables.steps[step.name.bucket, step.uid] = step

    def drop_step(self, step: Step) -> None:
        self.tables.steps.pop((step.name.bucket, step.uid), None)

    def upload(self, upload_id: str) -> Upload | None:
        return self.tables.uploads.get(upload_id)

    def put_upload(self, upload: Upload) -> None:
        self.tables.uploads[upload.upload_id] = upload

    def drop_upload(self, upload: Upload) -> None:
        for part in self.parts(upload.upload_id):
            del self.tables.parts[upload.upload_id, part.number]
        self.tables.uploads.pop(upload.upload_id, None)

    def part(self, upload_id: str, number: int) -> Part | None:
        return self.tables.parts.get((upload_id, number))

    def put_part(self, upload_id: str, part: Part) -> None:
        self.tables.parts[upload_id, part.number] = part

    def parts(self, upload_id: str) -> list[Part]:
        return [part for (owner, _), part in sorted(self.tables.parts.items()) if owner == upload_id]

    def put_finished(self, upload_id: str, finished: Finished) -> None:
        self.tables.finished[upload_id] = finished
