"""What a write stands on when it is decided: its conditions, and what was seen of the key."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class WriteConditions:
    """The conditions of a write; None where the request has none."""

    if_match: str | None = None
    if_none_match: str | None = None

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> "WriteConditions":
        """The conditions in a parsed request."""
        return cls(params.get("IfMatch"), params.get("IfNoneMatch"))

    @property
    def any(self) -> bool:
        """Whether there is any condition."""
        return self != WriteConditions()


@dataclass(frozen=True, slots=True)
class Ground:
    """What a write stands on: the revision its request began at, the guard and base its condition was decided on."""

    start_revision: int
    guard: int | None
    base: str
    conditional: bool
