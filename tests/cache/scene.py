"""Shared by the tests of caches: parameters over kinds, a cache of three head dims, random sizes, and the driver calls of an operation."""

import pytest
from hypothesis import strategies as st

from tests.simt.standin import StandIn
from trt_kvcache import KVCacheConfig, KVLayerConfig, KVLayout

WITH_ROWS = pytest.mark.parametrize("kind", ["manager", "linear", "hybrid"])
WITH_STATES = pytest.mark.parametrize("kind", ["linear", "mamba", "hybrid", "conv"])
PING_PONG = pytest.mark.parametrize("ping_pong", [False, True])
OTHER_LAYOUT = {KVLayout.COMBINED: KVLayout.SEPARATE, KVLayout.SEPARATE: KVLayout.COMBINED}

#: Layers of (H, D).
HEADS = [(2, 16), (1, 32), (4, 48)]
B, S = 3, 7

KV_CONFIGS = st.builds(
    KVCacheConfig,
    layers=st.lists(
        st.builds(KVLayerConfig, num_kv_heads=st.integers(1, 4), head_dim=st.sampled_from([16, 32, 80])), min_size=1, max_size=4
    ),
    max_batch_size=st.integers(1, 5),
    max_sequence_length=st.integers(1, 40),
    dtype=st.sampled_from(["float16", "bfloat16", "float32", "float8_e4m3fn", "int8"]),
    layout=st.sampled_from(KVLayout),
)


def kv_config(heads=HEADS, **changes):
    layers = [KVLayerConfig(num_kv_heads=h, head_dim=d) for h, d in heads]
    return KVCacheConfig(**{"layers": layers, "max_batch_size": B, "max_sequence_length": S, **changes})


def driver_calls(operation):
    """Return the calls of the CUDA driver that an operation makes once the kernels are loaded, and how many of them are launches."""
    kept = []  # to let go of memory is to wait
    for _ in range(2):
        standin = StandIn()
        kept.append(operation())
        calls = standin.take_calls()
    return calls, sum(call.startswith("cuLaunchKernel") for call in calls)
