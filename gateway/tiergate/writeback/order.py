"""The one order of mode `strict`. Pure.

Places alone will not do: a marker that replaces a pending one inherits its place but names what was committed since,
and markers are deleted before their sets. So a write's position is

- its place;
- of a small put, not before what was acknowledged when its request began;
- of a marker or pointer, its own commit, but after every change of its set and after those of lower place beside it;
- of a marker's deletion, before the first deletion in its set.

Whatever the rules of mode `auto` make a write wait for has a lower position, so that the modes of different prefixes
never wait for each other in a circle.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from tiergate.model import Kind, ObjectName, Pending, Role
from tiergate.writeback.scopes import Scope, ScopeIndex, is_fenced

Position = tuple[int, int, int, int]
"""Revision, then what goes first at the same one: deletions of markers, the rest, small puts that follow it, markers
(the deeper first); then the place."""

_MARKER_DELETION, _PLAIN, _FOLLOWING, _FENCED = range(4)


class StrictOrder:
    """Positions of all pending writes, and who comes first in each bucket.

    Left out: what is quarantined, and markers and pointers that wait for it.
    """

    def __init__(self, writes: Sequence[Pending], scopes: ScopeIndex) -> None:
        self._scopes = scopes
        self._peers: dict[Scope, tuple[list[int], list[int]]] = {}
        stuck = _stuck(writes)
        self._first: dict[str, list[tuple[Position, ObjectName]]] = {}
        for write in writes:
            if write.quarantined or write.name in stuck:
                continue
            best = self._first.setdefault(write.name.bucket, [])
            best.append((self.position(write), write.name))
            if len(best) > 2:
                best.remove(max(best))

    def before(self, subject: Pending) -> ObjectName | None:
        """A write of the bucket that comes before `subject`."""
        position = self.position(subject)
        for found, name in sorted(self._first.get(subject.name.bucket, ())):
            if name != subject.name:
                return name if found < position else None
        return None

    def position(self, write: Pending) -> Position:
        """Where the write stands among all of its bucket."""
        if write.kind is Kind.DELETE:
            if write.role is not Role.MARKER:
                return write.place, _PLAIN, 0, write.place
            first = self._scopes.first_deletion(Scope.of(write.name))
            return min(write.place, write.place if first is None else first), _MARKER_DELETION, 0, write.place
        if is_fenced(write):
            return self._after_its_set(write), _FENCED, -len(Scope.of(write.name).prefix), write.place
        if write.role is Role.SMALL and write.start_revision > write.place:
            return write.start_revision, _FOLLOWING, 0, write.place
        return write.place, _PLAIN, 0, write.place

    def _after_its_set(self, marker: Pending) -> int:
        scope = Scope.of(marker.name)
        newest = max(marker.revision, self._scopes.newest_change(scope, marker.name))
        places, revisions = self._beside(scope)
        lower = bisect_left(places, marker.place)
        return max(newest, revisions[lower - 1]) if lower else newest

    def _beside(self, scope: Scope) -> tuple[list[int], list[int]]:
        """Places of the markers and pointers right in a scope, and the newest revision up to each of them."""
        known = self._peers.get(scope)
        if known is None:
            peers = self._scopes.peers(scope)
            revisions = accumulate((peer.revision if peer.kind is Kind.PUT else 0 for peer in peers), max)
            known = self._peers[scope] = [peer.place for peer in peers], list(revisions)
        return known


def _stuck(writes: Sequence[Pending]) -> set[ObjectName]:
    """Markers and pointers that wait for something quarantined, or for another that does."""
    bad = [write for write in writes if write.quarantined]
    stuck: set[ObjectName] = set()
    fenced = [write for write in writes if is_fenced(write) and write.kind is Kind.PUT and not write.quarantined]
    while bad:
        in_the_way = ScopeIndex(bad)
        found = [
            write
            for write in fenced
            if in_the_way.missing(write) or (write.role is Role.MARKER and in_the_way.changed(write))
        ]
        stuck |= {write.name for write in found}
        fenced = [write for write in fenced if write.name not in stuck]
        bad = found
    return stuck
