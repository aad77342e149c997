"""How long the origin is without a complete set while stock DCP saves over one, with the hold and without it.

A node stands before a proxy that notes every request, and that before moto. What is compared is the time from the
request that takes the marker away to the end of that which puts it back.

    python tests/bench/overwrite.py --rounds 3 --tensors 16
"""

import argparse
import statistics
import sys
import warnings
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

from tiergate.testing.faults import FaultyOrigin
from tiergate.testing.node import RunningNode
from tiergate.testing.origins import MotoOrigin
from tiergate.testing.rules import Seen

BUCKET, MARKER = "bench", "run/.metadata"
SIDES = {"at once": ("--marker-hold", "0s"), "held": ()}


def save(endpoint: str, state: dict[str, Any]) -> None:
    """A file for each tensor."""
    options: dict[str, Any] = {"key": "test", "secret": "test", "endpoint_url": endpoint, "skip_instance_cache": True}
    writer = FsspecWriter(f"s3://{BUCKET}/run", single_file_per_rank=False, overwrite=True, **options)
    state_dict_saver.save(state, storage_writer=writer, no_dist=True)


def gap_s(requests: list[Seen]) -> float:
    """From the deletion of the marker to its put."""
    taken = next(each for each in requests if (each.method, each.key) == ("DELETE", MARKER))
    back = next(each for each in requests if (each.method, each.key) == ("PUT", MARKER))
    assert back.finished_s is not None
    return back.finished_s - taken.started_s


def main() -> None:
    """Sides take turns within each round."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tensors", type=int, default=16, help="of 4 MiB")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    found: dict[str, list[float]] = {side: [] for side in SIDES}
    with MotoOrigin() as origin, FaultyOrigin(origin.endpoint) as proxy:
        client = origin.client()
        client.create_bucket(Bucket=BUCKET)
        client.close()
        for _ in range(given.rounds):
            for side, flags in SIDES.items():
                with RunningNode(proxy.endpoint, memory_limit="1GiB", flags=flags) as node:
                    for _ in range(2):
                        proxy.forget()
                        save(node.endpoint, {f"w{n}": torch.randn(1 << 20) for n in range(given.tensors)})
                        node.wait_settled()
                found[side].append(gap_s(proxy.requests))
                sys.stderr.write(f"{side}: {found[side][-1]:.2f} s\n")
    middle = {side: statistics.median(each) for side, each in found.items()}
    for side, each in found.items():
        rounds = ", ".join(f"{value:.2f}" for value in each)
        ratio = middle[side] / middle["at once"]
        sys.stdout.write(f"{side}: {middle[side]:.2f} s ({rounds}); ratio {ratio:.2f}\n")


if __name__ == "__main__":
    main()
