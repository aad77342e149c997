"""Where copies go: rendezvous hashing over the living nodes. Pure; who sees the same members decides alike."""

from collections import Counter
from collections.abc import Iterable

from tiergate.model import Node
from tiergate.policy.rendezvous import ranked


def rank(text: str, nodes: Iterable[Node]) -> list[Node]:
    """The nodes in the order in which `text` falls to them. Without one of them, that of the others is the same."""
    by_name = {node.name: node for node in nodes}
    return [by_name[name] for name in ranked(text, by_name)]


def places(text: str, nodes: Iterable[Node], own_name: str, own_zone: str) -> list[Node]:
    """The other nodes in the order in which they get copies of what this one holds: by rank, but no zone gets a second
    copy (this node's own counts) before each other zone has as many."""
    used = Counter([own_zone])
    levels: dict[str, int] = {}
    others = rank(text, (node for node in nodes if node.name != own_name))
    for node in others:
        levels[node.name] = used[node.about.zone]
        used[node.about.zone] += 1
    return sorted(others, key=lambda node: levels[node.name])
