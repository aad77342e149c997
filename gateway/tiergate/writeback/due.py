"""Which pending writes should be worked on now. Pure."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from tiergate.model import Kind, ObjectName, Pending, Role
from tiergate.writeback.fence import Blocked


@dataclass(frozen=True, slots=True)
class Limits:
    """How many writes may be begun at a time, beyond those that only wait for their turn."""

    begun_count: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What to begin, in this order, and when to look again if nothing else happens (wall time; None: no need)."""

    start: tuple[Pending, ...]
    wake_at_s: float | None


def plan(
    owed: Iterable[Pending],
    in_flight: Collection[ObjectName],
    waiting: Collection[ObjectName],
    limits: Limits,
    now_s: float,
    not_before: Mapping[ObjectName, float],
    blocked: Callable[[Pending], Blocked | None],
) -> Plan:
    """Choose in the order of `owed`. Never two writes of one key at once; nothing quarantined, nothing before its time.

    A write that is held back is not begun, except a large one: its parts may travel before its turn.
    """
    start: list[Pending] = []
    wake_s: list[float] = []
    room = limits.begun_count - (len(in_flight) - len(waiting))
    for write in owed:
        if room <= 0:
            break
        if write.quarantined:
            continue
        if write.name in in_flight:
            # One that waits for its turn may wait for nothing but time.
            hindrance = blocked(write) if write.name in waiting else None
            if hindrance is not None and hindrance.until_s:
                wake_s.append(hindrance.until_s)
            continue
        if not_before.get(write.name, 0.0) > now_s:
            wake_s.append(not_before[write.name])
            continue
        hindrance = blocked(write)
        if hindrance is not None:
            if hindrance.until_s:
                wake_s.append(hindrance.until_s)
            if write.role is not Role.LARGE or write.kind is Kind.DELETE:
                continue
        start.append(write)
        room -= 1
    return Plan(tuple(start), min(wake_s, default=None))
