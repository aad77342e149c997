"""Fixtures of the property tests that need real parts."""

from tests.etcds import client, clock, etcd

__all__ = ["client", "clock", "etcd"]
