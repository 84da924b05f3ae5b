"""Plugin layers of experts, sinks and packed weights, on a GPU that TensorRT for RTX takes. **These tests have not run on a GPU yet.**"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.assertions import assert_close
from tests.helpers.models import write_model
from tests.helpers.quantized_models import write_nvfp4
from tests.helpers.rtx_gpu import need_rtx_gpu
from trt_kvcache import InferenceSession, build_engine

pytestmark = [pytest.mark.gpu, pytest.mark.trt]

SIZES: dict[str, Any] = {"max_batch_size": 3, "max_sequence_length": 96, "max_prefill_length": 32}
PROMPTS = [[5, 9, 3, 17, 2, 30, 11] * 6, [8, 1], [12]]

_COMMON = {"num_hidden_layers": 2, "hidden_size": 64, "head_dim": 64, "max_position_embeddings": 128}
#: All experts are chosen, so that rounding changes none.
MODELS: dict[str, dict[str, Any]] = {
    "experts": {"model_type": "qwen3_moe", "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 4},
    "sinks": {
        "model_type": "gpt_oss",
        "intermediate_size": 32,
        "num_local_experts": 3,
        "num_experts_per_tok": 3,
        "sliding_window": 17,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "dense": {"intermediate_size": 96},
}


def logits(session: InferenceSession) -> list[np.ndarray[Any, Any]]:
    """Return the logits of a prefill in two chunks, of decode steps that become a graph, and of a next turn."""
    with session:
        steps = [session.prefill(PROMPTS), *(session.decode([token, 7, 2 + token]) for token in range(5))]
        return [*steps, session.append([[3, 4], [9, 8, 7], [6]]), session.decode([1, 2, 3])]


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("experts", {}),
        ("experts", {"quantize": "int8"}),
        ("experts", {"quantize": "int4:32"}),
        ("sinks", {}),
        ("dense", {"quantize": "int4:32", "packed_kernels": True}),
    ],
    ids=str,
)
def test_logits_are_those_of_numpy(memory: Any, tmp_path: Path, model: str, options: dict[str, Any]) -> None:
    need_rtx_gpu(memory)
    check(write_model(tmp_path / "model", **_COMMON, **MODELS[model]), tmp_path, options)


@pytest.mark.filterwarnings("ignore:.*dequantized when they are read")
@pytest.mark.parametrize("model", ["super-blocks", "experts in super-blocks", "NVFP4", "experts in NVFP4"])
def test_logits_of_published_formats_are_those_of_numpy(memory: Any, tmp_path: Path, model: str) -> None:
    need_rtx_gpu(memory)
    if "NVFP4" in model:
        folder = write_nvfp4(tmp_path / "model", one_factor=False, **_COMMON, **MODELS["dense" if model == "NVFP4" else "experts"])
        return check(folder, tmp_path, {"packed_kernels": model == "NVFP4"})
    pytest.importorskip("gguf")
    from tests.helpers.gguf_experts import Q4_K_M_EXPERTS, write_gguf_experts
    from tests.helpers.gguf_files import write_q4_k_m

    if model == "experts in super-blocks":
        return check(write_gguf_experts(tmp_path, Q4_K_M_EXPERTS, num_experts=4, num_experts_per_tok=4), tmp_path, {})
    write_q4_k_m(tmp_path / "model", max_position_embeddings=128)
    return check(tmp_path / "model", tmp_path, {"packed_kernels": True})


def check(folder: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    """Compare an engine in bfloat16 or float16 with the NumPy engine."""
    common = {**SIZES, "attention": "plugin"}
    expected = logits(InferenceSession.from_model(folder, engine="numpy", quantize=options.get("quantize"), **common))
    build_engine(folder, tmp_path / "engine", flavour="tensorrt_rtx", **common, **options)
    for one, other in zip(logits(InferenceSession.open(tmp_path / "engine", engine="tensorrt")), expected, strict=True):
        assert_close(one, other, 2e-2)
