"""Slab files and process leases."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tiergate.errors import InvariantError
from tiergate.shm import ProcessLease, SlabFile

HOLD = """
import sys
from pathlib import Path
from tiergate.shm import ProcessLease
lease = ProcessLease.acquire(Path(sys.argv[1]))
sys.stdout.write(lease.token + "\\n")
sys.stdout.flush()
sys.stdin.read()
"""


def test_lease_of_killed_process_is_dead(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as child:
        assert child.stdout is not None
        token = child.stdout.readline().strip()
        assert ProcessLease.is_alive(tmp_path, token)
        ProcessLease.sweep(tmp_path)
        assert ProcessLease.is_alive(tmp_path, token)
        child.kill()
        child.wait()
    assert not ProcessLease.is_alive(tmp_path, token)
    ProcessLease.sweep(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_lease_released_is_dead_and_tokens_differ(tmp_path: Path) -> None:
    one, two = ProcessLease.acquire(tmp_path), ProcessLease.acquire(tmp_path)
    assert one.token != two.token
    one.release()
    assert not ProcessLease.is_alive(tmp_path, one.token)
    assert ProcessLease.is_alive(tmp_path, two.token)
    two.release()
    assert not ProcessLease.is_alive(tmp_path, "never-was")


def test_lease_check_by_two_at_once_does_not_look_alive(tmp_path: Path) -> None:
    (tmp_path / "dead").touch()
    descriptor = os.open(tmp_path / "dead", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)  # Another process is just checking.
    assert not ProcessLease.is_alive(tmp_path, "dead")
    os.close(descriptor)


def test_lease_swept_before_it_was_locked_tries_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fcntl.flock
    swept: list[int] = []

    def flock(descriptor: int, operation: int) -> None:
        if operation == fcntl.LOCK_EX and not swept:
            swept.append(descriptor)
            ProcessLease.sweep(tmp_path)
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    lease = ProcessLease.acquire(tmp_path)
    assert swept
    assert ProcessLease.is_alive(tmp_path, lease.token)
    lease.release()


def test_slabs_written_by_one_mapping_are_read_by_another(tmp_path: Path) -> None:
    one = SlabFile(tmp_path / "slabs", 1 << 20)
    one.grow(0, 8192)
    two = SlabFile(tmp_path / "slabs", 1 << 20, writable=False)
    one.view(4096, 5)[:] = b"hello"
    assert bytes(two.view(4096, 5)) == b"hello"
    assert two.view(0, 1).readonly
    assert one.allocated_bytes >= 8192
    with pytest.raises(InvariantError):
        one.view((1 << 20) - 1, 2)
    kept = one.view(4096, 5)
    one.close()
    two.close()
    assert bytes(kept) == b"hello"


def test_slabs_reopened_larger_keep_their_bytes(tmp_path: Path) -> None:
    one = SlabFile(tmp_path / "slabs", 8192)
    one.grow(0, 8192)
    one.view(0, 2)[:] = b"ab"
    one.close()
    two = SlabFile(tmp_path / "slabs", 16384)
    two.grow(0, 16384)
    assert bytes(two.view(0, 2)) == b"ab"
    two.close()


def test_guest_maps_the_file_as_long_as_it_is_and_keeps_nothing_else_of_it(tmp_path: Path) -> None:
    path = tmp_path / "slabs"
    mine = SlabFile(path, 4 << 20)
    mine.grow(0, 4 << 20)
    before = len(os.listdir("/proc/self/fd"))
    guest = SlabFile(path, 1 << 20, made=True)
    assert guest.size_bytes == 4 << 20
    guest.view(3 << 20, 3)[:] = b"abc"
    assert bytes(mine.view(3 << 20, 3)) == b"abc"
    with pytest.raises(OSError, match="shorter"):
        SlabFile(path, 5 << 20, made=True)
    guest.close()
    del guest
    assert len(os.listdir("/proc/self/fd")) == before
    mine.close()
