"""Every metric of the node, declared once; METRICS.md is rendered from the same declarations.

Names are `tiergate_<area>_<what>_<unit>`; counters end in `_total`. Labels only take values from small,
closed sets: never a bucket, a key or an address. Label values are given in the declared order."""

from dataclasses import dataclass
from pathlib import Path

from tiergate.errors import InvariantError
from tiergate.observe.store import FILE_BYTES, SERIES_DROPPED, Metric, MetricKind, MetricStore, Stability

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


@dataclass(frozen=True, slots=True)
class Counter:
    """A number that only grows, summed over processes."""

    metric: Metric
    store: MetricStore

    def inc(self, amount: float = 1.0, *labels: str) -> None:
        """Count `amount` more, in the metric's unit."""
        self.store.add(self.metric, amount, labels)


@dataclass(frozen=True, slots=True)
class Gauge:
    """This process's share of a number that rises and falls; starts at 0 with the process."""

    metric: Metric
    store: MetricStore

    def inc(self, amount: float = 1.0, *labels: str) -> None:
        """Raise (or lower, by a negative amount) this process's share."""
        self.store.add(self.metric, amount, labels)

    def set(self, value: float, *labels: str) -> None:
        """Set this process's share."""
        self.store.set(self.metric, value, labels)


@dataclass(frozen=True, slots=True)
class Histogram:
    """The distribution of observations of all processes."""

    metric: Metric
    store: MetricStore

    def observe(self, value: float, *labels: str) -> None:
        """Count one observation, in the metric's unit."""
        self.store.observe(self.metric, value, labels)


@dataclass(frozen=True, slots=True)
class Reading:
    """The value of a computed gauge at a scrape."""

    metric: Metric
    value: float
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Computed:
    """A fact of the node as a whole, worked out by whoever answers a scrape."""

    metric: Metric

    def reading(self, value: float, *labels: str) -> Reading:
        """The fact at this moment.

        Raises:
            InvariantError: the number of labels is wrong.
        """
        if len(labels) != len(self.metric.labels):
            raise InvariantError("wrong number of labels", metric=self.metric.name, labels=labels)
        return Reading(self.metric, value, labels)


class Metrics:
    """The metrics as attributes. Safe to use from several threads; never blocks on I/O.

    `Metrics()` is one that nobody reads. Owns its store until `close`.
    """

    def __init__(self, store: MetricStore | None = None) -> None:
        self.store = store or MetricStore.in_memory()
        self.declared: dict[str, Metric] = {SERIES_DROPPED.name: SERIES_DROPPED}
        self._declare_requests()
        self._declare_reads()
        self._declare_memory()
        self._declare_writeback()
        self._declare_origin()
        self._declare_replication()
        self._declare_node()
        self._declare_daemon()

    @classmethod
    def open(cls, path: Path, file_bytes: int = FILE_BYTES) -> "Metrics":
        """The metrics of a process, in the file that all scrapes read, of this size if it is new.

        Raises:
            OSError: the file cannot be made (no space, no permission).
        """
        return cls(MetricStore.open(path, file_bytes))

    def close(self) -> None:
        """Let go of the file; what was counted stays in it."""
        self.store.close()

    def _declare_requests(self) -> None:
        counter, gauge = self._counter, self._gauge
        self.requests = counter("http_requests", "requests", "Client requests answered.", "operation", "status")
        self.request_seconds = self._seconds(
            "http_request_duration", "Time from a request's header to its last byte.", "operation"
        )
        self.active_requests = gauge("http_active_requests", "requests", "Client requests in progress.")
        self.active_connections = gauge("http_active_connections", "connections", "Open client connections.")
        self.refused_connections = counter(
            "http_refused_connections", "connections", "Connections beyond the bound `connections`."
        )
        self.ingested_bytes = counter("http_ingested_bytes", "bytes", "Bytes of bodies taken in.")
        self.served_bytes = counter("http_served_bytes", "bytes", "Bytes of bodies sent to clients.")
        self.broken_requests = counter(
            "http_broken_requests", "requests", "Requests whose body ended early, by who broke off.", "side"
        )
        self.refused_signatures = counter(
            "http_refused_signatures", "requests", "Requests refused by authentication.", "code"
        )
        self.forwarded_requests = counter(
            "http_forwarded_requests", "requests", "Requests forwarded to the origin as they are.", "status"
        )
        self.refused_loops = counter(
            "http_refused_loops", "requests", "Requests refused because this gateway had sent them."
        )
        self.broken_invariants = counter("http_broken_invariants", "errors", "Internal errors: each is a bug.")

    def _declare_daemon(self) -> None:
        counter = self._counter
        self.daemon_requests = counter(
            "daemon_requests", "requests", "Requests to the memory daemon's address.", "operation", "status"
        )
        self.daemon_dropped_shards = counter(
            "daemon_dropped_shards", "shards", "Shards dropped because their rank wrote newer ones."
        )

    def _declare_reads(self) -> None:
        counter = self._counter
        self.reads = counter("read_bodies", "reads", "Bodies served, by the tier that had them.", "tier")
        self.read_bytes = counter("read_bytes", "bytes", "Bytes served, by the tier that had them.", "tier")
        self.fills = counter("read_fills", "blocks", "Blocks fetched from the origin into memory.")
        self.filled_bytes = counter("read_filled_bytes", "bytes", "Bytes fetched from the origin into memory.")
        self.peer_fills = counter("read_peer_fills", "blocks", "Blocks fetched from peers into memory.")
        self.peer_filled_bytes = counter("read_peer_filled_bytes", "bytes", "Bytes fetched from peers into memory.")
        self.read_peer_failures = counter(
            "read_peer_failures", "reads", "Peers given up by a read: `silent` or `corrupt`.", "reason"
        )
        self.shared_fills = counter(
            "read_shared_fills", "reads", "Reads that waited for a fetch another one had begun."
        )
        self.lost_reads = counter("read_lost", "reads", "Reads of bytes that were gone from every tier.")
        self.revalidations = counter(
            "read_revalidations", "requests", "Questions whether the origin still holds a copy.", "outcome"
        )
        self.foreign_changes = counter(
            "read_foreign_changes", "objects", "Objects found changed in the origin behind the gateway."
        )
        self.origin_outage_answers = counter(
            "read_origin_outage_answers", "requests", "Answers given without the origin because it was away."
        )

    def _declare_memory(self) -> None:
        counter, computed = self._counter, self._computed
        self.memory_limit_bytes = computed("memory_limit_bytes", "bytes", "The memory budget.")
        self.memory_used_bytes = computed("memory_used_bytes", "bytes", "Used part of the budget, by use.", "use")
        self.memory_slab_bytes = computed("memory_slab_bytes", "bytes", "Size of the slabs, in use or free.")
        self.evictions = counter("memory_evictions", "bodies", "Bodies evicted.")
        self.evicted_bytes = counter("memory_evicted_bytes", "bytes", "Bytes evicted.")
        gauge = self._gauge
        self.kept_sets = gauge("memory_kept_sets", "sets", "Whole sets of runs that are evicted last.")
        self.kept_set_bytes = gauge("memory_kept_set_bytes", "bytes", "Bytes of those sets.")
        self.pinned_set_bytes = gauge("memory_pinned_set_bytes", "bytes", "Bytes that are never evicted: pinned.")
        self.reaped_pins = counter("memory_reaped_pins", "pins", "Pins taken back from dead processes.")
        self.grants = counter("memory_grants", "grants", "Rooms given to processes of this machine to write into.")
        self.granted_bytes = counter("memory_granted_bytes", "bytes", "Bytes of those rooms.")
        self.mapped_reads = counter(
            "read_mapped", "reads", "Reads answered to processes of this machine with where the bytes lie."
        )
        self.mapped_bytes = counter("read_mapped_bytes", "bytes", "Bytes of those reads.")
        self.integrity_failures = counter(
            "memory_integrity_failures",
            "blocks",
            "Blocks whose bytes did not match their checksum.",
            "source",
        )
        self.directory_objects = computed("directory_objects", "objects", "Known keys, by state.", "state")
        self.directory_uploads = computed("directory_uploads", "uploads", "Multipart uploads of clients in progress.")
        self.directory_used_bytes = computed("directory_used_bytes", "bytes", "Size of the directory.")
        self.conflicts = counter("directory_conflicts", "commits", "Commits that had to be decided again.")

    def _declare_writeback(self) -> None:
        counter, computed = self._counter, self._computed
        self.pending_writes = computed(
            "writeback_pending_writes", "writes", "Writes that the origin does not hold yet.", "kind"
        )
        self.pending_bytes = computed("writeback_pending_bytes", "bytes", "Bytes the origin does not hold yet.")
        self.owed_bytes = computed(
            "writeback_owed_bytes", "bytes", "Those of them that are on their way: not set aside, not kept by policy."
        )
        self.parked_writes = computed(
            "persistence_parked_writes", "writes", "Writes that by policy stay in memory, in this node's care."
        )
        self.parked_bytes = computed("persistence_parked_bytes", "bytes", "Bytes of those writes.")
        self.oldest_pending_seconds = computed(
            "writeback_oldest_pending_seconds", "seconds", "Age of the oldest write the origin lacks."
        )
        self.loss_bound_ratio = computed(
            "writeback_loss_bound_ratio",
            "ratio",
            "How far `dirty_age_limit` or `dirty_size_limit`, the nearer, is reached: from 1 on writes are refused.",
        )
        self.only_here_bytes = self._gauge(
            "writeback_only_here_bytes", "bytes", "Bytes the origin does not hold yet and only this node's memory has."
        )
        self.quarantined_writes = computed(
            "writeback_quarantined_writes", "writes", "Writes set aside since the origin refused them."
        )
        self.fenced_writes = computed(
            "writeback_fenced_writes", "writes", "Writes that wait for others before them.", "role"
        )
        self.writebacks = counter("writeback_writes", "writes", "Write-backs that ended.", "kind", "outcome")
        self.writeback_seconds = self._seconds(
            "writeback_duration", "Time from the start of a write-back to its end.", "kind"
        )
        self.persist_seconds = self._seconds(
            "writeback_persist_delay", "Time from a commit until the origin held it.", "role"
        )
        self.persisted_bytes = counter("writeback_persisted_bytes", "bytes", "Bytes the origin took over.")
        self.reused_bytes = counter(
            "writeback_reused_bytes", "bytes", "Bytes copied inside the origin instead of sent, since they were there."
        )
        self.writeback_retries = counter("writeback_retries", "writes", "Write-backs put off after a fault.")
        self.superseded_writes = counter(
            "writeback_superseded_writes", "writes", "Write-backs given up for a newer write of the key."
        )
        self.quarantines = counter("writeback_quarantines", "writes", "Writes the origin refused for good.")
        self.withdrawals = counter("writeback_withdrawals", "markers", "Markers taken away from the origin.")
        self.quarantined_sets = counter(
            "checkpoints_quarantined",
            "checkpoints",
            "Checkpoints found damaged when somebody asked for the newest, and passed over since.",
        )
        self.aborted_uploads = counter(
            "writeback_aborted_uploads", "uploads", "Superseded uploads aborted in the origin."
        )
        self.through_writes = counter(
            "writeback_through_writes", "writes", "Writes put through to the origin, by reason.", "reason"
        )
        self.takeovers = counter("writeback_takeovers", "writes", "Writes of nodes that are gone, taken over.", "kind")
        self.promoted_sets = counter(
            "persistence_promoted_sets", "sets", "Sets that were kept in memory and go to the origin."
        )
        self.dropped_sets = counter(
            "persistence_dropped_sets", "sets", "Sets that were kept in memory and were deleted as superseded."
        )
        self.skipped_sets = counter(
            "persistence_skipped_sets", "sets", "Sets that write-back left in memory since newer ones were complete."
        )
        self.lost_writes = counter(
            "writeback_lost_writes", "writes", "Writes set aside since all nodes that held them are gone."
        )
        self.found_writes = counter("writeback_found_writes", "writes", "Lost writes whose bytes came back.")
        self.repaired_bytes = counter(
            "writeback_repaired_bytes", "bytes", "Bytes copied to more nodes in the place of lost copies."
        )
        self.short_writes = self._gauge(
            "writeback_short_writes",
            "writes",
            "Pending writes on fewer nodes than the rule says, that this node mends.",
        )
        self.slowed_writes = counter("writeback_slowed_writes", "writes", "Writes slowed down by the loss bound.")
        self.refused_writes = counter("writeback_refused_writes", "writes", "Writes refused by the loss bound.")

    def _declare_origin(self) -> None:
        counter = self._counter
        self.origin_requests = counter(
            "origin_requests",
            "requests",
            "Tries of requests to the origin; status `none` where no answer came.",
            "operation",
            "status",
        )
        self.origin_seconds = self._seconds(
            "origin_request_duration", "Time of one try, until its answer began.", "operation"
        )
        self.origin_retries = counter("origin_retries", "requests", "Tries after the first.", "operation")
        self.origin_exhausted = counter(
            "origin_exhausted", "requests", "Requests given up after all tries.", "operation"
        )
        self.origin_refused_credentials = counter(
            "origin_refused_credentials", "requests", "Refusals for the node's own credentials.", "code"
        )

    def _declare_replication(self) -> None:
        counter = self._counter
        self.pushed_bytes = counter("replication_pushed_bytes", "bytes", "Bytes that peers took as copies.")
        self.taken_bytes = counter("replication_taken_bytes", "bytes", "Bytes taken in as copies for peers.")
        self.pulled_bytes = counter("replication_pulled_bytes", "bytes", "Bytes fetched from peers because one asked.")
        self.peer_read_bytes = counter("replication_read_bytes", "bytes", "Bytes read from peers.")
        self.peer_served_bytes = counter("replication_served_bytes", "bytes", "Bytes read by peers.")
        self.peer_failures = counter(
            "replication_peer_failures", "requests", "Requests that a peer did not do, by why.", "reason"
        )
        self.refused_peers = counter(
            "replication_refused_peers", "requests", "Requests of peers refused by authentication."
        )
        self.dropped_notices = counter(
            "replication_dropped_notices", "notices", "Notices that did not reach a peer; they cost memory for a while."
        )

    def _declare_node(self) -> None:
        self.restarts = self._counter(
            "node_restarts", "processes", "Processes that died and were started again.", "role"
        )
        self.scrape_faults = self._counter(
            "observe_scrape_faults", "sources", "Sources that could not be read during a scrape."
        )

    def _declare(
        self,
        name: str,
        kind: MetricKind,
        unit: str,
        text: str,
        labels: tuple[str, ...],
        computed: bool = False,
    ) -> Metric:
        full = f"tiergate_{name}"
        if full in self.declared:
            raise InvariantError("metric declared twice", metric=full)
        buckets = _SECONDS if kind is MetricKind.HISTOGRAM else ()
        metric = Metric(full, kind, text, unit, labels, Stability.EXPERIMENTAL, buckets, computed)
        self.declared[full] = metric
        if not labels and not computed:
            self.store.add(metric, 0.0, ())  # so that it shows as 0 before its first event
        return metric

    def _counter(self, name: str, unit: str, text: str, *labels: str) -> Counter:
        return Counter(self._declare(f"{name}_total", MetricKind.COUNTER, unit, text, labels), self.store)

    def _gauge(self, name: str, unit: str, text: str, *labels: str) -> Gauge:
        return Gauge(self._declare(name, MetricKind.GAUGE, unit, text, labels), self.store)

    def _computed(self, name: str, unit: str, text: str, *labels: str) -> Computed:
        return Computed(self._declare(name, MetricKind.GAUGE, unit, text, labels, computed=True))

    def _seconds(self, name: str, text: str, *labels: str) -> Histogram:
        metric = self._declare(f"{name}_seconds", MetricKind.HISTOGRAM, "seconds", text, labels)
        return Histogram(metric, self.store)


def render_reference() -> str:
    """METRICS.md: every metric with its kind, unit, labels and meaning."""
    rows = [
        "# Metrics",
        "",
        "Generated from the declarations in `tiergate.observe.metrics`; do not edit.",
        "",
        "`/metrics` on the admin address shows the sum over the processes of a node, as Prometheus text.",
        "Counters go on when a process is restarted and start anew with the node. A *stable* metric keeps",
        "its name and meaning within a major version; an *experimental* one may still change.",
        "",
        "| metric | kind | unit | labels | stability | meaning |",
        "|---|---|---|---|---|---|",
    ]
    for metric in Metrics().declared.values():
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        cells = (f"`{metric.name}`", metric.kind, metric.unit, labels, metric.stability, metric.help)
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"
