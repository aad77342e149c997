"""The memory of this machine's node, mapped into this process.

A process shares a node's memory once it has found out that both are on one machine: it sees the lease locked that the
node's answer named. From then on it has a lease of its own, acquired when it is first needed and never carried over a
fork, and the node gives back what hangs on it when the process is dead.
"""

from __future__ import annotations

import atexit
import io
import logging
import os
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiergate.shm import ProcessLease, SlabFile

try:
    import numpy
except ImportError:  # It is only faster: it copies without holding up other threads.
    numpy = None  # type: ignore[assignment,unused-ignore]  # where its types are known, it is no module then

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from _typeshed import WriteableBuffer

log = logging.getLogger(__name__)

PLAIN_COPY_BYTES = 64 << 10
"""Up to this much is copied by Python itself."""

Extent = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Memory:
    """Where a node says that its memory is. `token`: of a lease that is locked there."""

    slabs: str
    slab_bytes: int
    leases: str
    token: str

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Memory:
        """From the node's answer."""
        return cls(document["slabs"], document["slab_bytes"], document["leases"], document["token"])


class Share:
    """What this process has of a node's memory. Its lease ends with the process, or once nobody has the share any more.
    Thread-safe."""

    def __init__(self, memory: Memory) -> None:
        """Raises:
        OSError, ValueError: it cannot be mapped.
        """
        self.memory = memory
        self.is_ours = True
        """Not so in a child that was forked: what hangs on the lease is its parent's."""
        self.unsaid: list[tuple[str, str]] = []
        """Pins (body, name) that are needed no more, which the node could not be told."""
        self._slabs = SlabFile(Path(memory.slabs), memory.slab_bytes, made=True)
        self._lease = ProcessLease.acquire(Path(memory.leases))
        self._ending = weakref.finalize(self, self._lease.release)
        _known.add(self)

    @property
    def token(self) -> str:
        """What the node knows this process by."""
        return self._lease.token

    @property
    def place(self) -> tuple[str, str]:
        """Which memory it is of."""
        return self.memory.leases, self.memory.slabs

    @property
    def is_alive(self) -> bool:
        """Whether a node in its place still finds its lease."""
        return ProcessLease.is_alive(Path(self.memory.leases), self.token)

    def views(self, extents: Iterable[Extent]) -> list[memoryview]:
        """The bytes of extents, neighbours joined.

        Raises:
            OSError, ValueError: they cannot be mapped.
        """
        runs = joined(extents)
        slabs = self._reaching(runs)
        return [slabs.view(offset, length) for offset, length in runs]

    def fresh_views(self, extents: Iterable[Extent]) -> list[memoryview]:
        """As `views`, for bytes that are about to be written."""
        runs = joined(extents)
        slabs = self._reaching(runs)
        for offset, length in runs:
            slabs.warm(offset, length)
        return self.views(runs)

    def _reaching(self, extents: Sequence[Extent]) -> SlabFile:
        """The file mapped as far as extents reach: anew where the node's memory became larger. Views of the map before
        keep it."""
        end = max((offset + length for offset, length in extents), default=0)
        if end > self._slabs.size_bytes:
            self._slabs = SlabFile(Path(self.memory.slabs), end, made=True)
        return self._slabs

    def release(self) -> None:
        """End the lease: what hangs on it goes."""
        self._ending()

    def forget(self) -> None:
        """In a child that was forked."""
        self.is_ours = False
        if self._ending.detach() is not None:
            self._lease.forget()


class Room:
    """A grant: room in the node's memory for one body, filled from its start. One thread at a time."""

    def __init__(self, share: Share, grant: str, extents: Iterable[Extent], size_bytes: int, tag: str) -> None:
        """`extents` may be longer than `size_bytes`, which is what was granted. `tag` is what it is let go of by."""
        self.share = share
        self.grant = grant
        self.tag = tag
        self._views = cut(share.fresh_views(extents), 0, size_bytes)
        self._at = 0
        self._view = 0
        self.size_bytes = size_bytes
        self.used_bytes = 0

    def write(self, data: memoryview) -> int:
        """Take what there is room for; how much that is."""
        taken = 0
        while taken < len(data) and self._view < len(self._views):
            view = self._views[self._view]
            piece = data[taken : taken + len(view) - self._at]
            copy(view[self._at : self._at + len(piece)], piece)
            taken += len(piece)
            self._at += len(piece)
            if self._at == len(view):
                self._view, self._at = self._view + 1, 0
        self.used_bytes += taken
        return taken

    def views(self) -> list[memoryview]:
        """What was written, in order."""
        return cut(self._views, 0, self.used_bytes)


_shares: dict[tuple[str, str], Share] = {}
"""Those for new uses."""

_known: weakref.WeakSet[Share] = weakref.WeakSet()
"""All that somebody has."""

_lock = threading.Lock()


def share_of(memory: Memory) -> Share | None:
    """This process's share in a node's memory; None if the node is on another machine, or does not let us."""
    place = memory.leases, memory.slabs
    with _lock:
        found = _shares.get(place)
        if found is not None:
            return found
        try:
            if not ProcessLease.is_alive(Path(memory.leases), memory.token):
                return None
            dropped = (each for each in list(_known) if each.place == place and each.is_alive)
            found = next(dropped, None) or Share(memory)
        except (OSError, ValueError) as error:
            log.info("the memory of the node cannot be shared: %s", error)
            return None
        _shares[place] = found
        return found


def drop_share(share: Share) -> None:
    """Who answers does not know the share: its memory is another one. What hangs on the lease stays, since the node
    that does know it may only be one of several behind the endpoint."""
    with _lock:
        if _shares.get(share.place) is share:
            del _shares[share.place]


def joined(extents: Iterable[Extent]) -> list[Extent]:
    """The extents with those joined that follow each other in the file."""
    found: list[Extent] = []
    for offset, length in extents:
        if found and found[-1][0] + found[-1][1] == offset:
            found[-1] = (found[-1][0], found[-1][1] + length)
        else:
            found.append((offset, length))
    return found


def cut(views: Sequence[memoryview], low: int, high: int) -> list[memoryview]:
    """The bytes [low, high) of what the views hold one after the other, without copying."""
    found: list[memoryview] = []
    at = 0
    for view in views:
        start, end = max(low - at, 0), min(high - at, len(view))
        if start < end:
            found.append(view[start:end])
        at += len(view)
    return found


def together(views: Sequence[memoryview]) -> memoryview:
    """All of it in one piece, copied only if it is in several."""
    if len(views) == 1:
        return views[0]
    found = memoryview(bytearray(sum(map(len, views))))
    at = 0
    for view in views:
        copy(found[at : at + len(view)], view)
        at += len(view)
    return found.toreadonly()


def copy(target: memoryview, source: memoryview) -> None:
    """Copy bytes of equal length; long ones without holding up other threads."""
    if numpy is None or len(source) <= PLAIN_COPY_BYTES:
        target[:] = source
    else:
        numpy.copyto(numpy.frombuffer(target, numpy.uint8), numpy.frombuffer(source, numpy.uint8))


class MemoryFile(io.RawIOBase):
    """Views one after the other as a file to read, without putting them together first. Valid as long as they are."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        super().__init__()
        self._views = views
        self._size_bytes = sum(map(len, views))
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._at = max(0, (0, self._at, self._size_bytes)[whence] + offset)
        return self._at

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        target = memoryview(buffer).cast("B")
        done = 0
        for piece in cut(self._views, self._at, self._at + len(target)):
            copy(target[done : done + len(piece)], piece)
            done += len(piece)
        self._at += done
        return done

    def __len__(self) -> int:
        return self._size_bytes


def _release_all() -> None:
    for share in list(_known):
        share.release()
    _shares.clear()


def _forget_all() -> None:
    """The child has no share: what its parent has is the parent's."""
    global _lock
    _lock = threading.Lock()
    for share in list(_known):
        share.forget()
    _known.clear()
    _shares.clear()


atexit.register(_release_all)
os.register_at_fork(after_in_child=_forget_all)
