"""Promise P3: random requests of several clients at once, over a failing origin, dying processes and little memory, are
explained by one order of each key; and what the last of them saw is what the origin holds in the end."""

import os
import random
import threading
from typing import Any, Protocol

import pytest

from tiergate.clock import SystemClock
from tiergate.testing.faults import FaultyOrigin
from tiergate.testing.histories import Did, unexplained
from tiergate.testing.journal import Journal
from tiergate.testing.node import RunningNode
from tiergate.testing.players import KEYS, Player
from tiergate.testing.rules import Answer, Cut

pytestmark = pytest.mark.semantics("P3.1")

CLIENTS_COUNT = 4
TURNS_COUNT = 60
SETTLE_S = 60.0
FAULTS = (Answer(503, "SlowDown"), Answer(500, "InternalError", after_origin=True), Cut(), Cut(after_origin=True))
FAILING = ("PutObject", "DeleteObject", "HeadObject", "GetObject", "UploadPart", "CompleteMultipartUpload")
WRITING = frozenset({"PutObject", "CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload"})


class StartNode(Protocol):
    """The fixture of that name."""

    def __call__(self, *flags: str, origin: str = "", **options: Any) -> RunningNode: ...


def disturb(node: RunningNode, proxy: FaultyOrigin, choice: random.Random, playing: list[threading.Thread]) -> None:
    """Let the origin and the node's processes fail for as long as the clients play."""
    clock = SystemClock()
    while any(thread.is_alive() for thread in playing):
        if choice.random() < 0.15:
            down = Answer(503, "SlowDown")
            proxy.inject(down, where=lambda seen: seen.operation in WRITING, times=None)
            playing[0].join(choice.uniform(0.2, 1.0))
            proxy.heal()
        elif choice.random() < 0.1:
            node.kill9(choice.choice(("worker", "background")))
        else:
            proxy.inject(choice.choice(FAULTS), operation=choice.choice(FAILING))
        until_s = clock.monotonic_s() + choice.uniform(0.05, 0.3)
        while clock.monotonic_s() < until_s and any(thread.is_alive() for thread in playing):
            playing[-1].join(0.02)
    proxy.heal()


def test_random_requests_are_explained_by_one_order_of_each_key(
    start_node: StartNode, proxy: FaultyOrigin, direct: Any, bucket: str
) -> None:
    seed = os.environ.get("TIERGATE_TEST_SEED", "") or str(random.SystemRandom().randrange(1 << 30))
    choice = random.Random(seed)
    told = f"TIERGATE_TEST_SEED={seed}"
    flags = (
        "--marker-quiet",
        "100ms",
        "--marker-hold",
        "300ms",
        "--through-wait",
        "3s",
        "--revalidate",
        choice.choice(("0s", "1h")),
    )
    node = start_node(*flags, workers=2, memory_limit=choice.choice(("64MiB", "256MiB")))
    client = node.client(retries={"max_attempts": 1})
    # The client tries again by itself.
    journal = Journal(tries_count=2)
    players = [Player([client], bucket, journal, f"{seed} {number}") for number in range(CLIENTS_COUNT)]
    threads = [threading.Thread(target=player.play, args=(TURNS_COUNT,)) for player in players]
    for thread in threads:
        thread.start()
    disturb(node, proxy, choice, threads)
    node.wait_settled(SETTLE_S)
    assert [surprise for player in players for surprise in player.surprises] == [], told

    last = node.client()
    at_origin = Journal()
    for key in KEYS:
        Player([last], bucket, journal, seed).get(last, key)
        Player([direct], bucket, at_origin, seed).get(direct, key)
        assert unexplained(journal.history(key)) == [], f"{key}, {told}"
        (seen,) = [each.value for each in at_origin.history(key) if each.did is Did.READ]
        assert seen == journal.history(key)[-1].value, f"{key}, {told}"
    assert node.metric("tiergate_http_broken_invariants_total") == 0, node.log_tail()
