"""Rendezvous hashing: who of several is the one for something, with the same answer everywhere and little change when
one comes or goes. https://en.wikipedia.org/wiki/Rendezvous_hashing"""

import hashlib
from collections.abc import Iterable


def ranked(text: str, names: Iterable[str]) -> list[str]:
    """The names, the one for `text` first, then who stands in for it."""
    return sorted(names, key=lambda name: _weight(text, name), reverse=True)


def _weight(text: str, name: str) -> tuple[bytes, str]:
    return hashlib.blake2b(f"{name}\0{text}".encode(), digest_size=16).digest(), name
