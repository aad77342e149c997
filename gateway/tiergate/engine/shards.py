"""What the memory daemon's protocol does, by the gateway's own operations on objects: there is no second way in.

A shard is an object under the configured place, and stays in memory as the settings of that place say. What a namespace
is, and what a shard is, stands in the metadata of those objects, so that one look at the directory tells it, on every
node. What is there is the directory's word alone; the origin is not asked.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tiergate.checkpoints.shards import (
    Namespace,
    Shard,
    ShardKind,
    ShardName,
    configuration_key,
    is_configuration,
    kind_of,
    left_by_others,
    newest_key,
    prefix_of,
    rank_prefix,
    shard_key,
    shard_of,
    surplus,
    whole_steps,
)
from tiergate.directory.base import Seen
from tiergate.engine.afterwards import to_its_end
from tiergate.engine.atonce import for_each
from tiergate.engine.calls import Answer, Call, Framing, IncomingBody
from tiergate.engine.rooms import Rooms
from tiergate.errors import NotFoundError, PreconditionError, TiergateError
from tiergate.model import LOST, ObjectName, Record, State, Version
from tiergate.observe.logs import get_logger
from tiergate.s3.operations import Target
from tiergate.s3.uri import parse_uri

log = get_logger(__name__)

CHECKSUM = "xxhash128"
"""S3's name of what the protocol calls xxh3_128."""

SCAN_COUNT = 1000

_RANKS, _RETAINED, _KIND, _STEP = "shard-ranks", "shard-steps-retained", "shard-kind", "shard-step"
"""The metadata of a namespace's object, of a shard's, and of the one that names the newest whole step."""


@dataclass(frozen=True, slots=True)
class OpenedShard:
    """A shard on its way out; whoever sends the answer closes its body. `checksum` is base64, empty where nobody said
    it."""

    answer: Answer
    checksum: str


class EmptyBody:
    """The body of a request without one (implements `IncomingBody`)."""

    size_bytes: int | None = 0
    framing = Framing(chunked=False)

    async def pieces(self) -> AsyncIterator[bytes | memoryview]:
        for _ in ():
            yield b""

    async def verify(self) -> dict[str, str]:
        return {}


class Shards:
    """One for a process. `answer` carries out an operation (`Service.answer`)."""

    def __init__(self, rooms: Rooms, answer: Callable[[Call], Awaitable[Answer]]) -> None:
        self._rooms = rooms
        self._answer = answer
        self._bucket, self._place = parse_uri(rooms.settings.daemon_uri)

    # -- namespaces
    async def namespace(self, name: str) -> Namespace | None:
        """The configuration of a namespace."""
        version = version_of(await self._seen(configuration_key(self._place, name)))
        if version is None or not {_RANKS, _RETAINED} <= version.metadata.keys():
            return None
        return Namespace(int(version.metadata[_RANKS]), int(version.metadata[_RETAINED]), version.uid)

    async def create(self, name: str, ranks_count: int, steps_retained_count: int, request_id: str) -> bool:
        """Create a namespace; False if there is one.

        Raises:
            TiergateError: as PutObject.
        """
        # Read before the look: what is here without a namespace was left by one that went.
        left = await self._records(prefix_of(self._place, name))
        if await self.namespace(name) is not None:
            return False
        await self._drop([each for each in left if not is_configuration(self._place, each.name.key)], request_id)
        metadata = {_RANKS: str(ranks_count), _RETAINED: str(steps_retained_count)}
        params = {"Metadata": metadata, "IfNoneMatch": "*"}
        try:
            await self._do("PutObject", configuration_key(self._place, name), params, request_id)
        except PreconditionError:
            return False
        return True

    async def drop(self, name: str, request_id: str) -> bool:
        """Drop a namespace and all that it holds; False if there is none."""
        found = await self.namespace(name) is not None
        if found:
            # First, so that a write that comes meanwhile finds out and takes back what it wrote.
            await self._do("DeleteObject", configuration_key(self._place, name), {}, request_id)
            await self._drop(await self._records(prefix_of(self._place, name)), request_id)
        return found

    async def reset(self, request_id: str) -> None:
        """Drop everything."""
        records = await self._records(self._place)
        await self._drop([each for each in records if is_configuration(self._place, each.name.key)], request_id)
        await self._drop(await self._records(self._place), request_id)

    async def latest(self, namespace: str, limit_count: int | None) -> list[int]:
        """The greatest steps that can be loaded, in descending order.

        Raises:
            NotFoundError: there is no such namespace.
        """
        found = await self._known(namespace)
        steps = whole_steps(await self._shards(prefix_of(self._place, namespace)), found.ranks_count)
        return steps if limit_count is None else steps[:limit_count]

    # -- shards
    async def put(
        self, name: ShardName, head: Callable[[], Awaitable[bytes]], body: IncomingBody, request_id: str
    ) -> None:
        """Keep a shard, and no more of its rank's steps than its namespace says. `head` gives the first bytes of its
        body.

        Raises:
            NotFoundError: there is no such namespace.
            MemoryFullError, TooFewCopiesError: it cannot be kept in memory.
            TiergateError: as PutObject.
        """
        namespace = await self._known(name.namespace)
        kind = kind_of(await head())
        params = {"Metadata": {_KIND: kind.value}}
        answer = await self._do("PutObject", shard_key(self._place, name), params, request_id, body)
        await to_its_end(self._settle(name, kind, namespace, etag_of(answer), request_id))

    async def _settle(self, name: ShardName, kind: ShardKind, namespace: Namespace, etag: str, request_id: str) -> None:
        """After a shard's commit.

        Raises:
            NotFoundError: its namespace went meanwhile.
        """
        now = await self.namespace(name.namespace)
        if now is None or now.uid != namespace.uid:
            await self._delete(ObjectName(self._bucket, shard_key(self._place, name)), etag, request_id)
            raise no_namespace(name.namespace)
        try:
            gone = await self._settle_save(name, now, request_id) if kind is ShardKind.METADATA else []
            newest = version_of(await self._seen(newest_key(self._place, name.namespace)))
            newest_step = int(newest.metadata[_STEP]) if newest is not None and _STEP in newest.metadata else None
            own = await self._shards(rank_prefix(self._place, name.namespace, name.rank), readable_only=False)
            gone = [*gone, *surplus(own, now.steps_retained_count, newest_step)]
            await self._drop([shard.record for shard in gone], request_id)
            self._rooms.metrics.daemon_dropped_shards.inc(len(gone))
        except TiergateError as error:
            # The shard is kept; what should have gone for it goes with the rank's next one.
            log.warning("older shards could not be dropped", error=error, namespace=name.namespace, rank=name.rank)

    async def _settle_save(self, name: ShardName, namespace: Namespace, request_id: str) -> list["HeldShard"]:
        """After the end of a save, which its metadata is: note if it is whole; what others left and nobody can load."""
        every = await self._shards(prefix_of(self._place, name.namespace), readable_only=False)
        if name.step in whole_steps(every, namespace.ranks_count):
            params = {"Metadata": {_STEP: str(name.step)}}
            await self._do("PutObject", newest_key(self._place, name.namespace), params, request_id)
        return left_by_others(every, name)

    async def get(self, name: ShardName, request_id: str) -> OpenedShard:
        """A shard.

        Raises:
            NotFoundError: there is none, or all nodes that had it are gone.
            TiergateError: as GetObject.
        """
        key = shard_key(self._place, name)
        seen = await self._seen(key)
        if version_of(seen) is None or is_lost(seen):
            raise no_shard(name)
        answer = await self._do("GetObject", key, {"ChecksumMode": "ENABLED"}, request_id)
        return OpenedShard(answer, answer.headers.get(f"x-amz-checksum-{CHECKSUM}", ""))

    async def delete(self, name: ShardName, request_id: str) -> None:
        """Drop a shard.

        Raises:
            NotFoundError: there is none.
        """
        key = shard_key(self._place, name)
        if version_of(await self._seen(key)) is None:
            raise no_shard(name)
        await self._do("DeleteObject", key, {}, request_id)

    # -- what there is
    async def _known(self, namespace: str) -> Namespace:
        found = await self.namespace(namespace)
        if found is None:
            raise no_namespace(namespace)
        return found

    async def _seen(self, key: str) -> Seen:
        return await self._rooms.directory.get(ObjectName(self._bucket, key))

    async def _records(self, prefix: str) -> list[Record]:
        """The objects under a prefix."""
        found: list[Record] = []
        after = ""
        while page := await self._rooms.directory.scan(self._bucket, prefix, after, SCAN_COUNT):
            after = page[-1].name.key
            found += (record for record in page if record.version is not None)
        return found

    async def _shards(self, prefix: str, *, readable_only: bool = True) -> list["HeldShard"]:
        """The shards under a prefix, all or those only that can be read now."""
        found: list[HeldShard] = []
        after = ""
        while page := await self._rooms.directory.survey(self._bucket, prefix, after, SCAN_COUNT):
            for seen in page:
                if seen.record is None:
                    continue
                after = seen.record.name.key
                shard = held_shard(self._place, seen, seen.record)
                if shard is not None and (not readable_only or self._is_readable(seen, seen.record)):
                    found.append(shard)
        return found

    def _is_readable(self, seen: Seen, record: Record) -> bool:
        version = record.version
        if version is None or is_lost(seen):
            return False
        if record.state is State.CLEAN or self._rooms.holds_whole(version):
            return True
        return bool(self._rooms.replication.sources(seen.holders.get(version.uid, frozenset())))

    # -- what is done
    async def _drop(self, records: Sequence[Record], request_id: str) -> None:
        """Delete objects, unless they are written anew meanwhile."""

        async def delete(record: Record) -> None:
            if record.version is not None:
                await self._delete(record.name, record.version.etag, request_id)

        await for_each(self._rooms, records, delete)

    async def _delete(self, name: ObjectName, etag: str, request_id: str) -> None:
        try:
            await self._do("DeleteObject", name.key, {"IfMatch": f'"{etag}"'}, request_id)
        except (NotFoundError, PreconditionError):
            return  # Somebody else deleted it, or wrote it anew.

    async def _do(
        self,
        operation: str,
        key: str,
        params: Mapping[str, Any],
        request_id: str,
        body: IncomingBody | None = None,
    ) -> Answer:
        """One of the gateway's operations on an object of the place."""
        return await self._answer(
            Call(
                operation=operation,
                method=_METHODS[operation],
                target=Target(self._bucket, key, ()),
                raw_query="",
                headers={},
                params={"Bucket": self._bucket, "Key": key, **params},
                body=body or EmptyBody(),
                request_id=request_id,
            )
        )


_METHODS = {"GetObject": "GET", "PutObject": "PUT", "DeleteObject": "DELETE"}


@dataclass(frozen=True, slots=True)
class HeldShard(Shard):
    """A shard, and the record that tells of it."""

    record: Record


def held_shard(place: str, seen: Seen, record: Record) -> HeldShard | None:
    """The shard of a record; None where it is none."""
    name = shard_of(place, record.name.key)
    if name is None or record.version is None:
        return None
    said = record.version.metadata.get(_KIND, "")
    kind = ShardKind(said) if said in tuple(ShardKind) else ShardKind.OPAQUE
    began = seen.pending.place if seen.pending is not None else record.revision
    return HeldShard(name, kind, record.revision, began, record)


def version_of(seen: Seen) -> Version | None:
    """What a key holds."""
    return seen.record.version if seen.record is not None else None


def is_lost(seen: Seen) -> bool:
    """Whether every node that had an object is gone."""
    return seen.pending is not None and seen.pending.quarantined == LOST


def etag_of(answer: Answer) -> str:
    """The ETag that a write was answered with."""
    return next((value for name, value in answer.headers.items() if name.lower() == "etag"), "").strip('"')


def no_namespace(name: str) -> NotFoundError:
    """The answer for a namespace that does not exist."""
    return NotFoundError("NoSuchKey", f"there is no namespace {name}")


def no_shard(name: ShardName) -> NotFoundError:
    """The answer for a shard that does not exist."""
    return NotFoundError("NoSuchKey", f"rank {name.rank} has nothing of step {name.step} in {name.namespace}")
