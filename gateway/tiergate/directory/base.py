"""The directory's seam: who has which version, in which order things were committed, what the origin is owed.

The directory decides; slabs and inventory only say which bytes this node holds. Every method is one atomic
transition, durable against the death of any process when it returns. Methods are coroutines because an
implementation may sit behind a network; a cancelled call either happened whole or not at all.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tiergate.model import (
    Agreement,
    Bucket,
    Holder,
    ObjectName,
    OriginUpload,
    Part,
    Pending,
    PinnedPrefix,
    Plan,
    QuarantinedSet,
    Record,
    Role,
    Run,
    Step,
    Upload,
    Version,
)
from tiergate.policy.persistence import Beginning


@dataclass(frozen=True, slots=True)
class Seen:
    """A strong read of a key. `revision` is the directory's revision at the read: everything acknowledged before
    the read began has a commit revision of at most this."""

    record: Record | None
    pending: Pending | None
    revision: int
    drops: int = field(default=0, compare=False)
    """How often this key, or one that shares its slot, lost its record: for `adopt`."""
    holders: Mapping[str, frozenset[Holder]] = field(default_factory=dict, compare=False)
    """In a cluster: who said to hold versions of the key, by the version's uid. Whose epoch is over holds nothing."""
    bucket: Bucket | None = field(default=None, compare=False)
    """In a cluster: what was learnt of the key's bucket, as `get_bucket` says. It costs no way to etcd of its own."""

    @property
    def guard(self) -> int:
        """What a guarded change compares: the record's `modified`, 0 for no record."""
        return self.record.modified if self.record else 0


@dataclass(frozen=True, slots=True)
class Intent:
    """What a committing write says of itself. `start_revision`: the directory's revision when its request began.
    `base`: the origin's ETag it replaces if the caller asked the origin (else UNKNOWN_BASE; a base the directory
    knows already wins over UNKNOWN_BASE). `guard`: commit only if the record's `modified` still is this (0: no
    record); None: unconditionally."""

    role: Role
    start_revision: int
    now_s: float
    base: str
    guard: int | None = None
    conditional: bool = False
    holders: tuple[Holder, ...] = ()
    """The nodes of a cluster that hold the whole version: each must still be what it was for the write to happen."""
    parked: bool = False
    """It is to stay in memory (`Pending.parked`), whatever `points_to` says."""
    plan: Plan | None = None
    """The plan of its set, which then decides that; it must still be that one."""
    points_to: tuple[str, ...] = ()
    """The sets that a pointer names: it stays in memory if one of them does."""


@dataclass(frozen=True, slots=True)
class Committed:
    """A commit's revision and the version it replaced (whose bytes the caller now lets go), if any. `held_by`: in a
    cluster, who held that version. `parked`: it stays in memory."""

    revision: int
    replaced: Version | None
    held_by: frozenset[Holder] = frozenset()
    parked: bool = False


@dataclass(frozen=True, slots=True)
class Finished:
    """A multipart upload that was completed: the answer to a repeated CompleteMultipartUpload. `parts` is the list of
    (number, etag) it was completed with."""

    name: ObjectName
    version_uid: str
    etag: str
    parts: tuple[tuple[int, str], ...]
    finished_s: float
    through: bool = False
    """It was completed in the origin."""


class Directory(Protocol):
    """See the module. Keys iterate in the order of their UTF-8 bytes, as S3 lists them."""

    # -- objects
    async def revision(self) -> int:
        """The revision of the newest change. Each commit has a greater one than all that were acknowledged before it;
        some that were made at the same time may share one."""
        ...

    async def get(self, name: ObjectName) -> Seen:
        """The current record and pending write of a key."""
        ...

    async def records(self, bucket: str, keys: Sequence[str]) -> list[Record]:
        """The records of those of the keys that have one, in the order of the keys; all as of one revision."""
        ...

    async def scan(self, bucket: str, prefix: str, after: str, limit: int) -> list[Record]:
        """Up to `limit` records of any state whose key starts with `prefix` and is greater than `after`."""
        ...

    async def survey(self, bucket: str, prefix: str, after: str, limit: int) -> list[Seen]:
        """Like `scan`, each record with its pending write and, in a cluster, who holds its versions; all as of one
        revision. What `get` says of buckets and slots is not told."""
        ...

    async def put(self, name: ObjectName, version: Version, intent: Intent) -> Committed:
        """Commit a version as dirty and owed to the origin.

        Replacing a pending write of the key, the new one inherits its `place`, `base` (if known, and unless it has
        begun: then only the origin knows), `withdrawn` (markers), and takes over its `upload` as one of the
        `leftovers`; `begun` starts false. Replacing an existing version, it sets `disturbed_s = now_s` on every
        pending marker whose scope holds the key and whose `revision` is greater than that of the version replaced;
        a marker does so beyond its own scope only, a pointer not at all. What is parked disturbs only what is.

        Raises:
            ConflictError: the guard does not hold; nothing changed.
            PlanOverError: the plan of its set is over: decide anew. It is also when a member is written again after a
                marker of the set was.
            NotParkableError: it is to be parked, is no pointer, and the origin may hold something of the key, or is
                owed it.
        """
        ...

    async def put_through(self, name: ObjectName, version: Version, origin_etag: str, intent: Intent) -> Committed:
        """Commit a version that the origin already holds (write-through): the record is clean, a pending write of the
        key is superseded and its uploads become orphans (`orphan_uploads`). Disturbs markers like `put`.

        Raises:
            ConflictError: the guard does not hold.
        """
        ...

    async def delete(self, name: ObjectName, intent: Intent) -> Committed | None:
        """Commit a deletion: the record becomes a tombstone, a delete is owed to the origin.

        Where the origin surely does not hold the key and no upload of it has begun, record and pending write just
        go. None if nothing needed doing: the key is a tombstone already. A key without a record gets a tombstone
        too, unless the caller knows that the origin has none. Inherits and disturbs like `put`, but of markers only
        those in the innermost scope that has any: an old set going does not touch what points at the newest.

        Raises:
            ConflictError: the guard does not hold.
        """
        ...

    async def scan_unpersisted(self, bucket: str, prefix: str, after: str, limit: int) -> list[Record]:
        """Like `scan`, of the records only that are dirty or tombstones."""
        ...

    async def adopt(
        self,
        name: ObjectName,
        version: Version,
        origin_etag: str,
        role: Role,
        now_s: float,
        since: int | None = None,
    ) -> Record:
        """Record a version found in the origin as clean, unless the key has a record: then that one is returned. Its
        place among the commits is not known: a marker counts as after all, anything else as before all. `since` is
        what `Seen.drops` was before the origin was asked.

        Raises:
            ConflictError: the key (or one that shares its slot) lost its record after `since`, so the origin may have
                spoken of what was deleted meanwhile. Ask again.
        """
        ...

    async def revalidated(self, name: ObjectName, uid: str, now_s: float) -> None:
        """Note that the origin still holds clean version `uid`; nothing if it is no longer current."""
        ...

    async def forget(self, name: ObjectName, uid: str | None) -> Version | None:
        """Drop the clean record of version `uid` (None: any clean one), because the origin holds something else.
        Returns the dropped version. Dirty records and tombstones stay."""
        ...

    async def trim_clean(self, keep_count: int) -> list[Version]:
        """Drop the oldest clean records (by commit revision, markers never) beyond `keep_count`, and more where the
        directory runs out of room; returns the versions, of a bounded number of them: none are returned when there
        is nothing left to do."""
        ...

    # -- write-back
    async def pending(self) -> list[Pending]:
        """All that this node owes the origin, by `place`: what is not parked. Alone that is everything; in a cluster,
        what it owns."""
        ...

    async def parked(self) -> list[Pending]:
        """All that is parked, by `place`; in a cluster what this node owns."""
        ...

    async def promote(self, writes: Sequence[Pending], now_s: float) -> int:
        """What is parked of these, whoever owns it, is owed from `now_s` on, each in the place of its own commit; a
        pointer behind everything, and only if no plan keeps what it names. How many were. In the order given, and a
        bounded number at a time: who is stopped in between has promoted the first of them."""
        ...

    async def park(self, name: ObjectName, uid: str, plan: Plan) -> bool:
        """Park pending put `uid`, whoever owns it, of a key that the origin does not hold, while its set's plan is
        `plan`; whether it is parked now. Not if it has begun, was set aside, stands on something, or leaves uploads."""
        ...

    async def beside(self, writes: Sequence[Pending], whole: Collection[str] = ()) -> list[Pending]:
        """The pending writes, of any node, that decide when these may be seen in the origin (the fence's view; nothing
        parked does), by `place`: for each of `writes`, which need not be pending, all that it must wait for, or some
        that it surely must. Those that are pending are among them, as they stand now. `whole`: buckets where everything
        waits for everything before it (mode `strict`), so that all that is pending there is wanted."""
        ...

    async def pending_under(self, bucket: str, prefix: str, limit: int) -> list[Pending]:
        """Up to `limit` pending writes, parked ones too, of keys that start with `prefix`, in key order."""
        ...

    async def oldest_pending_s(self) -> float | None:
        """When the oldest that is not quarantined of what this node owes was committed; None if it owes nothing."""
        ...

    async def owed_bytes(self) -> int:
        """The bytes of what this node owes, but for what is quarantined."""
        ...

    async def begin(self, name: ObjectName, uid: str, base: str) -> Pending:
        """Mark that write-back of `uid` has begun and may reach the origin from now on, on top of `base`.

        Raises:
            FencedError: `uid` is no longer what is pending, or no longer this node's; or it is parked.
        """
        ...

    async def note_upload(self, name: ObjectName, uid: str, upload: OriginUpload | None) -> Pending:
        """Record the multipart upload (or the intent to start one) that carries `uid`, or None: there is none.

        Raises:
            FencedError: `uid` is no longer what is pending, or no longer this node's.
        """
        ...

    async def drop_leftovers(self, name: ObjectName, dropped: Sequence[OriginUpload]) -> None:
        """Forget leftover uploads that were aborted."""
        ...

    async def orphan_uploads(self) -> list[tuple[ObjectName, OriginUpload]]:
        """Uploads left by pending writes that went without a successor; to abort, then `drop_leftovers`."""
        ...

    async def persisted(self, name: ObjectName, uid: str, origin_etag: str, now_s: float) -> Version | None:
        """The origin holds pending write `uid`: a put becomes clean (returned: its version), a delete's tombstone goes
        (None). If it was superseded meanwhile, None is returned, and the newer pending write's `base` becomes
        `origin_etag` (NO_BASE for a delete), unless another node owns that one: it may have begun, and asks the origin.

        Raises:
            FencedError: another node owns `uid` now.
        """
        ...

    async def rebase(self, name: ObjectName, uid: str, base: str) -> Pending:
        """The origin holds something else than thought: write-back of `uid` goes on top of `base`.

        Raises:
            FencedError: `uid` is no longer what is pending, or no longer this node's.
        """
        ...

    async def standing_markers(self, bucket: str, scopes: Sequence[str]) -> list[Seen]:
        """The markers (role MARKER) whose parent prefix is the first of `scopes` that has any marker with a record, in
        whatever state. `scopes` go from the innermost outwards."""
        ...

    async def withdraw(self, name: ObjectName, uid: str, now_s: float) -> Pending | None:
        """A clean marker is about to be deleted in the origin: its record turns dirty, with a pending put that is
        `withdrawn` and disturbed at `now_s`, of this node, which holds its bytes. None if `uid` is no longer the clean
        current version. Recorded before the origin is touched, so that a crash in between only makes it be deleted and
        put again."""
        ...

    async def owe_again(self, name: ObjectName, uid: str, base: str, now_s: float) -> Pending | None:
        """The origin lost clean version `uid`, or holds other bytes, under the ETag `base` (NO_BASE: nothing): its
        record turns dirty, with a pending put of this node, which holds its bytes, in the place of its own commit. None
        if `uid` is no longer the clean current version."""
        ...

    async def withdrawn(self, name: ObjectName, uid: str) -> None:
        """The origin no longer holds the marker: the pending write `uid` stands on NO_BASE and is `withdrawn`; nothing
        if it is no longer pending. Whoever owns it: the marker goes for another write's sake."""
        ...

    async def settled_set(self, name: ObjectName, uid: str) -> None:
        """Nothing more is to come for the marker's set: pending write `uid`, whoever owns it, was never disturbed;
        nothing if it is no longer pending."""
        ...

    async def quarantine(self, name: ObjectName, uid: str, reason: str) -> None:
        """Set aside (`reason`) or release (empty reason) a pending write; nothing if it is no longer pending, or a
        living other node's."""
        ...

    # -- plans of sets
    async def get_plan(self, bucket: str, prefix: str) -> Plan | None:
        """What was decided for the set of a prefix."""
        ...

    async def plans(self, bucket: str, under: str) -> list[Plan]:
        """All plans of sets whose prefix starts with `under`, by prefix."""
        ...

    async def get_run(self, bucket: str, prefix: str) -> Run | None:
        """What is known of a run."""
        ...

    async def decide(self, beginning: Beginning) -> Plan:
        """The plan of a set: decided now if it has none, or if the one it has was dropped or is `instead_of`."""
        ...

    async def change_plan(self, before: Plan, after: Plan | None) -> bool:
        """Replace a plan, or forget it, if it still is `before`; whether that was done."""
        ...

    async def drop_plan(self, before: Plan) -> Plan | None:
        """Note that a set goes, if its plan still is `before`: the plan then. What was committed before its `dropped`
        belongs to the set; whatever is written later begins another."""
        ...

    # -- steps under way
    async def begin_step(self, step: Step) -> bool:
        """Announce a step, or the same one anew; False if another stands that it must not overlap with: they `collide`
        (`checkpoints.markers`). Its holder, or who finds that dead, ends it."""
        ...

    async def steps(self) -> list[Step]:
        """The steps that stand."""
        ...

    async def end_step(self, step: Step) -> None:
        """The step is over, if it was begun at all."""
        ...

    # -- multipart uploads of clients
    async def create_upload(self, upload: Upload) -> None:
        """Begin a client's multipart upload."""
        ...

    async def get_upload(self, upload_id: str) -> Upload | None:
        """A multipart upload in progress."""
        ...

    async def list_uploads(self, bucket: str, prefix: str) -> list[Upload]:
        """Uploads in progress of keys that start with `prefix`, by key, then by start."""
        ...

    async def put_part(self, upload_id: str, part: Part) -> Part | None:
        """Add or replace a part; returns the part replaced.

        Raises:
            NotFoundError: NoSuchUpload.
        """
        ...

    async def note_spill(self, upload_id: str, spill_id: str) -> str:
        """Record the origin's upload that takes this one's spilled parts, unless it has one: that one is returned.

        Raises:
            NotFoundError: NoSuchUpload.
        """
        ...

    async def move_part(self, upload_id: str, part: Part, moved: Part) -> bool:
        """Replace `part` by `moved` (the same bytes, now in the origin); False if it is no longer that part."""
        ...

    async def origin_upload_ids(self, bucket: str) -> set[str]:
        """The origin's uploads in a bucket that are the gateway's own: write-backs', leftovers' and spills'."""
        ...

    async def list_parts(self, upload_id: str) -> list[Part]:
        """Parts of an upload by number; empty if there is no such upload."""
        ...

    async def abort_upload(self, upload_id: str) -> list[Part] | None:
        """End an upload; returns its parts, None if there is no such upload. A spill of it becomes an orphan."""
        ...

    async def finish_upload(
        self, upload_id: str, version: Version, part_list: Sequence[tuple[int, str]], intent: Intent
    ) -> Committed:
        """`put` of the completed version, the end of the upload and the memory of its answer, as one transition.
        A spill of it becomes an orphan: no part of the version is there.

        Raises:
            NotFoundError: NoSuchUpload.
            PartsChangedError: a part of the version no longer is the upload's, or went to the origin.
            ConflictError: the guard does not hold.
        """
        ...

    async def end_spilled(
        self, upload_id: str, version: Version, part_list: Sequence[tuple[int, str]], now_s: float
    ) -> None:
        """The end of an upload that was completed in the origin, and the memory of its answer."""
        ...

    async def finished_upload(self, upload_id: str) -> Finished | None:
        """What a completed upload answered; kept for some hours."""
        ...

    async def expire_finished(self, before_s: float) -> int:
        """Forget answers of uploads completed before `before_s`, and what was agreed before; returns how many."""
        ...

    # -- buckets
    async def get_bucket(self, name: str) -> Bucket | None:
        """What was learnt of a bucket, however long ago."""
        ...

    async def buckets(self) -> list[Bucket]:
        """All that was learnt of any bucket, by name: whatever has a record is in one of them."""
        ...

    async def put_bucket(self, bucket: Bucket) -> None:
        """Keep what the origin said of a bucket."""
        ...

    async def forget_bucket(self, name: str) -> None:
        """The origin says there is no such bucket."""
        ...

    # -- pinned prefixes
    async def pin_prefix(self, pinned: PinnedPrefix) -> None:
        """Pin a prefix; one that is pinned stays as it is."""
        ...

    async def unpin_prefix(self, bucket: str, prefix: str) -> bool:
        """Let go of a pinned prefix, just as it was pinned; False if it was not."""
        ...

    async def pinned_prefixes(self) -> list[PinnedPrefix]:
        """All pinned prefixes, by the time they were pinned."""
        ...

    # -- which checkpoint a restart takes
    async def quarantine_set(self, found: QuarantinedSet) -> None:
        """Have a set passed over, for this reason and no other."""
        ...

    async def release_set(self, found: QuarantinedSet) -> bool:
        """Have a set passed over no longer, if that is what is said of it; whether it was."""
        ...

    async def quarantined_sets(self, bucket: str) -> list[QuarantinedSet]:
        """The sets of a bucket that are passed over, by prefix."""
        ...

    async def agree(self, proposed: Agreement) -> Agreement:
        """The agreement of that name on a prefix: the one that stands, else this one from now on."""
        ...

    async def agreed(self, bucket: str, prefix: str, name: str) -> Agreement | None:
        """The agreement that stands, if any."""
        ...

    # -- holders
    async def live_holders(self) -> set[str]:
        """The uids whose bytes this node must keep or may keep: current versions (in a cluster those that it said to
        hold) and the ids of uploads in progress."""
        ...

    async def owed_holders(self) -> set[str]:
        """Those of them whose bytes the origin does not have: of pending puts and of uploads in progress."""
        ...

    async def counts(self) -> dict[str, int]:
        """Records by state, pending writes that are owed and their bytes, parked ones and theirs, uploads in progress,
        bytes used: for metrics and status. In a cluster clean records, markers, uploads and bytes are everybody's (of
        very many as they were up to a minute ago), what is owed to the origin or parked this node's."""
        ...


@dataclass(frozen=True, slots=True)
class Held:
    """A version that a node of a cluster said to hold."""

    name: ObjectName
    uid: str
    epoch: int


class ClusterDirectory(Directory, Protocol):
    """A directory that several nodes share. What a node commits it owns: it must bring it to the origin, until its
    membership is over. Any change raises `MembershipOverError` when that is so, also what is asked of this node's own
    (`pending`, `oldest_pending_s`, `live_holders`, `owed_holders`, `counts`)."""

    async def count_for_all(self) -> None:
        """To be called by one node, four times a minute: count for `counts` of all nodes where it would take long."""
        ...

    async def hold(self, name: ObjectName, uid: str, holders: Sequence[Holder]) -> bool:
        """Note more holders of a version; False if it no longer is the current one.

        Raises:
            HolderLostError: one of them is gone, or began anew.
        """
        ...

    async def release(self, name: ObjectName, uid: str, node: str) -> None:
        """A node no longer holds a version."""
        ...

    async def held_by(self, node: str) -> list[Held]:
        """The versions that a node said to hold, in whatever epoch."""
        ...

    async def owed_by(self, node: str) -> list[Pending]:
        """The pending writes that a node owns, in whatever epoch, parked ones too, by `place`."""
        ...

    async def unpersisted(self, limit: int) -> list[tuple[Pending, frozenset[Holder]]]:
        """Up to `limit` pending writes, of any owner, by name, each with who said to hold its version (of a deletion:
        nobody)."""
        ...

    async def owners(self) -> set[str]:
        """The names of the nodes, living or dead, that own pending writes; the empty one for those of nobody."""
        ...

    async def claim(self, name: ObjectName, uid: str) -> Pending | None:
        """Become the owner of a pending write whose owner's membership is over, or which is `LOST`. None if it is
        finished, superseded, or owned by a living node; this node's own is returned as it is."""
        ...

    async def give(self, name: ObjectName, uid: str, to: Holder) -> bool:
        """Make another node the owner of a pending write of this node's; False if it is no longer that.

        Raises:
            HolderLostError: the other is gone, or began anew.
        """
        ...
