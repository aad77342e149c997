"""The acknowledgement rules an answer can name (promise P2)."""

ACK_HEADER = "x-tiergate-ack"
ACK_ORIGIN = "origin"


def memory_ack(copies_count: int, *, parked: bool = False) -> str:
    """In the memory of so many nodes, and in the directory; `parked`: it stays there by policy."""
    return f"memory:{copies_count}{'; kept=memory' if parked else ''}"
