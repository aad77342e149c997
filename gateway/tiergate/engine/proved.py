"""A client's body on its way to the origin, proved before it is whole there."""

from collections.abc import AsyncIterator

from tiergate.engine.calls import IncomingBody
from tiergate.errors import OverloadedError
from tiergate.model import BLOCK_BYTES, BLOCK_CHECKSUM_BYTES, Body
from tiergate.s3.checksums import block_checksum


class ProvedBody:
    """The last piece is kept back until everything the client proved was checked, so that a body that fails is never
    whole in the origin. Can be read once: what the client sent cannot be sent again."""

    def __init__(self, body: IncomingBody) -> None:
        self._body = body
        self._begun = False
        self.checksums: dict[str, str] = {}
        """What was proved, once the last piece was asked for: {algorithm: base64}."""

    def pieces(self) -> AsyncIterator[bytes | memoryview]:
        """The bytes, once.

        Raises:
            OverloadedError: asked a second time, for another try: what the client sent is gone.
        """
        if self._begun:
            raise OverloadedError("the origin failed in the middle of a body")
        self._begun = True
        return self._pieces()

    async def _pieces(self) -> AsyncIterator[bytes | memoryview]:
        held: bytes | memoryview | None = None
        async for piece in self._body.pieces():
            if held is not None:
                yield held
            self._count(piece)
            held = piece
        self.checksums = await self._body.verify()
        if held is not None:
            yield held

    def _count(self, piece: bytes | memoryview) -> None:
        """For those who keep something of what passes."""


class CheckedBody(ProvedBody):
    """One that also keeps a checksum for each block, so that the bytes can be checked when they are read back."""

    def __init__(self, body: IncomingBody) -> None:
        super().__init__(body)
        self._blocks = bytearray()
        self._block_crc = 0
        self._block_bytes = 0

    def body_of(self, uid: str, size_bytes: int) -> Body:
        """What went through, under a name."""
        if self._block_bytes:
            self._end_block()
        return Body(uid, size_bytes, bytes(self._blocks))

    def _count(self, piece: bytes | memoryview) -> None:
        view = memoryview(piece)
        while len(view):
            room = BLOCK_BYTES - self._block_bytes
            head, view = view[:room], view[room:]
            self._block_crc = block_checksum(head, self._block_crc)
            self._block_bytes += len(head)
            if self._block_bytes == BLOCK_BYTES:
                self._end_block()

    def _end_block(self) -> None:
        self._blocks += self._block_crc.to_bytes(BLOCK_CHECKSUM_BYTES, "big")
        self._block_crc = self._block_bytes = 0
