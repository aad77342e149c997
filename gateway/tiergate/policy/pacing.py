"""How fast something may go that has no hurry. Pure: the time is the caller's."""


class Pace:
    """Bytes in a time, on average. What is taken is owed and paid by waiting, so that any size can be taken at once."""

    def __init__(self, bytes_per_s: float, now_s: float) -> None:
        """`bytes_per_s` 0: no bound."""
        self._bytes_per_s = bytes_per_s
        self._free_at_s = now_s

    def take(self, size_bytes: int, now_s: float) -> float:
        """Take `size_bytes` now; for how many seconds the caller must wait before it takes anything again."""
        if not self._bytes_per_s:
            return 0.0
        self._free_at_s = max(self._free_at_s, now_s) + size_bytes / self._bytes_per_s
        return self._free_at_s - now_s
