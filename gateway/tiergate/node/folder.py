"""The memory folder: made, checked and locked before anything else of the node exists.

Two locks lie on the file `lock`. The first (flock) belongs to the open file that all children inherit, so it
lasts until the last of them is dead. The second (a POSIX record lock) belongs to the parent alone and says
that a node serves and is not about to end: a newcomer waits for a dying node, but not for a living one."""

import errno
import fcntl
import os
import shutil
import stat
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tiergate.child import Belonging, Folders
from tiergate.clock import Clock
from tiergate.config import Settings, format_size
from tiergate.directory.board import Board
from tiergate.errors import TiergateError

LOCK_WAIT_S = 10.0
_LOCK_POLL_S = 0.02
_PROBE_BYTES = 4 << 10
SMALLEST_LIMIT_BYTES = 8 << 20


class StartError(TiergateError):
    """The node cannot start; the message says why, in one line."""


class FolderBusyError(StartError):
    """Another node has the memory folder."""


@dataclass(slots=True)
class FolderLock:
    """The memory folder is ours. `descriptor` is to be inherited by every child."""

    descriptor: int

    def announce_end(self) -> None:
        """Say that this node is about to end, so that a newcomer may wait for it."""
        fcntl.lockf(self.descriptor, fcntl.LOCK_UN, 1)

    def close(self) -> None:
        """Give the folder back, once the last child is dead."""
        os.close(self.descriptor)


def folder_faults(root: Path, limit_bytes: int, is_default_limit: bool) -> list[str]:
    """What speaks against this folder and limit, without changing anything; one line a fault."""
    existing = root
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        return [f"memory_dir: {existing} is not a directory"]
    if not os.access(existing, os.W_OK | os.X_OK):
        return [f"memory_dir: {existing} is not writable"]
    try:
        if root.exists():
            _check_owner(root)
        settle_limit(root, existing, limit_bytes, is_default_limit)
    except StartError as error:
        return [f"memory_dir: {error}"]
    return []


def prepare_folder(root: Path) -> Folders:
    """Make the folder and find out whether it can be written.

    Raises:
        StartError: it cannot be made, is another user's, or cannot be written.
    """
    folders = Folders(root)
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_owner(root)
        for folder in (folders.index, folders.slabs, folders.processes, folders.sockets, folders.metrics):
            folder.mkdir(mode=0o700, exist_ok=True)
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                raise StartError(f"{folder} is not a folder of this user")
        _probe(root)
    except OSError as error:
        raise _start_error(root, error) from error
    return folders


def settle_limit(root: Path, existing: Path, limit_bytes: int, is_default_limit: bool) -> int:
    """The memory limit in bytes: as given if it fits, a default one lowered to what fits.

    What the folder holds already counts as free, since it is what the limit bounds. `existing` is the
    folder, or the nearest one above it that exists.

    Raises:
        StartError: it does not fit.
    """
    found = os.statvfs(existing)
    room_bytes = found.f_bavail * found.f_frsize + _held_bytes(root)
    if is_default_limit:
        limit_bytes = min(limit_bytes, room_bytes // SMALLEST_LIMIT_BYTES * SMALLEST_LIMIT_BYTES)
    if limit_bytes > room_bytes or limit_bytes < SMALLEST_LIMIT_BYTES:
        needed = max(limit_bytes, SMALLEST_LIMIT_BYTES)
        raise StartError(
            f"the file system of {root} has {format_size(room_bytes // 1024 * 1024)} free "
            f"for a memory_limit of {format_size(needed)}"
        )
    return limit_bytes


def lock_folder(folders: Folders, clock: Clock, wait_s: float = LOCK_WAIT_S) -> FolderLock:
    """Take the folder; wait up to `wait_s` for the processes of a node that died.

    Raises:
        FolderBusyError: another node serves from it, or its processes do not end.
        StartError: the lock file cannot be opened.
    """
    deadline_s = clock.monotonic_s() + wait_s
    while True:
        try:
            descriptor = os.open(folders.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise _start_error(folders.lock, error) from error
        if _take(descriptor) and _is_same_file(descriptor, folders.lock):
            # Waits at most for a newcomer that looks at this very moment whether somebody serves.
            fcntl.lockf(descriptor, fcntl.LOCK_EX, 1)
            return FolderLock(descriptor)
        serving = _is_served(descriptor)
        os.close(descriptor)
        if serving:
            raise FolderBusyError(f"another tiergate serves from {folders.root}")
        if clock.monotonic_s() >= deadline_s:
            raise FolderBusyError(f"processes of an earlier tiergate in {folders.root} do not end")
        time.sleep(_LOCK_POLL_S)  # flock knows no timeout


def clear_folder(folders: Folders) -> None:
    """Empty what belongs to one run of a node. The lock must be held.

    Raises:
        StartError: something cannot be removed.
    """
    try:
        for folder in (folders.sockets, folders.metrics):
            for entry in folder.iterdir():
                entry.unlink()
        folders.node_file.unlink(missing_ok=True)
    except OSError as error:
        raise _start_error(folders.root, error) from error


def check_belonging(folders: Folders, settings: Settings) -> None:
    """What is owed to the origin is known to the directory that it was committed to: no other may be used with this
    memory before it is owed nothing. The lock must be held.

    Raises:
        StartError: the memory belongs to a member of a cluster that these settings do not describe.
    """
    try:
        belonging = msgspec.json.decode(folders.member_file.read_bytes(), type=Belonging)
    except FileNotFoundError:
        return
    except (OSError, msgspec.DecodeError) as error:
        raise StartError(f"cannot use {folders.member_file}: {error}") from error
    if not belonging.fits(settings):
        raise StartError(
            f"{folders.root} holds what node {belonging.node} of {belonging.cluster} may still owe: start it as that, "
            "or choose another memory_dir"
        )


def make_board(folders: Folders) -> None:
    """An empty board for a member of a cluster.

    Raises:
        StartError: it cannot be made.
    """
    try:
        Board.make(folders.board)
    except OSError as error:
        raise _start_error(folders.board, error) from error


def is_on_tmpfs(path: Path) -> bool:
    """Whether the path lies on a tmpfs, as far as the mount table says."""
    best, kind = "", ""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, found, *_ = line.split(" ")
        if len(point) >= len(best) and path.is_relative_to(point):
            best, kind = point, found
    return kind in ("tmpfs", "ramfs", "hugetlbfs")


def _take(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_same_file(descriptor: int, path: Path) -> bool:
    """False if the folder was removed and made anew between opening and locking."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def _is_served(descriptor: int) -> bool:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB, 1)
    except (BlockingIOError, PermissionError):
        return True
    fcntl.lockf(descriptor, fcntl.LOCK_UN, 1)
    return False


def _check_owner(root: Path) -> None:
    """Others may own a folder they gave us (a volume), but not one they put in our way under /dev/shm."""
    found = root.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise StartError(f"{root} is not a directory")
    in_shared_place = bool(root.parent.stat().st_mode & stat.S_ISVTX)
    if in_shared_place and (found.st_uid != os.geteuid() or root.is_symlink()):
        raise StartError(f"{root} is another user's: choose another memory_dir")


def _probe(root: Path) -> None:
    path = root / f"probe-{os.getpid()}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, _PROBE_BYTES)
    finally:
        os.close(descriptor)
        path.unlink()


def _held_bytes(root: Path) -> int:
    total = 0
    for folder, _, files in os.walk(root):
        for name in files:
            try:
                total += (Path(folder) / name).lstat().st_blocks * 512
            except FileNotFoundError:
                continue  # a dying node may still tidy up
    return total


def _start_error(path: Path, error: OSError) -> StartError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(path if path.exists() else path.parent).free
        return StartError(f"no space left in {path} ({format_size(free // 1024 * 1024)} free)")
    return StartError(f"cannot use {error.filename or path}: {error.strerror}")
