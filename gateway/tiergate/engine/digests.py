"""Checksums of what is already in memory."""

import asyncio
from collections.abc import Sequence

from tiergate.memory.memory import Memory
from tiergate.model import Body, Version
from tiergate.s3.checksums import Checksum


class NotInMemoryError(Exception):
    """Not all of the bytes are in memory any more: what may be evicted can go at any moment."""


async def object_digest(memory: Memory, version: Version, algorithm: str) -> str:
    """The full-object checksum of a version in memory, in base64, computed off the event loop.

    Raises:
        NotInMemoryError: it is not whole there.
    """
    return await bodies_digest(memory, [part.body for part in version.parts], algorithm)


async def bodies_digest(memory: Memory, bodies: Sequence[Body], algorithm: str) -> str:
    """The checksum of bodies one after the other; as `object_digest`."""
    checksum = Checksum(algorithm)
    for body in bodies:
        if not body.size_bytes:
            continue
        pin = memory.pin(body.uid)
        if pin is None:
            raise NotInMemoryError
        with pin:
            for index in range(body.block_count):
                views = pin.block(index)
                if views is None:
                    raise NotInMemoryError
                for view in views:
                    await asyncio.to_thread(checksum.update, view)
    return checksum.digest_base64()
