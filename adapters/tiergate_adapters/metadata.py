"""The lists of torch.distributed.checkpoint: read without running what they say, and written as the stock packages do.

A list is a pickle, and whoever can write to the bucket writes it. So only names that such lists need are looked up;
a caller adds those of its own planner. (A made-up list may still waste memory; it cannot run anything.)
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Collection
from copy import copy
from dataclasses import dataclass
from typing import Final

import torch
from torch.distributed.checkpoint.metadata import Metadata

from tiergate.checkpoints.dcppickle import CALLS, CLASSES

_STOCK_PIECE: Final = ("amzn_sagemaker_checkpointing.checkpointing.filesystem.storage_info", "_SageMakerStorageInfo")


@dataclass
class TieredPiece:
    """Where a tiered checkpoint of SageMaker keeps a piece: `length` bytes at `offset` of the file of `rank`. Lists
    call it by the name that the stock package has for it; that need not be installed."""

    rank: int
    offset: int
    length: int


def read_list(data: bytes | memoryview, *, trust: Collection[str] = ()) -> Metadata:
    """What a list says: `.metadata`, `__R.metadata`, or `metadata.metadata` of a tiered checkpoint.

    `trust`: classes and functions that the list may name beside those that torch's own planners do, each as
    "module.name"; what they do when they are called with what the list says is the caller's to answer for.

    Raises:
        pickle.UnpicklingError: it is no such list, or names what is neither known nor trusted.
    """
    try:
        found = _Reading(io.BytesIO(data), frozenset(trust)).load()
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # A damaged pickle may raise anything.
        raise pickle.UnpicklingError(f"it is no list of a checkpoint: {error}") from error
    if not isinstance(found, Metadata):
        raise pickle.UnpicklingError(f"it is no list of a checkpoint but a {type(found).__name__}")
    return found


class _Reading(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, trust: frozenset[str]) -> None:
        super().__init__(file)
        self._trust = trust

    def find_class(self, module: str, name: str) -> object:
        if (module, name) == _STOCK_PIECE:
            return TieredPiece
        if (module, name) in CLASSES or (module, name) in CALLS or f"{module}.{name}" in self._trust:
            return super().find_class(module, name)
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        raise pickle.UnpicklingError(
            f"the list names {module}.{name}, which no list of torch's own needs; if a planner of yours put it there, "
            "name it in `trust`"
        )


def write_tiered_list(metadata: Metadata) -> bytes:
    """The list of a tiered checkpoint as the stock package reads it: its storage_data is {MetadataIndex: TieredPiece}.

    Raises:
        ValueError: its first piece has a name of over 60,000 bytes.
    """
    # The class is named once, at the first piece. So that comes first, and only the first frame grows or shrinks.
    ordered = copy(metadata)
    ordered.__dict__ = {"storage_data": metadata.storage_data} | metadata.__dict__
    pickled = pickle.dumps(ordered, _PROTOCOL)
    if not metadata.storage_data:
        return pickled
    ours, theirs = _named(TieredPiece.__module__, TieredPiece.__qualname__), _named(*_STOCK_PIECE)
    head, length = pickled[:_FRAME_AT], int.from_bytes(pickled[_FRAME_AT:_FRAME_ENDS], "little")
    frame, rest = pickled[_FRAME_ENDS : _FRAME_ENDS + length], pickled[_FRAME_ENDS + length :]
    if ours not in frame:
        raise ValueError("the name of the first piece is too long")
    frame = frame.replace(ours, theirs, 1)
    return b"".join((head, len(frame).to_bytes(8, "little"), frame, rest))


_PROTOCOL: Final = 4
_FRAME_AT: Final = 3  # Behind the instruction for the protocol, which has two bytes, and that for the frame.
_FRAME_ENDS: Final = _FRAME_AT + 8


def _named(module: str, name: str) -> bytes:
    return b"".join(b"\x8c" + bytes([len(text)]) + text.encode() + b"\x94" for text in (module, name)) + b"\x93"
