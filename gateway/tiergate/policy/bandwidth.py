"""A bound on how many bytes go by in a time. Pure: the time is the caller's."""


class TokenBucket:
    """Lets `bytes_per_s` go by on average (0: no bound), after a pause up to one second's worth at once. What is larger
    than that goes too, and who comes after it waits for longer."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at_s = float("-inf")

    def take(self, size_bytes: int, now_s: float) -> float:
        """Count `size_bytes` in; how long to wait before they may go, in seconds."""
        if not self._bytes_per_s:
            return 0.0
        start_s = max(self._free_at_s, now_s - 1.0)
        self._free_at_s = start_s + size_bytes / self._bytes_per_s
        return max(0.0, start_s - now_s)
