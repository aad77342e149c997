"""Where a set stands in each tier, from what it must hold and where each of its objects is. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from tiergate.checkpoints.sets import Manifest, Member, SetName, SetState, SetStatus, Thing, Tier, TierStatus

MISSING_COUNT = 20
"""So many missing members are named at most."""


@dataclass(frozen=True, slots=True)
class Doubts:
    """What is wrong with what is known of a set. `damage`: why its marker or list is not what it should be; `unread`:
    why they cannot be read now; `is_s3_unseen`: the origin did not say what it has; `quarantined`: what was found
    damaged of it, as it still is."""

    damage: str = ""
    unread: str = ""
    is_s3_unseen: bool = False
    quarantined: str = ""


NO_DOUBTS = Doubts()


@dataclass(frozen=True, slots=True)
class _View:
    """A set, judged as one over all tiers: what it must hold, and what of it can be had. `is_marked`: its marker can be
    had. `is_damaged`: its marker says that it is whole, and it is not; `is_unknown`: it may be, and nobody can tell
    now."""

    wanted: Mapping[str, Member]
    things: Mapping[str, Thing]
    had: frozenset[str]
    is_marked: bool
    is_disturbed: bool
    is_damaged: bool
    is_unknown: bool
    is_quarantined: bool

    @classmethod
    def of(cls, manifest: Manifest, things: Mapping[str, Thing], doubts: "Doubts") -> Self:
        marker = manifest.name.marker
        wanted = {member.key: member for member in manifest.members}
        is_said = _can_be_had(Member(marker), things.get(marker))
        if is_own(manifest.name):
            wanted.setdefault(marker, Member(marker))
        else:
            wanted.pop(marker, None)
        had = frozenset(key for key, member in wanted.items() if _can_be_had(member, things.get(key)))
        is_disturbed = is_said and things[marker].is_disturbed
        arriving = {key for key, thing in things.items() if thing.is_receiving}
        is_torn = is_said and not is_disturbed and not wanted.keys() <= had | arriving
        # What the origin holds and everybody forgot is not among the things while it cannot be asked.
        is_unknown = bool(doubts.unread) or (is_torn and doubts.is_s3_unseen and things[marker].in_s3)
        is_damaged = not is_unknown and (is_torn or bool(doubts.damage))
        is_quarantined = bool(doubts.quarantined)
        return cls(wanted, things, had, is_said, is_disturbed, is_damaged, is_unknown, is_quarantined)

    @property
    def is_whole(self) -> bool:
        return bool(self.had) and self.is_sound and self.had == self.wanted.keys()

    @property
    def is_sound(self) -> bool:
        """Whether nothing but missing members can keep it from being whole."""
        is_doubted = self.is_disturbed or self.is_damaged or self.is_unknown or self.is_quarantined
        return self.is_marked and not is_doubted

    def there(self, tier: Tier) -> list[Thing]:
        """The members that a tier has."""
        return [thing for thing in map(self.things.__getitem__, self.had) if _is_in(thing, tier)]

    def those(self, keys: Iterable[str]) -> list[Thing]:
        return [self.things[key] for key in keys if key in self.things]


def status_of(
    manifest: Manifest,
    things: Mapping[str, Thing],
    *,
    doubts: Doubts = NO_DOUBTS,
    is_pinned: bool = False,
) -> SetStatus:
    """Where a set stands. `things`: the current objects under its prefix by key, and those on their way in that have no
    current version; and a pointer beside it that is its marker. Others are not looked at."""
    view = _View.of(manifest, things, doubts)
    found = view.those(view.wanted)
    marker = things.get(manifest.name.marker) if is_own(manifest.name) else None
    return SetStatus(
        name=manifest.name,
        step=manifest.name.step if manifest.step is None else manifest.step,
        objects_count=len(view.wanted),
        size_bytes=sum(_size_bytes(member, things.get(key)) for key, member in view.wanted.items()),
        committed_s=marker.committed_s if marker else max((each.committed_s for each in found), default=0.0),
        is_parked=any(each.is_parked for each in found),
        is_pinned=is_pinned,
        tiers={Tier.MEMORY: _in_memory(view), Tier.S3: _in_s3(view)},
        is_whole=view.is_whole,
        fault=doubts.damage or doubts.unread,
        quarantined=doubts.quarantined,
    )


def is_own(name: SetName) -> bool:
    """Whether a set's marker is an object of the set, and not a pointer beside it, which tells of others too."""
    return bool(name.marker) and name.marker.startswith(name.prefix)


def _in_memory(view: _View) -> TierStatus:
    there = view.there(Tier.MEMORY)
    if not there:
        is_receiving = any(each.is_receiving for each in view.those(view.wanted))
        state = SetState.RECEIVING if is_receiving and not view.is_whole else SetState.ABSENT
    elif view.is_quarantined:
        state = SetState.QUARANTINED
    elif view.is_unknown:
        state = SetState.UNKNOWN
    elif view.is_damaged:
        state = SetState.DAMAGED
    elif view.is_sound and len(there) == len(view.wanted):
        state = SetState.COMPLETE
    else:
        state = SetState.PARTIAL if view.is_whole else SetState.RECEIVING
    copies_count = min((each.copies_count for each in there), default=0)
    return _tier_status(view, state, there, copies_count)


def _in_s3(view: _View) -> TierStatus:
    there = view.there(Tier.S3)
    found = view.those(view.wanted)
    refused = sorted(each.key for each in found if each.quarantined)
    if refused:
        state = SetState.QUARANTINED
    elif view.is_whole and len(there) < len(view.wanted):
        is_owed = not any(each.is_parked for each in found)
        state = SetState.UPLOADING if is_owed else SetState.PARTIAL if there else SetState.ABSENT
    elif not there:
        state = SetState.ABSENT
    elif view.is_quarantined:
        state = SetState.QUARANTINED
    elif view.is_unknown:
        state = SetState.UNKNOWN
    elif view.is_damaged:
        state = SetState.DAMAGED
    else:
        state = SetState.COMPLETE if view.is_whole else SetState.RECEIVING
    return _tier_status(view, state, there, 1 if there else 0, refused)


def _tier_status(
    view: _View, state: SetState, there: list[Thing], copies_count: int, first: Iterable[str] = ()
) -> TierStatus:
    """`first`: which of the missing are named before others."""
    lacking = view.wanted.keys() - {each.key for each in there}
    missing = list(dict.fromkeys([*first, *sorted(lacking)]))[:MISSING_COUNT]
    return TierStatus(state, len(there), sum(each.size_bytes for each in there), copies_count, tuple(missing))


def _can_be_had(member: Member, thing: Thing | None) -> bool:
    return thing is not None and member.fits(thing.size_bytes) and any(_is_in(thing, tier) for tier in Tier)


def _is_in(thing: Thing, tier: Tier) -> bool:
    if thing.is_receiving:
        return False
    return thing.in_s3 if tier is Tier.S3 else thing.copies_count > 0


def _size_bytes(member: Member, thing: Thing | None) -> int:
    """How long the member should be, as far as anybody knows."""
    if member.size_bytes is not None:
        return member.size_bytes
    size_bytes = thing.size_bytes if thing is not None else 0
    return max(size_bytes, member.least_bytes)
