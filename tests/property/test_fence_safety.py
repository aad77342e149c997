"""Promise P4 against a model of the origin: random commits, write-back as far as the fence allows, crashes in between.

At every instant: if a marker stands in the origin, every object of its set that was committed before it and not
deleted since stands there too, with the bytes that were acknowledged then, or when the marker was let go, or
last; and no member of its set is replaced while it stands.
"""

import asyncio
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tiergate.checkpoints.markers import ancestor_scopes, scope_of
from tiergate.directory.base import Intent
from tiergate.directory.embedded import EmbeddedDirectory
from tiergate.errors import FencedError
from tiergate.model import NO_BASE, UNKNOWN_BASE, Kind, ObjectName, Pending, Role, State
from tiergate.testing.directory_contract import make_version
from tiergate.writeback.fence import FenceMode, PendingView, blockers

BUCKET = "bucket"
KEYS = (
    "run/1/a",
    "run/1/b",
    "run/1/.metadata",
    "run/1/x.index.json",
    "run/1/large",
    "run/2/a",
    "run/2/.metadata",
    "run/.metadata",
    "run/pointer",
)
QUIET_S = 5.0


def role_of(key: str) -> Role:
    if key.endswith((".metadata", ".index.json")):
        return Role.MARKER
    if key.endswith("pointer"):
        return Role.POINTER
    return Role.LARGE if key.endswith("large") else Role.SMALL


def is_member(key: str, marker: str) -> bool:
    """Whether the marker speaks for the key. Markers of one scope do not speak for each other, and for no pointer."""
    if key == marker or not key.startswith(scope_of(marker)) or role_of(key) is Role.POINTER:
        return False
    return role_of(key) is not Role.MARKER or scope_of(key) != scope_of(marker)


@dataclass
class World:
    """The directory, the origin's objects (key → uid; the uid is the ETag too), and what was acknowledged when."""

    directory: EmbeddedDirectory
    mode: FenceMode
    origin: dict[str, str] = field(default_factory=dict)
    history: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    going: dict[str, Pending] = field(default_factory=dict)
    granted: dict[str, dict[str, str]] = field(default_factory=dict)
    """For each key, what was acknowledged last of every key when it was let go into the origin."""
    now_s: float = 100.0
    count: int = 0

    # -- clients
    async def put(self, key: str, lag: int) -> None:
        self.count += 1
        uid = f"{key}#{self.count}"
        committed = await self.directory.put(ObjectName(BUCKET, key), make_version(uid), await self.intent(key, lag))
        self.history.setdefault(key, []).append((committed.revision, uid))

    async def delete(self, key: str, lag: int) -> None:
        committed = await self.directory.delete(ObjectName(BUCKET, key), await self.intent(key, lag))
        if committed is not None:
            self.history.setdefault(key, []).append((committed.revision, ""))

    async def intent(self, key: str, lag: int) -> Intent:
        start_revision = max(0, await self.directory.revision() - lag)
        return Intent(role_of(key), start_revision, self.now_s, UNKNOWN_BASE)

    # -- write-back: the visible step in two, so that commits come in between
    async def begin(self, index: int) -> None:
        """Let a write have its turn, if the fence and what is on its way allow it."""
        pending = await self.directory.pending()
        if not pending:
            return
        write = pending[index % len(pending)]
        key = write.name.key
        if key in self.going:
            return
        write = await self.directory.begin(write.name, write.uid, self.origin.get(key, NO_BASE))
        view = PendingView(await self.directory.pending())
        if blockers(write, view, self.mode, self.now_s, QUIET_S) is not None:
            return
        markers = (other for other, going in self.going.items() if going.role is Role.MARKER)
        if write.base != NO_BASE and any(is_member(key, other) for other in markers):
            return
        if write.base != NO_BASE:
            await self.clear_way(write)
        self.going[key] = write
        if write.kind is Kind.PUT:
            self.granted[key] = {other: commits[-1][1] for other, commits in self.history.items()}

    async def clear_way(self, write: Pending) -> None:
        """Withdraw the markers whose set changes: of a deletion those of the innermost set, else all."""
        if write.role is Role.POINTER:
            return
        scopes = ancestor_scopes(write.name.key)[1 if write.role is Role.MARKER else 0 :]
        for group in [scopes] if write.kind is Kind.DELETE else [[scope] for scope in scopes]:
            for seen in await self.directory.standing_markers(BUCKET, group):
                assert seen.record is not None
                name = seen.record.name
                if name == write.name:
                    continue
                uid = seen.pending.uid if seen.pending else ""
                if seen.record.state is State.CLEAN and seen.record.version is not None:
                    uid = seen.record.version.uid
                    assert await self.directory.withdraw(name, uid, self.now_s) is not None
                self.origin.pop(name.key, None)
                await self.directory.withdrawn(name, uid)

    async def land(self, index: int, recorded: bool) -> None:
        """The origin does it; the answer may be lost with a crash."""
        if not self.going:
            return
        key, write = sorted(self.going.items())[index % len(self.going)]
        del self.going[key]
        if write.kind is Kind.DELETE:
            self.origin.pop(key, None)
        elif self.origin.get(key, NO_BASE) == write.base:
            if key in self.origin:
                standing = [other for other in self.origin if role_of(other) is Role.MARKER]
                assert not [other for other in standing if is_member(key, other)], f"{key} is replaced"
            self.origin[key] = write.uid
        else:
            return
        if recorded:
            etag = "" if write.kind is Kind.DELETE else write.uid
            await self.directory.persisted(write.name, write.uid, etag, self.now_s)

    async def settle(self) -> None:
        """Do all that is left, as time goes by."""
        for _ in range(400):
            while self.going:
                await self.land(0, True)
                self.check()
            pending = await self.directory.pending()
            if not pending:
                return
            for index in range(len(pending)):
                await self.begin(index)
                self.check()
                if self.going:
                    break
            else:
                self.now_s += QUIET_S
        pytest.fail(f"not settled: {await self.directory.pending()}")

    # -- the promise
    def check(self) -> None:
        for marker, uid in self.origin.items():
            if role_of(marker) is not Role.MARKER:
                continue
            committed = next(revision for revision, known in self.history[marker] if known == uid)
            for key, commits in self.history.items():
                if not is_member(key, marker):
                    continue
                before = [known for revision, known in commits if revision < committed]
                since = [known for revision, known in commits if revision > committed]
                if not before or not before[-1] or "" in since or self.lost_a_member(key, committed):
                    continue
                right = (before[-1], self.granted[marker][key], commits[-1][1])
                assert self.origin.get(key) in right, f"{marker} stands without {key}: {self.origin}"

    def lost_a_member(self, marker: str, revision: int) -> bool:
        """Whether the deletion of a member explains that this marker within a set is away."""
        return role_of(marker) is Role.MARKER and any(
            key.startswith(scope_of(marker)) and any(not uid for at, uid in commits if at > revision)
            for key, commits in self.history.items()
        )


Action = tuple[str, str | int, int]


OFTEN = ["put"] * 5 + ["begin"] * 5 + ["land"] * 3 + ["lose", "delete", "crash", "wait", "settle", "settle"]


@st.composite
def scripts(draw: st.DrawFn) -> list[Action]:
    """Commits to a few keys, so that they meet, between steps of write-back."""
    keys = draw(st.lists(st.sampled_from(KEYS), min_size=2, max_size=4, unique=True))
    found: list[Action] = []
    for _ in range(draw(st.integers(1, 30))):
        what, index = draw(st.sampled_from(OFTEN)), draw(st.integers(0, 3))
        on: str | int = draw(st.sampled_from(keys)) if what in ("put", "delete") else index
        found.append((what, on, index))
    return found


async def run(world: World, script: list[Action]) -> None:
    for action, what, how in script:
        if action in ("put", "delete"):
            await (world.put if action == "put" else world.delete)(str(what), how)
        elif action == "begin":
            await world.begin(int(what))
        elif action in ("land", "lose"):
            await world.land(int(what), recorded=action == "land")
        elif action == "crash":
            world.going.clear()
        elif action == "wait":
            world.now_s += QUIET_S
        else:
            await world.settle()
        world.check()
    await world.settle()
    expected = {key: commits[-1][1] for key, commits in world.history.items() if commits[-1][1]}
    assert world.origin == expected


@pytest.mark.parametrize("mode", [FenceMode.AUTO, FenceMode.STRICT])
@settings(max_examples=500, deadline=None)
@given(script=scripts())
@example(
    # An inner marker is put anew, and what it was is withdrawn, while an outer one that names it is pending.
    script=[
        ("put", "run/1/a", 0),
        ("put", "run/1/.metadata", 0),
        ("settle", 0, 0),
        ("put", "run/.metadata", 0),
        ("put", "run/1/a", 0),
        ("put", "run/1/.metadata", 0),
    ]
)
def test_no_false_complete_at_any_instant(mode: FenceMode, script: list[Action]) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        directory = EmbeddedDirectory.open(Path(folder), 2 << 20)
        try:
            asyncio.run(run(World(directory, mode), script))
        finally:
            directory.close()


def test_superseded_write_is_fenced_from_beginning(tmp_path: Path) -> None:
    """The model above relies on it: what was superseded never begins."""
    directory = EmbeddedDirectory.open(tmp_path, 2 << 20)
    world = World(directory, FenceMode.AUTO)

    async def scenario() -> None:
        await world.put("run/1/a", 0)
        write = (await directory.pending())[0]
        await world.put("run/1/a", 0)
        with pytest.raises(FencedError):
            await directory.begin(write.name, write.uid, NO_BASE)

    asyncio.run(scenario())
    directory.close()
