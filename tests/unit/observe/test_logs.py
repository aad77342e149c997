"""Log records: formats, context, masking, limited repeats."""

import asyncio
import io
import json
import logging
import re
from collections.abc import Iterator

import pytest

from tiergate.config import LogFormat, LogLevel, Secret
from tiergate.observe import logs


class ManualClock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def wall_s(self) -> float:
        return self.now_s

    def monotonic_s(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture(autouse=True)
def restored_root() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def configured(style: LogFormat, clock: ManualClock | None = None) -> io.StringIO:
    stream = io.StringIO()
    logs.configure(LogLevel.INFO, style, stream=stream, clock=clock, process="worker-0")
    return stream


def test_text_record_is_one_line_of_fields() -> None:
    stream = configured(LogFormat.TEXT)
    logs.get_logger("tiergate.x").info("stored", bucket="b", key="a b\nINFO forged", size_bytes=3)
    line = stream.getvalue()
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO    tiergate\.x: stored ", line)
    assert line.endswith('process=worker-0 bucket=b key="a b\\nINFO forged" size_bytes=3\n')
    assert line.count("\n") == 1


def test_json_record_is_one_object() -> None:
    stream = configured(LogFormat.JSON)
    logs.get_logger("tiergate.x").warning("odd", count=3, flag=True, reason=None)
    record = json.loads(stream.getvalue())
    assert record["level"] == "warning"
    assert record["event"] == "odd"
    assert (record["count"], record["flag"], record["reason"]) == (3, True, None)


def test_level_below_the_threshold_is_left_out() -> None:
    stream = configured(LogFormat.TEXT)
    logs.get_logger("tiergate.x").debug("detail")
    assert stream.getvalue() == ""


async def test_context_belongs_to_its_task() -> None:
    stream = configured(LogFormat.JSON)
    log = logs.get_logger("tiergate.x")
    both = asyncio.Barrier(2)

    async def request(number: int) -> None:
        with logs.log_context(request_id=number):
            await both.wait()
            log.info("done", number=number)

    await asyncio.gather(request(1), request(2))
    log.info("outside")
    records = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert all(record["request_id"] == record["number"] for record in records[:2])
    assert "request_id" not in records[2]


@pytest.mark.parametrize("style", list(LogFormat))
def test_secrets_are_masked_wherever_they_come_from(style: LogFormat) -> None:
    stream = configured(style)
    logs.mask(Secret("known-secret-text"))
    log = logs.get_logger("tiergate.x")
    log.info(
        "request",
        key=Secret("typed"),
        authorization="AWS4 named",
        url="/b/k?X-Amz-Signature=abc123&X-Amz-Credential=AKIA%2F1&X-Amz-Expires=5",
        error=ValueError("holds known-secret-text"),
    )
    logging.getLogger("other").warning("foreign known-secret-text %s", "X-Amz-Security-Token=tok")
    try:
        raise ValueError("known-secret-text in a traceback")
    except ValueError:
        log.exception("failed")
    text = stream.getvalue()
    for secret in ("known-secret-text", "typed", "named", "abc123", "AKIA", "=tok"):
        assert secret not in text
    assert "X-Amz-Expires=5" in text
    assert "in a traceback" in text
    assert "foreign ***" in text


def test_debug_records_of_the_aws_client_are_never_shown() -> None:
    stream = io.StringIO()
    logs.configure(LogLevel.DEBUG, LogFormat.TEXT, stream=stream)
    logging.getLogger("botocore.auth").debug("StringToSign: secret")
    assert stream.getvalue() == ""


def test_repeated_warnings_are_limited_and_counted() -> None:
    clock = ManualClock()
    stream = configured(LogFormat.JSON, clock)
    log = logs.get_logger("tiergate.x")
    for number in range(25):
        log.warning("again", number=number)
    log.warning("something else")
    clock.now_s += logs.REPEAT_WINDOW_S
    log.warning("again")
    records = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [record["event"] for record in records] == ["again"] * 10 + ["something else", "again"]
    assert records[-1]["left_out"] == 15


def test_information_is_not_limited() -> None:
    stream = configured(LogFormat.TEXT, ManualClock())
    for _ in range(25):
        logs.get_logger("tiergate.x").info("again")
    assert len(stream.getvalue().splitlines()) == 25
