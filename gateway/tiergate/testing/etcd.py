"""Real etcd to test against, with the mark of the tests that need it."""

import shutil

import pytest

from tiergate.testing.etcdserver import EtcdMember, EtcdServer, etcd_path

__all__ = ["EtcdMember", "EtcdServer", "etcd_path", "needs_etcd"]

needs_etcd = pytest.mark.skipif(shutil.which("etcd") is None, reason="there is no etcd binary on PATH")
"""Skips tests where etcd cannot run: nothing else would show what they show."""
