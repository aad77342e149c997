"""The background work of write-back: brings the origin up to what was committed, in the order the fence allows.

One uploader runs per node. Everything it must remember over its own death is in the directory, so starting again
is the same as going on. It owns a task per write in flight; a write that fails is tried again later with jitter, one
that the origin refuses for good is quarantined: kept, still served, named in status, tried again on demand.
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

from tiergate.clock import Clock
from tiergate.directory.base import Directory
from tiergate.errors import (
    FencedError,
    IntegrityError,
    OriginCredentialsError,
    OriginError,
    OriginRefusedError,
    TiergateError,
)
from tiergate.model import Kind, ObjectName, Pending
from tiergate.observe.logs import get_logger
from tiergate.observe.metrics import Metrics
from tiergate.policy.backoff import delay_s
from tiergate.writeback.due import Limits, plan
from tiergate.writeback.fence import Blocked, PendingView
from tiergate.writeback.gate import Gate
from tiergate.writeback.sender import Sender

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class UploaderSettings:
    """Bounds of the work: `begun_count` writes are begun at a time, so that the next is at hand when one ends."""

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
        self._changed = asyncio.Event()
        self._slots = slots

    def wake(self) -> None:
        """Something was committed or released: look again."""
        self._changed.set()

    def retry_now(self) -> None:
        """Forget all waits after failures and look again."""
        self._not_before.clear()
        self._changed.set()

    @property
    def in_flight_count(self) -> int:
        """Writes being worked on."""
        return len(self._tasks)

    def held_back(self, pending: Sequence[Pending]) -> list[tuple[Pending, Blocked]]:
        """Which of `pending` wait for others, and for what."""
        view = PendingView(pending)
        found = [(write, self._gate.blocked(write, view)) for write in pending if not write.quarantined]
        return [(write, blocked) for write, blocked in found if blocked is not None]

    async def run(self) -> None:
        """Work until cancelled; what is in flight then is cancelled too and goes on at the next start."""
        try:
            while True:
                self._changed.clear()
                wake_s = await self._look()
                try:
                    await asyncio.wait_for(self._changed.wait(), wake_s)
                except TimeoutError:
                    continue
        finally:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _look(self) -> float | None:
        """Read what is pending and start what is due; the seconds until something else is, None for "when woken"."""
        view = await self._gate.look()
        now_s = self._clock.wall_s()
        self._not_before = {name: at for name, at in self._not_before.items() if at > now_s}
        due = plan(
            view,
            in_flight=set(self._tasks),
            waiting=self._gate.waiting,
            limits=Limits(self._settings.begun_count),
            now_s=now_s,
            not_before=self._not_before,
            blocked=lambda write: self._gate.blocked(write, view),
        )
        for write in due.start:
            self._tasks[write.name] = asyncio.create_task(self._work(write))
        await self._abort_orphans()
        return None if due.wake_at_s is None else max(0.0, due.wake_at_s - now_s)

    async def _abort_orphans(self) -> None:
        for name, upload in await self._directory.orphan_uploads():
            if name in self._not_before:
                continue
            try:
                await self._sender.abort(name, upload)
            except OriginError as error:
                self._later(name, upload.upload_id, error)
            else:
                await self._directory.drop_leftovers(name, [upload])

    async def _work(self, write: Pending) -> None:
        """One try at one write, and what follows from how it ends."""
        try:
            async with self._slots:
                if write.kind is Kind.DELETE:
                    await self._sender.delete(write, self._gate.visible)
                else:
                    await self._sender.put(write, self._gate.visible)
        except FencedError:
            self._metrics.superseded_writes.inc()
        except OriginCredentialsError as error:
            self._later(write.name, write.uid, error)
        except (OriginRefusedError, IntegrityError) as error:
            await self._set_aside(write, error)
        except OriginError as error:
            self._later(write.name, write.uid, error)
        except TiergateError as error:
            log.exception("write-back failed unexpectedly", error=error, **context(write))
            self._later(write.name, write.uid, error)
        else:
            self._attempts.pop(write.uid, None)
        finally:
            del self._tasks[write.name]
            self._changed.set()

    async def _set_aside(self, write: Pending, error: TiergateError) -> None:
        reason = f"{type(error).__name__}: {error.message}"
        log.error("write-back refused for good; kept and quarantined", reason=reason, **context(write))
        self._metrics.quarantines.inc()
        await self._directory.quarantine(write.name, write.uid, reason)

    def _later(self, name: ObjectName, uid: str, error: TiergateError) -> None:
        if len(self._attempts) > ATTEMPTS_LIMIT_COUNT:
            self._attempts.clear()
        attempt = self._attempts[uid] = self._attempts.get(uid, 0) + 1
        wait_s = delay_s(attempt, self._random, self._settings.backoff_base_s, self._settings.backoff_cap_s)
        self._metrics.writeback_retries.inc()
        log.warning(
            "write-back will be tried again",
            bucket=name.bucket,
            key=name.key,
            attempt=attempt,
            wait_s=round(wait_s, 2),
            error=f"{type(error).__name__}: {error.message}",
        )
        self._not_before[name] = self._clock.wall_s() + wait_s


ATTEMPTS_LIMIT_COUNT = 100_000


def context(write: Pending) -> dict[str, str]:
    """What every log line about a write-back carries."""
    return {"bucket": write.name.bucket, "key": write.name.key, "uid": write.uid, "kind": write.kind}
