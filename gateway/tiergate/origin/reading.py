"""How the answers to the origin client's requests are read. Each function closes the answer, or says who
does."""

from collections.abc import AsyncIterator

from tiergate.errors import OriginTemporaryError
from tiergate.origin.answers import OriginObject, PutAnswer, lower_names, object_of, put_answer_of
from tiergate.origin.channel import discard
from tiergate.origin.documents import Document
from tiergate.origin.refusals import error_of, fault_of
from tiergate.origin.wire import MAX_ERROR_BYTES, OriginAnswer
from tiergate.s3.checksums import ALGORITHMS

_STATUSES = {
    "ConditionalRequestConflict": 409,
    "InternalError": 500,
    "NoSuchKey": 404,
    "NoSuchUpload": 404,
    "PreconditionFailed": 412,
}
"""The status that each code has where it can still be sent."""


async def hand_on(answer: OriginAnswer) -> OriginAnswer:
    """The answer itself; the caller closes it."""
    return answer


async def read_head(answer: OriginAnswer) -> OriginObject:
    """The object that an answer to HEAD describes."""
    await answer.close()
    return object_of(lower_names(answer.headers), _length(answer))


async def read_region(answer: OriginAnswer) -> str:
    """The region that an answer to HEAD of a bucket names, or ""."""
    await answer.close()
    return answer.header("x-amz-bucket-region")


async def read_put(answer: OriginAnswer) -> PutAnswer:
    """What an answer to PutObject or UploadPart says."""
    await discard(answer)
    return put_answer_of(lower_names(answer.headers), answer.header("etag"))


async def read_completion(answer: OriginAnswer) -> PutAnswer:
    """The status was sent before the outcome was known, so the outcome is in the body.

    https://docs.aws.amazon.com/AmazonS3/latest/API/API_CompleteMultipartUpload.html
    """
    document = await _outcome(answer)
    return put_answer_of(lower_names(answer.headers), document.text("ETag"))


async def read_copy(answer: OriginAnswer) -> PutAnswer:
    """What an answer to CopyObject or UploadPartCopy says. Its outcome is in the body too; the checksums told there are
    among the headers, where a put's are.

    https://docs.aws.amazon.com/AmazonS3/latest/API/API_CopyObject.html
    """
    document = await _outcome(answer)
    told = {known.header: document.text(f"Checksum{name.upper()}") for name, known in ALGORITHMS.items()}
    headers = lower_names(answer.headers) | {header: value for header, value in told.items() if value}
    return put_answer_of(headers, document.text("ETag"))


async def _outcome(answer: OriginAnswer) -> Document:
    body = await answer.read(MAX_ERROR_BYTES)
    document = Document.parse(body)
    if document.name == "Error":
        fault = fault_of(500, (), body)
        raise error_of(_STATUSES.get(fault.code, 400), answer.headers, body, fault)
    return document


def _length(answer: OriginAnswer) -> int:
    text = answer.header("content-length")
    if not text.isascii() or not text.isdigit():
        raise OriginTemporaryError("the origin's answer has no Content-Length")
    return int(text)


def ranged_object(answer: OriginAnswer, start: int, end: int) -> OriginObject:
    """The object behind an answer to a range.

    Raises:
        OriginTemporaryError: the answer is not for [start, end).
    """
    length = _length(answer)
    size_bytes = length
    if answer.status == 206:
        span, _, size = answer.header("content-range").removeprefix("bytes ").partition("/")
        if span.strip() != f"{start}-{end - 1}" or not size.isdigit():
            raise OriginTemporaryError("the origin answered for another range", got=span)
        size_bytes = int(size)
    elif end > start and (start, end) != (0, length):
        raise OriginTemporaryError("the origin ignored the range", size_bytes=length)
    return object_of(lower_names(answer.headers), size_bytes)


async def exactly(answer: OriginAnswer, size_bytes: int) -> AsyncIterator[bytes]:
    """The body, which must have just `size_bytes`.

    Raises:
        OriginTemporaryError: it has not.
    """
    left = size_bytes
    if not left:
        return
    async for piece in answer.pieces():
        left -= len(piece)
        if left < 0:
            break
        yield piece
    if left:
        raise OriginTemporaryError("the origin's body has another length than promised", missing_bytes=left)
