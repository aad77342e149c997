"""Sets among keys, and what each must hold: layout by layout, on names and files that the real libraries wrote."""

import base64
import json
import warnings
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from tiergate.checkpoints import layouts, lists
from tiergate.checkpoints.markers import Markers
from tiergate.checkpoints.recognition import (
    DamagedSetError,
    is_in,
    manifest_of,
    pointed_by,
    set_prefix_of,
    sets_of,
)
from tiergate.checkpoints.sets import Manifest, Member, SetName

MARKERS = Markers(lambda bucket, key: ("*.done",) if bucket == "own" else (), 64 << 20)
REAL = Path(__file__).parent / "real"


class Objects:
    """Keys with their sizes, and the bytes of some."""

    def __init__(self, sizes: Mapping[str, int], bodies: Mapping[str, bytes]) -> None:
        self.sizes = dict(sizes)
        self.bodies = dict(bodies)
        self.was_read: list[str] = []

    def read(self, key: str, start: int = 0, end: int | None = None, /) -> bytes:
        self.was_read.append(key)
        return self.bodies[key][start:end]

    def sets(self, under: str = "", bucket: str = "bucket") -> dict[str, SetName]:
        return {name.prefix: name for name in sets_of(bucket, [k for k in self.sizes if k.startswith(under)], MARKERS)}

    def manifest(self, prefix: str) -> Manifest:
        return manifest_of(self.sets()[prefix], self.sizes, self.read)

    def lacking(self, manifest: Manifest) -> list[str]:
        return [each.key for each in manifest.members if not each.fits(self.sizes.get(each.key, -1))]

    def without(self, *keys: str) -> "Objects":
        left = {key: size for key, size in self.sizes.items() if key not in keys}
        return Objects(left, {key: self.bodies[key] for key in left if key in self.bodies})

    def put(self, key: str, body: bytes) -> None:
        self.sizes[key], self.bodies[key] = len(body), body


def real(library: str) -> Objects:
    told = json.loads((REAL / f"{library}.json").read_text())
    bodies = {key: base64.b64decode(body) for key, body in told["bodies"].items()}
    return Objects(told["objects"], bodies)


def objects(*keys: str, **bodies: bytes) -> Objects:
    return Objects(dict.fromkeys(keys, 1), bodies)


def names(under: Mapping[str, SetName]) -> list[tuple[str, str, str, int | None]]:
    return [(name.prefix, name.layout, name.marker.removeprefix(name.prefix), name.step) for name in under.values()]


# -- torch.distributed.checkpoint, live
@pytest.fixture(scope="module")
def of_torch(tmp_path_factory: pytest.TempPathFactory) -> Objects:
    """Two steps saved as always, one without collectives."""
    root = tmp_path_factory.mktemp("torch")
    state = {"model": {"w": torch.ones(4, 8), "b": torch.zeros(3)}, "step": 3}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of one process, as meant
        for step in (10, 9):
            save(state, storage_writer=FileSystemWriter(root / f"run/step_{step}"))
        save(state, storage_writer=FileSystemWriter(root / "run/alone_7"), use_collectives=False)
    files = [path for path in root.rglob("*") if path.is_file()]
    bodies = {path.relative_to(root).as_posix(): path.read_bytes() for path in files}
    return Objects({key: len(body) for key, body in bodies.items()}, bodies)


def test_torchs_sets_are_found_newest_first(of_torch: Objects) -> None:
    assert names(of_torch.sets()) == [
        ("run/step_10/", "dcp", ".metadata", 10),
        ("run/step_9/", "dcp", ".metadata", 9),
        ("run/alone_7/", "dcp", "__0.metadata", None),
    ]


@pytest.mark.parametrize("prefix", ["run/step_9/", "run/alone_7/"])
def test_torchs_set_must_hold_what_its_list_names(of_torch: Objects, prefix: str) -> None:
    marker = of_torch.sets()[prefix].marker
    manifest = of_torch.manifest(prefix)
    assert manifest.is_listed
    shard = next(key for key in of_torch.sizes if key.startswith(prefix) and key.endswith(".distcp"))
    least_bytes = of_torch.sizes[shard]
    assert manifest.members == tuple(
        sorted((Member(marker), Member(shard, least_bytes=least_bytes)), key=lambda each: each.key)
    )
    assert of_torch.lacking(manifest) == []
    assert of_torch.without(shard).lacking(manifest) == [shard]
    short = Objects({**of_torch.sizes, shard: least_bytes - 1}, of_torch.bodies)
    assert short.lacking(short.manifest(prefix)) == [shard]


def test_leftovers_of_a_larger_world_are_no_members(of_torch: Objects) -> None:
    more = Objects({**of_torch.sizes, "run/step_9/__9_0.distcp": 5, "run/step_9/config.json": 2}, of_torch.bodies)
    members = [each.key for each in more.manifest("run/step_9/").members]
    assert members == ["run/step_9/.metadata", "run/step_9/__0_0.distcp", "run/step_9/config.json"]


def test_set_without_its_marker_is_found_by_its_shards(of_torch: Objects) -> None:
    begun = of_torch.without("run/step_9/.metadata")
    begun.put("run/step_9/.metadata.tmp", b"x")
    name = begun.sets()["run/step_9/"]
    assert (name.marker, name.layout, name.step) == ("", "dcp", 9)
    manifest = begun.manifest("run/step_9/")
    assert (manifest.is_listed, manifest.name.marker) == (False, "")
    assert manifest.members == (Member("run/step_9/__0_0.distcp"),)


@pytest.mark.parametrize("body", [b"", b"cut", b"\x80\x04]."])
def test_list_that_is_none_is_damage(of_torch: Objects, body: bytes) -> None:
    broken = Objects(of_torch.sizes, {**of_torch.bodies, "run/step_9/.metadata": body})
    with pytest.raises(DamagedSetError, match=r"run/step_9/\.metadata"):
        broken.manifest("run/step_9/")


def test_list_that_is_too_long_to_be_read_is_no_damage(of_torch: Objects) -> None:
    sizes = {**of_torch.sizes, "run/step_9/.metadata": lists.LIST_LIMIT_BYTES + 1}
    long = Objects(sizes, of_torch.bodies)
    manifest = long.manifest("run/step_9/")
    assert not manifest.is_listed
    assert {each.key for each in manifest.members} == {"run/step_9/.metadata", "run/step_9/__0_0.distcp"}
    assert long.was_read == []


def test_ranks_without_collectives_are_all_there_or_missing(of_torch: Objects) -> None:
    listing = of_torch.bodies["run/alone_7/__0.metadata"]
    more = Objects(of_torch.sizes, of_torch.bodies)
    more.put("run/alone_7/__2.metadata", listing)
    assert more.lacking(more.manifest("run/alone_7/")) == ["run/alone_7/__1.metadata"]
    assert more.without("run/alone_7/__0.metadata").sets()["run/alone_7/"].marker == ""
    # A list of all makes those of the ranks void.
    more.put("run/alone_7/.metadata", listing)
    assert more.sets()["run/alone_7/"].marker == "run/alone_7/.metadata"
    assert more.lacking(more.manifest("run/alone_7/")) == []


def test_shards_spread_over_folders_belong_to_the_list_above(of_torch: Objects) -> None:
    found = objects("run/step_1/.metadata", "run/step_1/0a/__0_0.distcp", "run/step_1/0b/__1_0.distcp").sets()
    assert list(found) == ["run/step_1/"]


# -- SageMaker
@pytest.mark.parametrize(
    ("prefix", "marker", "shard"),
    [
        ("base/ns/rank_0/step_7/", "base/ns/rank_0/step_7/", "base/ns/rank_{}/step_7/checkpoint.pt"),
        ("base/ray/step_7/", "base/ray/step_7/rank_0/", "base/ray/step_7/rank_{}/checkpoint.pt"),
    ],
)
def test_tiered_set_is_spread_over_ranks(prefix: str, marker: str, shard: str) -> None:
    tiered = real("sagemaker")
    name = tiered.sets()[prefix]
    marker += "metadata.metadata"
    assert (name.layout, name.marker, name.step) == ("sagemaker", marker, 7)
    manifest = tiered.manifest(prefix)
    assert manifest.is_listed
    shards = [shard.format(rank) for rank in (0, 1)]
    assert {each.key: each.least_bytes for each in manifest.members} == {
        marker: 0,
        **{key: tiered.sizes[key] for key in shards},
    }
    assert tiered.lacking(manifest) == []
    assert all(is_in(name, key) for key in [marker, *shards])
    assert not is_in(name, "base/ns/rank_1/step_8/checkpoint.pt")
    torn = tiered.without(shards[1])
    assert torn.lacking(torn.manifest(prefix)) == [shards[1]]
    begun = tiered.without(marker, shards[0])
    assert begun.sets()[prefix].marker == ""
    assert begun.manifest(prefix).members == (Member(shards[1]),)


def test_tiered_sets_are_one_for_each_step() -> None:
    assert list(real("sagemaker").sets()) == ["base/ns/rank_0/step_7/", "base/ray/step_7/"]


# -- Hugging Face
def test_trainers_folders_and_the_run_they_are_in() -> None:
    trainer = real("transformers")
    assert names(trainer.sets("hf/")) == [
        ("hf/checkpoint-4/", "hf-trainer", "trainer_state.json", 4),
        ("hf/checkpoint-2/", "hf-trainer", "trainer_state.json", 2),
        ("hf/", "hf-trainer", "trainer_state.json", None),
    ]
    for prefix, step in (("hf/checkpoint-4/", 4), ("hf/", 4)):
        manifest = trainer.manifest(prefix)
        assert (manifest.step, manifest.is_listed) == (step, False)
        members = [each.key for each in manifest.members]
        depth = prefix.count("/")
        assert members == sorted(key for key in trainer.sizes if key.startswith(prefix) and key.count("/") == depth)


def test_trainers_folder_is_not_whole_by_its_index() -> None:
    """The state is written last: weights and their index are there before it."""
    trainer = real("transformers")
    begun = trainer.without("hf/checkpoint-4/trainer_state.json")
    begun.put("hf/checkpoint-4/model.safetensors.index.json", trainer.bodies["hf_sharded/model.safetensors.index.json"])
    assert begun.sets()["hf/checkpoint-4/"].marker == ""


def test_index_names_the_shards() -> None:
    model = real("transformers")
    prefix, index = "hf_sharded/", "hf_sharded/model.safetensors.index.json"
    assert names(model.sets(prefix)) == [(prefix, "huggingface", "model.safetensors.index.json", None)]
    manifest = model.manifest(prefix)
    assert manifest.is_listed
    assert {each.key for each in manifest.members} == {key for key in model.sizes if key.startswith(prefix)}
    torn = model.without("hf_sharded/model-00002-of-00004.safetensors")
    torn.put("hf_sharded/model-00005-of-00005.safetensors", b"left over")
    manifest = torn.manifest(prefix)
    assert torn.lacking(manifest) == ["hf_sharded/model-00002-of-00004.safetensors"]
    assert Member("hf_sharded/model-00005-of-00005.safetensors") not in manifest.members
    for body in (
        b"",
        b"[]",
        b"{}",
        b'{"weight_map": {}}',
        b'{"weight_map": {"w": 1}}',
        b'{"weight_map": {"w": "../x"}}',
    ):
        model.put(index, body)
        with pytest.raises(DamagedSetError, match="index"):
            model.manifest(prefix)


@pytest.mark.parametrize(
    "state", [b"{", b"[" * 100_000, b"{}", b'{"global_step": "4"}', b'{"global_step": true}', b"\xff"]
)
def test_trainers_state_that_is_none_is_damage(state: bytes) -> None:
    trainer = real("transformers")
    trainer.put("hf/checkpoint-4/trainer_state.json", state)
    with pytest.raises(DamagedSetError, match="trainer_state"):
        trainer.manifest("hf/checkpoint-4/")


def test_trainers_state_may_hold_what_is_no_number() -> None:
    trainer = real("transformers")
    trainer.put("hf/checkpoint-4/trainer_state.json", b'{"global_step": 4, "log_history": [{"loss": NaN}]}')
    assert trainer.manifest("hf/checkpoint-4/").step == 4


def test_lists_in_folders_of_a_trainers_set_count(of_torch: Objects) -> None:
    """FSDP: the model and the optimizer are sets of torch's below the Trainer's."""
    fsdp = objects("run/checkpoint-5/trainer_state.json")
    fsdp.put("run/checkpoint-5/trainer_state.json", b'{"global_step": 5}')
    for folder in ("pytorch_model_fsdp_0", "optimizer_0"):
        for file in (".metadata", "__0_0.distcp"):
            fsdp.put(f"run/checkpoint-5/{folder}/{file}", of_torch.bodies[f"run/step_9/{file}"])
    assert names(fsdp.sets()) == [("run/checkpoint-5/", "hf-trainer", "trainer_state.json", 5)]
    torn = fsdp.without("run/checkpoint-5/optimizer_0/__0_0.distcp")
    assert torn.lacking(torn.manifest("run/checkpoint-5/")) == ["run/checkpoint-5/optimizer_0/__0_0.distcp"]
    assert fsdp.without("run/checkpoint-5/trainer_state.json").sets()["run/checkpoint-5/"].marker == ""


# -- single files
def test_safetensors_file_is_as_long_as_its_header_says() -> None:
    trainer = real("transformers")
    body = trainer.bodies["hf/model.safetensors"]
    alone = Objects({"out/adapter_step_7.safetensors": trainer.sizes["hf/model.safetensors"]}, {})
    alone.bodies["out/adapter_step_7.safetensors"] = body
    key = "out/adapter_step_7.safetensors"
    assert names(alone.sets()) == [(key, "safetensors", "", 7)]
    assert alone.sets()[key].marker == key
    manifest = alone.manifest(key)
    assert manifest.is_listed
    assert manifest.members == (Member(key, alone.sizes[key]),)
    alone.sizes[key] -= 1
    assert alone.lacking(alone.manifest(key)) == [key]
    assert alone.was_read
    assert is_in(manifest.name, key)
    assert not is_in(manifest.name, key + "2")


def header(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x10",
        b"\xff" * 8 + b"{}",
        header(b"[]"),
        header(b"{"),
        header(b'{"w": 1}'),
        header(b'{"w": {"data_offsets": [0]}}'),
        header(b'{"w": {"data_offsets": [8, 4]}}'),
        header(b'{"w": {"data_offsets": [-8, 4]}}'),
        header(b'{"w": {"data_offsets": ["0", 4]}}'),
        header(b'{"w": {"data_offsets": [0, 4.5]}}'),
        header(b"[" * 100_000),
    ],
)
def test_head_of_a_safetensors_file_that_is_none_is_damage(body: bytes) -> None:
    alone = objects()
    alone.put("a.safetensors", body)
    with pytest.raises(DamagedSetError, match=r"a\.safetensors"):
        alone.manifest("a.safetensors")


def test_lightnings_files_are_sets_and_end_as_archives() -> None:
    lightning = real("lightning")
    assert names(lightning.sets()) == [
        ("light/epoch=1-step=8.ckpt", "lightning", "", 8),
        ("light/epoch=1-step=6.ckpt", "lightning", "", 6),
        ("light/epoch=0-step=4.ckpt", "lightning", "", 4),
        ("light/epoch=0-step=2.ckpt", "lightning", "", 2),
        ("light/last.ckpt", "lightning", "", None),
    ]
    key = "light/epoch=1-step=8.ckpt"
    assert lightning.manifest(key).members == (Member(key),)
    lightning.put(key, lightning.bodies[key][:-100])
    with pytest.raises(DamagedSetError, match="no end"):
        lightning.manifest(key)
    lightning.put(key, b"\x80\x02 of before archives")
    assert lightning.manifest(key).members == (Member(key),)


def test_lightnings_folder_is_whole_when_its_metadata_is_there(of_torch: Objects) -> None:
    folder = objects("run/epoch=0-step=5.ckpt/meta.pt")
    for file in (".metadata", "__0_0.distcp"):
        folder.put(f"run/epoch=0-step=5.ckpt/{file}", of_torch.bodies[f"run/step_9/{file}"])
    prefix = "run/epoch=0-step=5.ckpt/"
    assert names(folder.sets()) == [(prefix, "lightning", "meta.pt", 5)]
    assert folder.manifest(prefix).is_listed
    begun = folder.without(prefix + "meta.pt")
    assert names(begun.sets()) == [(prefix, "lightning", "", 5)]
    deepspeed = objects(prefix + "checkpoint/mp_rank_00_model_states.pt", prefix + "latest")
    assert names(deepspeed.sets()) == [(prefix, "lightning", "latest", 5)]


# -- layouts that a pointer speaks for
def test_deepspeeds_sets_are_whole_when_the_pointer_says_so() -> None:
    deepspeed = real("deepspeed")
    for run in ("ds0", "ds1", "ds3"):
        assert names(deepspeed.sets(run)) == [
            (f"{run}/global_step2/", "deepspeed", "", 2),
            (f"{run}/global_step1/", "deepspeed", "", 1),
        ]
        for step in (1, 2):
            manifest = deepspeed.manifest(f"{run}/global_step{step}/")
            assert manifest.name.marker == f"{run}/latest"
            assert Member(f"{run}/latest") in manifest.members
            assert deepspeed.lacking(manifest) == []
    assert pointed_by("ds1/latest", deepspeed.bodies["ds1/latest"]) == ("ds1/global_step2/",)
    # A save that the pointer never named and that lacks something is not whole.
    torn = deepspeed.without("ds1/global_step1/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")
    assert torn.manifest("ds1/global_step1/").name.marker == ""
    newer = Objects({**deepspeed.sizes, "ds1/global_step3/mp_rank_00_model_states.pt": 1}, deepspeed.bodies)
    assert newer.manifest("ds1/global_step3/").name.marker == ""
    assert deepspeed.without("ds1/latest").manifest("ds1/global_step2/").name.marker == ""


def test_megatrons_set_is_whole_when_its_config_is_there() -> None:
    megatron = real("megatron")
    prefix = "mega/iter_0000010/"
    assert names(megatron.sets()) == [(prefix, "megatron", "metadata.json", 10)]
    manifest = megatron.manifest(prefix)
    assert manifest.is_listed
    assert {each.key for each in manifest.members} == {key for key in megatron.sizes if key.startswith(prefix)}
    assert pointed_by("mega/latest_checkpointed_iteration.txt", b"10") == (prefix,)
    begun = megatron.without(prefix + "metadata.json", "mega/latest_checkpointed_iteration.txt")
    assert begun.sets()[prefix].marker == ""
    assert begun.manifest(prefix).name.marker == ""
    megatron.put(prefix + "metadata.json", b"{}")
    with pytest.raises(DamagedSetError, match="sharded_backend"):
        megatron.manifest(prefix)


def test_megatrons_older_sets_are_whole_when_the_tracker_says_so() -> None:
    run = objects(*(f"run/iter_00000{step}0/mp_rank_0{rank}/model_optim_rng.pt" for step in (1, 2) for rank in (0, 1)))
    run.put("run/latest_checkpointed_iteration.txt", b"20\n")
    for step in (10, 20):
        assert run.manifest(f"run/iter_00000{step}/").name.marker == "run/latest_checkpointed_iteration.txt"
    torn = run.without("run/iter_0000010/mp_rank_01/model_optim_rng.pt")
    assert torn.manifest("run/iter_0000010/").name.marker == ""


def test_rays_sets_are_whole_when_the_snapshot_names_them() -> None:
    ray = real("ray")
    snapshot = next(key for key in ray.sizes if key.endswith("/checkpoint_manager_snapshot.json"))
    kept = pointed_by(snapshot, ray.bodies[snapshot])
    found = ray.sets()
    assert len(kept) == 2
    assert set(kept) == set(found)
    for prefix in kept:
        assert (found[prefix].layout, found[prefix].marker) == ("ray", "")
        manifest = ray.manifest(prefix)
        assert manifest.name.marker == snapshot
        assert prefix + "model.pt" in {each.key for each in manifest.members}
    ray.put("ray/run/checkpoint_000009/model.pt", b"x")
    assert ray.manifest("ray/run/checkpoint_000009/").name.marker == ""


def test_rays_folder_is_as_whole_as_what_is_in_it(of_torch: Objects) -> None:
    for below in ("", "model/"):
        prefix = "run/checkpoint_000001/"
        ray = objects(prefix + ".metadata.json")
        for file in (".metadata", "__0_0.distcp"):
            ray.put(prefix + below + file, of_torch.bodies[f"run/step_9/{file}"])
        assert list(ray.sets()) == [prefix]
        assert (ray.sets()[prefix].marker, ray.sets()[prefix].step) == (f"{prefix}{below}.metadata", 1)
        assert ray.without(f"{prefix}{below}.metadata").sets()[prefix].marker == ""
        torn = ray.without(f"{prefix}{below}__0_0.distcp")
        assert torn.lacking(torn.manifest(prefix)) == [f"{prefix}{below}__0_0.distcp"]


# -- Orbax
def test_orbax_sets_are_whole_when_they_are_committed() -> None:
    orbax = real("orbax")
    assert names(orbax.sets()) == [
        ("orbax/5/", "orbax", "commit_success.txt", 5),
        ("orbax/0/", "orbax", "commit_success.txt", 0),
        ("orbax_std/", "orbax", "commit_success.txt", None),
    ]
    manifest = orbax.manifest("orbax/0/")
    assert {each.key for each in manifest.members} == {key for key in orbax.sizes if key.startswith("orbax/0/")}
    renamed = orbax.without("orbax/0/commit_success.txt", "orbax/0/default/commit_success.txt")
    assert renamed.manifest("orbax/0/").name.marker == "orbax/0/_CHECKPOINT_METADATA"
    begun = json.loads(renamed.bodies["orbax/0/_CHECKPOINT_METADATA"])
    begun["commit_timestamp_nsecs"] = None
    renamed.put("orbax/0/_CHECKPOINT_METADATA", json.dumps(begun).encode())
    assert renamed.manifest("orbax/0/").name.marker == ""
    renamed.put("orbax/0/_CHECKPOINT_METADATA", b"")
    with pytest.raises(DamagedSetError, match="_CHECKPOINT_METADATA"):
        renamed.manifest("orbax/0/")


def test_orbax_folder_in_the_making_is_never_whole() -> None:
    begun = objects(
        "run/5.orbax-checkpoint-tmp-9/default/commit_success.txt", "run/5.orbax-checkpoint-tmp-9/_CHECKPOINT_METADATA"
    )
    assert names(begun.sets()) == [("run/5.orbax-checkpoint-tmp-9/", "orbax", "", None)]


# -- the user's own, and what is no set
def test_users_markers_make_sets() -> None:
    own = objects("run/a/part", "run/a/x.done", "run/b/part")
    assert names(own.sets(bucket="own")) == [("run/a/", "custom", "x.done", None)]
    assert own.sets() == {}
    manifest = manifest_of(own.sets(bucket="own")["run/a/"], own.sizes, own.read)
    assert [each.key for each in manifest.members] == ["run/a/part", "run/a/x.done"]


def test_pointers_and_other_things_make_no_sets() -> None:
    keys = ["run/latest", "latest", "run/checkpoint_manager_snapshot.json", "run/config.json", "run/a.txt", "x/", ""]
    assert sets_of("bucket", keys, MARKERS) == []


def test_pointer_is_a_member_of_a_folder_that_is_a_set_but_not_of_a_runs() -> None:
    run = objects("run/checkpoint-5/latest", "run/checkpoint-5/global_step5/mp_rank_00_model_states.pt", "run/latest")
    for folder in ("run/", "run/checkpoint-5/"):
        run.put(f"{folder}trainer_state.json", b'{"global_step": 5}')
    assert list(run.sets()) == ["run/checkpoint-5/", "run/"]
    assert Member("run/checkpoint-5/latest") in run.manifest("run/checkpoint-5/").members
    assert run.manifest("run/").members == (Member("run/trainer_state.json"),)


def test_set_at_the_root_of_a_bucket(of_torch: Objects) -> None:
    root = objects("other/x")
    for file in (".metadata", "__0_0.distcp"):
        root.put(file, of_torch.bodies[f"run/step_9/{file}"])
    assert names(root.sets()) == [("", "dcp", ".metadata", None)]
    assert root.lacking(root.manifest("")) == []


@pytest.mark.parametrize(
    ("prefix", "step"),
    [
        ("run/step_3/", 3),
        ("run/step-0003/", 3),
        ("run/step=3/", 3),
        ("run/step3/", 3),
        ("run/steps_3/", 3),
        ("run/global_step3/", 3),
        ("run/globalstep3/", 3),
        ("run/checkpoint-3/", 3),
        ("run/checkpoint_000003/", 3),
        ("run/iter_0000003/", 3),
        ("run/iteration3/", 3),
        ("run/epoch=1-step=3.ckpt", 3),
        ("run/epoch=3.ckpt", 3),
        ("run/epoch=1-step=3.ckpt/", 3),
        ("run/model-step_3.safetensors", 3),
        ("run/3.ckpt", 3),
        ("run/3/", 3),
        ("run/0/", 0),
        ("run/step_0/", 0),
        ("run/step_3/model/", 3),
        ("run/step_2/step_3/", 3),
        ("step_3/", 3),
        ("run7/model/", None),
        ("7/model/", None),
        ("run/checkpoint_2026-02-26_18-51-01.5/", None),
        ("run/footstep_3/", None),
        ("run/step_" + "9" * 40 + "/", None),
        ("run/step_three/", None),
        ("", None),
    ],
)
def test_step_that_names_tell(prefix: str, step: int | None) -> None:
    assert layouts.step_of(prefix) == step


@pytest.mark.parametrize(
    ("key", "run", "prefix"),
    [
        ("run/step_3/__0_0.distcp", "run/", "run/step_3/"),
        ("run/step_3/a/b", "run/", "run/step_3/"),
        ("run/step_3/a/b", "run", "run/step_3/"),
        ("run/latest", "run/", ""),
        ("run/", "run/", ""),
        ("run2/step_3/a", "run", ""),
        ("other/step_3/a", "run/", ""),
        ("step_3/a", "", "step_3/"),
        ("a", "", ""),
        ("ns/rank_5/step_7/checkpoint.pt", "ns/", "ns/rank_0/step_7/"),
        ("ns/rank_5/step_7/checkpoint.pt", "ns/rank_5/", "ns/rank_5/step_7/"),
        ("ns/rank_5/step_7/other", "ns/", "ns/rank_5/"),
        ("ns/step_7/rank_5/checkpoint.pt", "ns/", "ns/step_7/"),
    ],
)
def test_set_of_a_run_is_the_folder_below_it(key: str, run: str, prefix: str) -> None:
    assert set_prefix_of(key, run) == prefix


@pytest.mark.parametrize(
    ("key", "body", "prefixes"),
    [
        ("run/latest", b"global_step3", ("run/global_step3/",)),
        ("run/latest", b" global_step3\n", ("run/global_step3/",)),
        ("latest", b"a/b/", ("a/b/",)),
        ("run/latest_universal", b"global_step3_universal", ("run/global_step3_universal/",)),
        ("run/latest", b"", ()),
        ("run/latest", b"../other", ()),
        ("run/latest", b"/etc", ()),
        ("run/latest", b"a\nb", ()),
        ("run/latest", b"x" * 2000, ()),
        ("run/latest_checkpointed_iteration.txt", b"3", ("run/iter_0000003/",)),
        ("run/latest_checkpointed_iteration.txt", b"123456789", ("run/iter_123456789/",)),
        ("run/latest_checkpointed_iteration.txt", b"release", ("run/release/",)),
        ("run/latest_checkpointed_iteration.txt", b"-3", ()),
        ("run/latest_checkpointed_iteration.txt", b"9" * 50, ()),
        ("run/latest_checkpointed_iteration.txt", b"../3", ()),
        ("run/checkpoint_manager_snapshot.json", b"{", ()),
        ("run/checkpoint_manager_snapshot.json", b'{"checkpoint_results": {}}', ()),
        ("run/checkpoint_manager_snapshot.json", b'{"checkpoint_results": [1, {"checkpoint_dir_name": "../x"}]}', ()),
        ("run/checkpoint_manager_snapshot.json", b'{"checkpoint_results": [{"checkpoint_dir_name": "\\ud800"}]}', ()),
        (
            "run/checkpoint_manager_snapshot.json",
            b'{"checkpoint_results": [{"checkpoint_dir_name": "a"}],'
            b' "latest_checkpoint_result": {"checkpoint_dir_name": "b"}}',
            ("run/a/", "run/b/"),
        ),
        ("run/experiment_state-1.json", b"{}", ()),
        ("run/config.json", b"global_step3", ()),
        ("run/.metadata", b"global_step3", ()),
    ],
)
def test_what_a_pointer_names(key: str, body: bytes, prefixes: tuple[str, ...]) -> None:
    assert pointed_by(key, body) == prefixes


# -- whatever keys there are
PARTS = ["run", "step_3", "checkpoint-5", "rank_0", "rank_1", "x.ckpt", "global_step1", "iter_0000001", "checkpoint_1"]
FILES = [".metadata", "__0.metadata", "__0_0.distcp", "trainer_state.json", "latest", "metadata.metadata"]
FILES += ["checkpoint.pt", "a.safetensors", "a.ckpt", "x.index.json", "commit_success.txt", "meta.pt", "other", ""]
KEYS = st.builds(
    lambda parts, file: "/".join([*parts, file]), st.lists(st.sampled_from(PARTS), max_size=4), st.sampled_from(FILES)
)


@given(st.sets(KEYS, max_size=12))
def test_sets_are_apart_and_do_not_depend_on_order(keys: set[str]) -> None:
    found = sets_of("bucket", sorted(keys), MARKERS)
    assert found == sets_of("bucket", sorted(keys, reverse=True), MARKERS)
    assert len({name.prefix for name in found}) == len(found)
    for name in found:
        assert any(is_in(name, key) for key in keys)
        assert name.marker == "" or (name.marker in keys and is_in(name, name.marker))
