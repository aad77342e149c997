"""What is asked of etcd and what it answers, as values. https://etcd.io/docs/v3.4/learning/api/"""

from dataclasses import dataclass
from enum import IntEnum

from tiergate.errors import InvariantError


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A row. `version` counts its writes since it was created."""

    key: bytes
    value: bytes
    create_revision: int
    mod_revision: int
    version: int
    lease_id: int


class Field(IntEnum):
    """What of a row a guard compares; numbered as in etcd's protocol. All are 0 for a row that does not exist."""

    VERSION = 0
    CREATED = 1
    MODIFIED = 2
    LEASE = 4


class Relation(IntEnum):
    """How; numbered as in etcd's protocol."""

    EQUAL = 0
    GREATER = 1
    LESS = 2


@dataclass(frozen=True, slots=True)
class Guard:
    """A comparison that must hold for a transaction to happen; with `end`, for every row from `key` up to `end`."""

    key: bytes
    field: Field
    number: int
    relation: Relation = Relation.EQUAL
    end: bytes = b""


@dataclass(frozen=True, slots=True)
class Put:
    """Write a row."""

    key: bytes
    value: bytes
    lease_id: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete a row, or those from `key` up to `end`."""

    key: bytes
    end: bytes = b""


@dataclass(frozen=True, slots=True)
class Range:
    """Read a row, or those from `key` up to `end` in the order of their keys. `revision`: as of then, 0 for now."""

    key: bytes
    end: bytes = b""
    limit: int = 0
    revision: int = 0
    keys_only: bool = False
    count_only: bool = False


@dataclass(frozen=True, slots=True)
class Txn:
    """If all `guards` hold `then`, else `otherwise`. Guards of nested transactions see the state before the whole."""

    guards: tuple[Guard, ...]
    then: tuple["Request", ...]
    otherwise: tuple["Request", ...] = ()

    @property
    def writes(self) -> bool:
        """Whether it may change anything."""
        return any(
            isinstance(request, Put | Delete) or (isinstance(request, Txn) and request.writes)
            for request in self.then + self.otherwise
        )


Request = Put | Delete | Range | Txn


@dataclass(frozen=True, slots=True)
class Found:
    """The answer to a `Range`. `count` is of all rows in it, whatever the limit."""

    rows: tuple[KeyValue, ...]
    count: int


@dataclass(frozen=True, slots=True)
class Done:
    """The answer to a `Put` or `Delete`."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The answer to a `Txn`: which branch was taken, and its answers in order."""

    succeeded: bool
    answers: tuple["Answer", ...]
    revision: int = 0
    """The store's revision after it; of a nested one 0."""

    def found(self, index: int) -> tuple[KeyValue, ...]:
        """The rows of the `Range` that was request `index` of the branch."""
        answer = self.answers[index]
        if not isinstance(answer, Found):
            raise InvariantError("this request of the transaction was no read", index=index)
        return answer.rows


Answer = Found | Done | Outcome


@dataclass(frozen=True, slots=True)
class Event:
    """A change of a row: what it is now, or None for deleted."""

    key: bytes
    row: KeyValue | None
    revision: int


def prefix_end(prefix: bytes) -> bytes:
    """The end of the range of all keys that start with a non-empty prefix."""
    stripped = prefix.rstrip(b"\xff")
    return stripped[:-1] + bytes([stripped[-1] + 1]) if stripped else b"\0"


@dataclass(frozen=True, slots=True)
class Agreed:
    """The directory a node works with: its era (see `tiergate.directory.era`), and etcd's own id of the cluster."""

    era: int
    cluster_id: int
