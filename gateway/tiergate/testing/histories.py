"""Promise P3 judged from outside: is there one order of what clients did to a key that explains all they saw?

Clients note each request with the moments at which it began and ended. A history is linearizable if every request can
be given an instant between the two such that each read shows the write before it. A write whose answer was an error,
or never came, may have happened at any time after it began, or never.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import inf

STATES_LIMIT_COUNT = 1_000_000
"""A history that needs more is too long to be judged."""


class Did(Enum):
    """What a request did to, or saw of, a key: a body, its size only, or only whether it is there."""

    WROTE = "wrote"
    READ = "read"
    SAW_SIZE = "saw the size of"
    SAW_PRESENCE = "saw the presence of"


@dataclass(frozen=True, slots=True)
class Value:
    """A body, told apart from all others by its digest."""

    digest: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Done:
    """One request. `value` is None for a deletion, or a key that is not there; the digest of a value whose body was not
    seen does not matter. `until_s` is infinite for a write of which nobody knows whether it happened."""

    did: Did
    value: Value | None
    from_s: float
    until_s: float = inf

    def shows(self, current: Value | None) -> bool:
        """Whether a look at the key while it was `current` would have given this."""
        if self.did is Did.READ:
            return self.value == current
        if self.did is Did.SAW_SIZE and self.value is not None and current is not None:
            return self.value.size_bytes == current.size_bytes
        return (self.value is None) == (current is None)


def unexplained(history: Sequence[Done]) -> list[Done]:
    """The requests to one key, absent at first, that no order explains: empty if the history is linearizable, else what
    was left over by the order that explains most.

    Raises:
        ValueError: the history is too long to be judged.
    """
    requests = sorted(history, key=lambda each: each.from_s)
    every = range(len(requests))
    needed = sum(1 << index for index in every if requests[index].until_s < inf)
    best = 0
    seen: set[tuple[int, Value | None]] = set()
    states: list[tuple[int, Value | None]] = [(0, None)]
    while states:
        state = states.pop()
        if state in seen:
            continue
        seen.add(state)
        if len(seen) > STATES_LIMIT_COUNT:
            raise ValueError(f"a history of {len(requests)} requests is too long to be judged")
        ordered, current = state
        if ordered & needed == needed:
            return []
        best = max(best, ordered, key=lambda mask: (mask & needed).bit_count())
        left = [index for index in every if not ordered >> index & 1]
        # Whatever comes next began before any of those left had ended.
        first_end_s = min(requests[index].until_s for index in left)
        for index in reversed(left):
            request = requests[index]
            if request.from_s > first_end_s:
                continue
            if index and request == requests[index - 1] and not ordered >> (index - 1) & 1:
                continue  # Of tries that are all the same, one after the other.
            if request.did is Did.WROTE:
                states.append((ordered | 1 << index, request.value))
            elif request.shows(current):
                states.append((ordered | 1 << index, current))
    return [requests[index] for index in every if (needed & ~best) >> index & 1]
