"""Tensors as torch.save wrote them, where they lie."""

from __future__ import annotations

import ctypes
import io
import sys
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, _weights_only_unpickler
from torch.serialization import _load

from tiergate_adapters.slabs import MemoryFile, copy, cut, together

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import ReadItem

PLAIN_BYTES = 64 << 10
"""A piece up to this length is read by torch.load itself."""


class StoredTensor:
    """A tensor as torch.save wrote it, in the memory of some views.

    Raises:
        UnpicklingError: it holds what no tensor needs.
        RuntimeError: it is no such file.
    """

    def __init__(self, views: list[memoryview]) -> None:
        self._views = views
        self._head = _head_of(views) if sum(map(len, views)) > PLAIN_BYTES else None
        self._data: list[memoryview] = []
        self._tensor: Tensor | None = None
        if self._head is not None:
            storage = cast(Any, self._head.untyped_storage())
            start = storage._checkpoint_offset
            self._data = cut(views, start, start + storage.nbytes())

    def copy_to(self, target: Tensor, item: ReadItem) -> None:
        """Fill the tensor with what the item is of it.

        Raises:
            ValueError: their sizes differ.
        """
        head = self._head
        if head is not None and item.lengths == head.size() and _is_alike(target, head):
            # All of it, as it is: byte by byte, in however many pieces it lies.
            memory = memoryview((ctypes.c_char * target.nbytes).from_address(target.data_ptr())).cast("B")
            at, done = int(head.storage_offset()) * head.itemsize, 0
            for view in cut(self._data, at, at + target.nbytes):
                copy(memory[done : done + len(view)], view)
                done += len(view)
            return
        part = self._tensor = self._whole() if self._tensor is None else self._tensor
        for dimension, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            part = part.narrow(dimension, offset, length)
        if target.size() != part.size():
            raise ValueError(f"{item.storage_index}: {part.size()} is stored and {target.size()} wanted")
        target.copy_(part)

    def _whole(self) -> Tensor:
        """The tensor, on the memory of the views if that is in one piece: to be read only, while it is there."""
        if self._head is None:
            found: Tensor = torch.load(io.BytesIO(together(self._views)), map_location="cpu", weights_only=True)
            return found
        head, data = self._head, together(self._data)
        # By its address: of a buffer that is not to be written to, torch warns.
        memory = (ctypes.c_char * len(data)).from_address(np.frombuffer(data, np.uint8).ctypes.data)
        self._data = [data]
        storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
        return torch.empty(0, dtype=head.dtype).set_(storage, head.storage_offset(), head.size(), head.stride())


def _is_alike(target: Tensor, head: Tensor) -> bool:
    """Whether the bytes of one are those of the other."""
    return (
        target.device.type == "cpu"
        and (target.dtype, target.size()) == (head.dtype, head.size())
        and target.is_contiguous()
        and head.is_contiguous()
        and not target.is_conj()
        and not target.is_neg()
    )


def _head_of(views: list[memoryview]) -> Tensor | None:
    """The tensor without its data, of whose storage torch says where in the piece it is; None for what torch.load must
    read as a whole."""
    file: Any = MemoryFile(views)
    if file.read(4) != b"PK\x03\x04":
        return None
    file.seek(0)
    # Private: what torch.load does on the meta device, for files of this machine's order of bytes.
    archive: Any = torch._C.PyTorchFileReader(file)
    if archive.has_record("constants.pkl") or not archive.has_record("byteorder"):
        return None
    if archive.get_record("byteorder").decode() != sys.byteorder:
        return None
    try:
        head = cast(Any, _load)(archive, "meta", _weights_only_unpickler, encoding="utf-8")
    except NotImplementedError:  # Quantized ones have no such device.
        return None
    is_plain = type(head) in (Tensor, torch.nn.Parameter) and head.layout == torch.strided
    if not is_plain or head.is_conj() or head.is_neg() or head.is_quantized or not head.untyped_storage().nbytes():
        return None
    return cast(Tensor, head.detach())


def alone(tensor: Tensor) -> Tensor:
    """The same tensor on a storage that has no other bytes: torch would copy it into such a one to save it alone."""
    storage = tensor.untyped_storage()
    if type(tensor) is not Tensor or tensor.device.type != "cpu" or storage.nbytes() == tensor.nbytes:
        return tensor
    if not tensor.nbytes or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
        return tensor
    start = tensor.storage_offset() * tensor.itemsize
    whole = storage[start : start + tensor.nbytes]
    return torch.empty(0, dtype=tensor.dtype).set_(whole, 0, tensor.size(), tensor.stride())
