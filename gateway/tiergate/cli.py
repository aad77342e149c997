"""The command line: the only place that prints or decides an exit status.

Exit statuses: 0 success; 1 the node could not start or had to end, or the test or the demo failed; 2 wrong
configuration or usage; 3 another node has the memory folder; 4 a command found no node, or one that does not answer as
it should; 5 a node stopped, and something acknowledged is in its memory folder only, or may be; 6
`checkpoints`, `newest` or `verify` cannot tell all, since a tier or the directory does not answer; 7 `verify --repair`
found damage, and mended all of it; 130 it was interrupted. `prefetch` fails with 1 unless all is in memory,
`checkpoints` where one is damaged or quarantined, `newest` where none is whole, `verify` where one is damaged, or none
is whole.

Packages add commands of their own by entry points of the group `tiergate.commands`, each an `ExtraCommand`."""

# ruff: noqa: T201 - this is the place that prints

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from http import HTTPStatus
from http.client import HTTPResponse
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Protocol, cast
from urllib.error import HTTPError

from tiergate import __version__, admin, flags, progress, tables
from tiergate.child import run_child
from tiergate.config import DECLARATIONS
from tiergate.config.declare import show_value
from tiergate.errors import ConfigError, TiergateError
from tiergate.flags import Parser, UsageError
from tiergate.observe import logs
from tiergate.s3.uri import parse_uri

if TYPE_CHECKING:
    from rich.console import Console

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_BUSY, EXIT_UNREACHABLE = range(5)
EXIT_UNSEEN, EXIT_REPAIRED = 6, 7
EXIT_INTERRUPTED = 130
_ANSWER_TIMEOUT_S = 10.0
_EXTRA_COMMANDS = "tiergate.commands"

_WIDTH_CHARS = 160
"""Of tables that go to a file or another program."""

_SEARCH_TIMEOUT_S = 600.0
"""So long a node may look for checkpoints: large buckets take the origin many pages."""

_SEARCHES = ("checkpoints", "newest", "verify")


class Screen:
    """Where a command of another package speaks."""

    def say(self, text: str) -> None:
        """A line to standard output."""
        print(text, flush=True)

    def complain(self, text: str) -> None:
        """A line to standard error."""
        _fail(EXIT_FAILED, text)

    def shown(self, title: str, lines: Iterator[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
        """Hand on lines of progress, and show them: `done_count`, `done_bytes`, `total_count`, `total_bytes`,
        `is_over`."""
        return progress.shown(title, lines, self.say)


class ExtraCommand(Protocol):
    """A command of another package. Loading it must be quick and need nothing that is optional: `--help` does."""

    help: str
    """One line."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Say what it understands."""
        ...

    def run(self, options: argparse.Namespace, screen: Screen) -> int:
        """Run it; returns the exit status.

        Raises:
            ConfigError: the command line or the environment is wrong.
        """
        ...


class _FailedError(Exception):
    """A command fails with a status; the message says why, in one line."""

    def __init__(self, status: int, line: str) -> None:
        super().__init__(line)
        self.status = status


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["_child"]:
        return run_child(int(words[2]))
    try:
        if words[:1] == ["demo"]:
            return _demo(words[1:])
        return _dispatch(words)
    except UsageError as error:
        return _fail(EXIT_USAGE, f"{error} (see tiergate --help)")
    except ConfigError as error:
        return _fail(EXIT_USAGE, *error.faults)
    except _FailedError as error:
        return _fail(error.status, str(error))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()  # nobody reads; Python would complain about it at its end
        return EXIT_FAILED


def _dispatch(words: list[str]) -> int:
    options, unknown = _parser(words).parse_known_args(words)
    command = cast("Callable[[argparse.Namespace, list[str]], int] | None", getattr(options, "command", None))
    if command is None:
        raise UsageError("a command is missing")
    return command(options, flags.unknown_flags(unknown))


def _serve(options: argparse.Namespace, unknown: list[str]) -> int:
    # Here and not above, so that a child does not load the parent's modules.
    from tiergate.node import FolderBusyError, serve

    loaded = flags.load(options, unknown)
    settings = loaded.settings
    logs.configure(settings.log_level, settings.log_format, process="node")
    for secret in settings.secrets:
        logs.mask(secret)
    try:
        return serve(loaded, lambda running: print(running.line, flush=True))
    except FolderBusyError as error:
        return _fail(EXIT_BUSY, str(error))
    except TiergateError as error:
        return _fail(EXIT_FAILED, str(error))


def _check_config(options: argparse.Namespace, unknown: list[str]) -> int:
    from tiergate.node import folder_faults, package_faults

    loaded = flags.load(options, unknown)
    settings = loaded.settings
    is_default = loaded.sources["memory_limit_bytes"] == "default"
    faults = folder_faults(settings.memory_dir, settings.memory_limit_bytes, is_default) + package_faults(settings)
    if faults:
        return _fail(EXIT_USAGE, *faults)
    if options.show:
        for field, declaration in DECLARATIONS.items():
            value = show_value(field, getattr(settings, field))
            print(f"{declaration.name} = {value}  # {loaded.sources[field]}")
    print("configuration is valid")
    return EXIT_OK


def _status(options: argparse.Namespace, unknown: list[str]) -> int:
    with _answered(options, unknown, "status", method="GET") as answer:
        status = admin.document(answer.read())
    if options.json:
        _print_json(status)
    else:
        console = _console()
        for table in tables.status_tables(status):
            console.print(table)
    return EXIT_OK


def _prefetch(options: argparse.Namespace, unknown: list[str]) -> int:
    with _answered_for_prefix(options, unknown, refused=f"{options.uri} is not prefetched") as answer:
        return _follow(options.uri, map(admin.document, answer))


def _promote(options: argparse.Namespace, unknown: list[str]) -> int:
    with _answered_for_prefix(options, unknown, refused=f"{options.uri} is not promoted") as answer:
        count = admin.document(answer.read()).get("promoted")
        if not isinstance(count, int):
            raise ValueError("it does not say how many")
    if not count:
        print(f"nothing under {options.uri} stays in memory only")
        return EXIT_OK
    print(f"{count} {'object goes' if count == 1 else 'objects go'} to S3 from {options.uri}")
    return EXIT_OK


def _pin(options: argparse.Namespace, unknown: list[str]) -> int:
    with _answered_for_prefix(options, unknown, refused=f"{options.uri} is not pinned") as answer:
        pinned_bytes = admin.document(answer.read())["bytes"]
    print(f"{options.uri} is pinned, with {pinned_bytes} bytes in this node's memory now")
    return EXIT_OK


def _unpin(options: argparse.Namespace, unknown: list[str]) -> int:
    with _answered_for_prefix(options, unknown, refused=options.uri) as answer:
        answer.read()
    return EXIT_OK


def _verify(options: argparse.Namespace, unknown: list[str]) -> int:
    _place_of(options.uri)
    query = {"uri": options.uri, "tier": options.tier, "deep": int(options.deep), "repair": int(options.repair)}
    with _answered(options, unknown, "verify", query, refused=f"{options.uri} is not verified") as answer:
        return _follow_verify(options, map(admin.document, answer))


def _checkpoints(options: argparse.Namespace, unknown: list[str]) -> int:
    if options.uri:
        _place_of(options.uri)
    query = {"uri": options.uri} if options.uri else {}
    refused = "the checkpoints cannot be told"
    with _answered(
        options, unknown, "checkpoints", query, method="GET", timeout_s=_SEARCH_TIMEOUT_S, refused=refused
    ) as answer:
        found = admin.document(answer.read())
    if options.json:
        _print_json(found)
    else:
        _console().print(tables.checkpoints_table(found["sets"]) if found["sets"] else "no checkpoints")
    return _judged(found)


def _newest(options: argparse.Namespace, unknown: list[str]) -> int:
    _place_of(options.uri)
    query = {"uri": options.uri, "deep": int(options.deep)}
    refused = "which checkpoint is the newest cannot be told"
    with _answered(options, unknown, "newest", query, timeout_s=_SEARCH_TIMEOUT_S, refused=refused) as answer:
        found = admin.document(answer.read())
    if options.json:
        _print_json(found)
    elif found["checkpoint"] is not None:
        _console().print(found["checkpoint"]["uri"], highlight=False, soft_wrap=True)
    for each in found["passed_over"]:
        _fail(EXIT_FAILED, f"{each['uri']} is passed over: {each['reason']}")
    if found["checkpoint"] is None:
        return _fail(EXIT_FAILED, f"no whole checkpoint is under {options.uri}")
    return EXIT_OK


def _answered_for_prefix(
    options: argparse.Namespace, unknown: list[str], *, refused: str
) -> AbstractContextManager[HTTPResponse]:
    """What a running node answers when it is told to do with a prefix what the command is called."""
    bucket, prefix = _place_of(options.uri)
    return _answered(options, unknown, options.name, {"bucket": bucket, "prefix": prefix}, refused=refused)


@contextmanager
def _answered(
    options: argparse.Namespace,
    unknown: list[str],
    path: str,
    query: Mapping[str, str | int] | None = None,
    *,
    method: str = "POST",
    timeout_s: float = _ANSWER_TIMEOUT_S,
    refused: str | None = None,
) -> Iterator[HTTPResponse]:
    """What a running node answers, to be read within. `refused` says what did not happen if it answers with an error;
    None: a node never does.

    Raises:
        _FailedError: there is no node, or it refuses, or does not answer as it should. A search that the node cannot
            carry out has not seen all.
    """
    settings = flags.load(options, unknown).settings
    url = admin.url(settings)
    if url is None:
        raise _FailedError(EXIT_UNREACHABLE, f"no node serves from {settings.memory_dir}")
    try:
        with admin.ask(method, f"{url}/{path}", query or {}, timeout_s) as answer:
            yield answer
    except HTTPError as error:
        if refused is None:
            raise _FailedError(EXIT_UNREACHABLE, f"no answer from {url}: {admin.reason(error)}") from error
        is_unseen = path in _SEARCHES and error.code >= HTTPStatus.INTERNAL_SERVER_ERROR
        status = EXIT_UNSEEN if is_unseen else EXIT_FAILED
        raise _FailedError(status, f"{refused}: {admin.reason(error)}") from error
    except BrokenPipeError:
        raise  # whoever reads what is printed went away
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", None) or error
        raise _FailedError(EXIT_UNREACHABLE, f"no answer from {url}: {why}") from error


def _place_of(uri: str) -> tuple[str, str]:
    """The bucket and the prefix of a place."""
    try:
        return parse_uri(uri)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _judged(answer: Mapping[str, Any]) -> int:
    """Say what is wrong with the checkpoints of an answer, or with the answer; the exit status for that."""
    status = EXIT_OK
    for each in answer["sets"]:
        for tier, found in each["tiers"].items():
            if found["state"] in ("damaged", "quarantined"):
                why = each.get("quarantined") or each["fault"] or ", ".join(found["missing"])
                status = _fail(EXIT_FAILED, f"{each['uri']} is {found['state']} in {tier}: {why}")
            elif found["state"] == "unknown":
                why = each["fault"] or "the origin does not answer"
                status = _fail(EXIT_UNSEEN, f"whether {each['uri']} is whole is not known now: {why}")
    for place in answer["places"]:
        if place["unseen"]:
            why = place["fault"] or place["origin_fault"]
            status = _fail(EXIT_UNSEEN, f"not all of {place['uri']} was seen ({', '.join(place['unseen'])}): {why}")
    return status


def _demo(words: list[str]) -> int:
    run = cast("Callable[[list[str]], int | None]", importlib.import_module("tiergate.demo").run)
    try:
        return run(words) or EXIT_OK
    except ConfigError:
        raise
    except TiergateError as error:
        return _fail(EXIT_FAILED, str(error))


def _test(options: argparse.Namespace, unknown: list[str]) -> int:
    if unknown:
        raise UsageError(f"unrecognized arguments: {' '.join(unknown)}")
    # Here and not above, since they take a while to load.
    from botocore.exceptions import BotoCoreError, ClientError

    from tiergate import selftest

    console, results, left = _console(), list[selftest.Result](), ""
    logs.mask(options.secret_key)
    try:
        client = selftest.connect(options.endpoint, options.access_key, options.secret_key, options.region)
        with console.status("testing"):
            selftest.run_checks(client, options.bucket, on_result=results.append)
    except selftest.NotRemovedError as error:
        left = str(error)
    except (BotoCoreError, ClientError, ValueError) as error:
        return _fail(EXIT_FAILED, f"{options.endpoint} cannot be tested: {error}")
    console.print(tables.results_table(options.endpoint, results))
    failed_count = sum(bool(result.fault) for result in results)
    console.print(f"{len(results) - failed_count} passed, {failed_count} failed", highlight=False)
    if left:
        return _fail(EXIT_FAILED, f"what the test wrote under {left}")
    return EXIT_FAILED if failed_count else EXIT_OK


def _fail(status: int, *lines: str) -> int:
    for line in lines:
        print(f"tiergate: {logs.masked_text(line)}", file=sys.stderr)
    return status


def _console() -> "Console":
    # Here and not above, since it takes a while to load.
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else _WIDTH_CHARS)


def _print_json(document: Mapping[str, Any]) -> None:
    print(json.dumps(document, indent=2, ensure_ascii=False))


# -- the command line
def _parser(words: Sequence[str]) -> Parser:
    parser = Parser(prog="tiergate", description="An S3 gateway that keeps checkpoints in RAM.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"tiergate {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    serve = commands.add_parser("serve", help="start a node", allow_abbrev=False)
    check = commands.add_parser("check-config", help="say what is wrong with a configuration", allow_abbrev=False)
    check.add_argument("--show", action="store_true", help="print every setting and where it comes from")
    status = commands.add_parser("status", help="show what a running node does", allow_abbrev=False)
    status.add_argument("--json", action="store_true", help="print JSON")
    prefetch = commands.add_parser("prefetch", help="bring a prefix into a running node's memory", allow_abbrev=False)
    promote = commands.add_parser(
        "promote", help="let what stays in memory by policy go to S3, under a prefix", allow_abbrev=False
    )
    pin = commands.add_parser("pin", help="keep a prefix in memory whatever else needs room", allow_abbrev=False)
    unpin = commands.add_parser("unpin", help="let a pinned prefix be evicted again", allow_abbrev=False)
    for each, name in ((prefetch, "prefetch"), (promote, "promote"), (pin, "pin"), (unpin, "unpin")):
        each.add_argument("uri", metavar="s3://BUCKET/PREFIX", help="all keys that begin so")
        each.set_defaults(name=name)
    checkpoints = commands.add_parser("checkpoints", help="list checkpoints and where they are", allow_abbrev=False)
    checkpoints.add_argument(
        "uri", metavar="s3://BUCKET/PREFIX", nargs="?", help="those under this; by default those of all buckets in use"
    )
    checkpoints.add_argument("--json", action="store_true", help="print JSON")
    newest = commands.add_parser("newest", help="tell which checkpoint a restart would take", allow_abbrev=False)
    newest.add_argument("uri", metavar="s3://BUCKET/PREFIX", help="of those under this")
    newest.add_argument("--deep", action="store_true", help="read all its bytes, in S3 too")
    newest.add_argument("--json", action="store_true", help="print JSON")
    verify = commands.add_parser("verify", help="prove that checkpoints load", allow_abbrev=False)
    verify.add_argument("uri", metavar="s3://BUCKET/PREFIX", help="those under this")
    verify.add_argument("--tier", choices=("memory", "s3", "all"), default="all", help="where; alone, it must have all")
    verify.add_argument("--deep", action="store_true", help="read all bytes in S3, too")
    verify.add_argument("--repair", action="store_true", help="mend what is damaged from where it is right")
    verify.add_argument("--json", action="store_true", help="print JSON")
    test = commands.add_parser("test", help="test whether an endpoint behaves like S3", allow_abbrev=False)
    test.set_defaults(command=_test)
    flags.add_test_options(test, os.environ)
    commands.add_parser("demo", help="show the product on this machine", add_help=False)
    with_settings = (
        (serve, _serve),
        (check, _check_config),
        (status, _status),
        (prefetch, _prefetch),
        (promote, _promote),
        (pin, _pin),
        (unpin, _unpin),
        (checkpoints, _checkpoints),
        (newest, _newest),
        (verify, _verify),
    )
    for command, run in with_settings:
        command.set_defaults(command=run)
        flags.add_settings(command)
    if not words or words[0] not in commands.choices:
        for entry in sorted(entry_points(group=_EXTRA_COMMANDS), key=lambda each: each.name):
            if entry.name not in commands.choices:
                _add_extra(commands.add_parser, entry)
    return parser


def _add_extra(add_parser: Callable[..., argparse.ArgumentParser], entry: EntryPoint) -> None:
    try:
        command: ExtraCommand = entry.load()
    except Exception as error:  # whatever is wrong with another package, the commands of this one work
        why = f"cannot be loaded from {entry.value}: {error!r}"
        add_parser(entry.name, help=why.replace("%", "%%")).set_defaults(
            command=lambda *_: _fail(EXIT_FAILED, f"{entry.name} {why}")
        )
        return
    parser = add_parser(entry.name, help=command.help, description=command.help, allow_abbrev=False)
    command.add_arguments(parser)

    def run(options: argparse.Namespace, unknown: list[str]) -> int:
        if unknown:
            raise UsageError(f"unrecognized arguments: {' '.join(unknown)}")
        return command.run(options, Screen())

    parser.set_defaults(command=run)


# -- what a running node answers
def _say(text: str) -> None:
    print(text, flush=True)


def _follow(uri: str, lines: Iterator[Mapping[str, Any]]) -> int:
    """Show how far a prefetch is until it is over; the exit status that says whether all is in memory."""
    line: Mapping[str, Any] = {}
    failed_count = 0
    for line in progress.shown(uri, lines, _say):
        for failure in line["failures"]:
            _fail(EXIT_FAILED, f"{failure['uri']} could not be had: {failure['reason']}")
            failed_count += 1
    if not line.get("is_over"):
        return _fail(EXIT_UNREACHABLE, "the node went away before the prefetch was over")
    left_count = line["total_count"] - line["done_count"]
    if line["fault"] or left_count:
        why = line["fault"] or f"{failed_count} could not be had"
        return _fail(EXIT_FAILED, f"{left_count} of {line['total_count']} objects are not in memory: {why}")
    return EXIT_OK


def _follow_verify(options: argparse.Namespace, lines: Iterator[Mapping[str, Any]]) -> int:
    """Show how far a verification is until it is over, and what it found; the exit status for that."""
    found: dict[str, list[Any]] = {"sets": [], "damages": [], "unrepaired": [], "unasked": []}
    line: Mapping[str, Any] = {}
    for line in progress.shown(options.uri, lines, _say, is_quiet=options.json):
        for name, rows in found.items():
            rows += line[name]
        for damage in line["damages"]:
            _fail(EXIT_FAILED, tables.damage_line(damage))
        for damage in line["unrepaired"]:
            _fail(EXIT_FAILED, f"{damage['uri']} is not repaired in {damage['tier']}: {damage['why']}")
        for why in line["unasked"]:
            _fail(EXIT_UNSEEN, f"not looked at: {why}")
    if not line.get("is_over"):
        return _fail(EXIT_UNREACHABLE, "the node went away before the verification was over")
    if options.json:
        _print_json(found | {"fault": line["fault"]})
    elif found["sets"]:
        _console().print(tables.verified_table(found["sets"]))
    return _verified(options.uri, found, line["fault"])


def _verified(uri: str, found: Mapping[str, list[Any]], fault: str) -> int:
    verdicts = {each["verdict"] for each in found["sets"]}
    if fault:
        return _fail(EXIT_UNSEEN, f"not all was looked at: {fault}")
    if "damaged" in verdicts:
        return EXIT_FAILED
    if found["unasked"] or "unknown" in verdicts:
        return EXIT_UNSEEN
    if not verdicts - {"unmarked"}:
        return _fail(EXIT_FAILED, f"no whole checkpoint is under {uri}")
    return EXIT_REPAIRED if "repaired" in verdicts else EXIT_OK
