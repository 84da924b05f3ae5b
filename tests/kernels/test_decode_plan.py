"""``decode_plan``: which decode kernel a call takes, from shapes alone; and that what it plans has room everywhere."""

import pytest

from trt_kvcache.kernels.attention_tiles import (
    DECODE_HEAD_DIMS,
    MAX_FEW_TOKENS,
    MAX_GROUP,
    decode_block_nbytes,
    decode_tiles,
    few_tiles,
    shared_limit,
)
from trt_kvcache.kernels.attention_workspace import MAX_BLOCKS_PER_SM, MAX_FEW_ROWS, MAX_PREFILL_ROWS_PER_SM
from trt_kvcache.kernels.compile import ARCHITECTURES
from trt_kvcache.kernels.decode_plan import decode_plan


def plan(width, group, *, slots=1, kv_heads=8, head_dim=128, tokens=8200):
    return decode_plan((slots, 2, kv_heads, tokens, head_dim), width, group, "sm_90", 132)


@pytest.mark.parametrize(
    ("width", "group", "head_dim", "name"),
    [
        (1, 8, 128, "attention_decode_8"),
        (1, 9, 128, "attention_decode_16"),
        (2, 4, 128, "attention_decode_few_8"),
        (2, 8, 128, "attention_decode_few_16"),
        (2, 9, 64, "attention_decode_few_32"),
        (4, 8, 80, "attention_decode_few_32"),
        (4, 2, 256, "attention_decode_few_8"),
        (8, 2, 256, "attention_decode_few_16"),
        (MAX_FEW_TOKENS, 1, 96, "attention_decode_few_8"),
    ],
)
def test_kernel(width, group, head_dim, name):
    found = plan(width, group, head_dim=head_dim)
    assert (found.name, found.rows) == (name, width * group)
    assert found.name.startswith(found.source)


@pytest.mark.parametrize(
    ("width", "group", "head_dim"), [(MAX_FEW_TOKENS + 1, 1, 128), (3, 11, 128), (3, 6, 256), (1, 1, 512), (2, 4, 512)]
)
def test_no_room(width, group, head_dim):
    assert plan(width, group, head_dim=head_dim) is None


def test_blocks():
    """As many as there are multiprocessors, but none with fewer than 8 tiles of 16 tokens; then several heads for each."""
    assert plan(2, 4)[-3:] == (132, 16, 1)
    assert plan(2, 4, tokens=128)[-3:] == (8, 1, 1)
    assert plan(2, 4, slots=33)[-3:] == (132, 0, 2)


def test_blocks_over_a_quantized_cache():
    """Tiles have twice the tokens there."""
    assert decode_plan((1, 2, 8, 256, 128), 2, 4, "sm_90", 132, True)[-3:] == (8, 1, 1)
    assert decode_plan((1, 2, 8, 257, 128), 2, 4, "sm_90", 132, True)[-3:] == (16, 2, 1)


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("head_dim", DECODE_HEAD_DIMS)
def test_room(arch, head_dim, quantized):
    one, few = decode_tiles(head_dim, arch, quantized=quantized), few_tiles(head_dim, arch, quantized=quantized)
    assert few["MAX_NEW_TOKENS"] == MAX_FEW_TOKENS
    for rows, tiles in ((MAX_GROUP, one), (few["MAX_ROWS"], few)):
        assert decode_block_nbytes(head_dim, rows, tiles, quantized=quantized) * tiles["BLOCKS_PER_SM"] <= shared_limit(arch)
        assert tiles["BLOCKS_PER_SM"] <= MAX_BLOCKS_PER_SM
    assert few["MAX_ROWS"] <= MAX_FEW_ROWS <= MAX_PREFILL_ROWS_PER_SM
