"""What would be lost if memory vanished: of a node, of all nodes of a zone, or of all (promise P9)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tiergate.model import Kind, Pending, Role

ScopesOf = Callable[[str], Sequence[str]]
"""The prefixes whose markers speak for a key (`checkpoints.markers.ancestor_scopes`)."""


@dataclass(frozen=True, slots=True)
class Unpersisted:
    """A write that the origin lacks, and the living nodes whose memory has it."""

    write: Pending
    nodes: frozenset[str]


@dataclass(frozen=True, slots=True)
class Loss:
    """What would go. `sets_count`: checkpoints whose marker was acknowledged, and that would no longer be whole.
    `oldest_s`: when the oldest of it was committed, None for nothing. `parked_count` and `parked_bytes`: what policy
    keeps in memory only, in none of the other numbers."""

    objects_count: int = 0
    size_bytes: int = 0
    deletions_count: int = 0
    sets_count: int = 0
    oldest_s: float | None = None
    parked_count: int = 0
    parked_bytes: int = 0

    @property
    def is_nothing(self) -> bool:
        """Whether nothing would go."""
        return not (self.objects_count or self.deletions_count or self.parked_count)


@dataclass(frozen=True, slots=True)
class Losses:
    """What would be lost with all memory; with one node's, by its name; with one zone's, by its name (nodes without a
    zone fail alone); nodes and zones with nothing to lose are absent. `gone`: what no living node has already."""

    memory: Loss
    nodes: Mapping[str, Loss]
    zones: Mapping[str, Loss]
    gone: Loss


def losses(found: Iterable[Unpersisted], zone_of: Mapping[str, str], scopes_of: ScopesOf) -> Losses:
    """Take time in proportion to the writes. `zone_of`: the zone of each living node, empty for none."""
    writes = list(found)
    markers = {
        (each.write.name.bucket, scopes_of(each.write.name.key)[0])
        for each in writes
        if each.write.role is Role.MARKER and each.write.kind is Kind.PUT and not each.write.parked
    }
    memory, gone = _Sum(), _Sum()
    nodes: dict[str, _Sum] = {}
    zones: dict[str, _Sum] = {}
    for each in writes:
        bucket, key = each.write.name.bucket, each.write.name.key
        torn = {(bucket, scope) for scope in scopes_of(key)} & markers
        if not each.nodes:
            gone.add(each.write, torn)
            continue
        memory.add(each.write, torn)
        if len(each.nodes) == 1:
            nodes.setdefault(next(iter(each.nodes)), _Sum()).add(each.write, torn)
        zones_of_it = {zone_of.get(node, "") for node in each.nodes}
        if len(zones_of_it) == 1 and "" not in zones_of_it:
            zones.setdefault(next(iter(zones_of_it)), _Sum()).add(each.write, torn)
    return Losses(
        memory.loss,
        {name: each.loss for name, each in nodes.items()},
        {name: each.loss for name, each in zones.items()},
        gone.loss,
    )


@dataclass(slots=True)
class _Sum:
    objects_count: int = 0
    size_bytes: int = 0
    deletions_count: int = 0
    oldest_s: float | None = None
    parked_count: int = 0
    parked_bytes: int = 0
    torn: set[tuple[str, str]] = field(default_factory=set)

    def add(self, write: Pending, torn: set[tuple[str, str]]) -> None:
        if write.parked:
            self.parked_count += 1
            self.parked_bytes += write.size_bytes
            return
        self.torn |= torn
        if write.kind is Kind.DELETE:
            self.deletions_count += 1
        else:
            self.objects_count += 1
            self.size_bytes += write.size_bytes
        self.oldest_s = write.committed_s if self.oldest_s is None else min(self.oldest_s, write.committed_s)

    @property
    def loss(self) -> Loss:
        return Loss(
            self.objects_count,
            self.size_bytes,
            self.deletions_count,
            len(self.torn),
            self.oldest_s,
            self.parked_count,
            self.parked_bytes,
        )
