"""What a transition sees: the rows of one transaction, whatever stores them.

A transition reads and changes rows, all or nothing, in an order that is the same for everybody. Implementations keep
every index true together with the row that it belongs to.
"""

from collections.abc import Iterable
from typing import Protocol

from tiergate.directory.base import Finished
from tiergate.model import Holder, ObjectName, OriginUpload, Part, Pending, Plan, Record, Run, Step, Upload


class Rows(Protocol):
    """One transaction's view. What it changed it sees."""

    @property
    def me(self) -> Holder | None:
        """Who makes the change, and owns what it commits: a member of a cluster, None for a node alone."""
        ...

    def next_revision(self) -> int:
        """The revision of this transaction's changes: greater than any before. Some stores tell it only after the
        commit and put it where this one stands."""
        ...

    # -- records
    def record(self, name: ObjectName) -> Record | None:
        """The record of a key."""
        ...

    def put_record(self, record: Record) -> None:
        """Write a record and all that is derived from it."""
        ...

    def touch_record(self, record: Record) -> None:
        """Write a record whose state, role, revisions and version are what they were."""
        ...

    def drop_record(self, name: ObjectName) -> None:
        """Delete a record; counted in `drops`."""
        ...

    def drops(self, name: ObjectName) -> int:
        """How often a key of the name's slot lost its record."""
        ...

    def marker_names(self, bucket: str, scope: str) -> list[ObjectName]:
        """The markers right in a scope that have a record. That no other is committed meanwhile is part of what the
        transaction rests on; what becomes of their pending writes is not, unless it writes them."""
        ...

    # -- pending writes
    def pending(self, name: ObjectName) -> Pending | None:
        """The pending write of a key."""
        ...

    def put_pending(self, write: Pending) -> None:
        """Write a pending write, and its place in the order."""
        ...

    def disturb(self, write: Pending) -> None:
        """Write the pending write of one of `marker_names`, changed in its `disturbed_s` only. That may happen a little
        before the rest of the transaction does."""
        ...

    def drop_pending(self, name: ObjectName) -> None:
        """Delete a pending write, if there is one."""
        ...

    def orphan(self, name: ObjectName, upload: OriginUpload) -> None:
        """Keep an upload that nobody owns until it is aborted."""
        ...

    def drop_orphan(self, name: ObjectName, upload: OriginUpload) -> None:
        """Forget such an upload."""
        ...

    # -- plans of sets
    def plan(self, bucket: str, prefix: str) -> Plan | None:
        """The plan of a set."""
        ...

    def put_plan(self, plan: Plan) -> None:
        """Write a plan."""
        ...

    def drop_plan(self, plan: Plan) -> None:
        """Delete a plan."""
        ...

    def run(self, bucket: str, prefix: str) -> Run | None:
        """A run."""
        ...

    def put_run(self, run: Run) -> None:
        """Write a run."""
        ...

    # -- steps under way
    def steps_near(self, step: Step) -> list[Step]:
        """The steps that stand, at least all that collide with `step`. That no more of those begin meanwhile is part of
        what the transaction rests on."""
        ...

    def put_step(self, step: Step) -> None:
        """Write a step."""
        ...

    def drop_step(self, step: Step) -> None:
        """Delete a step, if it stands."""
        ...

    # -- clients' multipart uploads
    def upload(self, upload_id: str) -> Upload | None:
        """An upload in progress."""
        ...

    def put_upload(self, upload: Upload) -> None:
        """Write an upload."""
        ...

    def drop_upload(self, upload: Upload) -> None:
        """Delete an upload and its parts."""
        ...

    def part(self, upload_id: str, number: int) -> Part | None:
        """A part of an upload."""
        ...

    def put_part(self, upload_id: str, part: Part) -> None:
        """Write a part."""
        ...

    def parts(self, upload_id: str) -> Iterable[Part]:
        """Parts of an upload by number."""
        ...

    def put_finished(self, upload_id: str, finished: Finished) -> None:
        """Keep the answer of a completed upload."""
        ...
