"""Configurations of caches: frozen, keyword-only, checked when made. Each satisfies :class:`DecoderCacheConfig`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from functools import cached_property
from itertools import count, islice
from typing import TYPE_CHECKING, Any, Protocol

from trt_kvcache._util.checks import int_in_range, one_of
from trt_kvcache._util.serialization import config_from_dict
from trt_kvcache._util.short_repr import short_repr
from trt_kvcache.cache.kv_layer_config import KVLayerConfig, check_scales
from trt_kvcache.cache.layout import KVLayerStorage, KVLayout, StateStorage, kv_layer_storage
from trt_kvcache.dtypes import KV_DTYPES, MODEL_DTYPES, SCALED_KV_DTYPES, dtype_in_full
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

if TYPE_CHECKING:
    from typing_extensions import Self


class LayerType(Enum):
    """Type of a decoder layer, by its memory between enqueues: ``HybridCacheManager::LayerType`` of TensorRT Edge-LLM."""

    #: Keys and values.
    ATTENTION = "attention"
    #: A recurrent state and a conv state; a short convolution has the latter only.
    MAMBA = "mamba"


class DecoderCacheConfig(Protocol):
    """Layers and sizes of a cache: the members that all configurations of this module have.

    Attributes
    ----------
    layer_types : tuple of LayerType
        The layers in the order of the decoder. A configuration that does not know this order has attention layers first.
    kv : KVCacheConfig or None
        The attention layers, in their order; None if there are none.
    mamba : MambaCacheConfig or None
        The recurrent layers, in their order; None if there are none.
    max_batch_size : int
        Slots, B.
    max_sequence_length : int
        Tokens that a slot can hold, S.
    dtype : str
        The dtype of K and V, without attention layers the one of the conv states.
    nbytes : int
        Bytes of K, V, scales and states as allocated, padding included.
    """

    @property
    def layer_types(self) -> tuple[LayerType, ...]:
        """The layers in the order of the decoder."""

    @property
    def kv(self) -> KVCacheConfig | None:
        """The attention layers; None if there are none."""

    @property
    def mamba(self) -> MambaCacheConfig | None:
        """The recurrent layers; None if there are none."""

    @property
    def max_batch_size(self) -> int:
        """Slots, B."""

    @property
    def max_sequence_length(self) -> int:
        """Tokens that a slot can hold, S."""

    @property
    def dtype(self) -> str:
        """The dtype of K and V, without attention layers the one of the conv states."""

    @property
    def nbytes(self) -> int:
        """Bytes as allocated."""

    def with_max_batch_size(self, max_batch_size: int) -> Self:
        """Return this configuration with another number of slots.

        Parameters
        ----------
        max_batch_size : int
            Slots, B.
        """

    def with_max_sequence_length(self, max_sequence_length: int) -> Self:
        """Return this configuration with slots of another number of tokens.

        Parameters
        ----------
        max_sequence_length : int
            Tokens that a slot can hold, S.
        """

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, as ``from_dict`` of the class reads them."""


@dataclass(frozen=True, kw_only=True)
class _Resizable:
    """A configuration with fields ``max_batch_size`` and ``max_sequence_length``."""

    def with_max_batch_size(self, max_batch_size: int) -> Self:
        """Return this configuration with another number of slots.

        Parameters
        ----------
        max_batch_size : int
            Slots, B.
        """
        return replace(self, **{"max_batch_size": max_batch_size})

    def with_max_sequence_length(self, max_sequence_length: int) -> Self:
        """Return this configuration with slots of another number of tokens. The bytes of states do not depend on it.

        Parameters
        ----------
        max_sequence_length : int
            Tokens that a slot can hold, S.
        """
        return replace(self, **{"max_sequence_length": max_sequence_length})


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
class KVCacheConfig(_Resizable):
    """K and V of attention layers, each with its own heads.

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
        Granularity of the scales of a quantized dtype: ``"tensor"``, one static scale for K and one for V of a layer; ``"head"``, one for
        each head of both; or ``"token"``, one for each token and head, which is written with the row and stored next to it. By default
        ``"head"`` if a layer has a scale for each head, else ``"tensor"``.
    layout : KVLayout
        COMBINED makes each layer ``[B, 2, H, S, D]``, SEPARATE ``[2, B, H, S, D]``.

    Raises
    ------
    ConfigError
        A field is out of range, or a row (``head_dim`` times the item size) is not a multiple of 16 bytes.

    Notes
    -----
    ``KVCacheManager::Config`` of TensorRT Edge-LLM.

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
    def layer_types(self) -> tuple[LayerType, ...]:
        """All layers are attention."""
        return (LayerType.ATTENTION,) * self.num_layers

    @property
    def is_uniform(self) -> bool:
        """True if all layers have the same ``num_kv_heads`` and ``head_dim``."""
        return len({(layer.num_kv_heads, layer.head_dim) for layer in self.layers}) == 1

    @cached_property
    def storages(self) -> tuple[KVLayerStorage, ...]:
        """Shapes and strides of K and V of each layer, inside its bytes."""
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
        """True if K and V are quantized."""
        return self.dtype in SCALED_KV_DTYPES

    @property
    def scales_by_token(self) -> bool:
        """True if each head of a token has its own scales, which a slot holds next to K and V."""
        return self.scales == "token"

    @cached_property
    def scale_storages(self) -> tuple[KVLayerStorage, ...]:
        """Shapes and strides of the scales by token of each layer, as rows of four tokens; empty without such scales.

        Slots, K and V, and heads are in the order of the layout. A head has S scales, rounded up to a multiple of 4.
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
        """Bytes of K and V as allocated: padding and scales included. Known before anything is allocated."""
        return sum(storage.nbytes for storage in self.storages) + self.scales_nbytes

    @property
    def kv(self) -> KVCacheConfig:
        """The configuration itself."""
        return self

    @property
    def mamba(self) -> None:
        """None: there are no recurrent layers."""
        return None

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


#: The sizes, with the largest value of each.
_SIZES = {
    "num_layers": MAX_LAYERS,
    "max_batch_size": MAX_BATCH_SIZE,
    "num_heads": MAX_DIMENSION,
    "head_dim": MAX_DIMENSION,
    "state_size": MAX_DIMENSION,
    "conv_dim": MAX_DIMENSION,
    "conv_kernel": MAX_DIMENSION,
    "max_sequence_length": MAX_DIMENSION,
}
_DTYPES = ("recurrent_dtype", "conv_dtype")

#: The sizes of a recurrent state: all 0 in layers that have none.
_RECURRENT_SIZES = ("num_heads", "head_dim", "state_size")


@dataclass(frozen=True, kw_only=True)
class MambaCacheConfig(_Resizable):
    """States of equal recurrent layers: for each a recurrent state and a conv state, or a conv state only.

    Parameters
    ----------
    num_layers : int
        Recurrent layers.
    max_batch_size : int
        Slots, B.
    num_heads, head_dim, state_size : int
        The recurrent state of a layer is ``[B, num_heads, head_dim, state_size]``. It may have any size. All three are 0, the default, for
        layers that keep a conv state only, such as the short convolutions of LFM2.
    conv_dim, conv_kernel : int
        The conv state of a layer is ``[B, conv_dim, conv_kernel]``. It may have any size.
    recurrent_dtype, conv_dtype : str
        ``"float16"``, ``"bfloat16"`` or ``"float32"``.
    ping_pong : bool
        Two buffers: an enqueue reads one and writes the other. Native TensorRT layers need this, because they cannot update states
        in place. Both count in ``nbytes``.
    max_sequence_length : int
        Tokens that a slot can hold, S. States do not depend on it: by default it is the largest int32. With attention layers it is at
        least their ``max_sequence_length``.

    Raises
    ------
    ConfigError
        A field is out of range.

    Notes
    -----
    ``MambaCacheManager::Config`` of TensorRT Edge-LLM.

    Examples
    --------
    >>> from trt_kvcache import MambaCacheConfig
    >>> config = MambaCacheConfig(num_layers=2, max_batch_size=4, num_heads=8, head_dim=16, state_size=32, conv_dim=64, conv_kernel=4)
    >>> config.nbytes, config.slot_nbytes
    (135168, 33792)
    >>> convolutions = MambaCacheConfig(num_layers=2, max_batch_size=4, conv_dim=64, conv_kernel=3)
    >>> convolutions.recurrent_storage is None, convolutions.nbytes
    (True, 3072)
    """

    num_layers: int
    max_batch_size: int
    num_heads: int = 0
    head_dim: int = 0
    state_size: int = 0
    conv_dim: int
    conv_kernel: int
    recurrent_dtype: str = "float32"
    conv_dtype: str = "float16"
    ping_pong: bool = False
    max_sequence_length: int = MAX_DIMENSION

    def __post_init__(self) -> None:
        has_recurrent_state = any(getattr(self, name) != 0 for name in _RECURRENT_SIZES)
        for name, high in _SIZES.items():
            low = 0 if name in _RECURRENT_SIZES and not has_recurrent_state else 1
            number = int_in_range(f"MambaCacheConfig.{name}", getattr(self, name), low, high, error=ConfigError)
            object.__setattr__(self, name, number)
        for name in _DTYPES:
            object.__setattr__(self, name, dtype_in_full(getattr(self, name)))
            one_of(f"MambaCacheConfig.{name}", getattr(self, name), MODEL_DTYPES)
        if not isinstance(self.ping_pong, bool):
            raise ConfigError(f"MambaCacheConfig.ping_pong: expected True or False, got {self.ping_pong!r}.")

    @cached_property
    def recurrent_storage(self) -> StateStorage | None:
        """Shape and size of the recurrent states of all layers; None if the layers keep a conv state only."""
        if not self.num_heads:
            return None
        shape = (self.max_batch_size, self.num_heads, self.head_dim, self.state_size)
        return StateStorage(num_layers=self.num_layers, shape=shape, dtype=self.recurrent_dtype)

    @cached_property
    def conv_storage(self) -> StateStorage:
        """Shape and size of the conv states of all layers."""
        shape = (self.max_batch_size, self.conv_dim, self.conv_kernel)
        return StateStorage(num_layers=self.num_layers, shape=shape, dtype=self.conv_dtype)

    @property
    def layer_types(self) -> tuple[LayerType, ...]:
        """All layers are recurrent."""
        return (LayerType.MAMBA,) * self.num_layers

    @property
    def dtype(self) -> str:
        """The dtype of the conv states, in which an engine computes."""
        return self.conv_dtype

    @property
    def num_buffers(self) -> int:
        """Buffers of each kind: 2 with ``ping_pong``, else 1."""
        return 2 if self.ping_pong else 1

    @property
    def slot_nbytes(self) -> int:
        """Bytes of the states of one slot over all layers, in every buffer, without padding."""
        return self.num_buffers * sum(storage.slot_nbytes for storage in self._storages)

    @property
    def nbytes(self) -> int:
        """Bytes of all states as allocated: padding and both buffers of ``ping_pong`` included."""
        return self.num_buffers * sum(storage.nbytes for storage in self._storages)

    @property
    def _storages(self) -> list[StateStorage]:
        return [storage for storage in (self.recurrent_storage, self.conv_storage) if storage is not None]

    @property
    def kv(self) -> None:
        """None: there are no attention layers."""
        return None

    @property
    def mamba(self) -> MambaCacheConfig:
        """The configuration itself."""
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values that :meth:`from_dict` reads back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> MambaCacheConfig:
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
        return config_from_dict(cls, data)


@dataclass(frozen=True, kw_only=True)
class CacheConfig(_Resizable):
    """K and V of equal attention layers in one buffer, and the states of recurrent layers if there are any.

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
        The dtype of K and V, as in :class:`KVCacheConfig`.
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
        As in :class:`MambaCacheConfig`.

    Raises
    ------
    ConfigError
        A field is out of range, or a row is not a multiple of 16 bytes.

    Notes
    -----
    ``LinearKVCache::CacheConfig`` of TensorRT Edge-LLM.

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
        _ = self.mamba  # its constructor checks the fields of the states

    @property
    def _layer(self) -> KVLayerConfig:
        return KVLayerConfig(num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, k_scale=self.k_scale, v_scale=self.v_scale)

    @cached_property
    def kv(self) -> KVCacheConfig:
        """The attention layers, one by one."""
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

    @property
    def layer_types(self) -> tuple[LayerType, ...]:
        """The attention layers, then the recurrent layers: their order in the decoder is not part of this configuration."""
        return (LayerType.ATTENTION,) * self.num_attention_layers + (LayerType.MAMBA,) * self.num_mamba_layers

    @property
    def nbytes(self) -> int:
        """Bytes as allocated: K, V and states, padding and scales included."""
        return self.kv.nbytes + (0 if self.mamba is None else self.mamba.nbytes)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values that :meth:`from_dict` reads back."""
        return {**asdict(self), "layout": self.layout.value}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CacheConfig:
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
        return config_from_dict(cls, data, layout=KVLayout)


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
        The recurrent layers, in their order. None if there are none.

    Raises
    ------
    ConfigError
        A part is missing or superfluous, its number of layers does not fit ``layer_types``, the batch sizes differ, or ``mamba`` has a
        smaller ``max_sequence_length`` than ``kv``.

    Notes
    -----
    ``HybridCacheManager::Config`` of TensorRT Edge-LLM.

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
    def _first_part(self) -> DecoderCacheConfig:
        part = self.kv or self.mamba
        assert part is not None  # there is a layer, and so the part that describes it
        return part

    @property
    def max_batch_size(self) -> int:
        """Slots, B."""
        return self._first_part.max_batch_size

    @property
    def max_sequence_length(self) -> int:
        """Tokens that a slot can hold, S; with attention layers, the ``max_sequence_length`` of ``kv``."""
        return self._first_part.max_sequence_length

    @property
    def dtype(self) -> str:
        """The dtype of K and V, without attention layers the one of the conv states."""
        return self._first_part.dtype

    @cached_property
    def indices_in_kind(self) -> tuple[int, ...]:
        """For each decoder layer its index among the layers of its type."""
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
