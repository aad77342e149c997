"""Which sets stay in a node's memory: the newest whole ones of each run, whole, and what is pinned. Pure."""

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum


class Keep(IntEnum):
    """When a set's bytes leave memory for others'."""

    SURPLUS = 0
    """First of all."""
    KEPT = 1
    """Once nothing else is left, the oldest first."""
    NEWEST = 2
    """After those: it is its run's only whole one then, and S3 has it."""
    OWED = 3
    """Not before S3 has all of it: what S3 lacks stays in any case, so it would go in part."""
    PINNED = 4
    """Never."""


@dataclass(frozen=True, slots=True)
class HeldSet:
    """A set as a node's memory has it. `order`: the place of its marker's commit, else of its newest object's.
    `is_marked`: its marker was committed, or where its layout has none, nothing of it is owed. `is_whole`: what of it
    should be in this memory all is. `is_owed`: S3 lacks some of it."""

    bucket: str
    prefix: str
    order: int
    size_bytes: int
    is_marked: bool
    is_whole: bool
    is_owed: bool

    @property
    def is_complete(self) -> bool:
        """Whether it could be loaded from memory, as far as this node's is concerned."""
        return self.is_marked and self.is_whole


def keeps(sets: Iterable[HeldSet], keep_count: int) -> dict[HeldSet, Keep]:
    """What becomes of the sets of one run, of which the newest `keep_count` (at least 1) whole ones are to stay. A set
    in the making stays as long as it is newer than those; one that was given up does not, nor one of which memory has
    a part only."""
    newest_first = sorted(sets, key=lambda each: (each.order, each.prefix), reverse=True)
    complete = [each for each in newest_first if each.is_complete]
    kept = set(complete[: max(1, keep_count)])
    found: dict[HeldSet, Keep] = {}
    for each in newest_first:
        is_making = not each.is_marked and (not complete or each.order > complete[0].order)
        if complete and each == complete[0]:
            found[each] = Keep.OWED if each.is_owed else Keep.NEWEST
        elif each in kept:
            found[each] = Keep.OWED if each.is_owed else Keep.KEPT
        elif is_making:
            found[each] = Keep.KEPT
        else:
            found[each] = Keep.OWED if each.is_complete and each.is_owed else Keep.SURPLUS
    return found


def within(sizes: Mapping[str, int], order: Sequence[str], limit_bytes: int) -> Collection[str]:
    """Those of pinned prefixes that may be pinned: as many in their order as fit into `limit_bytes` together."""
    taken: list[str] = []
    total_bytes = 0
    for name in order:
        if total_bytes + sizes.get(name, 0) <= limit_bytes:
            taken.append(name)
            total_bytes += sizes.get(name, 0)
    return taken


def group_of(bucket: str, prefix: str) -> int:
    """A number that tells sets apart."""
    return int.from_bytes(hashlib.blake2b(f"{bucket}/{prefix}".encode(), digest_size=8).digest())
