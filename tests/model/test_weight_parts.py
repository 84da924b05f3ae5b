"""Where weights are stored: rows of tensors that hold more than one."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

from tests.helpers.models import SMALL, model_of, with_mixer
from tests.paths import GOLDEN
from trt_kvcache.checkpoint.decoder_weights import decoder_weights
from trt_kvcache.errors import ConfigError
from trt_kvcache.model import ModelConfig, NormConfig, QkNormConfig, RopeConfig
from trt_kvcache.model.tensor_shapes import tensor_shapes
from trt_kvcache.model.weight_parts import WeightPart, layer_parts, stacked_experts

#: 3 query heads over one K/V head of 32, 96 hidden elements, 52 inside the MLP.
PHI = ModelConfig.from_dict(json.loads((GOLDEN / "phi3-long" / "config.json").read_text(encoding="utf-8")))


def test_fused_weights_lie_under_each_other() -> None:
    parts = layer_parts(PHI, 1)
    qkv, gate_up = "model.layers.1.self_attn.qkv_proj.weight", "model.layers.1.mlp.gate_up_proj.weight"
    assert [parts[f"{name}.weight"] for name in ("q", "k", "v", "gate", "up")] == [
        WeightPart(tensor=qkv, shape=(96, 96), rows=(slice(0, 96),), tensor_rows=160),
        WeightPart(tensor=qkv, shape=(32, 96), rows=(slice(96, 128),), tensor_rows=160),
        WeightPart(tensor=qkv, shape=(32, 96), rows=(slice(128, 160),), tensor_rows=160),
        WeightPart(tensor=gate_up, shape=(52, 96), rows=(slice(0, 52),), tensor_rows=104),
        WeightPart(tensor=gate_up, shape=(52, 96), rows=(slice(52, 104),), tensor_rows=104),
    ]
    output = WeightPart(tensor="model.layers.1.self_attn.o_proj.weight", shape=(96, 96), rows=(slice(0, 96),), tensor_rows=96)
    assert (parts["o.weight"], output.is_whole, parts["q.weight"].is_whole) == (output, True, False)
    assert (tensor_shapes(PHI)[qkv], tensor_shapes(PHI)[gate_up]) == ((160, 96), (104, 96))


def test_weights_that_are_stored_head_by_head() -> None:
    """2 heads of keys of 8, each with 2 of values of 16, and 2 query heads of 32."""
    model = ModelConfig.from_dict(json.loads((GOLDEN / "qwen3_next" / "config.json").read_text(encoding="utf-8")))
    delta, attention = layer_parts(model, 0), layer_parts(model, 1)
    qkvz, ba = "model.layers.0.linear_attn.in_proj_qkvz.weight", "model.layers.0.linear_attn.in_proj_ba.weight"
    assert (tensor_shapes(model)[qkvz], tensor_shapes(model)[ba]) == ((160, 32), (8, 32))
    z = WeightPart(tensor=qkvz, shape=(64, 32), rows=(slice(48, 80), slice(128, 160)), tensor_rows=160)
    assert (delta["delta_z.weight"], delta["delta_a.weight"].index) == (z, [2, 3, 6, 7])
    q, k, v = ((slice(start, start + size), slice(start + 80, start + 80 + size)) for start, size in ((0, 8), (8, 8), (16, 32)))
    assert delta["delta_qkv.weight"].rows == (*q, *k, *v)
    assert attention["q.weight"].rows == (slice(0, 32), slice(64, 96))
    assert attention["output_gate.weight"].rows == (slice(32, 64), slice(96, 128))


def test_each_expert_has_tensors_of_its_own() -> None:
    model = model_of("mixtral-window")
    parts = layer_parts(model, 2)
    moe = "model.layers.2.block_sparse_moe"
    assert parts["router.weight"] == WeightPart(tensor=f"{moe}.gate.weight", shape=(4, 40), rows=(slice(0, 4),), tensor_rows=4)
    assert [role for role in parts if parts[role].tensor.startswith(f"{moe}.experts.3.")] == [
        f"expert_{name}.3.weight" for name in ("gate", "up", "down")
    ]
    down = WeightPart(tensor=f"{moe}.experts.3.w2.weight", shape=(40, 44), rows=(slice(0, 40),), tensor_rows=40)
    assert parts["expert_down.3.weight"] == down
    assert stacked_experts(model, 2, "block_sparse_moe.experts.gate_up_proj") == [
        {f"{moe}.experts.{expert}.{name}.weight": (44, 40) for name in ("w1", "w3")} for expert in range(4)
    ]
    assert stacked_experts(model_of("qwen3_moe-dense-window"), 0, "mlp.experts.down_proj") == []


#: 4 query heads over 2 K/V heads of 24, of which RoPE rotates all elements.
ERNIE = ModelConfig.from_dict(json.loads((GOLDEN / "ernie4_5" / "config.json").read_text(encoding="utf-8")))


def test_pairs_of_interleaved_rope_are_read_as_halves() -> None:
    k, v, q = (layer_parts(ERNIE, 1)[f"{name}.weight"] for name in ("k", "v", "q"))
    head = [*range(0, 24, 2), *range(1, 24, 2)]
    assert k.index == [*head, *(24 + row for row in head)]
    assert (k.selections, k.is_whole, k.shape) == ((k.index,), False, (48, 64))
    assert (v.index, v.selections, v.is_whole) == (slice(0, 48), (slice(0, 48),), True)
    assert sorted(q.index) == list(range(96))  # type: ignore[arg-type,type-var]


def test_only_rotated_rows_are_reordered() -> None:
    rope = RopeConfig(kind="default", theta=100.0, partial_rotary_factor=1 / 6)
    parts = [layer_parts(with_mixer(ERNIE, rope=rope, qkv_bias=bias), 0) for bias in (False, True)]
    assert parts[0]["k.weight"].index == [0, 2, 1, 3, *range(4, 24), 24, 26, 25, 27, *range(28, 48)]
    assert parts[1]["k.bias"].index == parts[1]["k.weight"].index
    assert layer_parts(with_mixer(ERNIE, rope=None), 0)["k.weight"].is_whole


def test_norms_of_interleaved_heads_are_reordered_too() -> None:
    """A norm of each head has the weights of one, a norm of all heads those of each."""
    rope = RopeConfig(kind="default", theta=100.0, partial_rotary_factor=1 / 6)
    for over, width in (("head", 24), ("full", 48)):
        norm = QkNormConfig(norm=NormConfig(epsilon=1e-5), over=over)
        found = layer_parts(with_mixer(ERNIE, rope=rope, qk_norm=norm), 0)["k_norm.weight"].index
        assert found == [first + row for first in range(0, width, 24) for row in (0, 2, 1, 3, *range(4, 24))]


def test_each_tensor_is_read_once_and_its_parts_are_views() -> None:
    read: Counter[str] = Counter()
    arrays = {name: np.arange(np.prod(shape)).reshape(shape) for name, shape in tensor_shapes(PHI).items()}

    def tensor(name: str) -> np.ndarray:
        read[name] += 1
        return arrays[name]

    weights = decoder_weights(PHI, tensor)
    assert read == dict.fromkeys(arrays, 1)
    v = weights.layers[1].v.weight
    assert v.base is not None
    np.testing.assert_array_equal(v, arrays["model.layers.1.self_attn.qkv_proj.weight"][128:])


def test_a_weight_that_the_family_has_no_name_for_is_refused() -> None:
    description = ModelConfig.from_dict(SMALL).to_description()
    description["layer_kinds"][0]["mlp_output_norm"] = {"epsilon": 1e-5}
    model = ModelConfig.from_description(description)
    assert model.layers[0].mlp_output_norm == NormConfig(epsilon=1e-5)
    with pytest.raises(ConfigError, match=r"^layers\[0\]: a llama model has no weight mlp_output_norm\.$"):
        tensor_shapes(model)
