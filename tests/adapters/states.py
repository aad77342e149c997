"""States of a training, compared."""

from typing import Any

import torch


def empty_of(full: Any) -> Any:
    """Its tensors zero, its other values none."""
    if isinstance(full, dict):
        return {name: empty_of(value) for name, value in full.items()}
    return torch.zeros_like(full.detach()) if isinstance(full, torch.Tensor) else type(full)()


def same(left: Any, right: Any) -> bool:
    """Whether both hold the same, tensors of the same kinds."""
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[name], right[name]) for name in left)
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left.detach(), right.detach())
    return bool(left == right)
