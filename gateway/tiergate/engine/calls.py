"""What travels between the edge and the engine: a call in, an answer out. No aiohttp here."""

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from tiergate.errors import RequestError
from tiergate.model import ObjectName
from tiergate.s3.operations import Target


class IncomingBody(Protocol):
    """A request body that is read once. It belongs to the request and dies with it."""

    @property
    def size_bytes(self) -> int | None:
        """Decoded length the client declared; None if it declared none."""
        ...

    def pieces(self) -> AsyncIterator[bytes | memoryview]:
        """The decoded bytes as they arrive; every checksum the client sent is computed on the way.

        Raises:
            RequestError: the framing is bad, or the body is shorter or longer than declared.
        """
        ...

    async def verify(self) -> dict[str, str]:
        """After the last piece: check everything the client proved; returns {algorithm: base64 checksum}.

        Raises:
            RequestError: BadDigest, XAmzContentSHA256Mismatch, SignatureDoesNotMatch, ...
        """
        ...

    @property
    def framing(self) -> "Framing":
        """How the client framed the body; a forwarder sends it on in a like manner."""
        ...


async def read_whole(body: IncomingBody, limit_bytes: int) -> bytes:
    """The whole body of a small request, verified.

    Raises:
        RequestError: MaxMessageLengthExceeded, or as `pieces` and `verify`.
    """
    found = bytearray()
    async for piece in body.pieces():
        found += piece
        if len(found) > limit_bytes:
            raise RequestError("MaxMessageLengthExceeded", "Your request was too large.")
    await body.verify()
    return bytes(found)


@dataclass(frozen=True, slots=True)
class Framing:
    """`trailer` names the checksum header that follows the body ("" for none)."""

    chunked: bool
    trailer: str = ""


class Outgoing(Protocol):
    """A response body: pieces in order, and what must be let go afterwards."""

    def pieces(self) -> AsyncIterator[bytes | memoryview]:
        """Each piece is valid until the next one is asked for."""
        ...

    async def close(self) -> None:
        """Release pins and connections; always called, once, whatever happened."""
        ...


@dataclass(frozen=True, slots=True)
class Call:
    """One request, authenticated and resolved. `headers` are lower case; `raw_query` carries no credentials;
    `params` are the members of the operation's input as botocore's model names them."""

    operation: str
    method: str
    target: Target
    raw_query: str
    headers: Mapping[str, str]
    params: dict[str, Any]
    body: IncomingBody
    request_id: str
    document: bytes = b""
    """The XML document of the few operations that have one, read and proved."""
    forwards: bool = False
    """The request is the origin's: it has parts that its operation does not know. `params` are empty then."""

    @property
    def name(self) -> ObjectName:
        """The object the request is about."""
        return ObjectName(self.target.bucket, self.target.key)

    def query(self, name: str) -> str | None:
        """The first value of a query parameter as the client wrote it, decoded."""
        return next((value or "" for key, value in self.target.query if key == name), None)


@dataclass(frozen=True, slots=True)
class Answer:
    """A response. `body` is bytes, or a stream of `size_bytes` (None: unknown, sent chunked)."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | Outgoing = b""
    size_bytes: int | None = None


def told(document: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Answer:
    """An answer that is a JSON document: to requests of our own."""
    return Answer(200, {"content-type": "application/json", **(headers or {})}, json.dumps(document).encode())
