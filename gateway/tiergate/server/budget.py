"""How `memory_limit` is split, so that all that lies in the memory folder together stays within it (promise P9).

The split follows from the limit alone, and from whether the node is alone: a restart with other settings finds that
what the slabs hold still fits.
"""

import mmap
from dataclasses import dataclass

from tiergate.config import Settings
from tiergate.lmdbfile import LOCK_FILE_BYTES
from tiergate.memory.memory import MemoryLimits
from tiergate.observe.store import FILE_BYTES

MIB = 1 << 20

ENVIRONMENTS_COUNT = 2
"""LMDB environments in the folder: the inventory's, and the directory's or the ledger's, each with a table of its
readers."""

SMALL_FILES_COUNT = 8
"""More than there are at a time: layout, addresses and their drafts, the probe of a start, locks. A page each."""

DIRECTORY_SHARE = 32
DIRECTORY_FLOOR_BYTES = 4 * MIB
"""A change writes some ten pages anew, and those it replaces are free again only when no reader sees them any more. So
much lets a hundred changes go by while a reader has lost the processor (see `tiergate.directory.embedded`)."""

LEDGER_LIMIT_BYTES = 64 * MIB
"""About a kilobyte for each write that the origin does not have yet."""

INDEX_SHARE = 32
"""The inventory may use this part of the budget, up to a bound: some hundred bytes a body and block."""

SLAB_SHARE = 16
"""A slab is this part of the budget, within bounds: few enough steps to grow, small enough not to overshoot."""

SPARE_SHARE = 64
"""This part of the slabs is kept for markers that must come back into memory."""

METRICS_SHARE = 64
METRICS_FLOOR_BYTES = 5 * MIB // 4
"""A page at least for each of the most processes that a node may have."""

METRICS_LIMIT_BYTES = 16 * MIB


@dataclass(frozen=True, slots=True)
class Budget:
    """The parts, in bytes; their sum is at most the limit. Each process has one metrics file."""

    metrics_file_bytes: int
    directory_bytes: int
    """Of the directory; in a cluster, where that lies elsewhere, of the ledger."""
    memory: MemoryLimits


def split(settings: Settings) -> Budget:
    """The parts of `memory_limit`."""
    limit = settings.memory_limit_bytes
    metrics = min(METRICS_LIMIT_BYTES, max(METRICS_FLOOR_BYTES, _pages(limit // METRICS_SHARE)))
    processes_count = settings.workers_count + 2
    small_files = ENVIRONMENTS_COUNT * _pages(LOCK_FILE_BYTES) + SMALL_FILES_COUNT * mmap.PAGESIZE
    directory = max(2 * MIB, min(DIRECTORY_FLOOR_BYTES, limit // 8), limit // DIRECTORY_SHARE)
    if settings.cluster:
        directory = min(directory, LEDGER_LIMIT_BYTES)
    rest = limit - metrics - small_files - _pages(directory)
    slab = min(64 * MIB, max(MIB, rest // SLAB_SHARE // MIB * MIB))
    index = min(max(MIB, rest // INDEX_SHARE), 64 * MIB + rest // 8192)
    return Budget(
        metrics_file_bytes=min(FILE_BYTES, max(1, metrics // processes_count // mmap.PAGESIZE) * mmap.PAGESIZE),
        directory_bytes=_pages(directory),
        memory=MemoryLimits(rest, _pages(index), slab, spare_bytes=rest // SPARE_SHARE),
    )


def _pages(size_bytes: int) -> int:
    return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
