"""``AttentionAttributes``: the parameters of the attention kernels, checked, and as TensorRT's plugin fields."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from numbers import Real
from typing import Any

import numpy as np

from trt_kvcache._util.checks import int_in_range, one_of
from trt_kvcache.errors import ConfigError
from trt_kvcache.kernels.attention_tiles import HEAD_DIMS, MAX_GROUP, MAX_SCORE_FACTOR, MIN_SCORE_FACTOR

#: ``PluginFieldType`` of each attribute. INT64 and FLOAT32 are accepted, too, if the value fits.
ATTRIBUTE_TYPES = {
    "num_heads": "INT32",
    "num_kv_heads": "INT32",
    "head_dim": "INT32",
    "scale": "FLOAT64",
    "window": "INT32",
    "softcap": "FLOAT64",
    "rotary_dim": "INT32",
}
#: Field values of the two attributes that only attention over quantized K and V has.
KV_FIELD_VALUES = {"kv_dtype": {"float8_e4m3fn": 1, "int8": 2}, "kv_scales": {"head": 1, "token": 2}}
#: The same with these two.
QUANTIZED_ATTRIBUTE_TYPES = ATTRIBUTE_TYPES | dict.fromkeys(KV_FIELD_VALUES, "INT32")
_ACCEPTED_TYPES = {"INT32": ("INT32", "INT64"), "FLOAT64": ("FLOAT32", "FLOAT64")}
_ROTARY_DIM_STEP = 4
_INT32_MAX = 2**31 - 1
#: The limit as a float32, to which an attribute of ONNX is rounded.
_LEAST_SCORE_FACTOR = float(np.float32(MIN_SCORE_FACTOR))


@dataclass(frozen=True, kw_only=True)
class AttentionAttributes:
    """Attributes of attention over a combined cache, within the limits of the CUDA kernels."""

    num_heads: int  # 1 to 16 query heads share a K/V head
    num_kv_heads: int
    head_dim: int  # 64, 80, 96, 128, 256 or 512
    scale: float = 0.0  # of the scores q k, 1e-6 to 1e6; 0 for 1 / sqrt(head_dim)
    window: int = 0  # tokens that a token attends to, itself included; 0 for all
    softcap: float = 0.0  # scores become softcap * tanh(score / softcap), 1e-6 to 1e6; 0 for none
    rotary_dim: int = 0  # elements of a row that RoPE is applied to, a multiple of 4; 0 for none
    kv_dtype: str | None = None  # of K and V in the cache; None for the dtype of q
    kv_scales: str | None = None  # "head" or "token": what shares a scale; with kv_dtype, and always with it
    takes_trees: bool = False  # True for another input, ``ancestors``; the version of the plugin says so, and no field

    def __post_init__(self) -> None:
        for name, kind in ATTRIBUTE_TYPES.items():
            value = getattr(self, name)
            if kind == "INT32":
                value = int_in_range(name, value, 0, _INT32_MAX, error=ConfigError)
            elif (
                isinstance(value, bool)
                or not isinstance(value, Real)
                or (value and not _LEAST_SCORE_FACTOR <= float(value) <= MAX_SCORE_FACTOR)
            ):
                raise ConfigError(f"{name}: expected 0, or {MIN_SCORE_FACTOR} to {MAX_SCORE_FACTOR}, got {value!r}.")
            object.__setattr__(self, name, value if kind == "INT32" else float(value))
        most = MAX_GROUP * self.num_kv_heads
        if not self.num_kv_heads or self.num_heads % self.num_kv_heads or not self.num_kv_heads <= self.num_heads <= most:
            raise ConfigError(
                f"num_heads: expected 1 to {MAX_GROUP} times num_kv_heads, got {self.num_heads} over {self.num_kv_heads} K/V heads."
            )
        if self.head_dim not in HEAD_DIMS:
            raise ConfigError(f"head_dim: expected one of {', '.join(map(str, HEAD_DIMS))}, got {self.head_dim}.")
        if self.rotary_dim % _ROTARY_DIM_STEP or self.rotary_dim > self.head_dim:
            raise ConfigError(f"rotary_dim: expected a multiple of {_ROTARY_DIM_STEP} from 0 to {self.head_dim}, got {self.rotary_dim}.")
        if self.kv_dtype is not None:
            for name, known in KV_FIELD_VALUES.items():
                one_of(name, getattr(self, name), known)
        elif self.kv_scales is not None:
            raise ConfigError(f"kv_scales: expected none without kv_dtype, got {self.kv_scales!r}.")

    @property
    def group(self) -> int:
        """Query heads per K/V head."""
        return self.num_heads // self.num_kv_heads

    @property
    def score_scale(self) -> float:
        """Factor of the scores q k."""
        return self.scale or 1 / math.sqrt(self.head_dim)

    def plugin_field_arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return the data of the plugin fields. ``PluginField`` points into the arrays: keep them alive as long as the fields."""
        dtypes = {"INT32": np.int32, "FLOAT64": np.float64}
        values = {
            name: KV_FIELD_VALUES[name][value] if name in KV_FIELD_VALUES else value
            for name, value in asdict(self).items()
            if value is not None and name in QUANTIZED_ATTRIBUTE_TYPES
        }
        return {name: np.array([value], dtypes[QUANTIZED_ATTRIBUTE_TYPES[name]]) for name, value in values.items()}

    @classmethod
    def from_plugin_fields(cls, fields: Iterable[Any], *, quantized: bool = False, takes_trees: bool = False) -> AttentionAttributes:
        """Read a ``PluginFieldCollection``."""
        values: dict[str, Any] = {}
        types = QUANTIZED_ATTRIBUTE_TYPES if quantized else ATTRIBUTE_TYPES
        for field in fields:
            name, kind = str(field.name), field.type.name
            if name not in types or name in values:
                what = "is given twice" if name in values else "is unknown"
                raise ConfigError(f"field {name!r} {what}. Expected {', '.join(types)}, each once.")
            data = np.asarray(field.data)
            if kind not in _ACCEPTED_TYPES[types[name]] or data.size != 1:
                expected = " or ".join(_ACCEPTED_TYPES[types[name]])
                raise ConfigError(f"field {name!r}: expected one value of type {expected}, got {data.size} of type {kind}.")
            values[name] = data.reshape(-1)[0].item()
        missing = [
            name for name in ("num_heads", "num_kv_heads", "head_dim", *(KV_FIELD_VALUES if quantized else ())) if name not in values
        ]
        if missing:
            raise ConfigError(f"fields: expected {', '.join(missing)} too, got {', '.join(values) or 'none'}.")
        values |= {name: _meaning(name, values[name]) for name in KV_FIELD_VALUES if name in values}
        return cls(**values, takes_trees=takes_trees)


def _meaning(name: str, stored: int) -> str:
    """Return the value of an attribute that is stored as a number."""
    meanings = {code: value for value, code in KV_FIELD_VALUES[name].items()}
    if stored not in meanings:
        expected = " or ".join(f"{code} ({value})" for code, value in meanings.items())
        raise ConfigError(f"field {name!r}: expected {expected}, got {stored}.")
    return meanings[stored]
