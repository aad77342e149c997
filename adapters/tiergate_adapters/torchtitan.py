"""torchtitan's checkpoints in the nearest gateway: its own manager, with a folder in S3.

    torchtitan.train.CheckpointManager = tiergate_adapters.torchtitan.CheckpointManager

torchtitan saves to any URL that torch knows, yet looks for checkpoints, and deletes old ones, in local folders only.
Its names that begin with an underscore are those of 0.2.2.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save
from torchtitan.components import checkpoint as titan  # type: ignore[import-untyped]  # has no types
from torchtitan.tools.utils import GarbageCollection  # type: ignore[import-untyped]  # has no types

from tiergate_adapters.dcp import TieredStorageReader, TieredStorageWriter
from tiergate_adapters.newest import NoCheckpointError, newest
from tiergate_adapters.place import Place
from tiergate_adapters.store import Store

if TYPE_CHECKING:
    from concurrent.futures import Future

    from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

_LIST = re.compile(r"step-(\d+)/\.metadata")


class CheckpointManager(titan.CheckpointManager):  # type: ignore[misc]  # torchtitan has no types
    """Takes what torchtitan's takes. Its `checkpoint.folder` is s3://BUCKET/PREFIX; `job.dump_folder` does not count.

    The checkpoint to go on from is the newest whole one over all tiers, the same on all ranks.
    Checkpoints in Hugging Face's format, for which `last_save_in_hf` asks, are written to local folders only.

    Raises:
        ValueError: the folder is none in S3, or something is asked for that only works in a local one.
    """

    def __init__(self, *, base_folder: str = "", **given: Any) -> None:
        config = given["checkpoint_config"]
        if config.enable:
            Place.of(config.folder)
            if config.last_save_in_hf:
                raise ValueError("checkpoint.last_save_in_hf needs a local checkpoint.folder")
        super().__init__(base_folder="", **given)
        if self.enable_ft_dataloader_checkpoints:
            raise ValueError("checkpoint.enable_ft_dataloader_checkpoints needs a local checkpoint.folder")

    @torch.no_grad()
    def load(self, step: int = -1) -> bool:
        """Load a step, or the newest whole one (-1); what `initial_load_path` says if there is none. Whether anything
        was loaded.

        Raises:
            UnseenTierError: nobody can say now which is the newest.
            FileNotFoundError: this step is not there.
        """
        if not self.enable:
            return False
        if step == -1:
            try:
                uri = newest(self.folder).uri
            except NoCheckpointError:
                return bool(super().load(step))
            step = int(uri.rpartition("step-")[2])
        # Step 0 is a seed: the model alone.
        states = self._states_to_load(model_only=step == 0)
        self.dcp_load(states, checkpoint_id=self._create_checkpoint_id(step), from_hf=False, from_quantized=False)
        GarbageCollection.collect("GC collection for checkpoint loading.")
        return True

    @torch.no_grad()
    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: titan.AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Future[Any] | AsyncSaveResponse | None:
        """Save a step at the speed of memory."""
        writer = TieredStorageWriter(checkpoint_id)
        result: Future[Any] | AsyncSaveResponse | None = None
        if async_mode == titan.AsyncMode.ASYNC:
            result = async_save(state_dict, storage_writer=writer, process_group=self.pg)
        elif async_mode == titan.AsyncMode.ASYNC_WITH_PINNED_MEM:
            result = async_save(
                state_dict,
                storage_writer=writer,
                process_group=self.pg,
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
                async_stager=self.stager,
            )
        else:
            save(state_dict, storage_writer=writer)
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")
        return result

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """Load a step, or what `initial_load_path` names."""
        if from_hf or not checkpoint_id.startswith("s3://"):
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        state_dict_loader.load(state_dict, storage_reader=TieredStorageReader(checkpoint_id))
        if titan.MODEL in self.states:
            self.states[titan.MODEL].load_state_dict(state_dict)

    def _purge_stale_checkpoints(self) -> None:
        """Keep the newest `keep_latest_k` whole steps, and what is newer than those."""
        if self.keep_latest_k <= 0 or dist.get_rank() != 0:
            return
        store = Store(Place.of(self.folder))
        names = store.names()
        whole = sorted(int(found[1]) for name in names if (found := _LIST.fullmatch(name)))
        if len(whole) <= self.keep_latest_k:
            return
        oldest = whole[-self.keep_latest_k]
        store.delete(name for name in names if (found := re.match(r"step-(\d+)/", name)) and int(found[1]) < oldest)
