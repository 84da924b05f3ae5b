"""Which format a model folder is stored in, as ``config.json`` says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trt_kvcache._util.shown import shown
from trt_kvcache.checkpoint.quantized.awq import AWQ
from trt_kvcache.checkpoint.quantized.format import QuantizedFormat
from trt_kvcache.checkpoint.quantized.fp8_blocks import FP8Blocks
from trt_kvcache.checkpoint.quantized.gptq import GPTQ
from trt_kvcache.errors import ConfigError

#: By ``quant_method``.
FORMATS: Mapping[str, Callable[[Mapping[str, Any]], QuantizedFormat]] = {"gptq": GPTQ, "awq": AWQ, "fp8": FP8Blocks}

#: Fields of ``config.json`` that describe quantized weights.
FIELDS = ("quantization_config", "compression_config")


def quantized_format(data: Mapping[str, Any]) -> QuantizedFormat | None:
    """Return how the weights of a model are quantized.

    Parameters
    ----------
    data : mapping of str to object
        The parsed ``config.json``.

    Returns
    -------
    QuantizedFormat or None
        None for weights as they are.

    Raises
    ------
    ConfigError
        The weights are quantized in a way that is not read. The message names the field.
    """
    field = next((name for name in FIELDS if data.get(name)), None)
    if field is None:
        return None
    config = data[field]
    if not isinstance(config, Mapping):
        raise ConfigError(f"{field}: expected an object, got {shown(config)}.")
    method = config.get("quant_method")
    made = FORMATS.get(method) if isinstance(method, str) else None
    if made is None:
        is_nf4 = method == "bitsandbytes"
        hint = "Its 16 values are no multiples of a scale; take a GPTQ or AWQ checkpoint of the model." if is_nf4 else "Convert the model."
        raise ConfigError(f"{field}.quant_method: expected one of {', '.join(FORMATS)}, got {shown(method)}. {hint}")
    return made(config)
