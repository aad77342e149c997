"""s5cmd: copies in parts, syncs, pipes, lists, moves and removes with wildcards."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from urllib.request import urlopen

import pytest
from tests.clients.conftest import BUCKET, Readers, Run

pytestmark = pytest.mark.client("s5cmd")

MIB = 1 << 20
FILES = {"a b+c.bin": os.urandom(70_000), "empty": b"", "deep/er/файл.txt": b"text", "x%20y": b"percent"}

OLD = (10**9, 10**9)
"""What lies there longer than its copy need not be synced again."""

S5cmd = Callable[..., bytes]


@pytest.fixture
def s5cmd(run: Run, monkeypatch: pytest.MonkeyPatch) -> S5cmd:
    """Runs s5cmd with the words given. It knows no AWS_ENDPOINT_URL, but has a variable of its own."""

    def call(*words: str, stdin: bytes = b"", status: int = 0) -> bytes:
        monkeypatch.setenv("S3_ENDPOINT_URL", os.environ["AWS_ENDPOINT_URL"])
        return run("s5cmd", *words, stdin=stdin, status=status)

    return call


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, body in FILES.items():
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)
        os.utime(path, OLD)
    return tmp_path / "tree"


def listed(s5cmd: S5cmd, pattern: str) -> dict[str, int]:
    """Keys and sizes below a pattern."""
    found = (json.loads(line) for line in s5cmd("--json", "ls", pattern).splitlines())
    return {each["key"]: each["size"] for each in found}


def test_s5cmd_copies_syncs_lists_and_removes_trees(
    s5cmd: S5cmd, prefix: str, readers: Readers, tree: Path, tmp_path: Path
) -> None:
    root = f"s3://{BUCKET}/{prefix}"
    s5cmd("cp", f"{tree}/", f"{root}/tree/")
    assert s5cmd("sync", f"{tree}/", f"{root}/tree/") == b""
    (tree / "empty").write_bytes(b"not any more")
    assert len(s5cmd("sync", f"{tree}/", f"{root}/tree/").splitlines()) == 1
    expected = FILES | {"empty": b"not any more"}
    for place, _ in enumerate(readers()):
        assert listed(s5cmd, f"{root}/tree/*") == {f"{root}/tree/{name}": len(body) for name, body in expected.items()}
        target = tmp_path / str(place)
        s5cmd("cp", f"{root}/tree/*", f"{target}/")
        assert {str(p.relative_to(target)): p.read_bytes() for p in target.rglob("*") if p.is_file()} == expected
    s5cmd("rm", f"{root}/tree/*")
    assert b"no object found" in s5cmd("ls", f"{root}/tree/*", status=1)


def test_s5cmd_copies_big_files_in_parts_and_moves_them(
    s5cmd: S5cmd, prefix: str, readers: Readers, tmp_path: Path
) -> None:
    root, big = f"s3://{BUCKET}/{prefix}", os.urandom(17 * MIB + 3)
    source, target = tmp_path / "big", tmp_path / "got"
    source.write_bytes(big)
    s5cmd("cp", "--part-size", "5", "--content-type", "x/y", str(source), f"{root}/big")
    s5cmd("cp", f"{root}/big", f"{root}/copy")
    s5cmd("mv", f"{root}/copy", f"{root}/moved")
    s5cmd("pipe", f"{root}/piped", stdin=big[:100_000])
    for _ in readers():
        assert listed(s5cmd, f"{root}/*") == {
            f"{root}/big": len(big),
            f"{root}/moved": len(big),
            f"{root}/piped": 100_000,
        }
        for name in ("big", "moved"):
            s5cmd("cp", "--part-size", "5", f"{root}/{name}", str(target))
            assert target.read_bytes() == big
        assert s5cmd("cat", f"{root}/piped") == big[:100_000]
        assert json.loads(s5cmd("head", f"{root}/big"))["content_type"] == "x/y"
        with urlopen(s5cmd("presign", "--expire", "60s", f"{root}/piped").decode().strip(), timeout=10) as answer:
            assert answer.read() == big[:100_000]
