"""A body that goes to peers while it arrives here."""

from collections.abc import Callable, Sequence

from tiergate.clock import Clock
from tiergate.errors import InvariantError, TooFewCopiesError
from tiergate.model import Body, Holder, Node, ObjectName
from tiergate.replication.base import Copies
from tiergate.replication.channel import PeerChannel
from tiergate.replication.push import Push
from tiergate.replication.roster import Roster
from tiergate.replication.seams import HoldingMemory
from tiergate.replication.wire import PeerFaultError, Reason

REPLACEMENTS_COUNT = 3
"""So many more peers are tried for one set of copies than it takes."""

SEND_BYTES = 1 << 20
"""How much of a block goes into a socket at a time."""

GiveBack = Callable[[Node, str, str], None]
"""Tell a peer, in the background, that it need not keep a body: node, holder, body."""


class PeerCopying:
    """Implements `Copying`."""

    def __init__(
        self,
        memory: HoldingMemory,
        channel: PeerChannel,
        roster: Roster,
        clock: Clock,
        give_back: GiveBack,
        name: ObjectName,
        holder: str,
        body_uid: str,
        size_bytes: int | None,
        peers_count: int,
        commit_s: float,
    ) -> None:
        """Raises MembershipOverError."""
        roster.me()
        self._memory = memory
        self._channel = channel
        self._roster = roster
        self._clock = clock
        self._give_back = give_back
        self._name = name
        self._holder = holder
        self._body_uid = body_uid
        self._peers_count = peers_count
        self._commit_s = commit_s
        chosen = roster.places(holder)[:peers_count]
        self._pushes = [(node, channel.push(node, name, holder, body_uid, size_bytes)) for node in chosen]

    async def write(self, piece: bytes | memoryview) -> None:
        for _, push in self._pushes:
            await push.feed(piece)
        for _, push in self._pushes:
            await push.settle()

    async def seal(self, body: Body) -> Copies:
        until_s = self._clock.monotonic_s() + self._commit_s
        held: list[Holder] = []
        failed: list[Node] = []
        try:
            # All are told to end before the first is waited for.
            for _, push in self._pushes:
                push.end()
            for node, push in self._pushes:
                await self._take(node, push, body, held, failed)
            if len(held) < self._peers_count:
                await self._replace(body, held, failed)
            return Copies((self._roster.me(), *held), until_s if held else float("inf"))
        except BaseException:  # Cancelled too: peers need not keep what nobody will commit.
            await self.abort()
            raise

    async def abort(self) -> None:
        pushes, self._pushes = self._pushes, []
        for _, push in pushes:
            await push.abort()
        for node, push in pushes:
            if push.may_be_held:
                self._give_back(node, self._holder, self._body_uid)

    async def _take(self, node: Node, push: Push, body: Body, held: list[Holder], failed: list[Node]) -> None:
        """Wait for what a peer says, and put it into one of the lists."""
        try:
            taken = await push.finish()
            if (taken.size_bytes, taken.blocks) != (body.size_bytes, body.blocks):
                raise self._channel.fault(node, Reason.MISMATCH, "it took other bytes than were sent")
        except PeerFaultError as error:
            self._roster.shun(node.name)
            if error.reason is not Reason.MISMATCH or await self._is_given_back(node):
                failed.append(node)
        else:
            held.append(Holder(node.name, taken.epoch))

    async def _is_given_back(self, node: Node) -> bool:
        """Waited for, since the node may be asked to take the body again."""
        try:
            await self._channel.give_back(node, self._holder, self._body_uid)
        except PeerFaultError:
            return False
        return True

    async def _replace(self, body: Body, held: list[Holder], failed: list[Node]) -> None:
        """Send from memory to those that come next, and at last to those that failed before.

        Raises:
            TooFewCopiesError: they do not take it either.
        """
        tried = {node.name for node, _ in self._pushes}
        fresh = [node for node in self._roster.places(self._holder) if node.name not in tried]
        living = {node.name for node in self._roster.others()}
        candidates = [*fresh, *(node for node in failed if node.name in living)]
        for node in candidates[: self._peers_count - len(held) + REPLACEMENTS_COUNT]:
            await self._send(node, body, held)
            if len(held) == self._peers_count:
                return
        raise TooFewCopiesError(
            "not enough nodes took a copy",
            bucket=self._name.bucket,
            key=self._name.key,
            copies=1 + len(held),
            wanted=1 + self._peers_count,
        )

    async def _send(self, node: Node, body: Body, held: list[Holder]) -> None:
        """Send the body from this node's memory."""
        pin = self._memory.pin(body.uid)
        push = self._channel.push(node, self._name, self._holder, body.uid, body.size_bytes)
        self._pushes.append((node, push))
        try:
            for index in range(body.block_count):
                views = pin.block(index) if pin is not None else None
                if views is None:
                    raise InvariantError("a body that was just sealed is not in memory", uid=body.uid, index=index)
                if push.error is not None:
                    break
                await _write_all(push, views)
            await self._take(node, push, body, held, [])
        finally:
            await push.abort()  # Nothing in the transport refers to memory that is no longer pinned.
            if pin is not None:
                pin.release()


async def _write_all(push: Push, views: Sequence[memoryview]) -> None:
    for view in views:
        for start in range(0, len(view), SEND_BYTES):
            await push.write(view[start : start + SEND_BYTES])
