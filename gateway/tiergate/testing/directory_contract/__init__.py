"""What every directory must do: subclass `DirectoryContract` and give it a `directory` fixture."""

import pytest

from tiergate.directory.base import Directory
from tiergate.testing.directory_contract.found import FoundInOrigin
from tiergate.testing.directory_contract.markers import Markers
from tiergate.testing.directory_contract.objects import ObjectTransitions
from tiergate.testing.directory_contract.owed import OwedWrites
from tiergate.testing.directory_contract.parked import ParkedWrites
from tiergate.testing.directory_contract.plans import Plans
from tiergate.testing.directory_contract.scans import Scans
from tiergate.testing.directory_contract.steps import Steps
from tiergate.testing.directory_contract.upkeep import Upkeep
from tiergate.testing.directory_contract.uploads import ClientUploads
from tiergate.testing.directory_contract.values import (
    AWKWARD_KEYS,
    BUCKET,
    MARKER,
    RUN_MARKER,
    SHARD,
    keys_of,
    make_completed,
    make_intent,
    make_part,
    make_upload,
    make_version,
    object_name,
    pending_of,
    put,
    put_clean,
    record_of,
)

__all__ = [
    "AWKWARD_KEYS",
    "BUCKET",
    "MARKER",
    "RUN_MARKER",
    "SHARD",
    "DirectoryContract",
    "keys_of",
    "make_completed",
    "make_intent",
    "make_part",
    "make_upload",
    "make_version",
    "object_name",
    "pending_of",
    "put",
    "put_clean",
    "record_of",
]


class DirectoryContract(
    ObjectTransitions, FoundInOrigin, Scans, OwedWrites, ParkedWrites, Plans, Markers, Steps, ClientUploads, Upkeep
):
    """The contract of `tiergate.directory.base.Directory`."""

    @pytest.fixture
    def directory(self) -> Directory:
        """A new, empty directory; each implementation gives its own in a subclass."""
        raise NotImplementedError
