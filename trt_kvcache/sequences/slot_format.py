"""``SlotFormat``: the tensors of a slot, whatever the batch size, sequence length and layout of its cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from trt_kvcache.cache.cache import Cache
from trt_kvcache.cache.config import KVCacheConfig, MambaCacheConfig
from trt_kvcache.cache.layout import StateStorage
from trt_kvcache.cache.recurrent_states import StateKind, state_storages
from trt_kvcache.errors import ConfigError
from trt_kvcache.kernels.scale_views import saved_scales
from trt_kvcache.memory.shapes import align_up, dense_nbytes

# Fields of a MambaCacheConfig that do not change the states of one slot.
_CACHE_SIZES = ("num_layers", "max_batch_size", "max_sequence_length", "ping_pong")


@dataclass(frozen=True, kw_only=True)
class SlotFormat:
    """Layers of a slot: heads, dtypes and scales of K and V, shapes and dtypes of states. Copies move between equal formats only."""

    # Batch size, sequence length and layout of the configurations do not matter here.
    kv: KVCacheConfig | None
    mamba: MambaCacheConfig | None

    @classmethod
    def of(cls, cache: Cache, *, name: str = "cache") -> SlotFormat:
        """Return the format of the slots of a cache; ``name`` is the argument that an error names."""
        if not isinstance(cache, Cache) or not cache.holds_whole_sequences:
            raise ConfigError(f"{name}: expected a KVCacheManager, LinearKVCache or HybridCacheManager, got {type(cache).__name__}.")
        return cls(kv=cache.kv_config, mamba=cache.mamba_config)

    @property
    def has_states(self) -> bool:
        """True if there are recurrent states. They depend on all tokens of a slot, so only the whole sequence can be reused."""
        return self.mamba is not None

    @property
    def num_layers(self) -> int:
        """Number of attention and recurrent layers."""
        return sum(config.num_layers for config in (self.kv, self.mamba) if config is not None)

    @property
    def kv_dtype(self) -> str:
        """The dtype in which K and V are stored. There must be attention layers."""
        assert self.kv is not None
        return self.kv.dtype

    @property
    def state_storages(self) -> dict[StateKind, StateStorage]:
        """The recurrent states, if the layers have them, then the conv states."""
        return {} if self.mamba is None else state_storages(self.mamba)

    @property
    def num_states(self) -> int:
        """Number of state tensors."""
        return sum(storage.num_layers for storage in self.state_storages.values())

    def kv_shapes(self, length: int) -> list[tuple[int, int, int, int]]:
        """Return ``(2, H_i, length, D_i)`` for each attention layer: K and V of the first tokens."""
        return [] if self.kv is None else [(2, layer.num_kv_heads, length, layer.head_dim) for layer in self.kv.layers]

    def scale_shapes(self, length: int) -> list[tuple[int, int, int]]:
        """Return ``(2, H_i, length)`` for each attention layer with scales by token: the scales of the first tokens."""
        scaled = self.kv is not None and self.kv.scales_by_token
        return [shape[:3] for shape in self.kv_shapes(length)] if scaled else []

    def tensors(self, length: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return names, shapes and dtypes of the tensors of the first tokens of a slot, as copies on the host and snapshots hold them."""
        # k_cache_0, v_cache_0, ... [H_i, n, D_i]; with scales by token k_scale_0, v_scale_0, ... [H_i, n] float32; then
        # recurrent_state_0, ... [1, num_heads, head_dim, state_size] and conv_state_0, ... [1, conv_dim, conv_kernel].
        tensors: dict[str, tuple[tuple[int, ...], str]] = {}
        for index, shape in enumerate(self.kv_shapes(length)):
            tensors[f"k_cache_{index}"] = tensors[f"v_cache_{index}"] = (shape[1:], self.kv_dtype)
        for index, scales in enumerate(self.scale_shapes(length)):
            tensors[f"k_scale_{index}"] = tensors[f"v_scale_{index}"] = (scales[1:], "float32")
        for kind, storage in self.state_storages.items():
            tensors.update(
                {f"{kind.value}_state_{index}": ((1, *storage.slot_shape), storage.dtype) for index in range(storage.num_layers)}
            )
        return tensors

    def nbytes(self, length: int) -> int:
        """Return the bytes of a copy of the first tokens in the memory of a cache: each tensor padded to a multiple of 256."""
        kv_nbytes = sum(align_up(dense_nbytes(shape, self.kv_dtype)) for shape in self.kv_shapes(length))
        kv_nbytes += sum(align_up(dense_nbytes(shape, "float32")) for shape in self.scale_shapes(saved_scales(length)))
        states = self.state_storages.values()
        return kv_nbytes + sum(storage.num_layers * align_up(dense_nbytes(storage.slot_shape, storage.dtype)) for storage in states)

    def live_nbytes(self, length: int) -> int:
        """Return the bytes of its slot that a sequence uses, without padding: K, V and scales, and the states in every buffer."""
        if not length:
            return 0  # its states are zero
        return length * self._token_nbytes + (0 if self.mamba is None else self.mamba.slot_nbytes)

    @cached_property
    def _token_nbytes(self) -> int:
        return 0 if self.kv is None else sum(layer.token_nbytes(self.kv_dtype, scaled=self.kv.scales_by_token) for layer in self.kv.layers)

    def difference(self, other: SlotFormat) -> str | None:
        """Return the first property that differs, with both values; None if the same bytes have the same meaning in both formats."""
        mine, theirs = self._properties(), other._properties()
        for name, value in mine.items():
            if theirs.get(name) != value:
                return f"{name}: expected {value}, got {theirs.get(name)}"
        return None

    def _properties(self) -> dict[str, Any]:
        """Return the properties that determine the meaning of the bytes, by name. Numbers of layers come first."""
        properties: dict[str, Any] = {
            "attention layers": 0 if self.kv is None else self.kv.num_layers,
            "recurrent layers": 0 if self.mamba is None else self.mamba.num_layers,
        }
        if self.kv is not None:
            properties["dtype of K and V"] = self.kv.dtype
            static = self.kv.has_scales and not self.kv.scales_by_token
            if self.kv.has_scales:
                properties["scales of K and V"] = "static" if static else "by token"
            for index, layer in enumerate(self.kv.layers):
                for field, value in asdict(layer).items():
                    if static or not field.endswith("_scale"):
                        properties[f"{field} of attention layer {index}"] = value
        if self.mamba is not None:
            for field, value in asdict(self.mamba).items():
                if field not in _CACHE_SIZES:
                    properties[f"{field} of recurrent layers"] = value
        return properties

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values that :meth:`from_dict` reads back."""
        return {"kv": None if self.kv is None else self.kv.to_dict(), "mamba": None if self.mamba is None else self.mamba.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SlotFormat:
        """Return the format that :meth:`to_dict` wrote."""
        kv, mamba = data["kv"], data["mamba"]
        return cls(
            kv=None if kv is None else KVCacheConfig.from_dict(kv), mamba=None if mamba is None else MambaCacheConfig.from_dict(mamba)
        )
