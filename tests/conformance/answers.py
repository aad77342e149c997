"""Answers in the form in which two servers' are compared."""

from collections.abc import Iterator
from typing import Any

Answer = dict[str, Any]
Difference = tuple[str, Any, Any]
"""Where, the gateway's answer, the server's."""

BROKEN = 500
"""The status of a server that met a fault of its own."""


def differences(one: Any, other: Any, path: str = "") -> Iterator[Difference]:
    """Where two answers differ: (path, one, other)."""
    if isinstance(one, dict) and isinstance(other, dict):
        for name in sorted(one.keys() | other.keys()):
            yield from differences(one.get(name), other.get(name), f"{path}.{name}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            yield from differences(left, right, f"{path}[{index}]")
    elif one != other:
        yield path, one, other
