"""A node whose wall clock jumps, while the others' does not: order, leases and deadlines rest on none."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.cluster.clusters import LONG_LEASE_S
from tests.cluster.conftest import StartCluster, thorough

LIBRARIES = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))

pytestmark = pytest.mark.skipif(
    not LIBRARIES or shutil.which("faketime") is None, reason="Debian's package faketime is not installed"
)


ALL, OTHERS = ("n0", "n1", "n2"), ("n0", "n2")


@pytest.mark.parametrize(
    ("jump", "serving"),
    [
        ("-4m", ALL),
        pytest.param("+4m", ALL, marks=thorough),
        pytest.param("+3h", OTHERS, marks=thorough),
    ],
)
def test_jump_under_load(start_cluster: StartCluster, tmp_path: Path, jump: str, serving: Sequence[str]) -> None:
    """Minutes, which is longer than every lease and promise, nobody notices. After hours nobody takes what the node
    signs, nor it what they sign: it serves no more, but stays a member, and goes on once its clock is right."""
    clock = tmp_path / "clock"
    clock.write_text("+0s")
    faked = {
        "LD_PRELOAD": str(LIBRARIES[0]),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
    cluster = start_cluster(environments={"n1": faked}, lease_s=LONG_LEASE_S)
    epochs = cluster.epochs
    cluster.trainer("n1").train(1)
    with cluster.training(*serving, run="next") as trainer:
        cluster.wait_saved(trainer)
        clock.write_text(jump)
        cluster.wait_saved(trainer, 2)
        clock.write_text("+0s")
        cluster.wait_saved(trainer)
    assert cluster.journal.failures == []
    assert cluster.epochs == epochs
    cluster.end()
