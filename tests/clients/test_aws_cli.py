"""The AWS command line: cp, sync, ls, mv and rm."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.clients.conftest import BUCKET

MIB = 1 << 20
Environment = Callable[[], dict[str, str]]


def test_aws_cli_copies_syncs_lists_moves_and_removes(
    environment: Environment, prefix: str, cold: Callable[[], None], tmp_path: Path
) -> None:
    root = f"s3://{BUCKET}/{prefix}"
    source = tmp_path / "source"
    files = {"a b+c.bin": os.urandom(9 * MIB), "empty": b"", "deep/er/файл.txt": b"text", "x%20y": b"percent"}
    for name, body in files.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(body)

    def aws(*words: str) -> str:
        command = [str(Path(sys.executable).parent / "aws"), "s3", *words]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def same(folder: Path) -> bool:
        found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        return found == files

    aws("sync", str(source), f"{root}/tree")
    assert aws("sync", str(source), f"{root}/tree") == ""
    aws("cp", str(source / "a b+c.bin"), f"{root}/one.bin")
    aws("mv", f"{root}/one.bin", f"{root}/two.bin")
    assert [line.split()[-1] for line in aws("ls", f"{root}/").splitlines()] == ["tree/", "two.bin"]
    assert len(aws("ls", "--recursive", f"{root}/tree/").splitlines()) == len(files)
    aws("sync", f"{root}/tree", str(tmp_path / "warm"))
    assert same(tmp_path / "warm")
    cold()
    aws("sync", f"{root}/tree", str(tmp_path / "cold"))
    assert same(tmp_path / "cold")
    assert aws("sync", str(source), f"{root}/tree") == ""
    aws("rm", "--recursive", f"{root}/tree")
    assert [line.split()[-1] for line in aws("ls", "--recursive", f"{root}/").splitlines()] == [f"{prefix}/two.bin"]
