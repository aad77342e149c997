"""moto's server, whose objects have one ETag whoever asks first.

moto makes up the ETag of an object when it is first asked for, reading the body through a position that all its threads
share: two who ask at the same time get a wrong one, which then stays.
"""

from moto.s3.models import FakeKey
from moto.server import main

_unlocked = FakeKey.etag


def _etag(key: FakeKey) -> str:
    with key.lock:
        etag: str = _unlocked.__get__(key)
        return etag


if __name__ == "__main__":
    FakeKey.etag = property(_etag)  # type: ignore[assignment,method-assign]
    main()
