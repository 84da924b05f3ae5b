"""Plugin layers that read K and V of another one, on a GPU that TensorRT for RTX takes. **This test has not run on a GPU yet.**"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.assertions import assert_close
from tests.helpers.models import write_model
from tests.helpers.rtx_gpu import need_rtx_gpu
from trt_kvcache import InferenceSession, build_engine

pytestmark = [pytest.mark.gpu, pytest.mark.trt]

SIZES = {"max_batch_size": 3, "max_sequence_length": 96, "max_prefill_length": 32}
PROMPTS = [[5, 9, 3, 17, 2, 30, 11] * 6, [8, 1], [12]]


def logits(session: InferenceSession) -> list[np.ndarray[Any, Any]]:
    """Return the logits of a prefill in two chunks, of decode steps that become a graph, and of a next turn."""
    with session:
        steps = [session.prefill(PROMPTS), *(session.decode([token, 7, 2 + token]) for token in range(5))]
        return [*steps, session.append([[3, 4], [9, 8, 7], [6]]), session.decode([1, 2, 3])]


@pytest.mark.parametrize("per_layer", [0, 24])
@pytest.mark.parametrize("plugin_layers", ["one-plan", "segments"])
def test_logits_are_those_of_numpy_and_no_cache_is_copied(
    memory: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, plugin_layers: str, per_layer: int
) -> None:
    need_rtx_gpu(memory)
    layers = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2}
    sizes = {"head_dim": 64, "global_head_dim": 128, "sliding_window": 17, "hidden_size_per_layer_input": per_layer}
    model = write_model(tmp_path / "model", model_type="gemma4_text", max_position_embeddings=128, **layers, **sizes)
    options: dict[str, Any] = {**SIZES, "attention": "plugin"}
    expected = logits(InferenceSession.from_model(model, engine="numpy", **options))
    build_engine(model, tmp_path / "engine", flavour="tensorrt_rtx", plugin_layers=plugin_layers, **options)
    with caplog.at_level(logging.WARNING, logger="trt_kvcache.tensorrt"):
        found = logits(InferenceSession.open(tmp_path / "engine", engine="tensorrt"))
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, 2e-2)
    assert "copies the layer's whole cache" not in caplog.text
