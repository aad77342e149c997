"""Faults, where they happen, and the record of the requests they can happen to."""

import asyncio
import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

WAIT_TIMEOUT_S = 30.0
"""How long a test waits at most for something that must happen."""

_SUB_RESOURCES = (
    ("POST", "uploads", "CreateMultipartUpload"),
    ("PUT", "uploadId", "UploadPart"),
    ("POST", "uploadId", "CompleteMultipartUpload"),
    ("DELETE", "uploadId", "AbortMultipartUpload"),
    ("GET", "uploadId", "ListParts"),
    ("GET", "uploads", "ListMultipartUploads"),
    ("GET", "list-type", "ListObjectsV2"),
    ("GET", "location", "GetBucketLocation"),
    ("GET", "versioning", "GetBucketVersioning"),
    ("PUT", "versioning", "PutBucketVersioning"),
    ("GET", "tagging", "GetObjectTagging"),
    ("PUT", "tagging", "PutObjectTagging"),
    ("POST", "delete", "DeleteObjects"),
)
_OBJECT = {"GET": "GetObject", "HEAD": "HeadObject", "PUT": "PutObject", "DELETE": "DeleteObject"}
_BUCKET = {"GET": "ListObjects", "HEAD": "HeadBucket", "PUT": "CreateBucket", "DELETE": "DeleteBucket"}
_COPIES = {"PutObject": "CopyObject", "UploadPart": "UploadPartCopy"}


@dataclass
class Seen:
    """One request. `raw_target` is its path and query byte for byte; times are monotonic seconds; `status`
    is what the client got, `origin_status` what the origin said (None: nothing yet, or nothing at all), with the ETag
    that it told. `body_sha256` is of the payload as sent, an aws-chunked framing included; `is_whole`: all of it came.
    `upload_id`: of the upload that it belongs to, or that the origin began."""

    number: int
    method: str
    raw_target: str
    bucket: str
    key: str
    query: dict[str, str]
    operation: str
    headers: dict[str, str]
    started_s: float
    finished_s: float | None = None
    status: int | None = None
    origin_status: int | None = None
    origin_etag: str = ""
    body_bytes: int = 0
    is_whole: bool = False
    fault: "Action | None" = None
    upload_id: str = ""
    digest: "hashlib._Hash" = field(default_factory=hashlib.sha256, repr=False)

    @property
    def body_sha256(self) -> str:
        """Of the payload that came, in hex."""
        return self.digest.hexdigest()

    @property
    def raw_path(self) -> str:
        """The path byte for byte."""
        return self.raw_target.partition("?")[0]


class Gate:
    """A barrier: requests wait at it until it is released. Usable from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_open = False
        self._reached = threading.Event()
        self._waiting: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}

    def release(self) -> None:
        """Let everybody through, now and later."""
        with self._lock:
            self._is_open = True
            for event, loop in self._waiting.items():
                loop.call_soon_threadsafe(event.set)

    def wait_reached(self) -> None:
        """Block until a request has come to the gate.

        Raises:
            TimeoutError: none came.
        """
        if not self._reached.wait(WAIT_TIMEOUT_S):
            raise TimeoutError("no request came to the gate")

    async def reached(self) -> None:
        """As `wait_reached`, without blocking the event loop."""
        await asyncio.to_thread(self.wait_reached)

    async def pass_through(self) -> None:
        """Wait at the gate."""
        event = asyncio.Event()
        with self._lock:
            self._reached.set()
            if self._is_open:
                return
            self._waiting[event] = asyncio.get_running_loop()
        try:
            await event.wait()
        finally:
            with self._lock:
                self._waiting.pop(event, None)


@dataclass(frozen=True)
class Answer:
    """Answer in the origin's place. `after_origin`: only once the origin has done it (its answer is lost).
    `early`: without reading the request's body, then close."""

    status: int
    code: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    after_origin: bool = False
    early: bool = False


@dataclass(frozen=True)
class Cut:
    """Reset the connection: before the origin saw the request, or once it has done it (the answer is
    lost)."""

    after_origin: bool = False


@dataclass(frozen=True)
class Truncate:
    """Close the connection after so many bytes of the answer's body."""

    body_bytes: int


@dataclass(frozen=True)
class Corrupt:
    """Invert the byte at this offset of the answer's body."""

    offset_bytes: int


@dataclass(frozen=True)
class Hold:
    """Wait at the gate, before the origin sees the request or before the client sees the answer; then go
    on."""

    gate: Gate
    after_origin: bool = False


@dataclass(frozen=True)
class Slow:
    """Wait so long before the origin sees the request; then go on."""

    seconds: float


Action = Answer | Cut | Truncate | Corrupt | Hold | Slow


@dataclass
class Rule:
    """A fault and where it happens: the `nth` request (from 1) that fits, and those after it until it has
    happened `times` (None: always)."""

    action: Action
    fits: Callable[[Seen], bool]
    nth: int = 1
    times: int | None = 1
    matched: int = 0

    def takes(self, seen: Seen) -> bool:
        """Count a request, and say whether the fault happens to it."""
        if not self.fits(seen):
            return False
        self.matched += 1
        after = self.matched - self.nth
        return after >= 0 and (self.times is None or after < self.times)


def operation_of(method: str, key: str, query: dict[str, str], headers: dict[str, str]) -> str:
    """What AWS calls a request; `METHOD:sub-resource` for one that has no name here."""
    for needed, name, operation in _SUB_RESOURCES:
        if method == needed and name in query:
            return _COPIES.get(operation, operation) if "x-amz-copy-source" in headers else operation
    bare = [name for name in query if "-" not in name and query[name] == ""]
    if bare:
        return f"{method}:{bare[0]}"
    operation = (_OBJECT if key else _BUCKET).get(method, method)
    return _COPIES.get(operation, operation) if "x-amz-copy-source" in headers else operation
