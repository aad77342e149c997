"""The command line of the folder sync, and how `tiergate` finds it."""

import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import EntryPoint, distribution
from pathlib import Path
from typing import Any

import pytest

from tiergate import cli
from tiergate_adapters.sagemaker import command as sync
from tiergate_adapters.sagemaker.command import EXIT_FAILED, SyncCommand

ROOT = Path(__file__).parents[2]
ENTRY = "tiergate_adapters.sagemaker.command:command"

Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Has the command line find these commands, and no others."""

    def found(**values: str) -> None:
        entries = [EntryPoint(name, value, "tiergate.commands") for name, value in values.items()]
        monkeypatch.setattr(
            cli, "entry_points", lambda **asked: entries if asked == {"group": entries[0].group} else ()
        )

    return found


def test_the_installed_distribution_offers_the_command() -> None:
    offered = distribution("tiergate").entry_points.select(group="tiergate.commands")
    assert [(each.name, each.value) for each in offered] == [("sync", ENTRY)]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["tiergate.commands"] == {"sync": ENTRY}
    assert isinstance(offered["sync"].load(), SyncCommand)


def test_the_help_lists_it_in_one_line_and_loads_nothing_for_it(install: Install, capsys: Any) -> None:
    install(sync=ENTRY)
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.split()[:1] == ["sync"]]
    assert line.split(maxsplit=1)[1] == SyncCommand.help
    code = "import sys, tiergate_adapters.sagemaker.command\n"
    code += "print([name for name in ('boto3', 'watchfiles', 'botocore', 'rich') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_without_watchfiles_it_says_what_to_install(
    install: Install, capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(sync=ENTRY)
    monkeypatch.setitem(sys.modules, "watchfiles", None)
    assert cli.main(["sync", str(tmp_path), "s3://b/p"]) == cli.EXIT_USAGE
    assert "watchfiles is not installed: install tiergate with its extra `sync`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["b/p"], "b/p is not of the form s3://BUCKET/PREFIX"),
        (["s3://b/p", "--instance", "a/b"], "'a/b' is no name of an instance"),
        (["s3://b/p", "--instance", ".."], "'..' is no name of an instance"),
        (["s3://b/p", "--settle", "-1"], "invalid number value: '-1'"),
        (["s3://b/p", "--parallel", "0.5"], "invalid number value: '0.5'"),
        (["s3://b/p", "--once", "--no-follow"], "not allowed with argument"),
        (["s3://b/p", "--instance", "a", "--per-instance"], "not allowed with argument"),
        (["s3://b/p", "--what"], "unrecognized arguments: --what"),
        ([], "the following arguments are required"),
    ],
)
def test_a_wrong_command_line_is_one_line(
    install: Install, capsys: Any, tmp_path: Path, words: list[str], fault: str
) -> None:
    install(sync=ENTRY)
    assert cli.main(["sync", str(tmp_path), *words]) == cli.EXIT_USAGE
    said = capsys.readouterr().err
    assert fault in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"AWS_ENDPOINT_URL": "foo"}, "the AWS configuration is wrong: Invalid endpoint: foo"),
        ({"AWS_ENDPOINT_URL": "127.0.0.1:9000"}, "the AWS configuration is wrong: Invalid endpoint: 127.0.0.1:9000"),
        ({"AWS_PROFILE": "no-such"}, "the AWS configuration is wrong: The config profile (no-such) could not be found"),
        ({"AWS_SECRET_ACCESS_KEY": ""}, "the AWS configuration is wrong: Partial credentials found in env"),
        ({"AWS_ACCESS_KEY_ID": ""}, "no AWS keys are found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
    ],
)
def test_an_environment_without_endpoint_or_keys_is_one_line(
    install: Install,
    capsys: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, str],
    fault: str,
) -> None:
    install(sync=ENTRY)
    values = {name: str(tmp_path / "none") for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE")}
    values |= {"AWS_EC2_METADATA_DISABLED": "true", "AWS_ENDPOINT_URL": "http://127.0.0.1:1"}
    values |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    for name, value in (values | changes).items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    assert cli.main(["sync", str(tmp_path / "folder"), "s3://b/p", "--no-follow"]) == cli.EXIT_USAGE
    said = capsys.readouterr().err
    assert said.startswith(f"tiergate: {fault}")
    assert said.count("\n") == 1


def test_a_folder_that_cannot_be_is_said(install: Install, capsys: Any, tmp_path: Path) -> None:
    install(sync=ENTRY)
    (tmp_path / "file").touch()
    assert cli.main(["sync", str(tmp_path / "file"), "s3://b/p"]) == EXIT_FAILED
    assert "is no folder to use" in capsys.readouterr().err


def test_a_command_that_cannot_be_loaded_takes_no_other_down(install: Install, capsys: Any) -> None:
    install(broken="no.such.module:command", status="tiergate_adapters.sagemaker.command:command")
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    shown = capsys.readouterr().out
    assert "broken" in shown
    assert "show what a running node does" in shown, "a command of the gateway was replaced"
    assert cli.main(["broken"]) == cli.EXIT_FAILED
    assert "broken cannot be loaded from no.such.module:command" in capsys.readouterr().err


def test_the_name_of_the_instance_is_sagemakers(tmp_path: Path) -> None:
    resources = tmp_path / "resourceconfig.json"
    assert sync._sagemaker_instance({"SM_CURRENT_HOST": "algo-2"}, resources) == "algo-2"
    resources.write_text('{"current_host": "algo-1", "hosts": ["algo-1", "algo-2"]}')
    assert sync._sagemaker_instance({}, resources) == "algo-1"


@pytest.mark.parametrize("text", [None, "", "[]", "{}"])
def test_an_instance_without_a_name_is_a_wrong_environment(
    install: Install, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    install(sync=ENTRY)
    monkeypatch.delenv("SM_CURRENT_HOST", raising=False)
    monkeypatch.setattr(sync, "RESOURCES", tmp_path / "resourceconfig.json")
    if text is not None:
        (tmp_path / "resourceconfig.json").write_text(text)
    assert cli.main(["sync", str(tmp_path), "s3://b/p", "--per-instance"]) == cli.EXIT_USAGE
    assert "names the instance" in capsys.readouterr().err


def test_systemd_is_told(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(30)
        sync._tell_ready(None, {"NOTIFY_SOCKET": str(tmp_path / "notify")})
        assert systemd.recv(100) == b"READY=1"
    name = f"tiergate-{tmp_path.name}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(f"\0{name}")
        systemd.settimeout(30)
        sync._tell_ready(tmp_path / "run" / "ready", {"NOTIFY_SOCKET": f"@{name}"})
        assert systemd.recv(100) == b"READY=1"
    assert (tmp_path / "run" / "ready").exists()
