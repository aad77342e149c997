"""What is held of committed sets that are overwritten in place (`tiergate.writeback.renewal`), and for how long.

A hold ends by itself: when it has lasted for its bound, or when memory fills. The set's marker is withdrawn then as
soon as one of the new objects has its turn, and after that nothing is held any more.

When the node is to stop, no marker will come any more. What is held for one that was not written anew stays held, also
in full memory, and here: half of a set is worth nothing, and to send it would cost the whole one in the origin.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tiergate.checkpoints.markers import ancestor_scopes, scope_of
from tiergate.clock import Clock
from tiergate.directory.base import Directory
from tiergate.model import ObjectName, Pending
from tiergate.writeback.fence import FenceMode
from tiergate.writeback.renewal import StandingSet, held_by, may_be_held, standing_set
from tiergate.writeback.scopes import Scope

FOLDERS_COUNT = 100
"""Folders whose sets are asked for at a look; of others, each write asks when it has its turn."""


@dataclass(frozen=True, slots=True)
class HoldBounds:
    """A hold lasts `hold_s` at most, and only while `has_room`."""

    hold_s: float
    has_room: Callable[[], bool]


class Holds:
    """Asks the directory for the sets around what is owed. `sets` is what the fence is given."""

    def __init__(
        self,
        directory: Directory,
        clock: Clock,
        fence_of: Callable[[ObjectName], FenceMode],
        bounds: HoldBounds,
    ) -> None:
        self._directory = directory
        self._clock = clock
        self._fence_of = fence_of
        self._bounds = bounds
        self._since_s: dict[Scope, float] = {}
        """Since when, by the wall, each set has been held without a break."""
        self._are_off = bounds.hold_s <= 0.0
        self._is_stopping = False
        self._has_room = True
        self.sets: dict[Scope, StandingSet | None] = {}

    def stop(self) -> None:
        """The node is to stop: from the next look on, hold only what belongs to a set no marker of which is pending.
        Nothing where all waits for what is held."""
        self._is_stopping = True

    @property
    def any(self) -> bool:
        """Whether something was held at the last look. Nobody tells when memory fills, so look again soon."""
        return bool(self._since_s) and not self._are_off

    async def look(self, owed: Sequence[Pending]) -> None:
        """Learn anew which sets are held, of all that this node owes."""
        concerned = [] if self._are_off else [write for write in owed if self._is_concerned(write)]
        folders: dict[Scope, Pending] = {}
        for write in concerned:
            if len(folders) < FOLDERS_COUNT:
                folders.setdefault(Scope(write.name.bucket, scope_of(write.name.key)), write)
        if folders:
            self._has_room = self._bounds.has_room()
        sets: dict[Scope, StandingSet | None] = {}
        for write in folders.values():
            sets |= await sets_around(self._directory, write)
        since_s: dict[Scope, float] = {}
        for write in concerned:
            held = held_by(write, sets)
            if held is not None:
                scope = Scope.of(held.marker)
                known_s = since_s.get(scope, self._since_s.get(scope, self._clock.wall_s()))
                since_s[scope] = min(known_s, write.committed_s)
        self._since_s = since_s
        self.sets = {scope: self._bounded(scope, found) for scope, found in sets.items()}

    async def ask(self, write: Pending) -> None:
        """Learn anew whether one write, which is about to have its turn, is held."""
        if self._are_off or not self._is_concerned(write):
            return
        sets = await sets_around(self._directory, write)
        held = held_by(write, sets)
        for scope, found in sets.items():
            if held is not None:
                known_s = self._since_s.get(scope, self._clock.wall_s())
                self._since_s[scope] = min(known_s, write.committed_s)
            self.sets[scope] = self._bounded(scope, found)

    def _is_concerned(self, write: Pending) -> bool:
        mode = self._fence_of(write.name)
        return may_be_held(write) and mode is not FenceMode.OFF and not (self._is_stopping and mode is FenceMode.STRICT)

    def _bounded(self, scope: Scope, found: StandingSet | None) -> StandingSet | None:
        """With the end of its hold."""
        if found is None or scope not in self._since_s:
            return found
        if found.renewed if self._is_stopping else not self._has_room:
            return found
        return replace(found, until_s=self._since_s[scope] + self._bounds.hold_s)


async def sets_around(directory: Directory, write: Pending) -> dict[Scope, StandingSet | None]:
    """The innermost set around a write, if there is one."""
    markers = await directory.standing_markers(write.name.bucket, ancestor_scopes(write.name.key))
    scopes = [Scope.of(seen.record.name) for seen in markers if seen.record is not None]
    return {scopes[0]: standing_set(markers)} if scopes else {}
