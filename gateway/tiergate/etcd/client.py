"""The client of an etcd cluster: picks members, tries again where that is safe, and never where it is not."""

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tiergate.clock import Clock
from tiergate.errors import (
    ConfigError,
    DirectoryUnavailableError,
    FencedError,
    ForeignDirectoryError,
    InvariantError,
    OutcomeUnknownError,
    invariant,
)
from tiergate.etcd.channel import Member, Tls, TokenRefusedError
from tiergate.etcd.grouped import GroupedReads, may_join
from tiergate.etcd.values import Agreed, Outcome, Range, Txn
from tiergate.etcd.wire import outcome_of, rpc, txn_message
from tiergate.policy.backoff import delay_s

TRY_S = 1.0
"""One try of a call at one member. A leader is elected within two of them."""

COUNTING_TRY_S = 8.0
"""The same of a read that counts rows: it goes through all of them, of which there may be a million."""

PATIENCE_S = 10.0
"""So long a call that may be repeated is."""

BACKOFF_BASE_S = 0.05
BACKOFF_CAP_S = 1.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Access:
    """Where the cluster is and who we are to it. `endpoints`: host:port of each member."""

    endpoints: Sequence[str]
    tls: Tls | None = None
    user: str = ""
    password: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class Known:
    """What a directory surely had: a revision, and a row, `witness`, that was written last at `witnessed` or later. And
    how to tell what is in its row (empty for none)."""

    revision: int = 0
    is_mark: Callable[[bytes], bool] = lambda value: True
    witness: bytes = b""
    witnessed: int = 0


class EtcdClient:
    """One for a process, opened in its event loop; `close` it in the end.

    Every method raises `ForeignDirectoryError` when another cluster answers than before, or the same one in an earlier
    state, `ConfigError` when etcd does not take our user, and `DirectoryUnavailableError` when no member answers. That
    it went back is never unlearned: others may bring its revision past what was known, and nothing would tell then. All
    calls are refused until `begin_anew`.

    `agreed`: the directory that this node works with (its era and etcd's id of the cluster), where another process
    decides that; `known`: what is known of it, whose row `mark` is asked for when in doubt; `on_doubt` is called once
    when it went back, with what was agreed on.
    """

    def __init__(
        self,
        access: Access,
        clock: Clock,
        rng: random.Random,
        *,
        patience_s: float = PATIENCE_S,
        agreed: Callable[[], Agreed | None] = lambda: None,
        mark: bytes = b"\0",
        known: Callable[[], Known] = Known,
        on_doubt: Callable[[Agreed | None], None] = lambda _: None,
    ) -> None:
        invariant(bool(access.endpoints), "an etcd cluster needs an endpoint")
        self.clock = clock
        self.rng = rng
        self._access = access
        self._patience_s = patience_s
        self._members = [Member(endpoint, access.tls) for endpoint in access.endpoints]
        # Each client begins at a member of its own choice, which spreads the reads.
        self._index = rng.randrange(len(self._members))
        self._cluster_id = 0
        self._newest = 0
        self._generation = 0
        self._agreed = agreed
        self._followed: Agreed | None = None
        self._mark = mark
        self._known = known
        self._on_doubt = on_doubt
        self._doubt: ForeignDirectoryError | None = None
        self._token = ""
        self._grouped = GroupedReads(self._read)

    @property
    def generation(self) -> int:
        """How many directories were given up: nothing that was read of an earlier one may be relied on."""
        self._follow()
        return self._generation

    def begin_anew(self) -> None:
        """Take whichever cluster answers next, in whatever state, for the directory."""
        self._cluster_id = self._newest = 0
        self._doubt = None
        self._token = ""
        self._generation += 1

    @property
    def is_doubted(self) -> bool:
        """Whether the directory went back."""
        return self._doubt is not None

    def doubt(self, generation: int, message: str, **context: object) -> ForeignDirectoryError:
        """The directory of a generation went back, as its caller saw; returns the error to raise."""
        error = ForeignDirectoryError(message)
        error.context = context
        if generation == self.generation and self._doubt is None:
            self._doubt = error
            self._on_doubt(self._followed)
        return error

    def _believe(self) -> None:
        if self._doubt is not None:
            error = ForeignDirectoryError(self._doubt.message)
            error.context = self._doubt.context
            raise error

    def _follow(self) -> None:
        agreed = self._agreed()
        if agreed is None or agreed == self._followed:
            return
        if self._followed is not None or self._cluster_id not in (0, agreed.cluster_id):
            self.begin_anew()
        self._followed, self._cluster_id = agreed, agreed.cluster_id

    @property
    def cluster_id(self) -> int:
        """Etcd's own id of the cluster that answered first; 0 before that."""
        return self._cluster_id

    async def close(self) -> None:
        """Close all channels; calls in flight end with an error."""
        await self._grouped.close()
        for member in self._members:
            await member.close()

    async def connect(self, known: Known | None = None) -> None:
        """See that the cluster answers us, and holds the directory that this node knows, or one that it knew so.

        Raises:
            ConfigError: it does not take us: it wants a user, or another.
        """
        generation = self.generation
        known = known or self._known()  # before it is asked: it goes on
        try:
            outcome = await self.read(Range(self._mark), *([Range(known.witness)] if known.witnessed else []))
        except InvariantError as error:
            # So plain a request can only be refused for who sent it.
            raise ConfigError("etcd refuses us; does it want a user and a password?", **error.context) from error
        rows = outcome.found(0)
        is_another = not known.is_mark(rows[0].value if rows else b"")
        if is_another or outcome.revision < known.revision:
            raise self.doubt(generation, "etcd is not what it was", revision=outcome.revision)
        witnesses = outcome.found(1) if known.witnessed else ()
        if known.witnessed > max((row.mod_revision for row in witnesses), default=0):
            raise self.doubt(generation, "etcd went back to an earlier state", known=known.witnessed)

    # -- reads and transactions
    async def read(self, *ranges: Range) -> Outcome:
        """Linearizable reads, all of the same revision. Repeated until a member answers. Short ones that are asked for
        at the same time go together.

        Raises:
            CompactedError: a revision asked for is no longer kept.
        """
        joins = may_join(ranges)

        async def ask() -> Outcome:
            nonlocal joins
            if joins:
                # Once: it may be for the others that a group is refused, or takes too long.
                joins = False
                outcome = await self._grouped.read(ranges)
                if outcome is not None:
                    return outcome
            return await self._read(ranges)

        return await self.repeat(ask)

    async def _read(self, ranges: Sequence[Range]) -> Outcome:
        # etcd goes through all rows that it counts.
        try_s = COUNTING_TRY_S if any(each.count_only for each in ranges) else TRY_S
        return outcome_of(await self._call("txn", txn_message(Txn((), tuple(ranges))), try_s))

    async def txn(self, txn: Txn) -> Outcome:
        """A transaction, tried once.

        Raises:
            OutcomeUnknownError: no answer: it may have happened, or may yet. Only who knows how to tell may repeat it.
            MemoryFullError: etcd has no room.
            FencedError: a row is put under a lease that is gone.
        """
        try:
            return outcome_of(await self._call("txn", txn_message(txn)))
        except DirectoryUnavailableError as error:
            unknown = OutcomeUnknownError("no answer to a transaction")
            unknown.context = error.context
            raise unknown from error

    # -- leases
    async def grant(self, ttl_s: int) -> int:
        """The id of a new lease. Repeated: one that was granted without our knowing ends by itself."""
        message = rpc.LeaseGrantRequest(TTL=ttl_s)
        answer = await self.repeat(lambda: self._call("grant", message))
        lease_id: int = answer.ID
        return lease_id

    async def keep_alive(self, lease_id: int) -> int:
        """Renew a lease, tried once; returns the seconds it has from now on, 0 if it is gone. Old servers may answer so
        of a revoked lease: whoever writes guards by what the lease holds."""
        message = rpc.LeaseKeepAliveRequest(ID=lease_id)
        _, stream, answer = await self.open("keep_alive", message)
        stream.cancel()
        ttl_s: int = answer.TTL
        return ttl_s

    async def revoke(self, lease_id: int) -> None:
        """End a lease and delete its rows; nothing if it is gone."""
        message = rpc.LeaseRevokeRequest(ID=lease_id)
        try:
            await self.repeat(lambda: self._call("revoke", message))
        except FencedError:
            return

    # -- members
    async def used_bytes(self) -> int:
        """What the store of the member we use takes of its quota (`--quota-backend-bytes`)."""
        answer = await self.repeat(lambda: self._call("status", rpc.StatusRequest()))
        used_bytes: int = answer.dbSize
        return used_bytes

    async def repeat(self, call: Callable[[], Awaitable[T]]) -> T:
        """Try until a member answers, a second each, with pauses after a round of all.

        Raises:
            DirectoryUnavailableError: none did for `patience_s`.
        """
        deadline_s = self.clock.monotonic_s() + self._patience_s
        attempt = 0
        while True:
            try:
                return await call()
            except DirectoryUnavailableError:
                attempt += 1
                pause_s = self.pause_s(attempt)
                if self.clock.monotonic_s() + pause_s >= deadline_s:
                    raise
                await self.clock.sleep(pause_s)

    def pause_s(self, attempt: int) -> float:
        """How long to wait after so many failures in a row: not at all until every member was asked."""
        round_count = attempt // len(self._members)
        return delay_s(round_count, self.rng, BACKOFF_BASE_S, BACKOFF_CAP_S) if round_count else 0.0

    async def _call(self, name: str, message: Any, try_s: float = TRY_S) -> Any:
        self._follow()
        self._believe()
        newest, generation = self._newest, self._generation

        async def at(member: Member, token: str) -> Any:
            answer = await member.call(name, message, token, try_s)
            self.check(answer)
            # Only of these the revision surely is one after the call began.
            if name == "txn" and generation == self._generation:
                self._see(answer.header.revision, newest)
            return answer

        return await self._at_member(at)

    def _see(self, revision: int, newest: int) -> None:
        if revision < newest:
            message = "etcd went back to an earlier state"
            raise self.doubt(self._generation, message, revision=revision, known=newest)
        self._newest = max(self._newest, revision)

    async def open(self, name: str, message: Any) -> tuple[Member, Any, Any]:
        """Open a stream, tried once: the member, the stream and its first answer."""
        self._follow()
        self._believe()

        async def at(member: Member, token: str) -> tuple[Member, Any, Any]:
            stream, answer = await member.open(name, message, token, TRY_S)
            try:
                self.check(answer)
            except ForeignDirectoryError:
                stream.cancel()
                raise
            return member, stream, answer

        return await self._at_member(at)

    async def _at_member(self, call: Callable[[Member, str], Awaitable[T]]) -> T:
        member = self._members[self._index]
        try:
            try:
                return await call(member, await self._authenticated(member))
            except TokenRefusedError:
                # What was refused did not happen, so this is no blind repetition.
                self._token = ""
                return await call(member, await self._authenticated(member))
        except TokenRefusedError as error:
            if self._access.user:
                raise ConfigError(f"etcd at {member.endpoint} refuses us or the request", **error.context) from error
            raise InvariantError("etcd refuses the request", **error.context) from error
        except DirectoryUnavailableError:
            self.avoid(member)
            raise

    async def _authenticated(self, member: Member) -> str:
        if self._access.user and not self._token:
            message = rpc.AuthenticateRequest(name=self._access.user, password=self._access.password)
            answer = await member.call("authenticate", message, "", TRY_S)
            self._token = answer.token
        return self._token

    def avoid(self, member: Member) -> None:
        """Go to the next member, unless somebody did already."""
        if self._members[self._index] is member:
            self._index = (self._index + 1) % len(self._members)

    def forget_token(self) -> None:
        """The token is not taken any more."""
        self._token = ""

    def check(self, answer: Any) -> None:
        """See that the cluster that was met first answers.

        Raises:
            ForeignDirectoryError: another one does.
        """
        cluster_id: int = answer.header.cluster_id
        if not self._cluster_id:
            self._cluster_id = cluster_id
        if cluster_id != self._cluster_id:
            raise ForeignDirectoryError("another etcd cluster answers", expected=self._cluster_id, answered=cluster_id)
