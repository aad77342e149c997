"""What a commit does to the rows: guards, inheritance, what is owed, and which markers it disturbs.

Each function is one atomic transition inside the caller's transaction, the same for every store of the rows.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from tiergate.checkpoints.markers import ancestor_scopes, collide, scope_of
from tiergate.directory import plans
from tiergate.directory.base import Committed, Intent
from tiergate.directory.view import Rows
from tiergate.errors import ConflictError, FencedError, NotParkableError
from tiergate.model import (
    NO_BASE,
    UNKNOWN_BASE,
    Actor,
    Kind,
    ObjectName,
    OriginUpload,
    Pending,
    Plan,
    Record,
    Role,
    State,
    Step,
    Version,
)


def check_guard(rows: Rows, name: ObjectName, intent: Intent) -> Record | None:
    """The current record, if the intent's guard allows the change.

    Raises:
        ConflictError: it was changed since it was seen.
    """
    record = rows.record(name)
    if intent.guard is not None and intent.guard != (record.modified if record else 0):
        raise ConflictError("the record changed", bucket=name.bucket, key=name.key)
    return record


def put(rows: Rows, name: ObjectName, version: Version, intent: Intent) -> Committed:
    """Commit a version as dirty and owed to the origin."""
    old, before = check_guard(rows, name, intent), rows.pending(name)
    base = base_of(old, before, intent)
    parked = is_parked(name, before, base, intent, plans.asks_to_park(rows, name, old, intent))
    leave_behind(rows, name, before)
    revision = rows.next_revision()
    rows.put_record(Record(name, State.DIRTY, revision, revision, version, role=intent.role))
    rows.put_pending(
        Pending(
            name=name,
            uid=version.uid,
            kind=Kind.PUT,
            role=intent.role,
            place=before.place if before else revision,
            revision=revision,
            start_revision=intent.start_revision,
            committed_s=intent.now_s,
            size_bytes=version.size_bytes,
            base=base,
            conditional=is_conditional(before, intent),
            leftovers=leftovers_of(before),
            withdrawn=before.withdrawn if before else False,
            owner=rows.me,
            parked=parked,
            points_to=intent.points_to,
        )
    )
    disturb(rows, name, old, intent, in_memory=parked)
    return Committed(revision, old.version if old else None, parked=parked)


def put_through(rows: Rows, name: ObjectName, version: Version, origin_etag: str, intent: Intent) -> Committed:
    """Commit a version that the origin holds already."""
    old = check_guard(rows, name, intent)
    leave_behind(rows, name, rows.pending(name))
    orphan_uploads(rows, name)
    rows.drop_pending(name)
    revision = rows.next_revision()
    rows.put_record(Record(name, State.CLEAN, revision, revision, version, origin_etag, intent.now_s, intent.role))
    disturb(rows, name, old, intent)
    return Committed(revision, old.version if old else None)


def delete(rows: Rows, name: ObjectName, uid: str, intent: Intent) -> Committed | None:
    """Commit a deletion, as pending write `uid`; where the origin surely has nothing, nothing is owed."""
    old, before = check_guard(rows, name, intent), rows.pending(name)
    if old is not None and old.state is State.TOMBSTONE:
        return None
    base = base_of(old, before, intent)
    if old is None and base == NO_BASE:
        return None
    leave_behind(rows, name, before)
    revision = rows.next_revision()
    goes = base == NO_BASE and before is not None and not before.begun
    if goes:
        orphan_uploads(rows, name)
        rows.drop_pending(name)
        rows.drop_record(name)
    else:
        rows.put_record(Record(name, State.TOMBSTONE, revision, revision, None, role=intent.role))
        rows.put_pending(
            Pending(
                name=name,
                uid=uid,
                kind=Kind.DELETE,
                role=intent.role,
                place=before.place if before else revision,
                revision=revision,
                start_revision=intent.start_revision,
                committed_s=intent.now_s,
                size_bytes=0,
                base=base,
                conditional=is_conditional(before, intent),
                leftovers=leftovers_of(before),
                owner=rows.me,
            )
        )
    in_memory = goes and before is not None and before.parked
    disturb(rows, name, old, intent, deleting=True, in_memory=in_memory)
    return Committed(revision, old.version if old else None)


def leave_behind(rows: Rows, name: ObjectName, before: Pending | None) -> None:
    """Before a member of a cluster replaces another's pending write: what has begun there may be on its way to the
    origin, and stands as a step until that node, or who finds it dead, says that it is over."""
    if before is None or before.owner is None or before.owner == rows.me or not before.begun:
        return
    holder = str(Actor("", before.owner))
    rows.put_step(Step(name, f"{before.uid}@{holder}", holder, before.role, through=False, replaces=True))


def base_of(old: Record | None, before: Pending | None, intent: Intent) -> str:
    """The origin's ETag that a new write of the key replaces, as far as it is known."""
    if before is not None:
        if before.begun:
            # It may have landed or not.
            return UNKNOWN_BASE
        return intent.base if before.base == UNKNOWN_BASE else before.base
    if old is not None:
        return old.origin_etag
    return intent.base


def is_parked(name: ObjectName, before: Pending | None, base: str, intent: Intent, asked: bool) -> bool:
    """Whether a new write stays in memory. Its deletion must need nothing of the origin; only a pointer may stand there
    as it was before, since nobody but it says what it names.

    Raises:
        NotParkableError: it should, and cannot.
    """
    if not asked or intent.role is Role.POINTER:
        return asked
    if base != NO_BASE or (before is not None and not before.parked):
        raise NotParkableError("the origin has, or is owed, something of the key", bucket=name.bucket, key=name.key)
    return True


def is_conditional(before: Pending | None, intent: Intent) -> bool:
    """Whether the origin must hold just the base of a write. One that was decided on a pending write of ours asks of
    the origin what that one did, and nothing any more once that one began: it may land, or not, at any time."""
    return intent.conditional and (before is None or (before.conditional and not before.begun))


def leftovers_of(before: Pending | None) -> tuple[OriginUpload, ...]:
    """The uploads of a superseded write, for its successor to abort."""
    if before is None:
        return ()
    return before.leftovers + ((before.upload,) if before.upload else ())


def orphan_uploads(rows: Rows, name: ObjectName) -> None:
    """A pending write goes without a successor: its uploads must still be aborted."""
    for upload in leftovers_of(rows.pending(name)):
        rows.orphan(name, upload)


def disturb(
    rows: Rows,
    name: ObjectName,
    old: Record | None,
    intent: Intent,
    *,
    deleting: bool = False,
    in_memory: bool = False,
) -> None:
    """A member of a set was replaced or deleted: markers of the set that were committed after it, and are not in the
    origin yet, no longer tell the truth for a while. `in_memory`: nothing of it concerns the origin."""
    if old is None or old.version is None or intent.role is Role.POINTER:
        return
    for scope in ancestor_scopes(name.key):
        if intent.role is Role.MARKER and scope == scope_of(name.key):
            continue
        markers = rows.marker_names(name.bucket, scope)
        for marker in markers:
            write = rows.pending(marker)
            if write is None or write.kind is not Kind.PUT or write.revision <= old.revision:
                continue
            if in_memory and not write.parked:
                continue
            if write.disturbed_s < intent.now_s:
                rows.disturb(replace(write, disturbed_s=intent.now_s))
        if markers and deleting:
            # Its own set loses a member; those around it lose a set, as when old checkpoints are cleaned up.
            return


def owned(rows: Rows, name: ObjectName, uid: str) -> Pending:
    """The pending write, if it still is `uid`, owed and ours.

    Raises:
        FencedError: it was superseded, finished or parked, or another node owns it now.
    """
    write = rows.pending(name)
    if write is None or write.uid != uid or write.parked:
        raise FencedError("superseded", bucket=name.bucket, key=name.key)
    return ours(rows, write)


def ours(rows: Rows, write: Pending) -> Pending:
    """The write, if whoever makes the change owns it.

    Raises:
        FencedError: another node does.
    """
    if write.owner != rows.me:
        raise FencedError("another node owns it", bucket=write.name.bucket, key=write.name.key, owner=write.owner)
    return write


def change(rows: Rows, write: Pending) -> Pending:
    """Write back a changed pending write."""
    rows.put_pending(write)
    return write


def persisted(rows: Rows, name: ObjectName, uid: str, origin_etag: str, now_s: float) -> Version | None:
    """The origin has what was owed, or had it before somebody superseded it."""
    write, record = rows.pending(name), rows.record(name)
    if write is None:
        return None
    if write.uid != uid:
        # Another node's may have begun since; it asks the origin.
        if write.owner == rows.me:
            rows.put_pending(replace(write, base=origin_etag or NO_BASE, begun=False))
        return None
    ours(rows, write)
    # An upload that is still noted did not make the version: a dead process's did, while this one was begun.
    orphan_uploads(rows, name)
    rows.drop_pending(name)
    if write.kind is Kind.DELETE or record is None or record.version is None:
        rows.drop_record(name)
        return None
    rows.put_record(
        replace(
            record,
            state=State.CLEAN,
            modified=rows.next_revision(),
            origin_etag=origin_etag,
            validated_s=now_s,
        )
    )
    return record.version


def owe_again(rows: Rows, name: ObjectName, uid: str, base: str, now_s: float) -> Pending | None:
    """What the origin holds of a clean version is not that any more: it turns dirty, to be put again on `base`."""
    record = clean(rows, name, uid)
    if record is None or record.version is None:
        return None
    rows.put_record(replace(record, state=State.DIRTY, modified=rows.next_revision(), origin_etag=""))
    return change(
        rows,
        Pending(
            name=name,
            uid=uid,
            kind=Kind.PUT,
            role=record.role,
            # Its own commit orders it: a marker that names this one must wait until it is back.
            place=record.revision,
            revision=record.revision,
            start_revision=record.revision,
            committed_s=now_s,
            size_bytes=record.version.size_bytes,
            base=base,
            owner=rows.me,
        ),
    )


def withdraw(rows: Rows, name: ObjectName, uid: str, now_s: float) -> Pending | None:
    """A clean marker turns dirty, to be put back when its set is whole."""
    record = clean(rows, name, uid)
    write = owe_again(rows, name, uid, record.origin_etag, now_s) if record is not None else None
    if write is None:
        return None
    return change(rows, replace(write, role=Role.MARKER, disturbed_s=now_s, withdrawn=True))


def drop_clean(rows: Rows, names: Iterable[ObjectName]) -> list[Version]:
    """Drop those of the records that are clean, markers aside; the versions dropped."""
    dropped: list[Version] = []
    for name in names:
        record = clean(rows, name, None)
        if record is not None and record.version is not None and record.role is not Role.MARKER:
            rows.drop_record(name)
            dropped.append(record.version)
    return dropped


def clean(rows: Rows, name: ObjectName, uid: str | None) -> Record | None:
    """The record, if it is clean and of version `uid` (None: of any)."""
    record = rows.record(name)
    if record is None or record.version is None or record.state is not State.CLEAN:
        return None
    return record if uid is None or record.version.uid == uid else None


def forget(rows: Rows, name: ObjectName, uid: str | None) -> Version | None:
    """Drop a clean record."""
    record = clean(rows, name, uid)
    if record is None:
        return None
    rows.drop_record(name)
    return record.version


def revalidated(rows: Rows, name: ObjectName, uid: str, now_s: float) -> None:
    """The origin still holds a clean version."""
    record = clean(rows, name, uid)
    if record is not None:
        rows.touch_record(replace(record, validated_s=now_s))


def adopt(
    rows: Rows, name: ObjectName, version: Version, origin_etag: str, role: Role, now_s: float, since: int | None
) -> Record:
    """Record what was found in the origin, unless the key has a record.

    Raises:
        ConflictError: the key may have been deleted since the origin was asked.
    """
    found = rows.record(name)
    if found is not None:
        return found
    if since is not None and rows.drops(name) != since:
        raise ConflictError("the key was deleted meanwhile", bucket=name.bucket, key=name.key)
    modified = rows.next_revision()
    # Nobody knows when it was committed: a member counts as before all markers, a marker as after all.
    revision = modified if role is Role.MARKER else 0
    record = Record(name, State.CLEAN, revision, modified, version, origin_etag, now_s, role)
    rows.put_record(record)
    return record


def change_owned(rows: Rows, name: ObjectName, uid: str, changed: Callable[[Pending], Pending]) -> Pending:
    """Change the pending write.

    Raises:
        FencedError: it no longer is `uid`, or another node's.
    """
    return change(rows, changed(owned(rows, name, uid)))


def change_if_pending(rows: Rows, name: ObjectName, uid: str, changed: Callable[[Pending], Pending]) -> None:
    """Change the pending write if it still is `uid`, whoever owns it."""
    write = rows.pending(name)
    if write is not None and write.uid == uid:
        rows.put_pending(changed(write))


def promote(rows: Rows, writes: Iterable[Pending], now_s: float) -> int:
    """What is parked is owed from now on; how many writes were."""
    count = 0
    for each in writes:
        write = rows.pending(each.name)
        if write is None or write.uid != each.uid or not write.parked or plans.keep_any(rows, write):
            continue
        count += 1
        promoted = replace(write, parked=False, committed_s=now_s, place=write.revision)
        record = rows.record(each.name) if write.role is Role.POINTER else None
        if record is not None:
            # What it names may have been committed after it.
            revision = rows.next_revision()
            rows.put_record(replace(record, revision=revision, modified=revision))
            promoted = replace(promoted, place=revision, revision=revision)
        rows.put_pending(promoted)
    return count


def park(rows: Rows, name: ObjectName, uid: str, plan: Plan) -> bool:
    """Keep a pending put in memory, unless the origin may have heard of it."""
    write = rows.pending(name)
    if write is None or write.uid != uid or write.kind is not Kind.PUT or rows.plan(plan.bucket, plan.prefix) != plan:
        return False
    if write.parked:
        return True
    is_known = write.begun or write.withdrawn or write.base not in (NO_BASE, UNKNOWN_BASE)
    if is_known or write.quarantined or leftovers_of(write):
        return False
    rows.put_pending(replace(write, parked=True, base=NO_BASE))
    return True


def drop_leftovers(rows: Rows, name: ObjectName, dropped: Sequence[OriginUpload]) -> None:
    """Uploads that nobody needs were aborted."""
    write = rows.pending(name)
    if write is not None and write.leftovers:
        left = tuple(upload for upload in write.leftovers if upload not in dropped)
        rows.put_pending(replace(write, leftovers=left))
    for upload in dropped:
        rows.drop_orphan(name, upload)


def begin_step(rows: Rows, step: Step) -> bool:
    """Announce a step, unless another stands that it must not overlap with."""
    if any(other.uid != step.uid and collide(step, other) for other in rows.steps_near(step)):
        return False
    rows.put_step(step)
    return True
