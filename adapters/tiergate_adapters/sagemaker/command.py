"""`tiergate sync`: the command line of the folder sync. Light to load: `tiergate --help` does."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tiergate.errors import ConfigError, TiergateError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Mapping

    from tiergate_adapters.sagemaker.agent import FolderSync

EXIT_OK, EXIT_FAILED, EXIT_ONLY_HERE = 0, 1, 5
RESOURCES = Path("/opt/ml/input/config/resourceconfig.json")
"""Where SageMaker says which instance this is
(https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-training-algo-running-container.html)."""


class Screen(Protocol):
    """Where the command speaks: `say` to standard output, `complain` to standard error; `shown` hands on lines of
    progress and shows them."""

    def say(self, text: str, /) -> None: ...
    def complain(self, text: str, /) -> None: ...
    def shown(self, title: str, lines: Iterator[Mapping[str, Any]], /) -> Iterator[Mapping[str, Any]]: ...


class SyncCommand:
    """See the module."""

    help = "restore a folder from S3, then keep S3 as the folder is"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """What the command understands."""
        parser.add_argument("folder", metavar="LOCAL", help="the folder; made if need be")
        parser.add_argument("uri", metavar="s3://BUCKET/PREFIX", help="where it is kept; a directory bucket will do")
        parser.add_argument("--ready-file", metavar="FILE", type=Path, help="made once the folder is restored")
        naming = parser.add_mutually_exclusive_group()
        naming.add_argument("--instance", metavar="NAME", help="keep the folder below this name in S3")
        naming.add_argument(
            "--per-instance", action="store_true", help="the same, with the name that SageMaker gave the instance"
        )
        ending = parser.add_mutually_exclusive_group()
        ending.add_argument("--no-follow", action="store_true", help="end when the folder is restored")
        ending.add_argument("--once", action="store_true", help="restore, send what is newer here, and end")
        _add_number(parser, "--flush-deadline", 25.0, "how long after SIGTERM it may still send, in seconds")
        _add_number(
            parser, "--settle", 2.0, "how long a file must not change where nobody can say who writes to it, in seconds"
        )
        _add_number(parser, "--parallel", 4, "files on their way at a time")
        parser.add_argument(
            "--log", metavar="PATTERN", action="append", help="names of files to send while they grow, also several"
        )
        parser.add_argument(
            "--marker", metavar="PATTERN", action="append", default=[], help="names of further files to send last"
        )

    def run(self, options: argparse.Namespace, screen: Screen) -> int:
        """Run until SIGTERM or SIGINT; the exit status."""
        # Here and not above, since it takes a while to load.
        from tiergate_adapters.sagemaker.agent import LOGS, FolderSync

        instance = _sagemaker_instance(os.environ, RESOURCES) if options.per_instance else options.instance
        try:
            sync = FolderSync(
                options.folder,
                options.uri,
                instance=instance,
                parallel=options.parallel,
                logs=options.log or LOGS,
                markers=options.marker,
                settle_s=options.settle,
                flush_s=options.flush_deadline,
                complain=screen.complain,
            )
        except ValueError as error:
            raise ConfigError(str(error)) from error
        except OSError as error:
            screen.complain(f"{options.folder} is no folder to use: {error.strerror}")
            return EXIT_FAILED
        if options.ready_file:
            options.ready_file.unlink(missing_ok=True)
        _require_access()
        restore = _handling(sync)
        try:
            return _run(sync, options, screen)
        except TiergateError as error:
            screen.complain(error.message)
            return EXIT_FAILED
        finally:
            restore()


def _run(sync: FolderSync, options: argparse.Namespace, screen: Screen) -> int:
    from tiergate_adapters.sagemaker.agent import left_text

    for _ in screen.shown(str(sync.place), sync.restore()):
        pass
    restored = sync.restored
    kept = f", {restored.kept_count} newer here" if restored.kept_count else ""
    brought = f"{restored.brought_count} files ({restored.brought_bytes} bytes) restored{kept}"
    screen.say(f"tiergate sync ready folder={sync.folder.path} s3={sync.place}: {brought}")
    _tell_ready(options.ready_file, os.environ)
    if options.no_follow:
        return EXIT_OK
    left = sync.follow(is_once=options.once)
    text = left_text(left, sync)
    if left.count:
        screen.complain(text)
        return EXIT_ONLY_HERE
    screen.say(text)
    return EXIT_OK


def _require_access() -> None:
    """See that requests can be made and signed: what is wrong in the environment does not mend itself.

    Raises:
        ConfigError: no endpoint that is one is named, or no keys.
    """
    from boto3.session import Session
    from botocore.exceptions import BotoCoreError

    from tiergate_adapters.route import Route

    try:
        Route().client()
        has_keys = Session().get_credentials() is not None
    except (BotoCoreError, ValueError) as error:
        raise ConfigError(f"the AWS configuration is wrong: {error}") from error
    if not has_keys:
        raise ConfigError("no AWS keys are found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")


def _add_number(parser: argparse.ArgumentParser, flag: str, default: float, text: str) -> None:
    def number(given: str) -> float:
        value = type(default)(given)
        if not 0 < value < float("inf"):
            raise ValueError(given)
        return value

    parser.add_argument(flag, metavar="N", type=number, default=default, help=f"{text}. Default: {default:g}.")


def _sagemaker_instance(environment: Mapping[str, str], resources: Path) -> str:
    """The name that SageMaker gave this instance.

    Raises:
        ConfigError: it gave none.
    """
    if name := environment.get("SM_CURRENT_HOST"):
        return name
    try:
        return str(json.loads(resources.read_text())["current_host"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"neither SM_CURRENT_HOST nor {resources} names the instance") from None


def _handling(sync: FolderSync) -> Callable[[], None]:
    """The first SIGTERM or SIGINT has the sync flush and end, the second end at once; undone by what is returned."""
    count = 0

    def handle(number: int, frame: object) -> None:
        nonlocal count
        count += 1
        sync.stop(at_once=count > 1)

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    return restore


def _tell_ready(file: Path | None, environment: Mapping[str, str]) -> None:
    """Make the file, and tell systemd (https://www.freedesktop.org/software/systemd/man/latest/sd_notify.html)."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    if address := environment.get("NOTIFY_SOCKET"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
            systemd.connect(f"\0{address[1:]}" if address.startswith("@") else address)
            systemd.sendall(b"READY=1")


command = SyncCommand()
