"""The acknowledgement rules an answer can name (promise P2)."""

ACK_HEADER = "x-tiergate-ack"
ACK_MEMORY = "memory:1"
ACK_ORIGIN = "origin"
