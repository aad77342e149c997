"""The background work of write-back: brings the origin up to what was committed, in the order the fence allows.

One uploader runs per node. Everything it must remember over its own death is in the directory, so starting again
is the same as going on. It owns a task per write in flight; a write that fails is tried again later with jitter, one
that the origin refuses for good is quarantined: kept, still served, named in status, tried again on demand.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from tiergate.clock import Clock
from tiergate.directory.base import Directory
from tiergate.errors import (
    FencedError,
    IntegrityError,
    OriginCredentialsError,
    OriginError,
    OriginRefusedError,
    OverloadedError,
)
from tiergate.model import LOST, Kind, ObjectName, OriginUpload, Pending
from tiergate.observe.logs import get_logger
from tiergate.observe.metrics import Metrics
from tiergate.policy.backoff import delay_s
from tiergate.writeback.due import Limits, plan
from tiergate.writeback.fence import Blocked, Reason
from tiergate.writeback.gate import Gate
from tiergate.writeback.sender import MissingBytesError, Sender

log = get_logger(__name__)

ATTEMPTS_LIMIT_COUNT = 100_000
"""Writes whose failed tries are counted."""

AHEAD_COUNT = 1000
"""Writes chosen at a look beyond those begun at once, so that the next is at hand when one ends."""

LOOK_SHARE = 0.2
"""Part of the time that looks may take where very much is pending."""

LOOK_PAUSE_LIMIT_S = 2.0

FIRST_LOOK_AGAIN_S = 0.25
LAST_LOOK_AGAIN_S = 1.0
"""While writes wait for those of other nodes, which nobody tells of."""

HOLD_LOOK_S = 0.5
"""How often is looked while something is held: memory may fill meanwhile, which nobody tells of."""

SHARED_LOOK_S = 5.0
"""How often is looked in a cluster without any sign: other nodes may give this one something to do."""


@dataclass(frozen=True, slots=True)
class UploaderSettings:
    """Bounds of the work: `begun_count` writes are begun at a time, so that a slot never waits for one."""

    begun_count: int
    backoff_base_s: float
    backoff_cap_s: float


class Uploader:
    """Works off what is pending."""

    def __init__(
        self,
        directory: Directory,
        sender: Sender,
        gate: Gate,
        clock: Clock,
        metrics: Metrics,
        settings: UploaderSettings,
        slots: asyncio.Semaphore,
    ) -> None:
        self._directory = directory
        self._sender = sender
        self._gate = gate
        self._clock = clock
        self._metrics = metrics
        self._settings = settings
        self._random = random.Random()
        self._tasks: dict[ObjectName, asyncio.Task[None]] = {}
        self._attempts: dict[str, int] = {}
        self._not_before: dict[ObjectName, float] = {}
        self._ready: deque[Pending] = deque()
        self._orphan_task: asyncio.Task[None] | None = None
        self._orphans_at_s = 0.0
        self._changed = asyncio.Event()
        self._slots = slots
        self._look_again_s = FIRST_LOOK_AGAIN_S
        self._in_the_way: frozenset[str] = frozenset()
        self._is_hurried = self._has_looked = False
        self.in_order: Callable[[Sequence[Pending]], Sequence[Pending]] = by_place
        """In which order what is owed is begun."""
        gate.on_wait = self._begin_next

    def wake(self) -> None:
        """Something was committed or released: look again."""
        self._changed.set()

    def retry_now(self) -> None:
        """Forget all waits after failures and look again."""
        self._not_before.clear()
        self._orphans_at_s = 0.0
        self._changed.set()

    def hurry(self) -> None:
        """The node is to stop: forget all waits after failures, and hold nothing for sets that are being sent anew."""
        self._gate.holds.stop()
        self._is_hurried = True
        self.retry_now()

    @property
    def in_flight_count(self) -> int:
        """Writes being worked on."""
        return len(self._tasks)

    def held_back(self, pending: Sequence[Pending]) -> list[tuple[Pending, Blocked]]:
        """Which of `pending` wait for others, and for what. In a cluster, where others are other nodes' too: as of the
        last look."""
        view = None if self._gate.is_shared else self._gate.view_of(pending)
        found = [(write, self._gate.blocked(write, view)) for write in pending if not write.quarantined]
        return [(write, blocked) for write, blocked in found if blocked is not None]

    def stays(self, pending: Sequence[Pending]) -> set[str]:
        """The uids of those that are not sent before this node stops: held for a marker that does not come, or waiting
        for such. None are known before the first look after `hurry`, and while anything is being sent."""
        names: set[ObjectName] = set()
        stays: set[str] = set()
        is_idle = self._has_looked and len(self._tasks) <= len(self._gate.waiting)
        held_back = self.held_back(pending) if is_idle and self._gate.holds.any else []
        while True:
            more = [
                write
                for write, blocked in held_back
                if write.uid not in stays and (blocked.reason is Reason.SET_STANDS or blocked.waits_for in names)
            ]
            if not more:
                return stays
            names |= {write.name for write in more}
            stays |= {write.uid for write in more}

    async def run(self) -> None:
        """Work until cancelled; what is in flight then is cancelled too and goes on at the next start."""
        failures = 0
        try:
            while True:
                self._changed.clear()
                began_s = self._clock.monotonic_s()
                try:
                    wake_s = await self._look()
                except Exception as error:  # Whatever it is: nobody else would go on with write-back.
                    failures += 1
                    if isinstance(error, OverloadedError):
                        log.warning("looking for what to write back failed, tried again", error=error)
                    else:
                        log.exception("looking for what to write back failed unexpectedly, tried again", error=error)
                    await self._clock.sleep(self._backoff_s(failures))
                    continue
                failures = 0
                await self._pause(self._clock.monotonic_s() - began_s)
                with suppress(TimeoutError):
                    # Not `wait_for`, which before Python 3.12 swallows a cancellation that meets the wake-up.
                    async with asyncio.timeout(wake_s):
                        await self._changed.wait()
        finally:
            self._ready.clear()
            tasks = [*self._tasks.values(), *([self._orphan_task] if self._orphan_task else [])]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pause(self, look_s: float) -> None:
        """A look takes as long as much is pending; what was chosen ahead is begun meanwhile."""
        pause_s = min(look_s / LOOK_SHARE - look_s, LOOK_PAUSE_LIMIT_S)
        if pause_s > 0.0:
            await self._clock.sleep(pause_s)

    async def _look(self) -> float | None:
        """Read what is pending and start what is due; the seconds until something else is, None for "when woken"."""
        is_hurried = self._is_hurried
        own = await self._gate.look()
        self._has_looked = is_hurried
        now_s = self._clock.wall_s()
        # No wait is longer than the longest backoff, even if the clock was set back.
        last_s = now_s + self._settings.backoff_cap_s
        self._not_before = {name: at_s for name, at_s in self._not_before.items() if now_s < at_s <= last_s}
        held: list[str] = []

        def blocked(write: Pending) -> Blocked | None:
            found = self._gate.blocked(write)
            if found is not None:
                held.append(write.uid)
            return found

        due = plan(
            self.in_order(own),
            in_flight=set(self._tasks),
            waiting=self._gate.waiting,
            limits=Limits(self._settings.begun_count + AHEAD_COUNT),
            now_s=now_s,
            not_before=self._not_before,
            blocked=blocked,
        )
        self._ready = deque(due.start)
        self._begin_ready()
        times_s = [due.wake_at_s, await self._look_after_orphans(now_s)]
        waits_s = [max(0.0, at_s - now_s) for at_s in times_s if at_s is not None]
        if self._gate.is_shared:
            waits_s.append(self._look_again(frozenset(held)))
        if self._gate.holds.any:
            waits_s.append(HOLD_LOOK_S)
        return min(waits_s, default=None)

    def _look_again(self, held: frozenset[str]) -> float:
        """When to look again though nothing happened here: ever later while the same writes are held back."""
        if not held and not self._gate.waiting:
            return SHARED_LOOK_S
        again_s = self._look_again_s if held == self._in_the_way else FIRST_LOOK_AGAIN_S
        self._in_the_way, self._look_again_s = held, min(2 * again_s, LAST_LOOK_AGAIN_S)
        return again_s

    def _begin_ready(self) -> None:
        """Begin what was chosen, as far as there is room. That it was superseded since is found when it begins."""
        room = self._settings.begun_count - (len(self._tasks) - len(self._gate.waiting))
        while self._ready and room > 0:
            write = self._ready.popleft()
            if write.name not in self._tasks:
                self._tasks[write.name] = asyncio.create_task(self._work(write))
                room -= 1

    def _begin_next(self) -> None:
        """A write waits: another has its slot, and what it waits for, which the last look may not have known of, may
        end by itself."""
        self._begin_ready()
        self._changed.set()

    async def _look_after_orphans(self, now_s: float) -> float | None:
        """Begin to abort uploads that nobody owns; when to try again what failed."""
        if self._orphan_task is not None:
            return None
        orphans = await self._directory.orphan_uploads()
        if not orphans:
            return None
        if now_s < self._orphans_at_s <= now_s + self._settings.backoff_cap_s:
            return self._orphans_at_s
        self._orphan_task = asyncio.create_task(self._abort_orphans(orphans))
        return None

    async def _abort_orphans(self, orphans: Sequence[tuple[ObjectName, OriginUpload]]) -> None:
        try:
            for name, upload in orphans:
                try:
                    await self._sender.abort(name, upload)
                    await self._directory.drop_leftovers(name, [upload])
                except Exception as error:  # The next one may go; this one is tried again.
                    self._orphans_at_s = self._clock.wall_s() + self._put_off(name, f"orphan {name}", error)
        finally:
            self._orphan_task = None
            self._changed.set()

    async def _work(self, write: Pending) -> None:
        """One try at one write, and what follows from how it ends."""
        began_s, outcome = self._clock.monotonic_s(), "cancelled"
        try:
            async with self._slots:
                outcome = await self._send(write)
        except Exception as error:  # It stays pending whatever happened, and must not be tried again at once.
            outcome = "failed"
            self._later(write, error)
        else:
            self._attempts.pop(write.uid, None)
        finally:
            self._metrics.writebacks.inc(1, write.kind, outcome)
            self._metrics.writeback_seconds.observe(self._clock.monotonic_s() - began_s, write.kind)
            del self._tasks[write.name]
            self._begin_ready()
            self._changed.set()

    async def _send(self, write: Pending) -> str:
        """The outcome, as the metric names it."""
        try:
            if write.kind is Kind.DELETE:
                await self._sender.delete(write, self._gate.visible)
            else:
                await self._sender.put(write, self._gate.visible)
        except FencedError:
            self._metrics.superseded_writes.inc()
            return "superseded"
        except OriginCredentialsError:
            raise
        except (OriginRefusedError, IntegrityError) as error:
            return await self._set_aside(write, error)
        return "done"

    async def _set_aside(self, write: Pending, error: OriginRefusedError | IntegrityError) -> str:
        pending = (await self._directory.get(write.name)).pending
        if pending is None or pending.uid != write.uid:
            # Superseded while it was sent: its bytes may be gone, and nobody needs it.
            self._metrics.superseded_writes.inc()
            return "superseded"
        if isinstance(error, IntegrityError):
            self._metrics.integrity_failures.inc(1, "memory")
        code = f"{error.status} {error.code}" if isinstance(error, OriginRefusedError) else type(error).__name__
        reason = f"{code}: {error.message}"
        if self._gate.is_shared and isinstance(error, MissingBytesError):
            reason = LOST  # Unless another node has them (`Survivors`).
        try:
            await self._directory.quarantine(write.name, write.uid, reason)
        except FencedError:
            # Another node owns it by now.
            self._metrics.superseded_writes.inc()
            return "superseded"
        log.error("write-back refused for good; kept and quarantined", reason=reason, **context(write))
        self._metrics.quarantines.inc()
        return "quarantined"

    def _later(self, write: Pending, error: Exception) -> None:
        self._not_before[write.name] = self._clock.wall_s() + self._put_off(write.name, write.uid, error)

    def _put_off(self, name: ObjectName, subject: str, error: Exception) -> float:
        """How long to wait before the next try, longer with each."""
        if len(self._attempts) > ATTEMPTS_LIMIT_COUNT:
            self._attempts.clear()
        attempt = self._attempts[subject] = self._attempts.get(subject, 0) + 1
        wait_s = self._backoff_s(attempt)
        self._metrics.writeback_retries.inc()
        facts: dict[str, object] = {
            "bucket": name.bucket,
            "key": name.key,
            "attempt": attempt,
            "wait_s": round(wait_s, 2),
        }
        if isinstance(error, (OriginError, OverloadedError)):
            log.warning("write-back will be tried again", error=f"{type(error).__name__}: {error.message}", **facts)
        else:
            log.exception("write-back failed unexpectedly, tried again", error=error, **facts)
        return wait_s

    def _backoff_s(self, attempt: int) -> float:
        return delay_s(attempt, self._random, self._settings.backoff_base_s, self._settings.backoff_cap_s)


def by_place(owed: Sequence[Pending]) -> Sequence[Pending]:
    """The order in which the directory gives it."""
    return owed


def context(write: Pending) -> dict[str, str]:
    """What every log line about a write-back carries."""
    return {"bucket": write.name.bucket, "key": write.name.key, "uid": write.uid, "kind": write.kind}
