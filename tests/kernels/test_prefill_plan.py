"""``prefill_plan``: which kernel attends to several new tokens, from shapes alone; and that what it plans has room everywhere."""

from types import SimpleNamespace

import pytest

from trt_kvcache.kernels.attention_tiles import HEAD_DIMS, MAX_APPENDED_WIDTH, PREFILL_VARIANTS, prefill_variant, shared_limit
from trt_kvcache.kernels.attention_workspace import MAX_PREFILL_ROWS_PER_SM
from trt_kvcache.kernels.compile import ARCHITECTURES
from trt_kvcache.kernels.prefill_plan import FROM_LAST, plan_of, prefers_row_blocks, prefill_plan


@pytest.fixture
def call():
    """Return what makes the parameters of a call on a GPU of 132 multiprocessors."""

    def make(width, *, slots=1, kv_heads=8, group=4, head_dim=128, tokens=8200, arch="sm_90", kv_scales=None):
        memory = SimpleNamespace(arch=arch, multiprocessor_count=132)
        q = SimpleNamespace(shape=(slots, width, kv_heads * group, head_dim), dtype="float16")
        cache = SimpleNamespace(shape=(slots, 2, kv_heads, tokens, head_dim), memory=memory)
        return SimpleNamespace(q=q, k="some", group=group, cache=cache, kv_scales=kv_scales, memory=memory)

    return make


@pytest.mark.parametrize(
    ("width", "sizes", "name", "splits"),
    [
        (2, {}, "16", True),
        (4, {"group": 7, "kv_heads": 4}, "64", True),
        (4, {"group": 7, "kv_heads": 4, "head_dim": 64}, "32", True),
        (4, {"group": 7, "kv_heads": 4, "arch": "sm_86"}, "32", True),
        (8, {"group": 7}, "64", True),
        (16, {"group": 7}, "64", True),
        (32, {"slots": 8}, "wide", True),
        (32, {"slots": 4}, "64", True),
        (32, {"slots": 8, "arch": "sm_80"}, "64", True),
        (32, {"slots": 8, "head_dim": 256}, "64", True),
        (16, {"slots": 8}, "64", True),
        (16, {"group": 7, "tokens": 33000}, "64", True),
        (32, {"slots": 16}, "wide", False),
        (2, {"slots": 32}, "16", False),
        (MAX_APPENDED_WIDTH + 1, {}, "short", True),
        (MAX_APPENDED_WIDTH + 1, {"tokens": 9000}, "wide", True),
        (MAX_APPENDED_WIDTH + 1, {"tokens": 1000}, "short", True),
        (MAX_APPENDED_WIDTH + 1, {"slots": 8, "tokens": 1000}, "wide", True),
        (128, {"slots": 8}, "whole", False),
        (128, {"slots": 8, "tokens": 4000}, "wide", False),
        (128, {"slots": 8, "arch": "sm_89"}, "wide", False),
        (512, {}, "wide", False),
        (512, {"group": 1}, "short", True),
        (1024, {}, "wide", False),
        (1024, {"head_dim": 256}, "whole", False),
        (2048, {}, "whole", False),
        (33, {"slots": 64, "group": 8}, "whole", False),
        (2, {"tokens": 4}, "16", True),
    ],
)
def test_variant(call, width, sizes, name, splits):
    plan = prefill_plan(call(width, **sizes))
    assert (plan.name, plan.splits) == (name, splits)
    assert plan.appends == (width <= MAX_APPENDED_WIDTH and name in ("16", "32", "64"))


@pytest.mark.parametrize(
    ("width", "sizes", "name", "splits"),
    [
        (2, {}, "16", True),
        (16, {"group": 7}, "64", True),
        (16, {"group": 7, "tokens": 33000}, "wide", True),
        (32, {"slots": 8}, "wide", True),
        (32, {"slots": 8, "arch": "sm_80"}, "64", True),
        (MAX_APPENDED_WIDTH + 1, {}, "short", True),
        (2048, {}, "whole", False),
    ],
)
def test_variant_over_codes(call, width, sizes, name, splits):
    plan = prefill_plan(call(width, **sizes, kv_scales="some"))
    assert (plan.name, plan.splits, plan.appends) == (name, splits, False)


@pytest.mark.parametrize(
    ("width", "sizes", "expected"),
    [
        (8, {"tokens": 1000}, True),
        (4, {"tokens": 1000}, False),  # a decode kernel for 16 rows
        (4, {"tokens": 1000, "kv_heads": 2, "head_dim": 256}, True),
        (2, {"tokens": 1000, "kv_heads": 2, "head_dim": 256}, False),
        (8, {}, False),  # a long cache
        (8, {"tokens": 1000, "slots": 3}, False),
        (8, {"tokens": 1000, "arch": "sm_89"}, False),
        (8, {"tokens": 1000, "head_dim": 96}, False),
        (8, {"tokens": 1000, "kv_scales": "some"}, False),
        (1, {"tokens": 1000, "group": 32}, False),
    ],
)
def test_few_new_tokens_in_row_blocks(call, width, sizes, expected):
    assert prefers_row_blocks(call(width, **sizes)) is expected


@pytest.mark.parametrize("kv_scales", [None, "some"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_room(call, arch, head_dim, kv_scales):
    for name in PREFILL_VARIANTS:
        variant = prefill_variant(head_dim, arch, name, kv_scales is not None)
        assert variant.shared_nbytes * variant.blocks_per_sm <= shared_limit(arch) + (1 if variant.blocks_per_sm == 1 else 0)
        assert arch == "sm_90" or not variant.warpgroups
        if name != "whole":
            assert variant.rows * variant.blocks_per_sm <= MAX_PREFILL_ROWS_PER_SM
        plan = plan_of(call(40, head_dim=head_dim, arch=arch, kv_scales=kv_scales), name)
        if plan.appends:
            # new tokens are in one tile, of large heads only so many: of wider calls another launch appends
            assert variant.tile_keys >= (MAX_APPENDED_WIDTH if head_dim <= 256 else 16)
        assert plan.row_blocks * variant.rows >= 40 * 4
        assert plan.blocks >= plan.row_blocks * 8
        assert not plan.splits or plan.blocks <= 132 * variant.blocks_per_sm


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("width", "tokens"), [(128, 9000), (512, 9000), (512, 600)])
def test_blocks_that_are_resident_at_once_are_spread(call, arch, head_dim, width, tokens):
    """A multiprocessor has room for as many blocks as the plan wants there, and not for one more."""
    of_multiprocessor, reserved = shared_limit(arch) + 1024, 1024
    for name in PREFILL_VARIANTS:
        plan = plan_of(call(width, head_dim=head_dim, arch=arch, tokens=tokens, kv_heads=4), name)
        most = of_multiprocessor // (plan.shared_nbytes + reserved)
        assert plan.shared_nbytes <= shared_limit(arch)
        assert most == plan.variant.blocks_per_sm if plan.order != FROM_LAST else plan.shared_nbytes == plan.variant.shared_nbytes


def test_no_block_without_keys(call):
    """A cache of one tile has one block for it, and one for the new tokens."""
    assert plan_of(call(2, tokens=100), "16").blocks == 8 * 2


def test_no_more_parts_than_a_block_has_room_for(call, monkeypatch):
    params = call(33, kv_heads=1, head_dim=64, tokens=1 << 20)
    params.cache.memory.multiprocessor_count = 1000
    plan = plan_of(params, "wide")
    assert plan.splits
    assert plan.blocks == plan.variant.max_splits == (6 * 64 * 128 - 64 * 2 // 2 * 80) // 80
