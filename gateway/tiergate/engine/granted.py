"""A request body that another process of this machine wrote into memory: the request itself brings none."""

import asyncio
from collections.abc import AsyncIterator, Mapping

from tiergate.engine.calls import Framing, IncomingBody
from tiergate.errors import RequestError
from tiergate.memory.sharing import Granted
from tiergate.s3.bodyverifier import BodyVerifier
from tiergate.s3.checksums import HEADER_PREFIX, bodies_crc64nvme
from tiergate.s3.sigv4 import UNSIGNED_PAYLOAD

BLOCKS_ALGORITHM = "crc64nvme"
"""Of what the checksums of blocks are, so that of the whole follows from them."""


class GrantedBody:
    """Implements `IncomingBody`. What the request's x-amz-checksum- header says is said of the bytes in memory."""

    def __init__(self, granted: Granted, headers: Mapping[str, str]) -> None:
        """Raises:
        RequestError: as `BodyVerifier`.
        """
        self.granted = granted
        claims = {name: value for name, value in headers.items() if name != "content-md5"}
        self._verifier = BodyVerifier(claims.items(), UNSIGNED_PAYLOAD)
        self._claimed = headers.get(HEADER_PREFIX + BLOCKS_ALGORITHM, "")

    @property
    def size_bytes(self) -> int | None:
        return self.granted.size_bytes

    @property
    def framing(self) -> Framing:
        return Framing(chunked=False)

    async def pieces(self) -> AsyncIterator[bytes | memoryview]:
        await asyncio.to_thread(self.granted.prove)
        for view in self.granted.views():
            if self._verifier.algorithm not in ("", BLOCKS_ALGORITHM):
                await asyncio.to_thread(self._verifier.update, view)
            yield view

    async def verify(self) -> dict[str, str]:
        if self._verifier.algorithm != BLOCKS_ALGORITHM:
            return self._verifier.finish()
        computed = bodies_crc64nvme([self.granted.prove()])
        if computed is None or computed != self._claimed.strip():
            name = BLOCKS_ALGORITHM.upper()
            raise RequestError("BadDigest", f"The {name} you specified did not match the calculated checksum.")
        return {BLOCKS_ALGORITHM: computed}


def granted_of(body: IncomingBody) -> Granted | None:
    """The grant that a body is in; None for one that comes with its request."""
    return body.granted if isinstance(body, GrantedBody) else None
