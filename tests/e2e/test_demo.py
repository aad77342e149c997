"""`tiergate demo` as users start it: to its end, interrupted, and without its extra."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import tiergate
from tiergate.testing.etcd import needs_etcd

DEADLINE_S = 240.0

pytestmark = pytest.mark.timeout(2 * DEADLINE_S)
EVENTS = (
    "step 2 saved",
    "step 2 written back",
    "step 4 saved",
    "node killed",
    "node restarted",
    "step 4 restored",
    "step 4 written back",
    "step 2 restored",
    "step 4 restored",
)
CLUSTER_EVENTS = (
    "step 2 saved",
    "step 2 written back",
    "step 4 saved",
    "node a killed",
    "step 4 restored",
    "step 4 written back",
    "step 4 compared",
    "step 2 restored",
    "step 4 restored",
)
SHARED_MEMORY = Path("/dev/shm")


def environment(folder: Path) -> dict[str, str]:
    """The user's, with temporary files in `folder`, a wide console, and settings that must not reach the demo."""
    return os.environ | {
        "TMPDIR": str(folder),
        "COLUMNS": "160",
        "NO_COLOR": "1",
        "PYTHONPATH": str(Path(tiergate.__file__).parent.parent),
        "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
        "TIERGATE_LISTEN": "not an address",
        "HTTP_PROXY": "http://127.0.0.1:1",
        "http_proxy": "http://127.0.0.1:1",
    }


def demo(folder: Path, *words: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "tiergate", "demo", "--steps", "2", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=folder,
        env=environment(folder),
        text=True,
    )


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for word in (task / "children").read_text().split():
            found += [int(word), *descendants(int(word))]
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def demo_folders() -> set[Path]:
    return set(SHARED_MEMORY.glob("tiergate-demo-*"))


def shown(folder: Path, *words: str) -> tuple[str, list[list[str]]]:
    """What a demo that succeeds printed, and the rows of its table. It leaves nothing behind."""
    before = demo_folders()
    with demo(folder, *words) as running:
        out, err = running.communicate(timeout=DEADLINE_S)
    assert (running.returncode, err) == (0, ""), out + err
    table = out.partition("What was stored where")[2]
    rows = [[cell.strip() for cell in line.strip("│\n").split("│")] for line in table.splitlines() if "│" in line]
    outcomes = [row[5] for row in rows if row[0].endswith("restored")]
    assert len(set(outcomes)) == 1
    assert outcomes[0].endswith(" tensors equal")
    assert int(outcomes[0].split()[0]) > 100
    assert "also without the gateway" in table
    assert demo_folders() <= before
    assert list(folder.glob("tiergate*")) == []
    return out, rows


def test_demo_shows_its_table_and_succeeds(tmp_path: Path) -> None:
    _, rows = shown(tmp_path)
    assert [row[0] for row in rows] == list(EVENTS)
    killed = rows[EVENTS.index("node killed")]
    assert killed[2] == "2 of 9"
    assert killed[5] == "no .metadata yet"


@needs_etcd
def test_demo_of_three_nodes_loses_one_and_nothing_else(tmp_path: Path) -> None:
    out, rows = shown(tmp_path, "--nodes", "3")
    assert [row[0] for row in rows] == list(CLUSTER_EVENTS)
    killed = rows[CLUSTER_EVENTS.index("node a killed")]
    assert killed[1] == "RAM of b and c"
    assert int(killed[2]) >= 9  # the checkpoint, and what the client does around it
    assert killed[5] == "taken over"
    assert float(killed[4].removesuffix(" s")) > 1, "faster than its lease can end"
    assert re.search(r"MB from peer", out)
    assert rows[CLUSTER_EVENTS.index("step 4 compared")][2] == "9"


def test_demo_of_three_nodes_without_etcd_says_where_to_get_it_in_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tiergate", "demo", "--nodes", "3"],
        capture_output=True,
        text=True,
        env=environment(tmp_path) | {"PATH": str(tmp_path)},
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("tiergate: the demo of 3 nodes needs the etcd program on PATH: apt-get install etcd-server")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_demo_interrupted_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    before = demo_folders()
    with demo(tmp_path) as running:
        assert running.stdout is not None
        assert "start an S3 server" in running.stdout.readline()
        pids = descendants(running.pid)
        assert len(pids) >= 4, pids  # the origin, the node, its two children
        running.send_signal(number)
        _, err = running.communicate(timeout=DEADLINE_S)
    assert (running.returncode, err) == (130, "")
    assert [pid for pid in pids if is_alive(pid)] == []
    assert demo_folders() <= before
    assert list(tmp_path.glob("tiergate*")) == []


def test_demo_without_its_extra_says_what_to_install_in_one_line(tmp_path: Path) -> None:
    blocked = "import sys; sys.modules['moto'] = None; from tiergate.cli import main; sys.exit(main(['demo']))"
    done = subprocess.run(
        [sys.executable, "-c", blocked], capture_output=True, text=True, env=environment(tmp_path), check=False
    )
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("tiergate: the demo needs moto")
    assert line.endswith("install tiergate with its extra `demo`")
