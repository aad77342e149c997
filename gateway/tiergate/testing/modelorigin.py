"""An origin in memory for tests that decide when each of its steps happens, and whether its answer comes.

It has the methods of `tiergate.origin.client.OriginClient` that write-back calls. Each call waits in `calls` until the
test lets it happen.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar, cast

from tiergate.errors import OriginRefusedError, OriginTemporaryError
from tiergate.model import ObjectName
from tiergate.origin.answers import Condition, OriginEntry, OriginObject, OriginPage, PutAnswer
from tiergate.origin.client import Chunks, OriginClient
from tiergate.origin.copying import CopySource
from tiergate.origin.retry import Tries
from tiergate.origin.stamp import STAMP_HEADER, Stamp, parse_stamp

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Held:
    """An object of the origin. `uid` is that of the gateway's version, empty for a foreign one."""

    etag: str
    data: bytes
    stamp: Stamp | None

    @property
    def uid(self) -> str:
        return self.stamp.uid if self.stamp else ""


@dataclass(slots=True)
class Upload:
    """A multipart upload in progress."""

    name: ObjectName
    stamp: Stamp | None
    parts: dict[int, tuple[str, bytes]] = field(default_factory=dict)


@dataclass(slots=True)
class Call:
    """A request on its way."""

    operation: str
    name: ObjectName
    happen: Callable[[], object]
    answer: "asyncio.Future[object]"

    @property
    def is_open(self) -> bool:
        return not self.answer.done()


class ModelOrigin:
    """See the module. `after` is called whenever something was changed. With `eager` calls happen at once."""

    def __init__(self, after: Callable[[], None] = lambda: None) -> None:
        self.objects: dict[ObjectName, Held] = {}
        self.uploads: dict[str, Upload] = {}
        self.calls: list[Call] = []
        self.done: list[tuple[str, str]] = []
        """Operation and key of each call that happened."""
        self.eager = False
        self.refuse: dict[str, OriginRefusedError] = {}
        """What an operation is refused with, once."""
        self.heeds_copy_conditions = True
        self.told_of_copies: dict[str, str] = {}
        """Headers of the answers to copies."""
        self._after = after
        self._numbers = itertools.count(1)

    @property
    def client(self) -> OriginClient:
        """The model in the place of a client."""
        return cast(OriginClient, self)

    # -- the test's side
    def open_calls(self) -> list[Call]:
        """The requests under way, oldest first."""
        self.calls = [call for call in self.calls if call.is_open]
        return self.calls

    def let(self, call: Call, *, heard: bool = True) -> None:
        """Let a request happen; its answer is lost unless `heard`."""
        self.done.append((call.operation, call.name.key))
        try:
            result = call.happen()
        except OriginRefusedError as refused:
            call.answer.set_exception(refused)
            return
        self._after()
        if heard:
            call.answer.set_result(result)
        else:
            call.answer.set_exception(OriginTemporaryError("the answer was lost"))

    def lose(self, call: Call) -> None:
        """The request never came."""
        call.answer.set_exception(OriginTemporaryError("the request was lost"))

    def put_foreign(self, name: ObjectName, data: bytes) -> str:
        """Somebody writes behind the gateway."""
        held = Held(self._etag(), data, None)
        self.objects[name] = held
        return held.etag

    async def _call(self, operation: str, name: ObjectName, happen: Callable[[], T]) -> T:
        def refused_or_done() -> T:
            refusal = self.refuse.pop(operation, None)
            if refusal is not None:
                if refusal.code == "NoSuchUpload":
                    self.uploads.clear()
                raise refusal
            return happen()

        call = Call(operation, name, refused_or_done, asyncio.get_running_loop().create_future())
        if self.eager:
            self.let(call)
        else:
            self.calls.append(call)
        return cast(T, await call.answer)

    def _etag(self) -> str:
        return f"e{next(self._numbers)}"

    # -- the client's side
    async def head_object(self, name: ObjectName, *, tags: bool = False) -> OriginObject | None:
        return await self._call("head", name, lambda: self._describe(name))

    def _describe(self, name: ObjectName) -> OriginObject | None:
        held = self.objects.get(name)
        if held is None:
            return None
        return OriginObject(
            etag=held.etag,
            size_bytes=len(held.data),
            modified_s=1,
            headers={},
            metadata={},
            checksums={},
            checksum_type="",
            version_id="",
            parts_count=None,
            storage_class="STANDARD",
            stamp=held.stamp,
        )

    @asynccontextmanager
    async def get_object(
        self, name: ObjectName, start: int, end: int, if_match: str | None = None
    ) -> AsyncIterator[tuple[OriginObject, AsyncIterator[bytes]]]:
        def read() -> tuple[OriginObject, bytes]:
            held, found = self.objects.get(name), self._describe(name)
            if held is None or found is None:
                raise OriginRefusedError(404, "NoSuchKey")
            if if_match is not None and held.etag != if_match:
                raise OriginRefusedError(412, "PreconditionFailed")
            return found, held.data[start:end]

        found, data = await self._call("get", name, read)

        async def pieces() -> AsyncIterator[bytes]:
            yield data

        yield found, pieces()

    async def put_object(
        self,
        name: ObjectName,
        size_bytes: int,
        chunks: Chunks,
        headers: Mapping[str, str],
        condition: Condition | None = None,
    ) -> PutAnswer:
        data = b"".join([bytes(piece) async for piece in chunks()])
        assert len(data) == size_bytes
        stamp = parse_stamp(headers.get(STAMP_HEADER, ""))
        return await self._call("put", name, lambda: self._write(name, data, stamp, condition))

    def _write(self, name: ObjectName, data: bytes, stamp: Stamp | None, condition: Condition | None) -> PutAnswer:
        held = self.objects.get(name)
        if condition is not None and condition.header == "if-none-match" and held is not None:
            raise OriginRefusedError(412, "PreconditionFailed")
        if condition is not None and condition.header == "if-match":
            if held is None:
                raise OriginRefusedError(404, "NoSuchKey")
            if f'"{held.etag}"' != condition.value:
                raise OriginRefusedError(412, "PreconditionFailed")
        etag = self._etag()
        self.objects[name] = Held(etag, data, stamp)
        return PutAnswer(etag, "", {})

    async def copy_object(
        self, name: ObjectName, source: CopySource, headers: Mapping[str, str], condition: Condition | None = None
    ) -> PutAnswer:
        stamp = parse_stamp(headers.get(STAMP_HEADER, ""))

        def copy() -> PutAnswer:
            data = self._source(source)
            written = self._write(name, data, stamp, condition if self.heeds_copy_conditions else None)
            return replace(written, headers=self.told_of_copies)

        return await self._call("copy", name, copy)

    def _source(self, source: CopySource) -> bytes:
        held = self.objects.get(source.name)
        if held is None:
            raise OriginRefusedError(404, "NoSuchKey")
        if held.etag != source.etag and self.heeds_copy_conditions:
            raise OriginRefusedError(412, "PreconditionFailed")
        return held.data

    conditional_writes = True

    async def delete_object(self, name: ObjectName, version_id: str | None = None) -> None:
        assert version_id is None
        await self._call("delete", name, lambda: self.objects.pop(name, None))

    async def create_multipart_upload(
        self, name: ObjectName, headers: Mapping[str, str], tries: Tries | None = None
    ) -> str:
        stamp = parse_stamp(headers.get(STAMP_HEADER, ""))

        def begin() -> str:
            upload_id = f"upload-{next(self._numbers)}"
            self.uploads[upload_id] = Upload(name, stamp)
            return upload_id

        return await self._call("create", name, begin)

    async def upload_part(
        self,
        name: ObjectName,
        upload_id: str,
        number: int,
        size_bytes: int,
        chunks: Chunks,
        headers: Mapping[str, str],
    ) -> str:
        data = b"".join([bytes(piece) async for piece in chunks()])
        assert len(data) == size_bytes

        def take() -> str:
            etag = self._etag()
            self._upload(upload_id).parts[number] = (etag, data)
            return etag

        return await self._call("part", name, take)

    async def upload_part_copy(
        self, name: ObjectName, upload_id: str, number: int, source: CopySource, start: int, end: int
    ) -> PutAnswer:
        def copy() -> PutAnswer:
            data = self._source(source)[start:end]
            etag = self._etag()
            self._upload(upload_id).parts[number] = (etag, data)
            return PutAnswer(etag, "", self.told_of_copies)

        return await self._call("copy-part", name, copy)

    def _upload(self, upload_id: str) -> Upload:
        if upload_id not in self.uploads:
            raise OriginRefusedError(404, "NoSuchUpload")
        return self.uploads[upload_id]

    async def complete_multipart_upload(
        self,
        name: ObjectName,
        upload_id: str,
        parts: Sequence[tuple[int, str]],
        headers: Mapping[str, str],
        condition: Condition | None = None,
        checksums: tuple[str, Sequence[str]] = ("", ()),
    ) -> PutAnswer:
        def complete() -> PutAnswer:
            upload = self._upload(upload_id)
            assert [(number, etag) for number, (etag, _) in sorted(upload.parts.items())] == list(parts)
            data = b"".join(data for _, (_, data) in sorted(upload.parts.items()))
            answer = self._write(name, data, upload.stamp, condition)
            del self.uploads[upload_id]
            return answer

        return await self._call("complete", name, complete)

    async def abort_multipart_upload(self, name: ObjectName, upload_id: str) -> None:
        await self._call("abort", name, lambda: self.uploads.pop(upload_id, None))

    async def list_parts(self, name: ObjectName, upload_id: str) -> list[tuple[int, str, int]] | None:
        def find() -> list[tuple[int, str, int]] | None:
            upload = self.uploads.get(upload_id)
            if upload is None:
                return None
            return [(number, etag, len(data)) for number, (etag, data) in sorted(upload.parts.items())]

        return await self._call("list-parts", name, find)

    async def list_uploads(self, bucket: str, prefix: str) -> list[tuple[str, str, float]]:
        def find() -> list[tuple[str, str, float]]:
            return [
                (upload.name.key, upload_id, 1e12)
                for upload_id, upload in self.uploads.items()
                if upload.name.bucket == bucket and upload.name.key.startswith(prefix)
            ]

        return await self._call("list-uploads", ObjectName(bucket, prefix), find)

    async def list_objects(
        self, bucket: str, prefix: str, delimiter: str = "", start_after: str = "", max_keys: int = 1000
    ) -> OriginPage:
        def find() -> OriginPage:
            names = sorted(name.key for name in self.objects if name.bucket == bucket and name.key.startswith(prefix))
            keys = [key for key in names if not delimiter or delimiter not in key[len(prefix) :]]
            entries = [
                OriginEntry(key, len(held.data), held.etag, 1, "STANDARD")
                for key, held in ((key, self.objects[ObjectName(bucket, key)]) for key in keys if key > start_after)
            ]
            return OriginPage(entries, [], False)

        return await self._call("list", ObjectName(bucket, prefix), find)
