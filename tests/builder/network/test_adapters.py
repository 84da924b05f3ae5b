"""Networks over merged weights: logits of PEFT, also where weights are rows of a fused tensor and where the head was tied."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.builder.network.test_network_values import GOLDEN_TOLERANCE, Network, assert_near
from tests.builder.network.test_quantized_network import define
from tests.helpers.adapters import tensors_of
from tests.paths import GOLDEN
from trt_kvcache import build_engine
from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.engine_folder.folder import EngineFolder

pytestmark = pytest.mark.trt


@pytest.mark.parametrize(
    ("model", "dtype"), [("phi3-long", "float32"), pytest.param("qwen2-tied", "float16", marks=pytest.mark.slow), ("qwen2-tied", "float32")]
)
def test_computes_what_peft_does(rtx: Any, model: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = GOLDEN / "adapters" / model
    monkeypatch.setattr(Checkpoint, "open", partial(Checkpoint.open, adapter=adapter))
    golden = tensors_of(adapter, "golden.safetensors")
    network, ids, done = Network(define(rtx, GOLDEN / model, dtype)), golden["input_ids"], 0
    for width in (11, 8, 1):
        logits = network.step(ids[None, done : done + width], [done], [width - 1])
        done += width
        assert_near(logits[0], golden["logits"][done - 1], GOLDEN_TOLERANCE[dtype])


def test_a_build_records_the_adapter_and_carries_it(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"max_batch_size": 1, "max_sequence_length": 24, "flavour": "tensorrt_rtx"}
    adapter = GOLDEN / "adapters" / "llama"
    report = build_engine(GOLDEN / "llama", tmp_path / "engine", adapter=adapter, embed_weights=True, **sizes)
    folder = EngineFolder.open(report.path)
    assert folder.config.checkpoint.adapter == str(adapter)
    with folder.open_checkpoint() as checkpoint, Checkpoint.open(GOLDEN / "llama", adapter=adapter) as original:
        assert checkpoint.adapter is not None
        assert checkpoint.adapter.path == folder.path / "adapter"
        name = "model.layers.1.self_attn.q_proj.weight"
        np.testing.assert_array_equal(checkpoint.tensor(name), original.tensor(name))
