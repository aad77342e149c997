"""What must hold when all is over, whatever happened before: every promise that can be judged from the state alone."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from botocore.exceptions import ClientError

from tiergate.clock import SystemClock
from tiergate.config import Settings
from tiergate.config.values import ClientAuth
from tiergate.directory.clusterrows import record_of
from tiergate.memory.audit import audit
from tiergate.memory.memory import Memory
from tiergate.server.budget import split
from tiergate.testing.completeness import untrue_markers
from tiergate.testing.etcd import EtcdServer
from tiergate.testing.histories import Did, Value, unexplained
from tiergate.testing.journal import Journal, value_of
from tiergate.testing.node import RunningNode
from tiergate.testing.objects import uploads_of
from tiergate.testing.rules import Seen

LAYOUT = b"/tiergate/1/"
OWED = ("q", "w", "s", "x")
"""Tables that are empty when the origin is owed nothing: pending writes, the same by owner, steps, orphan uploads."""


@dataclass
class End:
    """What there is to look at. `nodes` live, by name; `lost`: keys whose copies the test destroyed, of which nothing
    is asked; `requests` gives the origin's record since before the journal began, if one was kept. `swept`:
    whether no dirty byte may be left in any memory; a peer keeps what it was sent for minutes if the sender then died
    (`tiergate.replication.base.PROMISE`)."""

    journal: Journal
    bucket: str
    nodes: dict[str, RunningNode]
    origin: Any
    etcd: EtcdServer | None = None
    requests: Callable[[], Sequence[Seen]] = tuple
    is_marker: Callable[[str], bool] = lambda key: key.endswith(".metadata")
    lost: Collection[str] = ()
    swept: bool = True
    deadline_s: float = 60.0

    def problems(self) -> list[str]:
        """Wait until all is settled, then say what is wrong; empty if all is well. Ends what uploads the clients left
        open."""
        self._abort_uploads()
        unsettled = self._settle()
        return [*unsettled, *self._objects(), *self._origin(), *self._holdings(), *self._memory()]

    def _abort_uploads(self) -> None:
        """A client that got no answer leaves its upload open, and an upload may have begun in the origin."""
        client = next(iter(self.nodes.values())).client(retries={"mode": "standard", "total_max_attempts": 8})
        for key, upload_id in uploads_of(client, self.bucket):
            client.abort_multipart_upload(Bucket=self.bucket, Key=key, UploadId=upload_id)

    # -- waiting
    def _settle(self) -> list[str]:
        """Wait until nothing is owed; what still is when the time is over."""
        one = next(iter(self.nodes.values()))
        try:
            one.wait_until("all is settled", lambda: not self._owed(), self.deadline_s)
        except TimeoutError:
            return self._owed()
        return []

    def _owed(self) -> list[str]:
        found = []
        for name, node in self.nodes.items():
            status = node.status()
            if "writeback" not in status:
                found.append(f"{name} is no member yet: {status}")
                continue
            writeback, memory = status["writeback"], status["memory"]
            for what in ("pending", "in_flight"):
                if writeback[what]:
                    found.append(f"{name} has {what} writes: {writeback}")
            for what in ("receiving_bytes", "pinned_bytes", *(("dirty_bytes",) if self.swept else ())):
                if memory[what]:
                    found.append(f"{name} has {what}: {memory}")
        for table in OWED if self.etcd else ():
            rows = [each for each in self._rows(table) if not self._is_lost(each.key)]
            found += [f"etcd has {bytes(each.key)!r}" for each in rows[:5]]
        if self.etcd:
            members = {bytes(each.key).rpartition(b"/")[2].decode() for each in self._rows("n")}
            if members != set(self.nodes):
                found.append(f"members are {sorted(members)}, alive are {sorted(self.nodes)}")
        return found + [self._of_upload(key, upload_id) for key, upload_id in uploads_of(self.origin, self.bucket)]

    def _of_upload(self, key: str, upload_id: str) -> str:
        """What led to an upload that is still in the origin."""
        seen = [each for each in self.requests() if each.upload_id == upload_id]
        told = [f"{each.started_s:.3f} {each.operation} {each.origin_status} {each.fault or ''}" for each in seen]
        return f"an upload of {key} is in the origin: {told}"

    def _rows(self, table: str) -> list[Any]:
        assert self.etcd is not None
        return self.etcd.rows(LAYOUT + table.encode() + b"/")

    def _is_lost(self, row: bytes) -> bool:
        return any(key.encode() in row for key in self.lost)

    # -- judging
    def _objects(self) -> list[str]:
        """Each node shows of each key the same, in GET, HEAD and LIST, and that an order of the writes explains it."""
        found: list[str] = []
        keys = [key for key in self.journal.keys if key not in self.lost]
        shown: dict[str, set[str]] = {key: set() for key in keys}
        for name, node in self.nodes.items():
            client = node.client(read_timeout=20)
            entries = _listed(client, self.bucket)
            for key in keys:
                found += [f"{name}: {each}" for each in self._look(client, key, entries.get(key), shown[key])]
            unknown = sorted(set(entries) - set(self.journal.keys))
            if unknown:
                found.append(f"{name} lists what nobody wrote: {unknown[:5]}")
        for key in keys:
            if len(shown[key]) > 1:
                found.append(f"{key} is not the same everywhere: {sorted(shown[key])}")
            left = unexplained(self.journal.history(key))
            if left:
                found.append(f"no order of what was done to {key} explains {left}")
        return found

    def _look(self, client: Any, key: str, entry: "_Entry | None", shown: set[str]) -> list[str]:
        seen = _get(client, self.bucket, key, self.journal)
        if isinstance(seen, str):
            return [seen]
        value, etag = seen
        shown.add(f"{value.digest} {etag}" if value else "absent")
        found = []
        if (entry.size_bytes, entry.etag) != (value.size_bytes, etag) if entry and value else bool(entry or value):
            found.append(f"LIST shows {key} as {entry}, GET as {value} {etag}")
        if value is not None:
            acked = self.journal.etags(key, value)
            if acked and etag not in acked:
                found.append(f"{key} has the ETag {etag}, acknowledged: {sorted(acked)}")
            head = client.head_object(Bucket=self.bucket, Key=key)
            if (head["ContentLength"], head["ETag"].strip('"')) != (value.size_bytes, etag):
                found.append(f"HEAD of {key} differs: {head}")
        return found

    def _origin(self) -> list[str]:
        """The origin holds what the nodes show, no marker came before its set."""
        found = []
        for key in self.journal.keys:
            if key in self.lost:
                continue
            last = [done.value for done in self.journal.history(key) if done.did is Did.READ][-1:]
            try:
                body = self.origin.get_object(Bucket=self.bucket, Key=key)["Body"].read()
            except self.origin.exceptions.NoSuchKey:
                body = None
            if last and last[0] != (None if body is None else value_of(body)):
                found.append(f"the origin holds of {key} {body if body is None else len(body)}, not {last[0]}")
        return found + untrue_markers(self.requests(), self.bucket, self.journal.writes(self.lost), self.is_marker)

    def _holdings(self) -> list[str]:
        """Nodes are said to hold current versions only, and by version the same as by node."""
        if self.etcd is None:
            return []
        records = {each.key[len(LAYOUT) + 2 :]: record_of(each).version for each in self._rows("o")}
        current = {(name, version.uid.encode()) for name, version in records.items() if version is not None}
        by_version = {tuple(each.key[len(LAYOUT) + 2 :].split(b"\0")) for each in self._rows("h")}
        by_node = {tuple(each.key[len(LAYOUT) + 2 :].split(b"\0")) for each in self._rows("i")}
        stale = sorted(each for each in by_version if each[:2] not in current)
        found = [f"held, but not current: {each}" for each in stale[:5]]
        unlike = by_version ^ {(name, uid, node) for node, name, uid in by_node}
        return [*found, *(f"not the same by version and by node: {each}" for each in sorted(unlike)[:5])]

    def _memory(self) -> list[str]:
        """Every count and extent of every node's memory is right; no node met a bug of its own."""
        found = []
        for name, node in self.nodes.items():
            limit_bytes = node.status()["memory"]["limit_bytes"]
            problems = memory_problems(node.memory_dir / "slabs", limit_bytes, is_alone=self.etcd is None)
            found += [f"memory of {name}: {each}" for each in problems]
            broken = node.metric("tiergate_http_broken_invariants_total")
            if broken:
                found.append(f"{name} met {broken:g} broken invariants: {node.log_tail()}")
        return found


@dataclass(frozen=True, slots=True)
class _Entry:
    size_bytes: int
    etag: str


def _listed(client: Any, bucket: str) -> dict[str, _Entry]:
    pages: Iterable[Any] = client.get_paginator("list_objects_v2").paginate(Bucket=bucket)
    entries = (each for page in pages for each in page.get("Contents", ()))
    return {each["Key"]: _Entry(each["Size"], each["ETag"].strip('"')) for each in entries}


def _get(client: Any, bucket: str, key: str, journal: Journal) -> "tuple[Value | None, str] | str":
    """What GET shows, noted; in words if it shows nothing."""
    from_s = journal.now_s()
    try:
        answer = client.get_object(Bucket=bucket, Key=key)
        value = value_of(answer["Body"].read())
    except client.exceptions.NoSuchKey:
        journal.saw(key, Did.READ, None, from_s)
        return None, ""
    except ClientError as error:
        return f"{key} cannot be read: {error}"
    journal.saw(key, Did.READ, value, from_s)
    return value, answer["ETag"].strip('"')


def memory_problems(slabs: Path, limit_bytes: int, *, is_alone: bool) -> list[str]:
    """What the audit of a node's memory says, the node running or not. Leaves it as it is.

    Args:
        slabs: Its folder of that name.
        limit_bytes: As `--memory-limit`.
        is_alone: Whether its directory is in the same memory, which leaves less for bytes.
    """
    settings = Settings(
        memory_dir=slabs.parent,
        memory_limit_bytes=limit_bytes,
        workers_count=1,
        client_auth=ClientAuth.KEYS,
        cluster="" if is_alone else "etcd://elsewhere",
    )
    memory = Memory.open(slabs, split(settings).memory, SystemClock())
    try:
        return audit(memory.store)
    finally:
        memory.close()
