"""Tags as the x-amz-tagging header carries them: the rules S3 holds a request to before it takes the body.

https://docs.aws.amazon.com/AmazonS3/latest/userguide/object-tagging.html
"""

import unicodedata

from tiergate.errors import RequestError
from tiergate.s3 import wire
from tiergate.s3.target import percent_decode

HEADER = "x-amz-tagging"
MAX_TAGS_COUNT = 10
MAX_KEY_CHARS = 128
MAX_VALUE_CHARS = 256
RESERVED_PREFIX = "aws:"

_ALLOWED_SIGNS = frozenset("_.:/=+-@")


def parse_tagging(header: str) -> dict[str, str]:
    """The tags in a header's value, written like an HTML form.

    Raises:
        RequestError: InvalidArgument when it cannot be read or repeats a key, BadRequest for more than
            `MAX_TAGS_COUNT`, InvalidTag for a key or value that no tag may have.
    """
    tags: dict[str, str] = {}
    for piece in wire.decode_header_text(header).strip(" \t").split("&"):
        if not piece:
            continue
        raw_key, _, raw_value = piece.replace("+", " ").partition("=")
        try:
            key, value = percent_decode(raw_key), percent_decode(raw_value)
        except RequestError as error:
            raise _unreadable(header) from error
        if key in tags:
            raise _unreadable(header)
        tags[key] = value
    if len(tags) > MAX_TAGS_COUNT:
        raise RequestError("BadRequest", f"Object tags cannot be greater than {MAX_TAGS_COUNT}")
    for key, value in tags.items():
        if not key or not _is_allowed(key, MAX_KEY_CHARS):
            raise RequestError("InvalidTag", "The TagKey you have provided is invalid", tag_key=key)
        if key.lower().startswith(RESERVED_PREFIX):
            raise RequestError("InvalidTag", "System tags cannot be added/updated by requester", tag_key=key)
        if not _is_allowed(value, MAX_VALUE_CHARS):
            raise RequestError("InvalidTag", "The TagValue you have provided is invalid", tag_key=key, tag_value=value)
    return tags


def _is_allowed(text: str, max_chars: int) -> bool:
    """Letters, digits, blanks and a few signs of any script; lengths are counted in UTF-16."""
    if len(text.encode("utf-16-le")) // 2 > max_chars:
        return False
    return all(sign in _ALLOWED_SIGNS or unicodedata.category(sign)[0] in "LNZ" for sign in text)


def _unreadable(header: str) -> RequestError:
    return RequestError(
        "InvalidArgument",
        "The header 'x-amz-tagging' shall be encoded as UTF-8 then URLEncoded URL query parameters without tag name "
        "duplicates.",
        argument_name=HEADER,
        argument_value=header,
    )
