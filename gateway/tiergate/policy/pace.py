"""How fast write-back has gone lately, and so how long what is owed will take. Pure."""

from collections import Counter, deque
from collections.abc import Sequence

from tiergate.model import Holder, Pending

WINDOW_S = 120.0
"""Of busy time: what was longer ago says nothing of the pace now."""


class Pace:
    """Looks now and then at how many bytes write-back has brought away in all. Only times in which it had something to
    do count; while it has nothing, the pace is what it was."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._spans: deque[tuple[float, int]] = deque()
        self._busy_s = 0.0
        self._sent_bytes = 0
        self._last: tuple[float, int] | None = None

    def look(self, now_s: float, total_bytes: int, *, is_busy: bool) -> None:
        """`is_busy`: something was on its way since the last look, or is now; `now_s` by a monotonic clock."""
        last, self._last = self._last, (now_s, total_bytes)
        if last is None:
            return
        sent_bytes = total_bytes - last[1]
        if not (is_busy or sent_bytes):
            return
        self._spans.append((now_s - last[0], sent_bytes))
        self._busy_s += now_s - last[0]
        self._sent_bytes += sent_bytes
        while len(self._spans) > 1 and self._busy_s - self._spans[0][0] >= self._window_s:
            span_s, span_bytes = self._spans.popleft()
            self._busy_s -= span_s
            self._sent_bytes -= span_bytes

    @property
    def bytes_per_s(self) -> float | None:
        """None while nobody can tell: nothing was sent within the window."""
        return self._sent_bytes / self._busy_s if self._sent_bytes and self._busy_s else None


def arrival_s(owed: Sequence[Pending], own: Sequence[Pending], bytes_per_s: float | None) -> float | None:
    """About how long it will take until writes are in the origin, in seconds; None if nobody can tell. `own`: all that
    this node owes, which goes by its place; what other nodes owe goes meanwhile, taken to be as fast."""
    if not owed:
        return 0.0
    if not bytes_per_s or any(write.quarantined for write in owed):
        return None
    mine = {write.uid for write in own}
    last = max((write.place for write in owed if write.uid in mine), default=0)
    ahead: Counter[Holder | None] = Counter()
    for write in owed:
        if write.uid not in mine:
            ahead[write.owner] += write.size_bytes
    own_bytes = sum(write.size_bytes for write in own if write.place <= last and not write.quarantined)
    return max([own_bytes, *ahead.values()]) / bytes_per_s
