"""Checksums of what is already in memory."""

import asyncio
from collections.abc import Sequence

from tiergate.memory.memory import Memory
from tiergate.model import Body, Version
from tiergate.s3.checksums import Checksum


async def object_digest(memory: Memory, version: Version, algorithm: str) -> str:
    """The full-object checksum of a version that is whole in memory, in base64, computed off the event loop."""
    return await bodies_digest(memory, [part.body for part in version.parts], algorithm)


async def bodies_digest(memory: Memory, bodies: Sequence[Body], algorithm: str) -> str:
    """The checksum of bodies that are whole in memory, one after the other; as `object_digest`."""
    checksum = Checksum(algorithm)
    for body in bodies:
        pin = memory.pin(body.uid)
        if pin is None:
            continue  # An empty body has no blocks.
        with pin:
            for index in range(body.block_count):
                for view in pin.block(index) or ():
                    await asyncio.to_thread(checksum.update, view)
    return checksum.digest_base64()
