"""The node's settings: declared once in `settings`, read from file, environment and flags by `load`."""

from tiergate.config.declare import Declaration
from tiergate.config.load import Loaded, load
from tiergate.config.machine import Machine
from tiergate.config.reference import render_reference
from tiergate.config.settings import DECLARATIONS, PrefixSettings, Settings, dump, restore
from tiergate.config.values import (
    Address,
    ClientAuth,
    ConditionalWrites,
    EtagMode,
    EtcdPlace,
    FenceMode,
    LogFormat,
    LogLevel,
    Persist,
    Secret,
    etcd_place,
    format_size,
)

__all__ = [
    "DECLARATIONS",
    "Address",
    "ClientAuth",
    "ConditionalWrites",
    "Declaration",
    "EtagMode",
    "EtcdPlace",
    "FenceMode",
    "Loaded",
    "LogFormat",
    "LogLevel",
    "Machine",
    "Persist",
    "PrefixSettings",
    "Secret",
    "Settings",
    "dump",
    "etcd_place",
    "format_size",
    "load",
    "render_reference",
    "restore",
]
