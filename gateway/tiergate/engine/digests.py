"""Checksums of what is already in memory."""

import asyncio

from tiergate.memory.memory import Memory
from tiergate.model import Version
from tiergate.s3.checksums import Checksum


async def object_digest(memory: Memory, version: Version, algorithm: str) -> str:
    """The full-object checksum of a version that is whole in memory, in base64, computed off the event loop."""
    checksum = Checksum(algorithm)
    for part in version.parts:
        pin = memory.pin(part.body.uid)
        if pin is None:
            continue  # An empty body has no blocks.
        with pin:
            for index in range(part.body.block_count):
                for view in pin.block(index) or ():
                    await asyncio.to_thread(checksum.update, view)
    return checksum.digest_base64()
