"""Bringing memory and directory in line again after the death of any process. The normal start does the same."""

from tiergate.directory.base import Directory
from tiergate.memory.memory import Memory


async def recover(directory: Directory, memory: Memory) -> None:
    """Drop bytes that no committed version or upload holds, release what the dead were reading, and let bytes be
    evicted that the origin has. Safe at any time beside running processes."""
    mark = memory.mark()
    live = await directory.live_holders()
    memory.reconcile(live, mark)
    owed = {write.uid for write in await directory.pending()} | await directory.open_upload_ids()
    memory.settle_holders(owed, mark)
