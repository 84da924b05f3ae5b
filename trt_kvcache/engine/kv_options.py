"""``quantized_kv``: quantization of K and V, from the options of a session or a build and the scales of the checkpoint."""

from __future__ import annotations

from trt_kvcache._util.caller_warning import warn_caller
from trt_kvcache._util.checks import one_of
from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.dtypes import SCALED_KV_DTYPE_NAMES, dtype_in_full
from trt_kvcache.engine.quantized_kv import QuantizedKV
from trt_kvcache.errors import ConfigError


def quantized_kv(checkpoint: Checkpoint, kv_dtype: str | None, kv_scales: str | None) -> QuantizedKV | None:
    """Return the quantization of K and V. Left out, scales are static if the checkpoint has them for this dtype, else by token."""
    if kv_dtype is None:
        if kv_scales is not None:
            raise ConfigError(f"kv_scales: expected kv_dtype with it, fp8 or int8, got {kv_scales} alone.")
        _warn_of_unused_scales(checkpoint)
        return None
    one_of("kv_dtype", kv_dtype, SCALED_KV_DTYPE_NAMES)
    if kv_scales == "token":
        return QuantizedKV(kv_dtype)
    static = checkpoint.kv_scales() if checkpoint.kv_dtype == dtype_in_full(kv_dtype) else ()
    if static:
        by_head = any(isinstance(scale, tuple) for pair in static for scale in pair)
        if by_head and kv_scales == "tensor":
            raise ConfigError("kv_scales: expected head or token, as the checkpoint has a scale for each head, got tensor.")
        return QuantizedKV(kv_dtype, kv_scales or ("head" if by_head else "tensor"), static)
    if kv_scales is not None:
        raise ConfigError(f"kv_scales: expected token, as the checkpoint has no static scales of K and V in {kv_dtype}, got {kv_scales}.")
    return QuantizedKV(kv_dtype)


def _warn_of_unused_scales(checkpoint: Checkpoint) -> None:
    name = next((name for name in SCALED_KV_DTYPE_NAMES if dtype_in_full(name) == checkpoint.kv_dtype), None)
    if name is not None:
        warn_caller(
            f"{checkpoint.path}: K and V are not quantized. The checkpoint describes them in {name}: kv_dtype={name!r} quantizes them.",
            UserWarning,
        )
