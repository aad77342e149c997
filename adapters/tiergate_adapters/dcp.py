"""Storage of torch.distributed.checkpoint in the nearest gateway.

    save(state, storage_writer=TieredStorageWriter("s3://bucket/run/step_100"))
    load(state, storage_reader=TieredStorageReader("s3://bucket/run/step_100"))
    load(state, storage_reader=TieredStorageReader.newest("s3://bucket/run"))

What is written has torch's own layout, which its stock readers load from S3; what its stock writers wrote is read.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
import uuid
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

# Private names of torch. With these its own writer makes the files and the list: stock readers find in the list the
# classes they look for, and each piece as they expect it.
from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION,
    DEFAULT_SUFFIX,
    SerializationFormat,
    _item_size,
    _metadata_fn,
    _OverlappingCpuLoader,
    _SerialCpuLoader,
    _split_by_size_and_type,
    _StoragePrefix,
    _StorageReaderTransforms,
    _StorageWriterTransforms,
    _write_item,
)
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, WriteItemType
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter
from torch.futures import Future
from torch.utils.serialization import config as serialization

from tiergate_adapters.metadata import read_list
from tiergate_adapters.newest import newest
from tiergate_adapters.place import Place
from tiergate_adapters.slabs import together
from tiergate_adapters.store import Store
from tiergate_adapters.tensors import StoredTensor, alone

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
    from typing import Self

    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
    from torch.distributed.checkpoint.storage import WriteResult

    from tiergate_adapters.newest import Checkpoint
    from tiergate_adapters.store import ObjectReader

REQUEST_BYTES = 32 << 20
"""Neighbouring pieces of a file are read together up to this length."""
GAP_BYTES = 256 << 10
"""What lies between two pieces is read along up to this length: less time than another request."""
THREADS_COUNT = 4
"""Requests on their way or read, and not yet copied, at a time."""
HEAD_BYTES = 2 << 10
"""What torch.save adds to a tensor, at most by far."""
_FORMAT = SerializationFormat.TORCH_SAVE


class TieredStorageWriter(StorageWriter):
    """Writes checkpoints to a place in S3, through the nearest gateway; for `save` and `async_save`.

    A file is there once it is whole, and the list (`.metadata`), in one write, after all files. A failed save leaves
    the list that was there. What stands at the place is overwritten. Picklable, with nothing live in it.

    Args:
        uri: The checkpoint, s3://BUCKET/PREFIX. `checkpoint_id` of a save takes its place.
        single_file_per_rank: A file for each rank (and thread), not for each tensor.
        thread_count: Files that a rank writes at a time.
        per_thread_copy_ahead: Bytes copied ahead of writing from an accelerator, where there is one and one thread.
        overwrite: Whether a checkpoint may be there already.
        persist: "memory": it stays in the cluster's memory, until promoted or dropped; "s3": it goes to S3; None: as
            the policy of its prefix says.

    Raises:
        ValueError: the URI is none.
    """

    def __init__(
        self,
        uri: str,
        *,
        single_file_per_rank: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        overwrite: bool = True,
        persist: str | None = None,
        _extensions: Sequence[StreamTransformExtension] | None = None,
    ) -> None:
        super().__init__()
        self._store = Store(Place.of(uri), persist=persist)
        self._is_file_per_rank = single_file_per_rank
        self._threads_count = thread_count
        self._copy_ahead_bytes = per_thread_copy_ahead
        self._overwrite = overwrite
        self._transforms = _StorageWriterTransforms(_extensions)
        self._save_id = str(uuid.uuid4())
        self._rank: int | None = None
        """Of a save in which each rank writes a list of its own."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is of the form s3://BUCKET/PREFIX."""
        return _is_place(checkpoint_id)

    @property
    def checkpoint_id(self) -> str:
        """The URI that is written to."""
        return str(self._store.place)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another save, to another place if one is given.

        Raises:
            ValueError: it is no URI.
        """
        if checkpoint_id:
            self._store = self._store.at(Place.of(str(checkpoint_id)))
        self._save_id = str(uuid.uuid4())

    def storage_meta(self) -> StorageMeta:
        """What the list says of where it was written."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self._save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learn this process's part in the save."""
        self._rank = None if kwargs.get("use_collectives", True) else kwargs.get("rank")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Look whether the place may be written to.

        Raises:
            FileExistsError: a checkpoint is there, and none may be overwritten.
        """
        if not self._overwrite and self._store.size(_list_of(None if self._rank is None else 0)) is not None:
            raise FileExistsError(f"{self.checkpoint_id} holds a checkpoint")
        if self._rank is not None:
            return dataclasses.replace(plan, storage_data=_StoragePrefix(f"__{self._rank}_"))
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give each rank the names of its files."""
        return [
            plan if plan.storage_data else dataclasses.replace(plan, storage_data=_StoragePrefix(f"__{rank}_"))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files; done when it returns."""
        groups = [[item] for item in plan.items]
        if self._is_file_per_rank:
            groups = _split_by_size_and_type(self._threads_count, plan.items)
        names = [f"{plan.storage_data.prefix}{number}{DEFAULT_SUFFIX}" for number in range(len(groups))]
        write = partial(self._write_file, planner)
        if self._threads_count == 1:  # in this thread, which has the current device and stream
            written = [*map(write, names, groups)]
        else:
            with ThreadPoolExecutor(self._threads_count) as pool:
                written = [*pool.map(write, names, groups)]
        return _done([result for results in written for result in results])

    def _write_file(self, planner: SavePlanner, name: str, items: list[WriteItem]) -> list[WriteResult]:
        loader = self._loader(planner)
        about_bytes = HEAD_BYTES * len(items)
        for item in items:
            if item.type != WriteItemType.BYTE_IO:
                about_bytes += _item_size(item)
                loader.add(_item_size(item), item)
        loader.start_loading()
        results = []
        with _unmasked(), self._store.create(name, size_bytes=about_bytes) as stream, _without_sums():
            for item in items:
                if item.type == WriteItemType.BYTE_IO:
                    data = planner.resolve_data(item)
                    results.append(_write_item(self._transforms, stream, data, item, name, _FORMAT))
            for tensor, of in loader.values():
                results.append(_write_item(self._transforms, stream, tensor, cast("WriteItem", of), name, _FORMAT))
        return results

    def _loader(self, planner: SavePlanner) -> _SerialCpuLoader | _OverlappingCpuLoader:
        def resolve(item: WriteItem) -> Tensor:
            return alone(cast(Tensor, planner.resolve_data(item)).detach())

        # More threads than one wait for each other's streams.
        if self._threads_count == 1 and self._copy_ahead_bytes > 0 and torch.accelerator.is_available():
            return _OverlappingCpuLoader(resolve, inflight_threshhold=self._copy_ahead_bytes)
        return _SerialCpuLoader(resolve)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the list, by which the checkpoint is there."""
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = {result.index: result.storage_data for each in results for result in each}
        metadata.storage_meta = self.storage_meta()
        with self._store.create(_list_of(self._rank)) as stream:
            stream.write(pickle.dumps(metadata))


class TieredStorageReader(StorageReader):
    """Reads a checkpoint from the nearest place that has its bytes; for `load`.

    Only what is wanted is read, several pieces at a time; what lies in this node's memory is copied from there to the
    tensors, once.

    Args:
        uri: The checkpoint, s3://BUCKET/PREFIX. `checkpoint_id` of a load takes its place.
        trust: Classes that its list may name beside those of torch's own planners, each as "module.name".

    Raises:
        ValueError: the URI is none.
    """

    chosen: Checkpoint | None = None
    """What a reader of the newest checkpoint chose, once it has."""

    def __init__(
        self,
        uri: str,
        *,
        trust: Collection[str] = (),
        _extension_registry: ExtensionRegistry | None = None,
    ) -> None:
        super().__init__()
        self._store = Store(Place.of(uri))
        self._trust = frozenset(trust)
        self._choose: Callable[[], Checkpoint] | None = None
        self._is_found = False
        self._transforms = _StorageReaderTransforms(_extension_registry)
        self._load_id = str(uuid.uuid4())
        self._stored: dict[Any, _StorageInfo] = {}

    @classmethod
    def newest(
        cls,
        run_uri: str,
        *,
        process_group: ProcessGroup | None = None,
        trust_tiers: Collection[str] = (),
        trust: Collection[str] = (),
    ) -> Self:
        """A reader of the newest whole checkpoint below a place, as `tiergate_adapters.newest` finds it (with
        `trust_tiers` as its `trust`).

        It chooses once, when `load` begins or `checkpoint_id` is first asked for, which all ranks of the group must
        then do. `chosen` tells what.
        """
        reader = cls(run_uri, trust=trust)
        reader._choose = partial(newest, run_uri, process_group=process_group, trust=trust_tiers)
        return reader

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is of the form s3://BUCKET/PREFIX."""
        return _is_place(checkpoint_id)

    @property
    def checkpoint_id(self) -> str:
        """The URI that is read.

        `load` asks for it on each rank before anything else, outside of what it wraps into CheckpointException. So
        that there is nothing to load, or that nobody knows, is said here.

        Raises:
            FileNotFoundError: there is no checkpoint.
            UnseenTierError: nobody can say which is the newest.
            ClientError, BotoCoreError: nobody knows, since what had to be asked does not answer.
        """
        if not self._is_found:
            if self._choose is not None:
                self.chosen = self._choose()
                self._store = self._store.at(Place.of(self.chosen.uri))
            elif all(self._store.size(_list_of(rank)) is None for rank in (None, 0)):
                raise FileNotFoundError(f"{self._store.place} holds no checkpoint")
            self._is_found = True
        return str(self._store.place)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another load, of another checkpoint if one is given.

        Raises:
            ValueError: it is no URI.
        """
        if checkpoint_id:
            self._store = self._store.at(Place.of(str(checkpoint_id)))
            self._choose = self.chosen = None
            self._is_found = False
        self._stored = {}
        self._load_id = str(uuid.uuid4())

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The list of the checkpoint; with `rank`, of that rank's part.

        Raises:
            FileNotFoundError: there is none.
            UnpicklingError: it holds what no list needs.
        """
        place = self.checkpoint_id
        with self._store.open(_list_of(kwargs.get("rank"))) as stream:
            metadata = read_list(stream.range(0, stream.size_bytes), trust=self._trust)
        metadata.storage_meta = metadata.storage_meta or StorageMeta(place)
        metadata.storage_meta.load_id = self._load_id
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learn where what is."""
        self._stored = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The same."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The same."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what is planned into the planner's tensors; done when it returns. The planner is called in this thread
        only."""
        wanted: dict[str, dict[tuple[int, int], list[ReadItem]]] = {}
        for item in plan.items:
            info = self._stored[item.storage_index]
            span = (info.offset, info.offset + info.length)
            wanted.setdefault(info.relative_path, {}).setdefault(span, []).append(item)
        with ExitStack() as files, ThreadPoolExecutor(THREADS_COUNT, "tiergate-read") as pool:

            def opened(name: str) -> ObjectReader:
                return files.enter_context(self._store.open(name))

            for file, spans in zip(pool.map(opened, wanted), wanted.values(), strict=True):
                far = []
                for span in sorted(spans):
                    near = file.mapped(*span)
                    if near is None:
                        far.append(span)
                    else:
                        self._deliver(near, spans[span], planner)
                requests = [*_joined(far)]
                views = _ahead(pool, [partial(file.fetched, start, end) for start, end, _ in requests])
                for (start, _, parts), view in zip(requests, views, strict=True):
                    for part in parts:
                        self._deliver([view[part[0] - start : part[1] - start]], spans[part], planner)
        return _done(None)

    def _deliver(self, views: list[memoryview], items: list[ReadItem], planner: LoadPlanner) -> None:
        """Give the planner what lies in a piece."""
        info = self._stored[items[0].storage_index]
        if info.transform_descriptors:
            raw = io.BytesIO(together(views))
            clear = self._transforms.transform_load_stream(items[0], info.transform_descriptors, raw)
            views = [memoryview(clear.read())]
        stored: StoredTensor | None = None
        for item in items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(together(views)))
                continue
            stored = stored or StoredTensor(views)
            target = planner.resolve_tensor(item).detach()
            stored.copy_to(target, item)
            planner.commit_tensor(item, target)


@contextmanager
def _unmasked() -> Iterator[None]:
    """Raises what a stream raised where torch.save ends in an error of its own, that the length is not as expected."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error.__context__, Exception):
            raise error.__context__ from None
        raise


def _without_sums() -> AbstractContextManager[None]:
    """Has torch.save compute no CRC-32 for its archives, in this thread only: torch keeps the setting by thread.

    It takes twice the time of the copy, and no reader of torch looks at it; the gateway has its own sums of all bytes.
    """
    found: AbstractContextManager[None] = cast(Any, serialization).patch({"save.compute_crc32": False})
    return found


def _is_place(checkpoint_id: str | os.PathLike[str]) -> bool:
    try:
        Place.of(str(checkpoint_id))
    except ValueError:
        return False
    return True


def _list_of(rank: int | None) -> str:
    return _metadata_fn if rank is None else f"__{rank}{_metadata_fn}"


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def _joined(
    spans: Iterable[tuple[int, int]],
) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
    """Sorted spans of a file put together to requests, each with what it is for."""
    request: tuple[int, int, list[tuple[int, int]]] | None = None
    for start, end in spans:
        if request is not None and start <= request[1] + GAP_BYTES and end - request[0] <= REQUEST_BYTES:
            request = (request[0], max(request[1], end), [*request[2], (start, end)])
            continue
        if request is not None:
            yield request
        request = (start, end, [(start, end)])
    if request is not None:
        yield request


def _ahead(pool: ThreadPoolExecutor, reads: Iterable[Callable[[], memoryview]]) -> Iterator[memoryview]:
    """What the reads give, in their order, a few ahead of who takes it."""
    pending: deque[Any] = deque()
    try:
        for read in reads:
            pending.append(pool.submit(read))
            if len(pending) == THREADS_COUNT:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for each in pending:
            each.cancel()
