"""The value types that travel between rooms. Pure: no I/O, no clock.

Sizes are bytes, times are Unix seconds, ETags are kept without their quotes.
"""

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

BLOCK_BYTES = 4 << 20
"""Unit of filling, eviction of ranges and integrity: one CRC-64/NVME is kept for each block of a body."""

BLOCK_CHECKSUM_BYTES = 8


def new_uid(wall_s: float) -> str:
    """A fresh 28-character identifier that sorts by time (milliseconds) and is otherwise random."""
    return f"{int(wall_s * 1000):012x}{secrets.token_hex(8)}"


@dataclass(frozen=True, slots=True, order=True)
class ObjectName:
    """A key in a bucket. `key` is the decoded key, any non-empty text of up to 1,024 UTF-8 bytes."""

    bucket: str
    key: str


@dataclass(frozen=True, slots=True, order=True)
class Holder:
    """A node that holds the bytes of a version. `epoch`: of which of its memberships it speaks; one that is over holds
    nothing until it says so again."""

    node: str
    epoch: int


@dataclass(frozen=True, slots=True)
class About:
    """What a node says of itself. `address`: host:port that its peers reach. `boot`: names the life of its memory; what
    it held before is lost when this changes. `s3`: host:port that clients on other machines reach, empty if they reach
    none."""

    address: str
    zone: str = ""
    boot: str = ""
    free_bytes: int = 0
    s3: str = ""


@dataclass(frozen=True, slots=True)
class Node:
    """A member of the cluster."""

    name: str
    epoch: int
    about: About

    @property
    def holder(self) -> Holder:
        """The node as the holder of something."""
        return Holder(self.name, self.epoch)


@dataclass(frozen=True, slots=True)
class Live:
    """The members at a revision of the directory."""

    revision: int
    nodes: Mapping[str, Node]

    def still(self, holders: Iterable[Holder]) -> set[Holder]:
        """Those of the holders that are members of the epoch they spoke of."""
        return {each for each in holders if each.node in self.nodes and self.nodes[each.node].epoch == each.epoch}


@dataclass(frozen=True, slots=True)
class Body:
    """One sequence of bytes as it was received: the body of a PutObject or of one part.

    `blocks` holds one big-endian CRC-64/NVME for each `BLOCK_BYTES` of the body (the last may be shorter);
    empty when nobody proved the bytes to us (an object that was not written through the gateway).
    """

    uid: str
    size_bytes: int
    blocks: bytes = b""

    @property
    def block_count(self) -> int:
        return -(-self.size_bytes // BLOCK_BYTES)

    def block_size_bytes(self, index: int) -> int:
        """Length of block `index`; every block but the last is `BLOCK_BYTES` long."""
        return min(BLOCK_BYTES, self.size_bytes - index * BLOCK_BYTES)

    def block_checksum(self, index: int) -> int | None:
        """The CRC-64/NVME of block `index`, or None when it was never proved."""
        if not self.blocks:
            return None
        start = index * BLOCK_CHECKSUM_BYTES
        return int.from_bytes(self.blocks[start : start + BLOCK_CHECKSUM_BYTES], "big")


@dataclass(frozen=True, slots=True)
class Part:
    """A part of an object. A PutObject has exactly one, numbered 1.

    `checksums` maps an S3 checksum algorithm in lower case (`crc32`, `sha256`, ...) to its base64 value.
    """

    number: int
    body: Body
    etag: str
    modified_s: int = 0
    checksums: dict[str, str] = field(default_factory=dict)
    spilled_etag: str = ""
    """The origin's ETag of a part that went on to the origin because memory had no room; empty while in memory."""
    at: tuple[Holder, ...] = ()
    """In a cluster, while its upload is in progress: the nodes that hold the part."""


@dataclass(frozen=True, slots=True)
class Version:
    """One write of a key, and all of its identity (promise P6): what GET, HEAD and LIST show.

    `headers` are the stored response headers in lower case (content-type, cache-control, x-amz-storage-class,
    ...); `metadata` is the user's, names without `x-amz-meta-`. `multipart` says whether the client made it by a
    multipart upload. `parts` join to the object's bytes, in order; a foreign object has one part that spans it all.
    `checksum_type` is FULL_OBJECT, COMPOSITE or empty.
    """

    uid: str
    size_bytes: int
    etag: str
    modified_s: int
    parts: tuple[Part, ...]
    headers: dict[str, str] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    tagging: str = ""
    checksums: dict[str, str] = field(default_factory=dict)
    checksum_type: str = ""
    multipart: bool = False
    foreign: bool = False
    """True for an object that was found in the origin, not written through the gateway."""


class State(StrEnum):
    """Where the current version of a key stands."""

    DIRTY = "dirty"
    CLEAN = "clean"
    TOMBSTONE = "tombstone"


class Role(StrEnum):
    """How the fence treats an object (design section 6)."""

    MARKER = "marker"
    POINTER = "pointer"
    LARGE = "large"
    SMALL = "small"


UNKNOWN_BASE = "?"
NO_BASE = ""


@dataclass(frozen=True, slots=True)
class Record:
    """What the directory knows of a key. `version` is None exactly for a tombstone.

    `revision` is the place of the commit in the one order of all commits; `modified` is the revision of the last
    change of this record (a guard compares it). `origin_etag` is the ETag the origin gave for a clean version.
    `validated_s` is when the origin was last known to hold just this version.
    """

    name: ObjectName
    state: State
    revision: int
    modified: int
    version: Version | None
    origin_etag: str = ""
    validated_s: float = 0.0
    role: Role = Role.SMALL
    era: int = 0
    was: int = 0
    """In a cluster whose directory had forgotten it, and was told again: the directory in which it was committed, and
    the revision it had there."""


class Kind(StrEnum):
    """What a pending write will do to the origin."""

    PUT = "put"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class OriginUpload:
    """A multipart upload in the origin that works off a pending version.

    `upload_id` is empty while the intent is recorded but the origin's answer is not (a crash in between leaves an
    upload that recovery finds by key and start time).
    """

    upload_id: str
    started_s: float


LOST = "lost: every node that held it is gone"
"""Why a pending write is set aside (see `Pending`) until one of its holders comes back, which may then own it."""


@dataclass(frozen=True, slots=True)
class Pending:
    """One unfinished write-back: the newest committed change of a key that the origin does not hold yet.

    `place` orders it among all pending (inherited from the pending version it replaced), `revision` is its own
    commit, `start_revision` the directory's revision when its request began. `base` is the origin ETag it
    replaces: NO_BASE for "known to be absent", UNKNOWN_BASE for "nobody asked yet". `conditional` says that the
    client made the write on a condition, so that the origin must hold just this. `disturbed_s`: for a marker, when a
    member of its set was last replaced or deleted after it was committed (0: never). `withdrawn`: the marker stood in
    the origin and was taken away. `quarantined` is the reason of a permanent refusal, or empty. `leftovers` are uploads
    of superseded versions that must be aborted. `parked`: by policy it stays in memory, owed to nobody until it is
    promoted; `committed_s` is then since when it is owed. `points_to`: of a pointer under such a policy, the prefixes
    of the sets that it names.
    """

    name: ObjectName
    uid: str
    kind: Kind
    role: Role
    place: int
    revision: int
    start_revision: int
    committed_s: float
    size_bytes: int
    base: str = UNKNOWN_BASE
    conditional: bool = False
    begun: bool = False
    upload: OriginUpload | None = None
    leftovers: tuple[OriginUpload, ...] = ()
    disturbed_s: float = 0.0
    withdrawn: bool = False
    quarantined: str = ""
    owner: Holder | None = None
    """The node of a cluster that must bring it to the origin; None where a node is alone."""
    parked: bool = False
    points_to: tuple[str, ...] = ()

    @property
    def is_owed(self) -> bool:
        """Whether the origin is to get it as things stand, so that it counts for the bounds of loss."""
        return not (self.quarantined or self.parked)


class Stage(StrEnum):
    """What becomes of a set."""

    SENT = "sent"
    """It goes to the origin, or went there."""
    KEPT = "kept"
    """It stays in memory."""
    PROMOTING = "promoting"
    """From kept to sent: only its markers and pointers still stay."""
    PARKING = "parking"
    """From sent to kept: its markers and pointers stay first."""
    DROPPED = "dropped"
    """It is being deleted, or was."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What was decided for a set, by its prefix, when its first object was written. `ordinal`: which one of its run it
    is, in the order in which they began. `revision`: of the decision. `dropped`: the one at which it was let go."""

    bucket: str
    prefix: str
    run: str
    stage: Stage
    ordinal: int
    revision: int
    decided_s: float
    dropped: int = 0

    def parks(self, role: Role) -> bool:
        """Whether a write of the set is parked."""
        if self.stage in (Stage.PROMOTING, Stage.PARKING):
            return role in (Role.MARKER, Role.POINTER)
        return self.stage is Stage.KEPT


@dataclass(frozen=True, slots=True)
class Run:
    """The sets that began under a prefix with a policy: how many, and the last one that was to go to the origin."""

    bucket: str
    prefix: str
    count: int = 0
    persisted_ordinal: int = 0
    persisted_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Actor:
    """Who has a step under way: a process, by the token of its lease (empty: its node as a whole), and in a cluster the
    membership it began the step under."""

    token: str
    holder: Holder | None = None

    def __str__(self) -> str:
        return f"{self.holder.node}@{self.holder.epoch}/{self.token}" if self.holder else self.token

    @classmethod
    def parse(cls, text: str) -> "Actor":
        """The reverse of `str`. No token holds a slash."""
        membership, slash, token = text.rpartition("/")
        if not slash:
            return cls(text)
        node, _, epoch = membership.rpartition("@")
        return cls(token, Holder(node, int(epoch)))


@dataclass(frozen=True, slots=True)
class Step:
    """A change of the origin that is under way in one process and must not overlap with certain others: a write-through
    (or a forwarded write), a marker that write-back puts, or in a cluster what it replaces. `holder` names the process
    (an `Actor`); `replaces` tells whether the origin holds something of that key that it changes, or
    may."""

    name: ObjectName
    uid: str
    holder: str
    role: Role
    through: bool
    replaces: bool


@dataclass(frozen=True, slots=True)
class Upload:
    """A client's multipart upload in progress. `version` carries what CreateMultipartUpload said (headers,
    metadata, tagging); its parts, size and ETag are empty. `algorithm` is the checksum algorithm the client chose
    (lower case, may be empty), `checksum_type` FULL_OBJECT, COMPOSITE or empty."""

    upload_id: str
    name: ObjectName
    version: Version
    started_s: float
    algorithm: str = ""
    checksum_type: str = ""
    spill_id: str = ""
    """The upload in the origin that parts without room in memory went to; empty for none."""


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """Keys whose bytes stay where they are in memory, since `pinned_s`, until somebody says otherwise."""

    bucket: str
    prefix: str
    pinned_s: float

    def meets(self, bucket: str, prefix: str) -> bool:
        """Whether some keys of the prefix are, or would be, among them."""
        return bucket == self.bucket and (prefix.startswith(self.prefix) or self.prefix.startswith(prefix))


@dataclass(frozen=True, slots=True)
class QuarantinedSet:
    """A checkpoint that was found damaged at `found_s`, when somebody asked for the newest. It stays passed over for as
    long as it is what it was: `bodies` is its fingerprint then."""

    bucket: str
    prefix: str
    bodies: str
    reason: str
    found_s: float


@dataclass(frozen=True, slots=True)
class Agreement:
    """What several who ask for the newest checkpoint under a prefix were told: `answer` to all that ask under `name`.
    The first who had one, at `agreed_s`, decided."""

    bucket: str
    prefix: str
    name: str
    answer: str
    agreed_s: float


@dataclass(frozen=True, slots=True)
class Bucket:
    """What the origin said of a bucket. `versioned` is also true for a suspended one."""

    name: str
    region: str
    versioned: bool
    learnt_s: float
