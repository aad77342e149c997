"""What is to be sent and deleted, and when. Pure: it is told what was seen, when, and what came of its tasks.

The folder is looked at again and again; a *look* tells of every file how it is. What S3 is owed is the difference
between the last look and what S3 has by us. A file is sent at the earliest after a second look that began some time
after the first one had ended and saw it the same: so everything that was written before it has been seen by then.

- A marker waits for every other file it speaks for, a pointer for every marker and file below its folder.
- What went is deleted in S3 only if it was seen here and S3 has it by us; after everything that was changed before,
  pointers and markers first.
- A log is sent while it grows, nothing waits for it.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from tiergate.checkpoints.markers import ancestor_scopes, scope_of
from tiergate.model import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

SETTLED_S = 0.1
"""Longer than the steps in which a kernel keeps the times of files: who writes after that is seen to have written."""
REOPENED_S = 0.5
"""How often is asked whether a file is still open for writing: its closing is not told."""
LOG_DELAY_S = 1.0
"""How long a log may go on before it is sent."""
LOG_EVERY_S = 10.0
"""How often a log is sent at most."""
LACKING_S = 1.0
"""How often is asked whether S3 has what another instance brings."""
_BACKOFF_S = (0.5, 60.0)
_REFUSED_COUNT = 4
_TRIED_COUNT = 8


@dataclass(frozen=True, slots=True)
class Sight:
    """A file as it is at a look: it is another version if any of this differs."""

    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int


class Act(Enum):
    """What is done to an object."""

    SEND = "send"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class Task:
    """Something to do now. `sight`: the version to send; None to delete. `ours`: the versions that S3 may have by us.
    `quiet_s`: for how long the file has not changed."""

    act: Act
    name: str
    role: Role
    sight: Sight | None = None
    ours: tuple[Sight, ...] = ()
    quiet_s: float = 0.0
    is_log: bool = False


@dataclass(slots=True)
class _File:
    name: str
    key: str
    role: Role
    is_log: bool
    sight: Sight | None = None
    since_s: float = 0.0
    look: int = 0
    """The look that saw it first as it is."""
    is_settled: bool = False
    sent: Sight | None = None
    tried: tuple[Sight, ...] = ()
    """What was sent since and may have arrived."""
    is_busy: bool = False
    is_sent_last: bool = False
    not_before_s: float = 0.0
    failures_count: int = 0
    why: str = ""
    is_open: bool = False

    @property
    def is_owed(self) -> bool:
        return self.sight != self.sent or bool(self.tried)

    @property
    def is_holding(self) -> bool:
        """Whether others may have to wait for its sending."""
        return self.is_owed and self.sight is not None and not self.is_log


@dataclass(slots=True)
class _Holding:
    """How many of the files that are to be sent each scope holds."""

    plain: Counter[str] = field(default_factory=Counter)
    inner: Counter[str] = field(default_factory=Counter)
    markers: dict[str, dict[str, _File]] = field(default_factory=dict)

    def change(self, file: _File, by: int) -> None:
        own, *outer = ancestor_scopes(file.key)
        if file.role is Role.MARKER:
            _add(self.inner, outer, by)
            if by > 0:
                self.markers.setdefault(own, {})[file.name] = file
            else:
                del self.markers[own][file.name]
        elif file.role is not Role.POINTER:
            _add(self.plain, [own, *outer], by)

    def holds(self, file: _File) -> bool:
        """Whether something is to be sent before the file."""
        if file.role not in (Role.MARKER, Role.POINTER):
            return False
        scope = scope_of(file.key)
        if self.plain[scope] or self.inner[scope]:
            return True
        beside = self.markers.get(scope, {}).values()
        return any(file.role is Role.POINTER or _age(each) < _age(file) for each in beside if each is not file)


def _add(counts: Counter[str], scopes: list[str], by: int) -> None:
    for scope in scopes:
        counts[scope] += by
        if not counts[scope]:
            del counts[scope]


def _age(file: _File) -> tuple[int, str]:
    return (file.sight.mtime_ns if file.sight else 0, file.name)


class Plan:
    """See the module.

    Args:
        key_of: The key of a file's name.
        role_of: What an object of that key is for its set; `size_bytes` tells large ones.
        is_log: Whether a file of that name is a log.
        untold_s: How long a file must not have changed where nobody can say whether it is open for writing.
    """

    def __init__(
        self,
        key_of: Callable[[str], str],
        role_of: Callable[[str], Role],
        is_log: Callable[[str], bool],
        untold_s: float,
    ) -> None:
        self._key_of = key_of
        self._role_of = role_of
        self._is_log = is_log
        self._untold_s = untold_s
        self._files: dict[str, _File] = {}
        self._owed: dict[str, _File] = {}
        self._holding = _Holding()
        self._looks_count = 0
        self._is_last = False

    # -- what was seen
    def known(self, name: str, sight: Sight) -> None:
        """S3 has this version of a file, by us or brought from there."""
        file = self._file(name)
        with self._changing(file):
            file.sight = file.sent = sight

    def look(
        self, sights: Mapping[str, Sight], began_s: float, ended_s: float, is_unseen: Callable[[str], bool]
    ) -> None:
        """The folder was looked at. `is_unseen`: whether a name lies where nobody could look."""
        self._looks_count += 1
        for name, sight in sights.items():
            self._see(self._file(name), sight, began_s, ended_s)
        for name in [each for each in self._files if each not in sights]:
            if not is_unseen(name):
                self._see(self._files[name], None, began_s, ended_s)

    def _see(self, file: _File, sight: Sight | None, began_s: float, ended_s: float) -> None:
        if file.sight == sight and file.look:
            file.is_settled = file.is_settled or began_s - file.since_s >= SETTLED_S
            return
        with self._changing(file):
            if file.sight != sight:
                file.why, file.is_open = "", False
                if not file.is_log:
                    file.not_before_s = 0.0
                elif not file.is_owed:
                    file.not_before_s = max(file.not_before_s, ended_s + LOG_DELAY_S)
            file.sight, file.since_s, file.look = sight, ended_s, self._looks_count
            file.is_settled = False

    def _file(self, name: str) -> _File:
        if (file := self._files.get(name)) is None:
            key = self._key_of(name)
            file = self._files[name] = _File(name, key, self._role_of(key), self._is_log(name))
        return file

    # -- what is to be done
    def hurry(self) -> None:
        """Each log is sent once more, at once, and then no more."""
        self._is_last = True

    def due(self, now_s: float, limit_count: int) -> list[Task]:
        """What is to be done now, at most so much. Each task must be told the end of, by one of the methods below."""
        tasks: list[Task] = []
        deleting: Counter[str] | None = None
        oldest = 0.0
        for file in self._owed.values():
            if len(tasks) >= limit_count:
                break
            if file.is_busy or now_s < self._ready_s(file):
                continue
            if file.sight is not None:
                if not file.is_log and self._holding.holds(file):
                    continue
                tasks.append(self._task(file, Act.SEND, now_s))
            else:
                if deleting is None:
                    deleting, oldest = self._deleting(), self._oldest()
                # What came to be under another name may have been seen one look later.
                if oldest > file.look + 1 and not _is_told_of(file, deleting):
                    tasks.append(self._task(file, Act.DELETE, now_s))
        return tasks

    def _task(self, file: _File, act: Act, now_s: float) -> Task:
        file.is_busy = True
        ours = file.tried if file.sent is None else (file.sent, *file.tried)
        return Task(act, file.name, file.role, file.sight, ours, now_s - file.since_s, file.is_log)

    def _ready_s(self, file: _File) -> float:
        if file.is_log and file.sight is not None:
            if self._is_last:
                return float("inf") if file.is_sent_last else 0.0
            return file.not_before_s
        return file.not_before_s if file.is_settled else float("inf")

    def _oldest(self) -> float:
        """The first look that saw something which is to be sent. A file that is open for writing is not waited for:
        it was open already when something was deleted."""
        owed = (each for each in self._owed.values() if each.sight is not None and not each.is_log)
        return min((float(each.look) for each in owed if not each.is_open), default=float("inf"))

    def _deleting(self) -> Counter[str]:
        """The scopes of markers and pointers that are to be deleted, pointers apart."""
        found: Counter[str] = Counter()
        for file in self._owed.values():
            if file.sight is None and file.role in (Role.MARKER, Role.POINTER):
                scope = scope_of(file.key)
                found[scope] += 1
                if file.role is Role.POINTER:
                    found[scope + _POINTERS] += 1
        return found

    def next_s(self, now_s: float) -> tuple[float, float]:
        """When the next look is wanted, and when something else is to be done, at the earliest."""
        look_s = task_s = float("inf")
        for file in self._owed.values():
            if file.is_busy:
                continue
            if file.is_settled or file.is_log:
                at_s = self._ready_s(file)
                task_s = min(task_s, at_s if at_s > now_s else float("inf"))
            else:
                look_s = min(look_s, file.since_s + SETTLED_S)
        return look_s, task_s

    # -- what came of it
    def sent(self, task: Task, now_s: float) -> None:
        """S3 has it."""
        file = self._files[task.name]
        with self._changing(file):
            self._end(file)
            file.sent, file.tried, file.failures_count = task.sight, (), 0
            file.is_sent_last = self._is_last
            file.not_before_s = now_s + LOG_EVERY_S if file.is_log else 0.0

    def gone(self, task: Task) -> None:
        """S3 has it no longer, or has what is not ours."""
        file = self._files[task.name]
        with self._changing(file):
            self._end(file)
            file.sent, file.tried, file.failures_count = None, (), 0

    def changed(self, task: Task, now_s: float) -> None:
        """It was not sent, since it is no longer what it was."""
        file = self._files[task.name]
        self._end(file, "it changes")
        file.is_settled, file.since_s = False, now_s

    def opened(self, task: Task, now_s: float) -> None:
        """It was not sent, since it is open for writing."""
        file = self._files[task.name]
        self._end(file, "it is open for writing")
        file.is_open, file.not_before_s = True, now_s + REOPENED_S

    def untold(self, task: Task) -> None:
        """It was not sent, since nobody can say whether it is open for writing."""
        file = self._files[task.name]
        self._end(file, "it may still be written")
        file.not_before_s = file.since_s + self._untold_s

    def lacking(self, task: Task, name: str, now_s: float) -> None:
        """It was not sent, since it names another object that neither the folder nor S3 has."""
        file = self._files[task.name]
        self._end(file, f"it names {name}, which is nowhere yet")
        file.not_before_s = now_s + LACKING_S
        file.failures_count += 1

    def failed(self, task: Task, why: str, now_s: float, again_s: float | None = None) -> None:
        """It failed; what was sent may have arrived all the same. `again_s`: when it may be tried again, where that
        does not hang on the file."""
        file = self._files[task.name]
        with self._changing(file):
            self._end(file, why)
            if task.sight is not None:
                file.tried = (*file.tried, task.sight)[-_TRIED_COUNT:]
        if again_s is not None:
            file.not_before_s = again_s
            return
        first_s, most_s = _BACKOFF_S
        file.not_before_s = now_s + min(first_s * 2 ** min(file.failures_count, 20), most_s)
        file.failures_count += 1

    def _end(self, file: _File, why: str = "") -> None:
        file.is_busy, file.is_open, file.why = False, False, why

    @contextmanager
    def _changing(self, file: _File) -> Iterator[None]:
        """What is owed, and what holds others back, is counted anew."""
        if file.is_holding:
            self._holding.change(file, -1)
        yield
        if file.is_holding:
            self._holding.change(file, 1)
        if file.is_owed:
            self._owed.setdefault(file.name, file)
        else:
            self._owed.pop(file.name, None)
            if file.sight is None and not file.is_busy:
                del self._files[file.name]

    # -- what is left
    @property
    def is_done(self) -> bool:
        """Whether S3 is owed nothing."""
        return not any(self._left())

    @property
    def is_refused(self) -> bool:
        """Whether S3 is owed only what has failed, or lacked something, again and again."""
        return all(each.failures_count >= _REFUSED_COUNT for each in self._left())

    def left(self) -> Iterator[tuple[str, int, str]]:
        """What S3 is owed: the name, its bytes, and why, "" where it was not its turn yet."""
        for file in self._left():
            size_bytes = file.sight.size_bytes if file.sight else 0
            yield file.name, size_bytes, file.why or ("" if file.sight else "it is to be deleted")

    def stuck(self, before_s: float) -> Iterator[tuple[str, str]]:
        """What was owed before that time and is still, for a reason of its own, and why."""
        for file in self._owed.values():
            if file.why and file.since_s < before_s:
                yield file.name, file.why

    def _left(self) -> Iterator[_File]:
        return (each for each in self._owed.values() if not (self._is_last and each.is_log and each.is_sent_last))


_POINTERS = "\0"
"""No key has it."""


def _is_told_of(file: _File, deleting: Counter[str]) -> bool:
    """Whether a marker or pointer that is to be deleted speaks for the file."""
    if file.role is Role.POINTER:
        return False
    own, *outer = ancestor_scopes(file.key)
    if file.role is Role.MARKER:
        return bool(deleting[own + _POINTERS]) or any(deleting[scope] for scope in outer)
    return any(deleting[scope] for scope in (own, *outer))
