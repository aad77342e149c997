"""Bringing memory and directory in line again after the death of any process. The normal start does the same."""

from collections.abc import Callable

from tiergate.clock import Clock
from tiergate.directory.base import Directory
from tiergate.errors import TiergateError
from tiergate.memory.memory import Memory
from tiergate.model import Actor, ObjectName
from tiergate.observe.logs import get_logger

log = get_logger(__name__)


async def recover(directory: Directory, memory: Memory) -> int:
    """Drop bytes that no committed version or upload holds, release what the dead were reading, and let bytes be
    evicted that the origin has. How many pins of the dead there were. Safe at any time beside running processes, of a
    node alone; in a cluster `recover_member` and `Sweep` do it."""
    mark = memory.mark()
    live = await directory.live_holders()
    pins_count = memory.reconcile(live, mark)
    memory.settle_holders(await directory.owed_holders(), mark)
    await end_steps(directory, lambda actor: not memory.is_alive(actor.token))
    return pins_count


async def recover_member(directory: Directory, memory: Memory, node: str) -> int:
    """The part of `recover` that a node of a cluster does at once: its own dead. The rest has to wait (`Sweep`)."""
    pins_count = memory.reap()

    def is_dead(actor: Actor) -> bool:
        is_own = actor.holder is not None and actor.holder.node == node
        return is_own and actor.token != "" and not memory.is_alive(actor.token)

    await end_steps(directory, is_dead)
    return pins_count


async def end_steps(directory: Directory, is_dead: Callable[[Actor], bool]) -> None:
    """End the steps of the dead."""
    for step in await directory.steps():
        if is_dead(Actor.parse(step.holder)):
            if step.through:
                await doubt(directory, step.name)
            await directory.end_step(step)


async def doubt(directory: Directory, name: ObjectName) -> None:
    """The origin may or may not have taken a write of the key that nobody acknowledged: ask it before the next read."""
    record = (await directory.get(name)).record
    if record is not None and record.version is not None:
        await directory.revalidated(name, record.version.uid, 0.0)


class Sweep:
    """The regular part of recovery on a node of a cluster. What peers put here and then did not commit in time is
    dropped; what the origin has may be evicted. Clean bytes go by their age alone. `keep_s`: as of `Promise`."""

    def __init__(self, directory: Directory, memory: Memory, clock: Clock, keep_s: float) -> None:
        self._directory = directory
        self._memory = memory
        self._clock = clock
        self._keep_s = keep_s

    async def once(self) -> None:
        """One sweep. It takes the time of the promise.

        Raises:
            OverloadedError: the directory does not answer; nothing was dropped.
        """
        mark = self._memory.mark()
        # Whoever is named by what is committed in time is seen by the reading after this.
        await self._clock.sleep(self._keep_s)
        live = await self._directory.live_holders()
        self._memory.reconcile(live, mark, keep_clean=True)
        self._memory.settle_holders(await self._directory.owed_holders(), mark)

    async def run(self) -> None:
        """Sweep until cancelled."""
        while True:
            try:
                await self.once()
            except TiergateError as error:
                log.warning("memory could not be swept, tried again later", error=error)
            await self._clock.sleep(self._keep_s / 2)
