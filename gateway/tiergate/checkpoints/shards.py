"""The shards of the memory daemon's protocol: their keys, and which steps of them are whole. Pure.

A namespace's configuration is an object, and so is what each rank wrote of each step. A save ends with its metadata
shard, under the rank that follows those of the world; nothing else says how many ranks took part, since a namespace
stays as it is when a job goes on with more or fewer of them.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

HEAD_BYTES = 512
"""So much of a shard's beginning tells what it is."""

NAMESPACE = re.compile(r"[A-Za-z0-9_-]{1,255}")
_SHARD = re.compile(r"rank_(\d{1,18})/step_(\d{1,18})")
_CONFIGURATION = "namespace"
_NEWEST = "newest"
_METADATA_CLASS = b"torch.distributed.checkpoint.metadata"
_ARCHIVE = b"PK\x03\x04"


class ShardKind(StrEnum):
    """What a shard is by its first bytes."""

    METADATA = "metadata"
    """The pickled list of a DCP checkpoint."""
    DATA = "data"
    """Tensors as torch.save writes them, or nothing at all."""
    OPAQUE = "opaque"


def kind_of(head: bytes) -> ShardKind:
    """What a shard that begins with `head` is; `head` is all of it if it is shorter than HEAD_BYTES."""
    if not head or head.startswith(_ARCHIVE):
        return ShardKind.DATA
    is_pickle = head[:1] == b"\x80" and _METADATA_CLASS in head[:HEAD_BYTES]
    return ShardKind.METADATA if is_pickle else ShardKind.OPAQUE


@dataclass(frozen=True, slots=True)
class Namespace:
    """A namespace's configuration: its ranks as they were when it was created, the metadata's among them, and how many
    steps each rank keeps. `uid`: of the object that says so, another one after it was dropped and created again."""

    ranks_count: int
    steps_retained_count: int
    uid: str = ""


@dataclass(frozen=True, slots=True, order=True)
class ShardName:
    """What a rank wrote of a step."""

    namespace: str
    rank: int
    step: int


@dataclass(frozen=True, slots=True)
class Shard:
    """A shard that can be read. `written` is the place of its commit; `began` that of the first commit which others
    have replaced since (itself, where none has)."""

    name: ShardName
    kind: ShardKind
    written: int
    began: int

    def is_rewritten_since(self, other: "Shard") -> bool:
        """Whether it was there when the other one was written, and is no longer what it was then."""
        return self.began < other.written < self.written


S = TypeVar("S", bound=Shard)


def prefix_of(place: str, namespace: str) -> str:
    """Where all of a namespace lies."""
    return f"{place}{namespace}/"


def configuration_key(place: str, namespace: str) -> str:
    """The object that a namespace is known by."""
    return f"{prefix_of(place, namespace)}{_CONFIGURATION}"


def newest_key(place: str, namespace: str) -> str:
    """The object that says which step of a namespace became whole last."""
    return f"{prefix_of(place, namespace)}{_NEWEST}"


def is_configuration(place: str, key: str) -> bool:
    """Whether a key is that of a namespace's configuration."""
    namespace, _, rest = key.removeprefix(place).partition("/")
    return key.startswith(place) and bool(namespace) and rest == _CONFIGURATION


def rank_prefix(place: str, namespace: str, rank: int) -> str:
    """Where all that a rank wrote lies."""
    return f"{prefix_of(place, namespace)}rank_{rank}/"


def shard_key(place: str, name: ShardName) -> str:
    """Where a shard lies."""
    return f"{rank_prefix(place, name.namespace, name.rank)}step_{name.step}"


def shard_of(place: str, key: str) -> ShardName | None:
    """The reverse of `shard_key`; None for what is no shard's."""
    if not key.startswith(place):
        return None
    namespace, _, rest = key.removeprefix(place).partition("/")
    found = _SHARD.fullmatch(rest)
    return ShardName(namespace, int(found[1]), int(found[2])) if found else None


def whole_steps(shards: Iterable[Shard], ranks_count: int) -> list[int]:
    """The steps of a namespace that can be loaded, the greatest first.

    One is whole when its metadata shard is there, at rank m, and every rank below m, none of them replaced since. Where
    a namespace holds no list that is known as one, the highest rank of a step counts as its metadata's, if it is no
    lower than the configuration says.
    """
    steps: dict[int, dict[int, Shard]] = defaultdict(dict)
    for shard in shards:
        steps[shard.name.step][shard.name.rank] = shard
    is_listed = any(shard.kind is ShardKind.METADATA for ranks in steps.values() for shard in ranks.values())
    return sorted((step for step, ranks in steps.items() if _is_whole(ranks, ranks_count, is_listed)), reverse=True)


def _is_whole(ranks: Mapping[int, Shard], ranks_count: int, is_listed: bool) -> bool:
    metadata = _metadata_of(ranks, ranks_count, is_listed)
    if metadata is None:
        return False
    below = [ranks.get(rank) for rank in range(metadata.name.rank)] if metadata.name.rank < len(ranks) else [None]
    return all(shard is not None and not shard.is_rewritten_since(metadata) for shard in below)


def _metadata_of(ranks: Mapping[int, Shard], ranks_count: int, is_listed: bool) -> Shard | None:
    if is_listed:
        # A step may have been written again by a world of another size: its last list counts.
        lists = [shard for shard in ranks.values() if shard.kind is ShardKind.METADATA]
        return max(lists, key=lambda shard: shard.written, default=None)
    last = ranks[max(ranks)]
    return last if last.kind is not ShardKind.DATA and last.name.rank >= ranks_count - 1 else None


def surplus(shards: Collection[S], retained_count: int, newest_step: int | None) -> list[S]:
    """Of the shards of one rank those that go: all but the ones that it wrote last, and that of the step that became
    whole last, which stays until another is."""
    newest_first = sorted(shards, key=lambda shard: shard.written, reverse=True)
    return [shard for shard in newest_first[retained_count:] if shard.name.step != newest_step]


def left_by_others(shards: Collection[S], metadata: ShardName) -> list[S]:
    """What ranks beyond the world that wrote `metadata` hold of steps that rank 0 let go: nobody can load it, and those
    ranks, which a larger world had, will not write again."""
    kept = {shard.name.step: shard.written for shard in shards if shard.name.rank == 0}
    oldest = min(kept.values(), default=0)
    return [
        shard
        for shard in shards
        if shard.name.rank > metadata.rank and shard.name.step not in kept and shard.written < oldest
    ]
