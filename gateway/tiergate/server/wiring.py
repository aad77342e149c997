"""Opens the rooms of one process and connects them; whoever opens them closes them."""

import asyncio
import hashlib
import shutil
import uuid
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tiergate.checkpoints.markers import Markers
from tiergate.child import ChildContext
from tiergate.clock import Clock, SystemClock
from tiergate.config import Settings
from tiergate.directory.base import Directory
from tiergate.directory.embedded import EmbeddedDirectory
from tiergate.engine.current import foreign_version
from tiergate.engine.rooms import Rooms
from tiergate.errors import ConfigError
from tiergate.memory.memory import Memory
from tiergate.model import ObjectName
from tiergate.observe.metrics import Metrics
from tiergate.origin.client import OriginClient, OriginSettings
from tiergate.origin.forward import Forwarder
from tiergate.replication.base import Alone, Promise, Replication
from tiergate.server.budget import split
from tiergate.writeback.copier import Copier
from tiergate.writeback.gate import Gate
from tiergate.writeback.holds import HoldBounds
from tiergate.writeback.retaining import Held, Retaining
from tiergate.writeback.sender import Sender, SenderSettings
from tiergate.writeback.standing import Standing
from tiergate.writeback.uploader import Uploader, UploaderSettings
from tiergate.writeback.withdrawal import Withdrawals

if TYPE_CHECKING:
    from tiergate.server.cluster import Cluster

BEGUN_PER_SLOT = 8

EMBEDDED_BYTES = 2 << 20
"""The least room with which the directory of a node alone is opened."""


@asynccontextmanager
async def open_cluster(context: ChildContext, promise: Promise) -> AsyncIterator["Cluster | None"]:
    """The cluster as this process reaches it; None for a node alone."""
    async with AsyncExitStack() as stack:
        cluster = None
        if context.settings.cluster:
            # Here and not above, since a node alone needs no gRPC, and may not have it.
            from tiergate.server import cluster as opener

            cluster = await stack.enter_async_context(opener.open_cluster(context, SystemClock(), promise))
        yield cluster


def view_of(cluster: "Cluster | None") -> AbstractAsyncContextManager[None]:
    """Within the block, this process sees the members of its cluster, if it has one."""
    return cluster.view.watching() if cluster else nullcontext()


@asynccontextmanager
async def open_rooms(context: ChildContext, cluster: "Cluster | None") -> AsyncIterator[Rooms]:
    """The rooms of this process.

    Raises:
        ConfigError: the memory folder cannot be used.
    """
    settings, clock = context.settings, SystemClock()
    budget = split(settings)
    metrics = Metrics.open(context.metrics_file, budget.metrics_file_bytes)
    memory = Memory.open(context.folders.slabs, budget.memory, clock)

    def evicted(bodies: int, size_bytes: int) -> None:
        metrics.evictions.inc(bodies)
        metrics.evicted_bytes.inc(size_bytes)

    memory.watch_evictions(evicted)
    embedded: EmbeddedDirectory | None = None
    directory: Directory
    if cluster is None:
        embedded = directory = EmbeddedDirectory.open(embedded_path(context), budget.directory_bytes)
    else:
        directory = cluster.directory
    async with AsyncExitStack() as stack:
        stack.callback(metrics.close)
        stack.callback(memory.close)
        if embedded is not None:
            stack.callback(embedded.close)
        replication: Replication = Alone()
        if cluster is not None:
            replication = await open_replication(stack, cluster, settings, memory, clock, metrics)
        origin = await stack.enter_async_context(
            OriginClient(origin_settings(settings), node_id(context.folders.root), clock, metrics=metrics)
        )
        markers = Markers(lambda bucket, key: settings.prefix_for(bucket, key).markers, settings.large_bytes)
        yield Rooms(
            settings=settings,
            clock=clock,
            directory=directory,
            memory=memory,
            origin=origin,
            forwarder=Forwarder(origin.channel),
            markers=markers,
            withdrawals=Withdrawals(
                directory,
                memory,
                origin,
                markers,
                clock,
                metrics,
                foreign_version,
                settings.revalidate_s,
                standing_of(memory, cluster),
                copier_of(settings, cluster, replication, clock) if cluster else None,
            ),
            metrics=metrics,
            replication=replication,
            wake=context.wake_background,
        )


async def open_replication(
    stack: AsyncExitStack, cluster: "Cluster", settings: Settings, memory: Memory, clock: Clock, metrics: Metrics
) -> Replication:
    """Copies on peers, until the stack is left."""
    # Here and not above, since a node alone needs no gRPC, and may not have it.
    from tiergate.server import cluster as opener

    return await stack.enter_async_context(opener.open_replication(cluster, settings, memory, clock, metrics))


def standing_of(memory: Memory, cluster: "Cluster | None") -> Standing:
    """Under which name this process changes the origin."""
    if cluster is None:
        return Standing(memory.token)
    return Standing(memory.token, lambda: cluster.standing.me, cluster.standing.stands, is_shared=True)


def copier_of(settings: Settings, cluster: "Cluster", replication: Replication, clock: Clock) -> Copier:
    """Who sees to it that versions are on as many nodes as they should."""

    def asked_of(name: ObjectName) -> int | None:
        return settings.prefix_for(name.bucket, name.key).replicas_count

    return Copier(cluster.directory, replication, clock, asked_of)


def embedded_path(context: ChildContext) -> Path:
    """Where the directory of a node alone lies."""
    return context.folders.index / "directory"


async def leave_embedded(context: ChildContext) -> None:
    """Remove the directory of a node that was alone before it became a member of a cluster.

    Raises:
        ConfigError: the origin is owed something that only this directory knows of.
    """
    path = embedded_path(context)
    try:
        size_bytes = (path / "data.mdb").stat().st_size
    except FileNotFoundError:
        return
    directory = EmbeddedDirectory.open(path, max(size_bytes, EMBEDDED_BYTES))
    try:
        owed = await directory.owed_holders() or await directory.pending()
    finally:
        directory.close()
    if owed:
        raise ConfigError(
            f"{context.folders.root} holds {len(owed)} writes that this node owes to the origin from when it was "
            "alone: start it without cluster until they are written back (tiergate promote for what a policy keeps in "
            "memory), or choose another memory_dir"
        )
    shutil.rmtree(path)


def origin_settings(settings: Settings) -> OriginSettings:
    """How this node reaches its origin."""
    return OriginSettings(
        endpoint=settings.origin or None,
        region=settings.region or None,
        connect_timeout_s=settings.origin_connect_timeout_s,
        read_timeout_s=settings.origin_read_timeout_s,
        attempts_count=settings.origin_attempts_count,
        backoff_base_s=settings.origin_backoff_s,
        backoff_cap_s=settings.origin_backoff_max_s,
        max_connections_count=settings.origin_connections_count,
        conditional_writes=settings.conditional_writes,
    )


def open_uploader(rooms: Rooms, standing: Standing) -> Uploader:
    """The node's write-back, for the one process that does it."""
    settings = rooms.settings

    def run_of(name: ObjectName) -> str | None:
        found = settings.prefix_for(name.bucket, name.key)
        return found.prefix if found.reuse else None

    sender = Sender(
        rooms.directory,
        rooms.memory,
        rooms.origin,
        rooms.withdrawals,
        rooms.clock,
        rooms.metrics,
        SenderSettings(settings.writeback_concurrency_count, settings.origin_checksums),
        standing,
        rooms.replication,
        run_of,
    )
    slots = asyncio.Semaphore(settings.writeback_concurrency_count)
    hold = HoldBounds(settings.marker_hold_s, partial(has_room_to_hold, rooms.memory, settings.marker_hold_percent))
    gate = Gate(rooms.directory, rooms.clock, rooms.fence_of, settings.marker_quiet_s, hold, standing, slots)
    bounds = UploaderSettings(
        settings.writeback_concurrency_count * BEGUN_PER_SLOT,
        settings.origin_backoff_s,
        settings.origin_backoff_max_s,
    )
    return Uploader(rooms.directory, sender, gate, rooms.clock, rooms.metrics, bounds, slots)


def has_room_to_hold(memory: Memory, percent: int) -> bool:
    """Whether what the origin lacks takes no more than a part of the memory."""
    stats = memory.stats()
    return 100 * (stats.dirty_bytes + stats.receiving_bytes) <= percent * stats.room_bytes


def open_retaining(rooms: Rooms, cluster: "Cluster | None") -> Retaining:
    """What sees to it which sets stay in this node's memory, for the one process that does it."""
    settings = rooms.settings
    limit_bytes = settings.pinned_limit_bytes
    held = Held(rooms.directory, rooms.memory)
    if cluster is not None:
        held = Held(rooms.directory, rooms.memory, cluster.directory, lambda: cluster.standing.me)
    return Retaining(
        rooms.directory,
        rooms.memory,
        rooms.markers,
        held,
        settings.prefixes,
        settings.memory_limit_bytes // 2 if limit_bytes is None else limit_bytes,
        rooms.clock,
        rooms.metrics,
    )


def node_id(root: Path) -> str:
    """A name of this node that stays the same over restarts and says nothing of the machine."""
    return hashlib.sha256(f"{uuid.getnode()}:{root}".encode()).hexdigest()[:16]
