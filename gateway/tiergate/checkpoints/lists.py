"""Reads what sets say of themselves: their lists, heads, markers' contents and pointers. Pure.

Every byte read here was written by whoever may write to the bucket: a reader takes no more than its limit, calls
nothing that the bytes name, and either gives what they say or raises `DamagedSetError`.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from tiergate.checkpoints import dcpmetadata
from tiergate.checkpoints.layouts import file_of, home_of, parent_of, role_of
from tiergate.checkpoints.sets import Member, ReadBody
from tiergate.errors import TiergateError
from tiergate.model import Role

LIST_LIMIT_BYTES = 64 << 20
"""A longer list is not read; its set counts as one without a list."""
HEADER_LIMIT_BYTES = 100_000_000
"""Of a safetensors file, by its own definition."""
POINTER_LIMIT_BYTES = 4 << 20
NAME_LIMIT_BYTES = 1_024


class DamagedSetError(TiergateError):
    """What should tell of a set cannot be read as what it should be. The message names the object and the damage."""


@dataclass(frozen=True, slots=True)
class Listing:
    """What a list says. `members` that must be there, by key. `governed`: what it does not name of such keys is no
    member, though it lies there."""

    members: Mapping[str, Member] = field(default_factory=dict)
    governed: re.Pattern[str] | None = None


def read_list(key: str, read: ReadBody) -> Listing:
    """Read the list at a key that `layouts` knows as one.

    Raises:
        DamagedSetError: it is no such list.
    """
    file = file_of(key)
    return read_index(key, read(key)) if file.endswith(".index.json") else read_dcp(key, read(key))


def read_dcp(key: str, body: bytes) -> Listing:
    """The files that torch.distributed.checkpoint's metadata names."""
    try:
        metadata = dcpmetadata.read(body)
    except dcpmetadata.MetadataTooLargeError:
        return Listing()
    except dcpmetadata.MetadataError as wrong:
        raise DamagedSetError(f"{key}: {wrong.message}") from None
    prefix, file = parent_of(key), file_of(key)
    members: dict[str, Member] = {}
    if file == "metadata.metadata":
        for name, least_bytes in metadata.files.items():
            member = tiered(key, name)
            members[member] = Member(member, least_bytes=least_bytes)
        pattern = re.escape(tiered(key, "rank_*")).replace(r"rank_\*", r"rank_\d+")
        return Listing(members, re.compile(pattern, re.DOTALL))
    for name, least_bytes in metadata.files.items():
        members[prefix + name] = Member(prefix + name, least_bytes=least_bytes)
    return Listing(members, re.compile(re.escape(prefix) + r"(.*/)?__\d+_\d+\.distcp", re.DOTALL))


def tiered(key: str, rank: str) -> str:
    """The shard of a rank, from the key of the metadata of a tiered checkpoint: `rank_<R>` stands in its path."""
    home = home_of(key)
    folders = home.rstrip("/").split("/")
    for at in (-1, -2):
        if len(folders) >= -at and folders[at] == "rank_0":
            folders[at] = rank
            return "/".join(folders) + "/checkpoint.pt"
    raise DamagedSetError(f"{key}: it is in no rank's folder")


def read_index(key: str, body: bytes) -> Listing:
    """The shards that a Hugging Face index names."""
    prefix, file = parent_of(key), file_of(key)
    weight_map = _object(key, body).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise DamagedSetError(f"{key}: it has no weight_map")
    members: dict[str, Member] = {}
    for shard in weight_map.values():
        if not isinstance(shard, str) or not _is_below(shard):
            raise DamagedSetError(f"{key}: it names {str(shard)[:80]!r}")
        members[prefix + shard] = Member(prefix + shard)
    stem, _, suffix = file.removesuffix(".index.json").rpartition(".")
    pattern = rf"{re.escape(prefix + stem)}-\d+-of-\d+\.{re.escape(suffix)}"
    return Listing(members, re.compile(pattern, re.DOTALL))


def trainer_step(key: str, body: bytes) -> int:
    """The step that the state of a Hugging Face Trainer tells."""
    step = _object(key, body).get("global_step")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise DamagedSetError(f"{key}: it has no global_step")
    return step


def is_committed(key: str, body: bytes) -> bool:
    """Whether Orbax's _CHECKPOINT_METADATA, which is there from the start, tells of an end."""
    return _object(key, body).get("commit_timestamp_nsecs") is not None


def check_megatron(key: str, body: bytes) -> None:
    """Whether metadata.json is that of a Megatron checkpoint."""
    if not isinstance(_object(key, body).get("sharded_backend"), str):
        raise DamagedSetError(f"{key}: it has no sharded_backend")


def safetensors_size(key: str, size_bytes: int, read: ReadBody) -> int:
    """The length that a safetensors file must have: its own header tells where the last tensor ends.

    Raises:
        DamagedSetError: it has no such header.
    """
    header_bytes = int.from_bytes(read(key, 0, 8), "little")
    if size_bytes < 8 or not 2 <= header_bytes <= min(HEADER_LIMIT_BYTES, size_bytes - 8):
        raise DamagedSetError(f"{key}: it has no header")
    end_bytes = 0
    for name, tensor in _object(key, read(key, 8, 8 + header_bytes)).items():
        if name == "__metadata__":
            continue
        offsets = tensor.get("data_offsets") if isinstance(tensor, dict) else None
        if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(at) is int for at in offsets):
            raise DamagedSetError(f"{key}: its header does not tell where {name[:80]!r} is")
        if not 0 <= offsets[0] <= offsets[1]:
            raise DamagedSetError(f"{key}: {name[:80]!r} ends before it begins")
        end_bytes = max(end_bytes, offsets[1])
    return 8 + header_bytes + end_bytes


_ZIP_HEAD, _ZIP_END, _ZIP_END_BYTES = b"PK\x03\x04", b"PK\x05\x06", 22


def check_archive(key: str, size_bytes: int, read: ReadBody) -> None:
    """Whether what torch.save wrote is whole: an archive whose end is there. (What is older than archives tells
    nothing.)

    Raises:
        DamagedSetError: it begins as an archive and does not end as one.
    """
    if read(key, 0, len(_ZIP_HEAD)) == _ZIP_HEAD:
        end = read(key, max(size_bytes - _ZIP_END_BYTES, 0), size_bytes)
        if not end.startswith(_ZIP_END):
            raise DamagedSetError(f"{key}: the archive has no end")


def pointed_by(key: str, body: bytes) -> tuple[str, ...]:
    """The prefixes of the sets that a pointer names; none where it cannot be read, or is no pointer.

    DeepSpeed's `latest` holds a folder's name, Megatron's tracker a number or `release`, Ray's snapshot JSON a list.
    (Ray Tune's experiment_state keeps its checkpoints as pickled text: it names none here.)"""
    if role_of(key) is not Role.POINTER or len(body) > POINTER_LIMIT_BYTES:
        return ()
    prefix, file = parent_of(key), file_of(key)
    if file == "checkpoint_manager_snapshot.json":
        names = _snapshot_names(key, body)
    else:
        text = body.decode("utf-8", "replace").strip()
        if file == "latest_checkpointed_iteration.txt":
            is_number = text.isascii() and text.isdecimal() and len(text) <= 18
            names = [f"iter_{int(text):07d}"] if is_number else ["release"] if text == "release" else []
        else:
            names = [text] if file.startswith("latest") and "\n" not in text else []
    return tuple(dict.fromkeys(f"{prefix}{name.rstrip('/')}/" for name in names if _is_below(name)))


def _snapshot_names(key: str, body: bytes) -> list[str]:
    try:
        snapshot = _object(key, body)
    except DamagedSetError:
        return []
    names = []
    results = snapshot.get("checkpoint_results")
    for result in [*(results if isinstance(results, list) else []), snapshot.get("latest_checkpoint_result")]:
        name = result.get("checkpoint_dir_name") if isinstance(result, dict) else None
        if isinstance(name, str):
            names.append(name)
    return names


def _is_below(name: str) -> bool:
    """Whether a relative path stays below where it begins, and can be a key."""
    if any(part in ("", ".", "..") for part in name.rstrip("/").split("/")):
        return False
    try:
        return len(name.encode()) <= NAME_LIMIT_BYTES
    except UnicodeEncodeError:
        return False


def _object(key: str, body: bytes) -> dict[str, object]:
    if len(body) > HEADER_LIMIT_BYTES:
        raise DamagedSetError(f"{key}: {len(body)} bytes of JSON")
    try:
        parsed: object = json.loads(body)
    except (ValueError, RecursionError) as wrong:
        raise DamagedSetError(f"{key}: no JSON: {str(wrong)[:120]}") from None
    if not isinstance(parsed, dict):
        raise DamagedSetError(f"{key}: no JSON object")
    return parsed
