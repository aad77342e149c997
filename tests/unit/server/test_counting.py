"""What the metrics say of a request while it ends."""

from typing import Any, cast

from aiohttp.streams import EMPTY_PAYLOAD
from aiohttp.test_utils import make_mocked_request

from tiergate.clock import SystemClock
from tiergate.observe.metrics import Metrics
from tiergate.observe.store import Metric, MetricStore
from tiergate.server.pipeline import VIA_HEADER, Pipeline

NODE = "some-node"


class Remembering(MetricStore):
    """Keeps which metrics moved, in order."""

    moved: list[str]

    def add(self, metric: Metric, amount: float, labels: tuple[str, ...]) -> None:
        super().add(metric, amount, labels)
        self.moved.append(metric.name)


async def test_request_is_counted_before_it_stops_being_in_progress() -> None:
    Remembering.moved = []
    metrics = Metrics(Remembering.in_memory())
    # Refused at the door: neither a service nor settings are looked at.
    pipeline = Pipeline(cast(Any, None), cast(Any, None), None, SystemClock(), metrics, NODE)
    Remembering.moved.clear()
    request = make_mocked_request("GET", "/bucket/key", headers={VIA_HEADER: NODE}, payload=EMPTY_PAYLOAD)
    response = await pipeline.handle(request)
    assert response.status == 400
    moved = Remembering.moved
    active, counted = metrics.active_requests.metric.name, metrics.requests.metric.name
    assert (moved[0], moved[-1]) == (active, active)
    assert moved.count(active) == 2
    assert counted in moved
