"""Names that say a checkpoint is whole, and their scopes."""

import pytest

from tiergate.checkpoints.markers import Markers, ancestor_scopes, collide, is_within, reach_of, scope_of
from tiergate.model import ObjectName, Role, Step

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
        "m/checkpoint-5/model.safetensors.index.json",
        "run/iter_0000010/metadata.json",
        "run/iter_0000010/.metadata",
        "run/5/_CHECKPOINT_METADATA",
        "run/5/commit_success.txt",
        "run/5/default/commit_success.txt",
        "run/epoch=0-step=5.ckpt/meta.pt",
        "run/epoch=0-step=5.ckpt/.metadata",
        "run/epoch=0-step=5.ckpt/latest",
    ],
)
def test_role_of_frameworks_markers_is_marker_at_any_size(key: str) -> None:
    assert role(key) is Role.MARKER
    assert role(key, 5000) is Role.MARKER


@pytest.mark.parametrize(
    "key",
    [
        "run/checkpoint_manager_snapshot.json",
        "tune/experiment_state-2026-02-26_18-51-01.json",
        "run/latest",
        "run/latest_universal",
        "latest",
        "run/checkpoint-5/latest",
        "run/latest_checkpointed_iteration.txt",
    ],
)
def test_role_of_what_names_sets_is_pointer(key: str) -> None:
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
        "m/metadata.json",
        "m/iter_10/metadata.json",
        "m/xiter_0000010/metadata.json",
        "m/iter_0000010/x/metadata.json",
        "m/meta.pt",
        "m/latest.txt",
        "m/latest/x",
        "m/latest/",
        "m/5.orbax-checkpoint-tmp-1/_CHECKPOINT_METADATA",
        "m/5.orbax-checkpoint-tmp/commit_success.txt",
        "m/_METADATA",
        "m/__x.metadata",
        "m/rank_0/step_7/checkpoint.pt",
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


APART, TOGETHER = "ns/rank_0/step_7/", "ns/step_7/rank_0/"


@pytest.mark.parametrize(
    ("key", "ancestors"),
    [
        (
            "ns/rank_12/step_7/checkpoint.pt",
            ["ns/rank_12/step_7/", "ns/rank_0/step_7/", "ns/rank_12/", "ns/", ""],
        ),
        ("step_7/rank_12/checkpoint.pt", ["step_7/rank_12/", "step_7/rank_0/", "step_7/", ""]),
        ("ns/rank_0/step_7/checkpoint.pt", ["ns/rank_0/step_7/", "ns/rank_0/", "ns/", ""]),
        ("ns/rank_0/step_7/metadata.metadata", ["ns/rank_0/step_7/", "ns/rank_0/", "ns/", ""]),
        ("ns/rank_12/step_7/other.pt", ["ns/rank_12/step_7/", "ns/rank_12/", "ns/", ""]),
        ("ns/xrank_1/step_7/checkpoint.pt", ["ns/xrank_1/step_7/", "ns/xrank_1/", "ns/", ""]),
    ],
)
def test_scopes_of_a_ranks_shard_have_that_of_rank_0(key: str, ancestors: list[str]) -> None:
    assert ancestor_scopes(key) == ancestors
    assert all(is_within(key, scope) and key.startswith(reach_of(scope)) for scope in ancestors)


def test_what_is_elsewhere_is_not_within() -> None:
    for scope in (APART, TOGETHER):
        for key in (
            "ns/rank_1/step_8/checkpoint.pt",
            "ns/step_8/rank_1/checkpoint.pt",
            "other/x",
            "ns/rank_1/step_7/x",
        ):
            assert not is_within(key, scope)
    assert reach_of("run/step_7/") == "run/step_7/"
    assert reach_of("") == ""


def test_list_of_a_tiered_checkpoint_collides_with_what_replaces_a_ranks_shard() -> None:
    def step(key: str, *, replaces: bool) -> Step:
        return Step(ObjectName("bucket", key), key, "", role(key), through=True, replaces=replaces)

    listing = step("ns/rank_0/step_7/metadata.metadata", replaces=False)
    assert collide(listing, step("ns/rank_3/step_7/checkpoint.pt", replaces=True))
    assert not collide(listing, step("ns/rank_3/step_7/checkpoint.pt", replaces=False))
    assert not collide(listing, step("ns/rank_3/step_8/checkpoint.pt", replaces=True))
