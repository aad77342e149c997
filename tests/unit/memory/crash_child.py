"""A process that works on a memory folder until it is killed, and writes down what it committed.

Usage: crash_child.py FOLDER JOURNAL SEED. The journal stands for the directory: a line is appended in one
write before the memory is told to confirm or after which it is told to drop. A dot goes to standard output
for each turn.
"""

import os
import random
import sys
from pathlib import Path

from tiergate import model
from tiergate.clock import SystemClock
from tiergate.errors import MemoryFullError
from tiergate.memory.memory import Memory, MemoryLimits
from tiergate.model import Body

BLOCK = 4096
LIMITS = MemoryLimits((2 << 20) + 256 * BLOCK, 2 << 20, 16 * BLOCK)


def content(uid: str, size_bytes: int) -> bytes:
    return random.Random(uid).randbytes(size_bytes)


class Worker:
    def __init__(self, folder: Path, journal: Path, seed: int) -> None:
        self.memory = Memory.open(folder, LIMITS, SystemClock())
        self.journal = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self.random = random.Random(seed)
        self.name = f"{seed}-{os.getpid()}"
        self.number = 0
        self.mine: list[tuple[str, str]] = []

    def commit(self, *words: object) -> None:
        os.write(self.journal, (" ".join(map(str, words)) + "\n").encode())

    def turn(self) -> None:
        self.number += 1
        uid, holder = f"b{self.name}-{self.number}", f"v{self.name}-{self.number}"
        size_bytes = self.random.choice([0, 100, BLOCK, 3 * BLOCK + 17, 20 * BLOCK])
        try:
            self.put(uid, holder, size_bytes)
        except MemoryFullError:
            self.drop_one()
        if len(self.mine) > 6:
            self.drop_one()
        if self.random.random() < 0.5:
            self.fill()
        if self.random.random() < 0.1:
            self.memory.reap()

    def put(self, uid: str, holder: str, size_bytes: int) -> None:
        if self.random.random() < 0.3:
            receiving = self.memory.receive_unsized(uid, holder, size_bytes)
        else:
            receiving = self.memory.receive(uid, size_bytes, holder)
        data = content(uid, size_bytes)
        try:
            for start in range(0, size_bytes, 5000):
                receiving.write(data[start : start + 5000])
            if self.random.random() < 0.2:
                receiving.abort()
                return
            body = receiving.seal()
        except MemoryFullError:
            receiving.abort()
            raise
        self.commit("put", holder, uid, body.size_bytes)
        self.memory.confirm(holder, [uid])
        self.mine.append((holder, uid))
        if self.random.random() < 0.3:
            copy = f"{holder}-copy"
            assert self.memory.hold(uid, copy, dirty=True)
            self.commit("put", copy, uid, body.size_bytes)
            self.memory.confirm(copy)
            self.mine.append((copy, uid))

    def drop_one(self) -> None:
        if self.mine:
            holder, uid = self.mine.pop(self.random.randrange(len(self.mine)))
            with_pin = self.memory.pin(uid)
            self.commit("drop", holder, uid, 0)
            self.memory.drop(holder, [uid])
            if with_pin is not None:
                with_pin.release()

    def fill(self) -> None:
        """Both children fill the same bodies, which nobody ever puts into the journal."""
        body = Body(f"shared-{self.random.randrange(4)}", 6 * BLOCK)
        index = self.random.randrange(6)
        try:
            receiving = self.memory.receive_block(body, index, "fills")
        except MemoryFullError:
            return
        if receiving is not None:
            receiving.write(content(body.uid, body.size_bytes)[index * BLOCK : (index + 1) * BLOCK])
            receiving.seal()


def main() -> None:
    model.BLOCK_BYTES = BLOCK
    worker = Worker(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
    while True:
        worker.turn()
        os.write(1, b".")


if __name__ == "__main__":
    main()
