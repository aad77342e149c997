"""The admin address: health, readiness, metrics, status, and the few things an operator may ask for."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from aiohttp import web

from tiergate import __version__
from tiergate.child import ChildContext
from tiergate.engine.buckets import Buckets
from tiergate.engine.intake import age_bound, size_bound
from tiergate.engine.outage import Outage
from tiergate.engine.prefetch import Prefetch, Progress
from tiergate.engine.rooms import Rooms
from tiergate.errors import DirectoryUnavailableError, OverloadedError, TiergateError
from tiergate.model import ObjectName, Pending
from tiergate.observe.exposition import CONTENT_TYPE, Scrape, sum_files
from tiergate.observe.logs import get_logger
from tiergate.observe.metrics import Reading
from tiergate.s3.uri import uri_of
from tiergate.server.loss import loss_report
from tiergate.server.streaming import Stream, status_of
from tiergate.writeback.promotion import Promotion
from tiergate.writeback.retaining import Retaining, RetentionReport, place_of
from tiergate.writeback.uploader import Uploader

if TYPE_CHECKING:
    from tiergate.server.cluster import Cluster
    from tiergate.server.member import Member

log = get_logger(__name__)

T = TypeVar("T")

TOTALS = (
    "requests",
    "ingested_bytes",
    "served_bytes",
    "read_bytes",
    "filled_bytes",
    "lost_reads",
    "foreign_changes",
    "origin_outage_answers",
    "evictions",
    "integrity_failures",
    "persisted_bytes",
    "reused_bytes",
    "writeback_retries",
    "quarantines",
    "through_writes",
    "slowed_writes",
    "refused_writes",
    "origin_requests",
    "origin_retries",
    "origin_refused_credentials",
    "restarts",
    "broken_invariants",
)
"""The counters that a status shows, summed over their labels, by their names in `Metrics`."""

PATIENCE_S = 5.0
"""How long the directory of a cluster may take before an answer does without it: probes and people wait no longer."""

END_S = 1.0
"""So long a request in progress may take at the end of this process, which others wait for."""

SHOWN_COUNT = 100
"""How many pending, fenced or quarantined writes a status names; it always counts all."""


class Admin:
    """Answers on the admin address. It is not reachable through the S3 port."""

    def __init__(
        self,
        context: ChildContext,
        rooms: Rooms,
        uploader: Uploader,
        prefetch: Prefetch,
        promotion: Promotion,
        retaining: Retaining,
        member: "Member | None" = None,
        cluster: "Cluster | None" = None,
        more: Iterable[web.RouteDef] = (),
        streams: Iterable[Stream] = (),
    ) -> None:
        """`more`: further routes of the admin address; `streams`: the work of theirs that ends with it."""
        self._more = tuple(more)
        self._streams = tuple(streams)
        self._retaining = retaining
        self._cluster = cluster
        self._member = member
        self._prefetch = prefetch
        self._promotion = promotion
        self._stream = Stream("prefetch")
        self._context = context
        self._rooms = rooms
        self._outage = Outage(rooms.origin, rooms.clock)
        self._buckets = Buckets(rooms, self._outage)
        self._uploader = uploader
        self._scrape = Scrape(context.folders.metrics, rooms.metrics, (self._readings,))

    def runner(self) -> web.AppRunner:
        """For a site; the caller sets it up and cleans it up, which ends a prefetch."""
        return web.AppRunner(self.app(), access_log=None, shutdown_timeout=END_S)

    def app(self) -> web.Application:
        """The routes."""
        app = web.Application()
        for stream in (self._stream, *self._streams):
            app.on_shutdown.append(stream.end)
        app.on_cleanup.append(self._close)
        app.add_routes(
            [
                web.get("/healthz", self._healthz),
                web.get("/readyz", self._readyz),
                web.get("/metrics", self._metrics),
                web.get("/status", self._status),
                web.post("/retry", self._retry),
                web.post("/prefetch", self._prefetch_under),
                web.post("/pin", self._pin),
                web.post("/unpin", self._unpin),
                web.post("/promote", self._promote),
                *self._more,
            ]
        )
        return app

    async def _close(self, _: web.Application) -> None:
        await self._outage.close()

    async def _require_bucket(self, bucket: str) -> None:
        """See that a bucket exists, unless nobody can say.

        Raises:
            NotFoundError: NoSuchBucket.
        """
        with suppress(OverloadedError, TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                await self._buckets.known(bucket)

    async def _healthz(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _readyz(self, _: web.Request) -> web.Response:
        """Ready means: state can be read and written back, and in a cluster that this node is a member. An origin
        outage does not make a node unready: it goes on serving and acknowledging from memory."""
        reason = self._member.fault if self._member else ""
        try:
            await self._soon(self._rooms.directory.revision())
        except TiergateError as error:
            reason = reason or error.message
        if reason:
            return web.json_response({"status": "not ready", "reason": reason}, status=503)
        return web.json_response({"status": "ready"})

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=await self._scrape.render(), headers={"Content-Type": CONTENT_TYPE})

    async def _status(self, _: web.Request) -> web.Response:
        cluster = {"cluster": self._member.report()} if self._member else {}
        return web.json_response(await self._report() | cluster)

    async def _retry(self, request: web.Request) -> web.Response:
        """Release quarantined writes, all or those of one bucket or key, so that they are tried again now."""
        bucket, key = request.query.get("bucket"), request.query.get("key")
        released = 0
        for write in (await self._owed()).writes:
            fits = bucket in (None, write.name.bucket) and key in (None, write.name.key)
            if write.quarantined and fits:
                await self._rooms.directory.quarantine(write.name, write.uid, "")
                released += 1
        self._uploader.retry_now()
        return web.json_response({"released": released})

    async def _pin(self, request: web.Request) -> web.Response:
        """Keep what is under a prefix in memory, as far as it is there, whatever else needs room."""
        bucket, prefix = request.query.get("bucket", ""), request.query.get("prefix", "")
        if not bucket:
            return web.json_response({"error": "a bucket must be named"}, status=400)
        try:
            await self._require_bucket(bucket)
            size_bytes = await self._soon(self._retaining.pin(bucket, prefix))
        except TiergateError as error:
            return web.json_response({"error": error.message}, status=status_of(error))
        return web.json_response({"bytes": size_bytes})

    async def _unpin(self, request: web.Request) -> web.Response:
        """Let a prefix be evicted again."""
        bucket, prefix = request.query.get("bucket", ""), request.query.get("prefix", "")
        try:
            was_pinned = await self._soon(self._retaining.unpin(bucket, prefix))
        except TiergateError as error:
            return web.json_response({"error": error.message}, status=status_of(error))
        if not was_pinned:
            return web.json_response({"error": "it is not pinned"}, status=404)
        return web.json_response({})

    async def _promote(self, request: web.Request) -> web.Response:
        """Let what stays in memory by policy under a prefix go to the origin."""
        bucket, prefix = request.query.get("bucket", ""), request.query.get("prefix", "")
        if not bucket:
            return web.json_response({"error": "a bucket must be named"}, status=400)
        try:
            await self._require_bucket(bucket)
            count = await self._soon(self._promotion.under(bucket, prefix))
        except TiergateError as error:
            return web.json_response({"error": error.message}, status=status_of(error))
        return web.json_response({"promoted": count})

    async def _prefetch_under(self, request: web.Request) -> web.StreamResponse:
        """Bring what is under a prefix into memory, one prefetch at a time; it ends with the request. The answer has a
        line of JSON now and then: how far it is, what could not be had since the line before, and in the last whether
        all was tried, or why not."""
        bucket, prefix = request.query.get("bucket", ""), request.query.get("prefix", "")
        if not bucket:
            return web.json_response({"error": "a bucket must be named"}, status=400)
        progress, shown_count = Progress(), 0

        def line(is_over: bool, fault: str) -> dict[str, Any]:
            nonlocal shown_count
            failures = progress.failures[shown_count:]
            shown_count += len(failures)
            return {
                "total_count": progress.total_count,
                "total_bytes": progress.total_bytes,
                "done_count": progress.done_count,
                "done_bytes": progress.done_bytes,
                "failures": [{"uri": uri(name), "reason": why} for name, why in failures],
                "is_over": is_over,
                "fault": progress.fault or fault,
            }

        return await self._stream.answer(request, self._prefetch.run(bucket, prefix, progress), line)

    async def _owed(self) -> "Owed":
        """What the directory says.

        Raises:
            OverloadedError: it does not answer, or this node is no member of its cluster now.
        """
        return await self._soon(self._read_owed())

    async def _read_owed(self) -> "Owed":
        directory = self._rooms.directory
        return Owed(
            await directory.pending(),
            await directory.parked(),
            await directory.counts(),
            await directory.oldest_pending_s(),
            await directory.owed_bytes(),
        )

    async def _soon(self, question: Awaitable[T]) -> T:
        """What the directory answers.

        Raises:
            OverloadedError: it does not.
        """
        if self._member is None:
            return await question
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await question
        except TimeoutError as error:
            raise DirectoryUnavailableError("the directory does not answer") from error

    async def _report(self) -> dict[str, Any]:
        settings, memory = self._rooms.settings, self._rooms.memory.stats()
        report: dict[str, Any] = {
            "version": __version__,
            "listen": str(self._context.listen_address),
            "origin": settings.origin or "AWS",
            "memory": {
                "limit_bytes": settings.memory_limit_bytes,
                "slab_bytes": memory.slab_bytes,
                "used_bytes": memory.used_bytes,
                "dirty_bytes": memory.dirty_bytes,
                "clean_bytes": memory.clean_bytes,
                "receiving_bytes": memory.receiving_bytes,
                "pinned_bytes": memory.pinned_bytes,
                "available_bytes": memory.available_bytes,
                "bodies": memory.bodies,
                "evictions": memory.evictions,
            },
            "totals": self._totals(),
        }
        now_s = self._rooms.clock.wall_s()
        try:
            owed = await self._owed()
            loss = await self._soon(loss_report(self._rooms.directory, self._cluster, now_s))
        except OverloadedError as error:
            return report | {"directory": str(error)}
        return report | {
            "objects": owed.counts,
            "writeback": self._writeback(owed),
            "loss": loss,
            "retention": retained(self._retaining.report, now_s),
        }

    def _writeback(self, owed: "Owed") -> dict[str, Any]:
        pending, now_s = owed.pending, self._rooms.clock.wall_s()
        quarantined = [write for write in owed.writes if write.quarantined]
        held_back = self._uploader.held_back(pending)
        return {
            "pending": len(pending),
            "pending_bytes": sum(write.size_bytes for write in pending),
            "owed_bytes": owed.size_bytes,
            "parked": len(owed.parked),
            "parked_bytes": sum(write.size_bytes for write in owed.parked),
            "oldest_age_s": round(owed.age_s(now_s), 3),
            "in_flight": self._uploader.in_flight_count,
            "writes": [shown(write, now_s) for write in pending[:SHOWN_COUNT]],
            "fenced": [shown(write, now_s) | {"waits": str(blocked)} for write, blocked in held_back[:SHOWN_COUNT]],
            "quarantined": [shown(write, now_s) | {"reason": write.quarantined} for write in quarantined[:SHOWN_COUNT]],
        }

    def _totals(self) -> dict[str, int]:
        """The main counters of all processes since the node's start."""
        sums: Counter[str] = Counter()
        for series in sum_files(self._context.folders.metrics):
            sums[series.name] += int(series.values[0])
        return {name: sums[getattr(self._rooms.metrics, name).metric.name] for name in TOTALS}

    async def _readings(self) -> Iterable[Reading]:
        metrics, memory = self._rooms.metrics, self._rooms.memory.stats()
        own = [
            metrics.memory_limit_bytes.reading(self._rooms.settings.memory_limit_bytes),
            metrics.memory_used_bytes.reading(memory.dirty_bytes, "dirty"),
            metrics.memory_used_bytes.reading(memory.clean_bytes, "clean"),
            metrics.memory_used_bytes.reading(memory.receiving_bytes, "receiving"),
            metrics.memory_used_bytes.reading(memory.index_used_bytes, "index"),
            metrics.memory_slab_bytes.reading(memory.slab_bytes),
        ]
        try:
            return own + self._owed_readings(await self._owed())
        except OverloadedError as error:
            log.warning("metrics without what the directory says", error=error)
            return own

    def _owed_readings(self, owed: "Owed") -> list[Reading]:
        metrics, pending, counts = self._rooms.metrics, owed.pending, owed.counts
        settings, age_s = self._rooms.settings, owed.age_s(self._rooms.clock.wall_s())
        bound_share = max(age_bound(settings).share(age_s), size_bound(settings).share(owed.size_bytes))
        if self._cluster is None:
            metrics.only_here_bytes.set(sum(write.size_bytes for write in pending))
        fenced = Counter(str(write.role) for write, _ in self._uploader.held_back(pending))
        kinds = {kind: sum(1 for write in pending if write.kind == kind) for kind in ("put", "delete")}
        return [
            metrics.directory_used_bytes.reading(counts.get("used_bytes", 0)),
            metrics.pending_bytes.reading(sum(write.size_bytes for write in pending)),
            metrics.owed_bytes.reading(owed.size_bytes),
            metrics.oldest_pending_seconds.reading(age_s),
            metrics.loss_bound_ratio.reading(bound_share),
            metrics.parked_writes.reading(counts["parked"]),
            metrics.parked_bytes.reading(counts["parked_bytes"]),
            metrics.quarantined_writes.reading(sum(1 for write in owed.writes if write.quarantined)),
            metrics.directory_uploads.reading(counts["uploads"]),
            *(metrics.fenced_writes.reading(count, role) for role, count in fenced.items()),
            *(metrics.pending_writes.reading(count, kind) for kind, count in kinds.items()),
            *(metrics.directory_objects.reading(counts[state], state) for state in ("dirty", "clean", "tombstone")),
        ]


@dataclass(frozen=True, slots=True)
class Owed:
    """What the directory says at one time: what this node owes, what it keeps in memory by policy, how many of what
    there are, and since when it owes."""

    pending: list[Pending]
    parked: list[Pending]
    counts: dict[str, int]
    oldest_s: float | None
    size_bytes: int

    def age_s(self, now_s: float) -> float:
        """How old the oldest of what this node owes is."""
        return max(0.0, now_s - self.oldest_s) if self.oldest_s is not None else 0.0

    @property
    def writes(self) -> list[Pending]:
        """All that is pending, owed or not."""
        return [*self.pending, *self.parked]


def retained(report: RetentionReport, now_s: float) -> dict[str, Any]:
    """What stays in memory, as status shows it."""
    sets = [judged for run in report.runs for judged in run.sets.items()]
    return {
        "pinned_bytes": report.pinned_bytes,
        "pinned_limit_bytes": report.limit_bytes,
        "fault": report.fault,
        "sets": [
            {
                "uri": uri_of(each.bucket, each.prefix),
                "keep": keep.name.lower(),
                "complete": each.is_complete,
                "bytes": each.size_bytes,
            }
            for each, keep in sets[:SHOWN_COUNT]
        ],
        "pins": [
            {
                "uri": place_of(each.pinned),
                "bytes": each.size_bytes,
                "kept": each.is_kept,
                "age_s": round(now_s - each.pinned.pinned_s, 3),
            }
            for each in report.pins[:SHOWN_COUNT]
        ],
    }


def shown(write: Pending, now_s: float) -> dict[str, Any]:
    """A pending write as status shows it."""
    return {
        "uri": uri(write.name),
        "kind": str(write.kind),
        "role": str(write.role),
        "size_bytes": write.size_bytes,
        "age_s": round(now_s - write.committed_s, 3),
    }


def uri(name: ObjectName) -> str:
    """The object as people write it."""
    return uri_of(name.bucket, name.key)
