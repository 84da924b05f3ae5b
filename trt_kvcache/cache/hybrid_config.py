"""``HybridCacheConfig``: which decoder layers are attention and which are recurrent, and a cache for each kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from itertools import count, islice
from typing import Any

from trt_kvcache._util.serialization import config_from_dict
from trt_kvcache.cache.config import KVCacheConfig
from trt_kvcache.cache.mamba_config import MambaCacheConfig
from trt_kvcache.errors import ConfigError
from trt_kvcache.memory.shapes import MAX_LAYERS


class LayerType(Enum):
    """What a decoder layer keeps between enqueues: ``HybridCacheManager::LayerType`` of seed 003."""

    #: Keys and values.
    ATTENTION = "attention"
    #: A recurrent state and a conv state.
    MAMBA = "mamba"


@dataclass(frozen=True, kw_only=True)
class HybridCacheConfig:
    """Cache of a decoder that has attention layers, recurrent layers, or both.

    Parameters
    ----------
    layer_types : sequence of LayerType
        One per decoder layer, kept as a tuple.
    kv : KVCacheConfig, optional
        The attention layers, in their order. None if there are none.
    mamba : MambaCacheConfig, optional
        The Mamba layers, in their order. None if there are none.

    Raises
    ------
    ConfigError
        A part is missing or superfluous, its number of layers does not fit ``layer_types``, the batch sizes differ, or the states are
        for fewer tokens than the attention layers.

    Notes
    -----
    ``HybridCacheManager::Config`` of seed 003.

    Examples
    --------
    >>> from trt_kvcache import HybridCacheConfig, KVCacheConfig, KVLayerConfig, LayerType
    >>> kv = KVCacheConfig(layers=[KVLayerConfig(num_kv_heads=2, head_dim=64)] * 2, max_batch_size=4, max_sequence_length=256)
    >>> config = HybridCacheConfig(layer_types=[LayerType.ATTENTION] * 2, kv=kv)
    >>> config.num_layers, config.max_batch_size, config.nbytes == kv.nbytes
    (2, 4, True)
    """

    layer_types: tuple[LayerType, ...]
    kv: KVCacheConfig | None = None
    mamba: MambaCacheConfig | None = None

    def __post_init__(self) -> None:
        types = self.layer_types
        if isinstance(types, str | bytes) or not hasattr(types, "__iter__"):
            raise ConfigError(f"HybridCacheConfig.layer_types: expected a sequence of LayerType, got {types!r}.")
        types = tuple(islice(iter(types), 2 * MAX_LAYERS + 1))
        if len(types) > 2 * MAX_LAYERS:
            raise ConfigError(f"HybridCacheConfig.layer_types: expected at most {2 * MAX_LAYERS} layers, got more.")
        object.__setattr__(self, "layer_types", types)
        for index, layer_type in enumerate(types):
            if not isinstance(layer_type, LayerType):
                raise ConfigError(f"HybridCacheConfig.layer_types[{index}]: expected a LayerType, got {layer_type!r}.")
        if not types:
            raise ConfigError("HybridCacheConfig.layer_types: expected at least one layer, got none.")
        self._check_part("kv", KVCacheConfig, LayerType.ATTENTION)
        self._check_part("mamba", MambaCacheConfig, LayerType.MAMBA)
        if self.kv is not None and self.mamba is not None and self.kv.max_batch_size != self.mamba.max_batch_size:
            raise ConfigError(
                f"HybridCacheConfig: max_batch_size differs: kv has {self.kv.max_batch_size}, mamba has {self.mamba.max_batch_size}."
            )

        if self.kv is not None and self.mamba is not None and self.mamba.max_sequence_length < self.kv.max_sequence_length:
            raise ConfigError(
                f"HybridCacheConfig.mamba: expected a max_sequence_length of at least {self.kv.max_sequence_length}, as kv has, "
                f"got {self.mamba.max_sequence_length}."
            )

    def _check_part(self, name: str, kind: type[KVCacheConfig] | type[MambaCacheConfig], layer_type: LayerType) -> None:
        part = getattr(self, name)
        if part is not None and not isinstance(part, kind):
            raise ConfigError(f"HybridCacheConfig.{name}: expected a {kind.__name__} or None, got {type(part).__name__}.")
        expected, got = self.layer_types.count(layer_type), 0 if part is None else part.num_layers
        if expected != got:
            raise ConfigError(f"HybridCacheConfig.{name}: layer_types has {expected} {layer_type.value} layers, {name} describes {got}.")

    @property
    def num_layers(self) -> int:
        """Decoder layers of both kinds."""
        return len(self.layer_types)

    @property
    def max_batch_size(self) -> int:
        """Slots, B."""
        part = self.kv or self.mamba
        assert part is not None  # there is a layer, and so the part that describes it
        return part.max_batch_size

    @property
    def max_sequence_length(self) -> int:
        """Tokens a slot can hold, S: those of the attention layers if there are any."""
        part = self.kv or self.mamba
        assert part is not None
        return part.max_sequence_length

    @property
    def dtype(self) -> str:
        """What an engine on it computes in: the dtype of K and V, without attention layers that of the conv states."""
        if self.kv is not None:
            return self.kv.dtype
        assert self.mamba is not None
        return self.mamba.conv_dtype

    @cached_property
    def indices_in_kind(self) -> tuple[int, ...]:
        """For each decoder layer its index among the layers of the same kind."""
        counters = {layer_type: count() for layer_type in LayerType}
        return tuple(next(counters[layer_type]) for layer_type in self.layer_types)

    @property
    def nbytes(self) -> int:
        """Bytes of K, V and states as allocated. Known before anything is allocated."""
        return sum(part.nbytes for part in (self.kv, self.mamba) if part is not None)

    def with_max_batch_size(self, max_batch_size: int) -> HybridCacheConfig:
        """Return this configuration with another number of slots in every part.

        Parameters
        ----------
        max_batch_size : int
            Slots, B.
        """
        kv = None if self.kv is None else self.kv.with_max_batch_size(max_batch_size)
        mamba = None if self.mamba is None else self.mamba.with_max_batch_size(max_batch_size)
        return replace(self, kv=kv, mamba=mamba)

    def with_max_sequence_length(self, max_sequence_length: int) -> HybridCacheConfig:
        """Return this configuration with slots of another number of tokens. The bytes of states do not depend on it.

        Parameters
        ----------
        max_sequence_length : int
            Tokens that a slot can hold, S.
        """
        kv = None if self.kv is None else self.kv.with_max_sequence_length(max_sequence_length)
        mamba = None if self.mamba is None else self.mamba.with_max_sequence_length(max_sequence_length)
        return replace(self, kv=kv, mamba=mamba)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values that :meth:`from_dict` reads back."""
        return {
            "layer_types": [layer_type.value for layer_type in self.layer_types],
            "kv": None if self.kv is None else self.kv.to_dict(),
            "mamba": None if self.mamba is None else self.mamba.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> HybridCacheConfig:
        """Return the configuration that :meth:`to_dict` wrote.

        Parameters
        ----------
        data : mapping
            Field names and JSON values.

        Raises
        ------
        ConfigError
            A field is missing, unknown or wrong.
        """
        return config_from_dict(
            cls,
            data,
            layer_types=lambda types: [LayerType(value) for value in types],
            kv=lambda kv: None if kv is None else KVCacheConfig.from_dict(kv),
            mamba=lambda mamba: None if mamba is None else MambaCacheConfig.from_dict(mamba),
        )
