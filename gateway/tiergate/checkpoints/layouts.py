"""How the frameworks lay out checkpoints: the one table of names. Pure.

Of each layout: the folder a set lives in, which object says that it is whole (its *marker*), which lists what the set
must hold, which names sets (a *pointer*), and by which other objects a set is known that has no marker yet. The fence
takes its roles from here (`markers.py`), the recognition of sets its prefixes and steps (`recognition.py`).
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

from tiergate.model import Role


class Names(NamedTuple):
    """What a key is known by: the names of the file, of its folder and of the folder above; "" for none."""

    file: str
    folder: str
    above: str

    @classmethod
    def of(cls, key: str) -> "Names":
        """Of a key."""
        *above, file = key.rsplit("/", 3)[-3:]
        return cls(file, above[-1] if above else "", above[-2] if len(above) > 1 else "")


@dataclass(frozen=True, slots=True)
class Sign:
    """An object known by its names."""

    file: re.Pattern[str]
    folder: re.Pattern[str]
    above: re.Pattern[str]

    def fits(self, names: Names) -> bool:
        """Whether such an object has these names."""
        return (
            self.file.fullmatch(names.file) is not None
            and self.folder.fullmatch(names.folder) is not None
            and self.above.fullmatch(names.above) is not None
        )


def _sign(file: str, folder: str = r".*", above: str = r".*") -> Sign:
    return Sign(*(re.compile(pattern, re.DOTALL) for pattern in (file, folder, above)))


@dataclass(frozen=True, slots=True)
class Layout:
    """`folder`: the name of a set's own folder; what is below it belongs to the set, also what would be a set of
    another layout elsewhere. `markers`: one that is there says that the set is whole, the first before the others.
    `lists`: objects that name others of the set. `members`: other objects by which a set is known. `file`: the name
    of a set that is one object. `encloses`: what is below the marker's folder belongs to the set too."""

    name: str
    folder: re.Pattern[str] | None = None
    markers: tuple[Sign, ...] = ()
    lists: tuple[Sign, ...] = ()
    pointers: tuple[Sign, ...] = ()
    members: tuple[Sign, ...] = ()
    file: re.Pattern[str] | None = None
    encloses: bool = False


_SHARD = r"checkpoint\.pt"
_ITERATION = r"iter_\d{7,18}"
_TRAINER = r"checkpoint-\d+"
_CKPT = r".+\.ckpt"
_ORBAX_TMP = r".*\.orbax-checkpoint-tmp.*"

LAYOUTS: Final = (
    Layout(
        # Each rank's shard has a folder of its own, the list lies with rank 0's: see `home_of`.
        "sagemaker",
        markers=(_sign(r"metadata\.metadata"),),
        lists=(_sign(r"metadata\.metadata"),),
        members=(_sign(_SHARD, r"step_\d+", r"rank_\d+"), _sign(_SHARD, r"rank_\d+", r"step_\d+")),
    ),
    Layout(
        # torch_dist and zarr: metadata.json is written when all ranks are done. Older: only the run's pointer tells.
        "megatron",
        folder=re.compile(_ITERATION),
        markers=(_sign(r"metadata\.json", _ITERATION),),
        pointers=(_sign(r"latest_checkpointed_iteration\.txt"),),
    ),
    Layout(
        # A sharded checkpoint is a folder: of torch's own format with meta.pt written last, or of DeepSpeed's.
        "lightning",
        folder=re.compile(_CKPT),
        markers=(_sign(r"meta\.pt", _CKPT), _sign(r"latest", _CKPT)),
        file=re.compile(_CKPT),
    ),
    Layout(
        # The Trainer writes its state last; at the end of a run another one right into the run's folder.
        "hf-trainer",
        folder=re.compile(_TRAINER),
        markers=(_sign(r"trainer_state\.json"),),
    ),
    Layout(
        # No marker: the pointer beside the folders names the newest whole one.
        "deepspeed",
        folder=re.compile(r"global_step\d+"),
        pointers=(_sign(r"latest|latest_universal"),),
        members=(_sign(r".+_(model|optim)_states\.pt"),),
    ),
    Layout(
        # commit_success.txt where folders cannot be renamed; the other is also there before the end, and says which.
        "orbax",
        folder=re.compile(_ORBAX_TMP),
        markers=(
            _sign(r"commit_success\.txt", rf"(?!{_ORBAX_TMP}$).*"),
            _sign(r"_CHECKPOINT_METADATA", rf"(?!{_ORBAX_TMP}$).*"),
        ),
        members=(_sign(r"_METADATA|_sharding|manifest\.ocdbt"),),
        encloses=True,
    ),
    Layout(
        # What is in the folder is the user's; the run's pointers name the folders.
        "ray",
        folder=re.compile(r"checkpoint_(\d{6}|\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d(\.\d+)?)"),
        pointers=(_sign(r"checkpoint_manager_snapshot\.json"), _sign(r"experiment_state-.*\.json")),
    ),
    Layout(
        # .metadata is put in place by a rename; without collectives each rank has its own.
        "dcp",
        markers=(_sign(r"\.metadata", rf"(?!({_ITERATION}|{_CKPT})$).*"), _sign(r"__0\.metadata")),
        lists=(_sign(r"\.metadata"), _sign(r"__\d+\.metadata")),
        members=(_sign(r"__\d+_\d+\.distcp"),),
    ),
    Layout(
        "huggingface",
        markers=(_sign(r".*\.index\.json", rf"(?!{_TRAINER}$).*"),),
        lists=(_sign(r".*\.index\.json"),),
        members=(_sign(r".+-\d{5}-of-\d{5}\.(safetensors|bin)"),),
    ),
    Layout("safetensors", file=re.compile(r".+\.safetensors")),
)


def _any_file(groups: Iterable[tuple[Sign, ...]]) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{sign.file.pattern})" for group in groups for sign in group), re.DOTALL)


# Most objects are none of these: they are told by one look.
_TELLING_FILE = _any_file(group for each in LAYOUTS for group in (each.markers, each.lists, each.pointers))
_MEMBER_FILE = _any_file(each.members for each in LAYOUTS)

CUSTOM: Final = "custom"
"""The layout of a set whose marker the user's own patterns name."""


class Sight(IntEnum):
    """By what a set was seen, the surest first."""

    MARKER = 0
    LIST = 1
    MEMBER = 2
    FOLDER = 3


def file_of(key: str) -> str:
    """The file name of a key."""
    return key[key.rfind("/") + 1 :]


def parent_of(key: str) -> str:
    """The parent prefix of a key, or of a prefix, with its slash."""
    return key[: key.rfind("/", 0, len(key) - 1) + 1]


_APART = re.compile(r"(.*/|)rank_\d+/(step_\d+/)(?:checkpoint\.pt|metadata\.metadata)", re.DOTALL)
_TOGETHER = re.compile(r"(.*/|)(step_\d+/)rank_\d+/(?:checkpoint\.pt|metadata\.metadata)", re.DOTALL)
_RANK_0 = re.compile(r"(?<![^/])rank_0/(?:step_\d+/)?\Z")
_TIERED_FILES = ("/checkpoint.pt", "/metadata.metadata")


def home_of(key: str) -> str:
    """The folder whose marker speaks for the key: its parent prefix. Of a tiered checkpoint it is rank 0's folder:
    every rank has one, `rank_<R>/step_<N>/` (within Ray Train `step_<N>/rank_<R>/`)."""
    if key.endswith(_TIERED_FILES):
        if apart := _APART.fullmatch(key):
            return f"{apart[1]}rank_0/{apart[2]}"
        if together := _TOGETHER.fullmatch(key):
            return f"{together[1]}{together[2]}rank_0/"
    return key[: key.rfind("/") + 1]


def ranks_of(home: str) -> str:
    """The prefix that begins the folders of all ranks of a tiered checkpoint, from that of rank 0; "" for others."""
    return home[: -len(found[0])] + "rank_" if (found := _RANK_0.search(home)) else ""


def root_of(key: str) -> str:
    """The prefix of the set that a marker, list or member belongs to."""
    return tiered_root_of(key) or home_of(key)


def tiered_root_of(key: str) -> str:
    """The prefix of the tiered checkpoint that a key belongs to, by its names: rank 0's folder, or the step's where
    that holds the ranks'. "" for other keys."""
    if not key.endswith(_TIERED_FILES):
        return ""
    if together := _TOGETHER.fullmatch(key):
        return together[1] + together[2]
    return home_of(key) if _APART.fullmatch(key) else ""


def role_of(key: str) -> Role | None:
    """Whether an object of this name is a marker (lists count: one before what it names is as untrue) or a pointer."""
    names = Names.of(key)
    if _TELLING_FILE.fullmatch(names.file) is None:
        return None
    for layout in LAYOUTS:
        if _fits(layout.markers, names) or _fits(layout.lists, names):
            return Role.MARKER
    return Role.POINTER if any(_fits(layout.pointers, names) for layout in LAYOUTS) else None


def sights_of(key: str) -> Iterator[tuple[Layout, Sight, int]]:
    """What the key's names say of a set in that folder: of which layout, by what, and the place of the marker among the
    layout's."""
    names = Names.of(key)
    if _TELLING_FILE.fullmatch(names.file) is None and _MEMBER_FILE.fullmatch(names.file) is None:
        return
    for layout in LAYOUTS:
        for place, sign in enumerate(layout.markers):
            if sign.fits(names):
                yield layout, Sight.MARKER, place
        if _fits(layout.lists, names):
            yield layout, Sight.LIST, 0
        if _fits(layout.members, names):
            yield layout, Sight.MEMBER, 0


def is_pointer_of(layout: Layout, key: str) -> bool:
    """Whether an object of this name is a pointer of the layout."""
    return _fits(layout.pointers, Names.of(key))


def is_list(key: str) -> bool:
    """Whether an object of this name lists others of its set."""
    names = Names.of(key)
    return any(_fits(layout.lists, names) for layout in LAYOUTS)


def _fits(signs: tuple[Sign, ...], names: Names) -> bool:
    return any(sign.fits(names) for sign in signs)


def folders_of(prefix: str) -> Iterator[tuple[str, Layout]]:
    """The prefixes of the folders, outermost first, that a prefix is in (or is) and that a layout knows by name."""
    end = prefix.find("/") + 1
    start = 0
    while end:
        for layout in LAYOUTS:
            if layout.folder is not None and layout.folder.fullmatch(prefix, start, end - 1):
                yield prefix[:end], layout
        start, end = end, prefix.find("/", end) + 1


def file_layout_of(file: str) -> Layout | None:
    """The layout of which a single file of this name is a set."""
    if _SHARD_OF_MANY.fullmatch(file):
        return None
    return next((layout for layout in LAYOUTS if layout.file is not None and layout.file.fullmatch(file)), None)


def layout_named(name: str) -> Layout | None:
    """The layout of a name, None for CUSTOM."""
    return next((layout for layout in LAYOUTS if layout.name == name), None)


_SHARD_OF_MANY = re.compile(r".+-\d{5}-of-\d{5}\..+", re.DOTALL)

_STEP_WORDS = ("step", "iter", "checkpoint", "ckpt", "epoch")
_STEP = re.compile(
    r"(?:^|[^a-z])(?:global_?)?(step|iter|checkpoint|ckpt|epoch)(?:s|ation)?[-_=]?(\d{1,18})(?![\d]|-\d)", re.IGNORECASE
)
_NUMBER = re.compile(r"\d{1,18}")


def step_of(prefix: str) -> int | None:
    """The step that a set's prefix names: in the innermost folder that names one. A bare number counts only as the
    set's own name."""
    names = prefix.rstrip("/").split("/")
    if not prefix.endswith("/"):
        names[-1] = names[-1].rsplit(".", 1)[0]
    if _NUMBER.fullmatch(names[-1]):
        return int(names[-1])
    for name in reversed(names):
        found = {word.lower(): int(number) for word, number in _STEP.findall(name)}
        for word in _STEP_WORDS:
            if word in found:
                return found[word]
    return None
