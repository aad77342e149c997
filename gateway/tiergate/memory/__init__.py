"""The node's memory: bytes of bodies in slabs, and the inventory that says what lies where and who needs
it."""
