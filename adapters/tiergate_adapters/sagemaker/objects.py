"""Single files on their way to S3, and from there."""

from __future__ import annotations

import os
import uuid
from contextlib import closing
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from botocore.exceptions import BotoCoreError, ClientError

from tiergate.checkpoints import layouts, lists
from tiergate.model import Role
from tiergate_adapters.sagemaker.folder import MTIME, STAGE, Folder, is_written, sight_of, time_of, time_text
from tiergate_adapters.store import UnreachableError, is_absent

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiergate_adapters.sagemaker.plan import Sight, Task
    from tiergate_adapters.store import ObjectReader, Store

CHUNK_BYTES = 8 << 20
"""What is read or written of a file at a time."""

S3_FAILURES = (BotoCoreError, ClientError, UnreachableError)
_SERVER_ERROR = 500
_NOT_AS_ASKED = (404, 412)


class Ended(Enum):
    """What came of a task."""

    DONE = "done"
    CHANGED = "changed"
    OPEN = "open"
    UNTOLD = "untold"


@dataclass(frozen=True, slots=True)
class Lacking:
    """A list that was not sent: it names an object that is nowhere yet."""

    name: str


def is_away(error: Exception) -> bool:
    """Whether S3 cannot be reached, or says that it is not itself: no fault of one object."""
    if isinstance(error, ClientError):
        status: int = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return status >= _SERVER_ERROR or status in (408, 429)
    return isinstance(error, BotoCoreError | UnreachableError)


def why(error: Exception) -> str:
    """An error in a few words."""
    if isinstance(error, ClientError):
        told = error.response.get("Error", {})
        return f"{told.get('Code', '')}: {told.get('Message', '')}".strip(": ")
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


# -- to S3
def send(store: Store, folder: Folder, task: Task, untold_s: float) -> Ended | Lacking:
    """Send a file, whole, as `task.sight` saw it, or not at all: what changes while it is read is not committed. Of a
    log what it held when it was opened.

    Raises:
        OSError: the file cannot be read.
        BotoCoreError, ClientError: it may have been sent, or not.
    """
    assert task.sight is not None
    try:
        descriptor = os.open(folder.at(task.name), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return Ended.CHANGED
    with closing(open(descriptor, "rb", buffering=0)) as file:
        seen = sight_of(os.fstat(descriptor))
        if seen != task.sight and not (task.is_log and seen.inode == task.sight.inode):
            return Ended.CHANGED
        if not task.is_log:
            written = is_written(descriptor)
            if written or (written is None and task.quiet_s < untold_s):
                return Ended.OPEN if written else Ended.UNTOLD
        if task.role is Role.MARKER and (lacking := _lacking(store, folder, task.name, task.sight.size_bytes)):
            return Lacking(lacking)
        writer = store.create(task.name, metadata={MTIME: time_text(task.sight.mtime_ns)})
        with writer:
            left_bytes = task.sight.size_bytes
            buffer = memoryview(bytearray(min(left_bytes, CHUNK_BYTES)))
            while left_bytes and (count := file.readinto(buffer[: min(left_bytes, len(buffer))])):
                writer.write(buffer[:count])
                left_bytes -= count
            if left_bytes or not (task.is_log or _is_still(folder, task, descriptor)):
                writer.abort()
                return Ended.CHANGED
    return Ended.DONE


def _is_still(folder: Folder, task: Task, descriptor: int) -> bool:
    seen = sight_of(os.fstat(descriptor))
    return seen == task.sight == folder.sight(task.name) and is_written(descriptor) is not True


def _lacking(store: Store, folder: Folder, name: str, size_bytes: int) -> str:
    """What a list names and is neither in the folder nor in S3: another instance has yet to bring it. "" for nothing,
    and for a list that cannot be read: it is no worse in S3 than here."""
    key, prefix = store.place.key(name), store.place.prefix
    if not layouts.is_list(key) or size_bytes > lists.LIST_LIMIT_BYTES:
        return ""
    try:
        members = lists.read_list(key, lambda _, start=0, end=None: folder.at(name).read_bytes()[start:end]).members
    except lists.DamagedSetError:
        return ""
    named = (member.removeprefix(prefix) for member in sorted(members) if member.startswith(prefix))
    return next((each for each in named if folder.sight(each) is None and store.size(each) is None), "")


def delete(store: Store, task: Task) -> bool:
    """Delete an object if S3 has one of the versions that are ours; else it stays, and the answer is False.

    Raises:
        BotoCoreError, ClientError: it may have been deleted, or not.
    """
    named = {"Bucket": store.place.bucket, "Key": store.place.key(task.name)}
    try:
        head = store.client.head_object(**named)
        found = (head["ContentLength"], _mtime_ns(head["Metadata"], head["LastModified"].timestamp()))
        if found not in [(each.size_bytes, each.mtime_ns) for each in task.ours]:
            return False
        store.client.delete_object(**named, IfMatch=head["ETag"])
    except ClientError as error:
        if is_absent(error):
            return True
        if error.response["ResponseMetadata"]["HTTPStatusCode"] in _NOT_AS_ASKED:
            return False
        raise
    return True


# -- from S3
class Fate(Enum):
    """What came of an object that was to be brought."""

    BROUGHT = "brought"
    SAME = "same"
    NEWER_HERE = "newer here"
    GONE = "gone"


def bring(
    store: Store, folder: Folder, name: str, here: Sight | None, is_over: Callable[[], bool]
) -> tuple[Fate, Sight | None]:
    """Bring an object into its file, unless a newer one is there; and what the file is then, None if somebody changed
    it at once.

    Raises:
        ValueError: no file can have that name here.
        OSError: the file cannot be written.
        BotoCoreError, ClientError: the object cannot be read.
        InterruptedError: it was called off.
    """
    path = folder.room_for(name)
    try:
        with closing(store.open(name)) as reader:
            mtime_ns = _mtime_ns(reader.metadata, reader.modified_s)
            if here is not None:
                if (here.size_bytes, here.mtime_ns) == (reader.size_bytes, mtime_ns):
                    return Fate.SAME, here
                if here.mtime_ns > mtime_ns:
                    return Fate.NEWER_HERE, None
            stage = folder.at(f"{STAGE}/{uuid.uuid4().hex}")
            try:
                written = _write(reader, str(stage), mtime_ns, is_over)
                if folder.sight(name) != here:
                    return Fate.NEWER_HERE, None
                stage.rename(path)
            finally:
                stage.unlink(missing_ok=True)
    except FileNotFoundError as error:
        if isinstance(error.__cause__, ClientError):
            return Fate.GONE, None
        raise
    seen = folder.sight(name)
    is_same = seen is not None and (seen.inode, seen.size_bytes, seen.mtime_ns) == written
    return Fate.BROUGHT, seen if is_same else None


def _write(reader: ObjectReader, path: str, mtime_ns: int, is_over: Callable[[], bool]) -> tuple[int, int, int]:
    with open(path, "xb", buffering=0) as file:
        for start in range(0, reader.size_bytes, CHUNK_BYTES):
            if is_over():
                raise InterruptedError("called off")
            piece = reader.range(start, min(start + CHUNK_BYTES, reader.size_bytes))
            while piece:
                piece = piece[file.write(piece) :]
        os.utime(file.fileno(), ns=(mtime_ns, mtime_ns))
        found = os.fstat(file.fileno())
    if found.st_size != reader.size_bytes:
        raise OSError(f"{found.st_size} of {reader.size_bytes} bytes came")
    return found.st_ino, found.st_size, found.st_mtime_ns


def _mtime_ns(metadata: Any, modified_s: float) -> int:
    """The time of modification that an object has: its file's, or its own if nobody told of a file."""
    told = time_of(metadata.get(MTIME, ""))
    return int(modified_s) * 10**9 if told is None else told
