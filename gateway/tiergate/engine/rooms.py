"""The rooms of this node that the engine works with, wired by the process that owns them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tiergate.checkpoints.markers import Markers
from tiergate.clock import Clock
from tiergate.config import FenceMode, Settings
from tiergate.directory.base import Directory
from tiergate.memory.memory import Memory
from tiergate.model import Body, ObjectName, Role, Version
from tiergate.observe.metrics import Metrics
from tiergate.origin.client import OriginClient
from tiergate.origin.forward import Forwarder
from tiergate.replication.base import Replication
from tiergate.writeback.withdrawal import Withdrawals


@dataclass(frozen=True, slots=True)
class Rooms:
    """Everything an operation may touch. `wake` tells the background process that something became pending."""

    settings: Settings
    clock: Clock
    directory: Directory
    memory: Memory
    origin: OriginClient
    forwarder: Forwarder
    markers: Markers
    withdrawals: Withdrawals
    metrics: Metrics
    replication: Replication
    wake: Callable[[], None]

    def let_go(self, version: Version | None) -> None:
        """Drop a version's hold on its bytes, once nothing refers to it any more."""
        if version is not None:
            self.memory.drop(version.uid, [part.body.uid for part in version.parts])

    def holds_whole(self, version: Version) -> bool:
        """Whether every byte of the version is in this node's memory."""
        return all(self.memory.holds_whole(part.body) for part in version.parts)

    def role_of(self, name: ObjectName, size_bytes: int) -> Role:
        """How the fence treats an object."""
        return self.markers.role_of(name, size_bytes)

    def fence_of(self, name: ObjectName) -> FenceMode:
        """The order in which the origin may see the key's prefix."""
        return self.settings.prefix_for(name.bucket, name.key).fence


def bodies_of(version: Version) -> list[tuple[int, Body]]:
    """The version's bodies, each with the offset at which it starts in the object."""
    found: list[tuple[int, Body]] = []
    offset = 0
    for part in version.parts:
        found.append((offset, part.body))
        offset += part.body.size_bytes
    return found


def log_name(name: ObjectName) -> dict[str, Any]:
    """The context that every log line about an object carries."""
    return {"bucket": name.bucket, "key": name.key}
