"""Copies on other nodes: where they go, how they get there, and how they are read."""
