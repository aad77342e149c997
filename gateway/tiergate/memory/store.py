"""The files of the memory folder and the transactions on them: what one process has open.

layout       which layout this is (a folder of another one is refused)
index/       LMDB: the inventory
slabs        the bytes
leases/      a locked file for each process that has the folder open
lock         serialises the making of the folder and the growth of the slabs
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import lmdb

from tiergate.errors import ConfigError, MemoryFullError
from tiergate.lmdbfile import open_environment
from tiergate.memory.inventory import IndexFullError, Inventory, SlabsShortError
from tiergate.memory.rows import TABLE_NAMES, Counters, Tables
from tiergate.model import BLOCK_BYTES
from tiergate.shm import ALIGNMENT_BYTES, ProcessLease, SlabFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tiergate.clock import Clock
    from tiergate.memory.rows import Extent, Txn

T = TypeVar("T")

LAYOUT = f"tiergate memory 1, blocks of {BLOCK_BYTES} bytes\n"

READER_WAIT_S = 1.0
"""How long a change that finds the index full waits for readers to end."""

READER_PAUSE_S = 0.001

MIN_INDEX_BYTES = 1 << 20
"""Below this, copy-on-write of single transactions takes too large a share of the index."""

FULL_RETRY_S = 5.0
"""After the file system refused to grow the slabs, this long no one of this process asks again."""


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """`budget_bytes` bounds everything; of it `index_bytes` are taken at the start, the slabs get the rest
    and grow by `slab_bytes` at a time. Bodies that are received whole leave `spare_bytes` of them to fills: write-back
    may need a marker in memory before it can free any."""

    budget_bytes: int
    index_bytes: int
    slab_bytes: int
    spare_bytes: int = 0

    def check(self) -> None:
        """Raises:
        ConfigError: the limits contradict each other.
        """
        if self.index_bytes < MIN_INDEX_BYTES:
            raise ConfigError(f"the memory's index needs at least {MIN_INDEX_BYTES} bytes, not {self.index_bytes}")
        if self.slab_bytes < ALIGNMENT_BYTES:
            raise ConfigError(f"a slab needs at least {ALIGNMENT_BYTES} bytes, not {self.slab_bytes}")
        if self.budget_bytes - self.index_bytes < ALIGNMENT_BYTES:
            raise ConfigError(
                f"the memory budget of {self.budget_bytes} bytes leaves no room for slabs beside"
                f" its index of {self.index_bytes} bytes"
            )


class Store:
    """The open folder. Several stores of one process share its one LMDB environment (`share`), as tests
    do."""

    def __init__(
        self, folder: Path, limits: MemoryLimits, clock: Clock, environment: lmdb.Environment, tables: Tables
    ) -> None:
        """Use `prepare` instead. Raises ConfigError: the slabs do not fit the limits, or cannot be opened."""
        self.folder = folder
        self.limits = limits
        self.environment = environment
        self.tables = tables
        self._clock = clock
        self._full_until_s = 0.0
        self.on_evicted: Callable[[int, int], None] = lambda bodies, size_bytes: None
        # An index that was once larger stays so on disk, and counts.
        index_bytes = max(limits.index_bytes, (folder / "index" / "data.mdb").stat().st_size)
        self.slab_budget = (limits.budget_bytes - index_bytes) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        with environment.begin() as txn:
            grown = Counters.load(txn, tables).grown_bytes
        if grown > self.slab_budget or self.slab_budget <= 0:
            raise ConfigError(
                f"{folder}: slabs of {grown} bytes and an index of {index_bytes} bytes are there already,"
                f" more than the memory budget of {limits.budget_bytes} bytes; raise it"
                " (or empty the folder, which may hold the only copy of what is in it)"
            )
        try:
            self.lease = ProcessLease.acquire(self.leases_folder)
            self.slabs = SlabFile(self.slabs_path, self.slab_budget)
        except OSError as error:
            raise ConfigError(f"{folder}: cannot use the memory folder: {error}") from error

    @property
    def slabs_path(self) -> Path:
        """The file that holds the bytes."""
        return self.folder / "slabs"

    @property
    def leases_folder(self) -> Path:
        """Where the leases of all processes are that use this memory."""
        return self.folder / "leases"

    @classmethod
    def prepare(cls, folder: Path, limits: MemoryLimits, clock: Clock) -> Store:
        """Open the folder for this process, making its files if it is new.

        Raises:
            ConfigError: it cannot be written, has no room for the index, has another layout, or the limits
                are bad.
        """
        limits.check()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with locked(folder / "lock"):
                _check_layout(folder)
                environment = open_environment(folder / "index", limits.index_bytes, len(TABLE_NAMES), preallocate=True)
        except OSError as error:
            raise ConfigError(f"{folder}: cannot use the memory folder: {error}") from error
        try:
            return cls(folder, limits, clock, environment, Tables.open(environment))
        except lmdb.Error as error:
            environment.close()
            raise ConfigError(f"{folder}: cannot make the memory's tables: {error}") from error
        except BaseException:
            environment.close()
            raise

    def share(self) -> Store:
        """A second store as if of another process, over the same environment: LMDB allows a process only
        one."""
        return Store(self.folder, self.limits, self._clock, self.environment, self.tables)

    def close(self) -> None:
        """Let go of slabs and lease. The environment is closed by whoever prepared it."""
        self.lease.release()
        self.slabs.close()

    def is_alive(self, token: str) -> bool:
        return ProcessLease.is_alive(self.leases_folder, token)

    def sweep_leases(self) -> None:
        ProcessLease.sweep(self.leases_folder)

    def views(self, extents: list[Extent]) -> list[memoryview]:
        """The mapped bytes of some extents."""
        return [self.slabs.view(offset, length) for offset, length in extents]

    def fresh_views(self, extents: list[Extent]) -> list[memoryview]:
        """Like `views`, for bytes that are about to be written."""
        for offset, length in extents:
            self.slabs.warm(offset, length)
        return self.views(extents)

    @contextmanager
    def read(self) -> Iterator[Txn]:
        """A read transaction: one moment's state."""
        with self.environment.begin() as txn:
            yield txn

    def change(self, change: Callable[[Inventory], T]) -> T:
        """Run `change` in one write transaction; nothing of it remains if it raises. It may be run again.

        Raises:
            IndexFullError: as it says. And what `change` raises.
        """
        try:
            return self._change_once(change)
        except lmdb.MapFullError:
            pass
        # Pages that were replaced are free again only when no reader can see them any more. A reader needs
        # microseconds, but it may have died, or may have lost the processor.
        end_s = self._clock.monotonic_s() + READER_WAIT_S
        while True:
            self.environment.reader_check()
            try:
                return self._change_once(change)
            except lmdb.MapFullError as error:
                if self._clock.monotonic_s() > end_s:
                    raise IndexFullError("the index of the memory is full") from error
            time.sleep(READER_PAUSE_S)  # A reader that has lost the processor must get it.

    def _change_once(self, change: Callable[[Inventory], T]) -> T:
        with self.environment.begin(write=True) as txn:
            inventory = Inventory(
                txn,
                self.tables,
                self.lease.token,
                self._now_us(),
                self.slab_budget,
                self.limits.index_bytes,
                self.limits.spare_bytes,
            )
            if self._clock.monotonic_s() < self._full_until_s:
                inventory.growable_bytes = 0
            before = inventory.counters.evictions
            result = change(inventory)
            inventory.flush()
        if inventory.counters.evictions != before:
            self.on_evicted(inventory.counters.evictions - before, inventory.evicted_bytes)
        return result

    def change_with_room(self, change: Callable[[Inventory], T]) -> T:
        """Like `change`, growing the slabs first where it asks for that."""
        while True:
            try:
                return self.change(change)
            except SlabsShortError:
                # Outside of the transaction: filling new pages takes long, others go on meanwhile.
                self.grow()

    def grow(self) -> bool:
        """Add one slab, if budget and file system allow it (or somebody else added one meanwhile)."""
        seen = self._grown_bytes()
        with locked(self.folder / "lock"):
            grown = self._grown_bytes()
            if grown != seen:
                return True
            length = min(self.limits.slab_bytes, self.slab_budget - grown)
            length = length // ALIGNMENT_BYTES * ALIGNMENT_BYTES
            if length <= 0:
                return False
            try:
                self.slabs.grow(grown, length)
                self.slabs.warm(grown, length)
            except MemoryFullError:
                self._full_until_s = self._clock.monotonic_s() + FULL_RETRY_S
                return False
            self.change(lambda inventory: inventory.add_slab(grown, length))
        return True

    def _grown_bytes(self) -> int:
        with self.environment.begin() as txn:
            return Counters.load(txn, self.tables).grown_bytes

    def _now_us(self) -> int:
        return int(self._clock.monotonic_s() * 1e6)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file `path`; the kernel lets go of it if the process dies."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _check_layout(folder: Path) -> None:
    path = folder / "layout"
    try:
        found = path.read_text()
    except FileNotFoundError:
        others = sorted(entry.name for entry in folder.iterdir() if entry.name not in ("lock", "layout.new"))
        if others:
            raise ConfigError(f"{folder}: is no memory folder and not empty (it holds {others[0]})") from None
        fresh = folder / "layout.new"
        fresh.write_text(LAYOUT)
        fresh.rename(path)
        return
    if found != LAYOUT:
        raise ConfigError(
            f"{folder}: has the layout {found.strip()[:100]!r}, this version has {LAYOUT.strip()!r};"
            " drain it with the version that wrote it, then empty it"
        )
