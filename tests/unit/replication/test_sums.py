"""Checksums of blocks as a body passes by."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiergate import model
from tiergate.model import BLOCK_CHECKSUM_BYTES
from tiergate.replication import sums
from tiergate.s3.checksums import block_checksum


@given(st.binary(max_size=100), st.lists(st.integers(0, 100), max_size=6))
def test_the_sums_do_not_depend_on_the_pieces(data: bytes, cuts: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sums, "BLOCK_BYTES", 16)
        patch.setattr(model, "BLOCK_BYTES", 16)
        taken = sums.BlockSums()
        at = 0
        for end in [*sorted(cuts), len(data)]:
            taken.write(data[at:end])
            at = max(at, min(end, len(data)))
        blocks = [data[start : start + 16] for start in range(0, len(data), 16)]
        expected = [block_checksum(block).to_bytes(BLOCK_CHECKSUM_BYTES, "big") for block in blocks]
        assert taken.size_bytes == len(data)
        assert taken.blocks() == b"".join(expected)
        assert all(
            sums.sum_of([memoryview(block[:5]), memoryview(block[5:])]) == block_checksum(block) for block in blocks
        )
