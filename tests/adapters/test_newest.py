"""Which checkpoint a restart takes, asked of whole nodes."""

import io
import json
import logging
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.adapters.conftest import aws_environment, sources_path
from tests.etcds import StartCluster, etcd, start_cluster
from tests.nodes import StartNode, bucket, direct, proxy, standing_proxy, start_node

from tiergate import cli
from tiergate.checkpoints.sets import Tier
from tiergate.testing.etcd import needs_etcd
from tiergate.testing.faults import FaultyOrigin
from tiergate.testing.node import RunningNode
from tiergate.testing.rules import Answer, Cut
from tiergate_adapters import s3alone
from tiergate_adapters.newest import Checkpoint, NoCheckpointError, UnseenTierError, newest
from tiergate_adapters.place import Place

__all__ = ["bucket", "direct", "etcd", "proxy", "standing_proxy", "start_cluster", "start_node"]  # fixtures

SHARDS = tuple(f"model-0000{part}-of-00002.safetensors" for part in (1, 2))
INDEX = "model.safetensors.index.json"

Use = Callable[[RunningNode], None]


def tensors(name: str, size_bytes: int) -> bytes:
    """A safetensors file of one tensor."""
    text = json.dumps({name: {"dtype": "U8", "shape": [size_bytes], "data_offsets": [0, size_bytes]}}).encode()
    return struct.pack("<Q", len(text)) + text + bytes(size_bytes)


def files(step: int) -> dict[str, bytes]:
    """A checkpoint, its marker last."""
    weight_map = {f"w{part}": name for part, name in enumerate(SHARDS)}
    shards = {name: tensors(f"w{part}", 1000 + step) for part, name in enumerate(SHARDS)}
    return shards | {INDEX: json.dumps({"weight_map": weight_map}).encode()}


def save(client: Any, bucket: str, step: int, bodies: Mapping[str, bytes] | None = None) -> None:
    for name, body in (files(step) if bodies is None else bodies).items():
        client.put_object(Bucket=bucket, Key=f"run/step-{step}/{name}", Body=body)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Use:
    """Has the environment name a node, as training code finds it."""

    def use(node: RunningNode) -> None:
        for name, value in aws_environment(node.endpoint, "client", "client-secret").items():
            monkeypatch.setenv(name, value)

    for name in ("TIERGATE_ORIGIN", "TIERGATE_ENDPOINTS"):
        monkeypatch.delenv(name, raising=False)

    return use


def ask(bucket: str, *, trust: tuple[str, ...] = (), decision: str = "", deep: bool = False) -> Checkpoint:
    return newest(f"s3://{bucket}/run", trust=trust, decision=decision, deep=deep, patience_s=0.0)


def metric(node: RunningNode) -> float:
    return node.metric("tiergate_checkpoints_quarantined_total")


@pytest.mark.semantics("P7.5")
def test_newest_whole_one_of_all_tiers_is_taken_step_0_too(
    start_node: StartNode, proxy: FaultyOrigin, bucket: str, direct: Any, use: Use
) -> None:
    node = start_node()
    use(node)
    client = node.client()
    with pytest.raises(NoCheckpointError, match=rf"no whole checkpoint is under s3://{bucket}/run$") as nothing:
        ask(bucket)
    assert isinstance(nothing.value, FileNotFoundError)
    torn = {name: body for name, body in files(5).items() if name != INDEX}
    save(client, bucket, 5, torn)
    with pytest.raises(NoCheckpointError):
        ask(bucket)
    save(client, bucket, 0)
    found = ask(bucket)
    assert (found.uri, found.step, found.passed_over) == (f"s3://{bucket}/run/step-0", 0, ())
    assert found.status.is_whole
    node.wait_settled()
    assert ask(bucket).tiers == (Tier.MEMORY, Tier.S3)
    proxy.inject(Answer(503), operation="PutObject", times=None)
    save(client, bucket, 1)
    found = ask(bucket)
    assert (found.step, found.tiers) == (1, (Tier.MEMORY,))
    save(direct, bucket, 3)
    found = ask(bucket)
    assert (found.step, found.tiers) == (3, (Tier.S3,))
    assert ask(bucket, deep=True).step == 3
    client.delete_object(Bucket=bucket, Key=f"run/step-3/{INDEX}")
    assert ask(bucket).step == 1
    assert metric(node) == 0


@pytest.mark.semantics("P7.6")
def test_damaged_ones_are_quarantined_and_the_next_is_taken(
    start_node: StartNode,
    proxy: FaultyOrigin,
    bucket: str,
    direct: Any,
    use: Use,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    node = start_node()
    use(node)
    client = node.client()
    for step in range(1, 5):
        save(client, bucket, step)
    node.wait_settled()
    other, short, gone = (f"run/step-{step}/{SHARDS[1]}" for step in (4, 3, 2))
    direct.put_object(Bucket=bucket, Key=other, Body=bytes(len(files(4)[SHARDS[1]])))
    direct.put_object(Bucket=bucket, Key=short, Body=files(3)[SHARDS[1]][:-1])
    direct.delete_object(Bucket=bucket, Key=gone)
    with caplog.at_level(logging.WARNING, "tiergate_adapters.newest"):
        found = ask(bucket)
    assert found.step == 1
    passed = {each.step: each.reason for each in found.passed_over}
    assert list(passed) == [4, 3, 2]
    assert f"{other}: changed in s3" in passed[4]
    assert short in passed[3]
    assert gone in passed[2]
    assert "a newer checkpoint is passed over" in caplog.text
    assert "a checkpoint is damaged: it is passed over" in node.log_tail()
    assert metric(node) == 3

    sets = {each["step"]: each for each in node.checkpoints(f"s3://{bucket}/run/")["sets"]}
    assert [sets[step]["quarantined"] for step in (4, 3, 2, 1)] == [*passed.values(), ""]
    assert not sets[4]["is_whole"]
    assert sets[4]["tiers"]["s3"]["state"] == "quarantined"

    where = ["--memory-dir", str(node.memory_dir), "--admin-listen", "127.0.0.1:0"]
    capsys.readouterr()
    assert cli.main(["newest", f"s3://{bucket}/run/", *where]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"s3://{bucket}/run/step-1/\n"
    assert f"s3://{bucket}/run/step-4/ is passed over: {passed[4]}" in printed.err
    assert cli.main(["newest", f"s3://{bucket}/elsewhere/", *where]) == 1
    # Without its last slash it is the same folder, and no other that begins alike.
    assert cli.main(["newest", f"s3://{bucket}/run", *where]) == 0
    assert cli.main(["newest", f"s3://{bucket}/ru", *where]) == 1
    assert cli.main(["checkpoints", f"s3://{bucket}/run/", *where]) == 1
    assert f"s3://{bucket}/run/step-4/ is quarantined in s3: {passed[4]}" in capsys.readouterr().err

    node.kill9()
    node.restart()
    use(node)
    assert ask(bucket) == found
    assert metric(node) == 0, "what is known to be damaged is not looked at again"

    client = node.client()
    direct.put_object(Bucket=bucket, Key=short, Body=files(3)[SHARDS[1]])
    client.delete_object(Bucket=bucket, Key=f"run/step-2/{INDEX}")
    save(client, bucket, 4)
    found = ask(bucket)
    assert (found.step, found.passed_over) == (4, ())
    assert {each["quarantined"] for each in node.checkpoints(f"s3://{bucket}/run/")["sets"]} == {""}


def test_all_that_are_damaged_are_named_where_nothing_is_left(
    start_node: StartNode, bucket: str, direct: Any, use: Use
) -> None:
    node = start_node()
    for step in (1, 2):
        save(node.client(), bucket, step)
    node.wait_settled()
    # Nobody remembers what was written; what is there must tell by itself.
    node.restart_cold()
    use(node)
    for step in (1, 2):
        key = f"run/step-{step}/{SHARDS[0]}"
        direct.put_object(Bucket=bucket, Key=key, Body=bytes(len(files(step)[SHARDS[0]])))
    with pytest.raises(NoCheckpointError) as nothing:
        ask(bucket)
    assert [each.step for each in nothing.value.passed_over] == [2, 1]
    for step in (1, 2):
        assert f"s3://{bucket}/run/step-{step}/: run/step-{step}/{SHARDS[0]}: header in s3" in str(nothing.value)


@pytest.mark.semantics("P7.7")
@pytest.mark.parametrize("exclusive", [False, True])
def test_origin_that_is_away_is_an_error_unless_memory_is_enough(
    start_node: StartNode, proxy: FaultyOrigin, bucket: str, use: Use, exclusive: bool
) -> None:
    node = start_node("--prefix", f"{{uri='s3://{bucket}/', exclusive={str(exclusive).lower()}}}")
    use(node)
    save(node.client(), bucket, 0)
    node.wait_settled()
    proxy.inject(Cut(), times=None)
    save(node.client(), bucket, 1)
    where = ["--memory-dir", str(node.memory_dir), "--admin-listen", "127.0.0.1:0"]
    assert cli.main(["newest", f"s3://{bucket}/run/", *where]) == (0 if exclusive else 6)
    if exclusive:
        assert ask(bucket).step == 1
        with pytest.raises(NoCheckpointError):
            newest(f"s3://{bucket}/elsewhere")
    else:
        with pytest.raises(UnseenTierError, match="what s3 holds is not known now"):
            ask(bucket)
        with pytest.raises(UnseenTierError):
            ask(bucket, trust=("s3",))
    assert ask(bucket, trust=("memory",)).step == 1
    assert metric(node) == 0
    proxy.heal()
    assert ask(bucket).step == 1


@pytest.mark.semantics("P7.7")
def test_gateway_that_is_away_is_an_error_unless_s3_is_enough(
    start_node: StartNode, proxy: FaultyOrigin, bucket: str, direct: Any, use: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = start_node()
    use(node)
    for step in (2, 3, 4):
        save(node.client(), bucket, step)
    node.wait_settled()
    direct.delete_object(Bucket=bucket, Key=f"run/step-4/{SHARDS[0]}")
    direct.put_object(Bucket=bucket, Key=f"run/step-3/{SHARDS[0]}", Body=bytes(len(files(3)[SHARDS[0]])))
    node.stop()
    with pytest.raises(UnseenTierError, match=r"no gateway answers at .*TIERGATE_ENDPOINTS may name some"):
        ask(bucket)
    with pytest.raises(UnseenTierError):
        ask(bucket, trust=("memory",))
    with pytest.raises(UnseenTierError, match="TIERGATE_ORIGIN does not say where S3 is"):
        ask(bucket, trust=("s3",))
    monkeypatch.setenv("TIERGATE_ORIGIN", proxy.endpoint)
    found = ask(bucket, trust=("s3",))
    assert (found.uri, found.step, found.tiers) == (f"s3://{bucket}/run/step-2", 2, (Tier.S3,))
    assert [each.step for each in found.passed_over] == [4, 3]
    with pytest.raises(NoCheckpointError):
        newest(f"s3://{bucket}/elsewhere", trust=("s3",), patience_s=0.0)
    proxy.inject(Cut(), times=None)
    with pytest.raises(UnseenTierError, match="S3 does not say"):
        ask(bucket, trust=("s3",))
    proxy.heal()
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
    with pytest.raises(UnseenTierError, match="is no gateway"):
        ask(bucket)


def test_sets_of_pointers_and_of_ranks_are_found_in_s3_alone(bucket: str, direct: Any) -> None:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("archive/data.pkl", b"x")
    for step in (1, 2, 3):
        for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
            direct.put_object(Bucket=bucket, Key=f"deep/global_step{step}/{name}", Body=archive.getvalue())
    direct.put_object(Bucket=bucket, Key="deep/latest", Body=b"global_step2")
    for prefix in ("deep/", "deep/global_step2/"):
        found = s3alone.newest(Place(bucket, prefix), direct)["checkpoint"]
        assert (found["uri"], found["step"]) == (f"s3://{bucket}/deep/global_step2/", 2)
    key = "deep/global_step2/mp_rank_00_model_states.pt"
    direct.put_object(Bucket=bucket, Key=key, Body=archive.getvalue()[:-1])
    answer = s3alone.newest(Place(bucket, "deep/"), direct)
    assert (answer["checkpoint"]["step"], [each["step"] for each in answer["passed_over"]]) == (1, [2])
    for rank in range(2):
        direct.put_object(Bucket=bucket, Key=f"job/rank_{rank}/step_5/checkpoint.pt", Body=archive.getvalue())
    assert s3alone.newest(Place(bucket, "job/"), direct) == {"checkpoint": None, "passed_over": []}


def test_what_is_refused_for_good_is_no_missing_checkpoint(
    start_node: StartNode,
    use: Use,
    bucket: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    keys = {"TIERGATE_ACCESS_KEY_ID": "client", "TIERGATE_SECRET_ACCESS_KEY": "client-secret"}
    use(start_node(environment=keys))
    refusal = "the gateway refuses to say which checkpoint is the newest"

    def refused(uri: str, text: str) -> None:
        caplog.clear()
        with pytest.raises(RuntimeError, match=f"^{text}") as raised:
            newest(uri)
        assert type(raised.value) is RuntimeError
        (line,) = [each for each in caplog.records if each.name == "tiergate_adapters.newest"]
        assert line.getMessage() == f"the newest checkpoint cannot be asked for: {raised.value}"
        assert line.exc_info is None

    refused("s3://no-such-bucket-here/run", f"{refusal}: NoSuchBucket: ")
    with monkeypatch.context() as changed:
        changed.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        refused(f"s3://{bucket}/run", f"{refusal}: SignatureDoesNotMatch: ")
        changed.setenv("AWS_ENDPOINT_URL_S3", "127.0.0.1:9000")
        refused(f"s3://{bucket}/run", "a gateway's address is none: Invalid endpoint: ")
        changed.setenv("AWS_PROFILE", "no-such")
        refused(f"s3://{bucket}/run", "The config profile ")
        changed.delenv("AWS_PROFILE")
        changed.delenv("AWS_ACCESS_KEY_ID")
        changed.delenv("AWS_SECRET_ACCESS_KEY")
        changed.setenv("AWS_EC2_METADATA_DISABLED", "true")
        changed.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
        refused(f"s3://{bucket}/run", "no AWS keys are found")
    with pytest.raises(ValueError, match="ram"):
        newest(f"s3://{bucket}/run", trust=("ram",))
    with pytest.raises(ValueError, match="not of the form"):
        newest("/run")


@pytest.mark.semantics("P7.8")
def test_those_who_name_a_decision_get_the_first_ones_answer(start_node: StartNode, bucket: str, use: Use) -> None:
    node = start_node()
    use(node)
    with pytest.raises(NoCheckpointError):
        ask(bucket, decision="job/0")
    save(node.client(), bucket, 0)
    with pytest.raises(NoCheckpointError):
        ask(bucket, decision="job/0")
    assert ask(bucket, decision="job/1").step == 0
    save(node.client(), bucket, 1)
    node.kill9()
    node.restart()
    use(node)
    assert [ask(bucket, decision="job/1").step, ask(bucket, decision="job/2").step, ask(bucket).step] == [0, 1, 1]
    with pytest.raises(RuntimeError, match="256 characters"):
        ask(bucket, decision="x" * 257)


RANK = """
import sys, pathlib, json
from torch import distributed
from tiergate_adapters.newest import newest
folder, uri, rank = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
if rank == 1:
    print("ready", flush=True)
    sys.stdin.readline()
found = newest(uri + "/run")
try:
    newest(uri + "/elsewhere")
except FileNotFoundError as error:
    nothing = str(error)
print(json.dumps([found.uri, found.step, nothing]), flush=True)
distributed.destroy_process_group()
"""


@pytest.mark.semantics("P7.8")
def test_all_ranks_of_a_group_get_what_the_first_was_told(
    start_node: StartNode, bucket: str, use: Use, tmp_path: Path
) -> None:
    node = start_node()
    use(node)
    save(node.client(), bucket, 7)
    environment = aws_environment(node.endpoint, "client", "client-secret") | {"PYTHONPATH": sources_path()}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(tmp_path), f"s3://{bucket}", str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            assert rank.stdin is not None
            assert rank.stdout is not None
        assert ranks[1].stdout.readline() == "ready\n"  # type: ignore[union-attr]
        answered = 'tiergate_http_requests_total{operation="x-tiergate-newest",status="200"}'
        node.wait_until("the first rank was told", lambda: answered in node.metrics())
        save(node.client(), bucket, 8)
        told = [rank.communicate("go\n", timeout=150)[0] for rank in reversed(ranks)]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    nothing = f"no whole checkpoint is under s3://{bucket}/elsewhere"
    assert [json.loads(each) for each in told] == [[f"s3://{bucket}/run/step-7", 7, nothing]] * 2
    assert ask(bucket).step == 8


@needs_etcd
@pytest.mark.semantics("P7.9")
def test_what_only_a_peer_has_is_taken_and_missed_while_it_is_gone(
    start_cluster: StartCluster,
    proxy: FaultyOrigin,
    bucket: str,
    direct: Any,
    use: Use,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = start_cluster(2, "--replicas", "1", "--lease", "3s")
    a, b = cluster.nodes
    use(b)
    for step in (1, 2):
        save(cluster.client(0), bucket, step)
    for node in (a, b):
        node.wait_settled()
    direct.delete_object(Bucket=bucket, Key=f"run/step-2/{SHARDS[0]}")
    assert ask(bucket).step == 1
    proxy.inject(Answer(503), operation="PutObject", times=None)
    save(cluster.client(0), bucket, 3)
    found = ask(bucket)
    assert (found.step, found.tiers, found.passed_over) == (3, (Tier.MEMORY,), ())
    use(a)
    assert ask(bucket, decision="job/0") == found
    assert metric(a) == 0, "one node's judgement is every node's"
    a.kill9("all")
    with pytest.raises(UnseenTierError, match="no gateway answers"):
        ask(bucket, decision="job/0")
    monkeypatch.setenv("TIERGATE_ENDPOINTS", b.endpoint)
    assert ask(bucket, decision="job/0") == found
    use(b)
    with pytest.raises(UnseenTierError):
        ask(bucket)
    cluster.wait_members("b")
    with pytest.raises(UnseenTierError, match="may come back"):
        ask(bucket)
    assert metric(b) == 1
