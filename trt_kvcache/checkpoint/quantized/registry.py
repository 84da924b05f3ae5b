"""Choice of the quantized format by ``config.json``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trt_kvcache._util.short_repr import short_repr
from trt_kvcache.checkpoint.json_file import read_json
from trt_kvcache.checkpoint.quantized.awq import AWQ
from trt_kvcache.checkpoint.quantized.compressed_tensors import CompressedTensors
from trt_kvcache.checkpoint.quantized.format import QuantizedFormat
from trt_kvcache.checkpoint.quantized.fp8_blocks import FP8Blocks
from trt_kvcache.checkpoint.quantized.gptq import GPTQ
from trt_kvcache.checkpoint.quantized.modelopt import ModelOpt
from trt_kvcache.checkpoint.quantized.mxfp4 import MXFP4
from trt_kvcache.errors import ConfigError

#: Formats by ``quant_method``.
FORMATS: Mapping[str, Callable[[Mapping[str, Any]], QuantizedFormat]] = {
    "gptq": GPTQ,
    "awq": AWQ,
    "fp8": FP8Blocks,
    "compressed-tensors": CompressedTensors,
    "modelopt": ModelOpt,
    "mxfp4": MXFP4,
}

#: File of ModelOpt next to ``config.json``.
MODELOPT_FILE = "hf_quant_config.json"

#: Fields of ``config.json`` that describe quantized weights.
FIELDS = ("quantization_config", "compression_config")


def quantized_format(data: Mapping[str, Any], folder: Path) -> QuantizedFormat | None:
    """Return the quantized format of a model; None for plain weights. Raises ConfigError for an unsupported one."""
    field = next((name for name in FIELDS if data.get(name)), None)
    if field is None:
        return _of_modelopt(folder)
    config = data[field]
    if not isinstance(config, Mapping):
        raise ConfigError(f"{field}: expected an object, got {short_repr(config)}.")
    method = config.get("quant_method")
    made = FORMATS.get(method) if isinstance(method, str) else None
    if made is None:
        is_nf4 = method == "bitsandbytes"
        hint = "Its 16 values are no multiples of a scale; take a GPTQ or AWQ checkpoint of the model." if is_nf4 else "Convert the model."
        raise ConfigError(f"{field}.quant_method: expected one of {', '.join(FORMATS)}, got {short_repr(method)}. {hint}")
    return (_of_modelopt(folder) if method == "modelopt" else None) or made(config)


def _of_modelopt(folder: Path) -> QuantizedFormat | None:
    """Return the format in the file of ModelOpt; None without the file, or if it describes no quantized weights."""
    path = folder / MODELOPT_FILE
    if not path.is_file():
        return None
    config = read_json(path).get("quantization")
    if not isinstance(config, Mapping):
        raise ConfigError(f"{MODELOPT_FILE}: quantization: expected an object, got {short_repr(config)}.")
    return ModelOpt(config) if config.get("quant_algo") else None
