"""deploy/systemd: systemd takes the units, and what must agree agrees."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.deploy.fresh import local, served
from tests.deploy.manifests import Workload, needs_kustomize, rendered
from tests.deploy.members import NEWER_THAN_TESTED, flags_of, running
from tests.deploy.units import SYSTEMD, Unit, variables

from tiergate import config
from tiergate.config import Settings
from tiergate.config.load import CONFIG_FILE_ENV
from tiergate.config.values import format_size, parse_size
from tiergate.testing.etcd import etcd_path, needs_etcd
from tiergate.testing.origins import MotoOrigin

UNITS = sorted(path.name for kind in ("service", "mount") for path in SYSTEMD.glob(f"*.{kind}"))
SECRETS = {
    "TIERGATE_SECRET_ACCESS_KEY": "a-secret-of-this-test",
    "TIERGATE_CLUSTER_SECRET": "another-secret-of-this-test-that-is-long",
}

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze on PATH"
)


def analyze(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["systemd-analyze", *words], capture_output=True, text=True, check=False, timeout=60)


def environment() -> dict[str, str]:
    """What the service is given, its secrets filled in."""
    return variables("secrets.env.example") | SECRETS


@pytest.fixture
def config_file(certificates: Path, tmp_path: Path) -> Path:
    """The file of settings, with certificates of this machine in it."""
    text = (SYSTEMD / "tiergate.toml").read_text()
    for name, made in (("ca.crt", "ca.crt"), ("client.crt", "tls.crt"), ("client.key", "tls.key")):
        place = f"/etc/tiergate/etcd-{name}"
        assert place in text
        text = text.replace(place, str(certificates / "tiergate-etcd-client" / made))
    path = tmp_path / "tiergate.toml"
    path.write_text(text)
    return path


@pytest.fixture
def settings(config_file: Path) -> Settings:
    return config.load(config_file=config_file, environ=environment()).settings


# -- valid
@needs_systemd
def test_systemd_takes_the_units(tmp_path: Path) -> None:
    program = shutil.which("true")
    for name in UNITS:
        # What is to be installed there is not: any program may stand for it.
        text = re.sub(r"^(ExecStart=)\S+", rf"\g<1>{program}", (SYSTEMD / name).read_text(), flags=re.MULTILINE)
        (tmp_path / name).write_text(text)
    done = analyze("verify", "--man=no", *(str(tmp_path / name) for name in UNITS))
    assert (done.returncode, done.stderr) == (0, "")


@needs_systemd
def test_systemd_finds_what_is_wrong(tmp_path: Path) -> None:
    unit = tmp_path / "tiergate.service"
    unit.write_text((SYSTEMD / "tiergate.service").read_text().replace("OOMPolicy=", "OomPolicy="))
    assert "OomPolicy" in analyze("verify", "--man=no", str(unit)).stderr


@needs_systemd
@pytest.mark.parametrize("name", ["tiergate.service", "tiergate-etcd.service"])
def test_a_service_may_do_little(name: str) -> None:
    done = analyze("security", "--offline=true", "--threshold=25", str(SYSTEMD / name))
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(shutil.which("systemd-sysusers") is None, reason="there is no systemd-sysusers on PATH")
def test_systemd_takes_the_users() -> None:
    done = subprocess.run(
        ["systemd-sysusers", "--dry-run", str(SYSTEMD / "sysusers.conf")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


# -- what must agree
def test_users_are_the_ones_that_are_made() -> None:
    made = dict(re.findall(r"^u (\S+) (\d+) ", (SYSTEMD / "sysusers.conf").read_text(), re.MULTILINE))
    service, etcd = Unit.read("tiergate.service"), Unit.read("tiergate-etcd.service")
    for unit in (service, etcd):
        assert unit.one("Service", "User") == unit.one("Service", "Group")
        assert unit.one("Service", "User") in made
    number = made[service.one("Service", "User")]
    assert {f"uid={number}", f"gid={number}"} < set(Unit.read("run-tiergate.mount").one("Mount", "Options").split(","))


def test_the_memory_is_in_one_place_and_fits(settings: Settings) -> None:
    service, mount = Unit.read("tiergate.service"), Unit.read("run-tiergate.mount")
    where = mount.one("Mount", "Where")
    assert mount.path.stem == where.strip("/").replace("/", "-"), "systemd wants the name of the place"
    assert service.one("Unit", "Requires") == service.entries["Unit", "After"][1] == mount.path.name
    assert service.one("Service", "ReadWritePaths") == service.one("Service", "WorkingDirectory") == where
    # Removing shared memory with the service would be losing what was acknowledged.
    assert ("Service", "RemoveIPC") not in service.entries
    assert ("Service", "RuntimeDirectory") not in service.entries
    assert str(settings.memory_dir) == where
    size = flags_of(["", *mount.one("Mount", "Options").split(",")])["size"]
    assert parse_size(f"{size}iB") >= settings.memory_limit_bytes, format_size(settings.memory_limit_bytes)


def test_a_stop_is_given_the_time_of_its_drain(settings: Settings) -> None:
    needed_s = settings.drain_s + settings.shutdown_grace_s
    assert Unit.read("tiergate.service").seconds("TimeoutStopSec") >= needed_s + 60


def test_a_node_takes_its_settings(settings: Settings) -> None:
    assert settings.listen.is_loopback
    assert settings.admin_listen.is_loopback
    assert set(SECRETS) < set(variables("secrets.env.example"))


def test_no_file_holds_a_secret() -> None:
    assert {variables("secrets.env.example")[name] for name in SECRETS} == {""}


@needs_etcd
def test_flags_and_variables_of_etcd_exist() -> None:
    program, *words = Unit.read("tiergate-etcd.service").one("Service", "ExecStart").split()
    assert program.endswith("/etcd")
    known = subprocess.run([etcd_path(), "--help"], capture_output=True, text=True, check=True)
    flags = set(re.findall(r"^ +(--[a-z-]+)", known.stdout + known.stderr, re.MULTILINE))
    given = {word.partition("=")[0] for word in words}
    by_variable = {
        f"--{name.removeprefix('ETCD_').lower().replace('_', '-')}" for name in variables("etcd.env.example")
    }
    assert (given | by_variable) - flags == set()
    assert given & by_variable == set(), "etcd refuses to be told twice"


def test_members_of_etcd_are_those_of_the_settings(settings: Settings) -> None:
    given = variables("etcd.env.example")
    hosts = re.findall(r"[\w-]+=https://([\w.-]+):2380", given["ETCD_INITIAL_CLUSTER"])
    assert len(hosts) == 3
    assert settings.cluster == "etcds://" + ",".join(f"{host}:2379" for host in hosts)
    assert f"{given['ETCD_NAME']}={given['ETCD_INITIAL_ADVERTISE_PEER_URLS']}" in given["ETCD_INITIAL_CLUSTER"]


@needs_kustomize
def test_members_are_told_the_same_as_in_kubernetes() -> None:
    places = {"--data-dir", "--name", "--listen-metrics-urls", "--heartbeat-interval", "--election-timeout"}
    here = flags_of(Unit.read("tiergate-etcd.service").one("Service", "ExecStart").split())
    there = flags_of(Workload(rendered("own-etcd").one("StatefulSet")).container["command"])
    given = {f"--{name.removeprefix('ETCD_').lower().replace('_', '-')}" for name in variables("etcd.env.example")}
    assert set(here) | given | NEWER_THAN_TESTED | places == set(there) | places
    same = {flag for flag in here if not flag.endswith("-file")} - places
    assert {flag: here[flag] for flag in same} == {flag: there[flag] for flag in same}


# -- what it runs
@needs_etcd
def test_its_command_serves(
    config_file: Path, certificates: Path, programs: Path, origin: MotoOrigin, memory: Path, tmp_path: Path
) -> None:
    """With members of etcd by the unit's command."""
    etcd, service = Unit.read("tiergate-etcd.service"), Unit.read("tiergate.service")
    command = re.sub(
        r"/etc/tiergate/etcd-(?:server|(ca))\.",
        lambda found: f"/tls/{found[1] or 'tls'}.",
        etcd.one("Service", "ExecStart"),
    )
    program, *words = service.one("Service", "ExecStart").split()
    assert program.endswith("/bin/tiergate")
    (variable,) = service.entries["Service", "Environment"]
    assert variable == f"{CONFIG_FILE_ENV}=/etc/tiergate/tiergate.toml"
    names = re.findall(r"([\w-]+)=https://", variables("etcd.env.example")["ETCD_INITIAL_CLUSTER"])
    with running(command.split(), names, certificates, tmp_path) as endpoints:
        given = environment() | local(memory, origin.endpoint)
        given |= {
            "PATH": str(programs),
            CONFIG_FILE_ENV: str(config_file),
            "TIERGATE_CLUSTER": f"etcds://{','.join(endpoints)}",
            "TIERGATE_ADVERTISE": "127.0.0.1:0",
            "TIERGATE_DRAIN": "0",
        }
        with served(["tiergate", *words], given, tmp_path / "log") as node:
            name = given["TIERGATE_NODE_NAME"]
            node.wait_status(lambda status: [each["node"] for each in status["cluster"]["nodes"]] == [name])
