"""Metrics of several processes in shared files."""

import asyncio
import os
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tiergate.errors import InvariantError, OriginTemporaryError
from tiergate.observe.exposition import Scrape, render, sum_files
from tiergate.observe.metrics import Metrics, Reading, render_reference
from tiergate.observe.store import MetricKind, MetricStore, read_file

DOCS = Path(__file__).parents[3] / "gateway" / "docs"


def samples(text: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def scrape(folder: Path) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return samples(render(sum_files(folder), [], Metrics().declared))


def test_counters_of_processes_are_summed(tmp_path: Path) -> None:
    one, two = Metrics.open(tmp_path / "worker-0"), Metrics.open(tmp_path / "worker-1")
    one.requests.inc(2, "GetObject", "200")
    two.requests.inc(3, "GetObject", "200")
    two.requests.inc(1, "GetObject", "404")
    seen = scrape(tmp_path)
    name = "tiergate_http_requests_total"
    assert seen[name, (("operation", "GetObject"), ("status", "200"))] == 5
    assert seen[name, (("operation", "GetObject"), ("status", "404"))] == 1


def test_counter_without_labels_shows_before_its_first_event(tmp_path: Path) -> None:
    Metrics.open(tmp_path / "worker-0")
    assert scrape(tmp_path)["tiergate_read_fills_total", ()] == 0


def test_successor_goes_on_with_counters_and_starts_gauges_anew(tmp_path: Path) -> None:
    first = Metrics.open(tmp_path / "worker-0")
    first.fills.inc(5)
    first.active_requests.set(3)
    first.request_seconds.observe(0.02, "GetObject")
    first.close()
    second = Metrics.open(tmp_path / "worker-0")
    second.fills.inc()
    second.active_requests.inc()
    second.request_seconds.observe(0.02, "GetObject")
    seen = scrape(tmp_path)
    assert seen["tiergate_read_fills_total", ()] == 6
    assert seen["tiergate_http_active_requests", ()] == 1
    assert seen["tiergate_http_request_duration_seconds_count", (("operation", "GetObject"),)] == 2


def test_histogram_shows_cumulative_buckets_and_sum(tmp_path: Path) -> None:
    metrics = Metrics.open(tmp_path / "worker-0")
    for seconds in (0.001, 0.02, 0.02, 7.0, 10_000.0):
        metrics.request_seconds.observe(seconds, "PutObject")
    seen = scrape(tmp_path)
    name, operation = "tiergate_http_request_duration_seconds", ("operation", "PutObject")

    def bucket(bound: str) -> float:
        return seen[f"{name}_bucket", (("le", bound), operation)]

    assert [bucket(bound) for bound in ("0.001", "0.01", "0.025", "5.0", "10.0", "300.0", "+Inf")] == [
        1,
        1,
        3,
        3,
        4,
        4,
        5,
    ]
    assert seen[f"{name}_count", (operation,)] == 5
    assert seen[f"{name}_sum", (operation,)] == pytest.approx(10007.041)


def test_reader_sees_another_process_while_it_lives(tmp_path: Path) -> None:
    metrics = Metrics.open(tmp_path / "worker-0")
    pid = os.fork()
    if pid == 0:
        child = Metrics.open(tmp_path / "worker-1")
        child.fills.inc(4)
        os._exit(0)  # without closing anything, as a killed process
    os.waitpid(pid, 0)
    metrics.fills.inc(1)
    assert scrape(tmp_path)["tiergate_read_fills_total", ()] == 5


def test_labels_keep_every_character(tmp_path: Path) -> None:
    metrics = Metrics.open(tmp_path / "worker-0")
    metrics.origin_retries.inc(1, 'quote " back\\slash\nline ü')
    assert scrape(tmp_path)["tiergate_origin_retries_total", (("operation", 'quote " back\\slash\nline ü'),)] == 1


def test_full_file_drops_new_series_counts_them_and_keeps_the_others(tmp_path: Path) -> None:
    store = MetricStore.open(tmp_path / "worker-0", 16 << 10)
    metrics = Metrics(store)
    metrics.requests.inc(1, "first", "200")
    for number in range(1000):
        metrics.requests.inc(1, f"operation-{number}", "200")
    metrics.requests.inc(1, "first", "200")
    seen = {(one.name, one.labels): one.values[0] for one in read_file(tmp_path / "worker-0")}
    kept = [labels for name, labels in seen if name == "tiergate_http_requests_total"]
    assert seen["tiergate_http_requests_total", ("first", "200")] == 2
    assert 0 < len(kept) < 1000
    assert seen["tiergate_observe_series_dropped_total", ()] == 1001 - len(kept)
    assert (tmp_path / "worker-0").stat().st_size == 16 << 10


def test_file_is_allocated_in_full(tmp_path: Path) -> None:
    Metrics.open(tmp_path / "worker-0")
    found = (tmp_path / "worker-0").stat()
    assert found.st_blocks * 512 >= found.st_size


def test_half_written_entry_of_a_killed_process_is_not_seen(tmp_path: Path) -> None:
    metrics = Metrics.open(tmp_path / "worker-0")
    metrics.fills.inc(2)
    end = int.from_bytes((tmp_path / "worker-0").read_bytes()[8:16], "little")
    metrics.close()
    with (tmp_path / "worker-0").open("r+b") as file:
        file.seek(end)
        file.write(b"\xff" * 20)
    again = Metrics.open(tmp_path / "worker-0")
    again.reads.inc(1, "memory")
    seen = scrape(tmp_path)
    assert seen["tiergate_read_fills_total", ()] == 2
    assert seen["tiergate_read_bodies_total", (("tier", "memory"),)] == 1


def test_wrong_number_of_labels_is_an_invariant() -> None:
    metrics = Metrics()
    with pytest.raises(InvariantError):
        metrics.requests.inc(1, "GetObject")
    with pytest.raises(InvariantError):
        metrics.memory_used_bytes.reading(1.0)


def test_scrape_shows_computed_gauges_and_survives_a_failing_source(tmp_path: Path) -> None:
    metrics = Metrics.open(tmp_path / "background-0")

    async def good() -> list[Reading]:
        return [metrics.memory_used_bytes.reading(12.0, "slabs"), metrics.pending_bytes.reading(1)]

    async def bad() -> list[Reading]:
        raise OriginTemporaryError("away")

    async def run() -> bytes:
        return await Scrape(tmp_path, metrics, [bad, good]).render()

    seen = samples(asyncio.run(run()))
    assert seen["tiergate_memory_used_bytes", (("use", "slabs"),)] == 12
    assert seen["tiergate_writeback_pending_bytes", ()] == 1
    assert seen["tiergate_observe_scrape_faults_total", ()] == 1


def test_names_follow_the_rule() -> None:
    for metric in Metrics().declared.values():
        assert re.fullmatch(r"tiergate_[a-z]+_[a-z_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind is MetricKind.COUNTER)
        assert metric.help.endswith(".")
        assert metric.unit


def test_reference_is_up_to_date() -> None:
    """To renew it: write `tiergate.observe.metrics.render_reference()` to gateway/docs/METRICS.md."""
    assert (DOCS / "METRICS.md").read_text() == render_reference()
