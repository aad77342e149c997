"""What a checkpoint is: the objects of one set, which of them says that it is whole, and where each of them is.
Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol


class Tier(StrEnum):
    """Where bytes are: in the memory of the nodes, or in the origin."""

    MEMORY = "memory"
    S3 = "s3"


@dataclass(frozen=True, slots=True)
class Member:
    """An object that a set must hold. `size_bytes`: exactly so long, None where the set does not say; `least_bytes`: at
    least so long, since the set's own list names bytes up to there."""

    key: str
    size_bytes: int | None = None
    least_bytes: int = 0

    def fits(self, size_bytes: int) -> bool:
        """Whether an object of that length can be this member."""
        return size_bytes >= self.least_bytes if self.size_bytes is None else size_bytes == self.size_bytes


@dataclass(frozen=True, slots=True)
class SetName:
    """A set: the prefix that all its objects are under and the layout it is written in. The prefix has its slash, but
    of a set of one file it is the key; which keys are under it tells `recognition.is_in`. `marker` is the key whose
    presence says that it is whole; empty while it has none, or where its layout knows none. `step` is None where no
    name tells it."""

    bucket: str
    prefix: str
    layout: str
    marker: str = ""
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a set must hold. `is_listed`: the set's own list says so, not merely what is found under its prefix. `step`:
    as the marker's content tells it, else as the names do."""

    name: SetName
    members: tuple[Member, ...]
    is_listed: bool
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Thing:
    """An object as the directory knows it. `copies_count`: living nodes that hold all of its current bytes. `in_s3`:
    the origin holds just this version. `is_parked`: by policy it stays in memory. `sent_bytes` of it are on their way.
    `is_disturbed`: it is a marker, and an object of its set was replaced or deleted since: its word does not hold."""

    key: str
    size_bytes: int
    committed_s: float
    copies_count: int = 0
    in_s3: bool = False
    is_parked: bool = False
    quarantined: str = ""
    is_receiving: bool = False
    sent_bytes: int = 0
    is_disturbed: bool = False


class SetState(StrEnum):
    """Where a set stands in one tier."""

    ABSENT = "absent"
    RECEIVING = "receiving"
    """Objects are there, its marker or members are not all."""
    UPLOADING = "uploading"
    """Whole in memory, some of it not in S3 yet."""
    COMPLETE = "complete"
    PARTIAL = "partial"
    """Some of it is here; the rest can be had from the other tier."""
    DAMAGED = "damaged"
    """Its marker is there and a member is missing, or too short."""
    QUARANTINED = "quarantined"
    """The origin refused an object of it for good; or it was found damaged, and who asks for the newest does not get
    it."""
    UNKNOWN = "unknown"
    """Some of it is here. What would tell whether it is whole cannot be had now."""


@dataclass(frozen=True, slots=True)
class TierStatus:
    """A set in one tier: so many of its objects, and bytes, are there. `copies_count`: the nodes that hold the least
    held of them (1 at most in S3). `missing` names members that are not there as they must be, some of many."""

    state: SetState
    objects_count: int
    size_bytes: int
    copies_count: int
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SetStatus:
    """A set over all tiers. `objects_count` and `size_bytes` of the set as it should be. `committed_s`: when its marker
    was committed, else its newest object. `is_whole`: its marker stands and every object of it can be had, from one
    tier or another, and it was not found damaged. `fault`: why its marker or list cannot be read as what it should be,
    or not now. `quarantined`: what was found damaged of it, as it still is."""

    name: SetName
    step: int | None
    objects_count: int
    size_bytes: int
    committed_s: float
    is_parked: bool
    is_pinned: bool
    tiers: Mapping[Tier, TierStatus] = field(default_factory=dict)
    is_whole: bool = False
    fault: str = ""
    quarantined: str = ""

    @property
    def is_unknown(self) -> bool:
        """Whether it may be whole, and nobody can tell now."""
        return any(each.state is SetState.UNKNOWN for each in self.tiers.values())

    @property
    def is_damaged(self) -> bool:
        """Whether its marker says that it is whole, and it is not."""
        return any(each.state is SetState.DAMAGED for each in self.tiers.values())


class ReadBody(Protocol):
    """Gives bytes of an object of a set (a marker, a list, a pointer beside it) by its key."""

    def __call__(self, key: str, start: int = 0, end: int | None = None, /) -> bytes:
        """From `start` up to `end`, or to the end of the object; fewer where it ends before. All of an object is asked
        only where it is small; of a safetensors or .ckpt file its head and its last bytes."""
        ...
