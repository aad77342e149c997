"""Where copies go: rendezvous hashing over the living nodes. Pure; who sees the same members decides alike."""

from collections import Counter
from collections.abc import Iterable
from hashlib import blake2b

from tiergate.model import Live, Node

HOUSEKEEPING = "housekeeper"


def rank(text: str, nodes: Iterable[Node]) -> list[Node]:
    """The nodes in the order in which `text` falls to them. Without one of them, the order of the others is the same.

    https://www.microsoft.com/en-us/research/wp-content/uploads/2017/02/HRW98.pdf
    """
    return sorted(nodes, key=lambda node: (_weight(text, node.name), node.name), reverse=True)


def places(text: str, nodes: Iterable[Node], own_name: str, own_zone: str) -> list[Node]:
    """The other nodes in the order in which they get copies of what this one holds: by rank, but no zone gets a second
    copy (this node's own counts) before each other zone has as many."""
    used = Counter([own_zone])
    levels: dict[str, int] = {}
    ranked = rank(text, (node for node in nodes if node.name != own_name))
    for node in ranked:
        levels[node.name] = used[node.about.zone]
        used[node.about.zone] += 1
    return sorted(ranked, key=lambda node: levels[node.name])


def housekeeper(live: Live) -> Node | None:
    """The one node that does what a single node does for all; None without any."""
    ranked = rank(HOUSEKEEPING, live.nodes.values())
    return ranked[0] if ranked else None


def _weight(text: str, name: str) -> bytes:
    return blake2b(f"{text}\0{name}".encode(), digest_size=8).digest()
