"""Cache configurations: frozen, keyword-only, checked when made.

``KVCacheConfig`` describes per-layer heads (seed 000), ``CacheConfig`` the one-buffer cache of equal layers (seed 001).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any

from trt_kvcache._util.checks import int_in_range, one_of
from trt_kvcache._util.serialization import config_from_dict
from trt_kvcache._util.short_repr import short_repr
from trt_kvcache.cache.kv_layer_config import KVLayerConfig, check_scales
from trt_kvcache.cache.layout import KVLayerStorage, KVLayout, kv_layer_storage
from trt_kvcache.cache.mamba_config import MambaCacheConfig
from trt_kvcache.dtypes import KV_DTYPES, SCALED_KV_DTYPES, dtype_in_full
from trt_kvcache.errors import ConfigError
from trt_kvcache.memory.shapes import (
    MAX_BATCH_SIZE,
    MAX_DIMENSION,
    MAX_LAYERS,
    ROW_GRANULE,
    SCALES_GRANULE,
    align_up,
    dense_nbytes,
    row_nbytes,
)


def _check_common(config: KVCacheConfig | CacheConfig) -> None:
    owner = type(config).__name__
    for name, high in (("max_batch_size", MAX_BATCH_SIZE), ("max_sequence_length", MAX_DIMENSION)):
        object.__setattr__(config, name, int_in_range(f"{owner}.{name}", getattr(config, name), 1, high, error=ConfigError))
    object.__setattr__(config, "dtype", dtype_in_full(config.dtype))
    one_of(f"{owner}.dtype", config.dtype, KV_DTYPES)
    if not isinstance(config.layout, KVLayout):
        raise ConfigError(f"{owner}.layout: expected KVLayout.COMBINED or KVLayout.SEPARATE, got {config.layout!r}.")


def _check_row(owner: str, index: int, layer: KVLayerConfig, dtype: str) -> None:
    row = row_nbytes(layer.head_dim, dtype)
    if row % ROW_GRANULE:
        raise ConfigError(
            f"{owner}: layer {index} has rows of {row} bytes (head_dim {layer.head_dim} in {dtype}); "
            f"expected a multiple of {ROW_GRANULE} bytes."
        )


@dataclass(frozen=True, kw_only=True)
class KVCacheConfig:
    """K/V cache with a head configuration per layer.

    Parameters
    ----------
    layers : sequence of KVLayerConfig
        One per attention layer, kept as a tuple.
    max_batch_size : int
        Slots, B.
    max_sequence_length : int
        Tokens that a slot can hold, S.
    dtype : str
        ``"float16"``, ``"bfloat16"``, ``"float32"``, or quantized ``"float8_e4m3fn"`` (or ``"fp8"``, which becomes it), ``"int8"``.
    scales : str, optional
        Of a quantized dtype: ``"tensor"``, one static scale for K and one for V of a layer; ``"head"``, one for each head of both; or
        ``"token"``, one for each token and head, which is written with the row and stored beside it. By default what the layers have.
    layout : KVLayout
        COMBINED makes each layer ``[B, 2, H, S, D]``, SEPARATE ``[2, B, H, S, D]``.

    Raises
    ------
    ConfigError
        A field is out of range, or a row (``head_dim`` times the item size) is not a multiple of 16 bytes.

    Notes
    -----
    ``KVCacheManager::Config`` of seed 000.

    Examples
    --------
    >>> from trt_kvcache import KVCacheConfig, KVLayerConfig
    >>> layers = [KVLayerConfig(num_kv_heads=2, head_dim=64), KVLayerConfig(num_kv_heads=1, head_dim=128)]
    >>> config = KVCacheConfig(layers=layers, max_batch_size=4, max_sequence_length=256, dtype="float16")
    >>> config.is_uniform, config.nbytes
    (False, 1048576)
    """

    layers: Sequence[KVLayerConfig]
    max_batch_size: int
    max_sequence_length: int
    dtype: str = "float16"
    layout: KVLayout = KVLayout.SEPARATE
    scales: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.layers, KVLayerConfig | str | bytes):
            raise ConfigError(f"KVCacheConfig.layers: expected a sequence of KVLayerConfig, got {type(self.layers).__name__}.")
        try:
            layers = tuple(islice(iter(self.layers), MAX_LAYERS + 1))
        except TypeError:
            raise ConfigError(f"KVCacheConfig.layers: expected a sequence of KVLayerConfig, got {short_repr(self.layers)}.") from None
        object.__setattr__(self, "layers", layers)
        if not layers:
            raise ConfigError("KVCacheConfig.layers: expected at least one layer, got none.")
        if len(layers) > MAX_LAYERS:
            raise ConfigError(f"KVCacheConfig.layers: expected at most {MAX_LAYERS} layers, got more.")
        _check_common(self)
        for index, layer in enumerate(layers):
            if not isinstance(layer, KVLayerConfig):
                raise ConfigError(f"KVCacheConfig.layers[{index}]: expected a KVLayerConfig, got {type(layer).__name__}.")
            _check_row("KVCacheConfig", index, layer, self.dtype)
        object.__setattr__(self, "scales", check_scales("KVCacheConfig", self.scales, self.dtype, layers))

    @property
    def num_layers(self) -> int:
        """Attention layers, L."""
        return len(self.layers)

    @property
    def is_uniform(self) -> bool:
        """Whether all layers have the same ``num_kv_heads`` and ``head_dim``."""
        return len({(layer.num_kv_heads, layer.head_dim) for layer in self.layers}) == 1

    @cached_property
    def storages(self) -> tuple[KVLayerStorage, ...]:
        """Where each layer's K and V lie inside its allocation."""
        return tuple(
            kv_layer_storage(
                max_batch_size=self.max_batch_size,
                num_kv_heads=layer.num_kv_heads,
                max_sequence_length=self.max_sequence_length,
                head_dim=layer.head_dim,
                dtype=self.dtype,
                layout=self.layout,
            )
            for layer in self.layers
        )

    @property
    def has_scales(self) -> bool:
        """Whether K and V are quantized, with scales."""
        return self.dtype in SCALED_KV_DTYPES

    @property
    def scales_by_token(self) -> bool:
        """Whether each token has its own scales, which are part of what a slot holds."""
        return self.scales == "token"

    @cached_property
    def scale_storages(self) -> tuple[KVLayerStorage, ...]:
        """Where the scales by token of each layer lie inside its part of their allocation, as rows of four; empty without them.

        They lie as K and V do, in heads of S rounded up to a multiple of 4.
        """
        if not self.scales_by_token:
            return ()
        return tuple(
            kv_layer_storage(
                max_batch_size=self.max_batch_size,
                num_kv_heads=layer.num_kv_heads,
                max_sequence_length=-(-self.max_sequence_length // SCALES_GRANULE),
                head_dim=SCALES_GRANULE,
                dtype="float32",
                layout=self.layout,
            )
            for layer in self.layers
        )

    @property
    def layer_scales_nbytes(self) -> tuple[int, ...]:
        """Bytes of the float32 scales of each layer as allocated: static ``[2, H]``, or by token; empty without scales."""
        if self.scales_by_token:
            return tuple(storage.nbytes for storage in self.scale_storages)
        return tuple(align_up(dense_nbytes((2, layer.num_kv_heads), "float32")) for layer in self.layers) if self.has_scales else ()

    @property
    def scales_nbytes(self) -> int:
        """Bytes of all scales as allocated; 0 without scales."""
        return sum(self.layer_scales_nbytes)

    @property
    def nbytes(self) -> int:
        """K/V bytes as allocated: padding and scales included. Known before anything is allocated."""
        return sum(storage.nbytes for storage in self.storages) + self.scales_nbytes

    @property
    def kv(self) -> KVCacheConfig:
        """The attention layers: this configuration."""
        return self

    @property
    def mamba(self) -> None:
        """The recurrent layers: there are none."""
        return None

    def with_max_batch_size(self, max_batch_size: int) -> KVCacheConfig:
        """Return this configuration with another number of slots.

        Parameters
        ----------
        max_batch_size : int
            Slots, B.
        """
        return replace(self, max_batch_size=max_batch_size)

    def with_max_sequence_length(self, max_sequence_length: int) -> KVCacheConfig:
        """Return this configuration with slots of another number of tokens.

        Parameters
        ----------
        max_sequence_length : int
            Tokens that a slot can hold, S.
        """
        return replace(self, max_sequence_length=max_sequence_length)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values that :meth:`from_dict` reads back."""
        return {**asdict(self), "layers": [asdict(layer) for layer in self.layers], "layout": self.layout.value}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> KVCacheConfig:
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
        return config_from_dict(cls, data, layers=lambda layers: tuple(KVLayerConfig(**layer) for layer in layers), layout=KVLayout)


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """K/V cache of equal layers in one buffer, with the states of recurrent layers if there are any.

    Parameters
    ----------
    num_attention_layers : int
        Attention layers, L.
    max_batch_size : int
        Slots, B.
    max_sequence_length : int
        Tokens that a slot can hold, S.
    num_kv_heads, head_dim : int
        Key-value heads, H, and elements of one K or V row, D, of every layer.
    dtype : str
        Of K and V, as in :class:`KVCacheConfig`.
    layout : KVLayout
        COMBINED makes the buffer ``[L, B, 2, H, S, D]``, SEPARATE ``[L, 2, B, H, S, D]``.
    k_scale, v_scale : float, or sequence of float (H,)
        As in :class:`KVLayerConfig`, the same for all layers.
    scales : str, optional
        As in :class:`KVCacheConfig`.
    num_mamba_layers : int
        Recurrent layers. The fields below describe their states, and are ignored if there are none.
    mamba_num_heads, mamba_head_dim, ssm_state_size : int
        The recurrent state of a layer is ``[B, mamba_num_heads, mamba_head_dim, ssm_state_size]``; all 0 for layers that keep a conv
        state only.
    conv_dim, conv_kernel : int
        The conv state of a layer is ``[B, conv_dim, conv_kernel]``.
    recurrent_dtype, conv_dtype : str
        ``"float16"``, ``"bfloat16"`` or ``"float32"``.
    ping_pong : bool
        As in :class:`~trt_kvcache.cache.mamba_config.MambaCacheConfig`.

    Raises
    ------
    ConfigError
        A field is out of range, or a row is not a multiple of 16 bytes.

    Notes
    -----
    ``LinearKVCache::CacheConfig`` of seed 001.

    Examples
    --------
    >>> from trt_kvcache import CacheConfig
    >>> config = CacheConfig(num_attention_layers=2, max_batch_size=4, max_sequence_length=256, num_kv_heads=2, head_dim=64)
    >>> config.kv.num_layers, config.mamba, config.nbytes
    (2, None, 1048576)
    """

    num_attention_layers: int
    max_batch_size: int
    max_sequence_length: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "float16"
    layout: KVLayout = KVLayout.SEPARATE
    k_scale: float | Sequence[float] = 1.0
    v_scale: float | Sequence[float] = 1.0
    scales: str | None = None
    num_mamba_layers: int = 0
    mamba_num_heads: int = 0
    mamba_head_dim: int = 0
    ssm_state_size: int = 0
    conv_dim: int = 0
    conv_kernel: int = 0
    recurrent_dtype: str = "float32"
    conv_dtype: str = "float16"
    ping_pong: bool = False

    def __post_init__(self) -> None:
        number = int_in_range("CacheConfig.num_attention_layers", self.num_attention_layers, 1, MAX_LAYERS, error=ConfigError)
        object.__setattr__(self, "num_attention_layers", number)
        _check_common(self)
        layer = self._layer
        _check_row("CacheConfig", 0, layer, self.dtype)
        for name in ("k_scale", "v_scale"):
            object.__setattr__(self, name, getattr(layer, name))
        object.__setattr__(self, "scales", check_scales("CacheConfig", self.scales, self.dtype, [layer]))
        number = int_in_range("CacheConfig.num_mamba_layers", self.num_mamba_layers, 0, MAX_LAYERS, error=ConfigError)
        object.__setattr__(self, "num_mamba_layers", number)
        _ = self.mamba  # whose own fields are checked when it is made

    @property
    def _layer(self) -> KVLayerConfig:
        return KVLayerConfig(num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, k_scale=self.k_scale, v_scale=self.v_scale)

    @cached_property
    def kv(self) -> KVCacheConfig:
        """The same cache described layer by layer."""
        return KVCacheConfig(
            layers=(self._layer,) * self.num_attention_layers,
            max_batch_size=self.max_batch_size,
            max_sequence_length=self.max_sequence_length,
            dtype=self.dtype,
            layout=self.layout,
            scales=self.scales,
        )

    @cached_property
    def mamba(self) -> MambaCacheConfig | None:
        """The recurrent layers; None without one."""
        if not self.num_mamba_layers:
            return None
        return MambaCacheConfig(
            num_layers=self.num_mamba_layers,
            max_batch_size=self.max_batch_size,
            num_heads=self.mamba_num_heads,
            head_dim=self.mamba_head_dim,
            state_size=self.ssm_state_size,
            conv_dim=self.conv_dim,
            conv_kernel=self.conv_kernel,
            recurrent_dtype=self.recurrent_dtype,
            conv_dtype=self.conv_dtype,
            ping_pong=self.ping_pong,
        )

    @property
    def num_layers(self) -> int:
        """Attention layers, L."""
        return self.num_attention_layers

    def with_max_batch_size(self, max_batch_size: int) -> CacheConfig:
        """Return this configuration with another number of slots.

        Parameters
        ----------
        max_batch_size : int
            Slots, B.
        """
        return replace(self, max_batch_size=max_batch_size)

    def with_max_sequence_length(self, max_sequence_length: int) -> CacheConfig:
        """Return this configuration with slots of another number of tokens.

        Parameters
        ----------
        max_sequence_length : int
            Tokens that a slot can hold, S.
        """
        return replace(self, max_sequence_length=max_sequence_length)

    @property
    def nbytes(self) -> int:
        """Bytes as allocated: K, V and states, padding and scales included."""
        return self.kv.nbytes + (0 if self.mamba is None else self.mamba.nbytes)
