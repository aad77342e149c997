"""A browser's form upload on the wire: fields first, then one file, which streams.

https://docs.aws.amazon.com/AmazonS3/latest/API/RESTObjectPOST.html
https://www.rfc-editor.org/rfc/rfc7578.html
"""

import re
from enum import Enum, auto

from tiergate.errors import RequestError

FILE_FIELD = "file"
MAX_FIELDS_BYTES = 20 << 10
"""All that precedes the file: https://docs.aws.amazon.com/AmazonS3/latest/API/sigv4-HTTPPOSTForms.html"""

_BOUNDARY = re.compile(r';\s*boundary=(?:"([^"]{1,70})"|([^\s;,"]{1,70}))', re.IGNORECASE)
_PARAMETER = re.compile(r';\s*(\w+)="((?:[^"\\]|\\.)*)"|;\s*(\w+)=([^\s;"]+)')
_PADDING = b" \t"


class _Stage(Enum):
    DELIMITER = auto()
    AFTER_DELIMITER = auto()
    HEADERS = auto()
    VALUE = auto()
    FILE = auto()
    DONE = auto()


def boundary_of(content_type: str) -> str | None:
    """The boundary of a multipart/form-data body; None for any other content type, or without one."""
    if content_type.partition(";")[0].strip().lower() != "multipart/form-data":
        return None
    found = _BOUNDARY.search(content_type)
    return (found[1] or found[2]) if found else None


def malformed_form(why: str = "") -> RequestError:
    """S3's answer to a form that it cannot read."""
    return RequestError(
        "MalformedPOSTRequest", "The body of your POST request is not well-formed multipart/form-data.", reason=why
    )


class FormReader:
    """Takes a form's bytes as they arrive. Once `in_file`, `fields` (names in lower case) are complete, `rest` returns
    what came of the file with them, and `feed` what comes then; fields after the file do not count, as in S3."""

    def __init__(self, boundary: str) -> None:
        self.fields: dict[str, str] = {}
        self.filename = ""
        self.file_type = ""
        """The content type that the file's own part names."""
        self._delimiter = b"\r\n--" + boundary.encode("utf-8", "surrogateescape")
        # The first delimiter may have no line before it.
        self._buffer = bytearray(b"\r\n")
        self._stage = _Stage.DELIMITER
        self._name = ""
        self._fields_bytes = 0
        self._had_file = False

    @property
    def in_file(self) -> bool:
        """Whether all fields are read."""
        return self._had_file

    def file_bytes(self, form_bytes: int) -> int:
        """How long the file of a form of that length is, which is last in it; once `in_file`."""
        return form_bytes - self._fields_bytes - len(self._delimiter) - len(b"--\r\n")

    def feed(self, data: bytes | memoryview) -> bytes:
        """Take the next bytes; those of the file among them.

        Raises:
            RequestError: MalformedPOSTRequest, MaxPostPreDataLengthExceededError, InvalidArgument.
        """
        if self._stage is _Stage.DONE:
            return b""
        self._buffer += data
        if self._had_file:
            return self._file_bytes()
        self._fields_bytes += len(data)
        while not self._had_file and self._step():
            pass
        if self._had_file:
            self._fields_bytes -= len(self._buffer)
        if self._fields_bytes > MAX_FIELDS_BYTES:
            raise RequestError("MaxPostPreDataLengthExceededError", max_message_length_bytes=MAX_FIELDS_BYTES)
        return b""

    def rest(self) -> bytes:
        """The bytes of the file that came with the last of the fields."""
        return self._file_bytes()

    def finish(self) -> None:
        """All has arrived.

        Raises:
            RequestError: MalformedPOSTRequest when it ends early, InvalidArgument when there was no file.
        """
        if self._stage is not _Stage.DONE:
            raise malformed_form("it ends early")
        if not self._had_file:
            raise RequestError("InvalidArgument", "POST requires exactly one file upload per request.")

    def _step(self) -> bool:
        """Read one more thing before the file; whether there was enough of it."""
        match self._stage:
            case _Stage.DELIMITER:
                return self._upto(self._delimiter, _Stage.AFTER_DELIMITER) is not None
            case _Stage.AFTER_DELIMITER:
                return self._after_delimiter()
            case _Stage.HEADERS:
                head = self._upto(b"\r\n\r\n", _Stage.VALUE)
                if head is not None:
                    self._part(head)
                return head is not None
            case _Stage.VALUE:
                value = self._upto(self._delimiter, _Stage.AFTER_DELIMITER)
                if value is not None:
                    self._keep(value)
                return value is not None
            case _:
                return False

    def _upto(self, mark: bytes, then: _Stage) -> bytes | None:
        at = self._buffer.find(mark)
        if at < 0:
            return None
        found = bytes(self._buffer[:at])
        del self._buffer[: at + len(mark)]
        self._stage = then
        return found

    def _after_delimiter(self) -> bool:
        if self._buffer.startswith(b"--"):
            self._stage = _Stage.DONE
            return False
        at = self._buffer.find(b"\r\n")
        if at < 0:
            return False
        if self._buffer[:at].strip(_PADDING):
            raise malformed_form("a delimiter with something behind it")
        # The line's end is kept: a part may have no headers at all.
        del self._buffer[:at]
        self._stage = _Stage.HEADERS
        return True

    def _part(self, head: bytes) -> None:
        headers: dict[str, str] = {}
        for line in head.split(b"\r\n"):
            name, colon, value = line.partition(b":")
            if colon:
                headers[_text(name).strip().lower()] = _text(value).strip()
        disposition = headers.get("content-disposition", "")
        parameters = {
            (quoted or bare).lower(): re.sub(r"\\(.)", r"\1", text) if quoted else plain
            for quoted, text, bare, plain in _PARAMETER.findall(disposition)
        }
        if disposition.partition(";")[0].strip().lower() != "form-data" or not parameters.get("name"):
            raise malformed_form("a part without a name")
        self._name = parameters["name"].lower()
        if self._name == FILE_FIELD:
            # Some browsers tell the whole path.
            self.filename = re.split(r"[/\\]", parameters.get("filename", ""))[-1]
            self.file_type = headers.get("content-type", "")
            self._stage, self._had_file = _Stage.FILE, True

    def _keep(self, value: bytes) -> None:
        if self._name in self.fields:
            raise RequestError(
                "InvalidArgument", f"POST requires exactly one {self._name} field", argument_name=self._name
            )
        self.fields[self._name] = _text(value)

    def _file_bytes(self) -> bytes:
        found = self._upto(self._delimiter, _Stage.DONE)
        if found is not None:
            return found
        safe = max(0, len(self._buffer) - len(self._delimiter) + 1)
        found = bytes(self._buffer[:safe])
        del self._buffer[:safe]
        return found


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise malformed_form("a field is not UTF-8") from error
