"""What becomes of a pending write whose owner is gone. Pure.

Each node decides for itself what it claims, and the directory sees to it that one of several wins. So the decision need
not be the same everywhere; but as all who see the same nodes decide the same, rivals are rare.
"""

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto

from tiergate.model import Holder, Kind, Live, Pending
from tiergate.policy.rendezvous import housekeeper, ranked


class Verdict(Enum):
    """What a node does about a write of another's."""

    LEAVE = auto()
    CLAIM = auto()
    LOST = auto()


@dataclass(frozen=True, slots=True)
class Patience:
    """`settle_s`: so long after a node is seen to be gone nothing that it sent can reach the origin any more.
    `grace_s`: so long it may take to come back with its memory."""

    settle_s: float = 5.0
    grace_s: float = 60.0


def judge(
    write: Pending, holders: Collection[Holder], me: Holder, live: Live, gone_s: float, patience: Patience
) -> Verdict:
    """What `me`, a member, does about a pending write. `holders`: who said to hold it. `gone_s`: for how long its owner
    has been gone.

    A put goes to a living node that holds it, if that can be its owner's under a new epoch; a deletion to any.
    """
    if write.owner is not None and live.still([write.owner]):
        return Verdict.LEAVE
    owner = write.owner.node if write.owner is not None else ""
    if write.begun and owner != me.node and gone_s < patience.settle_s:
        return Verdict.LEAVE
    fit = live.still(holders) if write.kind is Kind.PUT else {node.holder for node in live.nodes.values()}
    if not fit:
        return Verdict.LOST if gone_s >= patience.grace_s and housekeeper(live.nodes) == me.node else Verdict.LEAVE
    nodes = [each.node for each in fit]
    first = owner if owner in nodes else ranked(write.uid, nodes)[0]
    return Verdict.CLAIM if me in fit and first == me.node else Verdict.LEAVE


class Absences:
    """Since when memberships are seen to be over, by one observer."""

    def __init__(self) -> None:
        self._since_s: dict[Holder, float] = {}

    def see(self, named: Collection[Holder], live: Live, now_s: float) -> None:
        """These are named somewhere at `now_s`; who is not named any more is forgotten."""
        gone = set(named) - live.still(named)
        self._since_s = {each: self._since_s.get(each, now_s) for each in gone}

    def gone_s(self, holder: Holder | None, now_s: float) -> float:
        """For how long; 0 for one that is a member, or was not named."""
        return now_s - self._since_s.get(holder, now_s) if holder is not None else 0.0
