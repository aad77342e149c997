"""The board: where the process that keeps a node's membership tells all others of the node how it stands.

One page of shared memory with two slots, written in turn. A slot names its number and carries a digest of all that is
in it, so a reader takes the newest that is whole: it never waits, never sees a mixture, and rests on no order in which
the machine lets writes be seen. Nobody needs to say that the writer died: what it promised last has a deadline.
"""

import hashlib
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from tiergate.clock import Clock
from tiergate.directory.codec import decode, encode
from tiergate.errors import MembershipOverError, invariant
from tiergate.etcd.values import Agreed, Field, Guard
from tiergate.model import About, Holder

BOARD_BYTES = mmap.PAGESIZE
_SLOTS_COUNT = 2
_SLOT_BYTES = BOARD_BYTES // _SLOTS_COUNT
_DIGEST_BYTES = 16
_HEAD = struct.Struct(f"<QH{_DIGEST_BYTES}s")

READS_COUNT = 100
"""A read finds no whole slot where both were rewritten while it looked at them. So often it looks."""


@dataclass(frozen=True, slots=True)
class Posted:
    """A membership: its epoch, until when it stands by the monotonic clock (0: it is over), what the node says of
    itself, and the directory it is a member of."""

    epoch: int
    deadline_s: float
    about: About
    era: int = 0
    cluster_id: int = 0


class Board:
    """The page, mapped. One process writes, any number read."""

    def __init__(self, path: Path, *, writable: bool = False) -> None:
        """Map a page that `make` made.

        Raises:
            OSError: it cannot be opened.
        """
        descriptor = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        try:
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            self._map = mmap.mmap(descriptor, BOARD_BYTES, access=access)
        finally:
            os.close(descriptor)
        self._seen = b""
        self._number = 0
        self._posted: Posted | None = None

    @classmethod
    def make(cls, path: Path) -> None:
        """An empty page, in the place of an earlier one.

        Raises:
            OSError: there is no room for it.
        """
        draft = path.with_suffix(".new")
        descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            # Touching a hole of a full tmpfs would kill a process.
            os.posix_fallocate(descriptor, 0, BOARD_BYTES)
        finally:
            os.close(descriptor)
        draft.replace(path)

    def close(self) -> None:
        """Let go of the page."""
        self._map.close()

    def post(self, posted: Posted) -> None:
        """Write over the older of the two slots."""
        number = max((number for number, _ in self._whole(bytes(self._map))), default=0) + 1
        body = encode(posted)
        invariant(_HEAD.size + len(body) <= _SLOT_BYTES, "what is posted does not fit the board", size=len(body))
        start = number % _SLOTS_COUNT * _SLOT_BYTES
        head = _HEAD.pack(number, len(body), _digest(number, body))
        self._map[start : start + _HEAD.size + len(body)] = head + body

    def read(self) -> Posted | None:
        """What was posted last; None if nothing was yet, or the first writer died over it."""
        for _ in range(READS_COUNT):
            page = bytes(self._map)
            if page == self._seen:
                return self._posted
            number, body = max(self._whole(page), default=(0, b""))
            # A copy that was held up in its middle may lack the newest slot, which an earlier one had.
            if body and number >= self._number:
                self._posted, self._number, self._seen = decode(Posted, body), number, page
                return self._posted
        return None

    def _whole(self, page: bytes) -> list[tuple[int, bytes]]:
        """The numbers and contents of the slots that nobody is writing to."""
        found: list[tuple[int, bytes]] = []
        for start in range(0, BOARD_BYTES, _SLOT_BYTES):
            number, length, digest = _HEAD.unpack_from(page, start)
            body = page[start + _HEAD.size : start + _HEAD.size + length]
            if number and digest == _digest(number, body):
                found.append((number, body))
        return found


def _digest(number: int, body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES, salt=number.to_bytes(16, "little")).digest()


class BoardStanding:
    """The membership of this process' node as the board tells it, for who writes to the directory. Implements
    `tiergate.directory.committer.Standing`."""

    def __init__(self, board: Board, node: str, key: bytes, clock: Clock) -> None:
        self._board = board
        self._node = node
        self._key = key
        self._clock = clock

    def agreed(self) -> Agreed | None:
        """The directory this node works with; None before that is known."""
        posted = self._board.read()
        return Agreed(posted.era, posted.cluster_id) if posted is not None and posted.cluster_id else None

    def era(self) -> int:
        """That directory's era; 0 before it is known."""
        agreed = self.agreed()
        return agreed.era if agreed is not None else 0

    def stands(self) -> bool:
        """Whether this node may act as a member now."""
        posted = self._board.read()
        return posted is not None and self._clock.monotonic_s() < posted.deadline_s

    @property
    def me(self) -> Holder:
        """This node in its present epoch.

        Raises:
            MembershipOverError: it is over, or nobody renewed it in time.
        """
        posted = self._board.read()
        if posted is None or self._clock.monotonic_s() >= posted.deadline_s:
            epoch = posted.epoch if posted else 0
            raise MembershipOverError("this node is no member of its cluster now", node=self._node, epoch=epoch)
        return Holder(self._node, posted.epoch)

    def guard(self) -> Guard:
        """What must hold in the store for this node to write.

        Raises:
            MembershipOverError: see `me`.
        """
        return Guard(self._key, Field.CREATED, self.me.epoch)
