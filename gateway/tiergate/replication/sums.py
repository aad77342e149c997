"""The checksums of a body's blocks, taken as it passes by."""

from collections.abc import Sequence

from tiergate.model import BLOCK_BYTES, BLOCK_CHECKSUM_BYTES
from tiergate.s3.checksums import block_checksum


class BlockSums:
    """One CRC-64/NVME for each block of what is written."""

    def __init__(self) -> None:
        self._done = bytearray()
        self._running = 0
        self.size_bytes = 0
        """How much was written."""

    def write(self, data: bytes) -> None:
        """Take the next piece."""
        view = memoryview(data)
        while len(view):
            room = BLOCK_BYTES - self.size_bytes % BLOCK_BYTES
            piece, view = view[:room], view[room:]
            self._running = block_checksum(piece, self._running)
            self.size_bytes += len(piece)
            if len(piece) == room:
                self._end_block()

    def blocks(self) -> bytes:
        """What `Body.blocks` is of all that was written. Nothing can be written afterwards."""
        if self.size_bytes % BLOCK_BYTES:
            self._end_block()
        return bytes(self._done)

    def _end_block(self) -> None:
        self._done += self._running.to_bytes(BLOCK_CHECKSUM_BYTES, "big")
        self._running = 0


def sum_of(views: Sequence[memoryview]) -> int:
    """The checksum of a block that lies in several places."""
    value = 0
    for view in views:
        value = block_checksum(view, value)
    return value
