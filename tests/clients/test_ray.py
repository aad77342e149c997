"""Ray Train with an S3 `storage_path`: it uploads checkpoints, removes the oldest, and goes on from the newest."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.clients.conftest import BUCKET, Aside, Readers, Run

DRIVER = Path(__file__).parent / "drivers" / "ray_training.py"
RAY_TIMEOUT_S = 200
KEPT_COUNT = 2
RESTARTED = 1

pytestmark = [pytest.mark.client("Ray"), pytest.mark.timeout(3 * RAY_TIMEOUT_S)]


def checkpoints(aside: Aside, prefix: str) -> list[str]:
    """The folders of the checkpoints that are kept, oldest first."""
    with aside() as s3:
        keys = [each["Key"] for each in s3.list_objects_v2(Bucket=BUCKET, Prefix=prefix)["Contents"]]
    assert f"{prefix}/run/checkpoint_manager_snapshot.json" in keys
    return sorted({key.rpartition("/")[0] for key in keys if key.endswith("/state.pt")})


def test_ray_trains_keeps_two_checkpoints_and_goes_on(
    run: Run, aside: Aside, prefix: str, readers: Readers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # Ray keeps a token there
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")

    def ray(*words: str) -> dict[str, Any]:
        facts: dict[str, Any] = json.loads(run(sys.executable, str(DRIVER), *words, timeout_s=RAY_TIMEOUT_S))
        return facts

    storage = f"s3://{BUCKET}/{prefix}"
    trained = ray("train", storage, "run", "4")
    assert (trained["step"], trained["began"], trained["same"]) == (3, 0, True)
    kept = checkpoints(aside, prefix)
    assert len(kept) == KEPT_COUNT
    assert trained["checkpoint"] == f"{BUCKET}/{kept[-1]}"
    for place, _ in enumerate(readers()):
        assert checkpoints(aside, prefix) == kept
        if place == RESTARTED:  # the writer has read it itself, and the next run reads it from a cold node
            assert ray("read", f"s3://{BUCKET}/{kept[-1]}", "3") == {"step": 3, "same": True}
    went_on = ray("train", storage, "run", "6")
    assert (went_on["step"], went_on["began"], went_on["same"]) == (5, 4, True)
    later = checkpoints(aside, prefix)
    assert len(later) == KEPT_COUNT
    assert not set(later) & set(kept)
    assert went_on["checkpoint"] == f"{BUCKET}/{later[-1]}"
