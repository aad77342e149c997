"""Waking those who sleep at LMDB's locks after a process was killed.

Who unlocks a contended mutex wakes one waiter. A waiter killed between waking and locking takes that with it: another
process may have locked meanwhile, so neither glibc nor the kernel's clean-up of robust mutexes passes it on, and the
other waiters sleep until the mutex is contended again, however long it has been free. Whoever starts in place of the
dead therefore wakes them all; each looks at the mutex and takes it or goes back to sleep properly.

https://man7.org/linux/man-pages/man2/futex.2.html
"""

import ctypes
import mmap
import os
import platform
from pathlib import Path

_FUTEX_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98}
_FUTEX_WAKE = 1
_ALL = 2**31 - 1
_WORD_BYTES = 4
_HEAD_BYTES = 512
"""More than the part of the lock file before the readers' table, where the mutexes are. Waking at a word that is none
does nothing, so that their exact places need not be known."""


def wake_waiters(folder: Path) -> int:
    """Make everybody look again who waits for a lock of the environment in `folder`; how many there were.

    Before this process opens the environment only: closing a descriptor of the lock file drops the POSIX locks
    that LMDB holds on it for the process. Does nothing where there is no environment yet, or no futex.
    """
    number = _FUTEX_NUMBERS.get(platform.machine())
    try:
        descriptor = os.open(folder / "lock.mdb", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return 0
    try:
        if number is None or os.fstat(descriptor).st_size < _HEAD_BYTES:
            return 0
        with mmap.mmap(descriptor, _HEAD_BYTES) as head:
            return _wake(number, head)
    finally:
        os.close(descriptor)


def _wake(number: int, head: mmap.mmap) -> int:
    libc = ctypes.CDLL(None)
    found = 0
    for offset in range(0, _HEAD_BYTES, _WORD_BYTES):
        word = ctypes.c_uint32.from_buffer(head, offset)
        found += max(0, libc.syscall(number, ctypes.byref(word), _FUTEX_WAKE, _ALL, None, None, 0))
        del word
    return found
