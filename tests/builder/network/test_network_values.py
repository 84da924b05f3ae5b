"""What the network computes, by an interpreter of its layers: against Hugging Face and against the reference engine, caches too."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.paths import GOLDEN
from tests.reference.rig import Rig, golden
from tests.sweeps import each_once, one_of_each_family
from trt_kvcache.cache.recurrent_states import StateKind
from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.engine.decoder_tensors import state_tensors
from trt_kvcache.engine.names import DEFAULT_NAMES
from trt_kvcache.model import AttentionConfig, rope_table

from .conftest import MAX_BATCH_SIZE, MAX_PREFILL_LENGTH, MAX_SEQUENCE_LENGTH, MODELS_AND_ATTENTIONS, Defined
from .interpreter import interpret, layer_kind

pytestmark = pytest.mark.trt

Array = np.ndarray[Any, Any]
Define = Callable[..., Defined]

#: New tokens of each slot, step by step: ragged prefill, decode, a chunk without slot 0, and decode of two slots.
STEPS = ((9, 5, 11), (1, 1, 1), (0, 8, 4), (1, 1))

#: Not the first one, and one that takes part in every step.
GOLDEN_SLOT = 1

#: Largest difference of a logit from Hugging Face in float32. Seen: 5e-6, 0.044 and 0.16.
GOLDEN_TOLERANCE = {"float32": 2e-4, "float16": 0.08, "bfloat16": 0.4}

#: From the reference engine. Seen: 9e-6, 0.022 and 0.22.
LOGITS_TOLERANCE = {"float32": 3e-5, "float16": 0.05, "bfloat16": 0.5}

#: The same for a number in the caches. Seen: 1.1e-5, 0.022 and 0.19.
ROWS_TOLERANCE = {"float32": 4e-5, "float16": 0.04, "bfloat16": 0.35}

LARGE = 1e4  # finite in every dtype


class Network:
    """A defined network with caches that stay from step to step, driven as :class:`Rig` is."""

    def __init__(self, defined):
        self.defined = defined
        cache = defined.definition.cache
        layers = cache.kv.layers if cache.kv else ()
        self._names = [pair for layer in range(len(layers)) for pair in DEFAULT_NAMES.cache_pairs(layer)]
        shapes = [(MAX_BATCH_SIZE, layer.num_kv_heads, MAX_SEQUENCE_LENGTH, layer.head_dim) for layer in layers]
        self._caches = [np.zeros(shape, numpy_dtype(cache.dtype)) for shape in shapes for _ in ("k", "v")]
        self._states = States(cache.mamba)

    def caches(self):
        """K, V of layer 0, K, V of layer 1, ...: ``[B, H, S, D]``."""
        return self._caches

    def states(self):
        """The current states of all layers: recurrent ones first."""
        return self._states.current

    def step(self, ids, start, last, new=None):
        """Run new tokens ``[A, s]`` at ``start`` ``[A]``; return the logits ``[A, vocab]``, or ``[A, m, vocab]`` of ``last`` ``[A, m]``."""
        slots = len(ids)
        feed = {
            "input_ids": ids.astype(np.int32),
            "kvcache_start_index": np.array(start, np.int32),
            "last_token_ids": np.array(last, np.int32).reshape(slots, -1),
            **{before: cache[:slots] for (before, _), cache in zip(self._names, self._caches, strict=True)},
            **self._states.feed(ids, new),
        }
        outputs = interpret(self.defined.tensorrt, self.defined.definition.network, self.defined.constants, feed)
        for (_, after), cache in zip(self._names, self._caches, strict=True):
            cache[:slots] = outputs[after]
        self._states.take(outputs, slots)
        return outputs["logits"]


class States:
    """The states of a model between the steps of a network, if it has any."""

    def __init__(self, mamba):
        pairs = (
            []
            if mamba is None
            else [pair for layer in range(mamba.num_layers) for pair in state_tensors(mamba, DEFAULT_NAMES, layer).items()]
        )
        pairs.sort(key=lambda pair: pair[0] is StateKind.CONV)
        self._names = [(past.name, present.name) for _, (past, present) in pairs]
        self.current = [np.zeros((MAX_BATCH_SIZE, *past.shape[1:]), numpy_dtype(past.dtype)) for _, (past, _) in pairs]

    def feed(self, ids, new):
        """Return the inputs of a step: states, and how many tokens are new, all if ``new`` is None."""
        if not self._names:
            return {}
        slots, width = ids.shape
        lengths = np.full(slots, width, np.int32) if new is None else np.array(new, np.int32)
        return {"new_lengths": lengths, **{past: one[:slots] for (past, _), one in zip(self._names, self.current, strict=True)}}

    def take(self, outputs, slots):
        """Keep the states after a step."""
        for (_, present), one in zip(self._names, self.current, strict=True):
            one[:slots] = outputs[present]


def runners(defined, model):
    sizes = {"batch": MAX_BATCH_SIZE, "length": MAX_SEQUENCE_LENGTH, "width": MAX_PREFILL_LENGTH}
    sizes["logits"] = defined.options.max_logits_per_slot
    return Network(defined), Rig(model, **sizes, dtype=defined.definition.cache.dtype, attention=defined.options.attention)


def tokens_of(model):
    """Return the tokens of every slot ``[B, 24]``, one of them golden, and padding, random and not 0."""
    ids, logits = golden(model)
    random = np.random.default_rng(1)
    tokens, padding = (random.integers(0, len(logits[5]), (MAX_BATCH_SIZE, n)) for n in (len(ids), MAX_PREFILL_LENGTH))
    tokens[GOLDEN_SLOT] = ids
    return tokens, padding


def run(runner, tokens, padding):
    """Run :data:`STEPS`; return the logits ``[A, vocab]`` of each step."""
    logits, lengths = [], np.zeros(MAX_BATCH_SIZE, int)
    for new in STEPS:
        slots = len(new)
        ids = padding[:slots, : max(new)].copy()
        for slot, count in enumerate(new):
            ids[slot, :count] = tokens[slot, lengths[slot] : lengths[slot] + count]
        logits.append(runner.step(ids, lengths[:slots].tolist(), [max(count - 1, 0) for count in new], new=new))
        lengths[:slots] += new
    return logits


def total(slot):
    """Tokens that a slot holds after :data:`STEPS`."""
    return sum(new[slot] for new in STEPS if slot < len(new))


def assert_near(actual, expected, tolerance):
    assert np.isfinite(expected.astype(np.float32)).all()
    expected = expected.astype(np.float32)
    np.testing.assert_allclose(actual.astype(np.float32), expected, rtol=0, atol=tolerance * max(1, np.abs(expected).max(initial=0)))


@pytest.mark.parametrize(
    ("model", "attention", "dtype"), each_once(one_of_each_family(MODELS_AND_ATTENTIONS), ("float32", "float16", "bfloat16"))
)
def test_computes_what_hugging_face_and_the_reference_engine_do(define, model, dtype, attention):
    network, reference = runners(define(model, dtype=dtype, attention=attention), model)
    logits = run(network, *tokens_of(model))
    lengths = np.cumsum([new[GOLDEN_SLOT] for new in STEPS])
    expected = np.array([golden(model)[1][length] for length in lengths])
    assert_near(np.array([step[GOLDEN_SLOT] for step in logits]), expected, GOLDEN_TOLERANCE[dtype])
    for step, expected, new in zip(logits, run(reference, *tokens_of(model)), STEPS, strict=True):
        assert step.dtype == np.float32
        computed = [slot for slot, count in enumerate(new) if count or not network.states()]  # with states padding may give anything
        assert_near(step[computed], expected[computed], LOGITS_TOLERANCE[dtype])
    for cache, expected in zip(network.caches(), reference.caches(), strict=True):  # the rows of padding tokens are in it
        slots = [slice(total(slot)) if network.states() else slice(None) for slot in range(MAX_BATCH_SIZE)]
        for slot, rows in enumerate(slots):
            assert_near(cache[slot, :, rows], expected[slot, :, rows], ROWS_TOLERANCE[dtype])
    for state, expected in zip(network.states(), reference.states(), strict=True):
        assert_near(state[: len(STEPS[-1])], expected[: len(STEPS[-1])], ROWS_TOLERANCE[dtype])  # the others are in the other buffer


@pytest.mark.parametrize(("model", "attention"), one_of_each_family(MODELS_AND_ATTENTIONS))
def test_reads_any_history_and_writes_up_to_the_last_row(define, model, attention):
    """The first slot ends at row S, the second one has no history."""
    network, reference = runners(define(model, attention=attention), model)
    random = np.random.default_rng(3)
    for ours, theirs in zip(network.caches(), reference.caches(), strict=True):
        ours[...] = theirs[...] = random.normal(size=ours.shape)
    before = [cache.copy() for cache in network.caches()]
    starts = [MAX_SEQUENCE_LENGTH - MAX_PREFILL_LENGTH, 0, 13]
    ids, last = tokens_of(model)[1], [10, 0, 6]
    assert_near(network.step(ids, starts, last), reference.step(ids, starts, last), LOGITS_TOLERANCE["float32"])
    written = (np.arange(MAX_SEQUENCE_LENGTH) - np.array(starts)[:, None]) // MAX_PREFILL_LENGTH == 0
    for cache, expected, old in zip(network.caches(), reference.caches(), before, strict=True):
        assert_near(cache, expected, ROWS_TOLERANCE["float32"])
        changed = (cache != old).any(axis=(1, 3))
        np.testing.assert_array_equal(changed, written)


@pytest.mark.parametrize(
    ("model", "attention", "dead"),
    [
        ("qwen3-sharded", "native", np.nan),
        ("qwen3-sharded", "native", np.inf),
        ("qwen3-sharded", "native", LARGE),
        ("qwen3-sharded", "mask", LARGE),
        ("qwen3-sharded", "mask", -LARGE),
        ("gemma2", "mask", LARGE),
        ("gemma2", "mask", -LARGE),
        ("gemma3", "mask", LARGE),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dead_rows_change_no_bit(define, dtype, model, attention, dead):
    defined = define(model, dtype=dtype, attention=attention)
    clean, poisoned = Network(defined), Network(defined)
    for cache in poisoned.caches():
        cache[...] = dead
    for step, expected in zip(run(poisoned, *tokens_of(model)), run(clean, *tokens_of(model)), strict=True):
        np.testing.assert_array_equal(step, expected)
    for after, expected in zip(poisoned.caches(), clean.caches(), strict=True):
        for slot in range(MAX_BATCH_SIZE):
            np.testing.assert_array_equal(after[slot, :, : total(slot)], expected[slot, :, : total(slot)])
        never = after[:, :, MAX_SEQUENCE_LENGTH - 1]  # no step comes so far
        assert never.tobytes() == np.full_like(never, dead).tobytes()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_norms_and_rotations_are_in_float32_and_queries_are_rounded_after_their_scale(define, dtype):
    defined = define("qwen3-sharded", dtype=dtype)
    tensorrt, network = defined.tensorrt, defined.definition.network
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    made_by = {layer.get_output(0).name: layer for layer in layers}
    kinds = {}
    for layer in layers:
        kinds.setdefault(layer_kind(tensorrt, layer), []).append(layer)
    for layer in (*kinds["REDUCE"], *kinds["UNARY"], *kinds["ROTARY_EMBEDDING"]):
        assert tensorrt.dtype_name(layer.get_input(0).dtype) == "float32", layer.name
    for layer in kinds["ATTENTION_INPUT"]:
        cast = made_by[layer.get_input(0).name]
        scale = made_by[cast.get_input(0).name]
        assert [layer_kind(tensorrt, each) for each in (cast, scale)] == ["CAST", "ELEMENTWISE"]
        assert [tensorrt.dtype_name(scale.get_input(side).dtype) for side in (0, 1)] == ["float32", "float32"]
        assert layer_kind(tensorrt, made_by[scale.get_input(0).name]) == "ROTARY_EMBEDDING"


def test_the_mask_variant_shows_nan_in_dead_rows(define: Define) -> None:
    """A weight of 0 times NaN is NaN: the interpreter reads what TensorRT may read."""
    network = Network(define("llama", attention="mask"))
    for cache in network.caches():
        cache[...] = np.nan
    assert np.isnan(run(network, *tokens_of("llama"))[0]).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("model", ["qwen3-sharded", "qwen2-tied"])
def test_first_rows_are_rounded_where_the_model_rounds(define: Define, model: str, dtype: str) -> None:
    """K and V of layer 0, written out with each rounding. What is rounded elsewhere differs in tens of percent of the numbers."""
    network = Network(define(model, dtype=dtype))
    ids = tokens_of(model)[1]
    starts = [0, 3, 6]
    network.step(ids, starts, [0, 0, 0])
    with Checkpoint.open(GOLDEN / model) as checkpoint:
        rows = first_rows(checkpoint, numpy_dtype(dtype), ids, np.array(starts))
    for cache, expected in zip(network.caches()[:2], rows, strict=True):
        actual = np.stack([cache[slot, :, start : start + MAX_PREFILL_LENGTH] for slot, start in enumerate(starts)])
        assert actual.dtype == expected.dtype
        assert np.mean(actual == expected) > 0.99  # not all: a sum in float32 may fall on the other side of a tie


def first_rows(checkpoint: Checkpoint, dtype: Any, ids: Array, starts: Array) -> tuple[Array, Array]:
    """Return what layer 0 writes for ``ids`` ``[B, s]``: K and V ``[B, H, s, D]``."""
    config, attention = checkpoint.config, "model.layers.0.self_attn"
    mixer = config.layers[0].mixer

    def weight(name: str) -> Array:
        return checkpoint.tensor(name).astype(dtype).astype(np.float64)

    def rounded(x: Array) -> Array:
        return x.astype(np.float32).astype(dtype).astype(np.float64)

    def norm(x: Array, name: str) -> Array:
        return rounded(rounded(x / np.sqrt(np.mean(x * x, -1, keepdims=True) + config.final_norm.epsilon)) * weight(f"{name}.weight"))

    def heads(side: str) -> Array:
        y = rounded(x @ weight(f"{attention}.{side}_proj.weight").T)
        if mixer.qkv_bias:
            y = rounded(y + weight(f"{attention}.{side}_proj.bias"))
        return y.reshape(*ids.shape, mixer.num_kv_heads, mixer.head_dim).swapaxes(1, 2)

    x = norm(weight("model.embed_tokens.weight")[ids], "model.layers.0.input_layernorm")
    k, v = heads("k"), heads("v")
    if mixer.qk_norm is not None:
        k = norm(k, f"{attention}.k_norm")
    k = rotated_keys(mixer, k, starts[:, None] + np.arange(ids.shape[1]))
    return k.astype(np.float32).astype(dtype), v.astype(dtype)


def rotated_keys(mixer: AttentionConfig, k: Array, positions: Array) -> Array:
    """Rotate as complex numbers ``k[d] + i k[d + D / 2]``. ``k`` is ``[B, H, s, D]``, ``positions`` ``[B, s]``."""
    cos, sin = rope_table(mixer.rope, mixer.head_dim, MAX_SEQUENCE_LENGTH)
    half = mixer.head_dim // 2
    rotated = (k[..., :half] + 1j * k[..., half:]) * (cos + 1j * sin)[positions][:, None]
    return np.concatenate((rotated.real, rotated.imag), -1)
