"""Objects under one S3 prefix, written and read through the nearest gateway.

The one way from an adapter to bytes. Nothing here knows a framework.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError

from tiergate_adapters.place import Place

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType
    from typing import Self

    from _typeshed import ReadableBuffer, WriteableBuffer

PART_BYTES = 64 << 20
"""What is sent at a time of an object whose length is not known."""

PERSIST_HEADER = "x-tiergate-persist"


class Store:
    """Objects below a place. Picklable: connections are made in the process that uses them, when it first does.

    `persist`: "memory" keeps what is written in the cluster's memory until it is promoted or dropped, "s3" brings it to
    S3, None leaves it to the policy of the prefix.
    """

    def __init__(self, place: Place, *, persist: str | None = None) -> None:
        self.place = place
        self.persist = persist
        self._client: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_client": None}

    def at(self, place: Place) -> Store:
        """The same store below another place."""
        other = Store(place, persist=self.persist)
        other._client = self._client
        return other

    def create(self, name: str) -> ObjectWriter:
        """Begin to write an object; it is there once the writer is closed, and not at all if it is aborted."""
        return ObjectWriter(self, self.place.key(name))

    def open(self, name: str) -> ObjectReader:
        """An object to read from, at one version.

        Raises:
            FileNotFoundError: there is none.
        """
        return ObjectReader(self, self.place.key(name))

    def size(self, name: str) -> int | None:
        """The length of an object in bytes; None if there is none."""
        try:
            head = self.client.head_object(Bucket=self.place.bucket, Key=self.place.key(name))
        except ClientError as error:
            if is_absent(error):
                return None
            raise
        size: int = head["ContentLength"]
        return size

    def names(self) -> list[str]:
        """All objects below the place, as names that `open` takes, sorted."""
        pages = self.client.get_paginator("list_objects_v2").paginate(
            Bucket=self.place.bucket, Prefix=self.place.prefix
        )
        return [each["Key"].removeprefix(self.place.prefix) for page in pages for each in page.get("Contents", ())]

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; those that are not there are no error."""
        for name in names:
            self.client.delete_object(Bucket=self.place.bucket, Key=self.place.key(name))

    @property
    def client(self) -> Any:
        """The S3 client, thread-safe."""
        if self._client is None:
            config = Config(retries={"mode": "standard", "total_max_attempts": 6})
            self._client = boto3.client("s3", config=config)
            if self.persist is not None:
                self._client.meta.events.register("before-sign.s3", self._mark)
        return self._client

    def _mark(self, request: Any, **_: object) -> None:
        if request.method in ("PUT", "POST"):
            request.headers[PERSIST_HEADER] = self.persist


class ObjectWriter(io.RawIOBase):
    """An object being written, from its first byte to its last. Close it to commit, or leave the context; by an
    exception or `abort` nothing of it is kept. One thread at a time."""

    def __init__(self, store: Store, key: str) -> None:
        super().__init__()
        self._store = store
        self._key = key
        self._held = bytearray()
        self._upload_id = ""
        self._parts: list[dict[str, Any]] = []
        self._at = 0
        self._is_over = False

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def write(self, data: ReadableBuffer, /) -> int:
        """Take bytes; they may change as soon as this returns."""
        view = memoryview(data).cast("B")
        self._held += view
        self._at += len(view)
        if len(self._held) >= PART_BYTES:
            self._send()
        return len(view)

    def _send(self) -> None:
        client, named = self._store.client, self._named
        if not self._upload_id:
            self._upload_id = client.create_multipart_upload(**named)["UploadId"]
        number = len(self._parts) + 1
        body, self._held = self._held, bytearray()
        answer = client.upload_part(**named, UploadId=self._upload_id, PartNumber=number, Body=body)
        self._parts.append({"PartNumber": number, "ETag": answer["ETag"]})

    @property
    def _named(self) -> dict[str, str]:
        return {"Bucket": self._store.place.bucket, "Key": self._key}

    def abort(self) -> None:
        """Give it up. Does nothing after `close`."""
        if self._is_over:
            return
        self._is_over = True
        if self._upload_id:
            self._store.client.abort_multipart_upload(**self._named, UploadId=self._upload_id)
        super().close()

    def close(self) -> None:
        """Commit: once this returns the object is acknowledged.

        Raises:
            ClientError, BotoCoreError: it is not.
        """
        if self._is_over:
            return
        try:
            if not self._upload_id:
                self._store.client.put_object(**self._named, Body=bytes(self._held))
            else:
                if self._held:
                    self._send()
                listed = {"Parts": self._parts}
                self._store.client.complete_multipart_upload(
                    **self._named, UploadId=self._upload_id, MultipartUpload=listed
                )
        except BaseException:
            self.abort()
            raise
        self._is_over = True
        super().close()

    def __del__(self) -> None:
        # The base class would commit what nobody finished.
        pass

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
    """One version of an object, to read ranges of it in any order. One thread at a time; close it."""

    def __init__(self, store: Store, key: str) -> None:
        super().__init__()
        self._store = store
        self._named = {"Bucket": store.place.bucket, "Key": key}
        try:
            head = store.client.head_object(**self._named)
        except ClientError as error:
            if is_absent(error):
                raise FileNotFoundError(f"s3://{store.place.bucket}/{key}") from error
            raise
        self.size_bytes: int = head["ContentLength"]
        self._etag: str = head["ETag"]
        self._at = 0

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
        if end <= self._at:
            return 0
        data = self.range(self._at, end)
        view[: len(data)] = data
        self._at = end
        return len(data)

    def range(self, start: int, end: int) -> memoryview:
        """Bytes [start, end), without copying where they lie in this node's memory. Valid until the reader is closed;
        not to be written to.

        Raises:
            ClientError: the object was replaced or deleted meanwhile (412, 404), or cannot be read.
        """
        if start >= end:
            return memoryview(b"")
        answer = self._store.client.get_object(**self._named, IfMatch=self._etag, Range=f"bytes={start}-{end - 1}")
        return memoryview(answer["Body"].read())


def is_absent(error: ClientError) -> bool:
    """Whether S3 says that there is no such object."""
    return error.response.get("Error", {}).get("Code") in ("404", "NoSuchKey", "NotFound")
