"""Answers a scrape: the files of all processes summed, with what is computed at that moment."""

from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from tiergate.errors import TiergateError, invariant
from tiergate.observe.logs import get_logger
from tiergate.observe.metrics import Metrics, Reading
from tiergate.observe.store import Metric, MetricKind, Series, read_file

log = get_logger(__name__)

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4


Source = Callable[[], Awaitable[Iterable[Reading]]]


@dataclass(frozen=True, slots=True)
class Scrape:
    """Renders the node's metrics. `folder` holds one file per process; `sources` are asked at every scrape.
    A source that fails is left out, counted and logged, so that the rest still shows."""

    folder: Path
    metrics: Metrics
    sources: Sequence[Source] = ()

    async def render(self) -> bytes:
        """The Prometheus text format, of type `CONTENT_TYPE`."""
        readings: list[Reading] = []
        for source in self.sources:
            try:
                readings += await source()
            except (TiergateError, OSError) as error:
                self.metrics.scrape_faults.inc()
                log.warning("a source of metrics failed", error=error)
        return render(sum_files(self.folder), readings, self.metrics.declared)


def sum_files(folder: Path) -> list[Series]:
    """The series of all processes of a node, summed."""
    sums: dict[tuple[str, tuple[str, ...]], tuple[float, ...]] = {}
    for path in sorted(folder.iterdir()):
        for series in read_file(path):
            key = (series.name, series.labels)
            before = sums.get(key)
            sums[key] = series.values if before is None else _sum(before, series.values)
    return [Series(name, labels, values) for (name, labels), values in sums.items()]


def _sum(left: tuple[float, ...], right: tuple[float, ...]) -> tuple[float, ...]:
    invariant(len(left) == len(right), "processes disagree on the buckets of a histogram")
    return tuple(one + other for one, other in zip(left, right, strict=True))


def render(series: Iterable[Series], readings: Iterable[Reading], catalogue: Mapping[str, Metric]) -> bytes:
    """The Prometheus text format of series and readings; what the catalogue does not know is left out."""
    by_name: defaultdict[str, list[Series]] = defaultdict(list)
    for one in series:
        by_name[one.name].append(one)
    for reading in readings:
        by_name[reading.metric.name].append(Series(reading.metric.name, reading.labels, (reading.value,)))
    families = [_family(metric, by_name[name]) for name, metric in catalogue.items() if by_name[name]]
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(families))
    return generate_latest(registry)


class _Families(Collector):
    """The way into the Prometheus client's renderer."""

    def __init__(self, families: list[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Family]:
        return self._families


def _bound_text(bound: float) -> str:
    return "+Inf" if bound == float("inf") else str(bound)


def _family(metric: Metric, series: Iterable[Series]) -> Family:
    family = Family(metric.name.removesuffix("_total"), metric.help, metric.kind)
    for one in sorted(series, key=lambda item: item.labels):
        labels = dict(zip(metric.labels, one.labels, strict=True))
        if metric.kind is not MetricKind.HISTOGRAM:
            family.add_sample(metric.name, labels, one.values[0])
            continue
        *counts, total = one.values
        running = 0.0
        for bound, count in zip((*metric.buckets, float("inf")), counts, strict=True):
            running += count
            family.add_sample(f"{metric.name}_bucket", labels | {"le": _bound_text(bound)}, running)
        family.add_sample(f"{metric.name}_count", labels, running)
        family.add_sample(f"{metric.name}_sum", labels, total)
    return family
