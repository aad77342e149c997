"""Form uploads on the wire, however they are cut."""

import pytest

from tiergate.errors import RequestError
from tiergate.s3.formdata import MAX_FIELDS_BYTES, FormReader, boundary_of

FILE = b"one\r\n--A no\r\n--\r\ntwo\r\n"
FORM = (
    b'preamble\r\n--B\r\nContent-Disposition: form-data; name="Key"\r\n\r\n\xd0\xba\r\n--B \t\r\n'
    b"content-type: text/plain\r\ncontent-disposition: form-data; name=plain\r\n\r\n\r\n--B\r\n"
    b'Content-Disposition: form-data; filename="a\\"b"; name="file"\r\nContent-Type: x/y\r\n\r\n'
    + FILE
    + b"\r\n--B--\r\n"
)


def read(pieces: list[bytes], boundary: str = "B") -> tuple[FormReader, bytes]:
    reader, file = FormReader(boundary), b""
    for piece in pieces:
        was_in_file = reader.in_file
        file += reader.feed(piece)
        if reader.in_file and not was_in_file:
            file += reader.rest()
    reader.finish()
    return reader, file


def refusal(form: bytes) -> str:
    with pytest.raises(RequestError) as refused:
        read([form])
    return refused.value.code


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 11, len(FORM)])
def test_form_is_read_in_pieces_of_any_size(size: int) -> None:
    reader, file = read([FORM[at : at + size] for at in range(0, len(FORM), size)])
    assert reader.fields == {"key": "к", "plain": ""}
    assert (file, reader.filename, reader.file_type) == (FILE, 'a"b', "x/y")
    assert reader.file_bytes(len(FORM)) == len(FILE)


@pytest.mark.parametrize("at", range(0, len(FORM), 3))
def test_form_cut_in_two_anywhere_is_the_same(at: int) -> None:
    reader, file = read([FORM[:at], FORM[at:]])
    assert (reader.fields, file) == ({"key": "к", "plain": ""}, FILE)


def test_what_follows_the_file_is_passed_over() -> None:
    more = b'--B\r\nContent-Disposition: form-data; name="late"\r\n\r\n1\r\n--B--\r\n'
    reader, file = read([FORM.removesuffix(b"--B--\r\n") + more])
    assert (file, "late" in reader.fields) == (FILE, False)


@pytest.mark.parametrize(
    ("form", "code"),
    [
        (FORM[:-10], "MalformedPOSTRequest"),
        (b"", "MalformedPOSTRequest"),
        (FORM.replace(b"--B \t", b"--B x"), "MalformedPOSTRequest"),
        (FORM.replace(b"; name=plain", b""), "MalformedPOSTRequest"),
        (FORM.replace(b"form-data; name=plain", b"attachment; name=plain"), "MalformedPOSTRequest"),
        (FORM.replace(b"\xd0\xba", b"\xff"), "MalformedPOSTRequest"),
        (FORM.replace(b"name=plain", b"name=KEY"), "InvalidArgument"),
        (FORM.replace(b'name="file"', b'name="data"'), "InvalidArgument"),
        (FORM.replace(b"\xd0\xba", b"x" * MAX_FIELDS_BYTES), "MaxPostPreDataLengthExceededError"),
    ],
)
def test_form_that_cannot_be_read_is_refused(form: bytes, code: str) -> None:
    assert refusal(form) == code


@pytest.mark.parametrize(
    ("content_type", "boundary"),
    [
        ("multipart/form-data; boundary=abc", "abc"),
        ('Multipart/Form-Data; charset=utf-8; Boundary="a b"', "a b"),
        ("multipart/form-data", None),
        ("multipart/mixed; boundary=abc", None),
        ("", None),
    ],
)
def test_boundary_is_found(content_type: str, boundary: str | None) -> None:
    assert boundary_of(content_type) == boundary
