"""``SlotFormat``: what the first tokens of a slot are as tensors, whatever the batch size, length and layout of the cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from trt_kvcache.cache.config import KVCacheConfig
from trt_kvcache.cache.hybrid_cache_manager import HybridCacheManager
from trt_kvcache.cache.kv_cache_base import KVCacheBase
from trt_kvcache.cache.layout import StateStorage
from trt_kvcache.cache.linear_kv_cache import LinearKVCache
from trt_kvcache.cache.mamba_config import MambaCacheConfig
from trt_kvcache.errors import ConfigError
from trt_kvcache.memory.shapes import align_up, dense_nbytes

#: The managers that hold whole sequences in slots. For a model of Mamba layers alone it is a ``HybridCacheManager`` too.
AnyCache = KVCacheBase | HybridCacheManager

# Sizes of a cache, which say nothing about one slot's tokens.
_MAMBA_SIZES = ("num_layers", "max_batch_size", "ping_pong")


class SlotPart(Enum):
    """The kinds of tensors that hold a sequence."""

    #: ``[2, H_i, n, D_i]`` per attention layer.
    KV_CACHE = "kv_cache"
    #: ``[num_heads, head_dim, state_size]`` per recurrent layer.
    RECURRENT_STATE = "recurrent_state"
    #: ``[conv_dim, conv_kernel]`` per recurrent layer.
    CONV_STATE = "conv_state"


@dataclass(frozen=True)
class PartFormat:
    """The tensors of one part, one per layer."""

    shapes: tuple[tuple[int, ...], ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes as allocated, each tensor padded to 256."""
        return sum(align_up(dense_nbytes(shape, self.dtype)) for shape in self.shapes)


@dataclass(frozen=True, kw_only=True)
class SlotFormat:
    """The layers whose K, V and states a slot holds.

    ``kv``: The attention layers.
    ``mamba``: The recurrent layers.
    """

    kv: KVCacheConfig | None
    mamba: MambaCacheConfig | None

    @classmethod
    def of(cls, cache: AnyCache) -> SlotFormat:
        """Return what the slots of a cache hold. Raises :class:`ConfigError` for anything else."""
        if isinstance(cache, LinearKVCache | HybridCacheManager):
            return cls(kv=cache.kv_config, mamba=cache.config.mamba)
        if isinstance(cache, KVCacheBase):
            return cls(kv=cache.kv_config, mamba=None)
        raise ConfigError(f"cache: expected a KVCacheManager, LinearKVCache or HybridCacheManager, got {type(cache).__name__}.")

    @property
    def has_states(self) -> bool:
        """Whether a slot sums its tokens up in states: then nothing but all of them can be reused."""
        return self.mamba is not None

    @property
    def num_layers(self) -> int:
        """Attention and recurrent layers."""
        return sum(part.num_layers for part in (self.kv, self.mamba) if part is not None)

    def parts(self, length: int) -> dict[SlotPart, PartFormat]:
        """Return the tensors of the first ``length`` tokens. A part without layers is left out."""
        parts: dict[SlotPart, PartFormat] = {}
        if self.kv is not None:
            shapes = tuple((2, layer.num_kv_heads, length, layer.head_dim) for layer in self.kv.layers)
            parts[SlotPart.KV_CACHE] = PartFormat(shapes, self.kv.dtype)
        if self.mamba is not None:
            parts[SlotPart.RECURRENT_STATE] = _state_format(self.mamba.recurrent_storage)
            parts[SlotPart.CONV_STATE] = _state_format(self.mamba.conv_storage)
        return parts

    def host_tensors(self, length: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return shape and dtype of the same on the host, by name: K, then V, of each attention layer, then states."""
        tensors = {}
        for part, part_format in self.parts(length).items():
            for index, shape in enumerate(part_format.shapes):
                if part is SlotPart.KV_CACHE:
                    tensors[f"k_cache_{index}"] = tensors[f"v_cache_{index}"] = (shape[1:], part_format.dtype)
                else:
                    tensors[f"{part.value}_{index}"] = ((1, *shape), part_format.dtype)
        return tensors

    def nbytes(self, length: int) -> int:
        """Return the bytes that a copy of the first ``length`` tokens takes as allocated."""
        return sum(part.nbytes for part in self.parts(length).values())

    def difference(self, other: SlotFormat) -> str | None:
        """Say in what ``other`` cannot take the place of this; None where the same bytes mean the same in both."""
        mine, theirs = self._facts(), other._facts()
        for name, value in mine.items():
            if theirs.get(name) != value:
                return f"{name}: expected {value}, got {theirs.get(name)}"
        return None

    def _facts(self) -> dict[str, Any]:
        """Everything that the meaning of the bytes depends on, by name. Numbers of layers come first."""
        facts: dict[str, Any] = {
            "attention layers": 0 if self.kv is None else self.kv.num_layers,
            "recurrent layers": 0 if self.mamba is None else self.mamba.num_layers,
        }
        if self.kv is not None:
            facts["dtype of K and V"] = self.kv.dtype
            for index, layer in enumerate(self.kv.layers):
                for field, value in asdict(layer).items():
                    if self.kv.has_scales or not field.endswith("_scale"):
                        facts[f"{field} of attention layer {index}"] = value
        if self.mamba is not None:
            facts.update(
                {f"{field} of recurrent layers": value for field, value in asdict(self.mamba).items() if field not in _MAMBA_SIZES}
            )
        return facts

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values that :meth:`from_dict` reads back."""
        return {"kv": None if self.kv is None else self.kv.to_dict(), "mamba": None if self.mamba is None else self.mamba.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SlotFormat:
        """Read what :meth:`to_dict` wrote. Raises :class:`ConfigError` or KeyError for a missing, unknown or wrong field."""
        kv, mamba = data["kv"], data["mamba"]
        return cls(
            kv=None if kv is None else KVCacheConfig.from_dict(kv), mamba=None if mamba is None else MambaCacheConfig.from_dict(mamba)
        )


def _state_format(storage: StateStorage) -> PartFormat:
    return PartFormat((storage.slot_shape,) * storage.num_layers, storage.dtype)
