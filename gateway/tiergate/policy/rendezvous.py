"""Which node a text has its place on, the same for all who know the same nodes. Pure.

Rendezvous hashing: when a node comes or goes, only what it is first for moves.
https://www.microsoft.com/en-us/research/wp-content/uploads/2017/02/HRW98.pdf
"""

import hashlib
from collections.abc import Iterable

_HOUSEKEEPER = "housekeeper"


def ranked(text: str, nodes: Iterable[str]) -> list[str]:
    """The nodes, the first choice for `text` first."""
    return sorted(nodes, key=lambda node: hashlib.blake2b(f"{node}\0{text}".encode(), digest_size=8).digest())


def housekeeper(nodes: Iterable[str]) -> str:
    """The node that does what one node does for all; empty without any."""
    return next(iter(ranked(_HOUSEKEEPER, nodes)), "")
