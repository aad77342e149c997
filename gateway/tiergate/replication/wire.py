"""What nodes say to each other: paths, documents, and the words for what went wrong."""

from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import quote, urlencode

import msgspec

from tiergate.errors import PeerError
from tiergate.model import Body, ObjectName
from tiergate.replication.base import Notice

BODIES = "/peer/v1/bodies/"
PULL = "/peer/v1/pull"
NOTICES = "/peer/v1/notices"
HELD = "/peer/v1/held"

MAX_DOCUMENT_BYTES = 16 << 20
"""Largest JSON document between nodes. A pull of `PULL_BODIES_COUNT` of the largest bodies there are is below it."""

PULL_BODIES_COUNT = 256
NOTICES_COUNT = 256
HELD_BODIES_COUNT = 4096
"""Bodies in one pull, notices in one message, bodies in one question."""


class Reason(StrEnum):
    """Why a peer could not do what it was asked for."""

    UNREACHABLE = "unreachable"
    SILENT = "silent"
    FULL = "full"
    REFUSED = "refused"
    BUSY = "busy"
    MISSING = "missing"
    MISMATCH = "mismatch"
    BROKEN = "broken"


class PeerFaultError(PeerError):
    """A `PeerError` that knows its reason."""

    def __init__(self, reason: Reason, message: str, **context: object) -> None:
        super().__init__(f"{reason}: {message}", **context)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Fault:
    """The answer to a request that was not done."""

    code: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class Taken:
    """The answer to a body: what the peer has of it, and of which epoch it speaks."""

    size_bytes: int
    blocks: bytes
    epoch: int


@dataclass(frozen=True, slots=True)
class Pull:
    """The order to hold bodies under `holder`. `at` names, for each, the nodes that have it."""

    holder: str
    bodies: tuple[Body, ...]
    at: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Pulled:
    """How a pull ended. `fault`: a `Reason`, or empty: all is held. Spaces come before it while the pull goes on."""

    epoch: int
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Notices:
    """A message with several notices."""

    notices: tuple[Notice, ...]


@dataclass(frozen=True, slots=True)
class Held:
    """The question which bodies are in memory whole: uids and sizes."""

    bodies: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class HeldAnswer:
    """Of each body that was asked for, whether it is."""

    is_held: tuple[bool, ...]


encode = msgspec.json.encode
"""A document as JSON."""

decode = msgspec.json.decode
"""A document from JSON. Raises msgspec.ValidationError or DecodeError."""


def push_target(name: ObjectName, holder: str, body_uid: str, size_bytes: int | None) -> str:
    """Path and query of a body that is sent. The names are for the logs of the peer."""
    size = {} if size_bytes is None else {"size": str(size_bytes)}
    query = {"holder": holder, "bucket": name.bucket, "key": name.key, **size}
    return f"{BODIES}{quote(body_uid, safe='')}?{urlencode(query)}"


def give_back_target(holder: str, body_uid: str) -> str:
    """Path and query of what a peer need not keep."""
    return f"{BODIES}{quote(body_uid, safe='')}?{urlencode({'holder': holder})}"


def block_target(body_uid: str, index: int) -> str:
    """Path of a block."""
    return f"{BODIES}{quote(body_uid, safe='')}/blocks/{index}"
