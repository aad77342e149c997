"""What decides when pending writes may be seen in the origin, read of etcd with as little as will do.

The rules are the fence's (`tiergate.writeback.fence`): a marker or pointer waits for its scope, a small put for the
large ones of its scope, a deletion for those of the markers around it, a large put for nothing. Once something is found
that a write surely waits for, the rest of its scope does not matter: so who looks again and again while much is pending
reads little, and who may go soon finds little.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from tiergate.checkpoints.markers import ancestor_scopes, is_within, reach_of, scope_of
from tiergate.directory.clusterreads import FIRST_PAGE_COUNT, At, Reader
from tiergate.directory.clusterrows import Large, value_of
from tiergate.directory.keys import Keys
from tiergate.etcd.values import KeyValue, Range
from tiergate.model import Kind, ObjectName, Pending, Role

FENCED = (Role.MARKER, Role.POINTER)

Scope = tuple[str, str]
"""A bucket and a prefix."""


class Beside:
    """Reads for one call; `at` is the revision all of it is of. Begun anew where that is compacted."""

    def __init__(self, reader: Reader, keys: Keys, at: At) -> None:
        self._reader = reader
        self._keys = keys
        self._at = at
        self._found: dict[ObjectName, Pending] = {}

    async def read(self, writes: Sequence[Pending], whole: Collection[str]) -> list[Pending]:
        """See `Directory.beside`."""
        for bucket in sorted(whole):
            self._keep(await self._reader.values_at(Pending, self._keys.under("q", bucket, "", ""), self._at))
        rest = [write for write in writes if write.name.bucket not in whole]
        await self._fetch(write.name for write in rest)
        sets, smalls = _Set.of(self._keys, rest), _Small.of(self._keys, rest)
        await self._search([*sets, *smalls])
        for each in sets:
            self._keep(each.found)
        await self._fetch(name for each in smalls for _, name in each.lowest)
        await self._fetch(await self._markers([write.name for write in rest if write.kind is Kind.DELETE]))
        return sorted(self._found.values(), key=lambda write: (write.place, write.name))

    def _keep(self, found: Iterable[Pending]) -> None:
        self._found.update((write.name, write) for write in found if not write.parked)

    async def _fetch(self, names: Iterable[ObjectName]) -> None:
        keys = [self._keys.pending(name) for name in dict.fromkeys(names) if name not in self._found]
        self._keep(await self._reader.points(Pending, keys, self._at))

    async def _search(self, searches: Sequence["_Search"]) -> None:
        async for index, rows in self._reader.heads([each.wanted for each in searches], FIRST_PAGE_COUNT, self._at):
            search = searches[index]
            if any(search.take(row) for row in rows) or len(rows) < FIRST_PAGE_COUNT:
                continue
            async for row in self._reader.walk(replace(search.wanted, key=rows[-1].key + b"\0"), self._at):
                if search.take(row):
                    break

    async def _markers(self, deleted: Iterable[ObjectName]) -> list[ObjectName]:
        """The markers around what is deleted. Those that are being deleted too are in the index until that is done."""
        scopes = list(dict.fromkeys((name.bucket, scope) for name in deleted for scope in ancestor_scopes(name.key)))
        ranges = [replace(self._keys.markers(*scope), keys_only=True) for scope in scopes]
        found: list[ObjectName] = []
        async for index, rows in self._reader.heads(ranges, 0, self._at):
            found += [self._keys.marker_name(*scopes[index], row.key) for row in rows]
        return found


class _Search(Protocol):
    """A scope as some of the writes look at it."""

    @property
    def wanted(self) -> Range:
        """Where to look."""
        ...

    def take(self, row: KeyValue) -> bool:
        """Look at a row. Whether all of these writes surely wait for it."""
        ...


def _by_scope(writes: Iterable[Pending]) -> dict[Scope, list[Pending]]:
    found: dict[Scope, list[Pending]] = {}
    for write in writes:
        found.setdefault((write.name.bucket, scope_of(write.name.key)), []).append(write)
    return found


@dataclass(slots=True)
class _Set:
    """All that is pending in the scope of some markers and pointers. What was there before the first of them was
    committed, at `before`, holds all of them back, unless it stands right beside them."""

    wanted: Range
    scope: str
    names: frozenset[ObjectName]
    before: int
    found: list[Pending] = field(default_factory=list)

    @classmethod
    def of(cls, keys: Keys, writes: Iterable[Pending]) -> list["_Set"]:
        """One for each scope."""
        fenced = _by_scope(write for write in writes if write.kind is Kind.PUT and write.role in FENCED)
        return [
            cls(keys.below("q", at[0], reach_of(at[1])), at[1], _names(each), min(write.revision for write in each))
            for at, each in fenced.items()
        ]

    def take(self, row: KeyValue) -> bool:
        write = value_of(Pending, row)
        if write.parked or not is_within(write.name.key, self.scope):
            return False
        self.found.append(write)
        is_beside = write.role in FENCED and scope_of(write.name.key) == self.scope
        return not is_beside and write.name not in self.names and write.place < self.before


@dataclass(slots=True)
class _Small:
    """The large puts in the scope of some small ones. What was acknowledged when the request of the first of them
    began, by `until`, holds all of them back."""

    keys: Keys
    wanted: Range
    names: frozenset[ObjectName]
    until: int
    lowest: list[tuple[int, ObjectName]] = field(default_factory=list)
    """The two that were there first: no write waits for itself."""

    @classmethod
    def of(cls, keys: Keys, writes: Iterable[Pending]) -> list["_Small"]:
        """One for each scope."""
        small = _by_scope(write for write in writes if write.kind is Kind.PUT and write.role is Role.SMALL)
        return [
            cls(keys, keys.below("l", *at), _names(each), min(write.start_revision for write in each))
            for at, each in small.items()
        ]

    def take(self, row: KeyValue) -> bool:
        place, name = value_of(Large, row).place, self.keys.large_name(row.key)
        self.lowest = sorted([*self.lowest, (place, name)])[:2]
        return place <= self.until and name not in self.names


def _names(writes: Iterable[Pending]) -> frozenset[ObjectName]:
    return frozenset(write.name for write in writes)
