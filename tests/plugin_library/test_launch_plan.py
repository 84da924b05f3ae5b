"""The launch plans of the plugin library against those of Python, over random shapes and every architecture."""

import ctypes
import random
from types import SimpleNamespace

import pytest

from tests.plugin_library.build import SOURCES, build_shared, embed_kernels, need_cmake
from trt_kvcache.kernels.attention_kernels import _decode_plan, flagged_nbytes
from trt_kvcache.kernels.attention_tiles import ELEMENT_TYPES, HEAD_DIMS, MAX_GROUP, PREFILL_VARIANTS, STORED_TYPES
from trt_kvcache.kernels.compile import ARCHITECTURES
from trt_kvcache.kernels.prefill_plan import prefill_plan
from trt_kvcache.ops.attention_attributes import AttentionAttributes
from trt_kvcache.ops.borrowed_workspace import workspace_nbytes

need_cmake()

_KV_DTYPES = (None, *STORED_TYPES)
_CASES_PER_KERNEL = 40

#: Multiprocessors of GPUs, from small to large.
_MULTIPROCESSORS = (4, 16, 20, 46, 108, 128, 132, 144, 170, 256)


@pytest.fixture(scope="module")
def probe():
    embed = embed_kernels()
    kernels = embed.kernels_of(ARCHITECTURES, embed.VARIANTS, _KV_DTYPES)

    def write(folder):
        embed.write(kernels, [b""] * sum(len(one.sources) for one in kernels), folder)
        return [folder / "kernels.cpp", folder / "kernels.S"]

    names = ("launch_plan.cpp", "attention_kernels.cpp")
    return ctypes.CDLL(str(build_shared("plan_probe", [*(SOURCES / name for name in names)], write)))


def cases(seed, head_dim):
    """Yield shapes as calls have them: decode steps, a few tokens, chunks and prompts over short and long caches."""
    choose = random.Random(seed)
    for _ in range(_CASES_PER_KERNEL):
        multiprocessors = choose.choice(_MULTIPROCESSORS)
        tokens = choose.choice((choose.randint(1, 64), choose.randint(1, 4096), choose.choice((2048, 8192, 32768, 131072))))
        width = min(choose.choice((1, choose.randint(2, 8), choose.randint(2, 40), choose.randint(1, 2048))), tokens)
        batch, kv_heads = choose.choice((1, 1, 2, 4, choose.randint(1, 64))), choose.choice((1, 2, 4, 8, choose.randint(1, 40)))
        yield batch, width, tokens, kv_heads, choose.randint(1, MAX_GROUP), multiprocessors
        # A few tokens of many rows, over a cache whose size is near that from which a decode kernel is faster.
        kv_heads, width = choose.choice((1, 2, 4)), choose.randint(2, 8)
        tokens = int(choose.choice((0.7, 1.001, 1.4)) * 64 * 1024 * multiprocessors / (4 * kv_heads * head_dim))
        yield 1, width, tokens, kv_heads, max(1, choose.choice((12, 20, 32)) // width), multiprocessors


def python_plan(arch, dtype, kv_dtype, batch, width, tokens, kv_heads, group, head_dim, multiprocessors):
    """Return what ``plan_of`` of the probe writes."""
    memory = SimpleNamespace(arch=arch, multiprocessor_count=multiprocessors)
    call = SimpleNamespace(
        q=SimpleNamespace(shape=(batch, width, kv_heads * group, head_dim), dtype=dtype),
        cache=SimpleNamespace(shape=(batch, 2, kv_heads, tokens, head_dim)),
        k="some", ancestors=None, kv_scales=kv_dtype, group=group, memory=memory,
    )  # fmt: skip
    decode = _decode_plan(call)
    if decode is not None:
        *_, compiled = decode.name.split("_")
        few = decode.source == "attention_decode_few"
        sizes = (decode.warps, decode.shared_nbytes, decode.blocks, decode.splits_per_head, decode.heads_per_block)
        return [1, few, int(compiled), *sizes, flagged_nbytes(call)]
    plan = prefill_plan(call)
    launch = (plan.row_blocks, plan.blocks, plan.order, plan.appends, plan.variant.warps, plan.shared_nbytes)
    return [0, PREFILL_VARIANTS.index(plan.name), *launch, flagged_nbytes(call)]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_plans_are_those_of_python(probe, arch):
    kinds = set()
    for number, (dtype, head_dim, kv_dtype) in enumerate(
        (dtype, head_dim, kv_dtype) for dtype in ELEMENT_TYPES for head_dim in HEAD_DIMS for kv_dtype in _KV_DTYPES
    ):
        for batch, width, tokens, kv_heads, group, multiprocessors in cases(number, head_dim):
            sizes = (batch, width, tokens, kv_heads, group, head_dim)
            found = (ctypes.c_int64 * 9)()
            names = [name and name.encode() for name in (dtype, kv_dtype)]
            probe.plan_of(int(arch[3:]), *names, (ctypes.c_int64 * 6)(*sizes), ctypes.c_int64(multiprocessors), found)
            assert list(found) == python_plan(arch, dtype, kv_dtype, *sizes, multiprocessors), (sizes, multiprocessors, dtype, kv_dtype)
            kinds.add(tuple(found[:2]))
    assert {(1, 0), (1, 1), (0, 0), (0, 2), (0, 4), (0, 5)} <= kinds  # so random shapes reach every kernel that each architecture has


def test_the_workspace_is_that_of_python(probe):
    probe.workspace_of.restype = ctypes.c_int64
    for head_dim in HEAD_DIMS:
        for group in range(1, MAX_GROUP + 1):
            attributes = AttentionAttributes(num_heads=group, num_kv_heads=1, head_dim=head_dim)
            assert probe.workspace_of(ctypes.c_int64(group), ctypes.c_int64(head_dim)) == workspace_nbytes(attributes)
