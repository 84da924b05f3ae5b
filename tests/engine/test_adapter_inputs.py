"""Inputs for adapters: their names and shapes, the ranks of each adapter in them, and adapters that do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.adapters import linear_shapes, write_adapter, write_two_adapters
from tests.helpers.assertions import raises
from tests.helpers.models import model_of
from trt_kvcache.checkpoint.adapters.adapter_set import AdapterSet, SideUpdate
from trt_kvcache.engine.adapter_inputs import NOBODY, AdapterInputs, spread_update
from trt_kvcache.errors import ConfigError, EngineError

LLAMA = model_of("llama")
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize("model", ["llama", "phi3-long", "bamba", "qwen3_next", "falcon_h1", "lfm2", "mamba2", "nemotron_h", "mixtral"])
def test_all_linear_layers_but_routers_and_experts(model: str) -> None:
    config = model_of(model)
    inputs = AdapterInputs.of(config, rank=3)
    names = {part.tensor.removesuffix(".weight") for layer in range(config.num_layers) for part in inputs.roles(config, layer).values()}
    assert names == set(linear_shapes(config))


def test_the_tensors_of_some_of_them() -> None:
    inputs = AdapterInputs.of(LLAMA, rank=5, modules=("down_proj", "k_proj"))
    assert inputs.modules == ("k_proj", "down_proj"), "in the order of the model"
    k, down = (linear_shapes(LLAMA)[f"model.layers.0.{module}_proj"] for module in ("self_attn.k", "mlp.down"))
    expected = [("slot_adapters", (4,), "int32"), ("rank_adapters", (5,), "int32")]
    for layer in range(LLAMA.num_layers):
        for role, (outputs, columns) in {"k": k, "down": down}.items():
            expected.append((f"lora_a_{role}_{layer}", (1, 5, columns), "bfloat16"))
            expected.append((f"lora_b_{role}_{layer}", (1, outputs, 5), "bfloat16"))
    tensors = inputs.tensors(LLAMA, slots=4, dtype="bfloat16")
    assert [(one.name, one.shape, one.dtype) for one in tensors] == expected
    assert inputs.nbytes(LLAMA, "bfloat16") == LLAMA.num_layers * 2 * 5 * (sum(k) + sum(down))


@pytest.mark.parametrize(("rank", "modules"), [(0, None), (2**31, None), (3, ("q_proj", "lm_head")), (3, ("q",))])
def test_a_rank_or_a_module_that_is_refused(rank: int, modules: Any) -> None:
    for error in (ConfigError, EngineError):
        if modules is None:
            with raises(error, "adapters_rank", expected=str(2**31 - 1), got=rank):
                AdapterInputs.of(LLAMA, rank=rank, error=error)
        else:
            with raises(error, "adapters_modules", expected=", ".join(ALL), got=repr(modules[-1])):
                AdapterInputs.of(LLAMA, rank=rank, modules=modules, error=error)


def test_each_adapter_has_its_highest_rank(tmp_path: Path) -> None:
    shapes = dict(list(linear_shapes(LLAMA).items())[:2])
    first, second = (module.rpartition(".")[2] for module in shapes)
    folders = write_two_adapters(tmp_path, LLAMA)
    write_adapter(tmp_path / "uneven", shapes, rank=2)
    adapters = AdapterSet.open(LLAMA, {**folders, "uneven": tmp_path / "uneven"})
    assert adapters.ranks == {"sql": 3, "poems": 5, "uneven": 2}
    assert set(adapters.changed("uneven")) == set(shapes)
    assert set(adapters.modules) == set(ALL)
    assert {first, second} <= set(AdapterSet.open(LLAMA, {"uneven": tmp_path / "uneven"}).modules)
    assert AdapterInputs.of(LLAMA, rank=12).owners(adapters) == (1, 1, 1, 2, 2, 2, 2, 2, 3, 3, NOBODY, NOBODY)
    with raises(ConfigError, "adapters", ("ranks of 9 in all", "adapters_rank"), ("3 + 5 + 2", "sql, poems, uneven")):
        AdapterInputs.of(LLAMA, rank=9).owners(adapters)


def test_ranks_lie_at_the_places_of_their_owners() -> None:
    random = np.random.default_rng(0)
    a, b = random.standard_normal((3, 4)).astype(np.float32), random.standard_normal((2, 3)).astype(np.float32)
    spread = spread_update(SideUpdate(a=a, b=b, owners=(1, 3, 3)), (2, 4), (1, 1, 2, 3, 3, 3, NOBODY))
    places = [0, 3, 4]
    np.testing.assert_array_equal(spread.a[places], a)
    np.testing.assert_array_equal(spread.b[:, places], b)
    assert np.count_nonzero(spread.a) == a.size
    assert np.count_nonzero(spread.b) == b.size
    nothing = spread_update(None, (2, 4), (1, NOBODY))
    assert (nothing.a.shape, nothing.b.shape) == ((2, 4), (2, 2))
    assert not nothing.a.any()
    assert not nothing.b.any()
