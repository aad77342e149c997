"""A folder as it is: which files it holds, and whether they are whole."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import stat
from dataclasses import dataclass, field
from pathlib import Path

from tiergate.errors import TiergateError
from tiergate_adapters.sagemaker.plan import Sight

STAGE = ".tiergate-sync"
"""Where files are while they come from S3, within the folder. Never sent; there only before it is ready."""

MTIME = "mtime"
"""The user metadata with a file's time of modification, in seconds: rclone knows it too."""

_F_SETSIG = 10
_TIME = re.compile(r"(-?)(\d{1,12})(?:\.(\d{1,9}))?")
_NAME_BYTES = 255


class FolderGoneError(TiergateError):
    """The folder is not the one it was: unmounted, or replaced. Nothing can be said of its files."""


@dataclass(slots=True)
class Look:
    """What a look saw. `unseen`: folders that could not be looked into, with a slash; "" for the folder itself.
    `odd`: why what is no file is passed over."""

    sights: dict[str, Sight] = field(default_factory=dict)
    unseen: tuple[str, ...] = ()
    odd: dict[str, str] = field(default_factory=dict)

    def is_unseen(self, name: str) -> bool:
        """Whether a name lies where nobody could look."""
        return name.startswith(self.unseen) if self.unseen else False


class Folder:
    """A folder that is there.

    Raises:
        OSError: it is not.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.resolve(strict=True)
        self._identity = self._identify()

    def _identify(self) -> tuple[int, int]:
        found = self.path.stat()
        return found.st_dev, found.st_ino

    def at(self, name: str) -> Path:
        """Where a file of that name is."""
        return self.path / name

    def look(self) -> Look:
        """Every file, as it is now.

        Raises:
            FolderGoneError: the folder went; an empty one in its place is no folder whose files were deleted.
        """
        look = Look()
        unseen: list[str] = []
        todo = [""]
        while todo:
            below = todo.pop()
            try:
                todo += self._look_into(below, look)
            except OSError as error:
                if below and isinstance(error, FileNotFoundError | NotADirectoryError):
                    continue  # it went meanwhile
                unseen.append(below)
                look.odd[below] = f"it cannot be looked into: {error.strerror}"
        try:
            is_same = self._identify() == self._identity
        except OSError:
            is_same = False
        if not is_same or "" in unseen:
            raise FolderGoneError(f"{self.path} is no longer the folder that it was")
        look.unseen = tuple(unseen)
        return look

    def _look_into(self, below: str, look: Look) -> list[str]:
        folders: list[str] = []
        with os.scandir(self.path / below) as entries:
            for entry in entries:
                name = below + entry.name
                if name == STAGE:
                    continue
                try:
                    name.encode()
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(f"{name}/")
                        continue
                    found = entry.stat(follow_symlinks=False)
                    if stat.S_ISLNK(found.st_mode):
                        found = self._behind(name)
                    elif not stat.S_ISREG(found.st_mode):
                        raise _OddError("it is no regular file")
                except UnicodeEncodeError:
                    look.odd[name] = "its name is not UTF-8"
                except _OddError as odd:
                    look.odd[name] = str(odd)
                except FileNotFoundError:
                    continue  # it went meanwhile
                else:
                    look.sights[name] = sight_of(found)
        return folders

    def _behind(self, name: str) -> os.stat_result:
        """The file that a link leads to."""
        try:
            target = self.at(name).resolve(strict=True)
            found = target.stat()
        except (OSError, RuntimeError):
            raise _OddError("it is a link that leads nowhere") from None
        if not target.is_relative_to(self.path):
            raise _OddError("it is a link that leads out of the folder")
        if not stat.S_ISREG(found.st_mode):
            raise _OddError("it is a link to a folder")
        return found

    def sight(self, name: str) -> Sight | None:
        """A file as it is now; None if there is none."""
        try:
            return sight_of(self.at(name).stat())
        except OSError:
            return None

    def room_for(self, name: str) -> Path:
        """Where a file of that name is to be, its folders made.

        Raises:
            ValueError: no file can have that name here.
            OSError: its folders cannot be made.
        """
        if fault := name_fault(name):
            raise ValueError(fault)
        path = self.at(name)
        existing = next(each for each in path.parents if each.exists())
        if not existing.resolve().is_relative_to(self.path):
            raise ValueError("a link leads out of the folder there")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise ValueError("there is a file where its folder is to be") from None
        if path.is_dir() and not path.is_symlink():
            raise ValueError("there is a folder in its place")
        return path


class _OddError(Exception):
    """It is no file to send; the message says why."""


def name_fault(name: str) -> str:
    """Why no file can have this name; "" if one can."""
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\0" in name:
        return "no file can have that name"
    if any(len(part.encode()) > _NAME_BYTES for part in parts):
        return "its name is too long for a file"
    return ""


def sight_of(found: os.stat_result) -> Sight:
    """What a look keeps of a file."""
    return Sight(found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def is_written(descriptor: int) -> bool | None:
    """Whether any process has the file open for writing, or mapped so; None where the kernel does not say.

    It gives a read lease only on a file that nobody can write to (https://man7.org/linux/man-pages/man2/fcntl.2.html),
    whichever namespace they are in; to the file's owner, or with CAP_LEASE, and on file systems of this machine only.
    """
    try:
        # The signal if somebody opens it before the lease is returned: one that nobody minds.
        fcntl.fcntl(descriptor, _F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except BlockingIOError:
        return None if _is_remote(descriptor) else True
    except OSError:
        return None
    return False


def _is_remote(descriptor: int) -> bool:
    """Whether the file is on a file system that refuses leases for reasons of its own."""
    device = os.fstat(descriptor).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
        for line in mounts:
            mount, _, rest = line.partition(" - ")
            if mount.split()[2] == wanted:
                return rest.split()[0].startswith(_REMOTE)
    return False


_REMOTE = ("nfs", "cifs", "smb", "fuse", "9p", "ceph", "lustre", "gpfs", "beegfs", "virtiofs")


def time_text(mtime_ns: int) -> str:
    """A time as `MTIME` holds it."""
    seconds, nanoseconds = divmod(abs(mtime_ns), 10**9)
    return f"{'-' if mtime_ns < 0 else ''}{seconds}.{nanoseconds:09d}"


def time_of(text: str) -> int | None:
    """The time that `MTIME` holds, in nanoseconds; None if it is none."""
    if (found := _TIME.fullmatch(text)) is None:
        return None
    sign, seconds, fraction = found.groups()
    return (-1 if sign else 1) * (int(seconds) * 10**9 + int((fraction or "").ljust(9, "0")))
