"""Engines of several nodes in one process: real memories, one real directory, a model of the origin."""

import asyncio
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from tiergate.checkpoints.markers import Markers
from tiergate.clock import SystemClock
from tiergate.config import Machine, Settings, load
from tiergate.directory.rows import TABLE_NAMES
from tiergate.engine.calls import Answer, Call, Framing, Outgoing
from tiergate.engine.current import foreign_version
from tiergate.engine.rooms import Rooms
from tiergate.engine.service import Service
from tiergate.errors import OriginTemporaryError
from tiergate.lmdbfile import open_environment
from tiergate.memory.audit import audit
from tiergate.memory.memory import Memory, MemoryLimits
from tiergate.model import Bucket, ObjectName
from tiergate.observe.metrics import Metrics
from tiergate.origin.answers import OriginPage
from tiergate.origin.client import OriginObject
from tiergate.origin.forward import Forwarder
from tiergate.replication.base import Alone, Replication
from tiergate.s3.operations import parse
from tiergate.s3.target import Target
from tiergate.testing.copies import HoldersDirectory, Peers
from tiergate.testing.modelorigin import ModelOrigin
from tiergate.writeback.standing import Standing
from tiergate.writeback.withdrawal import Withdrawals

BUCKET = "bucket"
BLOCK_BYTES = 1 << 16
PIECE_BYTES = 30_000
"""Of a body as it arrives: blocks and pieces do not end together, and no thread is needed for any."""


def name_of(key: str) -> ObjectName:
    return ObjectName(BUCKET, key)


def content(size_bytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size_bytes)


class Arriving:
    """A body that comes in pieces (implements `engine.calls.IncomingBody`)."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size_bytes: int | None = len(data)
        self.framing = Framing(chunked=False)

    async def pieces(self) -> AsyncIterator[bytes | memoryview]:
        for start in range(0, len(self._data), PIECE_BYTES):
            await asyncio.sleep(0)
            yield self._data[start : start + PIECE_BYTES]

    async def verify(self) -> dict[str, str]:
        return {}


class BucketOrigin(ModelOrigin):
    """One that has buckets, and that can be away."""

    is_away = False

    def __init__(self) -> None:
        super().__init__()
        self.eager = True

    def _etag(self) -> str:
        return f"{next(self._numbers):032x}"

    async def get_bucket(self, name: str, now_s: float) -> Bucket:
        return Bucket(name, "us-east-1", False, now_s)

    async def get_bucket_owner(self, name: str) -> str:
        return ""

    async def head_object(self, name: ObjectName, *, tags: bool = False) -> OriginObject | None:
        if self.is_away:
            raise OriginTemporaryError("away")
        return await super().head_object(name, tags=tags)

    async def list_objects(
        self, bucket: str, prefix: str, delimiter: str = "", start_after: str = "", max_keys: int = 1000
    ) -> OriginPage:
        if self.is_away:
            raise OriginTemporaryError("away")
        return await super().list_objects(bucket, prefix, delimiter, start_after, max_keys)


class Node:
    """One node: its engine, and what it holds."""

    def __init__(self, cluster: "Cluster", name: str, replication: Replication) -> None:
        self._cluster = cluster
        self.name = name
        self.memory = cluster.memories[name]
        self.metrics = Metrics()
        clock, origin, settings = SystemClock(), cluster.origin.client, cluster.settings
        markers = Markers(lambda bucket, key: settings.prefix_for(bucket, key).markers, settings.large_bytes)
        self.rooms = Rooms(
            settings=settings,
            clock=clock,
            directory=cluster.directory,
            memory=self.memory,
            origin=origin,
            forwarder=cast(Forwarder, None),
            markers=markers,
            withdrawals=Withdrawals(
                cluster.directory,
                self.memory,
                origin,
                markers,
                clock,
                self.metrics,
                foreign_version,
                settings.revalidate_s,
                Standing(self.memory.token, lambda: replication.me),
            ),
            metrics=self.metrics,
            replication=replication,
            wake=lambda: None,
        )
        self.service = Service(self.rooms)

    async def ask(
        self,
        operation: str,
        method: str,
        key: str,
        *,
        body: bytes = b"",
        query: Sequence[tuple[str, str]] = (),
        headers: Mapping[str, str] | None = None,
        document: bytes = b"",
    ) -> Answer:
        target = Target(BUCKET, key, tuple(query))
        given = dict(headers or {})
        call = Call(
            operation=operation,
            method=method,
            target=target,
            raw_query="&".join(f"{name}={value}" for name, value in query),
            headers=given,
            params=parse(operation, target, given, document),
            body=Arriving(body),
            request_id="request",
            document=document,
        )
        return await self.service.answer(call)

    async def put(self, key: str, data: bytes, **headers: str) -> Answer:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.ask("PutObject", "PUT", key, body=data, headers=named)

    async def get(self, key: str, **headers: str) -> tuple[Answer, bytes]:
        """The answer and all of its body."""
        answer = await self.ask("GetObject", "GET", key, headers=headers)
        return answer, await body_of(answer)

    async def create(self, key: str) -> str:
        answer = await self.ask("CreateMultipartUpload", "POST", key, query=[("uploads", "")])
        text = cast(bytes, answer.body).decode()
        return text.partition("<UploadId>")[2].partition("</UploadId>")[0]

    async def part(self, key: str, upload_id: str, number: int, data: bytes) -> Answer:
        query = [("partNumber", str(number)), ("uploadId", upload_id)]
        return await self.ask("UploadPart", "PUT", key, body=data, query=query)

    async def complete(self, key: str, upload_id: str, etags: Mapping[int, str]) -> Answer:
        parts = "".join(
            f"<Part><PartNumber>{number}</PartNumber><ETag>{etag}</ETag></Part>" for number, etag in etags.items()
        )
        document = f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>".encode()
        query = [("uploadId", upload_id)]
        return await self.ask("CompleteMultipartUpload", "POST", key, query=query, document=document)

    async def abort(self, key: str, upload_id: str) -> Answer:
        return await self.ask("AbortMultipartUpload", "DELETE", key, query=[("uploadId", upload_id)])

    def holds(self, uid: str, *, dirty: bool) -> bool:
        """Whether the node holds something under this holder, that may (not) be evicted."""
        return any(holder.decode() == uid and row.dirty == dirty for _, holder, row in self.memory._holders())

    def is_empty(self) -> bool:
        """Whether nothing is held that may not be evicted, nor on its way, nor read."""
        stats = self.memory.stats()
        return not (stats.dirty_bytes or stats.receiving_bytes or stats.reserved_bytes or stats.pinned_bytes)

    def claims(self) -> list[str]:
        """The holders that the engine's process vouches for."""
        token = self.memory.token
        return sorted({holder.decode() for _, holder, row in self.memory._holders() if row.claim == token})

    def counted(self, metric: str) -> float:
        return sum(series.values[0] for series in self.metrics.store.read() if series.name == f"tiergate_{metric}")


class Cluster:
    """The nodes a, b, c ...; `close` finds every memory sound."""

    def __init__(self, folder: Path, nodes_count: int, *, alone: bool = False, **flags: Any) -> None:
        machine = Machine(ram_bytes=1 << 30, cores_count=1, user_id=1)
        self.settings: Settings = load(config_file=None, environ={}, flags=flags, machine=machine).settings
        self.clock = SystemClock()
        limits = MemoryLimits((1 << 20) + (4 << 20), 1 << 20, 1 << 20)
        names = "abcdefgh"[:nodes_count]
        self.memories = {name: Memory.open(folder / name, limits, self.clock) for name in names}
        self.directory = HoldersDirectory(open_environment(folder / "directory", 4 << 20, len(TABLE_NAMES)))
        self.peers = self.directory.peers = Peers(self.clock, self.memories)
        self.origin = BucketOrigin()
        self.nodes = {name: Node(self, name, Alone() if alone else self.peers.of(name)) for name in names}

    def __getitem__(self, name: str) -> Node:
        return self.nodes[name]

    async def uid(self, key: str) -> str:
        record = (await self.directory.get(name_of(key))).record
        assert record is not None
        assert record.version is not None
        return record.version.uid

    async def holders(self, key: str) -> set[str]:
        """The nodes that are said to hold the current version."""
        return {holder.node for holder in self.directory.held[await self.uid(key)]}

    async def persist(self, key: str, data: bytes) -> None:
        """The write-back of a key has happened."""
        uid = await self.uid(key)
        etag = self.origin.put_foreign(name_of(key), data)
        await self.directory.persisted(name_of(key), uid, etag, self.clock.wall_s())

    async def persist_old(self, key: str, data: bytes) -> None:
        """The origin has this, and the directory knows."""
        self.origin.put_foreign(name_of(key), data)
        await self.nodes["a"].ask("HeadObject", "HEAD", key)

    async def close(self) -> None:
        for node in self.nodes.values():
            await node.service.close()
        problems = [problem for memory in self.memories.values() for problem in audit(memory.store)]
        self.peers.close()
        for memory in self.memories.values():
            memory.close()
        self.directory.close()
        assert problems == []


def etag_of(answer: Answer) -> str:
    return answer.headers["ETag" if "ETag" in answer.headers else "etag"].strip('"')


async def body_of(answer: Answer) -> bytes:
    """All bytes of an answer."""
    if isinstance(answer.body, bytes):
        return answer.body
    return b"".join([bytes(piece) async for piece in pieces_of(answer.body)])


async def pieces_of(body: Outgoing) -> AsyncIterator[bytes | memoryview]:
    """The pieces of a body, which is closed in the end."""
    try:
        async for piece in body.pieces():
            yield piece
    finally:
        await body.close()
