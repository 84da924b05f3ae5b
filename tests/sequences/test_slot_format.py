"""Which tensors a slot holds, how many bytes they take, and when two formats are the same."""

import pytest

from tests.helpers.assertions import raises
from tests.helpers.caches import HEADS, NO_RECURRENT_STATE, SEQUENCE_KINDS, kv_config, make_cache, mamba_config
from trt_kvcache import HostMemory, KVLayerConfig, KVLayout
from trt_kvcache.errors import ConfigError
from trt_kvcache.sequences.slot_copy import SlotCopy
from trt_kvcache.sequences.slot_format import SlotFormat

BOTH = SlotFormat(kv=kv_config(), mamba=mamba_config())


@pytest.mark.parametrize(
    ("kind", "attention", "recurrent"),
    [("manager", 3, 0), ("linear", 2, 2), ("hybrid", 3, 2), ("conv", 3, 2), ("states", 0, 2), ("scaled", 3, 0)],
    ids=SEQUENCE_KINDS,
)
def test_every_cache_says_which_layers_its_slots_hold(kind, attention, recurrent):
    with make_cache(kind, HostMemory()) as cache:
        found = SlotFormat.of(cache)
    assert [0 if part is None else part.num_layers for part in (found.kv, found.mamba)] == [attention, recurrent]
    assert (found.num_layers, found.has_states) == (attention + recurrent, bool(recurrent))


@pytest.mark.parametrize("name", ["cache", "SequenceCacheManager"])
def test_states_without_lengths_of_their_own_are_no_sequences(name):
    with (
        make_cache("mamba", HostMemory()) as cache,
        raises(ConfigError, name, expected="KVCacheManager, LinearKVCache or HybridCacheManager", got="MambaCacheManager"),
    ):
        SlotFormat.of(cache, name=name)


def test_tensors_are_k_and_v_of_each_layer_then_states():
    assert list(BOTH.tensors(4).items()) == [
        *((f"{name}_{index}", ((h, 4, d), "float16")) for index, (h, d) in enumerate(HEADS) for name in ("k_cache", "v_cache")),
        *((f"recurrent_state_{index}", ((1, 2, 3, 5), "float32")) for index in range(2)),
        *((f"conv_state_{index}", ((1, 7, 3), "float16")) for index in range(2)),
    ]


def test_scales_by_token_come_after_k_and_v():
    scaled = SlotFormat(kv=kv_config(dtype="int8", scales="token"), mamba=mamba_config())
    assert list(scaled.tensors(5).items())[6:13] == [
        *((f"{name}_{index}", ((h, 5), "float32")) for index, (h, _) in enumerate(HEADS) for name in ("k_scale", "v_scale")),
        ("recurrent_state_0", ((1, 2, 3, 5), "float32")),
    ]
    states = BOTH.live_nbytes(1) - 512
    assert scaled.live_nbytes(3) - states == 3 * 2 * (2 * 16 + 48 + 3 * 16 + 4 * 6)


def test_layers_without_a_recurrent_state_have_no_tensors_of_it():
    conv = SlotFormat(kv=None, mamba=mamba_config(**NO_RECURRENT_STATE))
    assert conv.tensors(4) == {f"conv_state_{index}": ((1, 7, 3), "float16") for index in range(2)}
    assert conv.difference(SlotFormat(kv=None, mamba=mamba_config())) == "num_heads of recurrent layers: expected 0, got 2"


@pytest.mark.parametrize("kind", ["hybrid", "scaled"])
def test_a_copy_takes_as_many_bytes_as_the_format_says(memory, stream, kind):
    with make_cache(kind, memory) as cache:
        cache.reset_for_new_sequences([5], stream=stream)
        before = memory.live_nbytes
        copy = SlotCopy.capture(cache, 0, 5, stream=stream)
        assert memory.live_nbytes - before == copy.slot_format.nbytes(5)


@pytest.mark.parametrize(("length", "nbytes"), [(0, 0), (1, 512 + 324), (3, 3 * 512 + 324)])
def test_an_empty_sequence_has_no_live_bytes(length, nbytes):
    assert BOTH.live_nbytes(length) == nbytes  # 2 * 2 * (2 * 16 + 48 + 3 * 16) per token; 2 * (30 * 4 + 21 * 2) of states


def test_sizes_and_layout_make_no_difference():
    other = SlotFormat(kv=kv_config(max_batch_size=2, max_sequence_length=64, layout=KVLayout.COMBINED), mamba=mamba_config(ping_pong=True))
    assert BOTH.difference(other) is None


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (SlotFormat(kv=None, mamba=mamba_config()), "attention layers: expected 3, got 0"),
        (SlotFormat(kv=kv_config(), mamba=None), "recurrent layers: expected 2, got 0"),
        (SlotFormat(kv=kv_config(dtype="bfloat16"), mamba=mamba_config()), "dtype of K and V: expected float16, got bfloat16"),
        (
            SlotFormat(kv=kv_config([(2, 16), (1, 48), (4, 16)]), mamba=mamba_config()),
            "num_kv_heads of attention layer 2: expected 3, got 4",
        ),
        (
            SlotFormat(kv=kv_config(), mamba=mamba_config(conv_dtype="float32")),
            "conv_dtype of recurrent layers: expected float16, got float32",
        ),
    ],
)
def test_what_differs_is_named(other, text):
    assert BOTH.difference(other) == text


@pytest.mark.parametrize(("dtype", "same"), [("float16", True), ("int8", False)])
def test_scales_count_only_where_the_dtype_has_them(dtype, same):
    one, two = (
        SlotFormat(kv=kv_config(layers=[KVLayerConfig(num_kv_heads=1, head_dim=16, k_scale=scale)], dtype=dtype), mamba=None)
        for scale in (1.0, 2.0)
    )
    assert (one.difference(two) is None) is same


def test_scales_by_token_are_not_static_ones():
    one, two = (SlotFormat(kv=kv_config(dtype="int8", scales=scales), mamba=None) for scales in ("tensor", "token"))
    assert one.difference(two) == "scales of K and V: expected static, got by token"
    assert two.difference(SlotFormat(kv=kv_config(dtype="int8", scales="head"), mamba=None)) == (
        "scales of K and V: expected by token, got static"
    )
    head = SlotFormat(kv=kv_config(dtype="int8", scales="head"), mamba=None)
    assert one.difference(head) is head.difference(one) is None  # each head has the scale of its layer


@pytest.mark.parametrize(
    "slot_format",
    [
        BOTH,
        SlotFormat(kv=kv_config(dtype="int8", scales="token"), mamba=None),
        SlotFormat(kv=kv_config(), mamba=None),
        SlotFormat(kv=None, mamba=mamba_config()),
        SlotFormat(kv=None, mamba=mamba_config(**NO_RECURRENT_STATE)),
    ],
)
def test_what_is_written_is_read_back(slot_format):
    assert SlotFormat.from_dict(slot_format.to_dict()) == slot_format
