"""What ModelOpt itself quantizes and exports, and the weights that it computes with. Left out where the library is not installed."""

from __future__ import annotations

import copy
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.models import write_model
from trt_kvcache.checkpoint import Checkpoint

# Its import takes ten seconds, so not while tests are collected.
pytestmark = pytest.mark.skipif(find_spec("modelopt") is None, reason="needs nvidia-modelopt")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file  # noqa: E402

#: By what it says in ``hf_quant_config.json``.
CASES = {
    "FP8": "FP8_DEFAULT_CFG",
    "NVFP4": "NVFP4_DEFAULT_CFG",
    "W4A16_AWQ": "INT4_AWQ_CFG",
}
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}


@pytest.fixture(scope="module", params=CASES)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    source = write_model(folder / "source", **SIZES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it uses what torch advises against
        import modelopt.torch.quantization as quantization
        from modelopt.torch.export import export_hf_checkpoint

        model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        model.config.architectures = [type(model).__name__]

        def calibrate(quantized: Any) -> None:
            torch.manual_seed(0)
            quantized(torch.randint(0, model.config.vocab_size, (2, 16)))

        with torch.no_grad():
            quantization.quantize(model, copy.deepcopy(getattr(quantization, CASES[request.param])), calibrate)
            export_hf_checkpoint(model, export_dir=folder / "exported")
    return request.param, folder / "exported"


def test_weights_are_those_of_the_library(exported: tuple[str, Path]) -> None:
    algorithm, folder = exported
    stored = load_file(folder / "model.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        checkpoint = Checkpoint.open(folder)
    with checkpoint:
        assert len(checkpoint.quantized_names) == 7 * checkpoint.config.num_layers
        for name in checkpoint.quantized_names:
            module = name.removesuffix("weight")
            parts = {key.removeprefix(module): tensor for key, tensor in stored.items() if key.startswith(module)}
            assert np.array_equal(checkpoint.tensor(name).astype(np.float32), VALUES[algorithm](parts).numpy()), name


def _fp8(parts: dict[str, Any]) -> Any:
    return parts["weight"].float() * parts["weight_scale"].float()


def _nvfp4(parts: dict[str, Any]) -> Any:
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    codes = parts["weight"]
    tensor = NVFP4QTensor(torch.Size([len(codes), 2 * codes.shape[1]]), torch.float32, codes)
    return tensor.dequantize(torch.float32, scale=parts["weight_scale"], double_scale=parts["weight_scale_2"], block_sizes={-1: 16})


def _int4(parts: dict[str, Any]) -> Any:
    """Two rows a byte, the first one in the low bits; scales of groups of inputs; inputs had been divided by what AWQ found."""
    weight, scales = parts["weight"], parts["weight_scale"].float()
    codes = torch.stack([weight & 15, weight >> 4], 1).to(torch.int8)
    codes = torch.where(codes > 7, codes - 16, codes).reshape(-1, weight.shape[1])
    values = codes * scales.repeat_interleave(codes.shape[1] // scales.shape[1], 1)
    return values * parts["pre_quant_scale"].float() if "pre_quant_scale" in parts else values


VALUES = {"FP8": _fp8, "NVFP4": _nvfp4, "W4A16_AWQ": _int4}
