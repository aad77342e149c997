"""Where things stand in etcd. All keys start with a prefix that holds the layout's version.

`o` records · `q` pending writes · `d` slots of dropped records (the row's version counts them) · `m` markers by scope
· `c` clean records by age, `k` clean markers (both: uid) · `u` uploads in progress, `p` their parts · `f` finished
uploads · `x` orphan uploads · `s` steps under way · `b` buckets · `n` nodes, on their lease · `h` who holds which
version, `i` the same by node · `w` pending writes by owner, `l` large ones by name · `t` steps that take something from
a set, `v` markers' steps by scope · `r` receipts of writers · `g` plans of sets, `j` their runs · `y` pinned prefixes ·
`z` quarantined sets · `a` agreements · `e` when each node changed something last, of every node there ever was. Two
rows stand alone: `era` names this directory, `counted` says how many rows there are where they are many.

Names are UTF-8. A bucket's name holds no slash and neither it nor a key a NUL, so no two names meet and rows sort as S3
lists them. Nothing but `n` hangs on a lease: an expiry would delete what is owed.
"""

import hashlib
import struct

from tiergate.checkpoints.markers import scope_of
from tiergate.errors import invariant
from tiergate.etcd.values import Range, prefix_end
from tiergate.model import Holder, ObjectName, OriginUpload, Pending, Step

LAYOUT = b"1"

_EPOCH_LENGTH = _AGE_LENGTH = 16

_DUE, _ASIDE, _PARKED = "0", "1", "2"


class Keys:
    """The keys under one prefix, `/tiergate` unless several clusters share an etcd."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix.encode() + b"/" + LAYOUT + b"/"

    def table(self, table: str) -> bytes:
        """What all keys of a table start with."""
        return self._prefix + table.encode() + b"/"

    def table_of(self, key: bytes) -> bytes:
        """What all keys of the table of this one start with."""
        return key[: key.index(b"/", len(self._prefix)) + 1]

    def all(self, table: str) -> Range:
        """All rows of a table."""
        start = self.table(table)
        return Range(start, prefix_end(start))

    @property
    def era(self) -> bytes:
        """The row that names this directory (`tiergate.directory.era`)."""
        return self._prefix + b"era"

    @property
    def counted(self) -> bytes:
        """The row that says how many others there are (`tiergate.directory.counting`)."""
        return self._prefix + b"counted"

    # -- objects
    def record(self, name: ObjectName) -> bytes:
        return self._named("o", name)

    def pending(self, name: ObjectName) -> bytes:
        return self._named("q", name)

    def slot(self, name: ObjectName) -> bytes:
        """One of 256 rows that stand for all keys, so that what is kept of deleted ones is bounded."""
        return self.table("d") + hashlib.blake2b(_text(name), digest_size=1).hexdigest().encode()

    def under(self, table: str, bucket: str, prefix: str, after: str) -> Range | None:
        """Rows of a table by name: those whose key starts with `prefix` and is greater than `after`, if any can be."""
        base = self.table(table) + bucket.encode() + b"/"
        start = base + prefix.encode()
        end = prefix_end(start)
        if after:
            start = max(start, base + after.encode() + b"\0")
        return Range(start, end) if start < end else None

    def between(self, table: str, first: ObjectName, last: ObjectName) -> Range:
        """Rows of a table by name, or by name and more: those of two names and of all between them."""
        return Range(self._named(table, first), self._named(table, last) + b"\1")  # "\0" begins what is more

    def below(self, table: str, bucket: str, scope: str) -> Range:
        """Rows of a table by name: those in a scope and below."""
        start = self.table(table) + f"{bucket}/{scope}".encode()
        return Range(start, prefix_end(start))

    def marker(self, name: ObjectName) -> bytes:
        scope = scope_of(name.key)
        return self.markers(name.bucket, scope).key + name.key[len(scope) :].encode()

    def markers(self, bucket: str, scope: str) -> Range:
        """The markers right in a scope."""
        start = self.table("m") + f"{bucket}/{scope}\0".encode()
        return Range(start, prefix_end(start))

    def marker_name(self, bucket: str, scope: str, key: bytes) -> ObjectName:
        """The marker that stands at a key of `markers`."""
        return ObjectName(bucket, scope + key[len(self.markers(bucket, scope).key) :].decode())

    def clean(self, name: ObjectName, age: int, *, marker: bool) -> bytes:
        """Where a clean record stands among those that may be trimmed, oldest first, or among those that may not."""
        return self.table("k" if marker else "c") + b"%016x/" % age + _text(name)

    def clean_name(self, key: bytes) -> ObjectName:
        """The object that stands at a key of `clean`."""
        return _name(key[len(self.table("c")) + 17 :].decode())

    def orphan(self, name: ObjectName, upload: OriginUpload) -> bytes:
        # Uploads whose ids never became known differ in their start only.
        return self._named("x", name) + f"\0{upload.upload_id}\0{upload.started_s!r}".encode()

    # -- uploads, buckets, nodes
    def upload(self, upload_id: str) -> bytes:
        return self.table("u") + upload_id.encode()

    def part(self, upload_id: str, number: int) -> bytes:
        return self.parts(upload_id).key + b"%05d" % number

    def parts(self, upload_id: str) -> Range:
        """The parts of an upload, by number."""
        start = self.table("p") + upload_id.encode() + b"\0"
        return Range(start, prefix_end(start))

    def finished(self, upload_id: str) -> bytes:
        return self.table("f") + upload_id.encode()

    def bucket(self, name: str) -> bytes:
        return self.table("b") + name.encode()

    def pinned(self, bucket: str, prefix: str) -> bytes:
        return self._named("y", ObjectName(bucket, prefix))

    def quarantined(self, bucket: str, prefix: str) -> bytes:
        return self._named("z", ObjectName(bucket, prefix))

    def agreement(self, bucket: str, prefix: str, name: str) -> bytes:
        return self._named("a", ObjectName(bucket, prefix)) + f"\0{name}".encode()

    def node(self, node: str) -> bytes:
        return self.table("n") + node.encode()

    def holder(self, name: ObjectName, uid: str, node: str) -> bytes:
        return self.holders(name, uid).key + node.encode()

    def holders(self, name: ObjectName, uid: str) -> Range:
        """Who holds a version."""
        start = self._named("h", name) + f"\0{uid}\0".encode()
        return Range(start, prefix_end(start))

    def all_holders(self, name: ObjectName) -> Range:
        """Who holds any version of a key."""
        start = self._named("h", name) + b"\0"
        return Range(start, prefix_end(start))

    def holder_of(self, name: ObjectName, key: bytes) -> tuple[str, str]:
        """The uid and the node of a key of `holders`."""
        uid, _, node = key[len(self.all_holders(name).key) :].decode().partition("\0")
        return uid, node

    def held_at(self, key: bytes) -> tuple[ObjectName, str]:
        """The name and the uid of a key of `holders`."""
        text, uid, _ = key[len(self.table("h")) :].decode().split("\0")
        return _name(text), uid

    # -- by node
    def held(self, node: str, name: ObjectName, uid: str) -> bytes:
        return self.held_by(node).key + _text(name) + f"\0{uid}".encode()

    def held_by(self, node: str) -> Range:
        """What a node said to hold."""
        start = self.table("i") + f"{node}\0".encode()
        return Range(start, prefix_end(start))

    def held_version(self, node: str, key: bytes) -> tuple[ObjectName, str]:
        """The name and the uid of a key of `held_by`."""
        text, _, uid = key[len(self.held_by(node).key) :].decode().partition("\0")
        return _name(text), uid

    def owed(self, write: Pending) -> bytes:
        """Where a pending write stands among those of its owner: the oldest first, then what is set aside, then what is
        parked."""
        # A float that is not negative sorts as its bytes do.
        age = struct.pack(">d", max(0.0, write.committed_s)).hex()
        start = self.written_as(write.owner).key
        group = _PARKED if write.parked else _ASIDE if write.quarantined else _DUE
        return start + f"{group}{age}/".encode() + _text(write.name)

    def owed_by(self, node: str) -> Range:
        """What a node owes, or keeps parked, in whatever epoch; the empty name for nobody."""
        start = self.table("w") + f"{node}\0".encode()
        return Range(start, prefix_end(start))

    def written_as(self, owner: Holder | None) -> Range:
        """What a node owes, or keeps parked, in one epoch."""
        node, epoch = (owner.node, owner.epoch) if owner else ("", 0)
        start = self.owed_by(node).key + f"{epoch:0{_EPOCH_LENGTH}x}".encode()
        return Range(start, prefix_end(start))

    def owed_as(self, owner: Holder) -> Range:
        """What a node owes in one epoch."""
        every = self.written_as(owner)
        return Range(every.key, every.key + _PARKED.encode())

    def parked_as(self, owner: Holder) -> Range:
        """What a node keeps parked in one epoch."""
        every = self.written_as(owner)
        return Range(every.key + _PARKED.encode(), every.end)

    def owner(self, key: bytes) -> str:
        """The node of a key of `owed`."""
        return key[len(self.table("w")) :].partition(b"\0")[0].decode()

    def owed_parts(self, key: bytes) -> tuple[ObjectName, float | None]:
        """The name of a key of `owed`, and when that was committed if it is due."""
        rest = key[len(self.table("w")) :].partition(b"\0")[2][_EPOCH_LENGTH:].decode()
        age, name = rest[1 : 1 + _AGE_LENGTH], _name(rest[2 + _AGE_LENGTH :])
        committed_s: float = struct.unpack(">d", bytes.fromhex(age))[0]
        return name, committed_s if rest[0] == _DUE else None

    def large(self, name: ObjectName) -> bytes:
        """Where a large write that others may wait for stands."""
        return self._named("l", name)

    def large_name(self, key: bytes) -> ObjectName:
        """The object that stands at a key of `large`."""
        return _name(key[len(self.table("l")) :].decode())

    # -- plans
    def plan(self, bucket: str, prefix: str) -> bytes:
        return self._named("g", ObjectName(bucket, prefix))

    def run(self, bucket: str, prefix: str) -> bytes:
        return self._named("j", ObjectName(bucket, prefix))

    # -- steps
    def step(self, step: Step) -> bytes:
        return self.steps(step.name).key + step.uid.encode()

    def steps(self, name: ObjectName) -> Range:
        """The steps of one key."""
        start = self._named("s", name) + b"\0"
        return Range(start, prefix_end(start))

    def taking(self, step: Step) -> bytes:
        """Where a step that takes something from the sets around it stands."""
        return self._named("t", step.name) + f"\0{step.uid}".encode()

    def speaking(self, step: Step) -> bytes:
        """Where a marker's step stands."""
        return self.speaking_for(step.name.bucket, scope_of(step.name.key)).key + step.uid.encode()

    def speaking_for(self, bucket: str, scope: str) -> Range:
        """The steps of the markers right in a scope."""
        start = self.table("v") + f"{bucket}/{scope}\0".encode()
        return Range(start, prefix_end(start))

    def witness(self, node: str) -> bytes:
        """The row that every change of a node writes: it is as new as the last of them, unless etcd went back."""
        return self.table("e") + node.encode()

    def receipt(self, writer: str) -> bytes:
        return self.table("r") + writer.encode()

    def _named(self, table: str, name: ObjectName) -> bytes:
        return self.table(table) + _text(name)


def _name(text: str) -> ObjectName:
    bucket, _, key = text.partition("/")
    return ObjectName(bucket, key)


def _text(name: ObjectName) -> bytes:
    invariant("/" not in name.bucket, "a bucket's name holds a slash", bucket=name.bucket)
    invariant("\0" not in name.key, "a key holds a NUL", bucket=name.bucket, key=name.key)
    return f"{name.bucket}/{name.key}".encode()
