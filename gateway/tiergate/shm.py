"""What a process of this node needs to map the bytes that others received: the slab file and process leases.

Both rest on the kernel alone: pages of the slab file belong to the file system, so they outlive every
process, and a lease is a file lock, so it ends with its process, however that ends.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import secrets
from pathlib import Path
from typing import Self

from tiergate.errors import InvariantError, MemoryFullError

ALIGNMENT_BYTES = 512
"""Extents of the slab file start and end at multiples of this."""

_UNBORN_SUFFIX = ".new"

_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE (Linux 5.14), which Python does not name."""

_LIBC = ctypes.CDLL(None, use_errno=True)
"""Its madvise, unlike that of Python's mmap, lets other threads of the process run meanwhile."""

_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

_GRANULE_BYTES = 1 << 20
"""Unit in which a process remembers what it has mapped; a multiple of the page size."""


class SlabFile:
    """The one file that holds the bytes of all bodies, mapped whole.

    The file is as long as it may ever become, but only the part that `grow` allocated may be touched:
    writing to a hole of a full tmpfs kills the process with SIGBUS. Pages are used again while they are
    warm and never given back. Which part is allocated and who uses it is the inventory's knowledge, not
    this class's.
    """

    def __init__(self, path: Path, size_bytes: int, *, writable: bool = True, made: bool = False) -> None:
        """Map `size_bytes` of the file. If `writable` it is made, and made longer, unless it is there (`made`): this
        process is a guest of its node then, and maps the file as long as it is.

        Raises:
            OSError: the file cannot be opened, lengthened or mapped.
        """
        flags = (os.O_RDWR | (0 if made else os.O_CREAT)) if writable else os.O_RDONLY
        self._descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
        try:
            found_bytes = os.fstat(self._descriptor).st_size
            if found_bytes < size_bytes and (made or not writable):
                raise OSError(errno.EINVAL, "the slab file is shorter than it should be", str(path))
            if found_bytes < size_bytes:
                os.ftruncate(self._descriptor, size_bytes)
            size_bytes = max(size_bytes, found_bytes) if made else size_bytes
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            self._map: mmap.mmap | None = mmap.mmap(self._descriptor, size_bytes, access=access)
            self._whole = memoryview(self._map)
            self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map)) if writable else 0
            self._warm = bytearray(size_bytes // _GRANULE_BYTES)
        except BaseException:
            os.close(self._descriptor)
            raise
        if made:  # A guest only needs the map: once that is gone it must keep nothing of a file that was removed.
            os.close(self._descriptor)
            self._descriptor = -1

    @property
    def size_bytes(self) -> int:
        """How much is mapped."""
        return len(self._whole)

    def view(self, offset: int, length: int) -> memoryview:
        """Bytes [offset, offset + length), writable if the file is. The caller must know them to be
        allocated.

        Raises:
            InvariantError: the range reaches past the mapping.
        """
        found = self._whole[offset : offset + length]
        if len(found) != length:
            raise InvariantError("a view past the end of the slabs", offset=offset, length=length)
        return found

    def grow(self, offset: int, length: int) -> None:
        """Allocate [offset, offset + length); what is allocated already stays as it is.

        Raises:
            MemoryFullError: the file system has no room.
        """
        try:
            os.posix_fallocate(self._descriptor, offset, length)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
                raise MemoryFullError("the memory file system is full", length=length) from error
            raise

    def warm(self, offset: int, length: int) -> None:
        """Before a long write: map allocated bytes into this process in one go, which costs half as much as
        page faults do. Only the first time it does anything. The bytes stay as they are, also those that somebody
        writes meanwhile."""
        first, last = -(-offset // _GRANULE_BYTES), (offset + length) // _GRANULE_BYTES
        mapped = self._map  # Ours until this is done, so that nobody else unmaps it.
        if first >= last or mapped is None or all(self._warm[first:last]):
            return
        start, size = self._address + first * _GRANULE_BYTES, (last - first) * _GRANULE_BYTES
        if _LIBC.madvise(start, size, _POPULATE_WRITE) != 0:
            code = ctypes.get_errno()
            if code != errno.EINVAL:
                raise OSError(code, os.strerror(code))
            self._warm = bytearray(b"\1") * len(self._warm)  # Linux before 5.14: the page faults do it.
            return
        self._warm[first:last] = b"\1" * (last - first)

    @property
    def allocated_bytes(self) -> int:
        """What the file system really holds of the file."""
        return os.fstat(self._descriptor).st_blocks * 512

    def close(self) -> None:
        """Let go of the file. The mapping goes with the last view that somebody still has."""
        self._whole.release()
        self._map = None
        if self._descriptor >= 0:
            os.close(self._descriptor)


class ProcessLease:
    """Proof that a process lives: a locked file named by a random token. The kernel drops the lock at its
    death.

    The lock belongs to the open file, so a process that forks without exec shares it with its child: take
    the lease after the process has started.
    """

    def __init__(self, folder: Path, token: str, descriptor: int) -> None:
        self._folder = folder
        self._descriptor = descriptor
        self.token = token

    @classmethod
    def acquire(cls, folder: Path) -> Self:
        """A new lease in `folder` (made if absent) with a random token.

        Raises:
            OSError: the folder cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        while True:
            token = secrets.token_hex(8)
            # Locked before it has its name, so nobody ever sees an unlocked file of a living process.
            unborn = folder / f"{token}{_UNBORN_SUFFIX}"
            descriptor = os.open(unborn, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                os.rename(unborn, folder / token)
            except FileNotFoundError:
                os.close(descriptor)  # `sweep` took it for a leftover; try another one
                continue
            except BaseException:
                os.close(descriptor)
                raise
            return cls(folder, token, descriptor)

    @classmethod
    def is_alive(cls, folder: Path, token: str) -> bool:
        """Whether the process that acquired `token` lives and has not released it."""
        return _is_locked(folder / token)

    @classmethod
    def sweep(cls, folder: Path) -> None:
        """Remove the files of dead leases."""
        for path in folder.iterdir():
            if not _is_locked(path):
                path.unlink(missing_ok=True)

    def release(self) -> None:
        """End the lease; from now on its token counts as dead."""
        (self._folder / self.token).unlink(missing_ok=True)
        os.close(self._descriptor)

    def forget(self) -> None:
        """In a child that was forked: the lease is the parent's, and must end with the parent alone."""
        os.close(self._descriptor)


def _is_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        # Shared, so that two processes that look at the same time do not take each other for the owner.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
