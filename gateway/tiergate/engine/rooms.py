"""The rooms of this node that the engine works with, wired by the process that owns them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tiergate.checkpoints.markers import Markers
from tiergate.clock import Clock
from tiergate.config import FenceMode, Settings
from tiergate.directory.base import Committed, Directory
from tiergate.memory.memory import Memory
from tiergate.model import Actor, Body, Holder, ObjectName, Part, Role, Version
from tiergate.observe.metrics import Metrics
from tiergate.origin.client import OriginClient
from tiergate.origin.forward import Forwarder
from tiergate.replication.base import Alone, Notice, Replication
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

    @property
    def is_alone(self) -> bool:
        """Whether this node works without a cluster."""
        return isinstance(self.replication, Alone)

    @property
    def step_holder(self) -> str:
        """Who takes a step, for those who must find out whether it lives: this process; in a cluster with its node
        and epoch before it, as node@epoch/process.

        Raises:
            MembershipOverError: this node is no member now.
        """
        return str(Actor(self.memory.token, self.replication.me))

    def copies_count(self, name: ObjectName) -> int:
        """On how many nodes a write of the key is to be before it is acknowledged."""
        return self.replication.rule(self.settings.prefix_for(name.bucket, name.key).replicas_count)

    def is_memory_only(self, name: ObjectName) -> bool:
        """Whether a key's objects stay in memory, each by itself, and are refused where they cannot."""
        return self.settings.prefix_for(name.bucket, name.key).is_memory_only

    def let_go(self, version: Version | None) -> None:
        """End a version's hold on its bytes, once nothing refers to it any more. A reader on another node of a cluster,
        which pins nothing here, may be in the middle of them: there they stay until their room is wanted."""
        if version is None:
            return
        let_go = self.memory.drop if self.is_alone else self.memory.clean
        let_go(version.uid, [part.body.uid for part in version.parts])

    def replaced(self, name: ObjectName, committed: Committed | None) -> None:
        """After a commit: let go of the version that it replaced, here and wherever else it is."""
        version = committed.replaced if committed is not None else None
        if committed is None or version is None:
            return
        self.let_go(version)
        if committed.held_by:
            body_uids = tuple(part.body.uid for part in version.parts)
            self.replication.notice(committed.held_by, [Notice(name, version.uid, body_uids)])

    def drop_parts(self, name: ObjectName, upload_id: str, parts: Iterable[Part]) -> None:
        """Let go of parts of an upload that nothing will ever refer to again, here and wherever else they are."""
        at: dict[tuple[Holder, ...], list[str]] = {}
        for part in parts:
            at.setdefault(part.at, []).append(part.body.uid)
        for holders, body_uids in at.items():
            self.memory.drop(upload_id, body_uids)
            if holders:
                self.replication.notice(holders, [Notice(name, upload_id, tuple(body_uids))])

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
