"""A small real model, and its checkpoints: stock PyTorch, which knows of the gateway nothing but an address."""

import inspect
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint

CONTEXT_CHARACTERS = 64
BATCH_COUNT = 8
WIDTH = 256
LAYERS_COUNT = 6
SHARDS_COUNT = 8
"""Files a checkpoint has beside its marker."""

MARKER = ".metadata"
"""The file that torch.distributed.checkpoint writes last: with it a checkpoint is whole."""


@dataclass(frozen=True, slots=True)
class Store:
    """Where checkpoints go: an S3 endpoint and its keys."""

    endpoint: str
    access_key: str
    secret_key: str

    @property
    def s3fs_options(self) -> dict[str, Any]:
        """For s3fs: only the endpoint is unlike AWS. Nothing that an instance remembers is used by the next."""
        return {
            "endpoint_url": self.endpoint,
            "key": self.access_key,
            "secret": self.secret_key,
            "client_kwargs": {"region_name": "us-east-1"},
            "skip_instance_cache": True,
            "use_listings_cache": False,
        }


class _Model(nn.Module):
    """A transformer that predicts the next character of a text."""

    def __init__(self, characters_count: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(characters_count, WIDTH)
        self.place = nn.Parameter(torch.randn(CONTEXT_CHARACTERS, WIDTH) * 0.02)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS_COUNT, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, characters_count)

    def forward(self, characters: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT_CHARACTERS)
        hidden: Tensor = self.layers(self.embed(characters) + self.place, mask=mask, is_causal=True)
        predicted: Tensor = self.head(hidden)
        return predicted


class Trainer:
    """A model with its optimizer, and a text to learn (the source of Python's own json package). The seed decides
    all that happens by chance."""

    def __init__(self, seed: int) -> None:
        self._chance = torch.Generator().manual_seed(seed)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            text = inspect.getsource(json) + inspect.getsource(json.JSONDecoder) + inspect.getsource(inspect)
            characters = sorted(set(text))
            self._text = torch.tensor([characters.index(character) for character in text])
            self._model = _Model(len(characters))
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3)

    def train(self, steps_count: int, on_step: Callable[[float], object]) -> float:
        """Learn; `on_step` is told the loss after each step. Returns the last loss."""
        loss_value = 0.0
        # So small a model gains nothing from more, and loses much where other programs use the cores too.
        torch.set_num_threads(1)
        for _ in range(steps_count):
            starts = torch.randint(len(self._text) - CONTEXT_CHARACTERS - 1, (BATCH_COUNT,), generator=self._chance)
            windows = torch.stack([self._text[start : start + CONTEXT_CHARACTERS + 1] for start in starts.tolist()])
            predicted = self._model(windows[:, :-1])
            loss = nn.functional.cross_entropy(predicted.flatten(0, 1), windows[:, 1:].flatten())
            self._optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
            loss_value = loss.item()
            on_step(loss_value)
        return loss_value

    def state(self) -> dict[str, Any]:
        """Model and optimizer as a checkpoint holds them; the tensors are the live ones."""
        model, optimizer = get_state_dict(self._model, self._optimizer)
        return {"model": model, "optimizer": optimizer}


def save(state: dict[str, Any], uri: str, store: Store) -> None:
    """Write a checkpoint.

    Raises:
        CheckpointException: (a BaseException) it failed.
    """
    with _as_one_process():
        writer = FsspecWriter(uri, thread_count=SHARDS_COUNT, **store.s3fs_options)
        save_checkpoint(state, storage_writer=writer)


def load(uri: str, store: Store) -> dict[str, Any]:
    """Read a checkpoint into a model that never saw it.

    Raises:
        CheckpointException: (a BaseException) it failed.
    """
    state = Trainer(seed=1_000_003).state()
    with _as_one_process():
        load_checkpoint(state, storage_reader=FsspecReader(uri, **store.s3fs_options))
    return state


def leaves(state: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, object]]:
    """Everything in a nested state, by its path."""
    for name, value in state.items():
        here = f"{path}/{name}" if path else str(name)
        if isinstance(value, Mapping):
            yield from leaves(value, here)
        elif isinstance(value, list | tuple):
            yield from leaves({str(index): item for index, item in enumerate(value)}, here)
        else:
            yield here, value


def frozen(state: Mapping[str, Any]) -> dict[str, object]:
    """A copy that later training does not touch, by path."""
    return {path: value.clone() if isinstance(value, Tensor) else value for path, value in leaves(state)}


def differences(expected: Mapping[str, object], found: Mapping[str, object]) -> list[str]:
    """Compare two states by path: what is missing, what is too much, what is not the same bit for bit."""
    wrong = [f"{path} is missing" for path in expected if path not in found]
    wrong += [f"{path} is too much" for path in found if path not in expected]
    return wrong + [f"{path} differs" for path in expected if path in found and not _same(expected[path], found[path])]


def tensors_count(state: Mapping[str, object]) -> int:
    """How many of the values are tensors."""
    return sum(isinstance(value, Tensor) for value in state.values())


def _same(one: object, other: object) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return type(one) is type(other) and one == other
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    # As bytes, so that NaN is itself and 0.0 is not -0.0.
    return torch.equal(_bytes_of(one), _bytes_of(other))


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


@contextmanager
def _as_one_process() -> Iterator[None]:
    """Keeps torch from warning that it is not distributed, which the demo knows."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield
