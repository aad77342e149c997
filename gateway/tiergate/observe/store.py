"""The values of one process's metrics, kept in a small shared file so that `/metrics` shows the node's sum.

Each process (`worker-0`, `background`, ...) writes its own file; whoever answers a scrape reads all of them.
A process that is restarted goes on with its predecessor's file, so counters never go back within a node's
run. Files have a fixed size that is allocated before it is mapped: a sparse mapping on a full tmpfs would
kill the process with SIGBUS (which rules out the multiprocess mode of the Prometheus client)."""

import json
import mmap
import os
import struct
import threading
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tiergate.errors import InvariantError

FILE_BYTES = 256 << 10
"""Room for some 2,000 series; further ones are counted in `tiergate_observe_series_dropped_total`."""

_MAGIC = b"TGMETR01"
_HEADER = struct.Struct("<8sQ")
_ENTRY = struct.Struct("<II")
_WORD_BYTES = 8


class MetricKind(StrEnum):
    """How values of several processes are joined and read: all kinds are summed."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Stability(StrEnum):
    """Whether a dashboard may rest on the metric."""

    STABLE = "stable"
    EXPERIMENTAL = "experimental"


@dataclass(frozen=True, slots=True)
class Metric:
    """A declared metric. `buckets` are the upper bounds of a histogram, ascending, without infinity.

    A gauge that is set by several processes shows their sum; what is a fact of the node as a whole is
    computed when it is scraped (`tiergate.observe.exposition.Reading`), which `computed` says."""

    name: str
    kind: MetricKind
    help: str
    unit: str
    labels: tuple[str, ...] = ()
    stability: Stability = Stability.STABLE
    buckets: tuple[float, ...] = ()
    computed: bool = False


@dataclass(frozen=True, slots=True)
class Series:
    """The value of one metric under one set of label values, read from one process.

    `values` holds one number; of a histogram the count of each bucket (the last: above all bounds), then the
    sum."""

    name: str
    labels: tuple[str, ...]
    values: tuple[float, ...]


SERIES_DROPPED = Metric(
    "tiergate_observe_series_dropped_total",
    MetricKind.COUNTER,
    "Changes of series for which the metrics file had no room.",
    "changes",
)


class MetricStore:
    """The metrics of this process. Safe to use from several threads; never blocks on I/O.

    Owns its mapping until `close`. One process at a time may have a file open.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._mmap = memory
        self._view = memoryview(memory)
        self._words = self._view.cast("d")
        self._lock = threading.Lock()
        self._places: dict[tuple[str, tuple[str, ...]], int] = {}
        magic, used = _HEADER.unpack_from(self._view)
        if magic == _MAGIC and _HEADER.size <= used <= len(self._view):
            self._used = used
            self._take_over()
        else:
            self._used = _HEADER.size
            self._view[: _HEADER.size] = _HEADER.pack(_MAGIC, self._used)
        self._place(SERIES_DROPPED, ())

    @classmethod
    def open(cls, path: Path, size_bytes: int = FILE_BYTES) -> "MetricStore":
        """Open or create the file of this process; gauges start at 0, counters go on.

        Raises:
            OSError: the file cannot be made (no space, no permission).
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size_bytes)
            return cls(mmap.mmap(descriptor, size_bytes))
        finally:
            os.close(descriptor)

    @classmethod
    def in_memory(cls, size_bytes: int = FILE_BYTES) -> "MetricStore":
        """Metrics that nobody else reads, for tests and tools."""
        return cls(mmap.mmap(-1, size_bytes))

    def close(self) -> None:
        """Let go of the mapping; the file stays, its counters go on counting for the node."""
        self._words.release()
        self._view.release()
        self._mmap.close()

    def add(self, metric: Metric, amount: float, labels: tuple[str, ...]) -> None:
        """Add to a counter or gauge."""
        with self._lock:
            place = self._place(metric, labels)
            if place:
                self._words[place] += amount

    def set(self, metric: Metric, value: float, labels: tuple[str, ...]) -> None:
        """Set a gauge of this process."""
        with self._lock:
            place = self._place(metric, labels)
            if place:
                self._words[place] = value

    def observe(self, metric: Metric, value: float, labels: tuple[str, ...]) -> None:
        """Count one observation in a histogram."""
        with self._lock:
            place = self._place(metric, labels)
            if place:
                self._words[place + bisect_left(metric.buckets, value)] += 1
                self._words[place + len(metric.buckets) + 1] += value

    def read(self) -> list[Series]:
        """All series of this process."""
        with self._lock:
            return [series for series, _ in _entries(self._view, self._used)]

    def _place(self, metric: Metric, labels: tuple[str, ...]) -> int:
        """The index of a series' first value, 0 if there is no room. The lock is held (or nobody else is
        there)."""
        known = self._places.get((metric.name, labels))
        if known is not None:
            return known
        if len(labels) != len(metric.labels):
            raise InvariantError("wrong number of labels", metric=metric.name, labels=labels)
        count = len(metric.buckets) + 2 if metric.kind is MetricKind.HISTOGRAM else 1
        key = json.dumps([metric.name, metric.kind, *labels]).encode()
        key += b" " * (-(len(key) + _ENTRY.size) % _WORD_BYTES)
        start = self._used + _ENTRY.size + len(key)
        end = start + count * _WORD_BYTES
        if end > len(self._view):
            self._words[self._places[SERIES_DROPPED.name, ()]] += 1
            return 0
        self._view[self._used : start] = _ENTRY.pack(len(key), count) + key
        self._view[start:end] = bytes(end - start)
        # The entry becomes visible last, so neither a reader nor a successor ever sees half of one.
        self._view[: _HEADER.size] = _HEADER.pack(_MAGIC, end)
        self._used = end
        place: int = start // _WORD_BYTES
        self._places[metric.name, labels] = place
        return place

    def _take_over(self) -> None:
        for kind, name, labels, place, count in _keys(self._view, self._used):
            self._places[name, labels] = place
            if kind == MetricKind.GAUGE:
                for index in range(place, place + count):
                    self._words[index] = 0.0


def read_file(path: Path) -> list[Series]:
    """The series another process keeps in its file, at this moment.

    Raises:
        OSError: there is no such file.
    """
    data = path.read_bytes()
    if len(data) < _HEADER.size:
        return []  # just created
    magic, used = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        return []
    return [series for series, _ in _entries(memoryview(data), min(used, len(data)))]


def _entries(view: memoryview, used: int) -> Iterator[tuple[Series, str]]:
    for kind, name, labels, place, count in _keys(view, used):
        yield Series(name, labels, struct.unpack_from(f"={count}d", view, place * _WORD_BYTES)), kind


def _keys(view: memoryview, used: int) -> Iterator[tuple[str, str, tuple[str, ...], int, int]]:
    """Kind, name, labels, index of the first value and number of values of each entry."""
    offset = _HEADER.size
    while offset < used:
        key_bytes, count = _ENTRY.unpack_from(view, offset)
        start = offset + _ENTRY.size
        name, kind, *labels = json.loads(bytes(view[start : start + key_bytes]))
        yield kind, name, tuple(labels), (start + key_bytes) // _WORD_BYTES, count
        offset = start + key_bytes + count * _WORD_BYTES
