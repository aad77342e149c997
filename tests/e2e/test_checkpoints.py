"""`tiergate checkpoints`, and the same on the admin address: real checkpoints on whole nodes."""

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
import torch
from tests.etcds import StartCluster
from tests.nodes import StartNode
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from tiergate import cli
from tiergate.checkpoints.documents import status_from
from tiergate.checkpoints.newest import UnseenTierError, newest
from tiergate.testing.etcd import needs_etcd
from tiergate.testing.faults import FaultyOrigin
from tiergate.testing.node import RunningNode
from tiergate.testing.origins import MotoOrigin
from tiergate.testing.rules import Answer, Cut

pytestmark = [
    pytest.mark.parametrize("origin", [MotoOrigin], ids=["moto"], indirect=True),
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def state() -> dict[str, Any]:
    return {f"w{number}": torch.full((64, 32), float(number)) for number in range(3)}


def files(folder: Path) -> dict[str, bytes]:
    """What torch writes of a checkpoint, its marker last."""
    state_dict_saver.save(state(), storage_writer=FileSystemWriter(folder), no_dist=True)
    names = sorted((path.name for path in folder.iterdir()), key=lambda name: name == ".metadata")
    return {name: (folder / name).read_bytes() for name in names}


def save(client: Any, bucket: str, prefix: str, bodies: dict[str, bytes]) -> None:
    for name, body in bodies.items():
        client.put_object(Bucket=bucket, Key=f"{prefix}{name}", Body=body)


@dataclass(frozen=True, slots=True)
class Told:
    """What the command printed, and its exit status."""

    status: int
    out: str
    err: str


Tell = Callable[..., Told]


@pytest.fixture
def tell(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Tell:
    """Runs `tiergate checkpoints` of a node."""
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.setenv("NO_COLOR", "1")

    def tell(node: RunningNode, *words: str) -> Told:
        capsys.readouterr()
        where = ["--memory-dir", str(node.memory_dir), "--admin-listen", "127.0.0.1:0"]
        status = cli.main(["checkpoints", *words, *where])
        printed = capsys.readouterr()
        return Told(status, printed.out, printed.err)

    return tell


def states(each: dict[str, Any]) -> tuple[str, str, bool]:
    return each["tiers"]["memory"]["state"], each["tiers"]["s3"]["state"], each["is_whole"]


def test_save_of_torch_through_s3fs_goes_from_memory_to_s3(
    start_node: StartNode, proxy: FaultyOrigin, bucket: str, tell: Tell
) -> None:
    node = start_node()
    assert (tell(node).status, tell(node).out) == (0, "no checkpoints\n")
    path = f"s3://{bucket}/run/step_7"
    options: dict[str, Any] = {
        "key": "test",
        "secret": "test",
        "endpoint_url": node.endpoint,
        "skip_instance_cache": True,
    }
    proxy.inject(Answer(503), operation="PutObject", times=None)
    state_dict_saver.save(state(), storage_writer=FsspecWriter(path, **options), no_dist=True)
    (found,) = node.checkpoints(f"s3://{bucket}/run/")["sets"]
    assert (found["uri"], found["layout"], found["step"]) == (f"{path}/", "dcp", 7)
    assert states(found) == ("complete", "uploading", True)
    assert found["tiers"]["memory"]["copies_count"] == 1
    assert found["tiers"]["s3"]["objects_count"] == 0
    assert found["to_s3_s"] is None
    proxy.heal()
    node.wait_settled()
    answer = node.checkpoints()
    assert answer["places"] == [
        {"uri": f"s3://{bucket}/", "bucket": bucket, "prefix": "", "unseen": [], "origin_fault": "", "fault": ""}
    ]
    (found,) = answer["sets"]
    assert (states(found), found["to_s3_s"]) == (("complete", "complete", True), 0.0)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in state().items()}
    state_dict_loader.load(loaded, storage_reader=FsspecReader(path, **options), no_dist=True)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state().items())
    shown = tell(node, f"s3://{bucket}/run/")
    assert (shown.status, shown.err) == (0, "")
    (row,) = [line for line in shown.out.splitlines() if path in line]
    for text in ("dcp", " 7 ", "complete x1", "there"):
        assert text in row


@pytest.mark.semantics("P7.1")
def test_tiers_are_told_apart_and_damage_is_named(
    start_node: StartNode, proxy: FaultyOrigin, bucket: str, direct: Any, tmp_path: Path, tell: Tell
) -> None:
    bodies = files(tmp_path)
    shard = next(name for name in bodies if name.endswith(".distcp"))
    node = start_node()
    client = node.client()
    save(client, bucket, "run/step_0/", bodies)
    save(client, bucket, "run/step_1/", bodies)
    node.wait_settled()
    node.restart_cold()
    client = node.client()
    save(client, bucket, "run/step_2/", bodies | {shard: bodies[shard][:-1]})
    save(client, bucket, "run/step_3/", {shard: bodies[shard]})
    direct.delete_object(Bucket=bucket, Key=f"run/step_1/{shard}")
    proxy.inject(Answer(403, code="AccessDenied"), operation="PutObject", key="run/step_4/.metadata", times=None)
    save(client, bucket, "run/step_4/", bodies)
    node.wait_status("quarantined", lambda status: len(status["writeback"]["quarantined"]) == 1)
    node.wait_status("the rest is there", lambda status: status["writeback"]["pending"] == 1)
    found = {each["step"]: each for each in node.checkpoints(f"s3://{bucket}/run/")["sets"]}
    assert {step: states(each) for step, each in found.items()} == {
        0: ("absent", "complete", True),
        1: ("absent", "damaged", False),
        2: ("damaged", "damaged", False),
        3: ("receiving", "receiving", False),
        4: ("complete", "quarantined", True),
    }
    assert found[1]["tiers"]["s3"]["missing"] == [f"run/step_1/{shard}"]
    shown = tell(node, f"s3://{bucket}/run/", "--json")
    assert shown.status == 1
    assert {each["step"]: states(each) for each in json.loads(shown.out)["sets"]} == {
        step: states(each) for step, each in found.items()
    }
    assert f"s3://{bucket}/run/step_1/ is damaged in s3: run/step_1/{shard}" in shown.err
    assert f"s3://{bucket}/run/step_4/ is quarantined in s3: run/step_4/.metadata" in shown.err


@pytest.mark.semantics("P7.2")
@pytest.mark.parametrize("exclusive", [False, True])
def test_origin_that_is_away_is_an_error_and_never_none(
    start_node: StartNode, proxy: FaultyOrigin, bucket: str, direct: Any, tmp_path: Path, tell: Tell, exclusive: bool
) -> None:
    bodies = files(tmp_path)
    node = start_node("--prefix", f"{{uri='s3://{bucket}/', exclusive={str(exclusive).lower()}}}")
    client = node.client()
    save(client, bucket, "run/step_0/", bodies)
    node.wait_settled()
    if not exclusive:
        save(direct, bucket, "run/step_9/", bodies)
    proxy.inject(Cut(), times=None)
    save(client, bucket, "run/step_1/", bodies)
    answer = node.checkpoints(f"s3://{bucket}/run/")
    sets, (place,) = [status_from(each) for each in answer["sets"]], answer["places"]
    assert {each["step"]: states(each) for each in answer["sets"]} == {
        0: ("complete", "complete", True),
        1: ("complete", "uploading", True),
    }
    assert place["origin_fault"]
    shown = tell(node, f"s3://{bucket}/run/")
    if exclusive:
        assert (place["unseen"], shown.status) == ([], 0)
        found = newest(sets, place["unseen"])
        assert found is not None
        assert found.step == 1
    else:
        assert (place["unseen"], shown.status) == (["s3"], 6)
        assert f"not all of s3://{bucket}/run/ was seen (s3): the origin does not answer" in shown.err
        with pytest.raises(UnseenTierError):
            newest(sets, place["unseen"])
    nothing = tell(node, f"s3://{bucket}/other/")
    assert (nothing.out, nothing.status) == ("no checkpoints\n", 0 if exclusive else 6)
    proxy.heal()
    answer = node.checkpoints(f"s3://{bucket}/run/")
    found = newest(map(status_from, answer["sets"]), answer["places"][0]["unseen"])
    assert found is not None
    assert found.step == (1 if exclusive else 9)


@needs_etcd
@pytest.mark.semantics("P7.3")
def test_every_node_of_a_cluster_tells_the_same(
    start_cluster: StartCluster, proxy: FaultyOrigin, bucket: str, direct: Any, tmp_path: Path
) -> None:
    bodies = files(tmp_path)
    save(direct, bucket, "run/step_3/", bodies)
    own = f"{{uri='s3://{bucket}/', exclusive=true}}"
    cluster = start_cluster(3, "--replicas", "2", "--lease", "3s", "--prefix", own)
    a, b, c = cluster.nodes
    proxy.inject(Answer(503), operation="PutObject", times=None)
    shards = {name: body for name, body in bodies.items() if name != ".metadata"}
    save(cluster.client(0), bucket, "run/step_4/", shards)
    save(cluster.client(1), bucket, "run/step_4/", {".metadata": bodies[".metadata"]})

    def seen(node: RunningNode) -> dict[int, Any]:
        return {each["step"]: each | {"age_s": 0} for each in node.checkpoints(f"s3://{bucket}/run/")["sets"]}

    assert seen(a) == seen(b) == seen(c)
    assert {step: states(each) for step, each in seen(c).items()} == {
        3: ("absent", "complete", True),
        4: ("complete", "uploading", True),
    }
    assert seen(c)[4]["tiers"]["memory"]["copies_count"] == 2
    a.kill9("all")
    cluster.wait_members("bc")
    assert states(seen(b)[4]) == states(seen(c)[4]) == ("complete", "uploading", True)
    proxy.heal()
    b.wait_until("all of it is in S3", lambda: states(seen(c)[4])[1] == "complete")
    assert seen(b) == seen(c)
    assert newest(status_from(each) for each in seen(c).values()) == status_from(seen(b)[4])


def test_what_cannot_be_asked_is_an_error_of_its_own(start_node: StartNode, bucket: str, tell: Tell) -> None:
    node = start_node()
    with pytest.raises(HTTPError) as refused:
        node.checkpoints("bogus")
    assert (refused.value.code, "is not of the form" in str(json.load(refused.value))) == (400, True)
    missing = tell(node, "s3://no-such-bucket-here/run/")
    assert (missing.status, missing.out) == (1, "")
    assert missing.err == "tiergate: the checkpoints cannot be told: The specified bucket does not exist\n"
    assert tell(node, "bogus").status == 2
    node.stop()
    assert tell(node, f"s3://{bucket}/").status == 4


def test_tensors_of_one_file_are_a_set_too(start_node: StartNode, bucket: str) -> None:
    node = start_node()
    body = io.BytesIO()
    torch.save(state(), body)
    node.client().put_object(Bucket=bucket, Key="run/epoch=2.ckpt", Body=body.getvalue())
    (found,) = node.checkpoints(f"s3://{bucket}/run/")["sets"]
    assert (found["uri"], found["layout"], found["step"]) == (f"s3://{bucket}/run/epoch=2.ckpt", "lightning", 2)
    assert found["tiers"]["memory"]["state"] == "complete"
