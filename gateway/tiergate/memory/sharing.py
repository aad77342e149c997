"""What other processes of this machine receive and read in this node's memory, without being its own.

Such a process is known by its lease alone (`tiergate.shm.ProcessLease`), in the node's folder of leases. It maps the
slab file and is told extents of it. What it has of the memory hangs on its lease: a *grant*, room to write a body into,
and pins on what it reads; `Memory.reap` gives both back when it is dead. A grant comes with a pin of its own, so that
its bytes stay readable until the process lets go, whatever became of the request that used them.
"""

from __future__ import annotations

import re
import secrets
from typing import TYPE_CHECKING

from tiergate.errors import InvariantError, OverloadedError, RequestError, invariant
from tiergate.memory.receiving import crc64nvme, cut_to
from tiergate.memory.rows import (
    BLOCK_SEALED,
    BodyRow,
    aligned,
    block_key,
    name_bytes,
    owner_of,
    receiving_key,
    scan,
    split_pair,
    unpack_block,
)
from tiergate.model import BLOCK_CHECKSUM_BYTES, Body

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tiergate.memory.claims import Claims
    from tiergate.memory.inventory import Inventory
    from tiergate.memory.rows import Extent, Txn
    from tiergate.memory.store import Store

GRANT_TAG = "grant"
"""Names the pin that comes with a grant, where its process gives it no other name."""

BATCH_BLOCKS = 16
"""Blocks of a grant that are laid out in one transaction."""

_TOKEN = re.compile(r"[0-9a-f]{16}")
_TAG = re.compile(r"[0-9a-z]{1,32}")
_BODY = re.compile(r"[0-9a-z]{1,32}")


class Granting:
    """A grant that is being laid out, in steps. Made by `Sharing.begin_grant`."""

    def __init__(self, store: Store, shape: Body, token: bytes, pinner: bytes) -> None:
        self._store = store
        self._shape = shape
        self._token = token
        self._pinner = pinner
        self.blocks: list[list[Extent]] = []
        """The extents of each block so far."""

    @property
    def uid(self) -> str:
        """The body's, which names the grant."""
        return self._shape.uid

    def steps(self) -> Iterator[None]:
        """Lay out all blocks, some at a time.

        Raises:
            MemoryFullError: the promised room cannot be had after all. Abort then.
        """
        while len(self.blocks) < self._shape.block_count:
            self._lay_more()
            yield

    def _lay_more(self) -> None:
        first = len(self.blocks)
        sizes = [
            self._shape.block_size_bytes(index)
            for index in range(first, min(self._shape.block_count, first + BATCH_BLOCKS))
        ]
        uid = self._shape.uid.encode()
        self.blocks += self._store.change_with_room(
            lambda inventory: inventory.extend(uid, first, sizes, reserve=False, token=self._token)
        )

    def abort(self) -> None:
        """Give it back."""
        uid = self._shape.uid.encode()
        self._store.change(lambda inventory: inventory.let_go(uid, self._token, self._pinner))


class Granted:
    """A body that a process outside wrote, as the request that uses it sees it. Made by `Sharing.granted`; closed by
    whoever asked for it. Until `take` the grant is its process's. From then on this is a reception like any other
    (`tiergate.memory.receiving.Reception`): sealed or aborted in the end.
    """

    def __init__(self, store: Store, claims: Claims, body: Body, token: str, blocks: list[list[Extent]]) -> None:
        self._store = store
        self._claims = claims
        self._shape = body
        self._uid = body.uid.encode()
        self._token = token
        self._pinner = pinner_of(store.lease.token, secrets.token_hex(4))
        self._blocks = blocks
        self._crcs: bytes | None = None
        self._holder = ""
        self._state = "granted"
        self.received_bytes = 0

    @property
    def uid(self) -> str:
        """The body's."""
        return self._shape.uid

    @property
    def size_bytes(self) -> int:
        """How much of what was granted is the body."""
        return self._shape.size_bytes

    @property
    def pinner(self) -> bytes:
        """Who pins it until it is closed."""
        return self._pinner

    def views(self) -> list[memoryview]:
        """The bytes, read-only, in order; those of a block never share a view with another's."""
        found: list[memoryview] = []
        for index, extents in enumerate(self._blocks):
            found += (
                view.toreadonly() for view in cut_to(self._store.views(extents), self._shape.block_size_bytes(index))
            )
        return found

    def prove(self) -> Body:
        """The body with a checksum of each block, computed from what is in memory. Takes long for a large one, and may
        run in a thread; only the first time it does anything."""
        if self._crcs is None:
            crcs = bytearray()
            for index, extents in enumerate(self._blocks):
                crc = 0
                for view in cut_to(self._store.fresh_views(extents), self._shape.block_size_bytes(index)):
                    crc = crc64nvme(view, crc)
                crcs += crc.to_bytes(BLOCK_CHECKSUM_BYTES, "big")
            self._crcs = bytes(crcs)
        return Body(self._shape.uid, self._shape.size_bytes, self._crcs)

    def take(self, holder: str) -> None:
        """Use it up: from now on it is this process's, to be sealed for `holder`.

        Raises:
            RequestError: NoSuchGrant: it was used meanwhile, or given back.
        """
        name_bytes(holder)
        token, size_bytes = self._token.encode(), self._shape.size_bytes
        if not self._store.change(lambda inventory: inventory.take_grant(self._uid, token, size_bytes)):
            raise no_such_grant(self.uid)
        self._holder = holder
        self._state = "receiving"

    def write(self, data: bytes | memoryview, /) -> None:
        """Note that these bytes, which are in their place already, went by."""
        self.received_bytes += len(data)

    def seal(self) -> Body:
        """As `Receiving.seal`."""
        invariant(self._state == "receiving", "sealed twice, or not taken, or after abort", uid=self.uid)
        invariant(self.received_bytes == self.size_bytes, "not all of a grant went by", uid=self.uid)
        if self._crcs is None:
            raise InvariantError("a grant is sealed before it was proved", uid=self.uid)
        holder, size_bytes = self._holder.encode(), self.size_bytes
        self._store.change(lambda inventory: inventory.seal(self._uid, holder, size_bytes))
        self._claims.add(self._holder, self.uid)
        self._state = "sealed"
        return self.prove()

    def abort(self) -> None:
        """As `Receiving.abort`, once it was taken."""
        state, self._state = self._state, "aborted"
        if state == "receiving":
            self._store.change(lambda inventory: inventory.abort_receive(self._uid))
        elif state == "sealed" and self._claims.remove(self._holder, self.uid):
            holder = self._holder.encode()
            self._store.change(lambda inventory: inventory.drop(self._uid, holder))

    def close(self) -> None:
        """Read it no more."""
        self._store.change(lambda inventory: inventory.unpin(self._uid, self._pinner))


class Sharing:
    """Grants and pins of others. Made by `Memory`."""

    def __init__(self, store: Store, claims: Claims) -> None:
        self._store = store
        self._claims = claims

    def check(self, token: str) -> None:
        """Whether `token` is the lease of a living process of this machine.

        Raises:
            RequestError: InvalidLease.
        """
        # A token is the name of a file: nothing else must ever be looked up.
        if not _TOKEN.fullmatch(token) or not self._store.is_alive(token):
            raise RequestError("InvalidLease", "The lease is not that of a living process on this node's machine.")

    def begin_grant(
        self,
        body_uid: str,
        size_bytes: int,
        token: str,
        purpose: str,
        group: int | None,
        limit_count: int,
        tag: str = GRANT_TAG,
    ) -> Granting:
        """Promise a process room for a body of `size_bytes`, for `purpose` alone; it is to be laid out then. `group` as
        for `Memory.receive`; `tag` names the pin that comes with it.

        Raises:
            MemoryFullError: there is no room; nothing was reserved or evicted.
            OverloadedError: it has `limit_count` open grants already.
        """
        uid, owner = name_bytes(body_uid), token.encode()
        pinner = pinner_of(token, tag)

        def begin(inventory: Inventory) -> bool:
            if inventory.grants_count(owner) >= limit_count:
                return False
            inventory.begin_grant(uid, size_bytes, aligned(size_bytes), group, owner, purpose.encode(), pinner)
            return True

        if not self._store.change(begin):
            raise OverloadedError("too many open grants", limit_count=limit_count)
        return Granting(self._store, Body(body_uid, size_bytes), owner, pinner)

    def granted(self, body_uid: str, token: str, purpose: str, size_bytes: int | None) -> Granted:
        """A grant that is about to be used, of which `size_bytes` (None: all) are the body. It stays readable until it
        is closed.

        Raises:
            RequestError: NoSuchGrant: it was used, given back, or is not for this process or `purpose`; InvalidGrant:
                it is smaller.
        """
        # What is no body's name must be neither looked up nor said again: it may be empty, or no text.
        if not _BODY.fullmatch(body_uid):
            raise no_such_grant("")
        uid, owner = body_uid.encode(), token.encode()
        with self._store.read() as txn:
            granted_bytes, extents = self._found(txn, uid, owner)
        if not granted_bytes:
            raise no_such_grant(body_uid)
        size_bytes = granted_bytes if size_bytes is None else size_bytes
        if size_bytes > granted_bytes:
            raise RequestError("InvalidGrant", "The body is larger than what was granted.")
        body = Body(body_uid, size_bytes)
        found = Granted(self._store, self._claims, body, token, extents[: body.block_count])

        def pin(inventory: Inventory) -> bool:
            if inventory.purpose_of(uid, owner) != purpose.encode():
                return False
            inventory.pin_receiving(uid, found.pinner)
            return True

        if not self._store.change(pin):
            raise no_such_grant(body_uid)
        return found

    def _found(self, txn: Txn, uid: bytes, owner: bytes) -> tuple[int, list[list[Extent]]]:
        tables = self._store.tables
        row = txn.get(uid, db=tables.bodies)
        if row is None or txn.get(receiving_key(owner, uid, None), db=tables.receivings) is None:
            return 0, []
        return BodyRow.unpack(row).size_bytes, [
            unpack_block(value)[1] for _, value in scan(txn, tables.blocks, uid + b"\0")
        ]

    def map(
        self, token: str, tag: str, spans: Sequence[tuple[Body, int, int]], limit_count: int
    ) -> list[Extent] | None:
        """Pin bodies for a process, and say where the bytes of `spans` (body, from, to) lie, in order; None, with
        nothing pinned, if not all are in memory, or the process has `limit_count` pins already."""
        uids = sorted({name_bytes(body.uid) for body, _, _ in spans})
        owner, pinner = token.encode(), pinner_of(token, tag)
        with self._store.read() as txn:
            pins = sum(1 for key, _ in scan(txn, self._store.tables.pins, b"") if owner_of(split_pair(key)[1]) == owner)
        if pins + len(uids) > limit_count or not self._store.change(
            lambda inventory: _pin_all(inventory, uids, pinner)
        ):
            return None
        with self._store.read() as txn:
            found = [self._cut(txn, *span) for span in spans]
        extents = [extent for cut in found for extent in cut or ()]
        if None in found:
            self.release(token, [(body, tag) for body in {body.uid for body, _, _ in spans}])
            return None
        return extents

    def _cut(self, txn: Txn, body: Body, start: int, end: int) -> list[Extent] | None:
        """Where [start, end) of a pinned body lies; None if not all of it is here."""
        found: list[Extent] = []
        uid, most_bytes = body.uid.encode(), body.block_size_bytes(0)
        index = start // most_bytes
        at = index * most_bytes
        while at < end:
            size_bytes = body.block_size_bytes(index)
            value = txn.get(block_key(uid, index), db=self._store.tables.blocks)
            flag, extents = unpack_block(value) if value is not None else (0, [])
            if flag != BLOCK_SEALED:
                return None
            found += cut_extents(extents, max(start - at, 0), min(end - at, size_bytes))
            at += size_bytes
            index += 1
        return found

    def release(self, token: str, pins: Sequence[tuple[str, str]]) -> int:
        """Let go of pins (body, tag) of a process, and of the grants they came with; how many there were. Without a
        body: of all of that tag, so that a process can give back what it asked for and was never told of.

        Raises:
            RequestError: InvalidArgument: a tag or a body's name is none.
        """
        if not all(_BODY.fullmatch(body_uid) for body_uid, _ in pins if body_uid):
            raise RequestError("InvalidArgument", "This names no body.")
        owner = token.encode()
        named = [(body_uid.encode(), pinner_of(token, tag)) for body_uid, tag in pins]
        wanted = {pinner for uid, pinner in named if not uid}
        with self._store.read() as txn:
            held = [split_pair(key) for key, _ in scan(txn, self._store.tables.pins, b"")] if wanted else []
        named = [(uid, pinner) for uid, pinner in named if uid] + [each for each in held if each[1] in wanted]
        return self._store.change(lambda inventory: sum(inventory.let_go(uid, owner, pin) for uid, pin in named))


def pinner_of(token: str, tag: str) -> bytes:
    """Who pins, for a process that has several pins on a body.

    Raises:
        RequestError: InvalidArgument: the tag is none.
    """
    if not _TAG.fullmatch(tag):
        raise RequestError("InvalidArgument", "This names no pin.")
    return f"{token}/{tag}".encode()


def no_such_grant(body_uid: str) -> RequestError:
    """A grant that is unknown, or was used."""
    message = "There is no such grant: it was used or given back, or it is for another process or key."
    return RequestError("NoSuchGrant", message, grant=body_uid)


def cut_extents(extents: Sequence[Extent], low: int, high: int) -> list[Extent]:
    """Where the bytes [low, high) of what the extents hold one after the other lie."""
    found: list[Extent] = []
    at = 0
    for offset, length in extents:
        start, end = max(low - at, 0), min(high - at, length)
        if start < end:
            found.append((offset + start, end - start))
        at += length
    return found


def _pin_all(inventory: Inventory, uids: Sequence[bytes], pinner: bytes) -> bool:
    for done, uid in enumerate(uids):
        if not inventory.pin(uid, pinner):
            for pinned in uids[:done]:
                inventory.unpin(pinned, pinner)
            return False
    return True
