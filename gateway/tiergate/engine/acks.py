"""The acknowledgement rules an answer can name (promise P2)."""

ACK_HEADER = "x-tiergate-ack"
ACK_ORIGIN = "origin"


def memory_ack(copies_count: int) -> str:
    """In the memory of so many nodes, and in the directory."""
    return f"memory:{copies_count}"
