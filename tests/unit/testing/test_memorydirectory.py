"""The directory of simulations keeps the directory's contract."""

import pytest

from tiergate.testing.directory_contract import DirectoryContract
from tiergate.testing.memorydirectory import MemoryDirectory, State


class TestMemoryDirectory(DirectoryContract):
    @pytest.fixture
    def directory(self) -> MemoryDirectory:
        return MemoryDirectory(State())
