"""``AdapterConfig``: which modules an adapter changes, with which rank and factor, and the fields that are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.helpers.adapters import FIELDS
from tests.helpers.assertions import raises
from trt_kvcache.checkpoint.adapters.adapter_config import AdapterConfig
from trt_kvcache.errors import ConfigError

Q = "model.layers.3.self_attn.q_proj"


def read(**fields: Any) -> AdapterConfig:
    given = {**FIELDS, "target_modules": ["q_proj"], **fields}
    return AdapterConfig.read({name: value for name, value in given.items() if value is not ...})


def test_the_factor_is_alpha_over_rank() -> None:
    assert read(r=4, lora_alpha=6).scale_of(Q) == 1.5
    assert read(r=4, lora_alpha=6, use_rslora=True).scale_of(Q) == 3.0
    assert read(r=4, lora_alpha=0.5).scale_of(Q) == 0.125


def test_patterns_have_ranks_and_alphas_of_their_own() -> None:
    config = read(
        r=4, lora_alpha=6, rank_pattern={"k_proj": 9, r"layers\.3\.self_attn\.q_proj": 2, "q_proj": 5}, alpha_pattern={"_proj": 8}
    )
    assert config.rank_of(Q) == 2
    assert config.rank_of("model.layers.13.self_attn.q_proj") == 5
    assert config.rank_of("model.layers.3.mlp.up_proj") == 4
    assert config.scale_of(Q) == 3.0  # a pattern matches whole parts of a name: not `_proj`
    ends = read(r=4, lora_alpha=6, use_rslora=True, rank_pattern={"q_proj": 9}, alpha_pattern={".*q_proj": 8})
    assert ends.scale_of(Q) == 8 / math.sqrt(9)


@pytest.mark.parametrize(
    ("fields", "others"),
    [
        ({"target_modules": ["q_proj"]}, ["model.layers.3.self_attn.xq_proj", "q_proj.x"]),
        ({"target_modules": ["self_attn.q_proj", "up_proj"]}, ["model.layers.3.cross.q_proj"]),
        ({"target_modules": r".*\.self_attn\.[qk]_proj"}, ["model.layers.3.self_attn.v_proj", f"{Q}.x"]),
        ({"target_modules": "all-linear", "exclude_modules": ["v_proj"]}, ["model.layers.3.self_attn.v_proj"]),
        ({"target_modules": "All-Linear", "exclude_modules": r".*\.4\..*"}, ["model.layers.4.self_attn.q_proj"]),
        ({"layers_to_transform": 3}, ["model.layers.13.self_attn.q_proj", "q_proj.q_proj"]),
        ({"layers_to_transform": [1, 3], "layers_pattern": "layers"}, ["model.layers.2.self_attn.q_proj", "model.h.3.self_attn.q_proj"]),
        ({"layers_to_transform": []}, ["model.layers.3.self_attn.k_proj"]),
    ],
)
def test_targets(fields: dict[str, Any], others: list[str]) -> None:
    config = read(**fields)
    assert config.targets(Q)
    assert not any(map(config.targets, others))


@pytest.mark.parametrize("init", [True, False, None, ..., "gaussian", "eva", "orthogonal"])
def test_initial_values_do_not_matter(init: Any) -> None:
    assert read(init_lora_weights=init) == read()


def test_what_training_needs_is_not_read() -> None:
    assert read(lora_dropout=0.5, eva_config={"rho": 2.0}, revision="main", qalora_group_size=8, a_field_of_later={}) == read()


@pytest.mark.parametrize(
    ("field", "value", "expected", "got"),
    [
        ("peft_type", "IA3", "LORA", "IA3"),
        ("peft_type", ..., "LORA", "None"),
        ("task_type", "SEQ_CLS", "CAUSAL_LM", "SEQ_CLS"),
        ("bias", "some", "lora_only", "some"),
        ("r", 0, "a positive integer", 0),
        ("r", ..., "a value", "none"),
        ("r", True, "a positive integer", "True"),
        ("r", 2.5, "a positive integer", 2.5),
        ("lora_alpha", None, "a value", "none"),
        ("lora_alpha", "8", "a finite number", "'8'"),
        ("use_rslora", 1, "true or false", 1),
        ("rank_pattern", ["q_proj"], "an object", "['q_proj']"),
        ("rank_pattern", {"(": 4}, "a regular expression", "'('"),
        ("alpha_pattern", {"(?i)q_proj": 4}, "a regular expression", "'(?i)q_proj'"),
        ("target_modules", None, "a list of names", "None"),
        ("target_modules", [], "a list of names", "[]"),
        ("target_modules", ["q_proj", 3], "a list of names", "3"),
        ("target_modules", "q_proj)", "a regular expression", "'q_proj)'"),
        ("exclude_modules", {"q_proj": 1}, "a list of names", "q_proj"),
        ("layers_to_transform", [-1], "a list of layers", "[-1]"),
        ("layers_to_transform", "3", "a list of layers", "'3'"),
        ("layers_pattern", "layers", "layers_to_transform", "layers"),
        ("init_lora_weights", "pissa", "gaussian", "pissa"),
        ("init_lora_weights", "pissa_niter_4", "gaussian", "pissa_niter_4"),
        ("init_lora_weights", "olora", "gaussian", "olora"),
        ("init_lora_weights", "loftq", "gaussian", "loftq"),
        ("init_lora_weights", 1, "gaussian", 1),
        ("use_dora", "yes", "true or false", "yes"),
        ("lora_bias", True, "not set", "True"),
        ("fan_in_fan_out", True, "not set", "True"),
        ("modules_to_save", "lm_head", "a list of names", "lm_head"),
        ("target_parameters", ["mlp.experts.gate_up_proj"], "not set", "mlp.experts.gate_up_proj"),
        ("trainable_token_indices", [3], "not set", "3"),
        ("layer_replication", [[0, 2]], "not set", "[[0, 2]]"),
        ("alora_invocation_tokens", [1], "not set", "1"),
        ("ensure_weight_tying", True, "not set", "True"),
        ("use_qalora", True, "not set", "True"),
        ("a_field_of_later", 3, "not set", 3),
    ],
)
def test_other_fields_are_refused(field: str, value: Any, expected: str, got: Any) -> None:
    with raises(ConfigError, field, expected, got):
        read(**{field: value})


def test_a_pattern_needs_a_number() -> None:
    with raises(ConfigError, "rank_pattern.q_proj", "a positive integer", 0):
        read(rank_pattern={"q_proj": 0})
    with raises(ConfigError, "alpha_pattern.q_proj", "a value", "none"):
        read(alpha_pattern={"q_proj": None})


def test_a_pattern_of_layers_must_fit_its_place() -> None:
    with raises(ConfigError, "layers_pattern", "a regular expression", "'(?P<layer>h)'"):
        read(layers_to_transform=[1], layers_pattern=["(?P<layer>h)"])


def test_layers_need_a_list_of_modules() -> None:
    with raises(ConfigError, "target_modules", "a list", "all-linear"):
        read(target_modules="all-linear", layers_to_transform=[1])
