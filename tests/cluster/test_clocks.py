"""A node whose wall clock jumps, while the others' does not: order, leases and deadlines rest on none."""

import shutil
from pathlib import Path

import pytest
from tests.cluster.conftest import StartCluster

LIBRARIES = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))

pytestmark = pytest.mark.skipif(
    not LIBRARIES or shutil.which("faketime") is None, reason="Debian's package faketime is not installed"
)


@pytest.mark.parametrize("jump", ["+3h", "-3h"])
def test_jump_under_load(start_cluster: StartCluster, tmp_path: Path, jump: str) -> None:
    clock = tmp_path / "clock"
    clock.write_text("+0s")
    faked = {
        "LD_PRELOAD": str(LIBRARIES[0]),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
    cluster = start_cluster(environments={"n1": faked})
    with cluster.training() as trainer:
        cluster.wait_saved(trainer)
        clock.write_text(jump)
        cluster.wait_saved(trainer, 2)
        # Whoever is a member stays one.
        assert all(cluster.is_member(name) for name in cluster.nodes)
        clock.write_text("+0s")
        cluster.wait_saved(trainer)
    assert "lease" not in cluster.node("n1").log
    cluster.end()
