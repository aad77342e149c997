"""`tiergate verify` on whole nodes: real checkpoints, damaged where nobody but the test knows."""

import json
import pickle
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.etcds import StartCluster
from tests.nodes import StartNode
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from tiergate import cli
from tiergate.testing.etcd import needs_etcd
from tiergate.testing.faults import FaultyOrigin
from tiergate.testing.node import RunningNode
from tiergate.testing.objects import body_of
from tiergate.testing.origins import MotoOrigin
from tiergate.testing.rules import Answer

pytestmark = [
    pytest.mark.parametrize("origin", [MotoOrigin], ids=["moto"], indirect=True),
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

SHARD = "__0_0.distcp"


def state(seed: int = 0) -> dict[str, Any]:
    random = torch.Generator().manual_seed(seed)
    return {f"w{number}": torch.rand((64, 32), generator=random) for number in range(3)} | {"step": 7}


def files(folder: Path, seed: int = 0) -> dict[str, bytes]:
    """What torch writes of a checkpoint, its marker last."""
    state_dict_saver.save(state(seed), storage_writer=FileSystemWriter(folder), no_dist=True)
    names = sorted((path.name for path in folder.iterdir()), key=lambda name: name == ".metadata")
    return {name: (folder / name).read_bytes() for name in names}


def tensors(**sizes: int) -> bytes:
    """A safetensors file of tensors that are so long."""
    header, at = {}, 0
    for name, size_bytes in sizes.items():
        header[name] = {"dtype": "U8", "shape": [size_bytes], "data_offsets": [at, at + size_bytes]}
        at += size_bytes
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(at)


def huggingface() -> dict[str, bytes]:
    shards = {f"model-0000{part}-of-00002.safetensors": tensors(**{f"w{part}": 1000 + part}) for part in (1, 2)}
    weight_map = {f"w{part}": name for part, name in enumerate(shards, 1)}
    return shards | {"model.safetensors.index.json": json.dumps({"weight_map": weight_map}).encode()}


def save(client: Any, bucket: str, prefix: str, bodies: Mapping[str, bytes]) -> None:
    for name, body in bodies.items():
        client.put_object(Bucket=bucket, Key=f"{prefix}{name}", Body=body)


@dataclass(frozen=True, slots=True)
class Told:
    """What the command printed, and its exit status."""

    status: int
    out: str
    err: str

    def verdicts(self) -> dict[str, str]:
        """Of the sets of a JSON answer, by the last folder of their prefix."""
        return {each["uri"].rstrip("/").rsplit("/", 1)[-1]: each["verdict"] for each in json.loads(self.out)["sets"]}


Tell = Callable[..., Told]


@pytest.fixture
def verify(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, bucket: str) -> Tell:
    """Runs `tiergate verify` of a node."""
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.setenv("NO_COLOR", "1")

    def verify(node: RunningNode, prefix: str, *words: str) -> Told:
        capsys.readouterr()
        admin = node.admin.removeprefix("http://")
        where = ["--memory-dir", str(node.memory_dir), "--admin-listen", admin]
        status = cli.main(["verify", f"s3://{bucket}/{prefix}", *words, *where])
        printed = capsys.readouterr()
        return Told(status, printed.out, printed.err)

    return verify


def rot(direct: Any, bucket: str, key: str, at: int) -> None:
    """A byte of an object turns over in the origin, which goes on saying what it said of it."""
    held = direct.get_object(Bucket=bucket, Key=key)
    body = bytearray(held["Body"].read())
    body[at] ^= 1
    direct.put_object(Bucket=bucket, Key=key, Body=bytes(body), Metadata=held["Metadata"])


def rot_in_memory(node: RunningNode, body: bytes, at: int) -> None:
    """A byte of a body turns over in a node's slabs."""
    found = 0
    for path in sorted((node.memory_dir / "slabs").rglob("*")):
        if not path.is_file():
            continue
        place = path.read_bytes().find(body)
        if place >= 0:
            with path.open("r+b") as slab:
                slab.seek(place + at)
                slab.write(bytes([body[at] ^ 1]))
            found += 1
    assert found == 1


@pytest.mark.semantics("P5.8")
def test_what_is_sound_is_proved_and_what_is_damaged_in_s3_is_named(
    start_node: StartNode, direct: Any, bucket: str, tmp_path: Path, verify: Tell
) -> None:
    node, bodies = start_node(), files(tmp_path / "s")
    client = node.client()
    for step in range(5):
        save(client, bucket, f"run/step_{step}/", bodies)
    save(client, bucket, "run/hf-1/", huggingface())
    save(client, bucket, "run/alone/", {"adapter.safetensors": tensors(a=10, b=20)})
    node.wait_settled()
    for words in ((), ("--deep",), ("--tier", "memory"), ("--tier", "s3")):
        told = verify(node, "run/", *words)
        assert (told.status, told.err) == (0, ""), words
    assert "sound" in told.out
    assert "23 of 23 objects" not in told.out
    assert "14 of 14 objects" in told.out

    at = bodies[SHARD].index(state()["w1"].numpy().tobytes()) + 100
    rot(direct, bucket, f"run/step_0/{SHARD}", at)
    direct.delete_object(Bucket=bucket, Key=f"run/step_1/{SHARD}")
    direct.put_object(Bucket=bucket, Key=f"run/step_2/{SHARD}", Body=bodies[SHARD][:-1])
    direct.delete_object(Bucket=bucket, Key="run/step_3/.metadata")
    direct.delete_object(Bucket=bucket, Key="run/alone/adapter.safetensors")
    told = verify(node, "run/", "--deep", "--json")
    assert told.status == 1
    sound = {"step_4": "sound", "hf-1": "sound"}
    damaged = dict.fromkeys(("step_0", "step_1", "step_2", "step_3", "adapter.safetensors"), "damaged")
    assert told.verdicts() == sound | damaged
    found = {(each["uri"], each["tier"], each["fault"]) for each in json.loads(told.out)["damages"]}
    assert found == {
        (f"s3://{bucket}/run/step_0/{SHARD}", "s3", "checksum"),
        (f"s3://{bucket}/run/step_1/{SHARD}", "s3", "missing"),
        (f"s3://{bucket}/run/step_2/{SHARD}", "s3", "changed"),
        (f"s3://{bucket}/run/step_3/.metadata", "s3", "missing"),
        (f"s3://{bucket}/run/alone/adapter.safetensors", "s3", "missing"),
    }
    assert "the block at byte 0 differs" in told.err
    # Where nothing is read but heads, what turned over between them is not seen.
    assert verify(node, "run/step_0/").status == 0
    assert verify(node, "run/step_0/", "--tier", "memory").status == 0
    assert verify(node, "nothing/").status == 1


@pytest.mark.semantics("P5.9")
def test_damage_in_s3_is_mended_from_memory_with_the_marker_withdrawn_meanwhile(
    start_node: StartNode, proxy: FaultyOrigin, direct: Any, bucket: str, tmp_path: Path, verify: Tell
) -> None:
    node, bodies = start_node(), files(tmp_path / "s")
    save(node.client(), bucket, "run/step_0/", bodies)
    save(node.client(), bucket, "run/step_1/", bodies)
    node.wait_settled()
    shard, marker = f"run/step_0/{SHARD}", "run/step_0/.metadata"
    before = node.client().head_object(Bucket=bucket, Key=shard)
    rot(direct, bucket, shard, 5000)
    direct.delete_object(Bucket=bucket, Key=f"run/step_1/{SHARD}")
    direct.delete_object(Bucket=bucket, Key="run/step_1/.metadata")
    proxy.forget()
    told = verify(node, "run/", "--deep", "--repair", "--json")
    assert (told.status, told.verdicts()) == (7, {"step_0": "repaired", "step_1": "repaired"}), told.err
    for step in (0, 1):
        for name, body in bodies.items():
            assert body_of(direct, bucket, f"run/step_{step}/{name}") == body
    steps = [(each.operation, each.key) for each in proxy.requests if each.operation in ("PutObject", "DeleteObject")]
    assert [each for each in steps if "step_0" in each[1]] == [
        ("DeleteObject", marker),
        ("PutObject", shard),
        ("PutObject", marker),
    ]
    assert [each for each in steps if "step_1" in each[1]] == [
        ("DeleteObject", "run/step_1/.metadata"),
        ("PutObject", f"run/step_1/{SHARD}"),
        ("PutObject", "run/step_1/.metadata"),
    ]
    after = node.client().head_object(Bucket=bucket, Key=shard)
    assert (after["ETag"], after["LastModified"]) == (before["ETag"], before["LastModified"])
    assert verify(node, "run/", "--deep").status == 0


def test_damage_in_memory_is_named_and_mended_from_s3(
    start_node: StartNode, bucket: str, tmp_path: Path, verify: Tell
) -> None:
    node, bodies = start_node(), files(tmp_path / "s")
    save(node.client(), bucket, "run/step_0/", bodies)
    node.wait_settled()
    rot_in_memory(node, bodies[SHARD], 4000)
    told = verify(node, "run/")
    assert told.status == 1
    assert f"s3://{bucket}/run/step_0/{SHARD} is damaged in memory: checksum: the block at byte 0 differs" in told.err
    assert verify(node, "run/", "--tier", "s3", "--deep").status == 0
    assert verify(node, "run/", "--repair").status == 7
    assert verify(node, "run/", "--tier", "memory").status == 0
    assert body_of(node.client(), bucket, f"run/step_0/{SHARD}") == bodies[SHARD]


def test_what_nobody_can_prove_stays_as_it_is(
    start_node: StartNode, proxy: FaultyOrigin, direct: Any, bucket: str, tmp_path: Path, verify: Tell
) -> None:
    node, bodies = start_node(), files(tmp_path / "s")
    save(node.client(), bucket, "run/step_0/", bodies)
    proxy.inject(Answer(503), operation="PutObject", key=f"run/step_1/{SHARD}", times=None)
    save(node.client(), bucket, "run/step_1/", bodies)
    node.wait_status("the rest is there", lambda status: status["writeback"]["pending"] == 2)
    assert verify(node, "run/step_1/", "--tier", "s3").status == 1
    assert verify(node, "run/step_1/").status == 0
    proxy.heal()
    node.restart_cold()
    told = verify(node, "run/", "--tier", "memory")
    assert told.status == 1
    assert "no memory has it" in told.err
    assert verify(node, "run/", "--deep").status == 0
    direct.delete_object(Bucket=bucket, Key=f"run/step_0/{SHARD}")
    proxy.forget()
    told = verify(node, "run/", "--deep", "--repair", "--json")
    assert (told.status, told.verdicts()) == (1, {"step_0": "damaged", "step_1": "sound"})
    assert "is not repaired in s3: it was not written through this gateway, or was forgotten" in told.err
    assert not [each for each in proxy.requests if each.method in ("PUT", "DELETE", "POST")]
    assert node.status()["writeback"]["quarantined"] == []


def test_lists_and_heads_that_mean_harm_or_nothing_are_damage(
    start_node: StartNode, bucket: str, tmp_path: Path, verify: Tell
) -> None:
    class Harm:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "harm",))

    node, bodies, hf = start_node(), files(tmp_path / "s"), huggingface()
    first = next(iter(hf))
    client = node.client()
    save(client, bucket, "run/step_0/", bodies | {".metadata": pickle.dumps(Harm(), protocol=4)})
    broken = bytearray(bodies[SHARD])
    broken[broken.index(b"PK\x05\x06")] ^= 1
    save(client, bucket, "run/step_1/", bodies | {SHARD: bytes(broken)})
    save(client, bucket, "run/hf-1/", hf | {first: tensors(other=1001)})
    save(client, bucket, "run/hf-2/", hf | {first: hf[first][:-1]})
    node.wait_settled()
    told = verify(node, "run/", "--json")
    assert told.status == 1
    assert told.verdicts() == dict.fromkeys(("step_0", "step_1", "hf-1", "hf-2"), "damaged")
    assert not (tmp_path / "harm").exists()
    named = {each["uri"].removeprefix(f"s3://{bucket}/run/") for each in json.loads(told.out)["damages"]}
    assert named == {"step_0/.metadata", f"step_1/{SHARD}", f"hf-1/{first}", f"hf-2/{first}"}
    assert "the index names 'w1', which is not in it" in told.err
    again = verify(node, "run/", "--repair")
    assert again.status == 1
    assert "these are the bytes that were acknowledged" in again.err


def test_set_that_is_being_rewritten_or_deleted_is_not_damaged(
    start_node: StartNode, bucket: str, tmp_path: Path, verify: Tell
) -> None:
    node, bodies = start_node("--marker-quiet", "1h"), files(tmp_path / "s")
    client = node.client()
    save(client, bucket, "run/step_0/", bodies)
    save(client, bucket, "run/step_1/", bodies)
    save(client, bucket, "run/step_2/", {SHARD: bodies[SHARD]})
    node.wait_settled()
    other = {f"w{number}": torch.zeros(9) for number in range(9)}
    state_dict_saver.save(other, storage_writer=FileSystemWriter(tmp_path / "t"), no_dist=True)
    smaller = (tmp_path / "t" / SHARD).read_bytes()
    save(client, bucket, "run/step_0/", {SHARD: smaller})
    node.wait_status("the marker waits", lambda status: status["writeback"]["pending"] == 1)
    told = verify(node, "run/", "--deep", "--json")
    assert told.verdicts() == {"step_0": "unmarked", "step_1": "sound", "step_2": "unmarked"}, told.err
    assert (told.status, told.err) == (0, "")
    assert verify(node, "run/step_0/").status == 1
    save(client, bucket, "run/step_0/", {".metadata": (tmp_path / "t" / ".metadata").read_bytes()})
    assert verify(node, "run/step_0/").status == 0
    client.delete_object(Bucket=bucket, Key=f"run/step_1/{SHARD}")
    client.delete_object(Bucket=bucket, Key="run/step_1/.metadata")
    assert verify(node, "run/", "--json").verdicts() == {"step_0": "sound", "step_2": "unmarked"}


def test_what_cannot_be_asked_has_a_status_of_its_own(
    start_node: StartNode, proxy: FaultyOrigin, bucket: str, tmp_path: Path, verify: Tell
) -> None:
    node = start_node()
    save(node.client(), bucket, "run/step_0/", files(tmp_path / "s"))
    node.wait_settled()
    proxy.inject(Answer(403, code="AccessDenied"), operation="HeadObject", key=f"run/step_0/{SHARD}", times=None)
    told = verify(node, "run/", "--json")
    assert (told.status, told.verdicts()) == (6, {"step_0": "unknown"})
    assert "not looked at" in told.err
    assert verify(node, "run/", "--tier", "memory").status == 0
    proxy.inject(Answer(503), times=None)
    assert verify(node, "run/", "--tier", "memory").status == 0
    away = verify(node, "run/", "--deep", "--json")
    assert (away.status, away.verdicts()) == (6, {"step_0": "unknown"})
    assert "S3 did not say what it has" in away.err
    assert verify(node, "run/", "--tier", "disk").status == 2
    node.stop()
    assert verify(node, "run/").status == 4


def test_what_was_verified_loads(start_node: StartNode, direct: Any, bucket: str, tmp_path: Path, verify: Tell) -> None:
    """The proof holds: torch loads what was found sound, after a repair too."""
    node, bodies = start_node(), files(tmp_path / "s", seed=3)
    save(node.client(), bucket, "run/step_0/", bodies)
    node.wait_settled()
    rot(direct, bucket, f"run/step_0/{SHARD}", len(bodies[SHARD]) // 2)
    assert verify(node, "run/", "--deep", "--repair").status == 7
    back = tmp_path / "back"
    back.mkdir()
    for name in bodies:
        (back / name).write_bytes(body_of(direct, bucket, f"run/step_0/{name}"))
    loaded: dict[str, Any] = {name: torch.zeros((64, 32)) for name in state() if name != "step"}
    state_dict_loader.load(loaded, storage_reader=FileSystemReader(back), no_dist=True)
    assert all(torch.equal(value, state(3)[name]) for name, value in loaded.items())


@needs_etcd
def test_copies_of_other_nodes_are_looked_at_and_s3_is_mended_from_them(
    start_cluster: StartCluster, proxy: FaultyOrigin, direct: Any, bucket: str, tmp_path: Path, verify: Tell
) -> None:
    bodies = files(tmp_path / "s")
    cluster = start_cluster(3, "--replicas", "2", "--lease", "3s")
    save(cluster.client(0), bucket, "run/step_0/", bodies)
    for node in cluster.nodes:
        node.wait_settled()
    shard = f"run/step_0/{SHARD}"

    def damaged_of(told: Told) -> set[tuple[str, str]]:
        return {(each["tier"], each["node"]) for each in json.loads(told.out)["damages"]}

    rot_in_memory(cluster.nodes[0], bodies[SHARD], 4000)
    for node in cluster.nodes[1:]:
        told = verify(node, "run/", "--json")
        assert (told.status, damaged_of(told)) == (1, {("memory", "a")})
    rot(direct, bucket, shard, 4000)
    third = cluster.nodes[2]
    told = verify(third, "run/", "--deep", "--repair", "--json")
    assert (told.status, told.verdicts()) == (7, {"step_0": "repaired"}), told.err
    assert damaged_of(told) == {("memory", "a"), ("s3", "")}
    assert body_of(direct, bucket, shard) == bodies[SHARD]
    for number in range(3):
        assert body_of(cluster.client(number), bucket, shard) == bodies[SHARD]
    assert verify(third, "run/", "--deep").status == 0

    # What S3 does not have yet is mended by the node that owes it, from another copy.
    proxy.inject(Answer(503), operation="PutObject", times=None)
    owed = files(tmp_path / "t", seed=5)
    save(cluster.client(0), bucket, "run/step_1/", owed)
    rot_in_memory(cluster.nodes[0], owed[SHARD], 4000)
    told = verify(third, "run/step_1/", "--repair")
    assert (told.status, "a owes it to S3: repair it there" in told.err) == (1, True)
    assert verify(cluster.nodes[0], "run/step_1/", "--repair").status == 7
    assert verify(third, "run/step_1/").status == 0
    proxy.heal()
    for node in cluster.nodes:
        node.wait_settled()
    assert body_of(direct, bucket, f"run/step_1/{SHARD}") == owed[SHARD]
