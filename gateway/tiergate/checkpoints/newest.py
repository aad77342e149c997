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
        UnseenTierError: not every tier was seen (`unseen`).
    """
    if unseen:
        raise UnseenTierError(f"what {', '.join(sorted(unseen))} holds is not known now")
    return max((each for each in sets if each.is_whole), key=_age, default=None)


def _age(status: SetStatus) -> tuple[bool, int, float, str, str]:
    step, name = status.step, status.name
    return step is not None, step or 0, status.committed_s, name.bucket, name.prefix
