"""Networks of models with per-layer embeddings, in each variant of attention: a golden model, and one in which few layers have inputs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.helpers.mixed_layers import mixed_model
from tests.reference import rig
from tests.trt.plugin.on_host import run_plugins_on_host
from trt_kvcache.builder.network import embedding_table
from trt_kvcache.checkpoint.quantized.rounding import rounded_to_nearest
from trt_kvcache.checkpoint.quantized.weight import QuantizedWeight
from trt_kvcache.model import ModelConfig
from trt_kvcache.model.tensor_shapes import PER_LAYER_EMBEDDING, PER_LAYER_PROJECTION
from trt_kvcache.ops import attention_attributes
from trt_kvcache.trt.module import TensorRT

from . import conftest
from .conftest import Defined
from .plugin_networks import define_with_plugin_layers
from .test_layers_of_different_sizes import Stored, tokens
from .test_network_values import GOLDEN_TOLERANCE, LOGITS_TOLERANCE, Network, assert_near, run, runners, tokens_of
from .test_one_plan import OnePlan, golden_logits, of_golden_slot
from .test_segments import Segments

pytestmark = pytest.mark.trt

Define = Callable[..., Defined]
GOLDEN_MODEL, MIXED = "gemma4-ple", "mixed"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_network_computes_the_logits_of_hugging_face(define: Define, dtype: str) -> None:
    logits = run(Network(define(GOLDEN_MODEL, dtype=dtype, attention="mask")), *tokens_of(GOLDEN_MODEL))
    assert_near(of_golden_slot(logits), golden_logits(GOLDEN_MODEL), GOLDEN_TOLERANCE[dtype])


def test_segments_compute_the_logits_of_hugging_face(rtx: TensorRT, tmp_path: Path) -> None:
    logits = run(Segments(rtx, tmp_path, GOLDEN_MODEL, "float32"), *tokens_of(GOLDEN_MODEL))
    assert_near(of_golden_slot(logits), golden_logits(GOLDEN_MODEL), GOLDEN_TOLERANCE["float32"])


def test_one_plan_computes_the_logits_of_hugging_face(rtx: TensorRT, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its table is in three constants."""
    run_plugins_on_host(monkeypatch)
    monkeypatch.setattr(attention_attributes, "HEAD_DIMS", range(4, 257, 4))
    monkeypatch.setattr(attention_attributes, "_ROTARY_DIM_STEP", 2)
    monkeypatch.setattr(embedding_table, "MAX_ELEMENTS", 83 * 6 * 12 // 2)
    network = define_with_plugin_layers(rtx, GOLDEN_MODEL)
    parts = [array for name, array in network.constants.items() if name.startswith("model.embed_tokens_per_layer/")]
    assert [array.shape for array in parts if array.ndim == 2 and array.size > 1] == [(41, 72), (41, 72), (1, 72)]
    assert_near(of_golden_slot(run(OnePlan(network), *tokens_of(GOLDEN_MODEL))), golden_logits(GOLDEN_MODEL), GOLDEN_TOLERANCE["float16"])


class Packed(Stored):
    """A checkpoint of random weights, of which those of per-layer embeddings that all layers share are quantized."""

    def __init__(self, model: ModelConfig, scheme: str | None) -> None:
        super().__init__(model)
        self._scheme = scheme

    def quantized_weight(self, name: str) -> QuantizedWeight | None:
        if self._scheme is None or name not in (PER_LAYER_EMBEDDING, PER_LAYER_PROJECTION):
            return None
        return rounded_to_nearest(self._arrays[name], self._scheme, "float32")

    def tensor(self, name: str) -> np.ndarray[Any, Any]:
        packed = self.quantized_weight(name)
        return self._arrays[name] if packed is None else packed.dequantized()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], ModelConfig]:
    """Return ``store(scheme)``: open the mixed model, with weights quantized by a scheme, instead of any checkpoint."""

    def put(scheme: str | None) -> ModelConfig:
        stored = Packed(mixed_model(24, 16, 32, 40), scheme)
        for module in (conftest, rig):
            monkeypatch.setattr(module, "Checkpoint", SimpleNamespace(open=lambda folder: nullcontext(stored)))
        return stored.config

    return put


@pytest.mark.parametrize("scheme", [None, "int8", "int4:32"])
def test_networks_compute_what_the_reference_engine_does(
    rtx: TensorRT, define: Define, store: Callable[[str | None], ModelConfig], tmp_path: Path, scheme: str | None
) -> None:
    """Of five layers, two have inputs: one that stores K and V, and one that reads them."""
    model = store(scheme)
    defined = define.__wrapped__(MIXED, attention="mask")  # type: ignore[attr-defined]  # not the network of another scheme
    network, reference = runners(defined, MIXED)
    segments = Segments(rtx, tmp_path, MIXED, "float32")
    for cache in segments.combined:
        cache[...] = np.nan
    for step, other, expected in zip(*(run(one, *tokens(model)) for one in (network, segments, reference)), strict=True):
        assert_near(step, expected, LOGITS_TOLERANCE["float32"])
        assert_near(other, expected, LOGITS_TOLERANCE["float32"])
    packed = {name.removesuffix(".values") for name in defined.constants if name.endswith(".values")}
    assert packed == ({name.removesuffix(".weight") for name in (PER_LAYER_EMBEDDING, PER_LAYER_PROJECTION)} if scheme else set())
