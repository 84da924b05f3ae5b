"""``ExpertsOp``: router and experts of a layer over the bytes of its inputs, on the host, the emulated device and a GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.helpers.assertions import assert_close, raises
from tests.kernels.packed_arrays import FLOAT8, pack_rows, pack_tiles, pack_values
from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.errors import ConfigError, ShapeError
from trt_kvcache.kernels.nvfp4_scales import kernel_factors_of
from trt_kvcache.kernels.packed_layout import MIDDLES, NVFP4_GROUPS, ONE_GROUP, count_groups, count_tiles, groups_of
from trt_kvcache.model import ClampedSwiGLU, MlpConfig, RoutedMlpConfig, RouterConfig
from trt_kvcache.ops.custom_op import TensorType
from trt_kvcache.ops.expert_attributes import ExpertAttributes, why_not_in_kernels
from trt_kvcache.ops.experts_op import ExpertsOp
from trt_kvcache.ops.packed_format import KINDS, SCALE_DTYPES, PackedFormat
from trt_kvcache.ops.registry import create_operation
from trt_kvcache.reference.router import route

PLAIN = RoutedMlpConfig(router=RouterConfig(num_experts=7, experts_per_token=3, renormalise=True), expert=MlpConfig(intermediate_size=40))

#: Routers and experts of published families, in sizes that all differ.
CONFIGS = {
    "mixtral": PLAIN,
    "gpt-oss": RoutedMlpConfig(
        router=RouterConfig(num_experts=5, experts_per_token=2, bias=True),
        expert=MlpConfig(intermediate_size=24, activation=ClampedSwiGLU(alpha=1.7, limit=0.8), bias=True),
    ),
    "nemotron": RoutedMlpConfig(
        router=RouterConfig(num_experts=6, experts_per_token=4, scores="sigmoid", choice_bias=True, sum_epsilon=1e-20, factor=2.5),
        expert=MlpConfig(intermediate_size=56, activation="relu2", gated=False),
        latent_size=24,
    ),
    "groups": RoutedMlpConfig(
        router=RouterConfig(
            **{"num_experts": 8, "experts_per_token": 3, "scores": "sigmoid", "choice_bias": True, "renormalise": True},
            **{"num_groups": 4, "groups_per_token": 2},
        ),
        expert=MlpConfig(intermediate_size=32),
    ),
    "gemma 4": RoutedMlpConfig(
        router=RouterConfig(num_experts=5, experts_per_token=2, renormalise=True, expert_scale=True),
        expert=MlpConfig(intermediate_size=32, activation="gelu_tanh"),
    ),
}

#: Kind, group shift and dtype of scales; whether the outputs of a tile share their scales; whether there are zero points.
FORMATS = {
    "int4": PackedFormat(kind=1, group_shift=0, scales=0),
    "int4, zero points": PackedFormat(kind=1, group_shift=0, scales=2, zero_points=1),
    "int8": PackedFormat(kind=2, group_shift=ONE_GROUP, scales=0),
    "mxfp4": PackedFormat(kind=3, group_shift=0, scales=3),
    "nvfp4": PackedFormat(kind=3, group_shift=NVFP4_GROUPS, scales=4),
    "fp8": PackedFormat(kind=4, group_shift=ONE_GROUP, scales=2, shared_scales=1),
}

#: Slots and new tokens: one launch that is not full, and several with a rest.
STEPS = [(3, 1), (2, 11)]

HIDDEN = 48


def op_of(config: RoutedMlpConfig, packed: PackedFormat | None = None) -> ExpertsOp:
    attributes = ExpertAttributes.of(config).attributes()
    for prefix in () if packed is None else ("up", "down"):
        assert packed is not None
        attributes |= packed.attributes(prefix)
    return ExpertsOp(**attributes)


class Problem:
    """Random inputs of a layer, and the weights that they mean, in float32."""

    def __init__(self, config: RoutedMlpConfig, dtype: str, batch: int, tokens: int, packed: PackedFormat | None = None) -> None:
        self.config, self.op, self.packed = config, op_of(config, packed), packed
        self._random, self._dtype = np.random.default_rng(batch), numpy_dtype(dtype)
        experts, inner, width = config.router.num_experts, config.expert.intermediate_size, config.latent_size or HIDDEN
        self.inputs = {
            "router_rows": self._numbers((batch, tokens, HIDDEN)),
            "rows": self._numbers((batch, tokens, width)),
            "router": self._numbers((experts, HIDDEN), HIDDEN**-0.5).astype(np.float32),
        }
        for name, has in (("router_bias", config.router.bias), ("choice_bias", config.router.choice_bias)):
            self.inputs |= {name: self._numbers((experts,), 0.3).astype(np.float32)} if has else {}
        if config.router.expert_scale:
            self.inputs["expert_scale"] = self._numbers((experts,)).astype(np.float32)
        self.weights = {}
        for prefix, outputs, inputs in (("up", inner * (1 + config.expert.gated), width), ("down", width, inner)):
            self._add_matrices(prefix, (experts, outputs, inputs))
            if config.expert.bias:
                self.inputs[f"{prefix}_bias"] = self._numbers((experts, outputs), 0.3)

    def _numbers(self, shape: tuple[int, ...], scale: float = 1.0) -> np.ndarray[Any, Any]:
        return (self._random.standard_normal(shape) * scale).astype(self._dtype)

    def _add_matrices(self, prefix: str, shape: tuple[int, int, int]) -> None:
        experts, outputs, inputs = shape
        if self.packed is None:
            self.inputs[prefix] = self._numbers(shape, inputs**-0.5)
            self.weights[prefix] = self.inputs[prefix].astype(np.float32)
            return
        kind, shift, scales_dtype = self.packed.kind_name, self.packed.group_shift, self.packed.scales_dtype
        groups, size = count_groups(inputs, shift), inputs**-0.5
        low, high = {"int4": (0, 16), "int8": (-128, 128), "e2m1": (0, 16), "e4m3": (0, 448)}[kind]
        integer = np.int8 if kind == "int8" else np.uint8
        values = self._random.choice(FLOAT8, shape) if kind == "e4m3" else self._random.integers(low, high, shape).astype(integer)
        scales = self._random.uniform(0.2, 2, (experts, outputs, groups)) * size / high
        factors = self._random.uniform(0.002, 0.01, (experts, count_tiles(outputs))) * size
        if self.packed.has_factors:
            stored = self._random.choice(FLOAT8[np.abs(FLOAT8.astype(np.float32)) < 60], scales.shape)
            factors = np.stack([factors, np.zeros_like(factors)], axis=2).astype(np.float32)
            real = stored.astype(np.float32) * np.repeat(factors[:, :, :1], 16, axis=1)[:, :outputs]
            plain = values.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
        elif kind == "e2m1":
            stored = self._random.integers(121, 125, scales.shape).astype(np.uint8)
            real = np.exp2(stored.astype(np.float32) - 127)
            plain = values.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
        else:
            if self.packed.shared_scales:
                scales = np.repeat(scales[:, ::16], 16, axis=1)[:, :outputs]
            stored = scales.astype(numpy_dtype(scales_dtype))
            real, plain = stored.astype(np.float32), values.astype(np.float32)
        zeros = self._random.integers(low, high, scales.shape).astype(integer) if self.packed.zero_points else None
        group = groups_of(inputs, shift)
        middles = MIDDLES[kind] if zeros is None else zeros.astype(np.float32)[:, :, group]
        self.weights[prefix] = ((plain - middles) * real[:, :, group]).astype(self._dtype).astype(np.float32)
        pack_scales = pack_tiles if self.packed.shared_scales else pack_rows
        parts = {
            "values": [pack_values(one, kind) for one in values],
            "scales": [pack_scales(one, groups) for one in stored],
            "zero_points": [] if zeros is None else [pack_rows(one, groups) for one in zeros],
            "factors": self._factors(factors.reshape(-1, 2)) if self.packed.has_factors else [],
        }
        self.inputs |= {f"{prefix}_{name}": np.concatenate(one).reshape(-1).view(np.int32) for name, one in parts.items() if one}

    def _factors(self, exact: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        return [exact, kernel_factors_of(exact.tolist(), self._dtype.name)]

    def expected(self) -> np.ndarray[Any, Any]:
        """Return the output in float32, expert by expert, with the router of the reference engine."""
        wide = {name: one.astype(np.float32) for name, one in self.inputs.items()}
        shape = wide["rows"].shape
        router_rows, rows = wide["router_rows"].reshape(-1, HIDDEN), wide["rows"].reshape(-1, shape[2])
        logits = router_rows @ wide["router"].T + wide.get("router_bias", 0)
        chosen, factors = route(self.config.router, logits, wide.get("choice_bias"), wide.get("expert_scale"))
        out = np.zeros_like(rows)
        for (row, choice), expert in np.ndenumerate(chosen):
            inner = self.weights["up"][expert] @ rows[row] + (wide["up_bias"][expert] if "up_bias" in wide else 0)
            inner = self._activated(inner)
            out[row] += factors[row, choice] * (
                self.weights["down"][expert] @ inner + (wide["down_bias"][expert] if "down_bias" in wide else 0)
            )
        return out.reshape(shape)

    def _activated(self, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        expert = self.config.expert
        if not expert.gated:
            return np.maximum(x, 0) ** 2
        gate, up = np.split(x, 2)
        if isinstance(expert.activation, ClampedSwiGLU):
            limit = expert.activation.limit
            gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit) + 1
            return gate / (1 + np.exp(-expert.activation.alpha * gate)) * up
        if expert.activation == "silu":
            return gate / (1 + np.exp(-gate)) * up
        return 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up

    def run(self, memory: Any, stream: Any) -> np.ndarray[Any, Any]:
        """Run the operation in a memory, with no byte of workspace more than it asks for, none of them 0."""
        types = [TensorType(one.shape, one.dtype.name) for one in self.inputs.values()]
        (output,) = self.op.outputs(types)
        tensors = [memory.to_device(one, stream=stream) for one in self.inputs.values()]
        out = memory.to_device(np.full(output.shape, np.nan, numpy_dtype(output.dtype)), stream=stream)
        workspace = memory.to_device(np.full(self.op.workspace_nbytes(types), 0xFF, np.uint8), stream=stream)
        self.op.enqueue(tensors, [out], workspace, stream)
        return out.numpy().astype(np.float32)


@pytest.mark.parametrize("step", STEPS, ids=str)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_output_is_the_weighted_sum_of_the_chosen_experts(
    memory: Any, stream: Any, config: RoutedMlpConfig, step: tuple[int, int]
) -> None:
    problem = Problem(config, "float16", *step)
    assert_close(problem.run(memory, stream), problem.expected(), 4e-3)


@pytest.mark.parametrize("packed", FORMATS.values(), ids=FORMATS)
def test_packed_weights(memory: Any, stream: Any, packed: PackedFormat) -> None:
    """Outputs of whole tiles, which the kernels need for gate and up."""
    config = replace(PLAIN, expert=replace(PLAIN.expert, intermediate_size=32))
    problem = Problem(config, "bfloat16", 2, 11, packed)
    assert_close(problem.run(memory, stream), problem.expected(), 3e-2)


def test_an_enqueue_without_tokens_does_nothing(memory: Any, stream: Any) -> None:
    Problem(PLAIN, "float16", 0, 5).run(memory, stream)


def test_an_operation_is_created_again_from_its_attributes() -> None:
    for config in CONFIGS.values():
        op = op_of(config, FORMATS["fp8"])
        made = create_operation("experts", json.loads(json.dumps(op.attributes)))
        assert made.attributes == op.attributes
        assert made.input_types(48, 24, "float16") == op.input_types(48, 24, "float16")  # type: ignore[attr-defined]
    for name in ("nemotron", "groups"):
        assert ExpertAttributes.of(CONFIGS[name]).router == CONFIGS[name].router
    assert ExpertAttributes.of(CONFIGS["gpt-oss"]).expert == CONFIGS["gpt-oss"].expert


def test_attributes_without_groups_are_those_of_one_group() -> None:
    """Engine folders of earlier versions have no others."""
    attributes = ExpertAttributes.of(PLAIN).attributes()
    earlier = {name: value for name, value in attributes.items() if name not in ("num_groups", "groups_per_token")}
    assert len(attributes) - len(earlier) == 2
    assert create_operation("experts", earlier).attributes == attributes


def types_of(config: RoutedMlpConfig, **sizes: int) -> dict[str, TensorType]:
    return op_of(config).input_types(HIDDEN, config.latent_size or HIDDEN, "float16", **sizes)


def test_outputs_with_sizes_that_are_not_known_yet() -> None:
    found = op_of(CONFIGS["nemotron"]).outputs([*types_of(CONFIGS["nemotron"]).values()])
    assert found == (TensorType((-1, -1, 24), "float16"),)


def test_the_workspace_grows_with_the_rows_up_to_those_that_are_sorted_at_once() -> None:
    def nbytes(batch: int, tokens: int) -> int:
        return op_of(PLAIN).workspace_nbytes([*types_of(PLAIN, batch=batch, tokens=tokens).values()])

    def padded(*sizes: int) -> int:
        return sum(-(-size // 256) * 256 for size in sizes)

    def of_router(rows: int) -> int:
        return padded(rows * 7 * 4, rows * 3 * 4, rows * 3 * 4)

    def of_pairs(pairs: int) -> int:
        return padded(pairs * 40 * 2, pairs * 4, (pairs // 64 + 7) * 16, pairs * HIDDEN * 2)  # inner, order, row tiles, products

    assert nbytes(2, 4) == of_router(8) + padded(8 * 3 * 40 * 2)
    assert [nbytes(1, 64), nbytes(4, 64)] == [of_router(rows) + of_pairs(3 * rows) for rows in (64, 256)]
    assert nbytes(4, 1024) == of_router(4096) + of_pairs(3 * 2048)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("rows", TensorType((-1, -1, 40), "float16")),
        ("rows", TensorType((-1, 2, 48), "float16")),
        ("router", TensorType((7, 48), "float16")),
        ("up", TensorType((7, 40, 48), "float16")),
        ("down", TensorType((7, 48, 40), "bfloat16")),
    ],
    ids=str,
)
def test_inputs_that_do_not_fit_are_refused(name: str, wrong: TensorType) -> None:
    inputs = types_of(PLAIN) | {name: wrong}
    with raises(ShapeError, "experts", "(router_rows, rows, router, up, down)", f"{wrong.dtype}{list(wrong.shape)}"):
        op_of(PLAIN).outputs([*inputs.values()])
    with pytest.raises(ShapeError, match=r"^experts: "):
        op_of(PLAIN).outputs([*types_of(PLAIN).values()][:-1])
    with pytest.raises(ShapeError, match=r"^experts: expected rows \[B, s, hidden\]"):
        op_of(PLAIN).outputs([TensorType((7, 48), "float32")])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": 3}, "'rows', which is none of them"),
        ({"scores": 2}, "experts, scores"),
        ({"activation": 4}, "experts, activation"),
        ({"activation": 3, "alpha": 0.0, "limit": 1.0}, "alpha"),
        ({"experts_per_token": 8}, "experts_per_token"),
        ({"num_groups": 2}, "RouterConfig.num_groups"),
        ({"up_kind": 8, "up_group_shift": 0, "up_scales": 0}, "packed weights, kind"),
        ({"up_kind": 1, "up_group_shift": 0, "up_scales": 5}, "packed weights, scales"),
    ],
    ids=str,
)
def test_wrong_attributes_are_refused(changes: dict[str, int | float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ExpertsOp(**{**ExpertAttributes.of(PLAIN).attributes(), **changes})


def test_a_missing_attribute_is_named() -> None:
    with raises(ConfigError, "experts", "attributes", "no intermediate_size"):
        ExpertsOp(num_experts=4, experts_per_token=2)


def test_numbers_of_formats() -> None:
    """They are in plans: a kind or a dtype keeps its number."""
    assert KINDS == ("int4", "int8", "e2m1", "e4m3", "q4_k", "q5_k", "q6_k")
    assert SCALE_DTYPES == ("float16", "bfloat16", "float32", "uint8", "float8_e4m3fn")


def with_router(**fields: int) -> RoutedMlpConfig:
    return replace(PLAIN, router=RouterConfig(**fields))


@pytest.mark.parametrize(
    ("config", "hidden", "dtype", "expected"),
    [
        (PLAIN, 48, "float32", "dtype: expected float16 or bfloat16 for experts, got float32"),
        (with_router(num_experts=513, experts_per_token=2), 48, "float16", "num_experts: expected at most 512"),
        (with_router(num_experts=500, experts_per_token=257), 48, "float16", "experts_per_token: expected at most 256"),
        (replace(PLAIN, expert=MlpConfig(intermediate_size=40, gated=False)), 48, "float16", "expected relu2 or linear, got silu"),
        (replace(PLAIN, expert=MlpConfig(intermediate_size=36)), 48, "float16", "intermediate_size: expected a multiple of 8"),
        (PLAIN, 44, "float16", "hidden_size: expected a multiple of 8"),
        (replace(PLAIN, latent_size=20), 48, "float16", "latent_size: expected a multiple of 8"),
    ],
)
def test_configurations_that_the_kernels_do_not_compute(config: RoutedMlpConfig, hidden: int, dtype: str, expected: str) -> None:
    assert expected in (why_not_in_kernels(config, hidden, dtype) or "")
    assert all(why_not_in_kernels(one, 48, "bfloat16") is None for one in CONFIGS.values())
