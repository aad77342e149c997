"""The fence: may the step that makes a pending write visible in the origin go now, and if not, what does it wait for?

Pure. The rules, each from a way to tear a set (`place` orders what is pending; a version that replaces a pending one
inherits its place, so that a marker committed in between still waits for it):

- A *marker* waits for everything in its scope that was there before it, and for members of its set that were replaced
  or deleted after it. A disturbed marker also waits until its set has been left alone for a while. A *pointer* waits
  for what was there before it.
- A *small* object waits for the large ones in its scope that were acknowledged before its request began; a *large*
  one waits for nothing.
- A deletion waits only for the deletion of a marker whose scope holds it: markers go first, whatever order the client
  used.
- Mode `strict`: a put waits for everything in its bucket with a lower place. Mode `off`: puts wait for nothing.
- What is quarantined holds back only markers and pointers whose scope holds it.

Nothing waits for itself in a circle: a marker waits for what is not one, or lies deeper, or has a lower place in the
same scope; what is no marker waits for large puts, which wait for nothing, or for marker deletions, which do neither.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from tiergate.checkpoints.markers import ancestor_scopes, scope_of
from tiergate.config import FenceMode
from tiergate.model import NO_BASE, Kind, ObjectName, Pending, Role

__all__ = ["Blocked", "FenceMode", "PendingView", "Reason", "blockers"]


class Reason(StrEnum):
    """Why a write is held back."""

    SET_INCOMPLETE = "objects of its set are not in the origin yet"
    SET_CHANGED = "objects of its set were replaced or deleted after it"
    SET_BUSY = "its set was overwritten in place and may still be in the middle of that"
    LARGE_FIRST = "large objects acknowledged before it are not in the origin yet"
    MARKER_FIRST = "the marker of its set is deleted first"
    STRICT_ORDER = "everything before it comes first"


@dataclass(frozen=True, slots=True)
class Blocked:
    """`waits_for` names one write that is in the way (None: only time is); `until_s` is the wall time at which to look
    again if nothing else happens, 0 for none."""

    reason: Reason
    waits_for: ObjectName | None = None
    until_s: float = 0.0

    def __str__(self) -> str:
        where = f": s3://{self.waits_for.bucket}/{self.waits_for.key}" if self.waits_for else ""
        return f"{self.reason}{where}"


class PendingView:
    """All pending writes, indexed so that each question about one of them is answered in a few look-ups."""

    def __init__(self, pending: Iterable[Pending]) -> None:
        self.writes = tuple(sorted(pending, key=lambda write: write.place))
        self._before: dict[tuple[str, str], _Two] = {}
        self._changed: dict[tuple[str, str], _Two] = {}
        self._large: dict[tuple[str, str], _Two] = {}
        self._deleted_markers: dict[tuple[str, str], ObjectName] = {}
        self._peers: dict[tuple[str, str], list[Pending]] = {}
        self._first: dict[str, _Two] = {}
        for write in self.writes:
            self._add(write)

    def _add(self, write: Pending) -> None:
        bucket, key = write.name.bucket, write.name.key
        is_marker = write.role in (Role.MARKER, Role.POINTER)
        if not write.quarantined:
            self._first.setdefault(bucket, _Two()).offer(write.place, write.name)
        if is_marker:
            self._peers.setdefault((bucket, scope_of(key)), []).append(write)
            if write.kind is Kind.DELETE and write.role is Role.MARKER and not write.quarantined:
                self._deleted_markers.setdefault((bucket, scope_of(key)), write.name)
        replaces = write.base != NO_BASE or write.place < write.revision or write.kind is Kind.DELETE
        own_scope = scope_of(key)
        for scope in ancestor_scopes(key):
            at = (bucket, scope)
            if not is_marker or scope != own_scope:
                self._before.setdefault(at, _Two()).offer(write.place, write.name)
            if replaces and not is_marker:
                self._changed.setdefault(at, _Two()).offer(-write.revision, write.name)
            if write.role is Role.LARGE and write.kind is Kind.PUT and not write.quarantined:
                self._large.setdefault(at, _Two()).offer(write.place, write.name)

    def before(self, scope: tuple[str, str], revision: int, subject: ObjectName) -> ObjectName | None:
        """A write in the scope, no marker of the scope itself, that was there before `revision`."""
        return _Two.below(self._before.get(scope), revision, subject)

    def peers(self, scope: tuple[str, str]) -> list[Pending]:
        """The markers and pointers right in the scope."""
        return self._peers.get(scope, [])

    def changed_after(self, scope: tuple[str, str], revision: int, subject: ObjectName) -> ObjectName | None:
        """A member of the scope that was replaced or deleted after `revision`."""
        return _Two.below(self._changed.get(scope), -revision, subject)

    def large_until(self, scope: tuple[str, str], revision: int, subject: ObjectName) -> ObjectName | None:
        """A large put in the scope with a place of at most `revision`."""
        return _Two.below(self._large.get(scope), revision + 1, subject)

    def first(self, bucket: str, place: int, subject: ObjectName) -> ObjectName | None:
        """A write of the bucket with a lower place than `place`."""
        return _Two.below(self._first.get(bucket), place, subject)

    def deleted_marker(self, name: ObjectName) -> ObjectName | None:
        """A marker whose scope holds `name` and whose deletion is pending."""
        for scope in ancestor_scopes(name.key):
            marker = self._deleted_markers.get((name.bucket, scope))
            if marker is not None and marker != name:
                return marker
        return None

    def __iter__(self) -> Iterator[Pending]:
        return iter(self.writes)


class _Two:
    """The two smallest values offered, so that one name can be left out of account."""

    __slots__ = ("_best", "_second")

    def __init__(self) -> None:
        self._best: tuple[int, ObjectName] | None = None
        self._second: tuple[int, ObjectName] | None = None

    def offer(self, value: int, name: ObjectName) -> None:
        if self._best is None or value < self._best[0]:
            self._best, self._second = (value, name), self._best
        elif self._second is None or value < self._second[0]:
            self._second = (value, name)

    @staticmethod
    def below(two: "_Two | None", bound: int, but: ObjectName) -> ObjectName | None:
        """Who is below `bound`, `but` aside."""
        if two is None:
            return None
        for found in (two._best, two._second):
            if found is not None and found[1] != but and found[0] < bound:
                return found[1]
        return None


def blockers(
    subject: Pending, view: PendingView, mode: FenceMode, now_s: float, quiet_s: float
) -> Blocked | None:
    """What holds `subject` back, None if it may become visible now. `subject` itself may be in the view."""
    if subject.kind is Kind.DELETE:
        if subject.role is Role.MARKER:
            return None
        marker = view.deleted_marker(subject.name)
        return None if marker is None else Blocked(Reason.MARKER_FIRST, marker)
    if mode is FenceMode.OFF:
        return None
    if mode is FenceMode.STRICT:
        earlier = view.first(subject.name.bucket, subject.place, subject.name)
        if earlier is not None:
            return Blocked(Reason.STRICT_ORDER, earlier)
    if subject.role in (Role.MARKER, Role.POINTER):
        return _marker_blockers(subject, view, mode, now_s, quiet_s)
    if subject.role is Role.SMALL:
        scope = (subject.name.bucket, scope_of(subject.name.key))
        large = view.large_until(scope, subject.start_revision, subject.name)
        if large is not None:
            return Blocked(Reason.LARGE_FIRST, large)
    return None


def _marker_blockers(
    subject: Pending, view: PendingView, mode: FenceMode, now_s: float, quiet_s: float
) -> Blocked | None:
    scope = (subject.name.bucket, scope_of(subject.name.key))
    # In strict order the places decide alone: what comes later waits for the marker, so it must not wait for that.
    bound = subject.place if mode is FenceMode.STRICT else subject.revision
    earlier = view.before(scope, bound, subject.name)
    if earlier is not None:
        return Blocked(Reason.SET_INCOMPLETE, earlier)
    for peer in view.peers(scope):
        if peer.place < subject.place and peer.name != subject.name:
            return Blocked(Reason.SET_INCOMPLETE, peer.name)
    if subject.role is Role.POINTER:
        return None
    if mode is not FenceMode.STRICT:
        changed = view.changed_after(scope, subject.revision, subject.name)
        if changed is not None:
            return Blocked(Reason.SET_CHANGED, changed)
    if subject.disturbed_s and now_s < subject.disturbed_s + quiet_s:
        return Blocked(Reason.SET_BUSY, until_s=subject.disturbed_s + quiet_s)
    return None
