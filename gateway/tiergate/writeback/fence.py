"""The fence: may the step that makes a pending write visible in the origin go now, and if not, what does it wait for?

Pure. The rules, each from a way to tear a set (`place` orders what is pending; a version that replaces a pending one
inherits its place, so that a marker committed in between still waits for it):

- A *marker* waits for everything in its scope that was there before its commit, and for members of its set that were
  replaced or deleted after it. A disturbed marker also waits until its set has been left alone for a while. A
  *pointer* waits for what was there before it. Of several in one scope, the lower place goes first.
- A *small* object waits for the large ones in its scope that were acknowledged before its request began; a *large*
  one waits for nothing.
- A put that replaces a member of a set whose marker stands in the origin is held until the marker is written anew, or
  for a bounded time (`renewal`).
- A deletion waits only for the deletion of a marker whose scope holds it: markers go first, whatever order the client
  used.
- Mode `strict`: everything waits for everything before it in its bucket. Mode `off`: puts wait for nothing.
- What is quarantined holds back only markers and pointers whose scope holds it.

Nothing waits for itself in a circle, also where modes meet: `StrictOrder` is one order of everything in a bucket, and
whatever the rules above make a write wait for comes before it in that order.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from tiergate.checkpoints.markers import ancestor_scopes
from tiergate.config import FenceMode
from tiergate.model import Kind, ObjectName, Pending, Role
from tiergate.writeback.order import StrictOrder
from tiergate.writeback.renewal import Sets, held_by
from tiergate.writeback.scopes import Scope, ScopeIndex, is_fenced

__all__ = ["Blocked", "FenceMode", "PendingView", "Reason", "blockers"]


class Reason(StrEnum):
    """Why a write is held back."""

    SET_INCOMPLETE = "objects of its set are not in the origin yet"
    SET_CHANGED = "objects of its set were replaced or deleted after it"
    SET_BUSY = "its set was overwritten in place and may still be in the middle of that"
    LARGE_FIRST = "large objects acknowledged before it are not in the origin yet"
    SET_STANDS = "its set stands in the origin and its marker was not written anew yet"
    MARKER_FIRST = "the marker of its set is deleted first"
    STRICT_ORDER = "everything before it comes first"


@dataclass(frozen=True, slots=True)
class Blocked:
    """`waits_for` names one write that is in the way, or is to come (None: only time is); `until_s` is the wall time at
    which to look again if nothing else happens, 0 for none."""

    reason: Reason
    waits_for: ObjectName | None = None
    until_s: float = 0.0

    def __str__(self) -> str:
        where = f": s3://{self.waits_for.bucket}/{self.waits_for.key}" if self.waits_for else ""
        return f"{self.reason}{where}"


class PendingView:
    """All pending writes, indexed so that each question about one of them is answered in a few look-ups; and what is
    known of the sets around those that replace something."""

    def __init__(self, pending: Iterable[Pending], sets: Sets | None = None) -> None:
        self.sets: Sets = {} if sets is None else sets
        self.writes = tuple(sorted(pending, key=lambda write: write.place))
        self.scopes = ScopeIndex(self.writes)
        self._order: StrictOrder | None = None
        self._by_name: dict[ObjectName, Pending] | None = None

    def find(self, name: ObjectName) -> Pending | None:
        """The pending write of a key."""
        if self._by_name is None:
            self._by_name = {write.name: write for write in self.writes}
        return self._by_name.get(name)

    @property
    def order(self) -> StrictOrder:
        """The order of mode `strict`; made when it is first asked for."""
        if self._order is None:
            self._order = StrictOrder(self.writes, self.scopes)
        return self._order

    def __iter__(self) -> Iterator[Pending]:
        return iter(self.writes)


def blockers(subject: Pending, view: PendingView, mode: FenceMode, now_s: float, quiet_s: float) -> Blocked | None:
    """What holds `subject` back, None if it may become visible now. `subject` itself may be in the view."""
    if mode is FenceMode.OFF and subject.kind is Kind.PUT:
        return None
    return _blockers(subject, view, now_s, quiet_s) or (
        _strict_blockers(subject, view) if mode is FenceMode.STRICT else None
    )


def _blockers(subject: Pending, view: PendingView, now_s: float, quiet_s: float) -> Blocked | None:
    if subject.kind is Kind.DELETE:
        if subject.role is Role.MARKER:
            return None
        marker = _deleted_marker(subject.name, view.scopes)
        return None if marker is None else Blocked(Reason.MARKER_FIRST, marker)
    if is_fenced(subject):
        return _marker_blockers(subject, view.scopes, now_s, quiet_s)
    standing = held_by(subject, view.sets)
    if standing is not None and now_s < standing.until_s:
        return Blocked(Reason.SET_STANDS, standing.marker, standing.until_s)
    if subject.role is Role.SMALL:
        large = view.scopes.large_until(Scope.of(subject.name), subject.start_revision, subject.name)
        if large is not None:
            return Blocked(Reason.LARGE_FIRST, large)
    return None


def _deleted_marker(name: ObjectName, scopes: ScopeIndex) -> ObjectName | None:
    for prefix in ancestor_scopes(name.key):
        marker = scopes.deleted_marker(Scope(name.bucket, prefix))
        if marker is not None and marker != name:
            return marker
    return None


def _marker_blockers(subject: Pending, scopes: ScopeIndex, now_s: float, quiet_s: float) -> Blocked | None:
    earlier = scopes.missing(subject)
    if earlier is not None:
        return Blocked(Reason.SET_INCOMPLETE, earlier)
    if subject.role is Role.POINTER:
        return None
    changed = scopes.changed(subject)
    if changed is not None:
        return Blocked(Reason.SET_CHANGED, changed)
    if subject.disturbed_s and now_s < subject.disturbed_s + quiet_s:
        return Blocked(Reason.SET_BUSY, until_s=subject.disturbed_s + quiet_s)
    return None


def _strict_blockers(subject: Pending, view: PendingView) -> Blocked | None:
    earlier = view.order.before(subject)
    return None if earlier is None else Blocked(Reason.STRICT_ORDER, earlier)
