"""Who must bring a pending write to the origin, in a cluster: transitions that only it has. See `transitions`."""

from collections.abc import Sequence
from dataclasses import replace

from tiergate.directory.clusterrows import ClusterRows
from tiergate.model import LOST, Holder, ObjectName, Pending


def is_over(rows: ClusterRows, owner: Holder | None) -> bool:
    """Whether nobody living owns what `owner` does; that it stays so is part of what the transaction rests on."""
    return owner is None or rows.epoch_of(owner.node) != owner.epoch


def claim(rows: ClusterRows, name: ObjectName, uid: str) -> Pending | None:
    """Take over a pending write whose owner is gone, or which is lost until this node came back with it, as it is."""
    write = rows.pending(name)
    if write is None or write.uid != uid:
        return None
    if write.owner == rows.me:
        return write
    if not is_over(rows, write.owner) and write.quarantined != LOST:
        return None
    taken = replace(write, owner=rows.me)
    rows.put_pending(taken)
    return taken


def give(rows: ClusterRows, name: ObjectName, uid: str, to: Holder) -> bool:
    """Hand a pending write of this node's to another.

    Raises:
        HolderLostError: the other is gone, or began anew.
    """
    write = rows.pending(name)
    if write is None or write.uid != uid or write.owner != rows.me:
        return False
    rows.see_alive([to])
    rows.put_pending(replace(write, owner=to))
    return True


def quarantine(rows: ClusterRows, name: ObjectName, uid: str, reason: str) -> None:
    """Set a pending write aside, or release it, unless a living other node owns it."""
    write = rows.pending(name)
    if write is None or write.uid != uid:
        return
    if write.owner == rows.me or is_over(rows, write.owner):
        rows.put_pending(replace(write, quarantined=reason))


def hold(rows: ClusterRows, name: ObjectName, uid: str, holders: Sequence[Holder]) -> bool:
    """Note more holders of the current version.

    Raises:
        HolderLostError: one of them is gone, or began anew.
    """
    record = rows.record(name)
    if record is None or record.version is None or record.version.uid != uid:
        return False
    rows.hold(name, uid, holders)
    return True
