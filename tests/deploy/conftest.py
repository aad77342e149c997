"""What the tests of `deploy/` share: an installation as the image has it, and an origin."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.deploy.fresh import make_environment
from tests.deploy.members import make_certificates

from tiergate.testing.origins import MotoOrigin


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment in which `.[cluster]` alone is installed."""
    return make_environment(tmp_path_factory.mktemp("image") / "tiergate", "cluster")


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each Secret with certificates."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl on PATH")
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="session")
def origin() -> Iterator[MotoOrigin]:
    with MotoOrigin() as origin:
        yield origin


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder with a short path, on tmpfs where there is one."""
    shared = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="tiergate-deploy-", dir=shared if shared.is_dir() else None))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
