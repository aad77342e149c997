"""Ray Train through the gateway: the storage of a run, and checkpoints that are saved while training goes on."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, cast

import boto3
import fsspec  # type: ignore[import-untyped]  # has no types
import torch.distributed as dist
from pyarrow.fs import (  # type: ignore[import-untyped]  # has no types
    AwsStandardS3RetryStrategy,
    FSSpecHandler,
    PyFileSystem,
    S3FileSystem,
)
from ray import train
from ray.train import Checkpoint, CheckpointConsistencyMode, CheckpointUploadMode
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save

from tiergate_adapters.newest import NoCheckpointError, newest
from tiergate_adapters.place import Place

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from concurrent.futures import Future

    from torch.distributed.checkpoint.storage import StorageWriter

ATTEMPTS_COUNT = 10
"""How often a request is sent before it fails: a gateway that is started anew meanwhile does not end a run."""


class SaveFailedError(Exception):
    """A checkpoint was not saved. `__cause__` says why."""


# -- storage
class GatewayFileSystem(S3FileSystem):  # type: ignore[misc]  # pyarrow has no types
    """pyarrow's S3 file system at the endpoint that the AWS environment names in the process that uses it.

    One that was made from an `s3://` URI carries the endpoint of the process that made it to all others; this one finds
    another endpoint where it is unpickled on a node that names another.
    """

    def __init__(self, endpoint: str | None = None, region: str | None = None) -> None:
        # boto3 knows all places that may name them: variables, profiles, services sections.
        named = boto3.Session().client("s3", endpoint_url=endpoint, region_name=region).meta
        super().__init__(
            endpoint_override=named.endpoint_url,
            tls_ca_file_path=os.environ.get("AWS_CA_BUNDLE", ""),
            region=region if named.region_name == "aws-global" else named.region_name,
            retry_strategy=AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS_COUNT),
        )
        self._asked = (endpoint, region)

    def __reduce__(self) -> tuple[Any, ...]:
        return GatewayFileSystem, self._asked


def filesystem(endpoint: str | None = None, *, region: str | None = None) -> GatewayFileSystem:
    """What `RunConfig(storage_path="BUCKET/PREFIX", storage_filesystem=…)` takes. Picklable to workers on other nodes.

    Args:
        endpoint: URL of the gateway, for all processes alike; None: what AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL or the
            AWS profile says in each process.
        region: Likewise.
    """
    return GatewayFileSystem(endpoint, region)


def run_uri() -> str:
    """The `s3://` folder of the run, from within its training function: checkpoints must lie below it, for Ray manages
    no others."""
    return f"s3://{_storage().experiment_fs_path}"


def _storage() -> Any:
    """What Ray knows of the run's storage (`StorageContext`, a developer's API)."""
    return train.get_context().get_storage()


# -- checkpoints
_NOWHERE = PyFileSystem(FSSpecHandler(fsspec.filesystem("memory")))
"""A file system that nobody writes to."""


def wait_for(future: Future[Any]) -> Callable[[Checkpoint, str], Checkpoint]:
    """A `checkpoint_upload_fn` for a save that runs already: it returns the checkpoint once `future` is done.

    What lies at the checkpoint's path stays there also if the caller of `ray.train.report` forgot
    `delete_local_checkpoint_after_upload=False`. A save that failed ends the training function with `SaveFailedError`;
    torch's own exception would leave the run hanging, since it is none that Ray catches.
    """

    def upload(checkpoint: Checkpoint, _: str) -> Checkpoint:
        _settle(future)
        # Ray compares file systems with that of the run, and deletes what it takes for a local copy.
        saved = Checkpoint(checkpoint.path, filesystem=_storage().storage_filesystem)
        checkpoint.filesystem = _NOWHERE
        return saved

    return upload


class Saves:
    """The checkpoints of one worker, one at a time, made in the training function on all ranks alike.

    Holds a process group of its own, so that what a save says to other ranks in the background never mixes with what
    training says to them.
    """

    def __init__(self) -> None:
        group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self.process_group = cast("dist.ProcessGroup | None", group)
        self._future: Future[Any] | None = None
        reported = train.get_all_reported_checkpoints(consistency_mode=CheckpointConsistencyMode.COMMITTED)
        self._known = {each.checkpoint.path for each in reported}
        self._saved: set[str] = set()

    def newest(self, uri: str = "", *, trust: Collection[str] = ()) -> Checkpoint | None:
        """The newest whole checkpoint of the run, over all tiers, the same on all ranks; None if there is none.

        It may be newer than `ray.train.get_checkpoint()`, which knows only what was reported: Ray is told of it then,
        so that it counts among those to keep.

        Args:
            uri: Where the run's checkpoints are, below `run_uri()`, which is the default.
            trust: Tiers whose word is enough ("memory", "s3"), as of `tiergate_adapters.newest.newest`.

        Raises:
            UnseenTierError: nobody can say now. It does not mean that there is none.
        """
        try:
            path = _path(newest(uri or run_uri(), process_group=self.process_group, trust=trust).uri)
        except NoCheckpointError:
            return None
        found = Checkpoint(path, filesystem=_storage().storage_filesystem)
        if path not in self._known:
            train.report({}, checkpoint=found, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)
            self._known.add(path)
        return found

    def async_save(self, state: dict[str, Any], *, storage_writer: StorageWriter, **options: Any) -> Future[Any]:
        """torch's `async_save`, once the save before it is over: two at a time wait for each other for ever.

        `state` may be changed as soon as this returns.

        Raises:
            SaveFailedError: the save before this one failed.
        """
        self.wait()
        options = {"process_group": self.process_group} | options
        begun = async_save(state, storage_writer=storage_writer, **options)
        if isinstance(begun, AsyncSaveResponse):
            begun.staging_completion.result()
            begun = begun.upload_completion
        self._future = begun
        return begun

    def save(self, metrics: dict[str, Any], state: dict[str, Any], writer: StorageWriter, **options: Any) -> None:
        """Save `state` in the background and report it to Ray once it is whole. Waits for the save before it.

        Args:
            metrics: As `ray.train.report` takes them.
            state: As `async_save` takes it; it may be changed as soon as this returns.
            writer: Its `s3_checkpoint_dir`, or else its `checkpoint_id`, is where it writes to.
            options: Further arguments of `async_save`.

        Raises:
            ValueError: the place is not below the run, or has been saved to before by this object.
            SaveFailedError: the save before this one failed.
        """
        path = _path(getattr(writer, "s3_checkpoint_dir", None) or getattr(writer, "checkpoint_id", ""))
        storage = _storage()
        if not path.startswith(f"{storage.experiment_fs_path}/"):
            raise ValueError(f"s3://{path} is not below {run_uri()}, where Ray manages checkpoints")
        if path in self._saved:
            raise ValueError(f"s3://{path} is saved to twice: Ray would delete both when the first gets too old")
        future = self.async_save(state, storage_writer=writer, **options)
        self._saved.add(path)
        if path in self._known:
            # An earlier attempt reported it, and it was lost since. Ray would take a second report for another one.
            self.wait()
            train.report(metrics)
            return
        train.report(
            metrics,
            checkpoint=Checkpoint(path, filesystem=storage.storage_filesystem),
            checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
            checkpoint_upload_fn=wait_for(future),
            delete_local_checkpoint_after_upload=False,
        )

    def wait(self) -> None:
        """Wait for the save in progress, if there is one. Ray waits at the end of the training function by itself.

        Raises:
            SaveFailedError: it failed.
        """
        future, self._future = self._future, None
        if future is not None:
            _settle(future)


def _path(uri: object) -> str:
    """What pyarrow calls a place."""
    return str(Place.of(str(uri))).removeprefix("s3://")


def _settle(future: Future[Any]) -> None:
    try:
        future.result()
    except BaseException as error:  # torch's CheckpointException is no Exception
        raise SaveFailedError(f"the checkpoint was not saved: {error}") from error
