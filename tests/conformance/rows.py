"""Tables of requests with their right answers, and the one way to check a row."""

from dataclasses import dataclass, replace

from tests.conformance.wire import Ask, Bucket, Reply, Wire


@dataclass(frozen=True, slots=True)
class Row:
    """A request and its right answer.

    `code` names more than one, with `|` between, where either is right. `closes`: whether the server must end the
    connection, None if it may.
    """

    name: str
    ask: Ask
    status: int
    code: str = ""
    closes: bool | None = None

    def __str__(self) -> str:
        return self.name


def answered(row: Row, reply: Reply) -> None:
    """Check an answer against its row: status, code, form, and that an error names its request."""
    assert reply.status == row.status, f"{row}: {reply}"
    assert reply.headers.get("x-amz-request-id"), f"{row}: no request id: {reply}"
    if row.status >= 400 and row.ask.method.upper() != "HEAD":
        assert reply.code in row.code.split("|"), f"{row}: {reply}"
        assert reply.headers["content-type"] == "application/xml", f"{row}: {reply}"
        assert reply.document.tag == "Error", f"{row}: {reply}"
        assert reply.text("RequestId") == reply.headers["x-amz-request-id"], f"{row}: {reply}"
        assert reply.text("Message"), f"{row}: {reply}"
    elif row.ask.method.upper() == "HEAD":
        assert reply.body == b"", f"{row}: {reply}"
    if row.closes is not None:
        assert reply.closes is row.closes, f"{row}: {reply}"


def goes_on(bucket: Bucket, wire: Wire, reply: Reply, row: Row) -> None:
    """After a row, the next plain request works: on this connection, or on a new one if the server ended it."""
    plain = Ask("HEAD", f"/{bucket.name}")
    if reply.closes:
        wire.finish()
        assert wire.rest() == b"", f"{row}: bytes after the last answer"
        assert bucket.ask(plain).status == 200, f"{row}: a new connection is not served"
    else:
        assert wire.is_silent(), f"{row}: bytes after the answer"
        assert wire.ask(plain).status == 200, f"{row}: the connection is out of step"


def check(bucket: Bucket, row: Row) -> Reply:
    """Send a row's request, check its answer, and that the server goes on."""
    with bucket.wire() as wire:
        wire.begin(row.ask)
        wire.pour(row.ask.body)
        reply = wire.reply(row.ask.method)
        answered(row, reply)
        goes_on(bucket, wire, reply, row)
    return reply


def aimed(row: Row, path: str) -> Row:
    """The row with `{}` in its path replaced."""
    return replace(row, ask=replace(row.ask, path=row.ask.path.replace("{}", path)))
