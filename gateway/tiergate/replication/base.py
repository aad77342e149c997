"""The seam between the engine and the copies on other nodes. A node alone has `Alone`."""

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tiergate.errors import PeerError
from tiergate.model import Body, Holder, ObjectName


@dataclass(frozen=True, slots=True)
class Copies:
    """Who holds bytes whole, this node first; empty for a node alone. A commit that rests on them must be in the
    directory before `until_s` (monotonic clock of this machine): later, who is not named there may have let go."""

    holders: tuple[Holder, ...] = ()
    until_s: float = float("inf")

    @property
    def count(self) -> int:
        """On how many nodes the bytes are."""
        return max(1, len(self.holders))


@dataclass(frozen=True, slots=True)
class Notice:
    """Something about a version changed, which its holders should look at: it was replaced or deleted, or the origin
    has it now. They ask the directory what; a notice that is lost costs memory for a while, nothing else."""

    name: ObjectName
    uid: str
    body_uids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Promise:
    """What nodes rely on instead of telling each other: a peer keeps what it took for `keep_s`, whatever the directory
    says, and who sent it commits within `commit_s` of asking. The rest is for clocks, and for commits under way."""

    commit_s: float
    keep_s: float


PROMISE = Promise(commit_s=30.0, keep_s=120.0)


class Copying(Protocol):
    """A body on its way to peers while it arrives here. Belongs to one request; sealed or aborted in the end."""

    async def write(self, piece: bytes | memoryview) -> None:
        """Send on. Returns when every peer has taken the piece or is given up; it may be reused then. Raises nothing
        because of a peer."""
        ...

    async def seal(self, body: Body) -> Copies:
        """The body is sealed here: wait until enough peers hold it whole, proved by its block checksums. A peer that
        failed is replaced by another, which gets the bytes from this node's memory.

        Raises:
            TooFewCopiesError: the count asked for cannot be reached. What peers have is given back.
        """
        ...

    async def abort(self) -> None:
        """Give up: peers give back what they took. Does nothing the second time, or raises because of a peer."""
        ...


class Replication(Protocol):
    """The copies that this node has others keep, and what it reads from them."""

    @property
    def me(self) -> Holder | None:
        """This node's membership; None for a node alone.

        Raises:
            MembershipOverError: it is over, and no new one began yet.
        """
        ...

    def rule(self, asked_count: int | None) -> int:
        """On how many nodes a write is to be before it is acknowledged (this one counts); `asked_count` is what the
        prefix or the node's configuration says. Without that, 2 as soon as there is a peer."""
        ...

    def can_reach(self, copies_count: int) -> bool:
        """Whether there are enough living nodes for so many copies."""
        ...

    def is_ready(self, copies_count: int) -> bool:
        """As `can_reach`, of nodes that did not fail a moment ago: one that is frozen or full, and lives, would hold up
        and fail every write that waits for it."""
        ...

    def begin(self, name: ObjectName, holder: str, body_uid: str, size_bytes: int | None, copies_count: int) -> Copying:
        """Start to copy a body that is about to arrive, to the nodes that `holder` (a version's uid, an upload's id)
        has its place on. `size_bytes`: None where nobody declared it."""
        ...

    async def spread(
        self,
        name: ObjectName,
        holder: str,
        bodies: Sequence[Body],
        copies_count: int,
        at: Mapping[str, Sequence[Holder]],
    ) -> Copies:
        """See to it that this node and enough others hold all bodies whole under `holder`; what is missing is fetched
        from where `at` says a body (by uid) is, or from here.

        Raises:
            TooFewCopiesError: the count cannot be reached, or a body is nowhere any more.
            MemoryFullError: this node has no room.
        """
        ...

    def sources(self, holders: Iterable[Holder]) -> list[Holder]:
        """Those of the holders that can be read from now, nearest first; never this node."""
        ...

    def read(self, source: Holder, body: Body, index: int) -> AsyncIterator[bytes]:
        """Block `index` of a body from a peer's memory. The caller checks it.

        Raises:
            PeerError: it does not have it, or does not answer.
        """
        ...

    async def held(self, source: Holder, bodies: Sequence[Body]) -> set[str]:
        """The uids of those of the bodies that a peer has whole in its memory now; of what it does not own up to,
        also because it does not answer, nothing can be read from it."""
        ...

    async def have_dropped(self, source: Holder, holder: str, body_uids: Sequence[str]) -> None:
        """Have a peer let go of bodies, which nobody counts as a copy any more: its bytes are not what they were.

        Raises:
            PeerError: it did not hear it.
        """
        ...

    def notice(self, holders: Iterable[Holder], notices: Sequence[Notice]) -> None:
        """Tell holders, soon, in the background, as well as it goes. This node's own part is the caller's."""
        ...

    async def close(self) -> None:
        """End what runs in the background."""
        ...


class _Nothing:
    """The `Copying` of a node alone."""

    async def write(self, piece: bytes | memoryview) -> None:
        pass

    async def seal(self, body: Body) -> Copies:
        return Copies()

    async def abort(self) -> None:
        pass


_NOTHING = _Nothing()


class Alone:
    """Implements `Replication` for a node without a cluster: there are no others."""

    @property
    def me(self) -> Holder | None:
        return None

    def rule(self, asked_count: int | None) -> int:
        return asked_count or 1

    def can_reach(self, copies_count: int) -> bool:
        return copies_count <= 1

    def is_ready(self, copies_count: int) -> bool:
        return copies_count <= 1

    def begin(self, name: ObjectName, holder: str, body_uid: str, size_bytes: int | None, copies_count: int) -> Copying:
        return _NOTHING

    async def spread(
        self,
        name: ObjectName,
        holder: str,
        bodies: Sequence[Body],
        copies_count: int,
        at: Mapping[str, Sequence[Holder]],
    ) -> Copies:
        return Copies()

    def sources(self, holders: Iterable[Holder]) -> list[Holder]:
        return []

    async def read(self, source: Holder, body: Body, index: int) -> AsyncIterator[bytes]:
        raise PeerError("a node alone has no peers")
        yield b""

    async def held(self, source: Holder, bodies: Sequence[Body]) -> set[str]:
        return set()

    async def have_dropped(self, source: Holder, holder: str, body_uids: Sequence[str]) -> None:
        raise PeerError("a node alone has no peers")

    def notice(self, holders: Iterable[Holder], notices: Sequence[Notice]) -> None:
        pass

    async def close(self) -> None:
        pass
