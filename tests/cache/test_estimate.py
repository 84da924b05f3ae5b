from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.cache_cases import ATTENTION, MAMBA, kv_config, linear_config, mamba_config
from trt_kvcache import HybridCacheConfig, KVCacheConfig, KVLayerConfig, KVLayout, estimate_memory, largest_batch, longest_sequence
from trt_kvcache.errors import CapacityError, RangeError

GIB, INT32_MAX = 2**30, 2147483647
LLAMA_7B = kv_config([(32, 128)] * 32, max_batch_size=4, max_sequence_length=2048)
MIXED = kv_config([(2, 16), (1, 48)], max_batch_size=3, dtype="int8")
STATES = mamba_config(num_layers=3, max_batch_size=3, conv_kernel=4)
HYBRID = HybridCacheConfig(layer_types=[ATTENTION] * 2 + [MAMBA] * 3, kv=MIXED, mamba=STATES)
STATES_ALONE = HybridCacheConfig(layer_types=[MAMBA] * 3, mamba=STATES)
LINEAR = linear_config(num_attention_layers=5, num_mamba_layers=0, max_batch_size=3)


def test_llama_7b_takes_one_gib_a_sequence():
    estimate = estimate_memory(LLAMA_7B)
    assert estimate.bytes_per_sequence == 1_073_741_824 == GIB
    assert estimate.bytes_per_token == 524_288
    assert estimate.bytes_per_layer == (4 * 2 * 32 * 128 * 2048 * 2,) * 32
    assert (estimate.scales_nbytes, estimate.nbytes) == (0, 4 * GIB)
    assert longest_sequence(LLAMA_7B, 8 * GIB) == 4096
    assert largest_batch(LLAMA_7B, 8 * GIB) == 8
    assert largest_batch(LLAMA_7B, 8 * GIB - 1) == 7


def test_padding_and_scales_count_in_the_total_and_not_in_a_sequence():
    estimate = estimate_memory(MIXED)
    assert estimate.bytes_per_token == 2 * (2 * 16 + 1 * 48)
    assert estimate.bytes_per_sequence == 7 * estimate.bytes_per_token
    assert estimate.bytes_per_layer == (2 * 768, 2 * 1024)  # K of a layer: 672 and 1008 bytes
    assert estimate.scales_nbytes == 256
    assert estimate.nbytes == 1536 + 2048 + 256 == MIXED.nbytes


def test_states_and_a_linear_cache():
    # A slot of a layer: 30 floats and 28 halves, 176 bytes; a layer: 360 -> 512 and 168 -> 256 bytes.
    estimate = estimate_memory(STATES)
    assert (estimate.bytes_per_sequence, estimate.states_nbytes, estimate.nbytes) == (3 * 176, 3 * 768, 3 * 768)
    assert estimate_memory(replace(STATES, ping_pong=True)).nbytes == 2 * 3 * 768
    hybrid, kv = estimate_memory(HYBRID), estimate_memory(MIXED)
    assert hybrid.bytes_per_sequence == kv.bytes_per_sequence + 3 * 176
    assert (hybrid.states_nbytes, hybrid.nbytes) == (3 * 768, kv.nbytes + 3 * 768)
    assert estimate_memory(LINEAR).bytes_per_layer == (3072,) * 5


def test_the_inverses_of_states_by_hand():
    assert largest_batch(STATES, 3 * 768) == 4  # 4 * 120 = 480 bytes, 4 * 56 = 224 bytes
    assert largest_batch(STATES, 3 * (768 + 512)) == 6
    assert longest_sequence(STATES, 3 * 768) == longest_sequence(STATES_ALONE, 3 * 768) == INT32_MAX  # states do not grow
    assert longest_sequence(HYBRID, 3 * 768 + MIXED.nbytes) == longest_sequence(MIXED, MIXED.nbytes)
    assert largest_batch(HYBRID, 3 * 768 + MIXED.nbytes) == 3


COMMON = {"max_batch_size": st.integers(1, 9), "max_sequence_length": st.integers(1, 300), "layout": st.sampled_from(KVLayout)}
HEADS = {"num_kv_heads": st.integers(1, 8), "head_dim": st.sampled_from([16, 32, 80])}
LAYERS = st.lists(st.builds(KVLayerConfig, **HEADS), min_size=1, max_size=3)
CONFIGS = st.builds(KVCacheConfig, layers=LAYERS, dtype=st.sampled_from(["float16", "float32", "int8"]), **COMMON)
INVERSES = pytest.mark.parametrize(("inverse", "field"), [(longest_sequence, "max_sequence_length"), (largest_batch, "max_batch_size")])


@INVERSES
@given(config=CONFIGS, budget=st.one_of(st.integers(0, 1 << 14), st.integers(0, 1 << 40)))
def test_what_an_inverse_says_fits_and_one_more_does_not(inverse, field, config, budget):
    assert inverse(config, config.nbytes) >= getattr(config, field)
    if replace(config, **{field: 1}).nbytes > budget:
        with pytest.raises(CapacityError):
            inverse(config, budget)
        return
    most = inverse(config, budget)
    assert replace(config, **{field: most}).nbytes <= budget
    assert most == INT32_MAX or replace(config, **{field: most + 1}).nbytes > budget


def test_a_budget_below_zero():
    with pytest.raises(RangeError, match=r"^nbytes: expected at least 0, got -1\.$"):
        largest_batch(LINEAR, -1)


TOKEN = "do not hold one token for each of 3 slots. Lower max_batch_size."
SLOT = "do not hold one slot of 7 tokens. Lower max_sequence_length."


@pytest.mark.parametrize(
    ("inverse", "config", "nbytes", "text"),
    [
        (longest_sequence, LINEAR, 100, TOKEN),
        (longest_sequence, STATES, 3 * 768 - 1, TOKEN),
        (largest_batch, LINEAR, 0, SLOT),
        (largest_batch, STATES, 100, "do not hold the states of one slot."),
    ],
)
def test_a_budget_that_holds_nothing(inverse, config, nbytes, text):
    with pytest.raises(CapacityError) as caught:
        inverse(config, nbytes)
    assert str(caught.value) == f"{nbytes} bytes {text}"
