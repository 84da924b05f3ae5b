"""``QuantizedKV``: quantization of the K and V of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from trt_kvcache._util.checks import one_of
from trt_kvcache.cache.config import KVCacheConfig
from trt_kvcache.cache.kv_layer_config import KVLayerConfig
from trt_kvcache.dtypes import KV_SCALES, SCALED_KV_DTYPES, dtype_in_full
from trt_kvcache.errors import ConfigError

#: The static scales of each attention layer: of K and of V, each a number or one for each head.
StaticScales = Sequence[tuple[float | Sequence[float], float | Sequence[float]]]


@dataclass(frozen=True)
class QuantizedKV:
    """Quantization of the K and V of an engine."""

    dtype: str  # "float8_e4m3fn" (or "fp8") or "int8"
    scales: str = "token"  # "token", or static ones by "tensor" or "head"
    static: StaticScales = ()  # of each attention layer; only and always with static scales

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", dtype_in_full(self.dtype))
        one_of("kv_dtype", self.dtype, SCALED_KV_DTYPES)
        one_of("kv_scales", self.scales, KV_SCALES)
        object.__setattr__(self, "static", tuple(self.static))
        if (self.scales == "token") is bool(self.static):
            expected = "'token' without static scales" if self.static == () else "'tensor' or 'head' with static scales"
            raise ConfigError(f"kv_scales: expected {expected}, got {self.scales!r}.")

    @classmethod
    def of(cls, kv: KVCacheConfig | None) -> QuantizedKV | None:
        """Return the quantization of a cache; None if K and V are not quantized."""
        if kv is None or kv.scales is None:
            return None
        return cls(kv.dtype, kv.scales, () if kv.scales_by_token else [(layer.k_scale, layer.v_scale) for layer in kv.layers])

    def layers(self, layers: Sequence[KVLayerConfig]) -> tuple[KVLayerConfig, ...]:
        """Return the layers of a cache with their static scales."""
        if not self.static:
            return tuple(layers)
        if len(self.static) != len(layers):
            raise ConfigError(f"kv_scales: expected scales of {len(layers)} attention layers, got {len(self.static)}.")
        return tuple(replace(layer, k_scale=k, v_scale=v) for layer, (k, v) in zip(layers, self.static, strict=True))
