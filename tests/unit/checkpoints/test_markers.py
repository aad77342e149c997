"""Names that say a checkpoint is whole, and their scopes."""

import pytest

from tiergate.checkpoints.markers import Markers, ancestor_scopes, scope_of
from tiergate.model import ObjectName, Role

MARKERS = Markers(lambda bucket, key: ("*.done", "runs/*/COMMIT") if bucket == "own" else (), 1000)


def role(key: str, size_bytes: int = 10, bucket: str = "bucket") -> Role:
    return MARKERS.role_of(ObjectName(bucket, key), size_bytes)


@pytest.mark.parametrize(
    ("key", "scope", "ancestors"),
    [
        ("a", "", [""]),
        ("a/b", "a/", ["a/", ""]),
        ("a/b/c", "a/b/", ["a/b/", "a/", ""]),
        ("a/b/", "a/b/", ["a/b/", "a/", ""]),
        ("/a", "/", ["/", ""]),
        ("a//b", "a//", ["a//", "a/", ""]),
    ],
)
def test_scopes_go_from_the_parent_outwards(key: str, scope: str, ancestors: list[str]) -> None:
    assert scope_of(key) == scope
    assert ancestor_scopes(key) == ancestors
    assert all(key.startswith(prefix) for prefix in ancestors)


@pytest.mark.parametrize(
    "key",
    [
        ".metadata",
        "run/step_1/.metadata",
        "run/step_1/__0.metadata",
        "run/step_1/__127.metadata",
        "run/metadata.metadata",
        "run/checkpoint-5/trainer_state.json",
        "m/model.safetensors.index.json",
        "m/pytorch_model.bin.index.json",
    ],
)
def test_role_of_frameworks_markers_is_marker_at_any_size(key: str) -> None:
    assert role(key) is Role.MARKER
    assert role(key, 5000) is Role.MARKER


@pytest.mark.parametrize(
    "key",
    ["run/checkpoint_manager_snapshot.json", "tune/experiment_state-2026-02-26_18-51-01.json"],
)
def test_role_of_rays_run_state_is_pointer(key: str) -> None:
    assert role(key) is Role.POINTER


@pytest.mark.parametrize("key", ["run/step_1/.metadata.tmp", "run/step_1/__0.metadata.tmp"])
def test_role_of_marker_in_the_making_is_pointer(key: str) -> None:
    assert role(key) is Role.POINTER


@pytest.mark.parametrize(
    "key",
    [
        "run/step_1/shard.tmp",
        "run/step_1/.metadata/shard",
        "run/step_1/x.metadata",
        "run/checkpoint_000001/.metadata.json",
        "run/step_1/.METADATA",
        "m/model_index.json",
        "m/config.json",
        "m/a.index.json.bak",
    ],
)
def test_role_of_likenesses_is_by_size(key: str) -> None:
    assert role(key) is Role.SMALL
    assert role(key, 999) is Role.SMALL
    assert role(key, 1000) is Role.LARGE


@pytest.mark.parametrize("key", ["x.done", "a/b/x.done", "runs/7/COMMIT", "runs/7/8/COMMIT"])
def test_role_of_users_patterns_where_they_apply(key: str) -> None:
    assert role(key, bucket="own") is Role.MARKER
    assert role(key) is Role.SMALL


@pytest.mark.parametrize("key", ["a.done/b", "other/7/COMMIT", "COMMIT", "x.DONE"])
def test_role_of_users_patterns_elsewhere_not(key: str) -> None:
    assert role(key, bucket="own") is Role.SMALL
