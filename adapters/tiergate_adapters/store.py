"""Objects under one S3 prefix, written and read through the nearest gateway.

The one way from an adapter to bytes. Nothing here knows a framework.
"""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING, Any

from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError

from tiergate_adapters.place import Place
from tiergate_adapters.route import Route, UnreachableError, log
from tiergate_adapters.slabs import copy, cut, drop_share, together
from tiergate_adapters.uploads import Upload, release

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import TracebackType
    from typing import Self, TypeVar

    from _typeshed import ReadableBuffer, WriteableBuffer

    from tiergate_adapters.slabs import Share

    T = TypeVar("T")

__all__ = ["ObjectReader", "ObjectWriter", "Store", "UnreachableError", "is_absent"]

S3 = "s3"
"""The tier that readers may trust, in `trust`."""

WINDOW_BYTES = 1 << 30
"""So much of an object is mapped at a time."""

AHEAD_BYTES = 8 << 20
"""What is fetched at a time for reads that ask for less, of what is not mapped."""

MAP_HEADER = "x-tiergate-map"
MAPPED_HEADER = "x-tiergate-mapped"
TIER_HEADER = "x-tiergate-tier"


class Store:
    """Objects below a place. Picklable: connections are made in the process that uses them, when it first does.
    Thread-safe.

    `persist`: "memory" keeps what is written in the cluster's memory until it is promoted or dropped, "s3" brings it to
    S3, None leaves it to the policy of the prefix.

    The gateway is that of the AWS environment. `endpoints` are others to ask when it does not answer, beside its peers
    (`TIERGATE_ENDPOINTS`); `origin` is the endpoint of S3 itself, "aws" for Amazon's (`TIERGATE_ORIGIN`, else what the
    gateway said). When no gateway answers, writes go to S3; reads raise UnreachableError, unless `trust` holds "s3": it
    lacks what is not written back yet.
    """

    def __init__(
        self,
        place: Place,
        *,
        persist: str | None = None,
        endpoints: Sequence[str] = (),
        origin: str | None = None,
        trust: Sequence[str] = (),
        route: Route | None = None,
    ) -> None:
        self.place = place
        self.persist = persist
        self.trust = tuple(trust)
        self.route = route or Route(tuple(endpoints), origin, persist)

    def at(self, place: Place) -> Store:
        """The same store below another place."""
        return Store(place, persist=self.persist, trust=self.trust, route=self.route)

    def create(
        self, name: str, *, size_bytes: int | None = None, metadata: Mapping[str, str] | None = None
    ) -> ObjectWriter:
        """Begin to write an object; it is there once the writer is closed, and not at all if it is aborted.
        `size_bytes`: how long it is to become, if that is known: room for it is asked for at once. `metadata` is the
        user's own, in ASCII."""
        return ObjectWriter(self, self.place.key(name), size_bytes, metadata)

    def open(self, name: str) -> ObjectReader:
        """An object to read from, at one version.

        Raises:
            FileNotFoundError: there is none.
            UnreachableError: who knows does not answer.
        """
        return ObjectReader(self, self.place.key(name))

    def size(self, name: str) -> int | None:
        """The length of an object in bytes; None if there is none.

        Raises:
            UnreachableError: who knows does not answer.
        """
        key = self.place.key(name)
        try:
            head = self._read(f"head of {name}", lambda client: client.head_object(Bucket=self.place.bucket, Key=key))
        except ClientError as error:
            if is_absent(error):
                return None
            raise
        size: int = head["ContentLength"]
        return size

    def names(self) -> list[str]:
        """All objects below the place, as names that `open` takes, sorted.

        Raises:
            UnreachableError: who knows does not answer.
        """

        def listed(client: Any) -> list[str]:
            pages = client.get_paginator("list_objects_v2").paginate(Bucket=self.place.bucket, Prefix=self.place.prefix)
            return [each["Key"].removeprefix(self.place.prefix) for page in pages for each in page.get("Contents", ())]

        return self._read("listing", listed)

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; those that are not there are no error. Never past the gateways: what they have not written
        back yet would come again.

        Raises:
            UnreachableError: no gateway answers.
        """
        for name in names:
            self._delete(name)

    def _delete(self, name: str) -> None:
        named = {"Bucket": self.place.bucket, "Key": self.place.key(name)}
        self.route.change(f"{self.place}: {name} is deleted", lambda client: client.delete_object(**named))

    @property
    def client(self) -> Any:
        """The S3 client of the gateway, thread-safe."""
        return self.route.client()

    def _read(self, what: str, ask: Callable[[Any], T]) -> T:
        self.route.look()  # So that it is known who else can be asked, should the gateway not answer one day.
        return self.route.read(f"{self.place}: {what}", ask, trust_s3=S3 in self.trust)


class ObjectWriter(io.RawIOBase):
    """An object being written, from its first byte to its last. Close it to commit, or leave the context; by an
    exception or `abort` nothing of it is kept. One thread at a time, in the process that began it."""

    def __init__(
        self, store: Store, key: str, size_bytes: int | None = None, metadata: Mapping[str, str] | None = None
    ) -> None:
        super().__init__()
        self._upload = Upload(store.route, store.place.bucket, key, size_bytes, metadata or {})
        self._at = 0
        self._is_over = False

    @property
    def etag(self) -> str:
        """Once it is closed: the ETag that it has."""
        return self._upload.etag

    @property
    def ack(self) -> str:
        """Once it is closed: the rule that it was acknowledged under; empty where S3 itself took it."""
        return self._upload.ack

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def write(self, data: ReadableBuffer, /) -> int:
        """Take bytes; they may change as soon as this returns.

        Raises:
            ClientError, BotoCoreError, UnreachableError: what was taken before can be sent nowhere.
        """
        view = memoryview(data).cast("B")
        self._upload.write(view)
        self._at += len(view)
        return len(view)

    def abort(self) -> None:
        """Give it up. Does nothing after `close`."""
        if self._is_over:
            return
        self._is_over = True
        self._upload.abort()
        super().close()

    def close(self) -> None:
        """Commit: once this returns the object is acknowledged.

        Raises:
            ClientError, BotoCoreError, UnreachableError: it is not.
        """
        if self._is_over:
            return
        try:
            self._upload.close()
        except BaseException:  # Whatever it was, nobody will finish it.
            self.abort()
            raise
        self._is_over = True
        super().close()

    def __del__(self) -> None:
        # The base class would commit what nobody finished.
        if not getattr(self, "_is_over", True):
            self._upload.drop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abort()


class ObjectReader(io.RawIOBase):
    """One version of an object, to read ranges of it in any order. One thread at a time, in the process that opened it;
    close it."""

    def __init__(self, store: Store, key: str) -> None:
        super().__init__()
        self._store = store
        self._route = store.route
        self._named = {"Bucket": store.place.bucket, "Key": key}
        self.key = key
        try:
            head = store._read(f"head of {key}", lambda client: client.head_object(**self._named))
        except ClientError as error:
            if is_absent(error):
                raise FileNotFoundError(f"s3://{store.place.bucket}/{key}") from error
            raise
        self.size_bytes: int = head["ContentLength"]
        self.etag: str = head["ETag"]
        self.modified_s: float = head["LastModified"].timestamp()
        self.metadata: Mapping[str, str] = head["Metadata"]
        self._at = 0
        self._windows: dict[int, list[memoryview]] = {}
        self._pins: list[tuple[Share, str, str]] = []
        self._may_map = head["ResponseMetadata"]["HTTPHeaders"].get(TIER_HEADER) == "memory"
        self._ahead = (0, memoryview(b""))
        self._pid = os.getpid()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = (0, self._at, self.size_bytes)[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        view = memoryview(buffer).cast("B")
        end = min(self._at + len(view), self.size_bytes)
        done = 0
        for piece in self._near(self._at, end) if end > self._at else ():
            copy(view[done : done + len(piece)], piece)
            done += len(piece)
        self._at += done
        return done

    def _near(self, start: int, end: int) -> list[memoryview]:
        """As `views`, fetching more than is asked for where it is fetched."""
        mapped = self.mapped(start, end)
        if mapped is not None:
            return mapped
        at, held = self._ahead
        if not at <= start <= end <= at + len(held):
            at, held = start, self.fetched(start, min(self.size_bytes, max(end, start + AHEAD_BYTES)))
            self._ahead = at, held
        return [held[start - at : end - at]]

    def range(self, start: int, end: int) -> memoryview:
        """Bytes [start, end), without copying where they lie in this node's memory in one piece. Valid until the reader
        is closed; not to be written to.

        Raises:
            ClientError: the object was replaced or deleted meanwhile (412, 404), or cannot be read.
            UnreachableError: who has it does not answer.
        """
        return together(self.views(start, end))

    def views(self, start: int, end: int) -> list[memoryview]:
        """As `range`, in as many pieces as they lie in."""
        end = min(end, self.size_bytes)
        if start >= end:
            return []
        mapped = self.mapped(start, end)
        return mapped if mapped is not None else [self.fetched(start, end)]

    def fetched(self, start: int, end: int) -> memoryview:
        """As `range`, by a request, wherever they lie. Any thread may, also several at a time."""

        def fetch(client: Any) -> memoryview:
            answer = client.get_object(**self._named, IfMatch=self.etag, Range=f"bytes={start}-{end - 1}")
            return memoryview(answer["Body"].read())

        return self._store._read(f"bytes of {self._named['Key']}", fetch)

    def mapped(self, start: int, end: int) -> list[memoryview] | None:
        """The bytes as they lie in this node's memory, in as many pieces; None where they do not, or not all."""
        if self._pid != os.getpid():  # Forked since: its parent's pins hold only as long as the parent likes.
            self._pid, self._pins, self._windows = os.getpid(), [], {}
        found: list[memoryview] = []
        for window in range(start // WINDOW_BYTES, -(-end // WINDOW_BYTES)):
            if window not in self._windows and not self._map(window):
                return None
            base = window * WINDOW_BYTES
            found += cut(self._windows[window], max(start - base, 0), min(end - base, WINDOW_BYTES))
        return found

    def _map(self, window: int) -> bool:
        """Have a window of the object pinned for this process, and map it."""
        share = self._route.share() if self._may_map else None
        if share is None:
            self._may_map = False
            return False
        start, end = window * WINDOW_BYTES, min(self.size_bytes, (window + 1) * WINDOW_BYTES)
        headers = {MAP_HEADER: share.token, "If-Match": self.etag, "Range": f"bytes={start}-{end - 1}"}
        bucket, key = self._named["Bucket"], self._named["Key"]
        try:
            reply = self._route.ask("GET", bucket, key, headers=headers, mapped=MAPPED_HEADER)
        except (BotoCoreError, HTTPClientError):
            self._may_map = False  # Whoever fetches it finds out who else can be asked.
            return False
        if not reply.is_done or not reply.body:
            self._may_map = False
            if reply.code == "InvalidLease":
                drop_share(share)
                self._route.look(again=True)
            return False
        document = reply.document()
        self._pins += [(share, body_uid, tag) for body_uid, tag in document["pins"]]
        try:
            self._windows[window] = [view.toreadonly() for view in share.views(document["extents"])]
        except (OSError, ValueError) as error:
            log.info("bytes in the memory of the node cannot be mapped, they are fetched: %s", error)
            self._may_map = False
            return False
        return True

    def close(self) -> None:
        """Let go of what this process pinned."""
        if not self.closed:
            pins, self._pins, self._windows = self._pins, [], {}
            if pins:
                release(self._route, pins)
        super().close()


def is_absent(error: ClientError) -> bool:
    """Whether S3 says that there is no such object."""
    return error.response.get("Error", {}).get("Code") in ("404", "NoSuchKey", "NotFound")
