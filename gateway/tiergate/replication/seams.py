"""What replication needs of the memory of its node. `tiergate.memory.Memory` is it."""

from collections.abc import Sequence
from typing import Protocol

from tiergate.model import Body


class BlockWriter(Protocol):
    """A block on its way into memory."""

    def write(self, data: bytes | memoryview) -> None: ...

    def seal(self) -> None: ...

    def abort(self) -> None: ...


class PinnedBody(Protocol):
    """A body that stays where it is until it is released."""

    def block(self, index: int) -> list[memoryview] | None: ...

    def release(self) -> None: ...


class HoldingMemory(Protocol):
    """See `tiergate.memory.memory.Memory` for what each does."""

    def receive_block(self, body: Body, index: int, holder: str) -> BlockWriter | None: ...

    def pin(self, body_uid: str) -> PinnedBody | None: ...

    def hold_all(self, body_uids: Sequence[str], holder: str, dirty: bool) -> bool: ...

    def holds_whole(self, body: Body) -> bool: ...
