"""Steps of every width as CUDA graphs on a GPU: against the NumPy engine, against eager steps, in any order, within the budget."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.mixed_layers import RandomCheckpoint
from tests.helpers.models import HYBRIDS, hybrid_model, write_model
from tests.torch_engine.needs_torch import need_torch

need_torch()

from tests.torch_engine.test_captured_steps import WIDTH, S, turns  # noqa: E402
from tests.torch_engine.test_gpu import SHAPES, TOLERANCES  # noqa: E402
from trt_kvcache import CudaMemory, HybridCacheManager, InferenceSession  # noqa: E402
from trt_kvcache.engine.decoder_cache import decoder_cache_config  # noqa: E402
from trt_kvcache.torch_engine import TorchEngine, device  # noqa: E402

pytestmark = pytest.mark.gpu

SIZES = {"max_batch_size": 3, "max_sequence_length": S, "max_prefill_length": WIDTH}
IDS = [token * 7 % 31 + 1 for token in range(24)]
KV = {None: TOLERANCES["bfloat16"], "fp8": 0.3, "int8": 0.12}


def small_model(folder, head_dim=64):
    heads, kv_heads = SHAPES[head_dim]
    changes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim, "num_hidden_layers": 2}
    return write_model(folder / "model", **changes, torch_dtype="bfloat16")


@pytest.fixture
def eager(monkeypatch):
    """A function after which steps are eager."""
    run = device.CudaDevice.run
    return lambda: monkeypatch.setattr(device.CudaDevice, "run", lambda self, key, stream, work: run(self, None, stream, work))


@pytest.mark.parametrize("kind", KV)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_logits_are_those_of_the_reference_engine(head_dim, kind, tmp_path):
    folder = small_model(tmp_path, head_dim)
    options = {**SIZES, "dtype": "bfloat16", **({} if kind is None else {"kv_dtype": kind})}
    with (
        InferenceSession.from_model(folder, engine="torch", **options) as ours,
        InferenceSession.from_model(folder, engine="reference", **options) as reference,
    ):
        for found, expected in zip(turns(ours, IDS), turns(reference, IDS), strict=True):
            assert np.nanmax(np.abs(found - expected)) <= KV[kind] * np.nanmax(np.abs(expected))
        graphs = ours.engine._device.graphs
        assert len(graphs) > 5
        assert 0 < graphs.nbytes <= graphs.max_nbytes
        assert ours.engine.graph_refusals == ()


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_replayed_step_of_layers_with_states_is_an_eager_one(name, eager):
    def opened():
        checkpoint, memory = RandomCheckpoint(hybrid_model(name)), CudaMemory()
        config = decoder_cache_config(checkpoint.config, max_batch_size=3, max_sequence_length=S, dtype="bfloat16")
        engine = TorchEngine.open(checkpoint, kv=config, max_prefill_length=WIDTH, max_logits_per_slot=WIDTH, memory=memory)
        return InferenceSession(engine, HybridCacheManager(config, memory=memory))

    with opened() as replayed:
        found = list(turns(replayed, IDS))
        assert len(replayed.engine._device.graphs) > 5
    eager()
    with opened() as one:
        for logits, expected in zip(found, turns(one, IDS), strict=True):
            assert np.nanmax(np.abs(logits - expected)) <= TOLERANCES["bfloat16"] / 10 * np.nanmax(np.abs(expected))


def in_any_order(session):
    """Return the logits of prompts of 1 to 3 slots in a random order of widths."""
    random = np.random.default_rng(5)
    return [
        session.prefill([random.integers(1, 31, random.integers(1, WIDTH + 1)).tolist() for _ in range(random.integers(1, 4))])
        for _ in range(150)
    ]


def test_graphs_that_share_memory_replay_in_any_order(tmp_path, eager):
    folder = small_model(tmp_path)
    with InferenceSession.from_model(folder, engine="torch", **SIZES, dtype="bfloat16") as replayed:
        found = in_any_order(replayed)
        assert len(replayed.engine._device.graphs) > 10
    eager()
    with InferenceSession.from_model(folder, engine="torch", **SIZES, dtype="bfloat16") as one:
        for logits, expected in zip(found, in_any_order(one), strict=True):
            assert np.abs(logits - expected).max() <= TOLERANCES["bfloat16"] / 10 * np.abs(expected).max()


def test_a_small_budget_holds(tmp_path):
    with InferenceSession.from_model(small_model(tmp_path), engine="torch", **SIZES, dtype="bfloat16") as session:
        graphs = session.engine._device.graphs
        session.prefill([IDS[:5]])
        session.prefill([IDS[:5]])
        graphs.max_nbytes = graphs.nbytes
        expected = in_any_order(session)
        assert graphs.nbytes <= graphs.max_nbytes or len(graphs) == 1
        for logits, again in zip(in_any_order(session), expected, strict=True):
            assert np.abs(logits - again).max() <= TOLERANCES["bfloat16"] / 10 * np.abs(again).max()
