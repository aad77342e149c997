"""Settings: three sources in order of precedence, every kind of fault, the reference."""

import os
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiergate import config
from tiergate.config import (
    DECLARATIONS,
    Address,
    ClientAuth,
    EtagMode,
    EtcdPlace,
    FenceMode,
    Machine,
    Persist,
    Secret,
    Settings,
)
from tiergate.config.machine import _ram_bytes  # pyright: ignore[reportPrivateUsage]
from tiergate.config.values import format_duration, format_size, parse_duration, parse_size
from tiergate.errors import ConfigError

GIB = 1 << 30
MACHINE = Machine(ram_bytes=64 * GIB, cores_count=9, user_id=1234)
KEYS = {"TIERGATE_ACCESS_KEY_ID": "me", "TIERGATE_SECRET_ACCESS_KEY": "very-secret"}
MEMBER = {
    "TIERGATE_CLUSTER": "etcd://10.0.0.1:2379",
    "TIERGATE_NODE_NAME": "a",
    "TIERGATE_ADVERTISE": "127.0.0.1:7001",
}
PAIRS = (
    ("etcd_user", "etcd_password"),
    ("etcd_tls_cert", "etcd_tls_key"),
    ("peer_tls_cert", "peer_tls_key", "peer_tls_ca"),
)
DAEMON = {"TIERGATE_DAEMON_LISTEN": "127.0.0.1:9200", "TIERGATE_DAEMON_URI": "s3://b/daemon"}
FILES = ("etcd_tls_ca", "etcd_tls_cert", "etcd_tls_key", "peer_tls_cert", "peer_tls_key", "peer_tls_ca")
DOCS = Path(__file__).parents[2] / "gateway" / "docs"


def read(
    toml: str = "",
    env: dict[str, str] | None = None,
    flags: dict[str, str | list[str]] | None = None,
    unknown: tuple[str, ...] = (),
    *,
    folder: Path | None = None,
) -> config.Loaded:
    path = None
    if folder is not None:
        path = folder / "node.toml"
        path.write_text(toml)
    return config.load(config_file=path, environ=env or {}, flags=flags or {}, unknown_flags=unknown, machine=MACHINE)


def faults(
    toml: str = "",
    env: dict[str, str] | None = None,
    flags: dict[str, str | list[str]] | None = None,
    unknown: tuple[str, ...] = (),
    *,
    folder: Path | None = None,
) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(toml, env, flags, unknown, folder=folder)
    return caught.value.faults


def test_defaults_come_from_the_machine() -> None:
    settings = read().settings
    assert settings.memory_dir == Path("/dev/shm/tiergate-1234")
    assert settings.memory_limit_bytes == 16 * GIB
    assert settings.workers_count == 4
    assert settings.listen == Address("127.0.0.1", 9000)
    assert settings.admin_listen == Address("127.0.0.1", 9001)
    assert settings.client_auth is ClientAuth.NONE
    assert settings.clock_skew_s == 900


def test_workers_on_one_core_is_one() -> None:
    loaded = config.load(environ={}, machine=replace(MACHINE, cores_count=1))
    assert loaded.settings.workers_count == 1


def test_flag_wins_over_environment_wins_over_file(tmp_path: Path) -> None:
    toml = 'memory_limit = "1GiB"\nworkers = 2\nrevalidate = 1'
    env = {"TIERGATE_MEMORY_LIMIT": "2GiB", "TIERGATE_WORKERS": "3"}
    loaded = read(toml, env, {"memory_limit_bytes": "3GiB"}, folder=tmp_path)
    assert loaded.settings.memory_limit_bytes == 3 * GIB
    assert loaded.settings.workers_count == 3
    assert loaded.settings.revalidate_s == 1
    assert loaded.sources["memory_limit_bytes"] == "--memory-limit"
    assert loaded.sources["workers_count"] == "TIERGATE_WORKERS"
    assert loaded.sources["revalidate_s"] == f"{tmp_path / 'node.toml'}: revalidate"
    assert loaded.sources["origin"] == "default"


def test_file_named_by_the_environment_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text("workers = 7")
    assert read(env={"TIERGATE_CONFIG": str(path)}).settings.workers_count == 7


@pytest.mark.parametrize("field", [field.name for field in fields(Settings)])
def test_every_setting_comes_from_file_environment_and_flag(field: str, tmp_path: Path) -> None:
    samples = {
        "replicas_count": "3",
        "listen": "127.0.0.1:1",
        "admin_listen": "[::1]:2",
        "host_suffixes": "s3.local,s3.example",
        "access_key_id": "me",
        "secret_access_key": "secret",
        "client_auth": "origin",
        "memory_dir": "/x/y",
        "origin": "http://10.0.0.1:3",
        "region": "eu-central-1",
        "conditional_writes": "off",
        "fence": "strict",
        "markers": "*.done",
        "prefixes": "{uri = 's3://b/p/', exclusive = true}",
        "log_level": "error",
        "log_format": "json",
        "origin_backoff_s": "7s",
        "dirty_age_slow_s": "7s",
        "origin_checksums": "false",
        "cluster": "etcds://10.0.0.1:2379,etcd-2:2379/team",
        "node_name": "node-7",
        "advertise": "127.0.0.1:7001",
        "peer_listen": "127.0.0.1:7002",
        "zone": "rack-3",
        "cluster_secret": "sixteen characters",
        "etcd_user": "me",
        "etcd_password": "secret",
        "daemon_listen": "127.0.0.1:9210",
        "daemon_uri": "s3://b/other",
        "daemon_allow": "10.0.0.0/8,fd00::/8",
    } | {field: str(tmp_path / "file.pem") for field in FILES}
    (tmp_path / "file.pem").write_text("PEM")
    declaration = DECLARATIONS[field]
    text = samples.get(field) or ("9MiB" if field.endswith("_bytes") else "77")
    env = {name: value for name, value in KEYS.items() if field in ("access_key_id", "secret_access_key")}
    if declaration.section == "Cluster":
        env = MEMBER | {"TIERGATE_CLUSTER": "etcds://10.0.0.1:2379"}
        pair = next((pair for pair in PAIRS if field in pair), ())
        env |= {DECLARATIONS[other].env: samples[other] for other in pair}
    if declaration.section == "Memory daemon":
        env = DAEMON
    flag_text = text
    if declaration.is_secret:
        (tmp_path / "secret").write_text(f"{text}\n")
        flag_text = f"@{tmp_path / 'secret'}"
    path = tmp_path / "node.toml"
    path.write_text(f'{declaration.name} = "{text}"\n')
    others = {name: value for name, value in env.items() if name != declaration.env}
    given = [
        config.load(config_file=path, environ=others, machine=MACHINE).settings,
        config.load(environ=others | {declaration.env: text}, machine=MACHINE).settings,
        config.load(environ=others, flags={field: flag_text}, machine=MACHINE).settings,
    ]
    values = [getattr(settings, field) for settings in given]
    assert values[0] == values[1] == values[2]
    assert values[0] != getattr(read().settings, field)


def test_names_outside_are_unique_and_carry_no_unit() -> None:
    names = [declaration.name for declaration in DECLARATIONS.values()]
    assert len(set(names)) == len(names)
    assert not [name for name in names if name.endswith(("_bytes", "_s", "_count"))]
    assert {declaration.flag for declaration in DECLARATIONS.values()} >= {
        "--listen",
        "--admin-listen",
        "--origin",
        "--memory-dir",
        "--memory-limit",
        "--workers",
    }


def test_empty_variable_counts_as_absent() -> None:
    assert read(env={"TIERGATE_ORIGIN": ""}).settings.origin == ""


def test_variables_kubernetes_makes_for_a_service_are_no_fault() -> None:
    env = {
        "TIERGATE_SERVICE_HOST": "10.0.0.1",
        "TIERGATE_SERVICE_PORT": "9000",
        "TIERGATE_SERVICE_PORT_S3": "9000",
        "TIERGATE_PORT": "tcp://10.0.0.1:9000",
        "TIERGATE_PORT_9000_TCP": "tcp://10.0.0.1:9000",
        "TIERGATE_PORT_9000_TCP_ADDR": "10.0.0.1",
    }
    assert read(env=env).settings == read().settings


def test_all_faults_of_all_sources_are_reported_together(tmp_path: Path) -> None:
    found = faults(
        'memory_limit = "2G"\nworkrs = 3\nfence = "of"',
        {"TIERGATE_LISTN": "x", "TIERGATE_WORKERS": "many"},
        {"listen": "9000", "revalidate_s": "-1"},
        ("--memry-dir=/x", "stray"),
        folder=tmp_path,
    )
    path = tmp_path / "node.toml"
    assert found == [
        f'{path}: memory_limit: "2G" is not a size (such as 2GiB, 512MiB or a number of bytes)',
        f"{path}: workrs: there is no such setting, did you mean workers?",
        f'{path}: fence: "of" is not one of auto, strict, off',
        "TIERGATE_LISTN: there is no such setting, did you mean TIERGATE_LISTEN?",
        'TIERGATE_WORKERS: "many" is not a whole number',
        '--listen: "9000" is not HOST:PORT (such as 127.0.0.1:9000, port 0 for any free one)',
        '--revalidate: "-1" is not a duration (such as 60s, 5m, 6h or a number of seconds)',
        "--memry-dir: there is no such flag, did you mean --memory-dir?",
        '"stray": unexpected on the command line',
    ]


def test_overridden_fault_is_still_reported() -> None:
    assert faults(env={"TIERGATE_WORKERS": "x"}, flags={"workers_count": "1"}) == [
        'TIERGATE_WORKERS: "x" is not a whole number'
    ]


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("workers =", "is not TOML: Invalid value (at end of document)"),
        ("workers = true", "workers: True is not a whole number"),
        ("workers = 0", "workers: 0 is out of bounds, at least 1 is needed"),
        ("workers = 1000", "workers: 1000 is out of bounds, at most 256 is needed"),
        ('memory_limit = "1KiB"', "memory_limit: 1KiB is out of bounds, at least 8MiB is needed"),
        ('memory_limit = "1.0000000001KiB"', "is not a whole number of bytes"),
        ("revalidate = nan", "revalidate: nan is not a duration"),
        ('memory_dir = "relative"', 'memory_dir: "relative" is not an absolute path'),
        ('listen = "http://127.0.0.1:9000/"', "is a URL, not HOST:PORT (write 127.0.0.1:9000)"),
        ('listen = "::1:9000"', "has an IPv6 address without brackets (write [::1]:9000)"),
        ('listen = "[::x]:9000"', "has no valid IPv6 address in its brackets"),
        ('listen = ":9000"', "has no host (write 0.0.0.0:9000 for all interfaces)"),
        ('listen = "127.0.0.1:70000"', "is not HOST:PORT"),
        ('listen = "a b:1"', "has no valid host"),
        ('origin = "s3.example.com"', "is not an endpoint URL"),
        ('origin = "ftp://s3.example.com"', "is not an endpoint URL"),
        ('origin = "http://h/path"', "has more than scheme, host and port"),
        ('origin = "http://h:x"', "is not a URL"),
        ('origin = "http://me:pw@h"', "the URL holds credentials"),
        ('cluster = "http://h:1"', "is not etcd://HOST:PORT,HOST:PORT"),
        ('cluster = "etcd://h"', '"h" is not HOST:PORT'),
        ('cluster = "etcd://h:1,"', '"" is not a text'),
        ('cluster = "etcd://h:0"', '"h:0" has no port'),
        ('cluster = "etcd://h:1/a/b"', '"a/b" is not a name'),
        ('cluster = "etcd://me:pw@h:1"', "the URL holds credentials"),
        ('node_name = "a/b"', '"a/b" is not a name'),
        ('node_name = "-a"', '"-a" is not a name'),
        ('lease = "2s"', "lease: 2s is out of bounds, at least 3s is needed"),
        ('lease = "3.5s"', '"3.5s" is not a number of whole seconds'),
        ('cluster_secret = "short"', "cluster_secret: the value is shorter than 16 characters"),
        ('etcd_tls_ca = "/no/such.pem"', '"/no/such.pem" cannot be read: No such file or directory'),
        ('peer_tls_key = "relative.pem"', "is not an absolute path"),
        ('client_auth = "maybe"', 'client_auth: "maybe" is not one of keys, none, origin'),
        ("markers = [3]", "markers: 3 is not a text"),
        ('host_suffixes = ["http://x"]', "is not a domain name"),
        ("secret_access_key = 3", "secret_access_key: the value is not a text"),
        ('prefix = "x"', "is not an inline table"),
        ("[prefix]\nimmutable = true", 'prefix: uri: "" is not s3://BUCKET/PREFIX'),
        ('[[prefix]]\nuri = "s3://"', "prefix: uri:"),
        (
            '[[prefix]]\nuri = "s3://b/"\nimutable = true',
            '"imutable" is no key of a prefix, did you mean immutable?',
        ),
        ('[[prefix]]\nuri = "s3://b/"\netag = "md5"', 'prefix: etag: "md5" is not one of auto, exact'),
        ('[[prefix]]\nuri = "s3://b/"\nexclusive = 1', "prefix: exclusive: 1 is neither true nor false"),
        ('[[prefix]]\nuri = "s3://b/"\npersist = "some"', 'prefix: persist: "some" is none of all, none, every COUNT'),
        ('[[prefix]]\nuri = "s3://b/"\npersist = "every 0"', 'prefix: persist: "every 0" is none of'),
        ('[[prefix]]\nuri = "s3://b/"\npersist = "every now"', 'prefix: persist: "every now" is none of'),
        ('[[prefix]]\nuri = "s3://b/run"\npersist = "all"', 'prefix: uri: "s3://b/run" does not end with a slash'),
        ('[[prefix]]\nuri = "s3://b/"\npersist = "all"\nkeep = 0', "prefix: keep: 0 is not at least 1"),
        ('[[prefix]]\nuri = "s3://b/run"\nkeep = 3', "does not end with a slash"),
        ('[[prefix]]\nuri = "s3://b/p"\n[[prefix]]\nuri = "s3://b/p"', '"s3://b/p" is given twice'),
    ],
)
def test_fault_of_one_value_is_one_line_that_names_the_file(toml: str, message: str, tmp_path: Path) -> None:
    (line,) = faults(toml, folder=tmp_path)
    assert line.startswith(f"{tmp_path / 'node.toml'}: ")
    assert message in line


def test_file_that_cannot_be_read_is_a_fault(tmp_path: Path) -> None:
    missing = tmp_path / "missing.toml"
    with pytest.raises(ConfigError, match="cannot be read: No such file or directory"):
        config.load(config_file=missing, environ={}, machine=MACHINE)


def test_value_with_newlines_stays_one_line() -> None:
    (line,) = faults(env={"TIERGATE_WORKERS": "1\n2\x1b[31m"})
    assert line == 'TIERGATE_WORKERS: "1\\n2\\x1b[31m" is not a whole number'


@pytest.mark.parametrize("address", ["0.0.0.0:9000", "[::]:9000", "10.1.2.3:9000", "node7:9000"])
@pytest.mark.parametrize("field", ["listen", "admin_listen"])
def test_address_beyond_loopback_without_credentials_is_refused(address: str, field: str) -> None:
    (line,) = faults(flags={field: address, "admin_listen" if field == "listen" else "listen": "127.0.0.1:0"})
    assert line.startswith(f"{DECLARATIONS[field].flag}: {address} is not a loopback address")
    settings = read(env=KEYS, flags={field: address}).settings
    assert settings.client_auth is ClientAuth.KEYS
    assert str(getattr(settings, field)) == address
    assert read(flags={field: address, "client_auth": "origin"}).settings.client_auth is ClientAuth.ORIGIN


@pytest.mark.parametrize("address", ["127.0.0.1:0", "127.9.9.9:1", "[::1]:0", "localhost:9000"])
def test_loopback_address_needs_no_credentials(address: str) -> None:
    assert str(read(flags={"listen": address}).settings.listen) == address


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"ACCESS_KEY_ID": "me"}, "TIERGATE_ACCESS_KEY_ID: is given without secret_access_key"),
        ({"SECRET_ACCESS_KEY": "s"}, "TIERGATE_SECRET_ACCESS_KEY: is given without access_key_id"),
        ({"CLIENT_AUTH": "keys"}, "TIERGATE_CLIENT_AUTH: `keys` needs TIERGATE_ACCESS_KEY_ID"),
        (
            {"LISTEN": "127.0.0.1:5", "ADMIN_LISTEN": "127.0.0.1:5"},
            "TIERGATE_ADMIN_LISTEN: 127.0.0.1:5 is the same",
        ),
        ({"ORIGIN": "http://127.0.0.1:9000"}, "TIERGATE_ORIGIN: http://127.0.0.1:9000 is this node itself"),
        ({"ORIGIN": "http://localhost:9001"}, "is this node itself (admin_listen is 127.0.0.1:9001)"),
        ({"DIRTY_AGE_SLOW": "2h"}, "TIERGATE_DIRTY_AGE_SLOW: 2h is more than dirty_age_limit (30m)"),
        ({"MARKER_HOLD": "20m"}, "TIERGATE_MARKER_HOLD: 20m is more than dirty_age_slow (10m)"),
        (
            {"MARKER_HOLD": "20m", "DIRTY_AGE_SLOW": "0", "DIRTY_AGE_LIMIT": "15m"},
            "TIERGATE_MARKER_HOLD: 20m is more than dirty_age_limit (15m)",
        ),
        (
            {"DIRTY_SIZE_LIMIT": "1GiB", "DIRTY_SIZE_SLOW": "2GiB"},
            "DIRTY_SIZE_SLOW: 2GiB is more than dirty_size_limit (1GiB",
        ),
        ({"ORIGIN_BACKOFF": "1m"}, "TIERGATE_ORIGIN_BACKOFF: 1m is more than origin_backoff_max (20s)"),
    ],
)
def test_settings_that_contradict_each_other_are_a_fault(env: dict[str, str], message: str) -> None:
    (line,) = faults(env={f"TIERGATE_{name}": value for name, value in env.items()})
    assert message in line


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"NODE_NAME": ""}, "TIERGATE_CLUSTER: needs node_name too"),
        ({"ADVERTISE": ""}, "TIERGATE_CLUSTER: needs advertise too"),
        ({"CLUSTER": "", "ADVERTISE": ""}, "TIERGATE_NODE_NAME: is given without cluster"),
        ({"ADVERTISE": "0.0.0.0:7001", "CLUSTER_SECRET": "s" * 16}, "is no address that peers can reach"),
        ({"PEER_LISTEN": "0.0.0.0:7001"}, "TIERGATE_PEER_LISTEN: 0.0.0.0:7001 is not a loopback address"),
        ({"LISTEN": "127.0.0.1:7001"}, "127.0.0.1:7001 is the same as listen"),
        ({"PEER_LISTEN": "127.0.0.1:9001"}, "127.0.0.1:9001 is the same as admin_listen"),
        ({"ETCD_USER": "me"}, "TIERGATE_ETCD_USER: is given without etcd_password"),
        ({"ETCD_PASSWORD": "pw"}, "TIERGATE_ETCD_PASSWORD: is given without etcd_user"),
        ({"ETCD_TLS_CA": "/dev/null"}, "TIERGATE_ETCD_TLS_CA: is given, but cluster begins with etcd://"),
        ({"PEER_TLS_CERT": "/dev/null"}, "TIERGATE_PEER_TLS_CERT: is given without peer_tls_key"),
    ],
)
def test_members_settings_that_contradict_each_other_are_a_fault(changes: dict[str, str], message: str) -> None:
    (line,) = faults(env=MEMBER | {f"TIERGATE_{name}": value for name, value in changes.items()})
    assert message in line


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"DAEMON_URI": ""}, "TIERGATE_DAEMON_LISTEN: needs daemon_uri too"),
        ({"DAEMON_URI": "s3://b"}, '"s3://b" is not s3://BUCKET/PREFIX'),
        ({"DAEMON_URI": "s3://b/"}, "is not s3://BUCKET/PREFIX"),
        ({"DAEMON_URI": "b/daemon"}, "is not s3://BUCKET/PREFIX"),
        ({"DAEMON_LISTEN": "", "DAEMON_ALLOW": "10.0.0.0/8"}, "TIERGATE_DAEMON_ALLOW: is given without daemon_listen"),
        ({"DAEMON_LISTEN": "0.0.0.0:9200"}, "0.0.0.0:9200 is not a loopback address and the protocol has no"),
        ({"DAEMON_LISTEN": "127.0.0.1:9000"}, "127.0.0.1:9000 is the same as listen"),
        ({"DAEMON_ALLOW": "10.0.0.1/8"}, '"10.0.0.1/8" is not a network (such as 10.0.0.0/8)'),
        ({"DAEMON_ALLOW": "everybody"}, '"everybody" is not a network'),
        ({"ORIGIN": "http://127.0.0.1:9200"}, "is this node itself (daemon_listen is 127.0.0.1:9200)"),
        ({"PREFIX": "{uri = 's3://b/daemon/', immutable = true}"}, "holds a prefix with settings of its own"),
        ({"PREFIX": "{uri = 's3://b/daemon/x', immutable = true}"}, "settings of its own, s3://b/daemon/x"),
        ({"PREFIX": "{uri = 's3://b/', keep = 3}"}, "lies in a run with persist or keep, s3://b/"),
    ],
)
def test_settings_of_the_memory_daemon_that_contradict_each_other_are_a_fault(
    changes: dict[str, str], message: str
) -> None:
    (line,) = faults(env=DAEMON | {f"TIERGATE_{name}": value for name, value in changes.items()})
    assert message in line


def test_place_of_the_memory_daemon_has_settings_of_its_own(tmp_path: Path) -> None:
    toml = 'markers = ["*"]\nfence = "strict"\n[[prefix]]\nuri = "s3://b/"\nreplicas = 3\nimmutable = true'
    settings = read(toml, DAEMON | {"TIERGATE_DAEMON_ALLOW": "10.0.0.0/8,::1"}, folder=tmp_path).settings
    assert settings.daemon_uri == "s3://b/daemon/"
    assert settings.daemon_allow == ("10.0.0.0/8", "::1/128")
    place = settings.prefix_for("b", "daemon/job/rank_0/step_1")
    assert (place.is_memory_only, place.exclusive, place.immutable) == (True, True, False)
    assert (place.markers, place.fence, place.replicas_count) == ((), FenceMode.OFF, 3)
    assert not settings.prefix_for("b", "daemons").is_memory_only
    assert not settings.prefix_for("c", "daemon/job").is_memory_only
    assert not read().settings.prefix_for("b", "daemon/job").is_memory_only


def test_networks_that_are_named_let_the_memory_daemon_listen_to_others() -> None:
    env = DAEMON | {"TIERGATE_DAEMON_LISTEN": "0.0.0.0:9200", "TIERGATE_DAEMON_ALLOW": "10.0.0.0/8"}
    assert read(env=env).settings.daemon_listen == Address("0.0.0.0", 9200)


def test_address_for_peers_beyond_loopback_needs_something_to_know_them_by() -> None:
    env = MEMBER | {"TIERGATE_ADVERTISE": "10.1.2.3:7001"}
    (line,) = faults(env=env)
    assert line.startswith("TIERGATE_ADVERTISE: 10.1.2.3:7001 is not a loopback address and peers need no credentials")
    assert read(env=env | {"TIERGATE_CLUSTER_SECRET": "s" * 16}).settings.peer_listen == Address("10.1.2.3", 7001)
    tls = {f"TIERGATE_PEER_TLS_{name}": "/dev/null" for name in ("CERT", "KEY", "CA")}
    assert read(env=env | tls).settings.peer_tls_ca == Path("/dev/null")


def test_cluster_url_says_where_etcd_is_and_what_its_keys_begin_with() -> None:
    assert config.etcd_place("etcd://h:1,[::1]:2") == EtcdPlace(("h:1", "[::1]:2"), False, "/tiergate")
    assert config.etcd_place("etcds://h:1/team") == EtcdPlace(("h:1",), True, "/team")


def test_default_gives_way_to_a_smaller_bound_that_is_given() -> None:
    settings = read(env={"TIERGATE_DIRTY_AGE_LIMIT": "77s", "TIERGATE_ORIGIN_BACKOFF_MAX": "100ms"}).settings
    assert settings.dirty_age_slow_s == settings.marker_hold_s == 77
    assert read(env={"TIERGATE_DIRTY_AGE_SLOW": "9s"}).settings.marker_hold_s == 9
    assert settings.origin_backoff_s == 0.1
    assert read(env={"TIERGATE_DIRTY_AGE_LIMIT": "0"}).settings.dirty_age_slow_s == 600
    assert read(env={"TIERGATE_DIRTY_SIZE_SLOW": "1GiB"}).settings.dirty_size_slow_bytes == 1 << 30


@pytest.mark.parametrize("auth", ["none", "origin"])
def test_keys_with_another_kind_of_authentication_are_a_fault(auth: str) -> None:
    assert faults(env=KEYS, flags={"client_auth": auth}) == [
        f"--client-auth: `{auth}` contradicts the access_key_id that is given"
    ]


def test_secret_as_a_plain_flag_is_refused_without_showing_it() -> None:
    found = faults(env={"TIERGATE_ACCESS_KEY_ID": "me"}, flags={"secret_access_key": "very-secret"})
    assert found == [
        "--secret-access-key: a command line can be read by every user: give @FILE, a TOML file or the environment"
    ]


def test_secret_never_shows_itself() -> None:
    settings = read(env=KEYS).settings
    secret = settings.secret_access_key
    assert secret is not None
    assert secret.reveal() == "very-secret"
    for text in (repr(settings), str(secret), f"{secret}", repr(secret)):
        assert "very-secret" not in text
    assert settings.secrets == (secret,)
    assert secret == Secret("very-secret")
    assert secret != Secret("another")


def test_prefixes_take_over_from_the_node_and_the_longest_match_wins(tmp_path: Path) -> None:
    toml = """
    fence = "strict"
    markers = ["*.done"]
    [[prefix]]
    uri = "s3://b/run/"
    immutable = true
    markers = ["END", "*.done"]
    [[prefix]]
    uri = "s3://b/run/deep/"
    fence = "off"
    etag = "exact"
    [[prefix]]
    uri = "s3://whole"
    exclusive = true
    reuse = true
    """
    settings = read(toml, folder=tmp_path).settings
    run = settings.prefix_for("b", "run/x")
    assert (run.immutable, run.fence, run.markers) == (True, FenceMode.STRICT, ("*.done", "END"))
    deep = settings.prefix_for("b", "run/deep/x")
    assert (deep.immutable, deep.fence, deep.etag) == (False, FenceMode.OFF, EtagMode.EXACT)
    whole = settings.prefix_for("whole", "any")
    assert (whole.exclusive, whole.reuse, run.reuse) == (True, True, False)
    other = settings.prefix_for("b", "ru")
    assert (other.bucket, other.prefix, other.fence, other.markers) == (
        "b",
        "",
        FenceMode.STRICT,
        ("*.done",),
    )


@pytest.mark.parametrize(
    ("text", "persist"),
    [
        ("all", Persist()),
        ("none", Persist(0)),
        ("every 1", Persist(1)),
        ("Every 12", Persist(12)),
        ("every 30m", Persist(0, 1800.0)),
        ("every 2 h", Persist(0, 7200.0)),
    ],
)
def test_policy_of_a_prefix(tmp_path: Path, text: str, persist: Persist) -> None:
    table = f'[[prefix]]\nuri = "s3://b/run/"\npersist = "{text}"\nkeep = 3\npromote_idle = "0"\nskip_superseded = true'
    run = read(table, folder=tmp_path).settings.prefix_for("b", "run/step_1/x")
    assert (run.persist, run.prefix, run.keep_count, run.promote_idle_s, run.skip_superseded) == (
        persist,
        "run/",
        3,
        0.0,
        True,
    )
    assert run.persist is not None
    again = f'[[prefix]]\nuri = "s3://b/run/"\npersist = "{run.persist}"'
    assert read(again, folder=tmp_path).settings.prefix_for("b", "run/").persist == persist


def test_prefix_without_a_policy_has_none(tmp_path: Path) -> None:
    assert read('[[prefix]]\nuri = "s3://b/"', folder=tmp_path).settings.prefix_for("b", "x").persist is None


def test_prefix_flag_may_be_repeated_and_replaces_the_files(tmp_path: Path) -> None:
    flags: dict[str, str | list[str]] = {"prefixes": ["{uri = 's3://b/1'}", "{uri = 's3://b/2'}"]}
    settings = read('[[prefix]]\nuri = "s3://b/0"', flags=flags, folder=tmp_path).settings
    assert [prefix.prefix for prefix in settings.prefixes] == ["1", "2"]


def test_settings_survive_the_way_to_a_child() -> None:
    flags: dict[str, str | list[str]] = {"prefixes": "{uri = 's3://b/1', immutable = true}", "markers": "a,b"}
    settings = read(env=KEYS, flags=flags).settings
    assert config.restore(config.dump(settings), Settings) == settings


@given(st.integers(min_value=0, max_value=1 << 60))
def test_size_reads_back_as_written(size_bytes: int) -> None:
    assert parse_size(format_size(size_bytes)) == size_bytes == parse_size(str(size_bytes))


@given(st.integers(min_value=0, max_value=100_000))
def test_duration_reads_back_as_written(duration_s: int) -> None:
    assert parse_duration(format_duration(float(duration_s))) == duration_s


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("2GiB", 2 << 30), ("512MiB", 512 << 20), ("1.5 kib", 1536), ("10MB", 10_000_000), ("7", 7), ("7B", 7)],
)
def test_size_units_are_exact(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    ("text", "duration_s"),
    [("250ms", 0.25), ("60s", 60), ("5m", 300), ("6h", 21600), ("1d", 86400), ("1.5", 1.5)],
)
def test_duration_units_are_exact(text: str, duration_s: float) -> None:
    assert parse_duration(text) == duration_s


def test_ram_of_a_container_is_its_limit(tmp_path: Path) -> None:
    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    whole = _ram_bytes(tmp_path)
    assert whole == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    write("sys/fs/cgroup/memory.max", "max\n")
    assert _ram_bytes(tmp_path) == whole
    write("proc/self/cgroup", "0::/pod/box\n")
    write("sys/fs/cgroup/pod/memory.max", "4096\n")
    write("sys/fs/cgroup/pod/box/memory.max", "max\n")
    assert _ram_bytes(tmp_path) == 4096


def test_reference_is_up_to_date() -> None:
    """To renew it: write `tiergate.config.render_reference()` to gateway/docs/CONFIG.md."""
    assert (DOCS / "CONFIG.md").read_text() == config.render_reference()
