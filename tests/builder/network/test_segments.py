"""Segments: what their networks declare, and what they compute, joined by the NumPy twins of the operations."""

import numpy as np
import pytest

from tests.builder.network.resolved import resolved
from tests.helpers.models import attentions_of, has_experts
from tests.reference.rig import golden
from tests.sweeps import each_once, one_of_each_family, some
from trt_kvcache.builder.definition import define_constants, define_segments
from trt_kvcache.builder.serialization import make_config, serialize
from trt_kvcache.checkpoint.safetensors_file import SafetensorsFile
from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.engine.names import DEFAULT_NAMES
from trt_kvcache.engine.protocol import TensorMode
from trt_kvcache.engine.quantized_kv import QuantizedKV
from trt_kvcache.engine_folder.decoder_segments import COS_SIN, EMBEDDING, decoder_constants, decoder_stages
from trt_kvcache.ops.custom_op import run_on_host
from trt_kvcache.ops.segments import Segment

from .conftest import MAX_BATCH_SIZE, MAX_SEQUENCE_LENGTH, MODELS, SIZES, declared, recording
from .interpreter import interpret
from .test_network_values import GOLDEN_SLOT, GOLDEN_TOLERANCE, STEPS, States, assert_near, run, runners, tokens_of

pytestmark = pytest.mark.trt


#: Experts are in one plan only.
WITHOUT_EXPERTS = [model for model in MODELS if not has_experts(model)]


class Segments:
    """The segments of a golden model, and combined caches; driven as ``test_network_values.Network`` is."""

    def __init__(self, rtx, folder, model, dtype, *, logits=1, quantized=None, max_embeddings=0):
        self.tensorrt = rtx
        with recording(rtx, model) as (checkpoint, self.arrays, messages):
            sizes = {**SIZES, "max_logits_per_slot": logits, "max_embeddings": max_embeddings}
            self.options = resolved(checkpoint.config, **sizes, dtype=dtype, attention="plugin")
            self.model, self.cache = checkpoint.config, self.options.cache_for(checkpoint.config, quantized)
            self.definitions = define_segments(checkpoint, self.options, self.cache, rtx, messages)
            constants = define_constants(checkpoint, self.cache, dtype=dtype)
        (folder / "constants").write_bytes(b"".join(constants))
        file = SafetensorsFile(folder / "constants")
        self.values = {spec.name: file.array(spec.name) for spec in decoder_constants(self.model, self.cache, dtype=dtype)}
        layers = self.cache.kv.layers if self.cache.kv else ()
        shapes = [(MAX_BATCH_SIZE, 2, layer.num_kv_heads, MAX_SEQUENCE_LENGTH, layer.head_dim) for layer in layers]
        self._states = States(self.cache.mamba)
        self.combined = [np.zeros(shape, numpy_dtype(self.cache.dtype)) for shape in shapes]
        self.scales = [np.full((*shape[:3], -(-shape[3] // 4) * 4), np.nan, np.float32) for shape in shapes] if quantized else []

    def caches(self):
        return [cache[:, side] for cache in self.combined for side in (0, 1)]

    def states(self):
        return self._states.current

    def step(self, ids, start, last, new=None):
        slots = len(ids)
        known = self.values | {
            "input_ids": ids.astype(np.int32),
            "kvcache_start_index": np.array(start, np.int32),
            "last_token_ids": np.array(last, np.int32).reshape(slots, -1),
        }
        pairs = [DEFAULT_NAMES.combined_pair(layer) for layer in range(len(self.combined))]
        known |= {before: cache[:slots] for (before, _), cache in zip(pairs, self.combined, strict=True)}
        scales = [DEFAULT_NAMES.scales_pair(layer) for layer in range(len(self.scales))]
        known |= {before: values[:slots] for (before, _), values in zip(scales, self.scales, strict=True)}
        known |= self._states.feed(ids, new)
        networks = iter(self.definitions)
        options = {"max_logits_per_slot": self.options.max_logits_per_slot, "dtype": self.options.dtype}
        for step in decoder_stages(self.model, self.cache, DEFAULT_NAMES, **options):
            if isinstance(step, Segment):
                feed = {spec.name: known[spec.name] for spec in step.tensors if spec.mode is TensorMode.INPUT}
                known |= interpret(self.tensorrt, next(networks).network, self.arrays, feed)
            else:
                known |= dict(zip(step.outputs, run_on_host(step.create_op(), *(known[name] for name in step.inputs)), strict=True))
        for (_, after), cache in zip(pairs, self.combined, strict=True):
            cache[:slots] = known[after]
        for (_, after), values in zip(scales, self.scales, strict=True):
            values[:slots] = known[after]
        self._states.take(known, slots)
        return known["logits"]


@pytest.mark.parametrize(("model", "dtype"), each_once(some(one_of_each_family(WITHOUT_EXPERTS), 8), ("float32", "float16")))
def test_segments_compute_the_logits_of_hugging_face_and_of_the_whole_network(rtx, define, tmp_path, model, dtype):
    segments = Segments(rtx, tmp_path, model, dtype)
    for cache in segments.combined:
        cache[...] = np.nan
    logits = run(segments, *tokens_of(model))
    lengths = np.cumsum([new[GOLDEN_SLOT] for new in STEPS])
    assert_near(np.array([step[GOLDEN_SLOT] for step in logits]), np.array([golden(model)[1][n] for n in lengths]), GOLDEN_TOLERANCE[dtype])
    whole = runners(define(model, dtype=dtype, attention=attentions_of(model, MAX_SEQUENCE_LENGTH)[0]), model)[0]
    for step, expected in zip(logits, run(whole, *tokens_of(model)), strict=True):
        assert_near(step, expected, {"float32": 1e-5, "float16": 0.03}[dtype])
    for cache, expected in zip(segments.caches(), whole.caches(), strict=True):
        live = np.isfinite(cache)
        assert live.sum() >= sum(new[GOLDEN_SLOT] for new in STEPS)
        assert_near(cache[live], expected[live], {"float32": 1e-5, "float16": 0.02}[dtype])
    for state, expected in zip(segments.states(), whole.states(), strict=True):
        assert_near(state, expected, {"float32": 1e-5, "float16": 0.02}[dtype])


#: Of logits, beside those of K and V in 32 bits.
QUANTIZED_TOLERANCE = {"float8_e4m3fn": 0.15, "int8": 0.04}


@pytest.mark.parametrize("kv_dtype", list(QUANTIZED_TOLERANCE))
@pytest.mark.parametrize("model", ["llama-linear", "gemma2-bias", "granitemoehybrid-bias", "qwen3_next", "nemotron_h", "lfm2"])
def test_segments_over_quantized_k_and_v(rtx, tmp_path, model, kv_dtype):
    segments = Segments(rtx, tmp_path, model, "float32", quantized=QuantizedKV(kv_dtype))
    for cache in segments.combined:
        cache[...] = np.nan if kv_dtype != "int8" else 127  # and all scales are NaN
    logits = run(segments, *tokens_of(model))
    lengths = np.cumsum([new[GOLDEN_SLOT] for new in STEPS])
    expected = np.array([golden(model)[1][n] for n in lengths])
    assert_near(np.array([step[GOLDEN_SLOT] for step in logits]), expected, QUANTIZED_TOLERANCE[kv_dtype])
    declared_by_segments = [spec.name for definition in segments.definitions for spec in definition.tensors]
    assert not [name for name in declared_by_segments if "kv_scales" in name or "key_values" in name]  # TensorRT sees none of them


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        ("llama-llama3-bias", "bfloat16"),
        ("qwen2-tied", "float16"),
        ("qwen3-sharded", "float32"),
        ("llama", "float16"),
        ("gemma2", "float16"),
        ("gemma3", "bfloat16"),
        ("granite", "bfloat16"),
        ("hunyuan", "float16"),
        ("cohere2", "bfloat16"),
        ("lfm2", "float16"),
        ("bamba", "bfloat16"),
        ("falcon_h1", "bfloat16"),
        ("falcon_h1-bias", "float16"),
        ("ministral3", "float16"),
        ("mistral", "bfloat16"),
        ("olmo2", "float16"),
        ("phi3-long", "float16"),
        ("smollm3", "bfloat16"),
    ],
)
def test_segments_build_with_the_tensors_that_are_declared(rtx, tmp_path, model, dtype):
    segments = Segments(rtx, tmp_path, model, dtype)
    for definition in segments.definitions:
        tensors = declared(rtx, definition.network)
        assert tensors == {spec.name: (spec.mode, spec.dtype, spec.shape) for spec in definition.tensors}
        with rtx.log.collect(ignore_missing_driver=True) as messages:
            config = make_config(definition, segments.options, rtx, messages)
            assert config.get_flag(rtx.module.BuilderFlag.REQUIRE_USER_ALLOCATION)  # so that it can be captured
            assert serialize(definition, config, segments.options, rtx, messages, lambda done: None).nbytes > 10_000
    assert (EMBEDDING in tensors, COS_SIN in tensors) == (segments.model.tie_word_embeddings, False)  # of the last one
