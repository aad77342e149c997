"""The declaration of every setting: name, default, unit, parser and help in one place.

The name outside (TOML key, `TIERGATE_` variable, flag) is the field's name without its unit, since the value
carries one: `memory_limit_bytes` is `memory_limit`, `TIERGATE_MEMORY_LIMIT` and `--memory-limit`.
"""

# ruff: noqa: RUF009 - `setting` makes a dataclass field, it is not a default value

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from tiergate.config import values as v
from tiergate.config.declare import declarations_of, setting
from tiergate.config.machine import Machine
from tiergate.config.values import (
    Address,
    ClientAuth,
    ConditionalWrites,
    EtagMode,
    FenceMode,
    LogFormat,
    LogLevel,
    Persist,
    Secret,
)

_T = TypeVar("_T")
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

LARGEST_COPIES_COUNT = 8

KEEP_COUNT = 2
PROMOTE_IDLE_S = 600.0


@dataclass(frozen=True, slots=True)
class PrefixSettings:
    """What holds for the keys of `bucket` that start with `prefix` (empty: the whole bucket).

    `immutable`: keys are written once, so a held copy is current without asking. `exclusive`: only gateways
    write there, so the directory is the truth. `etag`: whether every body gets its exact MD5. `fence`,
    `markers` and `replicas_count` (on how many nodes of a cluster a write is before it is acknowledged; None: 2 where
    there is a peer) include what is set for the node as a whole. `reuse`: it is a run, whose objects that did not
    change since one of its earlier sets are copied inside the origin instead of sent.

    `is_run`: it holds one set a folder; then `prefix` is empty, or ends with its slash. Of a run the newest
    `keep_count` whole sets are evicted last. `persist`: which of its checkpoints go to the origin, None for all,
    without any policy. Of sets that stay in memory those go that `keep_count` newer complete ones make superfluous;
    `skip_superseded` leaves such sets in memory that write-back has not begun; `promote_idle_s` after the run's last
    write its newest complete set goes to the origin all the same, 0 for never.

    `is_memory_only`: each object by itself stays in memory until it is deleted, or promoted by hand; what memory has no
    room for is refused. No table says so: it holds for the place of the memory daemon.
    """

    bucket: str
    prefix: str
    immutable: bool = False
    exclusive: bool = False
    etag: EtagMode = EtagMode.AUTO
    fence: FenceMode = FenceMode.AUTO
    markers: tuple[str, ...] = ()
    replicas_count: int | None = None
    persist: Persist | None = None
    is_run: bool = False
    keep_count: int = KEEP_COUNT
    skip_superseded: bool = False
    promote_idle_s: float = PROMOTE_IDLE_S
    reuse: bool = False
    is_memory_only: bool = False


def _private_folder(machine: Machine) -> Path:
    return machine.shared_memory_dir / f"tiergate-{machine.user_id}"


_SERVE, _CLUSTER, _WHO, _MEMORY, _ORIGIN = "Serving", "Cluster", "Clients", "Memory", "Origin"
_DAEMON = "Memory daemon"
_BACK, _READ, _LIMIT, _LOG = "Write-back", "Reading", "Limits", "Logging"

_PEER_TLS = "for peers, who then recognize each other by certificates (all three files or none)."


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings of a node, checked. Sizes are bytes, durations seconds; CONFIG.md explains each."""

    listen: Address = setting(
        _SERVE,
        Address("127.0.0.1", 9000),
        v.parse_address,
        "HOST:PORT that speaks S3. Port 0 takes any free one; the ready line names it.",
    )
    admin_listen: Address = setting(
        _SERVE,
        Address("127.0.0.1", 9001),
        v.parse_address,
        "HOST:PORT of /healthz, /readyz, /metrics and /status.",
    )
    workers_count: int = setting(
        _SERVE,
        lambda machine: max(1, machine.cores_count // 2),
        v.parse_count,
        "Worker processes that share the port.",
        computed="one per two cores, at least one",
        low=1,
        high=256,
    )
    host_suffixes: tuple[str, ...] = setting(
        _SERVE,
        (),
        v.parse_host_suffixes,
        "Domains under which a bucket may be named as a sub-domain (virtual-host style).",
    )
    shutdown_grace_s: float = setting(
        _SERVE, 25.0, v.parse_duration, "How long requests in flight may take to finish after SIGTERM."
    )
    drain_s: float = setting(
        _SERVE,
        20.0,
        v.parse_duration,
        "How long SIGTERM may take to bring what this node owes to the origin, or in a cluster to peers. 0: do not.",
    )

    cluster: str = setting(
        _CLUSTER,
        "",
        v.parse_cluster,
        "The etcd that nodes meet at: etcd://HOST:PORT,HOST:PORT (etcds:// for TLS), and /NAME after it where several "
        "clusters share one. Absent: this node is alone.",
    )
    node_name: str = setting(
        _CLUSTER,
        "",
        v.parse_name,
        "This node's name, its own in the cluster and the same after a restart.",
    )
    advertise: Address | None = setting(
        _CLUSTER,
        None,
        v.parse_address,
        "HOST:PORT at which peers reach this node. Port 0: the one that peer_listen got.",
    )
    peer_listen: Address | None = setting(
        _CLUSTER,
        None,
        v.parse_address,
        "HOST:PORT that speaks to peers.",
        computed="what advertise says",
    )
    zone: str = setting(
        _CLUSTER,
        "",
        v.parse_name,
        "What fails together with this node (a rack, an availability zone): copies go to other zones first.",
    )
    replicas_count: int | None = setting(
        _CLUSTER,
        None,
        v.parse_count,
        "On how many nodes a write is before it is acknowledged, this one included. Absent: 2 where there is a peer.",
        low=1,
        high=LARGEST_COPIES_COUNT,
    )
    lease_s: float = setting(
        _CLUSTER,
        5.0,
        v.parse_seconds,
        "After so long a silence a node is gone for the others. Whole seconds.",
        low=3,
        high=600,
    )
    cluster_secret: Secret | None = setting(
        _CLUSTER,
        None,
        v.parse_long_secret,
        "What peers know each other by, the same on all nodes. As a flag only in the form @FILE.",
    )
    peer_tls_cert: Path | None = setting(_CLUSTER, None, v.parse_file, f"PEM file: this node's certificate {_PEER_TLS}")
    peer_tls_key: Path | None = setting(_CLUSTER, None, v.parse_file, f"PEM file: its key {_PEER_TLS}")
    peer_tls_ca: Path | None = setting(_CLUSTER, None, v.parse_file, f"PEM file: who signs certificates {_PEER_TLS}")
    etcd_user: str = setting(_CLUSTER, "", v.parse_text, "The user that etcd knows us as.")
    etcd_password: Secret | None = setting(
        _CLUSTER, None, v.parse_secret, "Its password. As a flag only in the form @FILE."
    )
    etcd_tls_ca: Path | None = setting(
        _CLUSTER, None, v.parse_file, "PEM file: who signs etcd's certificates. Absent: whom the system trusts."
    )
    etcd_tls_cert: Path | None = setting(_CLUSTER, None, v.parse_file, "PEM file: our certificate for etcd.")
    etcd_tls_key: Path | None = setting(_CLUSTER, None, v.parse_file, "PEM file: its key.")
    directory_patience_s: float = setting(
        _CLUSTER, 10.0, v.parse_duration, "How long a request waits for etcd to answer before it ends in 503.", low=1
    )
    peer_timeout_s: float = setting(
        _CLUSTER, 5.0, v.parse_duration, "How long a peer may be silent before another is taken.", low=0.1
    )
    restart_grace_s: float = setting(
        _CLUSTER,
        60.0,
        v.parse_duration,
        "How long an un-persisted object without a living copy waits for its node to come back with its memory.",
    )
    repair_bytes_per_s: int = setting(
        _CLUSTER,
        256 * MIB,
        v.parse_size,
        "How much this node copies in a second, in bytes, to replace copies that were lost. 0: no bound.",
        name="repair_rate",
    )

    daemon_listen: Address | None = setting(
        _DAEMON,
        None,
        v.parse_address,
        "HOST:PORT that speaks the protocol of SageMaker HyperPod's memory daemon (usual port: 9200). It knows no "
        "credentials. Absent: nothing does.",
    )
    daemon_uri: str = setting(
        _DAEMON,
        "",
        v.parse_place,
        "s3://BUCKET/PREFIX/: where its shards lie, as objects that stay in memory. The bucket must exist in the "
        "origin. The same on all nodes.",
    )
    daemon_allow: tuple[str, ...] = setting(
        _DAEMON,
        (),
        v.parse_networks,
        "Networks (such as 10.0.0.0/8) whose hosts may use it; others are answered 403. Absent: whoever reaches it, "
        "which must then be this machine only.",
    )

    access_key_id: str = setting(_WHO, "", v.parse_text, "The access key id that clients sign with.")
    secret_access_key: Secret | None = setting(
        _WHO,
        None,
        v.parse_secret,
        "The secret that clients sign with. As a flag only in the form @FILE, since a command line "
        "can be read by every user.",
    )
    client_auth: ClientAuth = setting(
        _WHO,
        lambda _: ClientAuth.NONE,
        v.choice_of(ClientAuth),
        "Whose signature clients must show: `keys` (access_key_id), `origin` (the keys that the "
        "standard AWS chain gives for the origin) or `none` (any; loopback only).",
        computed="`keys` if access_key_id is set, else `none`",
    )
    clock_skew_s: float = setting(_WHO, 900.0, v.parse_duration, "How far a signature's time may be from ours.", low=1)

    memory_dir: Path = setting(
        _MEMORY,
        _private_folder,
        v.parse_folder,
        "Folder for bytes and state, on a tmpfs. One node per folder.",
        computed="/dev/shm/tiergate-UID",
    )
    memory_limit_bytes: int = setting(
        _MEMORY,
        lambda machine: machine.ram_bytes // 4,
        v.parse_size,
        "Budget for all that lies in memory_dir. Must fit into what the folder's file system has free.",
        computed="a quarter of RAM, less if the tmpfs is smaller",
        low=8 * MIB,
    )
    pinned_limit_bytes: int | None = setting(
        _MEMORY,
        None,
        v.parse_size,
        "How much of this node's memory `tiergate pin` may take. Absent: half of memory_limit.",
    )
    identities_kept_count: int = setting(
        _MEMORY,
        1_000_000,
        v.parse_count,
        "Identities (ETag, time, metadata, checksums) kept of objects whose bytes were evicted; past it the oldest go.",
    )
    finished_upload_keep_s: float = setting(
        _MEMORY,
        21600.0,
        v.parse_duration,
        "How long the answer of a completed multipart upload is kept for a repeated request, and which checkpoint "
        "those who restart together were told.",
    )

    origin: str = setting(
        _ORIGIN,
        "",
        v.parse_origin,
        "Endpoint URL of the origin. Absent: AWS S3. AWS_ENDPOINT_URL is never used.",
    )
    region: str = setting(
        _ORIGIN,
        "",
        v.parse_text,
        "Region of the origin. Absent: what the standard AWS chain says, else us-east-1.",
    )
    origin_attempts_count: int = setting(
        _ORIGIN, 5, v.parse_count, "Tries of one origin request, the first included.", low=1, high=100
    )
    origin_connect_timeout_s: float = setting(
        _ORIGIN, 5.0, v.parse_duration, "How long connecting to the origin may take.", low=0.001
    )
    origin_read_timeout_s: float = setting(
        _ORIGIN, 60.0, v.parse_duration, "How long the origin may be silent within a request.", low=0.001
    )
    origin_backoff_s: float = setting(
        _ORIGIN,
        0.2,
        v.parse_duration,
        "Longest wait before the second try; it doubles with each further one, with jitter.",
    )
    origin_backoff_max_s: float = setting(_ORIGIN, 20.0, v.parse_duration, "Longest wait between two tries.")
    origin_connections_count: int = setting(
        _ORIGIN, 64, v.parse_count, "Connections to the origin, for each process.", low=1, high=10_000
    )
    conditional_writes: ConditionalWrites = setting(
        _ORIGIN,
        ConditionalWrites.AUTO,
        v.choice_of(ConditionalWrites),
        "Whether write-back guards its writes by If-Match and If-None-Match: `on`, `off`, or `auto` (found out).",
    )

    origin_checksums: bool = setting(
        _ORIGIN,
        True,
        v.parse_flag,
        "Whether write-back sends checksums for the origin to check. Off only for one that refuses them.",
    )

    fence: FenceMode = setting(
        _BACK,
        FenceMode.AUTO,
        v.choice_of(FenceMode),
        "Order in which objects become visible in the origin: `auto` (markers after their set), "
        "`strict` (all in commit order) or `off`.",
    )
    markers: tuple[str, ...] = setting(
        _BACK,
        (),
        v.parse_markers,
        "Further glob patterns for names of markers, beside those of the frameworks.",
    )
    large_bytes: int = setting(
        _BACK, 64 * MIB, v.parse_size, "From this size on an object waits for nothing in fence mode `auto`."
    )
    marker_quiet_s: float = setting(
        _BACK,
        60.0,
        v.parse_duration,
        "How long a set whose member was replaced must be quiet before its marker is written back.",
    )
    marker_hold_s: float = setting(
        _BACK,
        300.0,
        v.parse_duration,
        "How long new objects of a set that stands in the origin wait at most for its new marker. 0: not at all.",
    )
    marker_hold_percent: int = setting(
        _BACK,
        50,
        v.parse_count,
        "Once so much of the memory holds what the origin lacks, they wait no longer.",
        low=0,
        high=100,
    )
    writeback_concurrency_count: int = setting(
        _BACK, 8, v.parse_count, "Uploads (objects or parts) to the origin at a time.", low=1, high=1000
    )
    through_wait_s: float = setting(
        _BACK,
        20.0,
        v.parse_duration,
        "How long a write-through may wait for what must reach the origin before it; then 503.",
    )
    dirty_age_slow_s: float = setting(
        _BACK,
        600.0,
        v.parse_duration,
        "Once the oldest unfinished write-back is older, writers are slowed down. 0: never.",
    )
    dirty_age_limit_s: float = setting(
        _BACK,
        1800.0,
        v.parse_duration,
        "Once the oldest unfinished write-back is older, writes are refused with 503. 0: never.",
    )
    dirty_size_slow_bytes: int = setting(
        _BACK,
        0,
        v.parse_size,
        "Once this node owes the origin more, writers are slowed down. 0: never.",
    )
    dirty_size_limit_bytes: int = setting(
        _BACK,
        0,
        v.parse_size,
        "Once this node owes the origin more, writes are refused with 503. 0: never; what memory has no room for goes "
        "through to the origin.",
    )

    revalidate_s: float = setting(
        _READ,
        60.0,
        v.parse_duration,
        "How long a copy is served without asking the origin whether it still holds the same. 0: always ask.",
    )
    fill_ahead_count: int = setting(
        _READ, 4, v.parse_count, "Blocks of 4 MiB fetched from the origin ahead of a reader.", high=256
    )
    exact_etag_bytes: int = setting(
        _READ,
        5 * MIB,
        v.parse_size,
        "Bodies up to this size get the exact MD5 as ETag, larger ones an opaque one.",
    )
    prefixes: tuple[PrefixSettings, ...] = setting(
        _READ,
        (),
        v.parse_text,
        "Settings for the keys under a prefix; the longest match wins. A table `[[prefix]]` each.",
        name="prefix",
        repeatable=True,
    )

    max_header_bytes: int = setting(
        _LIMIT, 64 * KIB, v.parse_size, "Largest request line and header section.", low=8 * KIB, high=16 * MIB
    )
    max_body_bytes: int = setting(
        _LIMIT,
        5 * GIB,
        v.parse_size,
        "Largest body of one request; S3's own limit is 5 GiB. Shards of the memory daemon have memory's.",
        low=1,
        high=5 * GIB,
    )
    connections_count: int = setting(
        _LIMIT,
        4096,
        v.parse_count,
        "Client connections, for each worker. Further ones are answered 503 SlowDown and closed.",
        low=1,
        high=100_000,
    )
    header_timeout_s: float = setting(
        _LIMIT,
        60.0,
        v.parse_duration,
        "How long a connection may stay idle between requests, or take to send a header.",
        low=0.001,
    )
    body_idle_timeout_s: float = setting(
        _LIMIT,
        60.0,
        v.parse_duration,
        "How long a client may be silent within a body it sends or takes.",
        low=0.001,
    )

    log_level: LogLevel = setting(
        _LOG,
        LogLevel.INFO,
        v.choice_of(LogLevel),
        "Least severe level logged: debug, info, warning or error.",
    )
    log_format: LogFormat = setting(
        _LOG,
        LogFormat.TEXT,
        v.choice_of(LogFormat),
        "Log records on stderr as `text` (key=value) or `json` (one object a line).",
    )

    @property
    def secrets(self) -> tuple[Secret, ...]:
        """All that no log may show."""
        values = (getattr(self, field) for field in DECLARATIONS)
        return tuple(value for value in values if isinstance(value, Secret))

    @property
    def largest_body_bytes(self) -> int:
        """No body is larger. What stays in memory only need not fit a request to S3, but it must fit there."""
        return max(self.max_body_bytes, self.memory_limit_bytes if self.daemon_uri else 0)

    def prefix_for(self, bucket: str, key: str) -> PrefixSettings:
        """What holds for a key: the longest matching prefix, else what is set for the node."""
        best: PrefixSettings | None = None
        for candidate in self.prefixes:
            fits = candidate.bucket == bucket and key.startswith(candidate.prefix)
            if fits and (best is None or len(candidate.prefix) > len(best.prefix)):
                best = candidate
        return best or PrefixSettings(
            bucket, "", fence=self.fence, markers=self.markers, replicas_count=self.replicas_count
        )


DECLARATIONS = declarations_of(Settings)
"""Every setting by its field name, in the order of the documentation."""


def dump(value: object) -> bytes:
    """Settings (or a dataclass that holds some) as JSON, secrets included: only for an inherited file
    descriptor, never for a log, a command line or an environment."""
    return msgspec.json.encode(value, enc_hook=_encode)


def restore(data: bytes, kind: type[_T]) -> _T:
    """The value of type `kind` that `dump` wrote.

    Raises:
        msgspec.ValidationError: `data` is something else.
    """
    return msgspec.json.decode(data, type=kind, dec_hook=_decode)


def _encode(value: object) -> object:
    if isinstance(value, Secret):
        return value.reveal()
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(type(value))


def _decode(kind: type, value: object) -> object:
    if kind is Secret:
        return Secret(str(value))
    if kind is Path:
        return Path(str(value))
    raise NotImplementedError(kind)
