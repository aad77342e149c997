"""What is pending in a scope (a prefix and everything below it), indexed for the fence's questions. Pure."""

from collections.abc import Iterable
from typing import NamedTuple

from tiergate.checkpoints.markers import ancestor_scopes, scope_of
from tiergate.model import NO_BASE, Kind, ObjectName, Pending, Role


class Scope(NamedTuple):
    """A prefix of a bucket, with its slash; empty for the whole bucket."""

    bucket: str
    prefix: str

    @classmethod
    def of(cls, name: ObjectName) -> "Scope":
        """The scope that a marker of this name speaks for."""
        return cls(name.bucket, scope_of(name.key))


def is_fenced(write: Pending) -> bool:
    """Whether the write is a marker or a pointer, of either kind."""
    return write.role in (Role.MARKER, Role.POINTER)


def replaces(write: Pending) -> bool:
    """Whether a marker committed before the write could name what it replaces or deletes. (A withdrawn marker stands
    on nothing only because it was taken away.)"""
    return write.kind is Kind.DELETE or write.base != NO_BASE or write.place < write.revision or write.withdrawn


class Lowest:
    """The two lowest values offered, so that one name can be left out of account."""

    __slots__ = ("_best", "_second")

    def __init__(self) -> None:
        self._best: tuple[int, ObjectName] | None = None
        self._second: tuple[int, ObjectName] | None = None

    def offer(self, value: int, name: ObjectName) -> None:
        """Count in a value; each name is offered once."""
        if self._best is None or value < self._best[0]:
            self._best, self._second = (value, name), self._best
        elif self._second is None or value < self._second[0]:
            self._second = (value, name)

    def without(self, name: ObjectName) -> tuple[int, ObjectName] | None:
        """The lowest value of any other name."""
        if self._best is not None and self._best[1] == name:
            return self._second
        return self._best


class ScopeIndex:
    """Look-ups by scope over some pending writes; a write counts in its parent prefix and all those above."""

    def __init__(self, writes: Iterable[Pending]) -> None:
        self._members: dict[Scope, Lowest] = {}
        self._replaced: dict[Scope, Lowest] = {}
        self._large: dict[Scope, Lowest] = {}
        self._deletions: dict[Scope, Lowest] = {}
        self._deleted_markers: dict[Scope, ObjectName] = {}
        self._peers: dict[Scope, list[Pending]] = {}
        for write in writes:
            self._add(write)
        for peers in self._peers.values():
            peers.sort(key=lambda write: write.place)

    def _add(self, write: Pending) -> None:
        bucket, own = write.name.bucket, scope_of(write.name.key)
        fenced, replacing = is_fenced(write), replaces(write)
        if fenced:
            self._peers.setdefault(Scope(bucket, own), []).append(write)
            if write.kind is Kind.DELETE and write.role is Role.MARKER and not write.quarantined:
                self._deleted_markers.setdefault(Scope(bucket, own), write.name)
        for prefix in ancestor_scopes(write.name.key):
            at = Scope(bucket, prefix)
            if write.kind is Kind.DELETE and write.role is not Role.MARKER:
                self._deletions.setdefault(at, Lowest()).offer(write.place, write.name)
            if write.role is Role.LARGE and write.kind is Kind.PUT and not write.quarantined:
                self._large.setdefault(at, Lowest()).offer(write.place, write.name)
            if fenced and prefix == own:
                continue
            self._members.setdefault(at, Lowest()).offer(write.place, write.name)
            if replacing:
                self._replaced.setdefault(at, Lowest()).offer(-write.revision, write.name)

    def missing(self, marker: Pending) -> ObjectName | None:
        """A write that was there before the marker was committed, or a marker of the same scope with a lower place."""
        scope = Scope.of(marker.name)
        found = _lowest(self._members, scope, marker.name)
        if found is not None and found[0] < marker.revision:
            return found[1]
        for peer in self._peers.get(scope, ()):
            if peer.place >= marker.place:
                break
            if peer.name != marker.name:
                return peer.name
        return None

    def changed(self, marker: Pending) -> ObjectName | None:
        """A member of the marker's set that was replaced or deleted after the marker was committed."""
        found = _lowest(self._replaced, Scope.of(marker.name), marker.name)
        return found[1] if found is not None and -found[0] > marker.revision else None

    def newest_change(self, scope: Scope, but: ObjectName) -> int:
        """The revision of the newest write of the scope that replaces or deletes something, 0 for none."""
        found = _lowest(self._replaced, scope, but)
        return -found[0] if found is not None else 0

    def large_until(self, scope: Scope, revision: int, but: ObjectName) -> ObjectName | None:
        """A large put with a place of at most `revision`."""
        found = _lowest(self._large, scope, but)
        return found[1] if found is not None and found[0] <= revision else None

    def first_deletion(self, scope: Scope) -> int | None:
        """The lowest place of a deletion of anything that is no marker."""
        found = self._deletions.get(scope)
        lowest = found.without(ObjectName("", "")) if found is not None else None
        return lowest[0] if lowest is not None else None

    def deleted_marker(self, scope: Scope) -> ObjectName | None:
        """A marker right in the scope whose deletion is pending."""
        return self._deleted_markers.get(scope)

    def peers(self, scope: Scope) -> list[Pending]:
        """The markers and pointers right in the scope, by place."""
        return self._peers.get(scope, [])


def _lowest(index: dict[Scope, Lowest], scope: Scope, but: ObjectName) -> tuple[int, ObjectName] | None:
    found = index.get(scope)
    return found.without(but) if found is not None else None
