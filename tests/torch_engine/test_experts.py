"""Routers and experts of the torch engine: the choice as in the NumPy engine, and products by every variant."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoint.quantized.test_engines import EXPERTS, check_experts
from tests.helpers.assertions import assert_close
from tests.paths import GOLDEN
from tests.reference.rig import Rig, golden
from tests.reference.test_router import ROUTERS, inputs_of, router_of
from tests.torch_engine.needs_torch import need_torch

need_torch()

import torch  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from trt_kvcache import Checkpoint, InferenceSession  # noqa: E402
from trt_kvcache.model import MlpConfig, RouterConfig  # noqa: E402
from trt_kvcache.reference.router import route as route_in_numpy  # noqa: E402
from trt_kvcache.torch_engine.experts import MAX_FIXED_ROWS, FixedProducts, SortedProducts  # noqa: E402
from trt_kvcache.torch_engine.grouped_experts import GroupedProducts  # noqa: E402
from trt_kvcache.torch_engine.operations import Elementwise, Experts, Projections  # noqa: E402
from trt_kvcache.torch_engine.routed_mlp import RoutedMlp  # noqa: E402
from trt_kvcache.torch_engine.router import chosen as choose  # noqa: E402

HIDDEN, INNER = 16, 8

MLPS = {
    "gated": MlpConfig(intermediate_size=INNER),
    "biases": MlpConfig(intermediate_size=INNER, activation="gelu_tanh", bias=True),
    "ungated": MlpConfig(intermediate_size=INNER, activation="relu2", gated=False, bias=True),
}

every_mlp = pytest.mark.parametrize("config", MLPS.values(), ids=MLPS)


def experts_of(config: MlpConfig, count: int) -> Experts:
    random = torch.Generator().manual_seed(3)
    width = INNER * (2 if config.gated else 1)
    inputs, down = (torch.randn(shape, generator=random) for shape in ((count, width, HIDDEN), (count, HIDDEN, INNER)))
    biases: Any = (torch.randn((count, size), generator=random) for size in (width, HIDDEN)) if config.bias else (None, None)
    inputs_bias, down_bias = biases
    return Experts(config=config, inputs=inputs, inputs_bias=inputs_bias, down=down, down_bias=down_bias)


def products() -> tuple[SortedProducts, FixedProducts, GroupedProducts]:
    elementwise = Elementwise()
    by_loop = SortedProducts(Projections(elementwise))
    return by_loop, FixedProducts(by_loop, elementwise), GroupedProducts(no_products, elementwise)


def no_products(rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, experts: Experts) -> torch.Tensor:
    raise AssertionError("the grouped products take these experts")


def one_by_one(rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, experts: Experts) -> torch.Tensor:
    """Compute each row with each of its experts alone, and add them."""
    projections = Projections(Elementwise())
    outputs = []
    for row, of_row, factors in zip(rows, chosen.tolist(), weights, strict=True):
        sums = torch.zeros(experts.down.shape[1])
        for expert, factor in zip(of_row, factors, strict=True):
            inputs, down = experts.of(expert)
            sums += factor * projections.project(down, projections.activated(inputs, row[None], experts.config))[0]
        outputs.append(sums)
    return torch.stack(outputs)


def weights_of(chosen: torch.Tensor) -> torch.Tensor:
    return torch.rand(chosen.shape, generator=torch.Generator().manual_seed(len(chosen))) + 0.1


def choice(rows: int, experts: int, per_row: int) -> torch.Tensor:
    """Return experts of each row: few of them, so that rows share some and others are not chosen at all."""
    random = np.random.default_rng(rows)
    few = random.permutation(experts)[: per_row + 1]
    return torch.from_numpy(np.stack([random.permutation(few)[:per_row] for _ in range(rows)]))


@pytest.mark.parametrize("name", ROUTERS)
def test_the_router_chooses_as_in_numpy(name: str) -> None:
    router = router_of(name)
    logits, *optional = inputs_of(router)
    expected, expected_weights = route_in_numpy(router, logits, *optional)
    experts, weights = choose(router, torch.from_numpy(logits), *(None if one is None else torch.from_numpy(one) for one in optional))
    np.testing.assert_array_equal(experts.numpy(), expected)
    assert_close(weights.numpy(), expected_weights)


def test_the_first_of_equal_experts_is_chosen() -> None:
    experts, _ = choose(RouterConfig(num_experts=70, experts_per_token=4), torch.zeros((3, 70)), None)
    assert experts.tolist() == [[0, 1, 2, 3]] * 3


@every_mlp
@pytest.mark.parametrize(("rows", "count"), [(1, 30), (3, 30), (5, 7), (MAX_FIXED_ROWS, 9), (MAX_FIXED_ROWS + 1, 9)])
def test_all_variants_compute_the_chosen_experts(config: MlpConfig, rows: int, count: int) -> None:
    experts, chosen = experts_of(config, count), choice(rows, count, 2)
    x = torch.randn((rows, HIDDEN), generator=torch.Generator().manual_seed(rows))
    weights = weights_of(chosen)
    expected = one_by_one(x, chosen, weights, experts).numpy()
    for variant in products():
        assert_close(variant(x, chosen, weights, experts).numpy(), expected)


def test_rows_of_odd_sizes_are_not_grouped() -> None:
    given = torch.zeros((2, 6)), torch.tensor([[0], [1]]), torch.ones((2, 1))
    experts = Experts(config=MLPS["gated"], inputs=torch.zeros((3, 16, 6)), inputs_bias=None, down=torch.zeros((3, 6, 8)), down_bias=None)
    called = []
    grouped = GroupedProducts(lambda *given: called.append(given) or given[0], Elementwise())
    grouped(*given, experts)
    assert called == [(*given, experts)]


def test_experts_that_are_not_chosen_do_not_matter() -> None:
    experts, chosen = experts_of(MLPS["biases"], 20), torch.tensor([[4, 11], [11, 0]])
    x = torch.randn((2, HIDDEN), generator=torch.Generator().manual_seed(1))
    weights = weights_of(chosen)
    expected = [variant(x, chosen, weights, experts) for variant in products()]
    others = [expert for expert in range(20) if expert not in (0, 4, 11)]
    for weight in (experts.inputs, experts.down, experts.inputs_bias, experts.down_bias):
        assert weight is not None
        weight[others] = torch.nan
    for variant, before in zip(products(), expected, strict=True):
        assert torch.equal(variant(x, chosen, weights, experts), before)


@every_mlp
@pytest.mark.parametrize(("rows", "count"), [(1, 30), (5, 7), (MAX_FIXED_ROWS, 9)])
def test_few_rows_need_no_value_on_the_host(config: MlpConfig, rows: int, count: int) -> None:
    """Fake tensors have no values, as a captured graph has none when it is made: an operation that asks for one fails."""
    with FakeTensorMode(allow_non_fake_inputs=False):
        x, experts = torch.empty((rows, HIDDEN)), experts_of(config, count)
        router = RouterConfig(num_experts=count, experts_per_token=2, scores="sigmoid", renormalise=True)
        chosen, weights = choose(router, torch.empty((rows, count)), torch.empty(count))
        sorted_products, fixed_products, _ = products()
        assert fixed_products(x, chosen, weights, experts).shape == (rows, HIDDEN)
        with pytest.raises(RuntimeError):
            sorted_products(x, chosen, weights, experts)


def test_groups_need_no_value_on_the_host() -> None:
    with FakeTensorMode(allow_non_fake_inputs=False):
        router = RouterConfig(num_experts=12, experts_per_token=3, num_groups=4, groups_per_token=2)
        experts, _ = choose(router, torch.empty((5, 12)), None)
        assert experts.shape == (5, 3)


@pytest.mark.parametrize("options", [{"quantize": "int4"}, {"quantize": "int8", "kv_dtype": "int8"}], ids=["int4", "int8, K and V too"])
def test_rounded_experts_are_those_of_the_numpy_engine(options: dict[str, str]) -> None:
    ids = golden("qwen3_moe")[0].tolist()
    sizes = {"max_batch_size": 2, "max_sequence_length": 40, "max_prefill_length": 16, "dtype": "float32"}
    found = []
    for engine in ("numpy", "torch"):
        with InferenceSession.from_model(GOLDEN / "qwen3_moe", engine=engine, **sizes, **options) as session:  # type: ignore[arg-type]
            found.append(np.concatenate([session.prefill([ids[:15], ids[3:9]]), session.decode([4, 5])]))
    assert_close(found[1], found[0])


def test_a_router_is_not_rounded() -> None:
    with Checkpoint.open(GOLDEN / "qwen3_moe", quantize="int4") as checkpoint:
        layer = [name for name in checkpoint.tensor_names if name.startswith("model.layers.1.mlp.")]
        assert [name for name in layer if name not in checkpoint.quantized_names] == ["model.layers.1.mlp.gate.weight"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_choice_bias_stays_in_float32(dtype: str) -> None:
    """Published files have it in float32, next to weights in 16 bits."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Checkpoint.open(GOLDEN / "lfm2_moe") as checkpoint:
            name = "model.layers.2.feed_forward.expert_bias"
            stored = checkpoint.tensor(name)
            assert (stored.dtype, checkpoint.nbytes_of(name)) == (np.float32, 4 * stored.size)
            assert (stored.astype(np.float16) != stored).any(), "rounding it would show"
    router = next(block.part.router for block in Rig("lfm2_moe", dtype=dtype).engine._weights.blocks if isinstance(block.part, RoutedMlp))
    assert router.weight.dtype == torch.float32
    np.testing.assert_array_equal(router.choice_bias.numpy(), stored)


@pytest.mark.filterwarnings("ignore:(?s).*are not")
@pytest.mark.parametrize("case", EXPERTS)
def test_quantized_experts_have_the_values_of_their_format(tmp_path: Path, case: str) -> None:
    check_experts(tmp_path, case, "torch")
