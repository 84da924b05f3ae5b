"""``MambaCacheConfig``: bytes of states, the stored form, and which fields it refuses."""

import dataclasses
import json

import pytest
from hypothesis import given, strategies as st

from tests.helpers.assertions import raises
from trt_kvcache import HostMemory, MambaCacheConfig, MambaCacheManager, estimate_memory
from trt_kvcache._util.short_repr import short_repr
from trt_kvcache.errors import ConfigError

FIELDS = {"num_layers": 2, "max_batch_size": 3, "num_heads": 2, "head_dim": 3, "state_size": 5, "conv_dim": 7, "conv_kernel": 4}
INT32_MAX = 2147483647
#: Bytes of the entry of one state in the array that kernels read: three words.
STATE_INFO = 24


def test_defaults():
    config = MambaCacheConfig(**FIELDS)
    assert (config.recurrent_dtype, config.conv_dtype, config.ping_pong) == ("float32", "float16", False)


def test_frozen():
    config = MambaCacheConfig(**FIELDS)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_layers = 3


def test_keyword_only():
    with pytest.raises(TypeError):
        MambaCacheConfig(*FIELDS.values())


def test_equal_by_value():
    config = MambaCacheConfig(**FIELDS)
    twin = MambaCacheConfig(**FIELDS)
    assert (twin, hash(twin)) == (config, hash(config))
    assert dataclasses.replace(config, head_dim=4) != config


def test_bytes_by_hand():
    # A layer: 3 * 30 * 4 = 360 -> 512 bytes of recurrent states, 3 * 28 * 2 = 168 -> 256 bytes of conv states.
    config = MambaCacheConfig(**FIELDS)
    assert (config.recurrent_storage.shape, config.recurrent_storage.layer_nbytes) == ((3, 2, 3, 5), 512)
    assert (config.conv_storage.shape, config.conv_storage.layer_nbytes) == ((3, 7, 4), 256)
    assert (config.num_buffers, config.slot_nbytes, config.nbytes) == (1, 2 * (120 + 56), 2 * (512 + 256))


def test_ping_pong_doubles_the_bytes():
    config = MambaCacheConfig(**FIELDS, ping_pong=True)
    assert (config.num_buffers, config.slot_nbytes, config.nbytes) == (2, 4 * (120 + 56), 4 * (512 + 256))


def test_each_kind_of_state_has_a_dtype_of_its_own():
    config = MambaCacheConfig(**FIELDS, recurrent_dtype="float16", conv_dtype="float32")
    assert (config.recurrent_storage.layer_nbytes, config.conv_storage.layer_nbytes) == (256, 512)


def test_layers_with_a_conv_state_only():
    config = MambaCacheConfig(num_layers=2, max_batch_size=3, conv_dim=7, conv_kernel=4, ping_pong=True)
    assert config.recurrent_storage is None
    assert (config.slot_nbytes, config.nbytes) == (4 * 56, 4 * 256)
    assert MambaCacheConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with MambaCacheManager(config, memory=HostMemory()) as cache:
        assert cache.memory.live_nbytes == config.nbytes + cache.lengths.nbytes + 4 * STATE_INFO


@pytest.mark.parametrize("name", ["num_heads", "head_dim", "state_size"])
def test_a_recurrent_state_has_all_its_sizes(name):
    with raises(ConfigError, f"MambaCacheConfig.{name}", expected=f"1 to {INT32_MAX}", got=0):
        MambaCacheConfig(**{**FIELDS, name: 0})


CONFIGS = st.builds(
    MambaCacheConfig,
    **{name: st.integers(1, 5) for name in FIELDS},
    recurrent_dtype=st.sampled_from(["float16", "bfloat16", "float32"]),
    conv_dtype=st.sampled_from(["float16", "bfloat16", "float32"]),
    ping_pong=st.booleans(),
)


@given(CONFIGS)
def test_bytes_are_what_a_manager_allocates(config):
    memory = HostMemory()
    with MambaCacheManager(config, memory=memory) as cache:
        infos = STATE_INFO * 2 * config.num_layers * config.num_buffers
        assert memory.live_nbytes == config.nbytes + cache.lengths.nbytes + infos
        assert cache.nbytes == config.nbytes == estimate_memory(config).nbytes
    assert memory.live_nbytes == 0


@given(CONFIGS)
def test_a_stored_config_is_read_back(config):
    assert MambaCacheConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_the_stored_form():
    stored = {**FIELDS, "recurrent_dtype": "float32", "conv_dtype": "float16", "ping_pong": False, "max_sequence_length": 2**31 - 1}
    assert MambaCacheConfig(**FIELDS).to_dict() == stored


def wrong_sizes(name, high):
    """Values that are no size, and what is said about them."""
    wrong = [(value, f"1 to {high}", value) for value in (0, -1, high + 1)]
    wrong += [(value, "integer", repr(value)) for value in (2.0, True, "2", None)]
    wrong += [(10**5000, f"1 to {high}", "too large to print")]
    return [(name, value, (f"MambaCacheConfig.{name}", expected, got)) for value, expected, got in wrong]


BAD = [
    *[bad for name in FIELDS for bad in wrong_sizes(name, {"max_batch_size": 65535, "num_layers": 10_000}.get(name, INT32_MAX))],
    *[
        (name, value, (f"MambaCacheConfig.{name}", "float16, bfloat16, float32", f"{value!r}"))
        for name in ("recurrent_dtype", "conv_dtype")
        for value in ("int8", "float8_e4m3fn", "", None)
    ],
    ("ping_pong", 1, ("MambaCacheConfig.ping_pong", "True or False", 1)),
]


@pytest.mark.parametrize(("name", "value", "parts"), BAD, ids=[f"{name}={short_repr(value)}" for name, value, _ in BAD])
def test_a_field_out_of_range(name, value, parts):
    with raises(ConfigError, *parts):
        MambaCacheConfig(**{**FIELDS, name: value})


STORED = MambaCacheConfig(**FIELDS).to_dict()
BAD_STORED = [
    ({key: value for key, value in STORED.items() if key != "conv_dim"}, "conv_dim"),
    ({**STORED, "groups": 2}, "groups"),
    ({**STORED, "head_dim": 0}, "MambaCacheConfig.head_dim: expected an integer from 1 to 2147483647, got 0."),
    (None, "MambaCacheConfig: the stored form has a missing or unknown field"),
]


@pytest.mark.parametrize(("data", "text"), BAD_STORED, ids=range(len(BAD_STORED)))
def test_a_stored_config_that_is_damaged(data, text):
    with pytest.raises(ConfigError) as caught:
        MambaCacheConfig.from_dict(data)
    assert text in str(caught.value)
