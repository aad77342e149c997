"""Bytes on their way into memory: bodies from clients, blocks from the origin.

A write copies once, from the network's buffer into the slabs, and takes each block's CRC-64/NVME of the
source while it is in the cache. Nothing of it is visible before `seal`. The objects belong to one request
each, are used by one thread at a time, and must be sealed or aborted; a process that dies instead is
cleaned up after by `Memory.reap`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, cast

from awscrt import checksums  # type: ignore[import-untyped]

from tiergate.errors import IntegrityError, InvariantError, MemoryFullError, invariant
from tiergate.memory.rows import aligned
from tiergate.model import BLOCK_CHECKSUM_BYTES, Body

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiergate.memory.claims import Claims
    from tiergate.memory.inventory import Inventory
    from tiergate.memory.rows import Extent
    from tiergate.memory.store import Store

BATCH_BLOCKS = 4
"""Blocks laid out in one transaction."""

_NOWHERE = memoryview(bytearray())

# It takes any buffer, though its signature says bytes.
crc64nvme: Callable[[bytes | memoryview, int], int] = cast("Any", checksums.crc64nvme)


class Reception(Protocol):
    """A whole body on its way into memory; sealed or aborted in the end."""

    @property
    def received_bytes(self) -> int:
        """Bytes written so far."""
        ...

    def write(self, data: bytes | memoryview, /) -> None:
        """Append `data`; see `Receiving.write` for the errors."""
        ...

    def seal(self) -> Body:
        """Make it visible; see `Receiving.seal`."""
        ...

    def abort(self) -> None:
        """Give everything back; see `Receiving.abort`."""
        ...


class _Writer:
    """A cursor over extents. `_advance` gives the next one; a block ends where `_block_room` is used up."""

    def __init__(self) -> None:
        self._view = _NOWHERE
        self._at = 0
        self._room = 0
        self._crc = 0
        self._rest: list[memoryview] = []
        self.received_bytes = 0
        """Bytes written so far."""

    def write(self, data: bytes | memoryview) -> None:
        """Append `data` (memoryviews: contiguous bytes). It may be reused as soon as this returns.

        Raises:
            MemoryFullError: the promised room cannot be had after all (others filled the file system), or
                a body of unknown length passes its limit or what memory has. Abort then.
            InvariantError: more than the declared bytes.
        """
        size = len(data)
        if size > self._room:
            self._write_across(memoryview(data))
            return
        at = self._at
        self._view[at : at + size] = data
        self._crc = crc64nvme(data, self._crc)
        self._at = at + size
        self._room -= size
        self.received_bytes += size

    def _write_across(self, data: memoryview) -> None:
        while len(data):
            if not self._room:
                self._advance()
            size = min(self._room, len(data))
            self.write(data[:size])
            data = data[size:]

    def _advance(self) -> None:
        raise NotImplementedError

    def _start_block(self, views: list[memoryview], size_bytes: int) -> None:
        """Go to the start of a block of `size_bytes` that lies in `views`."""
        self._rest = cut_to(views, size_bytes)
        self._crc = 0

    def _next_view(self) -> None:
        self._view = self._rest.pop(0)
        self._at = 0
        self._room = len(self._view)

    def _forget_views(self) -> None:
        self._view, self._room, self._rest = _NOWHERE, 0, []


class Receiving(_Writer):
    """A whole body that is being received. Made by `Memory.receive` and `Memory.receive_unsized`."""

    def __init__(
        self,
        store: Store,
        claims: Claims,
        body_uid: str,
        size_bytes: int,
        holder: str,
        *,
        sized: bool,
        group: int | None = None,
    ) -> None:
        """`size_bytes`: the declared length if `sized`, else the most it may become. `group`: of the set that it is to
        belong to."""
        super().__init__()
        self._store = store
        self._claims = claims
        self._uid_text = body_uid
        self._uid = body_uid.encode()
        self._holder = holder
        self._shape = Body(body_uid, size_bytes)
        self._sized = sized
        self._laid: list[list[memoryview]] = []
        self._in_block = False
        self._laid_out = 0
        self._crcs = bytearray()
        self._state = "receiving"
        charge = aligned(size_bytes) if sized else 0

        def begin(inventory: Inventory) -> list[list[Extent]]:
            inventory.begin_receive(self._uid, size_bytes, charge, group)
            return inventory.extend(self._uid, 0, sizes, reserve=False) if sizes else []

        sizes = self._next_sizes() if sized else []
        self._lay(store.change_with_room(begin))

    def seal(self) -> Body:
        """Make the body visible: dirty for its holder, claimed by this process until `Memory.confirm`.

        Returns the body with a checksum for each block.

        Raises:
            InvariantError: fewer bytes than declared came (it can still be aborted), or it was sealed or
                aborted.
        """
        invariant(self._state == "receiving", "sealed twice, or after abort", uid=self._uid_text)
        size_bytes = self._shape.size_bytes if self._sized else self.received_bytes
        invariant(
            self.received_bytes == size_bytes,
            "a body is shorter than declared",
            received_bytes=self.received_bytes,
            size_bytes=size_bytes,
        )
        self._end_block()
        holder = self._holder.encode()
        self._store.change(lambda inventory: inventory.seal(self._uid, holder, size_bytes))
        self._claims.add(self._holder, self._uid_text)
        self._state = "sealed"
        self._forget_views()
        self._laid = []
        return Body(self._uid_text, size_bytes, bytes(self._crcs))

    def abort(self) -> None:
        """Give everything back, also after `seal` if it is not confirmed yet. Does nothing the second
        time."""
        state, self._state = self._state, "aborted"
        self._forget_views()
        self._laid = []
        if state == "receiving":
            self._store.change(lambda inventory: inventory.abort_receive(self._uid))
        elif state == "sealed" and self._claims.remove(self._holder, self._uid_text):
            holder = self._holder.encode()
            self._store.change(lambda inventory: inventory.drop(self._uid, holder))

    def _next_sizes(self) -> list[int]:
        """Sizes of the blocks to lay out next."""
        count = self._shape.block_count
        last = min(count, self._laid_out + (BATCH_BLOCKS if self._sized else 1))
        return [self._shape.block_size_bytes(index) for index in range(self._laid_out, last)]

    def _lay(self, blocks: list[list[Extent]]) -> None:
        self._laid.extend(self._store.fresh_views(extents) for extents in blocks)
        self._laid_out += len(blocks)

    def _advance(self) -> None:
        if self._rest:
            self._next_view()
            return
        invariant(self._state == "receiving", "bytes after seal or abort", uid=self._uid_text)
        if not self._laid:
            self._lay_more()
        index = self._laid_out - len(self._laid)
        self._end_block()
        self._in_block = True
        self._start_block(self._laid.pop(0), self._shape.block_size_bytes(index))
        self._next_view()

    def _end_block(self) -> None:
        if self._in_block:
            self._crcs += self._crc.to_bytes(BLOCK_CHECKSUM_BYTES, "big")
            self._in_block = False

    def _lay_more(self) -> None:
        sizes = self._next_sizes()
        if not sizes and self._sized:
            raise InvariantError("a body is longer than declared", size_bytes=self._shape.size_bytes)
        if not sizes:
            raise MemoryFullError("a body of unknown length passed its limit", limit_bytes=self._shape.size_bytes)
        first, reserve = self._laid_out, not self._sized
        self._lay(
            self._store.change_with_room(lambda inventory: inventory.extend(self._uid, first, sizes, reserve=reserve))
        )


class BlockReceiving(_Writer):
    """One block of a body that is being filled. Made by `Memory.receive_block`."""

    def __init__(self, store: Store, body: Body, index: int, holder: str, extents: list[Extent]) -> None:
        super().__init__()
        self._store = store
        self._body = body
        self._uid = body.uid.encode()
        self._index = index
        self._holder = holder
        self._open = True
        self._start_block(store.fresh_views(extents), body.block_size_bytes(index))

    def seal(self) -> None:
        """Check the block and make it visible, clean for its holder.

        Raises:
            IntegrityError: bytes are missing or are not those that were proved; the block was given back.
            InvariantError: it was sealed or aborted before.
        """
        invariant(self._open, "sealed twice, or after abort", uid=self._body.uid, index=self._index)
        expected = self._body.block_checksum(self._index)
        size_bytes = self._body.block_size_bytes(self._index)
        if self.received_bytes != size_bytes or (expected is not None and expected != self._crc):
            self.abort()
            raise IntegrityError(
                "a block is not what was acknowledged",
                uid=self._body.uid,
                index=self._index,
                received_bytes=self.received_bytes,
                size_bytes=size_bytes,
            )
        holder = self._holder.encode()
        self._store.change(lambda inventory: inventory.seal_fill(self._uid, self._index, holder))
        self._open = False
        self._forget_views()

    def abort(self) -> None:
        """Give the block back. Does nothing the second time or after `seal`."""
        if self._open:
            self._open = False
            self._forget_views()
            self._store.change(lambda inventory: inventory.abort_fill(self._uid, self._index))

    def _advance(self) -> None:
        if not self._rest:
            raise InvariantError("a block is longer than declared", uid=self._body.uid, index=self._index)
        self._next_view()


def cut_to(views: list[memoryview], size_bytes: int) -> list[memoryview]:
    """The first `size_bytes` of what the views hold one after the other."""
    found: list[memoryview] = []
    left = size_bytes
    for view in views:
        found.append(view if len(view) <= left else view[:left])
        left -= len(found[-1])
    invariant(left == 0, "a block's extents are shorter than the block", missing_bytes=left)
    return found
