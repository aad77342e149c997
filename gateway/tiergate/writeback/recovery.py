"""Bringing memory and directory in line again after the death of any process. The normal start does the same."""

from tiergate.directory.base import Directory
from tiergate.memory.memory import Memory
from tiergate.model import ObjectName


async def recover(directory: Directory, memory: Memory) -> int:
    """Drop bytes that no committed version or upload holds, release what the dead were reading, and let bytes be
    evicted that the origin has. How many pins of the dead there were. Safe at any time beside running processes."""
    mark = memory.mark()
    live = await directory.live_holders()
    pins_count = memory.reconcile(live, mark)
    memory.settle_holders(await directory.owed_holders(), mark)
    for step in await directory.steps():
        if not memory.is_alive(step.holder):
            if step.through:
                await doubt(directory, step.name)
            await directory.end_step(step)
    return pins_count


async def doubt(directory: Directory, name: ObjectName) -> None:
    """The origin may or may not have taken a write of the key that nobody acknowledged: ask it before the next read."""
    record = (await directory.get(name)).record
    if record is not None and record.version is not None:
        await directory.revalidated(name, record.version.uid, 0.0)
