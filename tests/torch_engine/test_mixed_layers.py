"""The torch engine beside the reference engine, with a model whose layers differ in everything that a layer can differ in."""

from __future__ import annotations

import inspect
import re
from functools import cache

import numpy as np
import pytest

from tests.helpers.assertions import assert_close
from tests.helpers.mixed_layers import RandomCheckpoint, mixed_model, without
from tests.torch_engine.needs_torch import need_torch

need_torch()

from trt_kvcache import HostMemory, InferenceSession, KVCacheManager, ReferenceEngine  # noqa: E402
from trt_kvcache.engine.decoder_cache import cache_config  # noqa: E402
from trt_kvcache.model.features import features  # noqa: E402
from trt_kvcache.torch_engine import TorchEngine, checkpoint_tensors, engine  # noqa: E402
from trt_kvcache.torch_engine.attention import MaskedAttention  # noqa: E402

MODEL = mixed_model(24, 16, 8, 32)
CHANGED = without(MODEL)

# As for one layer, times the layers and what a softcap of scores adds. Seen: 1e-6.
TOLERANCES = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 8e-2}

# Of a model that lacks one thing, from that which has it.
FAR = 1e-3


def logits(open_engine, model, *, dtype="float32", attention="native"):
    """Return the logits of a ragged prefill in chunks, of decode steps, and of a next turn after one slot was rewound."""
    kv = cache_config(model, max_batch_size=3, max_sequence_length=26, dtype=dtype, attention=attention)
    memory = HostMemory()
    opened = open_engine(RandomCheckpoint(model), kv=kv, max_prefill_length=6, attention=attention, memory=memory)
    ids = np.random.default_rng(3).integers(0, model.vocab_size, 26).tolist()
    with InferenceSession(opened, KVCacheManager(kv, memory=memory)) as session:
        found = [session.prefill([ids[:13], ids[5:7], ids[9:17]]), *(session.decode(ids[step : step + 3]) for step in range(4))]
        session.rewind(0, 9)
        return [*found, session.append([ids[3:11], ids[20:23], []])[:2], session.decode(ids[:3])]


@cache
def expected(dtype, attention):
    return logits(ReferenceEngine, MODEL, dtype=dtype, attention=attention)


def test_the_stand_in_has_what_the_engine_asks_a_checkpoint_for():
    """Some of it is asked for on a GPU only."""
    asked = re.findall(r"_checkpoint\.(\w+)", inspect.getsource(checkpoint_tensors))
    assert {"super_blocks", "unrounded", "offset_blocks"} <= {*asked} <= {*dir(RandomCheckpoint)}


def test_the_model_has_all_features_of_attention():
    """But two: weights that share a stored tensor or are reordered, which families have, as they have the other parts of layers."""
    others = {
        "experts",
        "branch_norms",
        "router_norm",
        "expert_scale",
        "shared_expert",
        "latent_experts",
        "fused_tensors",
        "interleaved_rope",
        "layer_norm",
        "no_mixer",
        "no_mlp",
        "short_conv",
        "mamba2",
        "no_scan_norm",
        "gate_after_norm",
        "parallel_mixers",
        "gated_delta_net",
        "output_gate",
        "sinks",
        "clamped_swiglu",
        "relu2",
        "ungated_mlp",
        "merged_input",
    }
    assert set(features(MODEL)) == engine.COMPUTED_FEATURES - others


@pytest.mark.parametrize("attention", ["native", "mask", "plugin"])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_agrees_with_the_reference_engine(dtype, attention):
    for found, wanted in zip(logits(TorchEngine.open, MODEL, dtype=dtype, attention=attention), expected(dtype, attention), strict=True):
        assert_close(found, wanted, TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_so_does_attention_under_a_mask(dtype, monkeypatch):
    monkeypatch.setattr(engine, "LiveRowsAttention", MaskedAttention)
    for found, wanted in zip(logits(TorchEngine.open, MODEL, dtype=dtype), expected(dtype, "native"), strict=True):
        assert_close(found, wanted, TOLERANCES[dtype])


@pytest.mark.parametrize("lacking", CHANGED)
def test_each_part_decides_logits(lacking):
    """What an engine leaves out is seen here."""
    found = logits(TorchEngine.open, CHANGED[lacking])
    apart = [np.abs(one - other).max() / np.abs(other).max() for one, other in zip(found, expected("float32", "native"), strict=True)]
    assert max(apart) > FAR
