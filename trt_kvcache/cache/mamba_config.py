"""``MambaCacheConfig``: the recurrent and conv states of Mamba layers. Frozen, keyword-only, checked when made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from trt_kvcache._util.checks import int_in_range, one_of
from trt_kvcache._util.serialization import config_from_dict
from trt_kvcache.cache.layout import StateStorage
from trt_kvcache.dtypes import MODEL_DTYPES, dtype_in_full
from trt_kvcache.errors import ConfigError
from trt_kvcache.memory.shapes import MAX_BATCH_SIZE, MAX_DIMENSION, MAX_LAYERS

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
class MambaCacheConfig:
    """States of equal recurrent layers: a recurrent state and a conv state of each, or a conv state only.

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
        Two buffers, of which an enqueue reads one and writes the other: for engines that cannot update states in place, as
        native TensorRT layers cannot. Both count in ``nbytes``.
    max_sequence_length : int
        Tokens that a slot can take, S, of a cache without attention layers; at least as many as those take, if there are any. States do
        not depend on it: by default it is the largest int32.

    Raises
    ------
    ConfigError
        A field is out of range.

    Notes
    -----
    ``MambaCacheManager::Config`` of TensorRT Edge-LLM, which seed 003 names.

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
        """Where the recurrent states of all layers lie in one buffer; None if they have none."""
        if not self.num_heads:
            return None
        shape = (self.max_batch_size, self.num_heads, self.head_dim, self.state_size)
        return StateStorage(num_layers=self.num_layers, shape=shape, dtype=self.recurrent_dtype)

    @cached_property
    def conv_storage(self) -> StateStorage:
        """Where the conv states of all layers lie in one buffer."""
        shape = (self.max_batch_size, self.conv_dim, self.conv_kernel)
        return StateStorage(num_layers=self.num_layers, shape=shape, dtype=self.conv_dtype)

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
        """The attention layers: there are none."""
        return None

    @property
    def mamba(self) -> MambaCacheConfig:
        """The recurrent layers: this configuration."""
        return self

    def with_max_batch_size(self, max_batch_size: int) -> MambaCacheConfig:
        """Return this configuration with another number of slots.

        Parameters
        ----------
        max_batch_size : int
            Slots, B.
        """
        return replace(self, max_batch_size=max_batch_size)

    def with_max_sequence_length(self, max_sequence_length: int) -> MambaCacheConfig:
        """Return this configuration with another limit of tokens. It takes as many bytes.

        Parameters
        ----------
        max_sequence_length : int
            Tokens that a slot can take, S.
        """
        return replace(self, max_sequence_length=max_sequence_length)

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
