"""A process that changes a directory until it is killed, and says on stdout what was acknowledged."""

import asyncio
import os
import random
import sys
from pathlib import Path

from tiergate.directory.embedded import EmbeddedDirectory
from tiergate.model import Kind, ObjectName, Role
from tiergate.testing.directory_contract import make_intent, make_version

KEYS_COUNT = 40


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


async def work(directory: EmbeddedDirectory, who: str, rng: random.Random) -> None:
    """`commit REVISION KEY UID` (no uid: a deletion) follows each commit that returned."""
    count = 0
    while True:
        count += 1
        marker = rng.random() < 0.2
        key = f"r/{rng.randrange(KEYS_COUNT)}/" + (".metadata" if marker else "x" * rng.choice([1, 600]))
        name = ObjectName("bucket", key)
        role = Role.MARKER if marker else Role.SMALL
        seen = await directory.get(name)
        choice = rng.random()
        if choice < 0.5 or seen.record is None:
            uid = f"{who}-{count}"
            committed = await directory.put(name, make_version(uid, count), make_intent(role))
            say(f"commit {committed.revision} {key} {uid}")
        elif choice < 0.6:
            deleted = await directory.delete(name, make_intent(role))
            if deleted is not None:
                say(f"commit {deleted.revision} {key} -")
        elif choice < 0.9 and seen.pending is not None:
            etag = "" if seen.pending.kind is Kind.DELETE else "o"
            await directory.persisted(name, seen.pending.uid, etag, 1.0)
        elif seen.record.version is not None:
            await directory.withdraw(name, seen.record.version.uid, 1.0)


if __name__ == "__main__":
    asyncio.run(work(EmbeddedDirectory.open(Path(sys.argv[1]), 16 << 20), sys.argv[2], random.Random(sys.argv[3])))
