"""Bringing what lies under a prefix into this node's memory before somebody asks for it, newest checkpoints first."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from tiergate.checkpoints.markers import scope_of
from tiergate.directory.base import ClusterDirectory, Directory
from tiergate.errors import TiergateError
from tiergate.model import Record, Role, Version
from tiergate.observe.logs import get_logger
from tiergate.writeback.standing import Standing

log = get_logger(__name__)

PAGE_COUNT = 1000
"""Records read at once."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Objects and bytes: how many are to be fetched, how many are here, how many could not be fetched."""

    total_count: int
    total_bytes: int
    done_count: int = 0
    done_bytes: int = 0
    failed_count: int = 0

    @property
    def is_over(self) -> bool:
        return self.done_count + self.failed_count == self.total_count


def newest_sets_first(records: Sequence[Record]) -> list[Record]:
    """Current versions, those of the newest set first: the marker that was committed last, after it the members of its
    set; objects of no set last, newest first. Pure."""
    current = [record for record in records if record.version is not None]
    markers = sorted((record for record in current if record.role is Role.MARKER), key=lambda each: -each.revision)
    newest = sorted(current, key=lambda each: -each.revision)
    found: dict[str, Record] = {}
    for marker in markers:
        scope = scope_of(marker.name.key)
        found.setdefault(marker.name.key, marker)
        for record in newest:
            if record.name.key.startswith(scope):
                found.setdefault(record.name.key, record)
    return [*found.values(), *(record for record in newest if record.name.key not in found)]


Fill = Callable[[Record, Version], Awaitable[bool]]
"""Bring all bytes of one version into memory; False if it is not the current one any more, or memory has no room.
Raises what reading raises."""


class Prefetch:
    """`fill` is the engine's. `cluster` is the same directory where there are others that read from here."""

    def __init__(
        self,
        directory: Directory,
        fill: Fill,
        standing: Standing,
        concurrency_count: int,
        cluster: ClusterDirectory | None = None,
    ) -> None:
        self._directory = directory
        self._fill = fill
        self._standing = standing
        self._slots = asyncio.Semaphore(concurrency_count)
        self._cluster = cluster

    async def prefetch(self, bucket: str, prefix: str, on_progress: Callable[[Progress], None]) -> Progress:
        """Bring what is current under a prefix here, a bounded number of objects at a time; what cannot be had is
        counted and left. Only keys the directory knows: the caller lists the origin before, if it must.

        Raises:
            OverloadedError: the directory does not answer.
        """
        records = newest_sets_first(await self._current(bucket, prefix))
        sizes = [record.version.size_bytes for record in records if record.version]
        progress = Progress(len(sizes), sum(sizes))
        on_progress(progress)

        async def one(record: Record, version: Version) -> None:
            nonlocal progress
            async with self._slots:
                is_here = await self._bring(record, version)
            progress = Progress(
                progress.total_count,
                progress.total_bytes,
                progress.done_count + is_here,
                progress.done_bytes + (version.size_bytes if is_here else 0),
                progress.failed_count + (not is_here),
            )
            on_progress(progress)

        async with asyncio.TaskGroup() as group:
            for record in records:
                if record.version is not None:
                    group.create_task(one(record, record.version))
        return progress

    async def _current(self, bucket: str, prefix: str) -> list[Record]:
        found: list[Record] = []
        after = ""
        while page := await self._directory.scan(bucket, prefix, after, PAGE_COUNT):
            found += page
            after = page[-1].name.key
        return found

    async def _bring(self, record: Record, version: Version) -> bool:
        try:
            if not await self._fill(record, version):
                return False
            me = self._standing.me()
            if self._cluster is not None and me is not None:
                return await self._cluster.hold(record.name, version.uid, [me])
        except TiergateError as error:
            log.warning("an object could not be fetched ahead", key=record.name.key, error=error)
            return False
        return True
