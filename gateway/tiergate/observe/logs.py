"""Structured logs on stderr: one line a record, as key=value text or as JSON.

A record is an event (a fixed phrase) and fields. Secrets are masked by type, by the field's name, and
wherever the text of a known secret or of a signature would show. Repeats of a warning are limited, and say
how many were left out."""

import json
import logging
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from types import MappingProxyType
from typing import IO, Any

from tiergate.clock import Clock, SystemClock
from tiergate.config import LogFormat, LogLevel, Secret

REPEAT_BURST_COUNT = 10
REPEAT_WINDOW_S = 10.0
_REPEAT_EVENTS_COUNT = 1000
_VALUE_MAX_CHARS = 4000
_FIELDS = "tiergate_fields"
_MASK = "***"

_NOTHING: Mapping[str, object] = MappingProxyType({})
_context: ContextVar[Mapping[str, object]] = ContextVar("tiergate_log_context", default=_NOTHING)
_secret_texts: set[str] = set()

_SECRET_NAME = re.compile(r"secret|password|passwd|token|authorization|signature|credential|cookie", re.I)
_SECRET_TEXT = re.compile(
    r"((?:X-Amz-(?:Signature|Security-Token|Credential)|AWSAccessKeyId|Signature)(?:=|%3D|[\"']?:\s*[\"']?))"
    r"[^&\s\"',]+",
    re.I,
)
_PLAIN = re.compile(r"[A-Za-z0-9_.:/@+*%~^-]+")
_NOISY = ("botocore", "boto3", "urllib3", "s3transfer", "asyncio", "aiohttp.access")


class Log:
    """A room's logger. `fields` are facts; never build the event's text from them."""

    __slots__ = ("_logger",)

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def debug(self, event: str, /, **fields: object) -> None:
        self._write(logging.DEBUG, event, fields)

    def info(self, event: str, /, **fields: object) -> None:
        self._write(logging.INFO, event, fields)

    def warning(self, event: str, /, **fields: object) -> None:
        """Something is off, but the node copes."""
        self._write(logging.WARNING, event, fields)

    def error(self, event: str, /, **fields: object) -> None:
        """Somebody has to do something."""
        self._write(logging.ERROR, event, fields)

    def exception(self, event: str, /, **fields: object) -> None:
        """The exception being handled is one nobody expected; with its traceback."""
        self._write(logging.ERROR, event, fields, sys.exception())

    def _write(self, level: int, event: str, fields: Mapping[str, object], error: BaseException | None = None) -> None:
        if self._logger.isEnabledFor(level):
            merged = {**_context.get(), **fields}
            self._logger.log(level, "%s", event, extra={_FIELDS: merged}, exc_info=error)


def get_logger(name: str) -> Log:
    """The logger of a module (`get_logger(__name__)`)."""
    return Log(name)


@contextmanager
def log_context(**fields: object) -> Iterator[None]:
    """Add fields (`request_id=...`) to every record of this task within the block."""
    token = _context.set({**_context.get(), **fields})
    try:
        yield
    finally:
        _context.reset(token)


def mask(secret: Secret | str) -> None:
    """Never show this text in a log of this process. Texts shorter than 8 characters are not searched for."""
    text = secret.reveal() if isinstance(secret, Secret) else secret
    if len(text) >= 8:
        _secret_texts.add(text)


def configure(
    level: LogLevel,
    style: LogFormat,
    *,
    stream: IO[str] | None = None,
    clock: Clock | None = None,
    **fields: object,
) -> None:
    """Send all logs of this process to `stream` (None: stderr), with `fields` (role, index) in every
    record."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_JsonFormatter(fields) if style is LogFormat.JSON else _TextFormatter(fields))
    handler.addFilter(_RepeatFilter(clock or SystemClock()))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    for name in _NOISY:
        # Their debug records hold headers with credentials and signatures.
        logging.getLogger(name).setLevel(logging.WARNING)


def masked_text(text: str) -> str:
    """The text without known secrets and without signatures of presigned URLs."""
    for secret in _secret_texts:
        text = text.replace(secret, _MASK)
    return _SECRET_TEXT.sub(rf"\1{_MASK}", text)


def _masked(name: str, value: object) -> object:
    if isinstance(value, Secret) or _SECRET_NAME.search(name):
        return _MASK
    if value is None or isinstance(value, bool | int | float):
        return value
    text = f"{type(value).__name__}: {value}" if isinstance(value, BaseException) else str(value)
    text = masked_text(text)
    return text if len(text) <= _VALUE_MAX_CHARS else f"{text[:_VALUE_MAX_CHARS]}..."


def _parts(record: logging.LogRecord, fixed: Mapping[str, object]) -> tuple[str, str, dict[str, object]]:
    """Time, event and masked fields of a record."""
    when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
    fields: dict[str, Any] = {**fixed, **getattr(record, _FIELDS, {})}
    masked = {name: _masked(name, value) for name, value in fields.items()}
    return when.replace("+00:00", "Z"), masked_text(record.getMessage()), masked


def _trace(record: logging.LogRecord) -> str:
    if record.exc_info is None or record.exc_info[1] is None:
        return ""
    return masked_text("".join(traceback.format_exception(record.exc_info[1])).rstrip())


class _TextFormatter(logging.Formatter):
    def __init__(self, fixed: Mapping[str, object]) -> None:
        super().__init__()
        self._fixed = fixed

    def format(self, record: logging.LogRecord) -> str:
        when, event, fields = _parts(record, self._fixed)
        line = f"{when} {record.levelname:<7} {record.name}: {_one_line(event)}"
        for name, value in fields.items():
            text = str(value)
            line += f" {name}={text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=True)}"
        trace = _trace(record)
        return line + "".join(f"\n    | {part}" for part in trace.splitlines())


class _JsonFormatter(logging.Formatter):
    def __init__(self, fixed: Mapping[str, object]) -> None:
        super().__init__()
        self._fixed = fixed

    def format(self, record: logging.LogRecord) -> str:
        when, event, fields = _parts(record, self._fixed)
        head = {"time": when, "level": record.levelname.lower(), "logger": record.name, "event": event}
        trace = _trace(record)
        return json.dumps(head | fields | ({"trace": trace} if trace else {}), ensure_ascii=True)


def _one_line(text: str) -> str:
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")


@dataclass(slots=True)
class _Window:
    started_s: float
    count: int = 0


class _RepeatFilter(logging.Filter):
    """Lets `REPEAT_BURST_COUNT` warnings or errors of one event through in `REPEAT_WINDOW_S`; the first one
    of the next window carries `left_out`."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self._windows: dict[tuple[str, str], _Window] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        key = (record.name, str(record.args or record.msg))
        now_s = self._clock.monotonic_s()
        window = self._windows.get(key)
        if window is None or now_s - window.started_s >= REPEAT_WINDOW_S:
            left_out = max(0, window.count - REPEAT_BURST_COUNT) if window else 0
            if window is None and len(self._windows) >= _REPEAT_EVENTS_COUNT:
                self._windows.clear()
            window = self._windows[key] = _Window(now_s)
            if left_out:
                setattr(record, _FIELDS, {**getattr(record, _FIELDS, {}), "left_out": left_out})
        window.count += 1
        return window.count <= REPEAT_BURST_COUNT
