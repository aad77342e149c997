"""`tiergate sync` as a process, before a real node and a real origin."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.adapters.conftest import BUCKET, Environment
from tests.adapters.syncing import RunningSync, files_of, until
from tests.conformance.gateway import CLIENT
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from tiergate.testing.faults import FaultyOrigin
from tiergate.testing.node import RunningNode
from tiergate.testing.origins import MotoOrigin
from tiergate.testing.rules import Answer, Cut, Gate, Hold
from tiergate_adapters.sagemaker.agent import FolderSync, NotFlushedError
from tiergate_adapters.sagemaker.folder import STAGE, is_written
from tiergate_adapters.sagemaker.watching import Watcher

Start = Callable[..., RunningSync]


@pytest.fixture(scope="module")
def behind(origin: MotoOrigin) -> Iterator[FaultyOrigin]:
    """Between the node and the origin."""
    with FaultyOrigin(origin.endpoint) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def node(behind: FaultyOrigin) -> Iterator[RunningNode]:
    keys = {"TIERGATE_ACCESS_KEY_ID": CLIENT.access_key, "TIERGATE_SECRET_ACCESS_KEY": CLIENT.secret_key}
    flags = ("--marker-quiet", "1s", "--marker-hold", "1s")
    with RunningNode(behind.endpoint, flags=flags, environment=keys) as running:
        yield running


@pytest.fixture(scope="module")
def standing_front(node: RunningNode) -> Iterator[FaultyOrigin]:
    with FaultyOrigin(node.endpoint) as proxy:
        yield proxy


@pytest.fixture
def front(standing_front: FaultyOrigin) -> Iterator[FaultyOrigin]:
    """Between the agent and the node."""
    standing_front.forget()
    yield standing_front
    standing_front.heal()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def start(folder: Path, uri: str, front: FaultyOrigin, environment: Environment) -> Iterator[Start]:
    """Starts the command on a folder; it ends with the test."""
    running: list[RunningSync] = []

    def begin(*flags: str, at: Path = folder, to: str = uri, **options: Any) -> RunningSync:
        flags = ("--flush-deadline", "200", *flags)  # of several the last one holds
        sync = RunningSync(at, to, *flags, environment=environment(front.endpoint), **options)
        running.append(sync)
        return sync.__enter__()

    yield begin
    for sync in running:
        sync.__exit__()


@pytest.fixture
def s3(node: RunningNode) -> Any:
    return node.client()


@pytest.fixture
def prefix(uri: str) -> str:
    return uri.removeprefix(f"s3://{BUCKET}/") + "/"


@pytest.fixture
def there(s3: Any, prefix: str) -> Callable[[], dict[str, bytes]]:
    """What S3 holds, as the node shows it."""

    def objects() -> dict[str, bytes]:
        pages = s3.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        keys = [each["Key"] for page in pages for each in page.get("Contents", ())]
        return {key.removeprefix(prefix): body(s3, key) for key in keys}

    return objects


def body(s3: Any, key: str) -> bytes:
    try:
        data: bytes = s3.get_object(Bucket=BUCKET, Key=key)["Body"].read()
    except s3.exceptions.NoSuchKey:
        return b"(gone)"
    return data


def puts(proxy: FaultyOrigin, prefix: str) -> list[str]:
    done = ("PutObject", "CompleteMultipartUpload")
    return [each.key.removeprefix(prefix) for each in proxy.requests if each.operation in done]


def write(folder: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def test_the_folder_is_restored_then_followed(
    start: Start, folder: Path, s3: Any, prefix: str, there: Callable[[], dict[str, bytes]], tmp_path: Path
) -> None:
    before = {f"checkpoint-{n}/model.bin": bytes([n]) * 100_000 for n in range(20)} | {"empty": b""}
    for name, data in before.items():
        s3.put_object(Bucket=BUCKET, Key=prefix + name, Body=data)
    ready = tmp_path / "run" / "ready"
    ready.parent.mkdir()
    ready.touch()
    sync = start("--ready-file", str(ready))
    until("the file that says so", ready.exists)
    assert files_of(folder) == before
    assert "21 files (2000000 bytes) restored" in sync.lines[-1]
    assert [line for line in sync.lines if "21 of 21 objects" in line], "no line of progress"
    assert not (folder / STAGE).exists()
    # Objects added to S3 after the start are not copied down; what changes here goes up.
    s3.put_object(Bucket=BUCKET, Key=f"{prefix}later", Body=b"x")
    write(folder, {"checkpoint-20/model.bin": b"new", "checkpoint-3/model.bin": b"changed"})
    (folder / "checkpoint-4" / "model.bin").unlink()
    wanted = before | {"checkpoint-20/model.bin": b"new", "checkpoint-3/model.bin": b"changed", "later": b"x"}
    del wanted["checkpoint-4/model.bin"]
    until("S3 is as the folder", lambda: there() == wanted)
    assert not (folder / "later").exists()
    assert sync.stop() == 0, sync.said
    assert "has all of" in sync.lines[-1]
    assert [line for line in sync.errors if "ending: " not in line] == []


def test_odd_names_empty_files_and_a_big_file_go_there_and_back(
    start: Start, folder: Path, front: FaultyOrigin, there: Callable[[], dict[str, bytes]], tmp_path: Path
) -> None:
    files = {
        "ünïcode/日本.pt": b"1",
        "with space/a b ": b"2",
        ".hidden/.x": b"3",
        "new\nline": b"4",
        "per%20cent+plus&amp;?#": b"5",
        "control\x01": b"6",
        "back\\slash'\"": b"7",
        "empty": b"",
        "big": os.urandom(1 << 20) * 70,
    }
    write(folder, files)
    (folder / "no" / "files").mkdir(parents=True)
    sync = start("--once", is_ready_awaited=False)
    assert sync.wait() == 0, sync.said
    assert there() == files
    assert len(front.seen("UploadPart")) > 1
    other = tmp_path / "other"
    sync = start("--no-follow", at=other)
    assert sync.wait() == 0, sync.said
    assert files_of(other) == files
    assert not (other / "no").exists()
    for name in files:
        assert (other / name).stat().st_mtime_ns == (folder / name).stat().st_mtime_ns, name


def test_what_is_no_file_is_passed_over_and_said(
    start: Start, folder: Path, there: Callable[[], dict[str, bytes]], tmp_path: Path
) -> None:
    write(folder, {"real/x.ckpt": b"x"})
    (tmp_path / "secret").write_bytes(b"s")
    (folder / "last.ckpt").symlink_to("real/x.ckpt")
    (folder / "out").symlink_to(tmp_path / "secret")
    (folder / "dir").symlink_to("real")
    (folder / "nowhere").symlink_to("gone")
    os.mkfifo(folder / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "socket"))
        (folder / os.fsdecode(b"\xff")).write_bytes(b"?")
        sync = start("--once", is_ready_awaited=False)
        assert sync.wait() == 0, sync.said
    assert there() == {"real/x.ckpt": b"x", "last.ckpt": b"x"}
    for name, fault in (
        ("out", "a link that leads out of the folder"),
        ("dir", "a link to a folder"),
        ("nowhere", "a link that leads nowhere"),
        ("pipe", "no regular file"),
        ("socket", "no regular file"),
        ("\\udcff", "not UTF-8"),
    ):
        assert any(f"'{name}' is passed over" in line and fault in line for line in sync.errors), (name, sync.said)


def test_names_that_no_file_can_have_stay_in_s3_and_lead_nowhere_else(
    start: Start, folder: Path, s3: Any, prefix: str, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    folder.mkdir()
    (folder / "link").symlink_to(outside)
    (folder / "dir").mkdir()
    bad = ["../evil", "a//b", "link/evil", "x/./y", "n" * 300, "dir", "fine/below"]
    for name in [*bad, "fine", "console-folder/"]:
        s3.put_object(Bucket=BUCKET, Key=prefix + name, Body=b"" if name.endswith("/") else b"x")
    sync = start("--no-follow", "--parallel", "1")
    assert sync.wait() == 0
    assert files_of(folder) == {"fine": b"x"}
    assert list(outside.iterdir()) == []
    assert not (tmp_path / "evil").exists()
    for name in bad:
        assert any(repr(name) in line and "stays in S3 only" in line for line in sync.errors), (name, sync.said)


def test_a_file_is_not_sent_while_a_process_has_it_open(
    start: Start, folder: Path, there: Callable[[], dict[str, bytes]]
) -> None:
    folder.mkdir()
    start()
    with (folder / "model.bin").open("wb") as file:
        file.write(b"half")
        file.flush()
        write(folder, {"after": b"a"})
        until("what was written later is there", lambda: there() == {"after": b"a"})
        file.write(b"whole")
    until("it is sent once it is closed", lambda: there().get("model.bin") == b"halfwhole")


def test_a_file_rewritten_all_the_time_is_never_torn_and_its_last_version_arrives(
    start: Start, folder: Path, behind: FaultyOrigin, there: Callable[[], dict[str, bytes]]
) -> None:
    folder.mkdir()
    sync = start()
    code = """
import sys, time
for n in range(1, 9):
    with open(sys.argv[1], "wb") as file:
        for _ in range(8):
            file.write(bytes([n]) * (1 << 18))
            file.flush()
            time.sleep(0.02)
    time.sleep(0.4)
"""
    writer = subprocess.Popen([sys.executable, "-c", code, str(folder / "model.bin")])
    seen: set[bytes] = set()

    def is_over() -> bool:
        if data := there().get("model.bin"):
            assert (len(data), len(set(data))) == (1 << 21, 1), "torn"
            seen.add(data[:1])
        return writer.poll() is not None and data == b"\x08" * (1 << 21)

    until("the last version", is_over)
    assert len(seen) > 1
    assert sync.stop() == 0


def test_a_log_is_sent_while_it_grows(start: Start, folder: Path, there: Callable[[], dict[str, bytes]]) -> None:
    folder.mkdir()
    sync = start()
    with (folder / "events.out.tfevents.1").open("wb", buffering=0) as log:
        log.write(b"one")
        until("the log", lambda: there() == {"events.out.tfevents.1": b"one"})
        log.write(b"two")
        assert sync.stop() == 0
    assert there() == {"events.out.tfevents.1": b"onetwo"}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_stock_dcp_saves_and_its_marker_comes_last_in_s3(
    start: Start,
    folder: Path,
    behind: FaultyOrigin,
    front: FaultyOrigin,
    prefix: str,
    tmp_path: Path,
    uri: str,
) -> None:
    folder.mkdir()
    sync = start()
    behind.forget()
    state = {f"t{n}": torch.rand(200_000) for n in range(6)}
    for step in (1, 2):
        writer = FileSystemWriter(folder / f"step-{step}", single_file_per_rank=False)
        save(state, storage_writer=writer, no_dist=True)
    assert sync.stop() == 0, sync.said
    markers = {f"step-{step}/.metadata" for step in (1, 2)}
    until("the origin has the markers", lambda: markers <= set(puts(behind, prefix)))
    for proxy in (front, behind):
        order = [name for name in puts(proxy, prefix) if not name.endswith(".tmp")]
        for step in (1, 2):
            ours = [name for name in order if name.startswith(f"step-{step}/")]
            assert len(ours) == 7
            assert ours[-1] == f"step-{step}/.metadata"
    again = start("--no-follow", at=tmp_path / "again")
    assert again.wait() == 0
    loaded = {name: torch.zeros(200_000) for name in state}
    load(loaded, checkpoint_id=tmp_path / "again" / "step-2", no_dist=True)
    assert all(torch.equal(loaded[name], state[name]) for name in state)


def test_folders_that_are_renamed_and_rotated_as_the_trainer_does(
    start: Start, folder: Path, front: FaultyOrigin, there: Callable[[], dict[str, bytes]], prefix: str
) -> None:
    folder.mkdir()
    sync = start()

    def files(step: int) -> dict[str, bytes]:
        names = ("model.safetensors", "optimizer.pt", "rng_state.pth", "trainer_state.json")
        return {f"checkpoint-{step}/{name}": f"{name} {step}".encode() for name in names}

    def save(step: int) -> None:
        write(folder, {f"tmp-{name}": data for name, data in files(step).items()})
        (folder / f"tmp-checkpoint-{step}").rename(folder / f"checkpoint-{step}")

    save(10)
    until("the first", lambda: there() == files(10))
    save(20)
    for name in files(10):
        (folder / name).unlink()
    (folder / "checkpoint-10").rmdir()
    until("the second alone", lambda: there() == files(20))
    done = [
        f"{each.operation} {each.key.removeprefix(prefix)}"
        for each in front.requests
        if each.operation in ("PutObject", "DeleteObject") and "tmp-" not in each.key
    ]
    assert {each.split()[1] for each in done[:3]} == set(files(10)) - {"checkpoint-10/trainer_state.json"}
    assert done[3] == "PutObject checkpoint-10/trainer_state.json"
    assert {each.split()[1] for each in done[4:7]} == set(files(20)) - {"checkpoint-20/trainer_state.json"}
    assert done[7:9] == ["PutObject checkpoint-20/trainer_state.json", "DeleteObject checkpoint-10/trainer_state.json"]
    assert len(done) == 12
    assert sync.stop() == 0


TRAINER = """
import sys, torch
from transformers import Trainer, TrainingArguments
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def forward(self, x, labels=None):
        y = self.layer(x)
        return {"loss": ((y - labels) ** 2).mean(), "logits": y}
data = [{"x": torch.rand(4), "labels": torch.rand(1)} for _ in range(32)]
arguments = TrainingArguments(
    sys.argv[1], max_steps=6, save_steps=2, save_total_limit=1, per_device_train_batch_size=1,
    use_cpu=True, report_to=[], disable_tqdm=True, logging_strategy="no",
)
Trainer(Model(), arguments, train_dataset=data).train()
"""


def test_hugging_faces_trainer_saves_and_rotates(
    start: Start,
    folder: Path,
    front: FaultyOrigin,
    behind: FaultyOrigin,
    there: Callable[[], dict[str, bytes]],
    prefix: str,
    tmp_path: Path,
) -> None:
    folder.mkdir()
    sync = start()
    behind.forget()
    done = subprocess.run([sys.executable, "-c", TRAINER, str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert sync.stop() == 0, sync.said
    assert there() == files_of(folder)
    assert {name.partition("/")[0] for name in files_of(folder)} == {"checkpoint-6"}
    until("the origin has the marker", lambda: "checkpoint-6/trainer_state.json" in puts(behind, prefix))
    for proxy in (front, behind):
        order = [name for name in puts(proxy, prefix) if name.startswith("checkpoint-6/")]
        assert len(order) == len(files_of(folder))
        assert order[-1] == "checkpoint-6/trainer_state.json"
    again = tmp_path / "again"
    assert start("--no-follow", at=again).wait() == 0
    assert files_of(again) == files_of(folder)


def test_sigterm_sends_what_is_left(
    start: Start, folder: Path, front: FaultyOrigin, there: Callable[[], dict[str, bytes]]
) -> None:
    folder.mkdir()
    sync = start()
    files = {f"s/{n}": bytes([n]) * 200_000 for n in range(30)} | {"s/.metadata": b"m"}
    write(folder, files)
    assert sync.stop() == 0, sync.said
    assert there() == files


def test_a_flush_that_cannot_end_says_what_is_left_where(
    start: Start, folder: Path, front: FaultyOrigin, there: Callable[[], dict[str, bytes]], uri: str
) -> None:
    folder.mkdir()
    sync = start("--flush-deadline", "2")
    with (folder / "open.bin").open("wb") as file:
        file.write(b"12345")
        file.flush()
        write(folder, {"done.bin": b"x"})
        until("the other", lambda: there() == {"done.bin": b"x"})
        assert sync.stop() == 5
    assert there() == {"done.bin": b"x"}
    assert sync.errors[0] == "tiergate: ending: 1 changes are sent first, for 2 s at most\n"
    assert sync.errors[1] == f"tiergate: 1 change is in {folder} only, 5 bytes: 'open.bin' (it is open for writing)\n"


def test_a_second_signal_ends_the_flush(start: Start, folder: Path, front: FaultyOrigin) -> None:
    folder.mkdir()
    gate = Gate()
    sync = start("--flush-deadline", "600")
    front.inject(Hold(gate), "PutObject", times=None)
    write(folder, {"held": b"x"})
    until("it is on its way", lambda: front.seen("PutObject"))
    sync.process.terminate()
    until("it flushes", lambda: any("ending: 1 changes" in line for line in sync.errors))
    assert sync.stop() == 5
    gate.release()
    assert "'held'" in sync.errors[-1]


@pytest.mark.parametrize("when", ["while it follows", "while it sends"])
def test_a_start_after_kill_9_sends_nothing_anew(
    start: Start, folder: Path, front: FaultyOrigin, there: Callable[[], dict[str, bytes]], prefix: str, when: str
) -> None:
    folder.mkdir()
    sync = start()
    files = {f"s/{n}": bytes([n]) * 50_000 for n in range(8)}
    write(folder, files)
    until("all is there", lambda: there() == files)
    gate = Gate()
    if when == "while it sends":
        front.inject(Hold(gate), "PutObject", times=None)
        write(folder, {"s/new": b"new"})
        until("it is on its way", lambda: prefix + "s/new" in [each.key for each in front.seen("PutObject")])
    sync.kill9()
    gate.release()
    front.heal()
    front.forget()
    (folder / "s/3").write_bytes(b"changed meanwhile")
    os.utime(folder / "s/4")  # the same bytes, but who knows
    sync = start()
    assert sync.stop() == 0
    # What was on its way may have arrived after its sender's death.
    assert [key for key in sorted(puts(front, prefix)) if key != "s/new"] == ["s/3", "s/4"]
    assert front.seen("GetObject") == []
    assert there() == files_of(folder)


def test_a_start_on_an_emptied_folder_restores_and_deletes_nothing(
    start: Start, folder: Path, front: FaultyOrigin, there: Callable[[], dict[str, bytes]]
) -> None:
    files = {f"s/{n}": bytes([n]) for n in range(5)}
    write(folder, files)
    sync = start()
    until("all is there", lambda: there() == files)
    sync.kill9()
    for name in files:
        (folder / name).unlink()
    sync = start()
    assert files_of(folder) == files
    assert sync.stop() == 0
    assert there() == files
    assert front.seen("DeleteObject") == []


def test_a_folder_that_went_deletes_nothing(
    start: Start, folder: Path, front: FaultyOrigin, there: Callable[[], dict[str, bytes]]
) -> None:
    files = {f"s/{n}": bytes([n]) for n in range(5)}
    write(folder, files)
    sync = start()
    until("all is there", lambda: there() == files)
    folder.rename(folder.with_name("elsewhere"))
    folder.mkdir()
    assert sync.wait() == 1
    assert "no longer the folder that it was" in sync.errors[-1]
    assert there() == files


def test_instances_with_a_name_do_not_collide(
    start: Start, there: Callable[[], dict[str, bytes]], environment: Environment, tmp_path: Path
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    write(one, {"model.bin": b"1", "gone": b"1"})
    write(two, {"model.bin": b"2", "gone": b"2"})
    first = start("--instance", "algo-1", at=one)
    second = start("--instance", "algo-2", at=two)
    all_of_it = {f"algo-{n}/{name}": str(n).encode() for n in (1, 2) for name in ("model.bin", "gone")}
    until("both are there", lambda: there() == all_of_it)
    (one / "gone").unlink()
    del all_of_it["algo-1/gone"]
    until("one deleted its own", lambda: there() == all_of_it)
    assert (first.stop(), second.stop()) == (0, 0)
    back = start("--instance", "algo-2", "--no-follow", at=tmp_path / "back")
    assert back.wait() == 0
    assert files_of(tmp_path / "back") == {"model.bin": b"2", "gone": b"2"}


def test_one_instances_deletes_leave_what_is_anothers(
    start: Start, there: Callable[[], dict[str, bytes]], tmp_path: Path
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    write(one, {"rank-0": b"0", "both": b"first"})
    first = start(at=one)
    until("the first is there", lambda: there() == {"rank-0": b"0", "both": b"first"})
    second = start(at=two)
    assert files_of(two) == {"rank-0": b"0", "both": b"first"}
    write(two, {"rank-1": b"1", "both": b"second"})
    until("the second is there", lambda: there() == {"rank-0": b"0", "rank-1": b"1", "both": b"second"})
    (one / "both").unlink()
    (one / "rank-0").unlink()
    until("its own is deleted", lambda: there() == {"rank-1": b"1", "both": b"second"})
    until("the other's is said to stay", lambda: any("'both'" in line and "stays" in line for line in first.errors))
    assert (first.stop(), second.stop()) == (0, 0)
    assert there() == {"rank-1": b"1", "both": b"second"}


def test_a_list_waits_for_what_another_instance_brings(
    start: Start, folder: Path, there: Callable[[], dict[str, bytes]], tmp_path: Path
) -> None:
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    index = json.dumps({"weight_map": {"a": names[0], "b": names[1]}}).encode()
    write(folder, {names[0]: b"a", "model.safetensors.index.json": index})
    first = start()
    until("what it can send", lambda: there() == {names[0]: b"a"})
    until("it says why", lambda: first.process.poll() is None and there().keys() == {names[0]})
    write(tmp_path / "other", {names[1]: b"b"})
    second = start("--once", at=tmp_path / "other", is_ready_awaited=False)
    assert second.wait() == 0
    until("the list", lambda: there().keys() == {*names, "model.safetensors.index.json"})
    assert first.stop() == 0


@pytest.mark.parametrize("fault", [Answer(503, "SlowDown"), Cut()], ids=["503", "cut"])
def test_s3_away_for_a_while(
    start: Start, folder: Path, front: FaultyOrigin, there: Callable[[], dict[str, bytes]], fault: Any
) -> None:
    folder.mkdir()
    sync = start()
    front.inject(fault, times=None)
    files = {f"s/{n}": bytes([n]) * 10 for n in range(20)} | {"s/.metadata": b"m"}
    write(folder, files)
    until("it is said", lambda: any("S3 does not answer" in line for line in sync.errors))
    asked = len(front.requests)
    front.heal()
    until("all is there", lambda: there() == files)
    assert any("S3 answers again" in line for line in sync.errors)
    assert asked < 60, "it asks all the time"
    assert sync.stop() == 0


def test_a_restore_waits_for_s3(start: Start, folder: Path, front: FaultyOrigin, s3: Any, prefix: str) -> None:
    s3.put_object(Bucket=BUCKET, Key=f"{prefix}x", Body=b"x")
    front.inject(Cut(), times=None)
    sync = start(is_ready_awaited=False)
    until("it is said", lambda: any("S3 does not answer" in line for line in sync.errors))
    assert not sync.is_ready
    front.heal()
    until("ready", lambda: sync.is_ready)
    assert files_of(folder) == {"x": b"x"}
    assert sync.stop() == 0


def test_a_restore_can_be_called_off(start: Start, folder: Path, front: FaultyOrigin, s3: Any, prefix: str) -> None:
    s3.put_object(Bucket=BUCKET, Key=f"{prefix}x", Body=b"x")
    front.inject(Answer(503, "SlowDown"), times=None)
    sync = start(is_ready_awaited=False)
    until("it is said", lambda: any("S3 does not answer" in line for line in sync.errors))
    assert sync.stop() == 1
    assert "is not restored" in sync.errors[-1]
    assert "called off" in sync.errors[-1]
    assert files_of(folder) == {}


def test_a_bucket_that_is_not_there_is_no_restore(start: Start, folder: Path) -> None:
    sync = start(to="s3://no-such-bucket-at-all/x", is_ready_awaited=False)
    assert sync.wait() == 1
    assert not sync.is_ready
    assert "NoSuchBucket" in sync.errors[-1]


def test_a_newer_file_here_is_sent_and_an_older_one_replaced(
    start: Start, folder: Path, there: Callable[[], dict[str, bytes]], tmp_path: Path
) -> None:
    write(folder, {"older": b"old", "newer": b"new"})
    assert start("--once", is_ready_awaited=False).wait() == 0
    other = tmp_path / "other"
    write(other, {"older": b"OLD", "newer": b"NEW"})
    os.utime(other / "older", ns=(1, 1))
    at_ns = (folder / "newer").stat().st_mtime_ns + 10**9
    os.utime(other / "newer", ns=(at_ns, at_ns))
    sync = start("--once", at=other, is_ready_awaited=False)
    assert sync.wait() == 0
    assert "1 newer here" in sync.said
    assert files_of(other) == there() == {"older": b"old", "newer": b"NEW"}


def test_markers_are_restored_last(start: Start, folder: Path, front: FaultyOrigin, s3: Any, prefix: str) -> None:
    names = ["latest", "s/.metadata", *(f"s/__{n}_0.distcp" for n in range(10))]
    for name in names:
        s3.put_object(Bucket=BUCKET, Key=prefix + name, Body=b"x")
    assert start("--no-follow").wait() == 0
    order = [each.key.removeprefix(prefix) for each in front.seen("GetObject")]
    assert sorted(order) == sorted(names)
    assert order[-2:] == ["s/.metadata", "latest"]


def test_once_ends_though_s3_refuses_something(
    start: Start, folder: Path, front: FaultyOrigin, there: Callable[[], dict[str, bytes]], prefix: str
) -> None:
    write(folder, {"good": b"g", "bad": b"b"})
    front.inject(Answer(403, "AccessDenied"), "PutObject", f"{prefix}bad", times=None)
    sync = start("--once")
    assert sync.wait() == 5
    assert there() == {"good": b"g"}
    assert any("'bad' cannot be sent: AccessDenied" in line for line in sync.errors), sync.said
    assert "1 change is in" in sync.errors[-1]


def test_within_a_program(
    environment: Environment, uri: str, folder: Path, s3: Any, prefix: str, there: Callable[[], dict[str, bytes]]
) -> None:
    s3.put_object(Bucket=BUCKET, Key=f"{prefix}before", Body=b"b")
    with FolderSync(folder, uri) as sync:
        assert files_of(folder) == {"before": b"b"}
        assert sync.restored.brought_count == 1
        write(folder, {"s/x": b"x"})
    assert there() == {"before": b"b", "s/x": b"x"}
    (folder / "open").touch()
    file = (folder / "open").open("wb")
    said: list[str] = []
    sync = FolderSync(folder, uri, flush_s=1.0, complain=said.append).__enter__()
    with file, pytest.raises(NotFlushedError, match="'open' \\(it is open for writing\\)"):
        sync.__exit__(None, None, None)
    assert said == ["ending: 1 changes are sent first, for 1 s at most"]


def test_a_watch_that_cannot_be_is_said_and_looks_go_on(tmp_path: Path) -> None:
    said: list[str] = []
    told = threading.Event()
    watcher = Watcher(tmp_path / "gone", threading.Event(), told.set, said.append)
    watcher.start()
    assert told.wait(30)
    assert not watcher.is_watching
    assert "is looked at every second" in said[0]


def test_many_files_at_once_outrun_the_notifications(
    start: Start, folder: Path, there: Callable[[], dict[str, bytes]], s3: Any, prefix: str
) -> None:
    """The kernel's queue holds 16,384 notifications: writing one file takes several of them."""
    folder.mkdir()
    sync = start("--parallel", "8")
    os.kill(sync.process.pid, 19)
    limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    names = [f"f{n}" for n in range(40)]
    for n in range(limit // len(names) + 100):
        for name in names:
            os.utime(folder / name) if n else (folder / name).touch()
    write(folder, {f"late/deep/{n}": b"late" for n in range(20)})
    os.kill(sync.process.pid, 18)
    wanted = files_of(folder)
    until("all is there", lambda: there() == wanted)
    (folder / "late/deep/7").unlink()
    del wanted["late/deep/7"]
    until("it goes on", lambda: there() == wanted)
    assert sync.stop() == 0


def test_it_rests_while_nothing_happens(start: Start, folder: Path, there: Callable[[], dict[str, bytes]]) -> None:
    folder.mkdir()
    sync = start()
    pause = threading.Event()
    with (folder / "open").open("wb") as file:
        file.write(b"x")
        file.flush()
        write(folder, {"x": b"x"})
        until("x", lambda: there() == {"x": b"x"})
        before_s = sync.cpu_s
        pause.wait(3)
        assert sync.cpu_s - before_s < 1.0
    assert sync.stop() == 0


def test_the_kernel_says_who_writes(tmp_path: Path) -> None:
    path = tmp_path / "x"

    def ask() -> bool | None:
        with path.open("rb") as file:
            return is_written(file.fileno())

    with path.open("wb") as file:
        file.write(b"x")
        assert ask() is True
    assert ask() is False
    with path.open("rb"):
        assert ask() is False
