"""Pins: what is pinned is neither evicted nor recycled, whoever lets go of it meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiergate.errors import InvariantError
from tiergate.memory.receiving import cut_to
from tiergate.memory.rows import BLOCK_SEALED, BodyRow, block_key, unpack_block
from tiergate.model import Body

if TYPE_CHECKING:
    from typing import Self

    from tiergate.memory.store import Store


class SharedPin:
    """The one row that pins a body for this process, and what was found of the body under its protection."""

    def __init__(self, uid: str) -> None:
        self.uid = uid
        self.count = 1
        self._blocks: dict[int, list[memoryview]] = {}

    def block(self, store: Store, index: int) -> list[memoryview] | None:
        found = self._blocks.get(index)
        if found is not None:
            return found
        uid = self.uid.encode()
        with store.read() as txn:
            value = txn.get(block_key(uid, index), db=store.tables.blocks)
            row = txn.get(uid, db=store.tables.bodies)
        if value is None or row is None:
            return None
        flag, extents = unpack_block(value)
        if flag != BLOCK_SEALED:
            return None
        size_bytes = Body(self.uid, BodyRow.unpack(row).size_bytes).block_size_bytes(index)
        found = [view.toreadonly() for view in cut_to(store.views(extents), size_bytes)]
        self._blocks[index] = found
        return found


class Pins:
    """The pins of this process. Only the first pin and the last release of a body touch the inventory."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._shared: dict[str, SharedPin] = {}

    def pin(self, body_uid: str) -> Pin | None:
        """See `Memory.pin`."""
        shared = self._shared.get(body_uid)
        if shared is not None:
            shared.count += 1
            return Pin(self, shared)
        uid = body_uid.encode()
        with self._store.read() as txn:
            if txn.get(uid, db=self._store.tables.bodies) is None:
                return None
        if not self._store.change(lambda inventory: inventory.pin(uid)):
            return None
        shared = self._shared[body_uid] = SharedPin(body_uid)
        return Pin(self, shared)

    def block(self, shared: SharedPin, index: int) -> list[memoryview] | None:
        return shared.block(self._store, index)

    def release(self, shared: SharedPin) -> None:
        if shared.count > 1:
            shared.count -= 1
            return
        uid = shared.uid.encode()
        self._store.change(lambda inventory: inventory.unpin(uid))
        shared.count = 0
        del self._shared[shared.uid]


class Pin:
    """A reader's hold on a body. The views it gave must not be used, or be waiting in a transport, after
    its release."""

    __slots__ = ("_pins", "_shared")

    def __init__(self, pins: Pins, shared: SharedPin) -> None:
        self._pins = pins
        self._shared: SharedPin | None = shared

    def block(self, index: int) -> list[memoryview] | None:
        """Block `index` as read-only views in order, None if it is not in memory. Blocks that were filled
        after the pin was taken are found too."""
        if self._shared is None:
            raise InvariantError("the pin was released")
        return self._pins.block(self._shared, index)

    def release(self) -> None:
        """Let go. Does nothing the second time."""
        shared, self._shared = self._shared, None
        if shared is not None:
            self._pins.release(shared)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
