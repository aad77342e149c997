"""The yardstick: an S3 server on aiohttp that does nothing it could leave out.

No signatures, no checksums, no index, no durability: request bodies are copied into one buffer whose pages are
warm, and answers are written from it. It spends what any aiohttp server must spend, so `measure.py` states the
gateway's cost as a multiple of the yardstick's. It also serves as a very cheap origin.

Usage: yardstick.py PORT [BUFFER_MIB]     (PORT 0: any free one; the first line of the output is the port)

The buffer is a ring: older bodies are overwritten once BUFFER_MIB passed. SIGUSR1 holds object writes back (they
wait before their body is read), SIGUSR2 lets them go on: an origin whose write-back stands still while it answers
everything else.
"""

import asyncio
import itertools
import logging
import mmap
import re
import signal
import sys
from dataclasses import dataclass, field
from urllib.parse import unquote
from xml.sax.saxutils import escape

from aiohttp import web

MIB = 1 << 20
ANSWER_BYTES = MIB
CLOCK = "Thu, 01 Jan 2026 00:00:00 GMT"
LISTED_CLOCK = "2026-01-01T00:00:00.000Z"


@dataclass(frozen=True, slots=True)
class Extent:
    """A run of bytes in the ring."""

    start: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Stored:
    """An object: where its bytes are, its ETag, and the headers a reader gets back."""

    extents: tuple[Extent, ...]
    etag: str
    headers: dict[str, str]

    @property
    def size_bytes(self) -> int:
        return sum(extent.size_bytes for extent in self.extents)


@dataclass(slots=True)
class Begun:
    """A multipart upload."""

    headers: dict[str, str]
    parts: dict[int, Stored] = field(default_factory=dict)


class Yardstick:
    """Answers by path style only; a bucket is there as soon as somebody names it."""

    def __init__(self, buffer_bytes: int) -> None:
        self._size = buffer_bytes
        self._ring = memoryview(mmap.mmap(-1, buffer_bytes))
        for start in range(0, buffer_bytes, MIB):
            self._ring[start : start + MIB] = bytes(min(MIB, buffer_bytes - start))
        self._next = 0
        self._objects: dict[str, Stored] = {}
        self._uploads: dict[str, Begun] = {}
        self._numbers = itertools.count(1)
        self.writes_allowed = asyncio.Event()
        self.writes_allowed.set()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Any request."""
        bucket, _, key = request.path.lstrip("/").partition("/")
        if not key:
            return await self._of_bucket(request, bucket)
        name = f"{bucket}/{key}"
        match request.method:
            case "PUT":
                return await self._put(request, name)
            case "POST":
                return await self._post(request, bucket, key)
            case "DELETE":
                if "uploadId" in request.query:
                    self._uploads.pop(request.query["uploadId"], None)
                else:
                    self._objects.pop(name, None)
                return web.Response(status=204)
        if "uploadId" in request.query:
            return self._list_parts(request.query["uploadId"])
        return await self._get(request, name)

    # -- buckets
    async def _of_bucket(self, request: web.BaseRequest, bucket: str) -> web.StreamResponse:
        query = request.query
        if request.method == "POST" and "delete" in query:
            text = (await request.read()).decode()
            for key in re.findall("<Key>(.*?)</Key>", text):
                self._objects.pop(f"{bucket}/{key}", None)
            return document("<DeleteResult></DeleteResult>")
        if request.method in ("HEAD", "PUT", "DELETE"):
            return web.Response(headers={"x-amz-bucket-region": "us-east-1"})
        if "location" in query:
            return document("<LocationConstraint/>")
        if "versioning" in query:
            return document("<VersioningConfiguration/>")
        if "uploads" in query:
            return document(f"<ListMultipartUploadsResult><Bucket>{bucket}</Bucket></ListMultipartUploadsResult>")
        return self._list(bucket, query.get("prefix", ""), query.get("delimiter", ""))

    def _list(self, bucket: str, prefix: str, delimiter: str) -> web.Response:
        rows: dict[str, str] = {}
        start = f"{bucket}/{prefix}"
        for name in sorted(name for name in self._objects if name.startswith(start)):
            rest = name[len(start) :]
            if delimiter and delimiter in rest:
                folder = escape(prefix + rest.split(delimiter)[0] + delimiter)
                rows[folder] = f"<CommonPrefixes><Prefix>{folder}</Prefix></CommonPrefixes>"
                continue
            stored = self._objects[name]
            rows[name] = (
                f"<Contents><Key>{escape(prefix + rest)}</Key><LastModified>{LISTED_CLOCK}</LastModified>"
                f'<ETag>"{stored.etag}"</ETag><Size>{stored.size_bytes}</Size>'
                "<StorageClass>STANDARD</StorageClass></Contents>"
            )
        return document(
            f"<ListBucketResult><Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix>"
            f"<KeyCount>{len(rows)}</KeyCount><MaxKeys>1000000</MaxKeys><IsTruncated>false</IsTruncated>"
            f"{''.join(rows.values())}</ListBucketResult>"
        )

    # -- writes
    async def _take(self, request: web.BaseRequest) -> Extent:
        """Copy the body into the ring."""
        await self.writes_allowed.wait()
        if "Expect" in request.headers and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        size = int(request.headers.get("Content-Length", 0))
        if self._next + size > self._size:
            self._next = 0
        start = at = self._next
        self._next += size
        while data := await request.content.readany():
            self._ring[at : at + len(data)] = data
            at += len(data)
        return Extent(start, at - start)

    async def _put(self, request: web.BaseRequest, name: str) -> web.Response:
        source = request.headers.get("x-amz-copy-source")
        etag = f"{next(self._numbers):032x}"
        if source is not None:
            self._objects[name] = self._objects[unquote(source).lstrip("/")]
            return document(
                f'<CopyObjectResult><ETag>"{self._objects[name].etag}"</ETag>'
                f"<LastModified>{LISTED_CLOCK}</LastModified></CopyObjectResult>"
            )
        stored = Stored((await self._take(request),), etag, kept_headers(request))
        if "partNumber" in request.query:
            self._uploads[request.query["uploadId"]].parts[int(request.query["partNumber"])] = stored
        else:
            self._objects[name] = stored
        return web.Response(headers={"ETag": f'"{etag}"'})

    async def _post(self, request: web.BaseRequest, bucket: str, key: str) -> web.Response:
        if "uploads" in request.query:
            upload_id = f"upload-{next(self._numbers)}"
            self._uploads[upload_id] = Begun(kept_headers(request))
            return document(
                f"<InitiateMultipartUploadResult><Bucket>{bucket}</Bucket><Key>{escape(key)}</Key>"
                f"<UploadId>{upload_id}</UploadId></InitiateMultipartUploadResult>"
            )
        await request.read()
        begun = self._uploads.pop(request.query["uploadId"])
        parts = [begun.parts[number] for number in sorted(begun.parts)]
        extents = tuple(extent for part in parts for extent in part.extents)
        etag = f"{next(self._numbers):032x}-{len(parts)}"
        self._objects[f"{bucket}/{key}"] = Stored(extents, etag, begun.headers)
        return document(
            f"<CompleteMultipartUploadResult><Bucket>{bucket}</Bucket><Key>{escape(key)}</Key>"
            f'<ETag>"{etag}"</ETag></CompleteMultipartUploadResult>'
        )

    def _list_parts(self, upload_id: str) -> web.Response:
        begun = self._uploads.get(upload_id)
        if begun is None:
            return document("<Error><Code>NoSuchUpload</Code></Error>", status=404)
        rows = "".join(
            f'<Part><PartNumber>{number}</PartNumber><ETag>"{part.etag}"</ETag><Size>{part.size_bytes}</Size>'
            f"<LastModified>{LISTED_CLOCK}</LastModified></Part>"
            for number, part in sorted(begun.parts.items())
        )
        return document(f"<ListPartsResult><IsTruncated>false</IsTruncated>{rows}</ListPartsResult>")

    # -- reads
    async def _get(self, request: web.BaseRequest, name: str) -> web.StreamResponse:
        stored = self._objects.get(name)
        if stored is None:
            return document("<Error><Code>NoSuchKey</Code></Error>", status=404)
        size = stored.size_bytes
        headers = stored.headers | {"ETag": f'"{stored.etag}"', "Last-Modified": CLOCK, "Accept-Ranges": "bytes"}
        start, end, status = 0, size, 200
        wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", request.headers.get("Range", ""))
        if wanted:
            first, last = wanted.groups()
            start = int(first) if first else max(0, size - int(last))
            end = min(size, int(last) + 1) if first and last else size
            status, headers["Content-Range"] = 206, f"bytes {start}-{end - 1}/{size}"
        if request.method == "HEAD":
            return web.Response(status=status, headers=headers | {"Content-Length": str(end - start)})
        response = web.StreamResponse(status=status, headers=headers)
        response.content_length = end - start
        await response.prepare(request)
        offset = 0
        for extent in stored.extents:
            low, high = max(start, offset) - offset, min(end, offset + extent.size_bytes) - offset
            for at in range(low, high, ANSWER_BYTES):
                stop = min(high, at + ANSWER_BYTES)
                await response.write(self._ring[extent.start + at : extent.start + stop])
            offset += extent.size_bytes
        await response.write_eof()
        return response


def kept_headers(request: web.BaseRequest) -> dict[str, str]:
    """What a reader of the object gets back of the writer's headers."""
    return {name: value for name, value in request.headers.items() if name.lower().startswith("x-amz-meta-")}


def document(text: str, status: int = 200) -> web.Response:
    """An XML answer."""
    return web.Response(text=text, status=status, content_type="application/xml")


async def serve(port: int, buffer_bytes: int) -> None:
    """Serve until SIGTERM."""
    logging.disable(logging.CRITICAL)  # Clients that go away in the middle are nothing to report.
    yardstick, stop = Yardstick(buffer_bytes), asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_signal_handler(signal.SIGUSR1, yardstick.writes_allowed.clear)
    loop.add_signal_handler(signal.SIGUSR2, yardstick.writes_allowed.set)
    server = web.Server(yardstick.handle, access_log=None)
    listening = await loop.create_server(server, "127.0.0.1", port)
    sys.stdout.write(f"{listening.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await stop.wait()
    listening.close()
    await server.shutdown(1.0)


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), int(sys.argv[2] if len(sys.argv) > 2 else 1024) * MIB))
