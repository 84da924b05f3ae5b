"""Bytes of weights that a decode step reads, and the speed of a copy."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from safetensors.numpy import load_file

from tests.helpers.recording import kv_config
from tests.paths import GOLDEN, ROOT
from trt_kvcache import Checkpoint, HostMemory, InferenceSession, KVCacheManager
from trt_kvcache.benchmarking import MemoryLimit, copy_bytes_per_second, copy_speed, describe_environment
from trt_kvcache.benchmarking.memory_use import memory_use
from trt_kvcache.model import ModelConfig

SHIPPED = ROOT / "examples" / "tiny-llama"
MODEL = ModelConfig.from_dict(json.loads((SHIPPED / "config.json").read_text(encoding="utf-8")))


@pytest.fixture
def small_copies(monkeypatch):
    monkeypatch.setattr(copy_speed, "_HOST_NBYTES", 1 << 16)
    monkeypatch.setattr(copy_speed, "_last_level_cache", lambda: 0)


@pytest.mark.usefixtures("small_copies")
class TestWeights:
    def test_a_tied_embedding_is_read_as_the_head(self):
        limit = MemoryLimit.measured(MODEL, "float16", HostMemory())
        stored = sum(tensor.nbytes for tensor in load_file(SHIPPED / "model.safetensors").values())
        assert limit.weights_nbytes == limit.step_weights_nbytes == stored

    def test_an_embedding_of_its_own_is_not_read(self):
        limit = MemoryLimit.measured(replace(MODEL, tie_word_embeddings=False), "float32", HostMemory())
        assert limit.weights_nbytes - limit.step_weights_nbytes == MODEL.vocab_size * MODEL.hidden_size * 4

    def test_weights_of_experts_are_counted_apart(self):
        """The rounded ones, and those in the dtype of the engine, of 7 experts in 3 layers."""
        with Checkpoint.open(GOLDEN / "qwen3_moe", quantize="int8") as checkpoint:
            model, weights = checkpoint.config, checkpoint.weights
        plain, rounded = (MemoryLimit.measured(model, "float16", HostMemory(), given) for given in (None, weights))
        assert (plain.num_experts, plain.experts_per_token) == (rounded.num_experts, rounded.experts_per_token) == (7, 2)
        values, scales = 3 * 7 * 3 * 24 * 40, 3 * 7 * (2 * 24 + 40)
        assert (plain.experts_nbytes, rounded.experts_nbytes) == (2 * values, values + 2 * scales)
        assert plain.step_nbytes(1) == plain.step_weights_nbytes - 2 * values * 5 // 7


@pytest.mark.usefixtures("small_copies")
def test_a_copy_counts_bytes_read_and_written(monkeypatch):
    monkeypatch.setattr(copy_speed, "_fastest", lambda call: (call(), 0.5)[1])
    assert copy_bytes_per_second(HostMemory()) == 2 * (1 << 16) / 0.5


@pytest.mark.usefixtures("small_copies")
def test_a_copy_and_the_memory_in_use_in_any_memory(memory, monkeypatch):
    monkeypatch.setattr(copy_speed, "_DEVICE_NBYTES", 1 << 16)
    assert copy_bytes_per_second(memory) > 0
    held = memory.allocate(1 << 20, stream=memory.create_stream())
    used = memory_use(memory)
    assert used is None or (used.of == "process") == memory.is_host
    assert used is None or used.nbytes >= held.nbytes
    held.close()


def test_the_fastest_run_counts_and_the_first_does_not(monkeypatch):
    ticks = iter([0.0, 0.1, 1.0, 3.0, 4.0, 5.5, 6.0, 9.0, 10.0, 14.0, 20.0, 22.0])
    monkeypatch.setattr(copy_speed.time, "perf_counter", lambda: next(ticks))
    assert copy_speed._fastest(lambda: None) == 1.5


def test_runs_go_on_until_clocks_have_risen(monkeypatch):
    ticks = iter(tick for run in range(20) for tick in (run, run + (0.5 if run < 12 else 0.25)))
    monkeypatch.setattr(copy_speed.time, "perf_counter", lambda: next(ticks))
    assert copy_speed._fastest(lambda: None, at_least_seconds=7) == 0.25
    assert next(ticks) == 16  # 12 runs of 0.5 s and 4 of 0.25


def test_a_copy_is_larger_than_the_last_level_cache(monkeypatch):
    sizes = []
    ones = copy_speed.np.ones
    monkeypatch.setattr(copy_speed, "_last_level_cache", lambda: 1 << 20)
    monkeypatch.setattr(copy_speed, "_HOST_NBYTES", 1)
    monkeypatch.setattr(copy_speed.np, "ones", lambda nbytes, dtype: (sizes.append(nbytes), ones(nbytes, dtype))[1])
    assert copy_bytes_per_second(HostMemory()) > 0
    assert sizes == [4 << 20] * 2


def test_the_environment_of_any_memory_is_json(memory):
    class Session:
        """What is asked of a session."""

        engine = "an engine"

    with KVCacheManager(kv_config(), memory=memory) as cache:
        Session.cache, Session.cache_config = cache, cache.config
        found = json.loads(json.dumps(describe_environment(Session())))
    assert (found["device"], found["engine"], found["cache"]["max_batch_size"]) == (memory.device, "str", 3)
    assert (found["cuda_driver"] is None) == memory.is_host
    assert found["device_name"]


def test_the_environment_is_json_and_names_engine_device_and_cache():
    with InferenceSession.from_model(SHIPPED, engine="reference", max_batch_size=2, max_sequence_length=32) as session:
        found = json.loads(json.dumps(describe_environment(session)))
    assert (found["engine"], found["device"], found["driver"]) == ("ReferenceEngine", "cpu", None)
    assert found["device_name"]
    assert (found["cache"]["max_batch_size"], found["cache"]["max_sequence_length"], found["cache"]["dtype"]) == (2, 32, "float16")
    assert {"trt_kvcache", "numpy", "python"} <= set(found["versions"])
