"""Reads of etcd that need more than one call: by pages, and of several tables, as of one revision."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from tiergate.directory.clusterrows import READS_COUNT, value_of
from tiergate.errors import CompactedError, DirectoryUnavailableError
from tiergate.etcd.client import EtcdClient
from tiergate.etcd.values import KeyValue, Range

FIRST_PAGE_COUNT = 100
PAGE_COUNT = 1000
"""Rows read at once: at first, and later at most."""

HEADS_COUNT = 20
"""Ranges of many rows that are read at once."""

PAGE_BYTES = 4 << 20
"""Of values in one page, about: records of many parts are large."""

ATTEMPTS_COUNT = 5
"""So often reads begin anew because their revision was compacted under them."""

T = TypeVar("T")


class At:
    """The revision that reads share: that of the first, or one given."""

    def __init__(self, revision: int = 0) -> None:
        self.revision = revision


class Reader:
    """Reads through a client."""

    def __init__(self, client: EtcdClient) -> None:
        self._client = client

    async def one(self, kind: type[T], key: bytes) -> T | None:
        """The value of a row."""
        rows = (await self._client.read(Range(key))).found(0)
        return value_of(kind, rows[0]) if rows else None

    async def consistent(self, read: Callable[[At], Awaitable[T]]) -> T:
        """Reads that belong together, begun anew where the revision they share is compacted meanwhile.

        Raises:
            DirectoryUnavailableError: that happened again and again.
        """
        attempt = 0
        while True:
            try:
                return await read(At())
            except CompactedError as error:
                attempt += 1
                if attempt == ATTEMPTS_COUNT:
                    raise DirectoryUnavailableError("history is compacted faster than it can be read") from error

    async def walk(self, wanted: Range, at: At, limit: int | None = None) -> AsyncIterator[KeyValue]:
        """The first rows of a range.

        Raises:
            CompactedError: the revision is no longer kept.
        """
        start, page_count = wanted.key, FIRST_PAGE_COUNT
        left = limit
        while left is None or left > 0:
            count = page_count if left is None else min(page_count, left)
            outcome = await self._client.read(replace(wanted, key=start, limit=count, revision=at.revision))
            at.revision = at.revision or outcome.revision
            rows = outcome.found(0)
            for row in rows:
                yield row
            if len(rows) < count:
                return
            left = None if left is None else left - len(rows)
            start = rows[-1].key + b"\0"
            size_bytes = sum(len(row.value) for row in rows)
            page_count = max(1, min(PAGE_COUNT, count * PAGE_BYTES // max(size_bytes, 1)))

    async def rows(self, wanted: Range | None, limit: int | None = None) -> list[KeyValue]:
        """The first rows of a range, all of one revision; none of None."""
        if wanted is None:
            return []

        async def read(at: At) -> list[KeyValue]:
            return [row async for row in self.walk(wanted, at, limit)]

        return await self.consistent(read)

    async def values(self, kind: type[T], wanted: Range | None, limit: int | None = None) -> list[T]:
        """The values of `rows`."""
        return [value_of(kind, row) for row in await self.rows(wanted, limit)]

    async def heads(
        self, wanted: Sequence[Range], limit: int, at: At, at_once: int = HEADS_COUNT
    ) -> AsyncIterator[tuple[int, tuple[KeyValue, ...]]]:
        """The first rows of each of many ranges, with its index; `limit` 0: all.

        Raises:
            CompactedError: the revision is no longer kept.
        """
        for start in range(0, len(wanted), at_once):
            part = wanted[start : start + at_once]
            outcome = await self._client.read(*(replace(each, limit=limit, revision=at.revision) for each in part))
            at.revision = at.revision or outcome.revision
            for index in range(len(part)):
                yield start + index, outcome.found(index)

    async def points(self, kind: type[T], keys: Sequence[bytes], at: At) -> list[T]:
        """The values of those of the rows that are there.

        Raises:
            CompactedError: the revision is no longer kept.
        """
        found = self.heads([Range(key) for key in keys], 0, at, READS_COUNT)
        return [value_of(kind, row) async for _, rows in found for row in rows]

    async def values_at(self, kind: type[T], wanted: Range | None, at: At) -> list[T]:
        """All values of a range as of a revision.

        Raises:
            CompactedError: it is no longer kept.
        """
        return [value_of(kind, row) async for row in self.walk(wanted, at)] if wanted else []
