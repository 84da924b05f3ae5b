"""Bytes of a cache before it is allocated, and the inverse questions."""

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from trt_kvcache import (
    CacheConfig,
    HybridCacheConfig,
    KVCacheConfig,
    KVLayerConfig,
    KVLayout,
    LayerType,
    MambaCacheConfig,
    estimate_memory,
    largest_batch,
    longest_sequence,
)
from trt_kvcache.errors import CapacityError, RangeError

GIB = 2**30

LLAMA_7B = KVCacheConfig(
    layers=[KVLayerConfig(num_kv_heads=32, head_dim=128)] * 32, max_batch_size=4, max_sequence_length=2048, dtype="float16"
)

MIXED = KVCacheConfig(
    layers=[KVLayerConfig(num_kv_heads=2, head_dim=16), KVLayerConfig(num_kv_heads=1, head_dim=48)],
    max_batch_size=3,
    max_sequence_length=7,
    dtype="int8",
)

MAMBA = MambaCacheConfig(
    num_layers=3, max_batch_size=3, num_heads=2, head_dim=3, state_size=5, conv_dim=7, conv_kernel=4, conv_dtype="float16"
)

HYBRID = HybridCacheConfig(layer_types=[LayerType.ATTENTION] * 2 + [LayerType.MAMBA] * 3, kv=MIXED, mamba=MAMBA)
LINEAR = CacheConfig(num_attention_layers=5, max_batch_size=3, max_sequence_length=7, num_kv_heads=2, head_dim=16, dtype="float16")


class TestLlama7B:
    def test_a_sequence_takes_one_gib(self):
        assert estimate_memory(LLAMA_7B).bytes_per_sequence == 1_073_741_824 == GIB

    def test_a_token_takes_half_a_mib(self):
        assert estimate_memory(LLAMA_7B).bytes_per_token == 524_288

    def test_four_slots_take_four_gib(self):
        estimate = estimate_memory(LLAMA_7B)
        assert estimate.bytes_per_layer == (4 * 2 * 32 * 128 * 2048 * 2,) * 32
        assert (estimate.scales_nbytes, estimate.nbytes) == (0, 4 * GIB)

    def test_eight_gib_hold_twice_the_tokens(self):
        assert longest_sequence(LLAMA_7B, 8 * GIB) == 4096

    def test_eight_gib_hold_twice_the_slots(self):
        assert largest_batch(LLAMA_7B, 8 * GIB) == 8
        assert largest_batch(LLAMA_7B, 8 * GIB - 1) == 7


def test_padding_and_scales_count_in_the_total_and_not_in_a_sequence():
    estimate = estimate_memory(MIXED)
    assert estimate.bytes_per_token == 2 * (2 * 16 + 1 * 48)
    assert estimate.bytes_per_sequence == 7 * estimate.bytes_per_token
    assert estimate.bytes_per_layer == (2 * 768, 2 * 1024)  # K of a layer: 672 and 1008 bytes
    assert estimate.scales_nbytes == 2 * 256  # of a layer: 16 and 8 bytes
    assert estimate.nbytes == 1536 + 2048 + 512 == MIXED.nbytes


def test_scales_by_token_count_in_a_sequence():
    config = replace(MIXED, scales="token")
    estimate = estimate_memory(config)
    assert estimate.bytes_per_token == 2 * (2 * (16 + 4) + 1 * (48 + 4))
    assert estimate.bytes_per_sequence == 7 * estimate.bytes_per_token
    assert estimate.bytes_per_layer == estimate_memory(MIXED).bytes_per_layer
    slots = config.max_batch_size
    padded = [-(-slots * heads * 8 * 4 // 256) * 256 for heads in (2, 1)]  # K of a layer: 8 tokens, as 7 is no multiple of 4
    assert estimate.scales_nbytes == 2 * sum(padded)
    assert estimate.nbytes == 1536 + 2048 + estimate.scales_nbytes == config.nbytes


def test_a_linear_cache():
    estimate = estimate_memory(LINEAR)
    assert estimate.bytes_per_layer == (3072,) * 5
    assert (estimate.bytes_per_token, estimate.bytes_per_sequence, estimate.nbytes) == (5 * 128, 5 * 128 * 7, 5 * 3072)


class TestStates:
    """A slot of a layer: 30 floats and 28 halves, 176 bytes; a layer: 360 -> 512 and 168 -> 256 bytes."""

    def test_alone(self):
        estimate = estimate_memory(MAMBA)
        assert (estimate.bytes_per_sequence, estimate.states_nbytes, estimate.nbytes) == (3 * 176, 3 * 768, 3 * 768)

    def test_do_not_grow_with_tokens(self):
        estimate = estimate_memory(MAMBA)
        assert (estimate.bytes_per_token, estimate.bytes_per_layer, estimate.scales_nbytes) == (0, (), 0)

    def test_in_two_buffers_take_twice_the_bytes(self):
        assert estimate_memory(replace(MAMBA, ping_pong=True)).nbytes == 2 * 3 * 768

    def test_beside_k_and_v_add_to_a_sequence(self):
        hybrid, kv = estimate_memory(HYBRID), estimate_memory(MIXED)
        assert hybrid.bytes_per_sequence == kv.bytes_per_sequence + 3 * 176
        assert (hybrid.states_nbytes, hybrid.nbytes) == (3 * 768, kv.nbytes + 3 * 768)

    def test_beside_k_and_v_leave_those_as_they_are(self):
        hybrid, kv = estimate_memory(HYBRID), estimate_memory(MIXED)
        assert (hybrid.bytes_per_token, hybrid.bytes_per_layer, hybrid.scales_nbytes) == (kv.bytes_per_token, kv.bytes_per_layer, 512)

    def test_of_a_linear_cache(self):
        states = {"mamba_num_heads": 2, "mamba_head_dim": 3, "ssm_state_size": 5, "conv_dim": 7, "conv_kernel": 4}
        estimate = estimate_memory(replace(LINEAR, num_mamba_layers=3, **states, ping_pong=True))
        assert (estimate.nbytes, estimate.states_nbytes) == (5 * 3072 + 6 * 768, 6 * 768)


#: The same states, described in both ways.
STATES_ALONE = pytest.mark.parametrize("config", [MAMBA, HybridCacheConfig(layer_types=[LayerType.MAMBA] * 3, mamba=MAMBA)])


class TestInversesOfStates:
    @STATES_ALONE
    @pytest.mark.parametrize(
        ("layer_nbytes", "slots"),
        [(768, 4), (768 + 256, 4), (768 + 512, 6)],  # 4 slots: 480 and 224 bytes; 5: 600 -> 768 and 280 -> 512
    )
    def test_slots(self, config, layer_nbytes, slots):
        assert largest_batch(config, 3 * layer_nbytes) == slots

    @STATES_ALONE
    def test_tokens_have_no_limit(self, config):
        assert longest_sequence(config, 3 * 768) == 2147483647

    @STATES_ALONE
    def test_less_than_the_states_of_all_slots(self, config):
        with pytest.raises(CapacityError) as caught:
            longest_sequence(config, 3 * 768 - 1)
        assert str(caught.value) == "2303 bytes do not hold one token for each of 3 slots. Lower max_batch_size."

    @STATES_ALONE
    def test_less_than_the_states_of_one_slot(self, config):
        with pytest.raises(CapacityError) as caught:
            largest_batch(config, 100)
        assert str(caught.value) == "100 bytes do not hold the states of one slot."

    def test_beside_k_and_v(self):
        budget = 3 * 768 + MIXED.nbytes
        assert longest_sequence(HYBRID, budget) == longest_sequence(MIXED, MIXED.nbytes)
        assert largest_batch(HYBRID, budget) == 3

    def test_less_than_one_slot_of_a_hybrid(self):
        with pytest.raises(CapacityError) as caught:
            largest_batch(HYBRID, 100)
        assert str(caught.value) == "100 bytes do not hold one slot of 7 tokens. Lower max_sequence_length."


# One int8 layer of one row of 16 bytes a token: 2 * align_up(B * 16 * S) + 256 bytes of scales.
SMALL = KVCacheConfig(layers=[KVLayerConfig(num_kv_heads=1, head_dim=16)], max_batch_size=2, max_sequence_length=4, dtype="int8")


@pytest.mark.parametrize(("nbytes", "tokens"), [(768, 8), (1279, 8), (1280, 16)])
def test_the_longest_sequence_by_hand(nbytes, tokens):
    assert longest_sequence(SMALL, nbytes) == tokens


@pytest.mark.parametrize(("nbytes", "slots"), [(768, 4), (1280, 8)])
def test_the_largest_batch_by_hand(nbytes, slots):
    assert largest_batch(SMALL, nbytes) == slots


CONFIGS = st.one_of(
    st.builds(
        KVCacheConfig,
        layers=st.lists(
            st.builds(KVLayerConfig, num_kv_heads=st.integers(1, 8), head_dim=st.sampled_from([16, 32, 80])), min_size=1, max_size=3
        ),
        max_batch_size=st.integers(1, 9),
        max_sequence_length=st.integers(1, 300),
        dtype=st.sampled_from(["float16", "float32", "int8"]),
        layout=st.sampled_from(KVLayout),
    ),
    st.builds(
        CacheConfig,
        num_attention_layers=st.integers(1, 40),
        max_batch_size=st.integers(1, 9),
        max_sequence_length=st.integers(1, 300),
        num_kv_heads=st.integers(1, 8),
        head_dim=st.sampled_from([16, 32, 80]),
        dtype=st.sampled_from(["bfloat16", "float8_e4m3fn"]),
        layout=st.sampled_from(KVLayout),
    ),
)

BUDGETS = st.one_of(st.integers(0, 1 << 14), st.integers(0, 1 << 40))


@given(CONFIGS, BUDGETS)
def test_the_longest_sequence_fits_and_one_token_more_does_not(config, budget):
    if replace(config, max_sequence_length=1).nbytes > budget:
        with pytest.raises(CapacityError):
            longest_sequence(config, budget)
        return
    length = longest_sequence(config, budget)
    assert replace(config, max_sequence_length=length).nbytes <= budget
    if length < 2**31 - 1:
        assert replace(config, max_sequence_length=length + 1).nbytes > budget


@given(CONFIGS, BUDGETS)
def test_the_largest_batch_fits_and_one_slot_more_does_not(config, budget):
    if replace(config, max_batch_size=1).nbytes > budget:
        with pytest.raises(CapacityError):
            largest_batch(config, budget)
        return
    batch = largest_batch(config, budget)
    assert replace(config, max_batch_size=batch).nbytes <= budget
    if batch < 65535:
        assert replace(config, max_batch_size=batch + 1).nbytes > budget


@given(CONFIGS)
def test_the_bytes_of_a_config_hold_at_least_that_config(config):
    assert longest_sequence(config, config.nbytes) >= config.max_sequence_length
    assert largest_batch(config, config.nbytes) >= config.max_batch_size


def test_a_budget_beyond_all_lengths_ends_at_int32():
    assert longest_sequence(LINEAR, 1 << 80) == 2147483647
    assert largest_batch(LINEAR, 1 << 80) == 65535


def test_a_budget_that_holds_not_one_token():
    with pytest.raises(CapacityError) as caught:
        longest_sequence(LINEAR, 100)
    assert str(caught.value) == "100 bytes do not hold one token for each of 3 slots. Lower max_batch_size."


def test_a_budget_that_holds_not_one_slot():
    with pytest.raises(CapacityError) as caught:
        largest_batch(LINEAR, 0)
    assert str(caught.value) == "0 bytes do not hold one slot of 7 tokens. Lower max_sequence_length."


@pytest.mark.parametrize("function", [longest_sequence, largest_batch])
@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(-1, "expected at least 0, got -1"), (1e9, "expected an integer, got 1000000000.0"), ("8GiB", "expected an integer, got '8GiB'")],
)
def test_a_budget_is_a_number_of_bytes(function, nbytes, text):
    with pytest.raises(RangeError) as caught:
        function(LINEAR, nbytes)
    assert str(caught.value) == f"nbytes: {text}."
