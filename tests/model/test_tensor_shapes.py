"""Names and shapes of the tensors of a model, written out for one layer."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.helpers.assertions import raises
from tests.helpers.models import SMALL, model_of, with_layers, with_mixer
from tests.paths import GOLDEN
from trt_kvcache.errors import ConfigError
from trt_kvcache.model import ModelConfig, NormConfig, QkNormConfig
from trt_kvcache.model.tensor_shapes import tensor_shapes

#: One layer: hidden 40, intermediate 28, 4 query heads over 2 K/V heads of 24, 37 tokens.
MODEL = ModelConfig.from_dict(SMALL)
LAYER = "model.layers.0."


def test_tensors_of_one_layer() -> None:
    assert tensor_shapes(MODEL) == {
        "model.embed_tokens.weight": (37, 40),
        f"{LAYER}input_layernorm.weight": (40,),
        f"{LAYER}self_attn.q_proj.weight": (96, 40),
        f"{LAYER}self_attn.k_proj.weight": (48, 40),
        f"{LAYER}self_attn.v_proj.weight": (48, 40),
        f"{LAYER}self_attn.o_proj.weight": (40, 96),
        f"{LAYER}mlp.gate_proj.weight": (28, 40),
        f"{LAYER}mlp.up_proj.weight": (28, 40),
        f"{LAYER}mlp.down_proj.weight": (40, 28),
        f"{LAYER}post_attention_layernorm.weight": (40,),
        "model.norm.weight": (40,),
        "lm_head.weight": (37, 40),
    }


def added(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the tensors that a model has more than the one above."""
    plain = tensor_shapes(MODEL)
    return {name: shape for name, shape in tensor_shapes(model).items() if name not in plain}


def test_biases_of_q_k_and_v() -> None:
    assert added(with_mixer(MODEL, qkv_bias=True)) == {
        f"{LAYER}self_attn.q_proj.bias": (96,),
        f"{LAYER}self_attn.k_proj.bias": (48,),
        f"{LAYER}self_attn.v_proj.bias": (48,),
    }


def test_bias_of_the_output_projection() -> None:
    assert added(with_mixer(MODEL, o_bias=True)) == {f"{LAYER}self_attn.o_proj.bias": (40,)}


def test_biases_of_the_mlp() -> None:
    layer = replace(MODEL.layers[0], mlp=replace(MODEL.layers[0].mlp, bias=True))
    assert added(replace(MODEL, layers=(layer,))) == {
        f"{LAYER}mlp.{name}_proj.bias": (size,) for name, size in (("gate", 28), ("up", 28), ("down", 40))
    }


def test_norms_of_q_and_k() -> None:
    norm = QkNormConfig(norm=NormConfig(epsilon=1e-5))
    assert added(with_mixer(MODEL, qk_norm=norm)) == {f"{LAYER}self_attn.{name}_norm.weight": (24,) for name in "qk"}


def test_biases_of_layer_norms() -> None:
    norm = NormConfig(epsilon=1e-5, centered=True, bias=True, rounds_before_weight=False)
    layer = replace(MODEL.layers[0], mlp_norm=norm)
    assert added(replace(MODEL, layers=(layer,), final_norm=norm)) == {
        f"{LAYER}post_attention_layernorm.bias": (40,),
        "model.norm.bias": (40,),
    }


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"centered": True}, "NormConfig.rounds_before_weight: expected False with centered, got True"),
        (
            {"centered": True, "rounds_before_weight": False, "weight_offset": 1.0},
            "NormConfig.weight_offset: expected 0 with centered, got 1",
        ),
        ({"bias": True}, "NormConfig.bias: expected False without centered, got True"),
    ],
)
def test_fields_of_layer_norm_that_contradict_each_other(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        NormConfig(epsilon=1e-5, **fields)


@pytest.mark.parametrize(
    ("changes", "expected", "got"),
    [
        ({"mlp": None, "mlp_norm": None}, "a mixer and an MLP", "one of them"),
        ({}, ("an input_norm", "no mlp_norm"), "other norms"),
        ({"input_norm": None, "mlp_norm": None}, ("an input_norm", "no mlp_norm"), "other norms"),
    ],
)
def test_parallel_layers_share_one_norm(changes: dict[str, Any], expected: Any, got: str) -> None:
    with raises(ConfigError, "LayerConfig.parallel", expected, got):
        replace(MODEL.layers[0], parallel=True, **changes)


def test_states_have_no_layer_norm() -> None:
    norm = NormConfig(epsilon=1e-5, centered=True, rounds_before_weight=False)
    for name, layer in (("mamba2", 0), ("qwen3_next", 0)):
        mixer = model_of(name).layers[layer].mixer
        with raises(ConfigError, f"{type(mixer).__name__}.norm.centered", "False", "True"):
            replace(mixer, norm=norm)


def test_norms_of_all_heads_come_before_rope() -> None:
    with raises(ConfigError, "QkNormConfig.after_rope", ("False", "over='full'"), "True"):
        QkNormConfig(norm=NormConfig(epsilon=1e-5), over="full", after_rope=True)


def test_a_tied_head_is_not_listed() -> None:
    assert "lm_head.weight" not in tensor_shapes(replace(MODEL, tie_word_embeddings=True))


def test_layers_come_in_order() -> None:
    names = list(tensor_shapes(with_layers(MODEL, 12)))
    layers = [int(name.split(".")[2]) for name in names if name.startswith("model.layers.")]
    assert layers == sorted(layers)
    assert set(layers) == set(range(12))


def test_shapes_do_not_depend_on_the_number_of_heads_that_a_damaged_config_has() -> None:
    """As many slices as heads would not fit into memory."""
    description = ModelConfig.from_dict(json.loads((GOLDEN / "qwen3_next" / "config.json").read_text(encoding="utf-8"))).to_description()
    delta = next(kind["mixer"] for kind in description["layer_kinds"] if "num_key_heads" in kind["mixer"])
    delta |= {"num_key_heads": 1 << 28, "num_value_heads": 1 << 29}
    shapes = tensor_shapes(ModelConfig.from_description(description))
    assert shapes["model.layers.0.linear_attn.in_proj_ba.weight"] == (1 << 30, 32)
