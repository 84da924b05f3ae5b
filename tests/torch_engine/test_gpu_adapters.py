"""Several adapters in the torch engine on a GPU against the NumPy engine: captured steps, packed weights, states, a queue."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.adapters import write_two_adapters
from tests.helpers.gguf_files import write_q4_k_m
from tests.helpers.models import write_model
from tests.helpers.quantized_models import write_fp8, write_gptq
from tests.paths import GOLDEN
from tests.torch_engine.needs_torch import need_torch

need_torch()

from trt_kvcache import Checkpoint, InferenceSession  # noqa: E402

pytestmark = pytest.mark.gpu

NAMES = ("sql", None, "poems")
SIZES = {"max_batch_size": 3, "max_sequence_length": 60, "max_prefill_length": 48}
MODEL = {
    "hidden_size": 128,
    "head_dim": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
    "intermediate_size": 320,
    "torch_dtype": "bfloat16",
    "scale": 0.1,
}
TOLERANCES = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 0.12}


def adapters_of(folder, tmp_path):
    with Checkpoint.open(folder) as checkpoint:
        return write_two_adapters(tmp_path, checkpoint.config)


def rows_of(session, adapters):
    """Return the logits of a prefill of many rows, of decode steps, the last ones from a graph, and of a few rows."""
    random, vocab = np.random.default_rng(0), session.vocab_size
    found = [session.prefill([random.integers(0, vocab, size).tolist() for size in (50, 48, 45)], adapter=adapters)]
    found += [session.decode(random.integers(0, vocab, 3).tolist()) for _ in range(5)]
    found.append(session.append([[1, 2, 3], [4], [5, 6]]))
    return [row for rows in found for row in rows]


def assert_close(found, expected, dtype):
    for ours, theirs in zip(found, expected, strict=True):
        assert np.abs(ours - theirs).max() <= TOLERANCES[dtype] * np.abs(theirs).max()


def assert_as_the_reference_engine(folder, tmp_path, dtype, **options):
    """Compare steps with different adapters, with others, and without, whose graphs are not those of the first ones."""
    options = {**SIZES, "dtype": dtype, "adapters": adapters_of(folder, tmp_path), **options}
    with (
        InferenceSession.from_model(folder, engine="torch", **options) as ours,
        InferenceSession.from_model(folder, engine="reference", **options) as reference,
    ):
        assert ours.engine.memory.device == "cuda:0"
        for adapters in (NAMES, None, ("poems", "sql", "sql"), NAMES):
            assert_close(rows_of(ours, adapters), rows_of(reference, adapters), dtype)
        assert len(ours.engine._device.graphs) >= 2, ours.engine.graph_refusals
        assert not ours.engine.graph_refusals


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_weights_of_16_and_32_bits(tmp_path, dtype):
    assert_as_the_reference_engine(write_model(tmp_path / "model", **MODEL), tmp_path, dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("quantize", ["int8", "int4", "int4:128"])
def test_over_rounded_weights(tmp_path, dtype, quantize):
    assert_as_the_reference_engine(write_model(tmp_path / "model", **MODEL), tmp_path, dtype, quantize=quantize)


@pytest.mark.parametrize("one_order", [False, True])
def test_over_gptq_with_act_order(tmp_path, one_order):
    folder = write_gptq(tmp_path / "model", 32, one_order=one_order, **MODEL)
    assert_as_the_reference_engine(folder, tmp_path, "bfloat16")


@pytest.mark.filterwarnings("ignore:(?s).*activations are not quantized")
def test_over_fp8(tmp_path):
    assert_as_the_reference_engine(write_fp8(tmp_path / "model", (128, 128), **MODEL), tmp_path, "bfloat16")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_over_q4_k(tmp_path):
    write_q4_k_m(tmp_path / "model", max_position_embeddings=256)
    assert_as_the_reference_engine(tmp_path / "model", tmp_path, "bfloat16")


@pytest.mark.parametrize("name", ["qwen3-sharded", "gemma3", "phi3-long", "qwen3_next", "bamba", "falcon_h1", "lfm2", "gemma4-ple"])
def test_families_in_float32(tmp_path, name):
    assert_as_the_reference_engine(GOLDEN / name, tmp_path, "float32", max_prefill_length=9)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_slot_is_as_if_its_adapter_were_merged(tmp_path, dtype):
    folder = write_model(tmp_path / "model", **MODEL)
    adapters = adapters_of(folder, tmp_path)
    options = {**SIZES, "dtype": dtype, "engine": "torch"}
    with InferenceSession.from_model(folder, adapters=adapters, **options) as session:
        found = rows_of(session, NAMES)
    for slot, name in enumerate(NAMES):
        with InferenceSession.from_model(folder, adapter=None if name is None else adapters[name], **options) as merged:
            assert_close(found[slot::3], rows_of(merged, None)[slot::3], dtype)


@pytest.mark.parametrize("quantize", [None, "int4"])
def test_steps_without_adapters_are_those_of_the_base_model_bit_for_bit(tmp_path, quantize):
    folder = write_model(tmp_path / "model", **MODEL)
    options = {**SIZES, "dtype": "bfloat16", "engine": "torch", "quantize": quantize}
    with (
        InferenceSession.from_model(folder, adapters=adapters_of(folder, tmp_path), **options) as session,
        InferenceSession.from_model(folder, **options) as base,
    ):
        rows_of(session, NAMES)
        for _ in range(2):
            np.testing.assert_array_equal(rows_of(session, None), rows_of(base, None))


@pytest.mark.parametrize("draft", [None, "ngram"])
def test_a_queue_one_step_ahead(tmp_path, draft):
    """Requests of different adapters come and go, and are chosen on the device."""
    folder = write_model(tmp_path / "model", **MODEL)
    adapters = adapters_of(folder, tmp_path)
    prompts, names = [[5, 6, 7], [8, 9], [10], [11, 12, 13, 14], [5, 6], [15, 16]], ["poems", None, "sql", "sql", "poems", None]
    counts = [3, 12, 7, 9, 2, 8]
    options = {**SIZES, "dtype": "float32", "engine": "torch"}
    with InferenceSession.from_model(folder, adapters=adapters, draft=draft, prompt_cache_bytes=1 << 20, **options) as session:
        handles = [
            session.submit(prompt, adapter=name, max_new_tokens=count, ignore_eos=True)
            for prompt, name, count in zip(prompts, names, counts, strict=True)
        ]
        while session.step():
            pass
    for handle, prompt, name, count in zip(handles, prompts, names, counts, strict=True):
        with InferenceSession.from_model(folder, adapter=None if name is None else adapters[name], **options) as merged:
            expected = [token.token for token in merged.generate(prompt, max_new_tokens=count, ignore_eos=True)]
        assert list(handle.tokens) == expected
