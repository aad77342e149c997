"""The other nodes as this one sees them: who lives, who is near, and who let us down a moment ago."""

from collections.abc import Callable, Iterable

from tiergate.clock import Clock
from tiergate.model import Holder, Live, Node
from tiergate.replication.placement import places, rank

SHUN_S = 10.0
"""So long a node that failed comes last: a frozen one must not hold up every write until its lease is over."""


class Roster:
    """This node, which is `name` in `zone`, and its view of the others."""

    def __init__(self, name: str, zone: str, live: Callable[[], Live], me: Callable[[], Holder], clock: Clock) -> None:
        """`me` raises MembershipOverError while this node is no member."""
        self.name = name
        self.zone = zone
        self.live = live
        self.me = me
        self._clock = clock
        self._shunned: dict[str, float] = {}

    def others(self) -> list[Node]:
        """The other living nodes."""
        return [node for node in self.live().nodes.values() if node.name != self.name]

    def places(self, text: str) -> list[Node]:
        """The others in the order in which copies go to them."""
        found = places(text, self.live().nodes.values(), self.name, self.zone)
        return sorted(found, key=lambda node: self.is_shunned(node.name))

    def nearest(self, holders: Iterable[Holder]) -> list[Holder]:
        """Those of the holders that live, nearest first; which of equals differs from reader to reader."""
        nodes = self.live().nodes
        living = [nodes[each.node] for each in self.live().still(holders) if each.node != self.name]
        ranked = rank(self.name, living)
        ranked.sort(key=lambda node: (self.is_shunned(node.name), node.about.zone != self.zone))
        return [node.holder for node in ranked]

    def node_of(self, holder: Holder) -> Node | None:
        """A holder's node, if it lives and the holder is of its epoch."""
        node = self.live().nodes.get(holder.node)
        return node if node is not None and node.epoch == holder.epoch else None

    def shun(self, name: str) -> None:
        """A node failed: ask others first for a while."""
        now_s = self._clock.monotonic_s()
        self._shunned = {each: end_s for each, end_s in self._shunned.items() if end_s > now_s}
        self._shunned[name] = now_s + SHUN_S

    def is_shunned(self, name: str) -> bool:
        """Whether a node failed a moment ago."""
        return self._shunned.get(name, float("-inf")) > self._clock.monotonic_s()
