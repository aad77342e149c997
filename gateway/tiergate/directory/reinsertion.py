"""What is told to a directory that forgot it (see `tiergate.directory.era`): transitions that only a cluster has.

A write comes back as it was, at a new place, under the node that tells of it. Of two writes of a key the later one
counts: one of the present era always, else by the revisions they had in the era that was lost.

An etcd that went back counts on from there until somebody notices. What others wrote in it by then has smaller
revisions than what was lost before, and is newer: where revisions cannot tell, the times at which the two were made do.
"""

from dataclasses import replace

from tiergate.directory import ownership, transitions
from tiergate.directory.clusterrows import ClusterRows
from tiergate.directory.era import Era
from tiergate.directory.ledger import Entry
from tiergate.model import UNKNOWN_BASE, Kind, ObjectName, Pending, Record, Role, State

SET_ASIDE = "told to a directory that forgot it: what it speaks for may be told by other nodes still"
"""Why a marker or a pointer is set aside for a while."""

UID_LENGTH = 28
"""Of `new_uid`: what else there is of a version's uid stands before it."""


def insert(rows: ClusterRows, entry: Entry, era: Era, kept: int, now_s: float) -> bool:
    """Tell of a write. Whether it is pending now. `kept`: up to there the era's snapshot surely is what was before."""
    name, uid = entry.record.name, entry.write.uid
    record, before = rows.record(name), rows.pending(name)
    if before is not None and before.uid == uid:
        _join(rows, before, entry, now_s)
    elif record is not None and not _is_older(record, before, entry, era, kept):
        return False
    else:
        revision = rows.next_revision()
        rows.put_record(
            replace(entry.record, revision=revision, modified=revision, era=entry.era, was=entry.record.revision)
        )
        write = replace(entry.write, place=revision, revision=revision, start_revision=rows.revision, upload=None)
        leftovers = transitions.leftovers_of(entry.write) + transitions.leftovers_of(before)
        rows.put_pending(_told(replace(write, leftovers=tuple(dict.fromkeys(leftovers)), owner=rows.me), now_s))
    if entry.write.kind is Kind.PUT and rows.me is not None:
        rows.hold(name, uid, [rows.me])
    return True


def _join(rows: ClusterRows, before: Pending, entry: Entry, now_s: float) -> None:
    """The directory knows of the write, or another node told of it. It may be on its way under what this node knew."""
    leftovers = dict.fromkeys((*before.leftovers, *transitions.leftovers_of(entry.write)))
    left = tuple(upload for upload in leftovers if upload != before.upload)
    joined = replace(before, leftovers=left, begun=before.begun or entry.write.begun)
    if joined.begun:
        joined = replace(joined, base=UNKNOWN_BASE)
    if before.owner == rows.me or ownership.is_over(rows, before.owner):
        joined = replace(joined, owner=rows.me)
        if before.quarantined != SET_ASIDE:
            joined = _told(joined, now_s)
    rows.put_pending(joined)


def _told(write: Pending, now_s: float) -> Pending:
    """Nobody knows any more what the origin holds of the key. What speaks for others must not go before they came."""
    write = replace(write, base=UNKNOWN_BASE)
    if write.kind is Kind.DELETE or write.role not in (Role.MARKER, Role.POINTER) or write.quarantined:
        return write
    return replace(write, quarantined=SET_ASIDE, disturbed_s=now_s if write.role is Role.MARKER else 0.0)


def _is_older(record: Record, write: Pending | None, entry: Entry, era: Era, kept: int) -> bool:
    """Whether what the directory has of the key came before an entry."""
    version = record.version
    uid = write.uid if write is not None else version.uid if version is not None else ""
    # A uid begins with its time.
    is_earlier = uid[-UID_LENGTH:] < entry.write.uid[-UID_LENGTH:]
    if record.state is State.CLEAN and record.revision == 0:
        # Somebody asked the origin meanwhile.
        return version is None or version.foreign or is_earlier
    if record.era == entry.era and record.was:
        return record.was < entry.record.revision
    if era.previous != entry.era or record.revision > min(era.since, entry.record.revision - 1):
        return False
    return record.revision <= kept or is_earlier


def put_behind(rows: ClusterRows, write: Pending, now_s: float) -> None:
    """Other nodes have told what they had to: a marker or pointer now waits for all of it, and for nothing else."""
    now, record = rows.pending(write.name), rows.record(write.name)
    if now is None or record is None or now.uid != write.uid or now.quarantined != SET_ASIDE or now.owner != rows.me:
        return
    revision = rows.next_revision()
    rows.put_record(replace(record, revision=revision, modified=revision))
    disturbed_s = now_s if now.role is Role.MARKER else 0.0
    rows.put_pending(replace(now, place=revision, revision=revision, quarantined="", disturbed_s=disturbed_s))


def forget_finished(rows: ClusterRows, name: ObjectName, uid: str, era: Era) -> None:
    """What a snapshot says is pending was finished or superseded after it: the origin tells what became of the key."""
    write = rows.pending(name)
    if write is None or write.uid != uid or write.revision > era.since:
        return
    transitions.orphan_uploads(rows, name)
    rows.drop_pending(name)
    rows.drop_record(name)
