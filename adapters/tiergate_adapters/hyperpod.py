"""What a training script of SageMaker HyperPod uses of `amzn_sagemaker_checkpointing`, under the same names.

    from tiergate_adapters.hyperpod import (
        SageMakerCheckpointConfig, SageMakerTieredStorageReader, SageMakerTieredStorageWriter
    )

The layout in S3 is that of the stock package, which loads from S3 what is saved here, and the other way round.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch.distributed as dist
from botocore.exceptions import ClientError, HTTPClientError
from botocore.exceptions import ConnectionError as BotoConnectionError

# Private: the reader below it takes pieces as torch's own list names them.
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.futures import Future

from tiergate_adapters.dcp import TieredStorageReader, TieredStorageWriter
from tiergate_adapters.metadata import TieredPiece, read_list, write_tiered_list
from tiergate_adapters.newest import newest
from tiergate_adapters.place import Place
from tiergate_adapters.store import Store, UnreachableError

if TYPE_CHECKING:
    import os
    from collections.abc import Collection

    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, SavePlanner
    from torch.distributed.checkpoint.storage import WriteResult

SHARD: Final = "checkpoint.pt"
LIST: Final = "metadata.metadata"

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.1, 2.0
_NAMED_COUNT = 5


class SageMakerTieredStorageError(Exception):
    """Any error of a tiered checkpoint."""


class SageMakerInMemoryTierError(SageMakerTieredStorageError):
    """Memory did not take it, or does not give it."""


class SageMakerS3TierError(SageMakerTieredStorageError):
    """S3 did not take it, or does not give it."""


class SageMakerTieredStorageConfigError(SageMakerTieredStorageError):
    """What was configured makes no sense."""


# -- where things are
class S3PathStrategy(ABC):
    """Where a rank's files of a step are. `base_path`: s3://BUCKET/PREFIX.

    The gateway knows the layouts of the two strategies below as checkpoints, and those of others by their marker alone.
    """

    def __init__(self, base_path: str, logger: logging.Logger | None = None) -> None:
        self.base_path = base_path
        self._logger = logger or logging.getLogger(__name__)

    @abstractmethod
    def get_s3_uri(self, namespace: str, rank: int, step: int, filename: str) -> str:
        """The URI of a file."""

    @abstractmethod
    def get_checkpoint_dir(self, namespace: str, step: int) -> str:
        """The URI of the folder that has the files of all ranks.

        Raises:
            NotImplementedError: there is none.
        """


class DefaultS3PathStrategy(S3PathStrategy):
    """A folder for each rank, in it one for each step."""

    def get_s3_uri(self, namespace: str, rank: int, step: int, filename: str) -> str:
        return f"{self.base_path}/{namespace}/rank_{rank}/step_{step}/{filename}"

    def get_checkpoint_dir(self, namespace: str, step: int) -> str:
        raise NotImplementedError(
            "each rank has a folder of its own: no folder has all of a step (RayS3PathStrategy does)"
        )


class RayS3PathStrategy(S3PathStrategy):
    """A folder for each step, in it one for each rank: what Ray Train can take for a checkpoint."""

    def get_s3_uri(self, namespace: str, rank: int, step: int, filename: str) -> str:
        return f"{self.get_checkpoint_dir(namespace, step)}/rank_{rank}/{filename}"

    def get_checkpoint_dir(self, namespace: str, step: int) -> str:
        return f"{self.base_path}/{namespace}/step_{step}"


def _is_in_ray_train() -> bool:
    # Who runs there has it imported.
    train = sys.modules.get("ray.train")
    if train is None:
        return False
    try:
        train.get_context()
    except RuntimeError:
        return False
    return True


@dataclass
class SageMakerCheckpointConfig:
    """Where the checkpoints of a job go.

    Attributes:
        namespace: Of the job, a folder below the base path.
        world_size: How many ranks save; no more than checked: a checkpoint says itself which ranks it has.
        disk_tier_base_path, save_to_disk: Not used, as in the stock package.
        s3_tier_base_path: s3://BUCKET/PREFIX. Within Ray Train the layout is that of RayS3PathStrategy, else that of
            DefaultS3PathStrategy.
        s3_path_strategy: Another choice, instead of it.
        save_to_s3: Whether the next writer's step goes to S3; else it stays in the cluster's memory, where the run's
            prefix has a policy (`persist`), until it is promoted or newer ones supersede it. Set it for each step.
        logger: Where is told what is done.
        wait_for_s3: Whether a save to S3 is over only once S3 has all of it. Without, it is over when memory has.
        wait_for_s3_timeout_s: How long is waited for that, in seconds.

    Raises:
        ValueError: both a base path and a strategy.
    """

    namespace: str
    world_size: int
    disk_tier_base_path: str = ""
    s3_tier_base_path: str = ""
    s3_path_strategy: S3PathStrategy | None = field(default=None)
    save_to_s3: bool = False
    save_to_disk: bool = False
    logger: logging.Logger | None = None
    wait_for_s3: bool = False
    wait_for_s3_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if self.s3_tier_base_path and self.s3_path_strategy:
            raise ValueError("either s3_tier_base_path or s3_path_strategy, not both")

    def get_s3_strategy(self) -> S3PathStrategy | None:
        """The strategy that was given, or the one that fits where this runs; None without a base path."""
        if self.s3_path_strategy or not self.s3_tier_base_path:
            return self.s3_path_strategy
        strategy = RayS3PathStrategy if _is_in_ray_train() else DefaultS3PathStrategy
        return strategy(self.s3_tier_base_path, self.logger)


class _Run:
    """Where the files of a job's steps are. `rank`: of this process.

    Raises:
        SageMakerTieredStorageConfigError: the configuration makes no sense.
        SageMakerS3TierError: it names no bucket.
    """

    def __init__(self, config: SageMakerCheckpointConfig) -> None:
        strategy = _checked(config)
        self.strategy = strategy
        self.namespace = config.namespace
        self.uri = f"{strategy.base_path}/{config.namespace}"
        self.root = Place(_bucket_of(strategy.base_path), "")
        self.rank: int = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0

    def key(self, rank: int, step: int, name: str) -> str:
        """The key of a rank's file."""
        uri = self.strategy.get_s3_uri(self.namespace, rank, step, name)
        if not uri.startswith(f"{self.root}/"):
            raise SageMakerTieredStorageConfigError(f"{uri} is not in {self.root}")
        return uri.removeprefix(f"{self.root}/")

    def scope(self, step: int) -> str:
        """The prefix of rank 0's folder, which stands for all of a step."""
        return self.key(0, step, "")


def _checked(config: SageMakerCheckpointConfig) -> S3PathStrategy:
    if not config.namespace:
        raise SageMakerTieredStorageConfigError("the namespace is empty")
    if config.world_size <= 0:
        raise SageMakerTieredStorageConfigError(f"a world of {config.world_size} ranks saves nothing")
    strategy = config.get_s3_strategy()
    if strategy is None:
        raise SageMakerTieredStorageConfigError(
            "neither s3_tier_base_path nor s3_path_strategy: what stays in memory has a name in S3, too"
        )
    if not strategy.base_path.startswith("s3://"):
        raise SageMakerTieredStorageConfigError(f"{strategy.base_path} does not begin with s3://")
    return strategy


def _bucket_of(base_path: str) -> str:
    bucket = base_path.removeprefix("s3://").partition("/")[0]
    if not bucket:
        raise SageMakerS3TierError(f"{base_path} names no bucket")
    return bucket


def _logger_of(config: SageMakerCheckpointConfig) -> logging.Logger:
    return config.logger or logging.getLogger(__name__)


class SageMakerTieredStorageWriter(TieredStorageWriter):
    """Writes one step of a job; for `save` and `async_save`. One at a time of a job may be on its way.

    Each rank writes one file; the list of all comes last, into rank 0's folder. Every object is acknowledged once the
    cluster's memory has it. Whether the step goes to S3 is what `save_to_s3` says when this is made.

    Args:
        checkpoint_config: Where to, and how.
        path: Where `step_<N>` is taken from if no step is given.
        step: The step, from 0.

    Raises:
        SageMakerTieredStorageError: no step is named.
        SageMakerTieredStorageConfigError: the configuration makes no sense.
        SageMakerS3TierError: it names no bucket.
    """

    def __init__(
        self,
        checkpoint_config: SageMakerCheckpointConfig,
        path: str | os.PathLike[str] = "",
        step: int = -1,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        self.step = _step_of(step, path)
        self._run = _Run(checkpoint_config)
        super().__init__(str(self._run.root), persist="s3" if checkpoint_config.save_to_s3 else "memory")
        self.checkpoint_config = checkpoint_config
        self.rank = self._run.rank
        self.s3_strategy = self._run.strategy
        self.logger = _logger_of(checkpoint_config)
        self.is_coordinator = False
        self.in_memory_success = True
        self.s3_success = False
        self._goes_to_s3 = checkpoint_config.save_to_s3

    @property
    def s3_checkpoint_dir(self) -> str | None:
        """The folder that will have the files of all ranks, known before any is written.

        Raises:
            NotImplementedError: the layout has none.
        """
        return self.s3_strategy.get_checkpoint_dir(self._run.namespace, self.step)

    @property
    def checkpoint_id(self) -> str:
        """The URI of the list."""
        return f"{self._run.root}/{self._run.key(0, self.step, LIST)}"

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """True: the place is that of the configuration, whatever it is called."""
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a save. The place stays what the configuration says."""
        super().reset()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learn this process's part in the save.

        Raises:
            SageMakerTieredStorageError: nobody could read it: a list of only some ranks would be written, or none
                where readers look.
        """
        if not kwargs.get("use_collectives", True):
            raise SageMakerTieredStorageError(
                "one list for all ranks needs collectives: save with use_collectives=True"
            )
        if is_coordinator and self.rank != 0:
            raise SageMakerTieredStorageError(
                f"rank {self.rank} coordinates; readers look for the list with rank 0's file"
            )
        self.is_coordinator = is_coordinator

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The same."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The same."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file; done when it returns."""
        name = self._run.key(self.rank, self.step, SHARD)
        written = self._write_file(planner, name, plan.items)
        done: Future[list[WriteResult]] = Future()
        done.set_result([dataclasses.replace(each, storage_data=self._piece(each.storage_data)) for each in written])
        self.logger.info("step %d: rank %d wrote %d items", self.step, self.rank, len(written))
        return done

    def _piece(self, info: _StorageInfo) -> TieredPiece:
        return TieredPiece(self.rank, info.offset, info.length)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the list, by which the step is there; with `wait_for_s3`, wait until S3 has all of it.

        Raises:
            SageMakerS3TierError: S3 does not have it in time, or refuses it; what of it is named. Memory has it, and it
                goes on its way.
        """
        metadata.storage_data = {result.index: result.storage_data for each in results for result in each}
        metadata.storage_meta = self.storage_meta()
        with self._store.create(self._run.key(0, self.step, LIST)) as stream:
            stream.write(write_tiered_list(metadata))
        if self._goes_to_s3 and self.checkpoint_config.wait_for_s3:
            self._wait_for_s3(stream.etag)
            self.s3_success = True
        self.logger.info("step %d is saved", self.step)

    def storage_meta(self) -> StorageMeta:
        """Nothing that the list needs: it says itself where what is."""
        return StorageMeta()

    def _wait_for_s3(self, etag: str) -> None:
        query = {"x-tiergate-owed": "", "prefix": self._run.scope(self.step)}
        patience_s = self.checkpoint_config.wait_for_s3_timeout_s
        deadline_s, pause_s = time.monotonic() + patience_s, _FIRST_PAUSE_S
        while True:
            fault = ""
            try:
                answer = self._store.route.ask("GET", self._run.root.bucket, query=query, pauses_s=())
            except (HTTPClientError, BotoConnectionError) as error:
                if self._has_s3(etag):
                    return
                fault = f"nobody tells what ({error})"
            else:
                if not answer.is_gateways:
                    return  # S3 itself acknowledged all of it.
                if answer.is_done:
                    owed = answer.document()
                    if not owed["count"]:
                        return
                    fault = _told(owed)
                    if any(each["fault"] for each in owed["objects"]):
                        raise SageMakerS3TierError(f"S3 does not take all of step {self.step}: {fault}")
                else:
                    fault = f"nobody tells what ({answer.message})"
            if time.monotonic() + pause_s > deadline_s:
                raise SageMakerS3TierError(f"after {patience_s:g} s S3 lacks of step {self.step}: {fault}")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)

    def _has_s3(self, etag: str) -> bool:
        """Whether S3 has this very list. It comes there after all that it names, through a gateway as past it."""
        key = self._run.key(0, self.step, LIST)
        try:
            head = self._store.route.at_s3(
                f"head of {key}", lambda client: client.head_object(Bucket=self._run.root.bucket, Key=key)
            )
        except (ClientError, UnreachableError):
            return False
        found: str = head["ETag"]
        return found.strip('"') == etag.strip('"')


def _told(owed: dict[str, Any]) -> str:
    """Some objects that S3 lacks, those that it refuses first, and how many there are."""
    objects = sorted(owed["objects"], key=lambda each: not each["fault"])[:_NAMED_COUNT]
    named = [f"{each['key']} ({each['fault'] or 'on its way'})" for each in objects]
    more = owed["count"] - len(named)
    return ", ".join(named) + (f" and {more} more" if more else "")


def _step_of(step: int, path: str | os.PathLike[str]) -> int:
    """The step that is given, or named in a path.

    Raises:
        SageMakerTieredStorageError: neither.
    """
    found = step
    if step == -1:
        _, named, rest = str(path).partition("step_")
        try:
            found = int(rest.partition("/")[0].partition("step_")[0]) if named else -1
        except ValueError:
            found = -1
    if found < 0:
        raise SageMakerTieredStorageError(f"no step: neither step={step} nor path={str(path)!r} names one")
    return found


class SageMakerTieredStorageReader(TieredStorageReader):
    """Reads a step of a job from the nearest place that has its bytes, and of those only what is wanted; for `load`.

    Args:
        checkpoint_config: Where from.
        step: The step; None: the newest that is whole, over memory and S3, the same for all ranks, which is chosen when
            `load` begins and then stays.
        process_group: The ranks that must agree on it, if they are not all.
        trust: Classes that its list may name beside those of torch's own planners, each as "module.name".

    Raises:
        SageMakerTieredStorageConfigError: the configuration makes no sense.
        SageMakerS3TierError: it names no bucket.
    """

    def __init__(
        self,
        checkpoint_config: SageMakerCheckpointConfig,
        step: int | None = None,
        *,
        process_group: ProcessGroup | None = None,
        trust: Collection[str] = (),
    ) -> None:
        self._run = _Run(checkpoint_config)
        super().__init__(str(self._run.root), trust=trust)
        self.checkpoint_config = checkpoint_config
        self.step = step
        self.rank = self._run.rank
        self.s3_strategy = self._run.strategy
        self.logger = _logger_of(checkpoint_config)
        self.is_coordinator = False
        self._process_group = process_group

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """True: the place is that of the configuration, whatever it is called."""
        return True

    @property
    def checkpoint_id(self) -> str:
        """The URI of the list that is read.

        `load` asks for it on each rank before anything else, outside of what it wraps into CheckpointException. So
        that there is nothing to load, or that nobody knows, is said here.

        Raises:
            FileNotFoundError: there is no such step, or none at all.
            UnseenTierError: nobody can say now which is the newest.
            UnreachableError: nobody who knows answers.
        """
        if self.step is None:
            self.step = self._newest()
        elif not self._is_found and self._store.size(self._list) is None:
            raise FileNotFoundError(f"{self._run.uri} has no step {self.step}, in memory or in S3")
        self._is_found = True
        return f"{self._run.root}/{self._list}"

    @property
    def _list(self) -> str:
        return self._run.key(0, self._known_step, LIST)

    @property
    def _known_step(self) -> int:
        if self.step is None:
            raise SageMakerTieredStorageError("no step is chosen yet: `read_metadata` comes first")
        return self.step

    def _newest(self) -> int:
        found = newest(self._run.uri, process_group=self._process_group)
        if found.step is None:
            raise FileNotFoundError(f"{self._run.uri} has no step; {found.uri} is none")
        self.logger.info("step %d is the newest whole one of %s", found.step, self._run.uri)
        return found.step

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another load, of the same step."""
        super().reset()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The list of the step.

        Raises:
            FileNotFoundError: there is no such step, or none at all.
            UnpicklingError: it holds what no list needs.
        """
        place = self.checkpoint_id
        with self._store.open(self._list) as stream:
            metadata = read_list(stream.range(0, stream.size_bytes), trust=self._trust)
        metadata.storage_meta = metadata.storage_meta or StorageMeta(place)
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learn where what is."""
        self.metadata = metadata
        self.is_coordinator = is_coordinator
        self.storage_data: dict[Any, TieredPiece] = metadata.storage_data
        ranks = {piece.rank for piece in self.storage_data.values()}
        names = {rank: self._run.key(rank, self._known_step, SHARD) for rank in ranks}
        self._stored = {
            index: _StorageInfo(names[piece.rank], piece.offset, piece.length)
            for index, piece in self.storage_data.items()
        }

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The same."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The same."""
        return plans


def promote(checkpoint_config: SageMakerCheckpointConfig, step: int) -> int:
    """Let a step that stays in memory go to S3 after all; how many objects that were. One that is there, or on its way,
    has none.

    Raises:
        SageMakerTieredStorageConfigError, SageMakerS3TierError: as the writer's; S3TierError, too, if the gateway
            refuses.
        HTTPClientError, botocore.exceptions.ConnectionError: it cannot be reached.
    """
    run = _Run(checkpoint_config)
    query = {"x-tiergate-promote": "", "prefix": run.scope(step)}
    answer = Store(run.root).route.ask("POST", run.root.bucket, query=query)
    if not answer.is_gateways:
        return 0
    if not answer.is_done:
        raise SageMakerS3TierError(f"step {step} is not promoted: {answer.message}")
    return int(answer.document()["promoted"])
