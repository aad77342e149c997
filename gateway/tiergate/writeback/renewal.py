"""A committed set that is overwritten in place: which of its new objects wait until its marker is written anew. Pure.

While its marker stands, the origin holds the set as it was. The first new object to land there ends that, so all of
them are *held* until the whole new set is acknowledged: the time without a complete set is then that of replacing the
objects, not that of the client's saving them.

Held is only a put that replaces what the origin holds: what is new takes nothing from the set. A marker is not held,
nor a pointer. What is held waits for a commit or for time, never for what is pending: nothing waits in a circle.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tiergate.checkpoints.markers import ancestor_scopes
from tiergate.directory.base import Seen
from tiergate.model import NO_BASE, UNKNOWN_BASE, Kind, ObjectName, Pending, Role, State
from tiergate.writeback.scopes import Scope


@dataclass(frozen=True, slots=True)
class StandingSet:
    """A set that stands in the origin, by `marker`, one of those that say so. `renewed` is the lowest revision at which
    each of these was committed anew, 0 while one was not: the new set holds what was committed before. Other changes of
    the set are held until the wall time `until_s`."""

    marker: ObjectName
    renewed: int
    until_s: float = 0.0


Sets = Mapping[Scope, StandingSet | None]
"""What is known of sets, by the scope of their markers. None: it has markers, and none stands in the origin. A scope
that is missing has none, or nobody looked."""


def may_be_held(write: Pending) -> bool:
    """Whether the write replaces something that the origin is known to hold, and is no marker or pointer."""
    return (
        write.kind is Kind.PUT
        and write.role in (Role.SMALL, Role.LARGE)
        and write.base not in (NO_BASE, UNKNOWN_BASE)
        and not write.quarantined
    )


def held_by(write: Pending, sets: Sets) -> StandingSet | None:
    """The set that holds the write until its marker is written anew, if one does: the innermost around it."""
    if not sets or not may_be_held(write):
        return None
    for prefix in ancestor_scopes(write.name.key):
        scope = Scope(write.name.bucket, prefix)
        if scope in sets:
            found = sets[scope]
            return found if found is not None and write.revision >= found.renewed else None
    return None


def standing_set(markers: Iterable[Seen]) -> StandingSet | None:
    """What the directory's sight of all markers of a scope says of their set, which holds nothing yet. Several count as
    one: only when each that stands was written anew, the set is whole again."""
    standing = [(_renewed(seen), seen.record.name) for seen in markers if seen.record is not None and _stands(seen)]
    if not standing:
        return None
    renewed, marker = min(standing)
    return StandingSet(marker, renewed)


def _stands(seen: Seen) -> bool:
    """Whether the origin holds the marker, and it is not about to be taken away there."""
    if seen.pending is None:
        return seen.record is not None and seen.record.state is State.CLEAN
    write = seen.pending
    return write.kind is Kind.PUT and not write.withdrawn and write.base not in (NO_BASE, UNKNOWN_BASE)


def _renewed(seen: Seen) -> int:
    return seen.pending.revision if seen.pending is not None and not seen.pending.quarantined else 0
