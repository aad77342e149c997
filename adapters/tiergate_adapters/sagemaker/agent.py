"""Keeps a place in S3 as a folder is, from its restore to its last flush."""

from __future__ import annotations

import logging
import os
import queue
import threading
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tiergate.checkpoints.markers import Markers
from tiergate.errors import TiergateError
from tiergate.model import ObjectName, Role
from tiergate_adapters.place import Place
from tiergate_adapters.sagemaker import watching
from tiergate_adapters.sagemaker.folder import Folder
from tiergate_adapters.sagemaker.objects import S3_FAILURES, Ended, Lacking, delete, is_away, send, why
from tiergate_adapters.sagemaker.plan import Act, Plan, Task
from tiergate_adapters.sagemaker.restore import Restored, Restoring
from tiergate_adapters.sagemaker.watching import now_s
from tiergate_adapters.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import TracebackType

_LAST = (Role.MARKER, Role.POINTER)
_LOG = logging.getLogger(__name__)

LOGS = ("*tfevents*", "*.log")
"""Files that are appended to while others are written, and speak for nothing."""
FLUSH_S = 25.0
SETTLE_S = 2.0
PARALLEL_COUNT = 4
SWEEP_S = 10.0
"""How often the folder is looked at if nothing tells of a change: what notifications miss is found so."""
BLIND_SWEEP_S = 1.0
"""The same where there are no notifications."""
STUCK_S = 60.0
"""What is owed longer is told of."""
_GAP_S = 0.05
_AWAY_S = (0.5, 30.0)
_TELL_S = 30.0
"""How often the same trouble is told."""
_NAMED_COUNT = 10


class NotFlushedError(TiergateError):
    """Something is in the folder only; the message names it."""


@dataclass(frozen=True, slots=True)
class Left:
    """What S3 is owed: names with the reason, at most so many; how many they are, and their bytes."""

    named: tuple[tuple[str, str], ...]
    count: int
    size_bytes: int


class FolderSync:
    """A folder that is restored from a place in S3, and followed. As a context manager all at once: entering restores,
    a thread follows, leaving sends what is left.

    Args:
        folder: Made if it is not there.
        uri: s3://BUCKET/PREFIX; the bucket may be a directory bucket.
        instance: Keep the folder below this name there, so that instances with the same names of files do not collide;
            restored from there, too.
        parallel: Files on their way at a time.
        logs: Shell patterns of the names of files that are sent while they grow, and nothing waits for.
        markers: Shell patterns of further files that are sent last, as of `TIERGATE_MARKERS`.
        settle_s: How long a file must not have changed where nobody can say whether it is open for writing.
        flush_s: How long leaving may take.
        complain: Is told what is wrong.

    Raises:
        ValueError: the URI or the name is none.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        uri: str,
        *,
        instance: str | None = None,
        parallel: int = PARALLEL_COUNT,
        logs: Sequence[str] = LOGS,
        markers: Sequence[str] = (),
        settle_s: float = SETTLE_S,
        flush_s: float = FLUSH_S,
        complain: Callable[[str], None] = _LOG.warning,
    ) -> None:
        watching.require()
        place = Place.of(uri)
        if instance is not None:
            if not instance or "/" in instance or instance in (".", ".."):
                raise ValueError(f"{instance!r} is no name of an instance")
            place = place.below(instance)
        Path(folder).mkdir(parents=True, exist_ok=True)
        self.place = place
        self.folder = Folder(Path(folder))
        self.restored = Restored()
        self._store = Store(place)
        self._parallel = parallel
        self._settle_s = settle_s
        self._flush_s = flush_s
        self._complain = _Complaints(complain)
        self._markers = Markers(lambda *_: markers, 1 << 62)
        self._plan = Plan(
            place.key,
            self._role_of,
            lambda name: any(fnmatchcase(name.rpartition("/")[2], each) for each in logs),
            settle_s,
        )
        self._stopping = threading.Event()
        self._is_abandoned = False
        self._events: queue.SimpleQueue[tuple[Task, Any] | None] = queue.SimpleQueue()
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._busy_count = 0
        self._away_count = 0
        self._away_until_s = 0.0
        self._thread: threading.Thread | None = None
        self._outcome: Left | Exception | None = None

    # -- from without
    def restore(self) -> Iterator[Mapping[str, Any]]:
        """Bring everything from S3 that is newer there; tells meanwhile how far it is. Must be run to its end before
        `follow`.

        Raises:
            NotRestoredError: S3 refuses, the folder cannot be written, or it was called off.
        """
        restoring = Restoring(self._store, self.folder, self._parallel, self._rank_of, self._stopping, self._complain)
        yield from restoring.run()
        self.restored = restoring.restored
        for name, sight in self.restored.known.items():
            self._plan.known(name, sight)

    def follow(self, *, is_once: bool = False) -> Left:
        """Send and delete what changes until `stop` is called, then what is left, for so long as a flush may take.
        `is_once`: until nothing is left, or nothing but what S3 refuses.

        Raises:
            FolderGoneError: the folder is no longer there; nothing was deleted for that.
        """
        over = threading.Event()
        for _ in range(self._parallel):
            threading.Thread(target=self._work, name="tiergate-sync-send", daemon=True).start()
        watcher = watching.Watcher(self.folder.path, over, lambda: self._events.put(None), self._complain)
        watcher.start()
        try:
            return self._follow(watcher, is_once)
        finally:
            over.set()
            for _ in range(self._parallel):
                self._tasks.put(None)

    def stop(self, *, at_once: bool = False) -> None:
        """Have `follow` end, with a flush or without; or `restore`. May be called from a signal handler."""
        self._is_abandoned = self._is_abandoned or at_once
        self._stopping.set()
        self._events.put(None)

    def __enter__(self) -> Self:
        for _ in self.restore():
            pass

        def follow() -> None:
            try:
                self._outcome = self.follow()
            except Exception as error:
                self._outcome = error

        self._thread = threading.Thread(target=follow, name="tiergate-sync", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """
        Raises:
            NotFlushedError: something is in the folder only.
            FolderGoneError: the folder went.
        """
        assert self._thread is not None
        self.stop()
        self._thread.join()
        if error is not None:
            return
        if isinstance(self._outcome, Exception):
            raise self._outcome
        if self._outcome is not None and self._outcome.count:
            raise NotFlushedError(left_text(self._outcome, self))

    def _role_of(self, key: str) -> Role:
        return self._markers.role_of(ObjectName(self.place.bucket, key), 0)

    def _rank_of(self, name: str) -> int:
        return _LAST.index(role) + 1 if (role := self._role_of(self.place.key(name))) in _LAST else 0

    # -- the loop
    def _follow(self, watcher: watching.Watcher, is_once: bool) -> Left:
        end_s = float("inf")
        is_ending = is_told = False
        look_at_s = looked_s = gap_s = 0.0
        while True:
            if (is_once or self._stopping.is_set()) and not is_ending:
                is_ending, look_at_s = True, 0.0
                self._plan.hurry()
            if self._stopping.is_set():
                end_s = min(end_s, now_s() + self._flush_s)
            if (began_s := now_s()) >= look_at_s:
                self._look(began_s)
                looked_s = now_s()
                gap_s = max(_GAP_S, 2 * (looked_s - began_s))
                look_at_s = looked_s + max(SWEEP_S if watcher.is_watching else BLIND_SWEEP_S, 10 * gap_s)
            self._start_due()
            look_s, task_s = self._plan.next_s(now_s())
            look_at_s = min(look_at_s, max(look_s, looked_s + gap_s))
            if is_ending:
                is_over = not self._busy_count and (self._plan.is_done or (is_once and self._plan.is_refused))
                if is_over or self._is_abandoned or now_s() >= end_s:
                    return self._left()
            if end_s < float("inf") and not is_told:
                is_told = True
                self._complain(f"ending: {self._left().count} changes are sent first, for {self._flush_s:g} s at most")
            back_s = self._away_until_s if self._away_until_s > now_s() else float("inf")
            if self._take(min(look_at_s, task_s, end_s, back_s)):
                look_at_s = min(look_at_s, looked_s + gap_s)

    def _take(self, until_s: float) -> bool:
        """Take in what happened, once something has or the time has come; whether the folder may have changed."""
        is_changed = False
        timeout_s = max(0.0, until_s - now_s())
        try:
            event = self._events.get(timeout=timeout_s)
            while True:
                if event is None:
                    is_changed = True
                else:
                    self._end(*event)
                event = self._events.get_nowait()
        except queue.Empty:
            return is_changed

    def _look(self, began_s: float) -> None:
        look = self.folder.look()
        self._plan.look(look.sights, began_s, now_s(), look.is_unseen)
        for name, fault in look.odd.items():
            self._complain.once(f"{name!r} is passed over: {fault}")
        for name, reason in islice(self._plan.stuck(began_s - STUCK_S), _NAMED_COUNT):
            self._complain.once(f"{name!r} is not in S3 for a while now: {reason}")

    def _start_due(self) -> None:
        now = now_s()
        free_count = self._parallel - self._busy_count
        if self._away_count:
            # One asks whether S3 is back.
            free_count = 1 if now >= self._away_until_s and not self._busy_count else 0
        if free_count <= 0 or self._is_abandoned:
            return
        for task in self._plan.due(now, free_count):
            self._busy_count += 1
            self._tasks.put(task)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            outcome: Any
            try:
                if task.act is Act.SEND:
                    outcome = send(self._store, self.folder, task, self._settle_s)
                else:
                    outcome = delete(self._store, task)
            except Exception as error:  # the loop's to judge
                outcome = error
            self._events.put((task, outcome))

    def _end(self, task: Task, outcome: Any) -> None:
        self._busy_count -= 1
        if isinstance(outcome, Exception):
            self._fail(task, outcome)
            return
        if self._away_count and (task.act is Act.DELETE or outcome is Ended.DONE):
            self._away_count = 0
            self._complain.anew("S3 answers again")
        if task.act is Act.DELETE:
            self._plan.gone(task)
            if not outcome:
                self._complain(f"{task.name!r} was deleted here, but what S3 has is another's: it stays")
        elif isinstance(outcome, Lacking):
            self._plan.lacking(task, outcome.name, now_s())
        elif outcome is Ended.DONE:
            self._plan.sent(task, now_s())
        elif outcome is Ended.OPEN:
            self._plan.opened(task, now_s())
        elif outcome is Ended.UNTOLD:
            self._plan.untold(task)
        else:
            self._plan.changed(task, now_s())

    def _fail(self, task: Task, error: Exception) -> None:
        if not isinstance(error, (*S3_FAILURES, OSError)):
            raise error
        if is_away(error):
            first_s, most_s = _AWAY_S
            pause_s = min(first_s * 2 ** min(self._away_count, 20), most_s)
            self._away_count += 1
            self._away_until_s = now_s() + pause_s
            self._plan.failed(task, why(error), now_s(), self._away_until_s)
            self._complain(f"S3 does not answer ({why(error)}); next try in {pause_s:.1f} s")
        else:
            self._plan.failed(task, why(error), now_s())
            self._complain(f"{task.name!r} cannot be {'sent' if task.act is Act.SEND else 'deleted'}: {why(error)}")

    def _left(self) -> Left:
        left = sorted(self._plan.left())
        named = tuple((name, reason) for name, _, reason in left[:_NAMED_COUNT])
        return Left(named, len(left), sum(size_bytes for _, size_bytes, _ in left))


def left_text(left: Left, sync: FolderSync) -> str:
    """What is left where, in one line."""
    if not left.count:
        return f"{sync.place} has all of {sync.folder.path}"
    named = ", ".join(f"{name!r} ({reason or 'it waits for others'})" for name, reason in left.named)
    more = ", …" if left.count > len(left.named) else ""
    changes = "change is" if left.count == 1 else "changes are"
    return f"{left.count} {changes} in {sync.folder.path} only, {left.size_bytes} bytes: {named}{more}"


class _Complaints:
    """Hands on what is wrong, the same not all the time."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said_s: dict[str, float] = {}
        self._lock = threading.Lock()

    def __call__(self, text: str) -> None:
        """Say it, unless something that begins alike was said a moment ago."""
        self._tell(text, _TELL_S)

    def once(self, text: str) -> None:
        """Say it if it was never said."""
        self._tell(text, float("inf"))

    def anew(self, text: str) -> None:
        """Say it; what was wrong before is over."""
        with self._lock:
            self._said_s = {each: at_s for each, at_s in self._said_s.items() if "passed over" in each}
        self._say(text)

    def _tell(self, text: str, every_s: float) -> None:
        with self._lock:
            at_s = now_s()
            if at_s - self._said_s.get(text, float("-inf")) < every_s:
                return
            if len(self._said_s) >= 10_000:
                self._said_s.clear()
            self._said_s[text] = at_s
        self._say(text)
