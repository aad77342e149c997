"""Waking processes that sleep at a lock although it is free."""

import platform
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tiergate.directory.embedded import EmbeddedDirectory
from tiergate.lmdbwake import wake_waiters
from tiergate.testing.directory_contract import SHARD, put

SLEEPER = """
import ctypes, mmap, os, sys
descriptor = os.open(sys.argv[1], os.O_RDWR)
head = mmap.mmap(descriptor, 512)
word = ctypes.c_uint32.from_buffer(head, 256)
print("ready", flush=True)
ctypes.CDLL(None).syscall(int(sys.argv[2]), ctypes.byref(word), 0, 0, None, None, 0)
print("woken", flush=True)
"""
"""Sleeps at a word of the lock file, as a waiter does whose wake-up was lost."""

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the sleeper knows one futex number")


def test_wake_waiters_new_folder_does_nothing(tmp_path: Path) -> None:
    assert wake_waiters(tmp_path / "new") == 0


async def test_wake_waiters_idle_environment_stays_sound(tmp_path: Path) -> None:
    first = EmbeddedDirectory.open(tmp_path, 4 << 20)
    await put(first, SHARD, "v1")
    first.close()
    assert wake_waiters(tmp_path) == 0
    second = EmbeddedDirectory.open(tmp_path, 4 << 20)
    assert (await second.get(SHARD)).revision == 1
    second.close()


def test_wake_waiters_wakes_who_sleeps_at_a_free_lock(tmp_path: Path) -> None:
    lock = tmp_path / "lock.mdb"
    lock.write_bytes(bytes(4096))
    command = [sys.executable, "-c", SLEEPER, str(lock), "202"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as sleeper:
        assert sleeper.stdout is not None
        try:
            assert sleeper.stdout.readline() == "ready\n"
            deadline_s = time.monotonic() + 60
            while wake_waiters(tmp_path) == 0:
                assert time.monotonic() < deadline_s, "nobody slept there"
            assert sleeper.stdout.readline() == "woken\n"
        finally:
            sleeper.kill()
