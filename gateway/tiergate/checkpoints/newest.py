"""Which complete set is the newest, over all tiers (promise P7). Pure."""

from collections.abc import Collection, Iterable

from tiergate.checkpoints.sets import SetStatus, Tier
from tiergate.errors import OverloadedError


class UnseenTierError(OverloadedError):
    """A tier could not be looked into: it may have what is asked for, so nobody can say which is the newest, or that
    there is none. Ask again."""


def newest(sets: Iterable[SetStatus], unseen: Collection[Tier] = ()) -> SetStatus | None:
    """The whole set that is the newest of `sets`: of the highest step, of equal steps the one committed last, step 0
    being a step like any other. Sets without a step come after all that have one, the one committed last first. Every
    caller who is given the same sets gets the same answer, in whatever order they come. None: there is no whole set.

    Raises:
        UnseenTierError: not every tier was seen (`unseen`), or a set that would be newer may be whole.
    """
    if unseen:
        raise UnseenTierError(f"what {', '.join(sorted(unseen))} holds is not known now")
    found = max((each for each in sets if each.is_whole or each.is_unknown), key=_age, default=None)
    if found is not None and not found.is_whole:
        raise UnseenTierError(f"whether {found.name.prefix} is whole is not known now: {found.fault}")
    return found


def next_in_turn(sets: Iterable[SetStatus]) -> SetStatus | None:
    """The one of `sets` that who looks for the newest must look at first: the newest of those that are whole, may be,
    or are damaged, or quarantined; None if none of them is."""
    turned_to = (each for each in sets if each.is_whole or each.is_unknown or each.is_damaged or each.quarantined)
    return max(turned_to, key=_age, default=None)


def _age(status: SetStatus) -> tuple[bool, int, float, str, str]:
    step, name = status.step, status.name
    return step is not None, step or 0, status.committed_s, name.bucket, name.prefix
