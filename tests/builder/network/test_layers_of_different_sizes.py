"""A decoder whose layers differ in heads, head dim, width of the MLP, biases, norms, window and angles."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.helpers.models import SMALL
from tests.reference import rig
from trt_kvcache.checkpoint.weights_summary import WeightsSummary
from trt_kvcache.model import LayerConfig, ModelConfig, NormConfig, QkNormConfig
from trt_kvcache.model.features import features
from trt_kvcache.model.tensor_shapes import tensor_shapes
from trt_kvcache.trt.module import TensorRT

from . import conftest
from .conftest import MAX_BATCH_SIZE, MAX_PREFILL_LENGTH, Defined
from .test_network_values import LOGITS_TOLERANCE, ROWS_TOLERANCE, assert_near, run, runners
from .test_segments import Segments

pytestmark = pytest.mark.trt

NAME = "layers of different sizes"


def layer_of(layer: LayerConfig, width: int, *, mlp_bias: bool = False, **mixer: Any) -> LayerConfig:
    mlp = replace(layer.mlp, intermediate_size=width, bias=mlp_bias)
    return replace(layer, mlp=mlp, mixer=replace(layer.mixer, **mixer))


def make_model() -> ModelConfig:
    plain = ModelConfig.from_dict({**SMALL, "torch_dtype": "float32"})
    layer = plain.layers[0]
    heads = (
        {"num_heads": 4, "num_kv_heads": 2, "head_dim": 24},
        {"num_heads": 3, "num_kv_heads": 3, "head_dim": 16, "window": 5, "qkv_bias": True},
        {"num_heads": 6, "num_kv_heads": 1, "head_dim": 32, "o_bias": True, "softcap": 3.0, "scale": 0.2},
    )
    found = [layer_of(layer, width, **each) for width, each in zip((28, 20, 36), heads, strict=True)]
    qk_norm = QkNormConfig(norm=NormConfig(epsilon=1e-5))
    found[0] = replace(found[0], mixer=replace(found[0].mixer, qk_norm=qk_norm))
    return replace(plain, layers=tuple(found))


class Stored:
    """A checkpoint of random weights."""

    draft_tokens = None  # of an EAGLE-3 head
    token_clusters = None  # of an assistant

    def __init__(self, model: ModelConfig) -> None:
        random = np.random.default_rng(0)
        self.config = model
        self.path = Path(NAME)
        self._arrays = {name: (random.normal(size=shape) * 0.3).astype(np.float32) for name, shape in tensor_shapes(model).items()}
        self.nbytes = sum(array.nbytes for array in self._arrays.values())
        self.weights = WeightsSummary(format="float32", is_quantized=False, nbytes=self.nbytes, step_nbytes=self.nbytes)

    def nbytes_of(self, name: str) -> int:
        return self._arrays[name].nbytes

    def quantized_weight(self, name: str) -> None:
        return None

    def release(self, name: str) -> None:
        pass

    def tensor(self, name: str) -> np.ndarray:
        return self._arrays[name]


@pytest.fixture(autouse=True)
def stored(monkeypatch: pytest.MonkeyPatch) -> Stored:
    stored = Stored(make_model())
    for module in (conftest, rig):
        monkeypatch.setattr(module, "Checkpoint", SimpleNamespace(open=lambda folder: nullcontext(stored)))
    return stored


def tokens(model: ModelConfig) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(1)
    return random.integers(0, model.vocab_size, (MAX_BATCH_SIZE, 24)), random.integers(0, model.vocab_size, (3, MAX_PREFILL_LENGTH))


def test_layers_have_different_sizes(stored: Stored) -> None:
    assert {"several_shapes", "window", "softcap", "scale"} <= features(stored.config).keys()


def test_the_network_computes_what_the_reference_engine_does(define: Callable[..., Defined], stored: Stored) -> None:
    network, reference = runners(define(NAME, attention="mask"), NAME)
    for step, expected in zip(run(network, *tokens(stored.config)), run(reference, *tokens(stored.config)), strict=True):
        assert_near(step, expected, LOGITS_TOLERANCE["float32"])
    for cache, expected in zip(network.caches(), reference.caches(), strict=True):
        assert_near(cache, expected, ROWS_TOLERANCE["float32"])


def test_segments_compute_what_the_network_does(define: Callable[..., Defined], rtx: TensorRT, stored: Stored, tmp_path: Path) -> None:
    network, _ = runners(define(NAME, attention="mask"), NAME)
    segments = Segments(rtx, tmp_path, NAME, "float32")
    for cache in segments.combined:
        cache[...] = np.nan
    for step, expected in zip(run(segments, *tokens(stored.config)), run(network, *tokens(stored.config)), strict=True):
        assert_near(step, expected, LOGITS_TOLERANCE["float32"])
