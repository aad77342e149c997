"""Promise P3 over three nodes: random requests of several clients to all of them, over dying processes and nodes, cuts
and a failing origin, are explained by one order of each key."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

from tests.cluster.clusters import Cluster
from tests.cluster.conftest import StartCluster

from tiergate.testing.players import KEYS
from tiergate.testing.rules import Answer, Cut

CLIENTS_COUNT = 5
TURNS_COUNT = 60
SIZES_BYTES = (0, 10, 3000, 200_000)
FAULTS = (Answer(503, "SlowDown"), Answer(500, "InternalError", after_origin=True), Cut(), Cut(after_origin=True))
FAILING = ("PutObject", "DeleteObject", "HeadObject", "GetObject", "UploadPart", "CompleteMultipartUpload")


def disturb(cluster: Cluster, choice: random.Random, over: threading.Event) -> None:
    """Let things fail until it is over; then all is whole again."""
    proxy = cluster.standing.proxy
    while not over.wait(choice.uniform(0.1, 0.6)):
        name = choice.choice(sorted(cluster.nodes))
        other = choice.choice(sorted(set(cluster.nodes) - {name}))
        what = choice.choice(("origin", "origin", "process", "node", "cut", "etcd", "cut from origin", "freeze"))
        if what == "origin":
            proxy.inject(choice.choice(FAULTS), operation=choice.choice(FAILING))
        elif what == "process":
            cluster.node(name).kill9(choice.choice(("worker", "background")))
        elif what == "node":
            cluster.node(name).kill9()
            over.wait(choice.choice((0.0, 1.0, cluster.lease_s + 1.0)))
            cluster.node(name).start()
        elif what == "freeze":
            cluster.node(name).freeze()
            over.wait(choice.choice((0.5, cluster.lease_s + 1.0)))
            cluster.node(name).thaw()
        else:
            if what == "cut":
                cluster.cut_apart(name, other)
            elif what == "etcd":
                cluster.cut_from_etcd(name)
            else:
                cluster.cut_from_origin(name)
            over.wait(choice.choice((0.5, cluster.lease_s + 1.0)))
            cluster.standing.network.heal()
    proxy.heal()
    cluster.standing.network.heal()


def test_random_requests_to_three_nodes_are_explained_by_one_order_of_each_key(start_cluster: StartCluster) -> None:
    cluster = start_cluster(
        tries_count=1, flags=("--through-wait", "3s", "--origin-read-timeout", "2s", "--peer-timeout", "1s")
    )
    over = threading.Event()
    players = [cluster.player(number, keys=KEYS, sizes_bytes=SIZES_BYTES) for number in range(CLIENTS_COUNT)]
    with ThreadPoolExecutor(CLIENTS_COUNT + 1) as pool:
        fate = pool.submit(disturb, cluster, cluster.random, over)
        try:
            for _ in pool.map(lambda player: player.play(TURNS_COUNT), players):
                pass
        finally:
            over.set()
        fate.result()
    assert [surprise for player in players for surprise in player.surprises] == [], cluster.seed
    cluster.end()
