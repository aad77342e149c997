"""Reads settings from a TOML file, the environment and flags, in rising order of precedence.

Every value given is checked, also one that a stronger source overrides, and all faults are reported together.
"""

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tiergate.config.declare import Declaration, show_value
from tiergate.config.machine import Machine
from tiergate.config.prefixes import parse_prefixes, settle_prefixes
from tiergate.config.rules import broken_rules
from tiergate.config.settings import DECLARATIONS, PrefixSettings, Settings
from tiergate.config.values import ClientAuth, FenceMode, show
from tiergate.errors import ConfigError

CONFIG_FILE_ENV = "TIERGATE_CONFIG"
_ENV_PREFIX = "TIERGATE_"
_GIVES_WAY = (
    ("dirty_age_slow_s", "dirty_age_limit_s"),
    ("marker_hold_s", "dirty_age_slow_s"),
    ("marker_hold_s", "dirty_age_limit_s"),
    ("origin_backoff_s", "origin_backoff_max_s"),
)
"""Pairs of which the first may not be larger: its default gives way to a second one that is given."""
_SERVICE_LINKS = re.compile(r"TIERGATE_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)")
"""What Kubernetes puts into every pod for a Service of the name `tiergate`
(https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables)."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Checked settings, and for each field where its value came from (`default`, or as a fault names it)."""

    settings: Settings
    sources: Mapping[str, str]


@dataclass(slots=True)
class _Reading:
    """What was read so far: values and sources by field, later sources replacing earlier ones."""

    values: dict[str, Any]
    sources: dict[str, str]
    faults: list[str]
    faulty: set[str]

    def take(self, declaration: Declaration, raw: object, source: str) -> None:
        try:
            if declaration.repeatable:
                value: Any = parse_prefixes(raw)
            else:
                value = declaration.parse(raw)
                _check_bounds(declaration, value)
        except ValueError as error:
            self.refuse(declaration.field, source, str(error))
            return
        self.values[declaration.field] = value
        self.sources[declaration.field] = source

    def refuse(self, field: str, source: str, message: str) -> None:
        self.faulty.add(field)
        self.faults.append(f"{source}: {message}")


def load(
    *,
    config_file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, str | Sequence[str]] | None = None,
    unknown_flags: Iterable[str] = (),
    machine: Machine | None = None,
) -> Loaded:
    """Read and check the settings.

    Args:
        config_file: The TOML file; None: the one that TIERGATE_CONFIG names, if any.
        environ: The environment; None: this process's.
        flags: Flag texts by field name, without those not given.
        unknown_flags: Flags that nobody knows; each becomes a fault.
        machine: What computed defaults rest on; None: this machine.

    Raises:
        ConfigError: with one fault a line in `faults`, each naming its source.
    """
    environ = os.environ if environ is None else environ
    machine = machine or Machine.here()
    reading = _Reading({}, {}, [], set())
    path = config_file or (Path(environ[CONFIG_FILE_ENV]) if environ.get(CONFIG_FILE_ENV) else None)
    if path is not None:
        _read_file(path, reading)
    _read_environment(environ, reading)
    _read_flags(flags or {}, unknown_flags, reading)
    _complete(reading, machine)
    settings = with_daemon_place(Settings(**reading.values))
    for fields, message in broken_rules(settings):
        if not reading.faulty.intersection(fields):
            reading.refuse(fields[0], _where(fields[0], reading), message)
    if reading.faults:
        raise ConfigError("\n".join(reading.faults))
    return Loaded(settings, reading.sources)


def _where(field: str, reading: _Reading) -> str:
    source = reading.sources[field]
    return DECLARATIONS[field].name if source == "default" else source


def _check_bounds(declaration: Declaration, value: Any) -> None:
    low, high = declaration.minimum, declaration.maximum
    for bound, wrong, word in (
        (low, low is not None and value < low, "at least"),
        (high, high is not None and value > high, "at most"),
    ):
        if wrong:
            shown, needed = (show_value(declaration.field, one) for one in (value, bound))
            raise ValueError(f"{shown} is out of bounds, {word} {needed} is needed")


def _read_file(path: Path, reading: _Reading) -> None:
    try:
        with path.open("rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        reading.faults.append(f"{path}: cannot be read: {error.strerror}")
        return
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        reading.faults.append(f"{path}: is not TOML: {show(str(error))[1:-1]}")
        return
    by_name = {declaration.name: declaration for declaration in DECLARATIONS.values()}
    for key, raw in table.items():
        if key in by_name:
            reading.take(by_name[key], raw, f"{path}: {key}")
        else:
            reading.faults.append(f"{path}: {key}: there is no such setting{did_you_mean(key, by_name)}")


def _read_environment(environ: Mapping[str, str], reading: _Reading) -> None:
    by_env = {declaration.env: declaration for declaration in DECLARATIONS.values()}
    for variable in sorted(environ):
        if not variable.startswith(_ENV_PREFIX) or variable == CONFIG_FILE_ENV:
            continue
        if variable in by_env:
            if environ[variable]:  # an empty variable is how templates leave one out
                reading.take(by_env[variable], environ[variable], variable)
        elif not _SERVICE_LINKS.fullmatch(variable):
            hint = did_you_mean(variable, [*by_env, CONFIG_FILE_ENV])
            reading.faults.append(f"{variable}: there is no such setting{hint}")


def _read_flags(flags: Mapping[str, str | Sequence[str]], unknown_flags: Iterable[str], reading: _Reading) -> None:
    for field, raw in flags.items():
        declaration = DECLARATIONS[field]
        if not declaration.is_secret:
            reading.take(declaration, raw, declaration.flag)
            continue
        try:
            reading.take(declaration, _secret_from(str(raw)), declaration.flag)
        except ValueError as error:
            reading.refuse(field, declaration.flag, str(error))
    known = [declaration.flag for declaration in DECLARATIONS.values()] + ["--config"]
    for flag in unknown_flags:
        word = flag.partition("=")[0]
        if word.startswith("-"):
            reading.faults.append(f"{word}: there is no such flag{did_you_mean(word, known)}")
        else:
            reading.faults.append(f"{show(word)}: unexpected on the command line")


def _secret_from(reference: str) -> str:
    if not reference.startswith("@"):
        raise ValueError("a command line can be read by every user: give @FILE, a TOML file or the environment")
    try:
        return Path(reference[1:]).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ValueError(f"{reference[1:]} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{reference[1:]} is not a text") from error


def _complete(reading: _Reading, machine: Machine) -> None:
    """Fill in defaults, and what follows from other settings."""
    for field, declaration in DECLARATIONS.items():
        if field not in reading.values:
            default = declaration.default
            reading.values[field] = default(machine) if callable(default) else default
            reading.sources[field] = "default"
    values = reading.values
    if reading.sources["client_auth"] == "default" and values["access_key_id"]:
        values["client_auth"] = ClientAuth.KEYS
    values["peer_listen"] = values["peer_listen"] or values["advertise"]
    for small, large in _GIVES_WAY:
        if reading.sources[small] == "default" and reading.sources[large] != "default" and values[large]:
            values[small] = min(values[small], values[large])
    values["prefixes"] = settle_prefixes(
        values["prefixes"], values["fence"], values["markers"], values["replicas_count"]
    )


def with_daemon_place(settings: Settings) -> Settings:
    """The settings with what holds for the keys of the memory daemon: no other rule but how many copies there are."""
    if not settings.daemon_uri:
        return settings
    bucket, _, prefix = settings.daemon_uri.removeprefix("s3://").partition("/")
    place = PrefixSettings(
        bucket,
        prefix,
        exclusive=True,
        fence=FenceMode.OFF,
        replicas_count=settings.prefix_for(bucket, prefix).replicas_count,
        is_memory_only=True,
    )
    return replace(settings, prefixes=(*settings.prefixes, place))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`, did you mean X?` when something similar is known, else nothing."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.7)
    return f", did you mean {close[0]}?" if close else ""
