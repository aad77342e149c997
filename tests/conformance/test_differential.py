"""Random requests get the same answers from a server alone and from the gateway before it, warm and cold.

`TIERGATE_DIFFERENTIAL=SEED:COUNT:STEPS` hunts longer: so many runs from that seed on, of so many steps each.
"""

import os
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
from tests.conformance.differential import Race, Side
from tests.conformance.gateway import checking_node
from tests.conformance.sides import Sides
from tests.conformance.steps import Steps

from tiergate.testing.node import RunningNode
from tiergate.testing.origins import FaultyOrigin, ProcessOrigin

FIRST_SEED, SEEDS_COUNT, STEPS_COUNT = map(int, os.environ.get("TIERGATE_DIFFERENTIAL", "24:2:120").split(":"))
SEEDS = range(FIRST_SEED, FIRST_SEED + SEEDS_COUNT)
MODES = {
    "exact": [f"--prefix={{uri='s3://differential-exact-a-{seed}/', etag='exact'}}" for seed in SEEDS],
    "opaque": ["--exact-etag", "0B"],
}
"""The gateway shows the ETags of S3, or its own."""


@pytest.fixture(scope="module", params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def pair(origin: ProcessOrigin, mode: str) -> Iterator[Sides]:
    flags = MODES[mode]
    with FaultyOrigin(origin.endpoint) as proxy, checking_node(origin, "--origin", proxy.endpoint, *flags) as node:
        yield Sides(node, origin, proxy)
        assert node.metric("tiergate_http_broken_invariants_total") == 0, node.log_tail()


def client_of(node: RunningNode) -> Callable[[], Any]:
    """A client of the node, another one after each start."""
    made: dict[str, Any] = {}

    def client() -> Any:
        if node.endpoint not in made:
            made[node.endpoint] = node.client()
        return made[node.endpoint]

    return client


@pytest.mark.timeout(0 if "TIERGATE_DIFFERENTIAL" in os.environ else 120)
@pytest.mark.parametrize("seed", SEEDS)
def test_gateway_answers_as_the_server_behind_it(pair: Sides, mode: str, seed: int) -> None:
    direct = pair.origin.client()
    names = [f"differential-{mode}-{side}-{seed}" for side in "ab"]
    for name in names:
        direct.create_bucket(Bucket=name)
    race = Race(pair, Side(client_of(pair.node), names[0]), Side(lambda: direct, names[1]), etags=mode == "exact")
    race.run(islice(Steps(seed), STEPS_COUNT))
    direct.close()
