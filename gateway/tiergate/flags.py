"""What the command line understands: a flag for every setting, and those of `test`."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, cast

from tiergate import config
from tiergate.config import DECLARATIONS, Loaded


class UsageError(Exception):
    """The command line is wrong; the message says how, in one line."""


class Parser(argparse.ArgumentParser):
    """Reports a wrong command line as one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def add_settings(parser: argparse.ArgumentParser) -> None:
    """A flag for the file with settings and for each setting."""
    parser.add_argument("--config", metavar="FILE", type=Path, help="TOML file with settings")
    groups: dict[str, Any] = {}
    for declaration in DECLARATIONS.values():
        section = declaration.section
        if section not in groups:
            groups[section] = parser.add_argument_group(section)
        text = f"{declaration.help} Default: {declaration.default_text}."
        groups[section].add_argument(
            declaration.flag,
            dest=f"setting_{declaration.field}",
            metavar="VALUE",
            action="append" if declaration.repeatable else "store",
            help=text.replace("%", "%%"),
        )


def add_test_options(parser: argparse.ArgumentParser, environment: Mapping[str, str]) -> None:
    """Those of `test`; what is not given comes from the environment, as AWS's own tools take it."""

    def add(flag: str, variable: str, default: str, text: str) -> None:
        shown = f"{text} Default: {variable}, else {default}." if variable else f"{text} Default: {default}."
        parser.add_argument(flag, metavar="VALUE", default=environment.get(variable) or default, help=shown)

    add("--endpoint", "AWS_ENDPOINT_URL", "http://127.0.0.1:9000", "URL of the endpoint.")
    add("--access-key", "AWS_ACCESS_KEY_ID", "test", "The access key id to sign with.")
    add("--secret-key", "AWS_SECRET_ACCESS_KEY", "test", "The secret to sign with; better in the variable.")
    add("--region", "AWS_REGION", "us-east-1", "The region to sign for.")
    add("--bucket", "", "tiergate-test", "A bucket to write to. Made if need be; only what the test wrote is removed.")


def load(options: argparse.Namespace, unknown: list[str]) -> Loaded:
    """The settings that a command line asks for, with the file and the environment below it.

    Raises:
        ConfigError: they are wrong, or a flag is unknown.
    """
    given = cast("Mapping[str, Any]", vars(options))
    flags = {field: given[f"setting_{field}"] for field in DECLARATIONS if given.get(f"setting_{field}") is not None}
    return config.load(config_file=options.config, flags=flags, unknown_flags=unknown)


def unknown_flags(words: list[str]) -> list[str]:
    """The words that are wrong in themselves: what follows an unknown flag is taken for its value."""
    wrong: list[str] = []
    for before, word in zip(["", *words], words, strict=False):
        if word.startswith("-") or not before.startswith("-") or "=" in before:
            wrong.append(word)
    return wrong
