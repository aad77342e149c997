"""Finds the sets among keys, and what each must hold. Pure: bytes come through the caller's `read`.

What is recognised, in the order of the rules:

1. A folder that a layout knows by name (`checkpoint-500`, `iter_0000010`, …) is one set with all that is below it.
2. Elsewhere the folder of a marker, a list or a shard is a set. A folder of shards without a marker below a set of the
   same layout belongs to that one; other sets below a set are sets of their own, and no members of it.
3. A safetensors or .ckpt file that is in no set is one by itself.

A pointer belongs to no set. Which layouts there are, and what each goes by, is the table in `layouts`.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from tiergate.checkpoints import lists
from tiergate.checkpoints.layouts import (
    CUSTOM,
    LAYOUTS,
    Sight,
    file_layout_of,
    file_of,
    folders_of,
    home_of,
    is_list,
    is_pointer_of,
    layout_named,
    parent_of,
    ranks_of,
    role_of,
    root_of,
    sights_of,
    step_of,
    tiered_root_of,
)
from tiergate.checkpoints.lists import DamagedSetError, pointed_by
from tiergate.checkpoints.markers import STAGING_SUFFIX, Markers, scope_of
from tiergate.checkpoints.sets import Manifest, Member, ReadBody, SetName
from tiergate.model import ObjectName, Role

__all__ = ["DamagedSetError", "around", "is_in", "manifest_of", "pointed_by", "set_prefix_of", "sets_of"]


def sets_of(bucket: str, keys: Iterable[str], markers: Markers) -> list[SetName]:
    """All sets among the keys, also those without a marker yet: the newest step first, then those without a step. Of a
    set that is there in part, what is not among the keys is not known: give all that lies under a run."""
    found = _Finding(bucket, markers)
    for key in keys:
        found.see(key)
    return sorted(found.names(), key=lambda name: (name.step is None, -(name.step or 0), name.prefix))


def is_in(name: SetName, key: str) -> bool:
    """Whether a key is under a set's prefix. (A tiered checkpoint of SageMaker has a folder for each rank; its prefix
    is that of rank 0.)"""
    if not name.prefix.endswith("/") and name.prefix:
        return key == name.prefix
    return key.startswith(name.prefix) or home_of(key).startswith(name.prefix)


def around(name: SetName) -> str:
    """The prefix under which all lies that tells of a set: its own; the folder around it where a pointer there may
    speak for it, or where other ranks have folders of their own."""
    if ranks := ranks_of(name.prefix):
        return ranks
    layout = layout_named(name.layout)
    if name.marker or layout is None or not layout.pointers:
        return name.prefix
    return scope_of(name.prefix[:-1])


def set_prefix_of(key: str, run_prefix: str) -> str:
    """The set that an object of a run belongs to: `run_prefix` and the first path component below it, with its slash;
    of a tiered checkpoint of SageMaker its own prefix. "" for an object right in the run, or elsewhere."""
    run = run_prefix if run_prefix.endswith("/") or not run_prefix else run_prefix + "/"
    if not key.startswith(run):
        return ""
    tiered = tiered_root_of(key)
    return tiered if len(tiered) > len(run) and tiered.startswith(run) else key[: key.find("/", len(run)) + 1]


def manifest_of(name: SetName, sizes: Mapping[str, int], read: ReadBody) -> Manifest:
    """What a set must hold: itself by its own lists, and whatever lies there that no list speaks of.

    `sizes`: of the objects under the set's prefix, staged ones too; of a layout that only pointers speak for
    (DeepSpeed, Ray, older Megatron) also of what lies in the folder around it. The name that comes back has the
    marker as its content tells it: none for one that is there before the end (Orbax), a pointer's key where only that
    says that the set is whole.

    Raises:
        DamagedSetError: a marker, a list or a head cannot be read as what it should be.
    """
    return _Surveying(name, sizes, read).manifest()


@dataclass(slots=True)
class _Root:
    """A prefix that is a set's. `marks`: of each layout seen there, the surest sight and the marker's place and key."""

    prefix: str
    layouts: dict[str, tuple[Sight, int, str]] = field(default_factory=dict)
    encloses: bool = False
    below: list[str] = field(default_factory=list)

    def see(self, layout: str, sight: Sight, place: int, key: str) -> None:
        seen = self.layouts.get(layout)
        if seen is None or (sight, place, key) < seen:
            self.layouts[layout] = (sight, place, key)

    @property
    def layout(self) -> str:
        """Of the layouts seen here the one with a marker, or seen most surely; of equals the first of the table."""
        return min(self.layouts, key=lambda layout: (self.layouts[layout][0] is not Sight.MARKER, _ORDER[layout]))

    @property
    def marker(self) -> str:
        sight, _, key = self.layouts[self.layout]
        if sight is Sight.MARKER:
            return key
        # What no marker of its own speaks for is as whole as the one set in it.
        layout = layout_named(self.layout)
        speaks = layout is not None and not layout.markers and len(self.below) == 1
        return self.below[0] if speaks else ""


_ORDER = {layout.name: at for at, layout in enumerate(LAYOUTS)} | {CUSTOM: -1}


class _Finding:
    """Gathers what keys tell of sets."""

    def __init__(self, bucket: str, markers: Markers) -> None:
        self._bucket = bucket
        self._markers = markers
        self._roots: dict[str, _Root] = {}
        self._files: dict[str, str] = {}

    def see(self, key: str) -> None:
        """Count in a key."""
        home = root_of(key)
        if (outermost := next(folders_of(home), None)) is not None:
            prefix, layout = outermost
            root = self._root(prefix)
            root.see(layout.name, Sight.FOLDER, 0, "")
            root.encloses = True
        if self._is_pointer(key):
            return
        for layout, sight, place in sights_of(key):
            root = self._root(home)
            root.see(layout.name, sight, place, key)
            root.encloses = root.encloses or (layout.encloses and sight is Sight.MARKER)
        file = file_of(key)
        if (alone := file_layout_of(file)) is not None:
            self._files[key] = alone.name
        elif self._markers.is_users(ObjectName(self._bucket, key)):
            self._root(home).see(CUSTOM, Sight.MARKER, 0, key)

    def _is_pointer(self, key: str) -> bool:
        return role_of(key) is Role.POINTER

    def _root(self, prefix: str) -> _Root:
        root = self._roots.get(prefix)
        if root is None:
            root = self._roots[prefix] = _Root(prefix)
        return root

    def names(self) -> Iterator[SetName]:
        """The sets, in no order."""
        roots = self._outermost()
        prefixes = sorted(root.prefix for root in roots)
        for root in roots:
            yield SetName(self._bucket, root.prefix, root.layout, root.marker, step_of(root.prefix))
        for key, layout in self._files.items():
            if not _is_below(key, prefixes):
                yield SetName(self._bucket, key, layout, key, step_of(key))

    def _outermost(self) -> list[_Root]:
        kept: list[_Root] = []
        around: list[_Root] = []
        for prefix in sorted(self._roots):
            root = self._roots[prefix]
            while around and not prefix.startswith(around[-1].prefix):
                around.pop()
            outer = around[-1] if around else None
            if outer is not None and (
                outer.encloses or (outer.layout == root.layout and not root.marker and not root.encloses)
            ):
                if root.marker:
                    outer.below.append(root.marker)
                continue
            kept.append(root)
            around.append(root)
        return kept


def _is_below(key: str, prefixes: list[str]) -> bool:
    """Whether one of the sorted prefixes begins the key."""
    end = len(key)
    while (end := key.rfind("/", 0, end)) >= 0:
        prefix = key[: end + 1]
        at = bisect_right(prefixes, prefix)
        if at and prefixes[at - 1] == prefix:
            return True
    return bool(prefixes) and prefixes[0] == ""


class _Surveying:
    """Works out what one set must hold."""

    def __init__(self, name: SetName, sizes: Mapping[str, int], read: ReadBody) -> None:
        self._name = name
        self._sizes = sizes
        self._read = read
        self._layout = layout_named(name.layout)
        self._own = sorted(self._own_keys())
        self._members: dict[str, Member] = {}

    def _own_keys(self) -> Iterator[str]:
        inside = [key for key in self._sizes if is_in(self._name, key) and not _is_staged(key)]
        others = [other.prefix for other in sets_of("", inside, _NO_PATTERNS) if other.prefix != self._name.prefix]
        deeper = sorted(prefix for prefix in others if prefix.startswith(self._name.prefix) and prefix.endswith("/"))
        is_folder = next(folders_of(self._name.prefix), None) is not None
        for key in inside:
            # A pointer in a run's folder is the run's; in a set's own folder it came with the set.
            if not _is_below(key, deeper) and (is_folder or role_of(key) is not Role.POINTER):
                yield key

    def manifest(self) -> Manifest:
        name = self._name
        if not name.prefix.endswith("/") and name.prefix:
            return self._single()
        marker, step = self._marker(), name.step
        if marker and file_of(marker) == "trainer_state.json":
            step = lists.trainer_step(marker, self._read(marker))
        is_listed = self._read_lists()
        if marker:
            self._members.setdefault(marker, Member(marker))
        members = tuple(self._members[key] for key in sorted(self._members))
        return Manifest(replace(name, marker=marker, step=step), members, is_listed, step)

    def _single(self) -> Manifest:
        key = self._name.prefix
        size_bytes = self._sizes.get(key)
        if size_bytes is None:
            return Manifest(self._name, (Member(key),), False, self._name.step)
        if self._name.layout == "safetensors":
            exact = lists.safetensors_size(key, size_bytes, self._read)
            return Manifest(self._name, (Member(key, exact),), True, self._name.step)
        lists.check_archive(key, size_bytes, self._read)
        return Manifest(self._name, (Member(key),), False, self._name.step)

    def _read_lists(self) -> bool:
        """Make the members out of what the set's lists name and what they do not speak of; whether there is a list."""
        listings = []
        for key in self._lists():
            if self._sizes[key] <= lists.LIST_LIMIT_BYTES:
                listings.append(lists.read_list(key, self._read))
        for key in self._own:
            if not any(listing.governed is not None and listing.governed.fullmatch(key) for listing in listings):
                self._members[key] = Member(key)
        for listing in listings:
            for key, member in listing.members.items():
                known = self._members.get(key)
                if known is None or known.least_bytes < member.least_bytes:
                    self._members[key] = member
        return any(listing.members for listing in listings)

    def _lists(self) -> list[str]:
        found = [key for key in self._own if is_list(key)]
        whole = {parent_of(key) for key in found if file_of(key) == ".metadata"}
        by_rank = [key for key in found if _rank_of(key) is not None]
        # Without collectives each rank lists what is its own; a list of all makes those void.
        void = {key for key in by_rank if parent_of(key) in whole}
        for key in by_rank:
            if key not in void:
                prefix = parent_of(key)
                for rank in range(_rank_of(key) or 0):
                    lower = f"{prefix}__{rank}.metadata"
                    self._members.setdefault(lower, Member(lower))
        return [key for key in found if key not in void]

    def _marker(self) -> str:
        marker = self._name.marker
        if not marker:
            return self._pointer()
        file = file_of(marker)
        if file == "_CHECKPOINT_METADATA" and not lists.is_committed(marker, self._read(marker)):
            return ""
        if self._name.layout == "megatron":
            lists.check_megatron(marker, self._read(marker))
        return marker

    def _pointer(self) -> str:
        """The pointer beside the set's folder that says that it is whole: it names the set, or a newer one that has the
        same objects. (It was rewritten when this one was whole, if this one ever was: the objects tell.)"""
        layout, prefix = self._layout, self._name.prefix
        if layout is None or not layout.pointers:
            return ""
        around = parent_of(prefix)
        for key in sorted(self._sizes):
            if parent_of(key) != around or not is_pointer_of(layout, key):
                continue
            if self._sizes[key] > lists.POINTER_LIMIT_BYTES:
                continue
            for named in pointed_by(key, self._read(key)):
                if named == prefix or self._is_older_than(named):
                    return key
        return ""

    def _is_older_than(self, named: str) -> bool:
        step, newer = self._name.step, step_of(named)
        if step is None or newer is None or step > newer or self._name.layout == "ray":
            return False
        prefix = self._name.prefix
        theirs = {key[len(named) :] for key in self._sizes if key.startswith(named)}
        return bool(theirs) and theirs <= {key[len(prefix) :] for key in self._own}


def _rank_of(key: str) -> int | None:
    file = file_of(key)
    rank = file.removeprefix("__").removesuffix(".metadata")
    return int(rank) if file == f"__{rank}.metadata" and rank.isascii() and rank.isdecimal() else None


def _is_staged(key: str) -> bool:
    return key.endswith(STAGING_SUFFIX) and role_of(key.removesuffix(STAGING_SUFFIX)) is Role.MARKER


_NO_PATTERNS = Markers(lambda bucket, key: (), 1)
