"""Opens the rooms of one process and connects them; whoever opens them closes them."""

import asyncio
import hashlib
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tiergate.checkpoints.markers import Markers
from tiergate.child import ChildContext
from tiergate.clock import SystemClock
from tiergate.config import Settings
from tiergate.directory.embedded import EmbeddedDirectory
from tiergate.engine.current import foreign_version
from tiergate.engine.rooms import Rooms
from tiergate.memory.memory import Memory, MemoryLimits
from tiergate.observe.metrics import Metrics
from tiergate.origin.client import OriginClient, OriginSettings
from tiergate.origin.forward import Forwarder
from tiergate.writeback.gate import Gate
from tiergate.writeback.sender import Sender, SenderSettings
from tiergate.writeback.uploader import Uploader, UploaderSettings
from tiergate.writeback.withdrawal import Withdrawals

MIB = 1 << 20
BEGUN_PER_SLOT = 8

INDEX_SHARE = 32
"""The inventory may use this part of the budget, up to a bound: some hundred bytes a body and block."""

SLAB_SHARE = 16
"""A slab is this part of the budget, within bounds: few enough steps to grow, small enough not to overshoot."""


SPARE_SHARE = 64
"""This part of the budget is kept for markers that must come back into memory."""


def directory_bytes(settings: Settings) -> int:
    """The share of the budget that the directory's database may use."""
    return max(2 * MIB, settings.memory_limit_bytes // 32)


def memory_limits(settings: Settings) -> MemoryLimits:
    """How the budget is split: what the directory may not use is slabs and their inventory."""
    budget = settings.memory_limit_bytes - directory_bytes(settings)
    slab = min(64 * MIB, max(MIB, budget // SLAB_SHARE // MIB * MIB))
    index = min(max(MIB, budget // INDEX_SHARE), 64 * MIB + budget // 8192)
    return MemoryLimits(budget_bytes=budget, index_bytes=index, slab_bytes=slab, spare_bytes=budget // SPARE_SHARE)


@asynccontextmanager
async def open_rooms(context: ChildContext) -> AsyncIterator[Rooms]:
    """The rooms of this process.

    Raises:
        ConfigError: the memory folder cannot be used.
    """
    settings, clock = context.settings, SystemClock()
    metrics = Metrics.open(context.metrics_file)
    memory = Memory.open(context.folders.slabs, memory_limits(settings), clock)
    directory = EmbeddedDirectory.open(context.folders.index / "directory", directory_bytes(settings))
    async with OriginClient(origin_settings(settings), node_id(context.folders.root), clock) as origin:
        markers = Markers(lambda bucket, key: settings.prefix_for(bucket, key).markers, settings.large_bytes)
        rooms = Rooms(
            settings=settings,
            clock=clock,
            directory=directory,
            memory=memory,
            origin=origin,
            forwarder=Forwarder(origin.channel),
            markers=markers,
            withdrawals=Withdrawals(
                directory, memory, origin, markers, clock, metrics, foreign_version, settings.revalidate_s
            ),
            metrics=metrics,
            wake=context.wake_background,
        )
        try:
            yield rooms
        finally:
            directory.close()
            memory.close()
            metrics.close()


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


def open_uploader(rooms: Rooms) -> Uploader:
    """The node's write-back, for the one process that does it."""
    settings = rooms.settings
    sender = Sender(
        rooms.directory,
        rooms.memory,
        rooms.origin,
        rooms.withdrawals,
        rooms.clock,
        rooms.metrics,
        SenderSettings(settings.writeback_concurrency_count, settings.origin_checksums),
    )
    slots = asyncio.Semaphore(settings.writeback_concurrency_count)
    gate = Gate(rooms.directory, rooms.clock, rooms.fence_of, settings.marker_quiet_s, rooms.memory.token, slots)
    bounds = UploaderSettings(
        settings.writeback_concurrency_count * BEGUN_PER_SLOT,
        settings.origin_backoff_s,
        settings.origin_backoff_max_s,
    )
    return Uploader(rooms.directory, sender, gate, rooms.clock, rooms.metrics, bounds, slots)


def node_id(root: Path) -> str:
    """A name of this node that stays the same over restarts and says nothing of the machine."""
    return hashlib.sha256(f"{uuid.getnode()}:{root}".encode()).hexdigest()[:16]
