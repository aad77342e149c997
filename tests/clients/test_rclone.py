"""rclone as a client: copy, sync, check, list, move, purge, and big files in parts."""

import os
from collections.abc import Callable
from hashlib import md5
from pathlib import Path

import pytest
from tests.clients.conftest import BUCKET, Readers, Run

pytestmark = pytest.mark.client("rclone")

MIB = 1 << 20
PARTS = ("--s3-upload-cutoff", "5Mi", "--s3-chunk-size", "5Mi")

Rclone = Callable[..., bytes]


@pytest.fixture
def rclone(run: Run, monkeypatch: pytest.MonkeyPatch) -> Rclone:
    """Runs rclone with the words given; `tg:` is the node, and nothing is read from a file."""
    remote = {"TYPE": "s3", "PROVIDER": "Other", "ENV_AUTH": "true", "REGION": "us-east-1"}
    for name, value in remote.items():
        monkeypatch.setenv(f"RCLONE_CONFIG_TG_{name}", value)
    monkeypatch.setenv("RCLONE_CONFIG", "")

    def call(*words: str, stdin: bytes = b"", status: int = 0) -> bytes:
        monkeypatch.setenv("RCLONE_CONFIG_TG_ENDPOINT", os.environ["AWS_ENDPOINT_URL"])
        return run("rclone", *words, stdin=stdin, status=status)

    return call


def test_rclone_copies_checks_lists_syncs_and_purges(
    rclone: Rclone, prefix: str, readers: Readers, tmp_path: Path
) -> None:
    root = f"tg:{BUCKET}/{prefix}"
    tree = tmp_path / "tree"
    files = {"a b+c.bin": os.urandom(12 * MIB), "empty": b"", "deep/er/файл.txt": b"text", "x%20y": b"percent"}
    for name, body in files.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes(body)
    rclone("copy", *PARTS, str(tree), f"{root}/tree")
    (tree / "x%20y").unlink()
    (tree / "new").write_bytes(b"new")
    rclone("sync", *PARTS, str(tree), f"{root}/tree")
    expected = files | {"new": b"new"}
    del expected["x%20y"]
    for place, _ in enumerate(readers()):
        rclone("check", str(tree), f"{root}/tree")  # by MD5, which rclone keeps as metadata of what it sent in parts
        for version in ("1", "2"):
            lines = rclone(
                "lsf", "-R", "--files-only", "--format", "ps", "--s3-list-version", version, f"{root}/tree"
            ).decode()
            assert set(lines.splitlines()) == {f"{name};{len(body)}" for name, body in expected.items()}
        target = tmp_path / str(place)
        rclone("copy", f"{root}/tree", str(target))
        assert {str(p.relative_to(target)): p.read_bytes() for p in target.rglob("*") if p.is_file()} == expected
    rclone("delete", f"{root}/tree/deep")
    assert rclone("lsf", "-R", "--files-only", f"{root}/tree").decode().splitlines() == ["a b+c.bin", "empty", "new"]
    rclone("purge", f"{root}/tree")
    assert rclone("lsf", "-R", root) == b""


def test_rclone_streams_copies_and_moves_big_files(
    rclone: Rclone, prefix: str, readers: Readers, tmp_path: Path
) -> None:
    root, big = f"tg:{BUCKET}/{prefix}", os.urandom(17 * MIB + 3)
    (tmp_path / "big").write_bytes(big)
    rclone("copyto", *PARTS, str(tmp_path / "big"), f"{root}/first")
    rclone("moveto", f"{root}/first", f"{root}/moved")
    rclone("copyto", "--s3-copy-cutoff", "5Mi", f"{root}/moved", f"{root}/copied")  # in parts too
    rclone("rcat", *PARTS, f"{root}/streamed", stdin=big)
    digest = md5(big, usedforsecurity=False).hexdigest()
    for _ in readers():
        assert rclone("lsf", root).decode().splitlines() == ["copied", "moved", "streamed"]
        for name in ("copied", "moved", "streamed"):
            assert rclone("cat", f"{root}/{name}") == big
        assert (
            rclone("cat", "--offset", str(5 * MIB - 10), "--count", "20", f"{root}/moved")
            == (big[5 * MIB - 10 : 5 * MIB + 10])
        )
        assert rclone("md5sum", f"{root}/moved").decode().split()[0] == digest
    rclone("deletefile", f"{root}/moved")
    assert rclone("lsf", root).decode().splitlines() == ["copied", "streamed"]
