"""Which holders this process vouches for: bytes are sealed, the directory does not know them yet."""


class Claims:
    """Bodies by holder. In this process's heap only; the rows it stands for carry the process's token."""

    def __init__(self) -> None:
        self._bodies: dict[str, set[str]] = {}

    def add(self, holder: str, body_uid: str) -> None:
        self._bodies.setdefault(holder, set()).add(body_uid)

    def of(self, holder: str) -> set[str]:
        return set(self._bodies.get(holder, ()))

    def remove(self, holder: str, body_uid: str) -> bool:
        """Whether there was such a claim."""
        bodies = self._bodies.get(holder, set())
        if body_uid not in bodies:
            return False
        bodies.remove(body_uid)
        if not bodies:
            del self._bodies[holder]
        return True
