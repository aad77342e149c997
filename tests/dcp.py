"""The list of a checkpoint as torch.distributed.checkpoint writes it, without a whole save."""

import pickle

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex


def dcp_list(*files: str, size_bytes: int = 1) -> bytes:
    """A `.metadata` that names these files, of each its first bytes."""
    names = {name: f"part of {name}" for name in files}
    return pickle.dumps(
        Metadata(
            state_dict_metadata={fqn: BytesStorageMetadata() for fqn in names.values()},
            storage_data={MetadataIndex(fqn): _StorageInfo(name, 0, size_bytes) for name, fqn in names.items()},
        )
    )
