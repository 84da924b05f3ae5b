"""``MambaCacheConfig``: the recurrent and conv states of Mamba layers. Frozen, keyword-only, checked when made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from trt_kvcache._util.checks import int_in_range, one_of
from trt_kvcache._util.serialization import config_from_dict
from trt_kvcache.cache.layout import StateStorage
from trt_kvcache.dtypes import MODEL_DTYPES
from trt_kvcache.errors import ConfigError
from trt_kvcache.memory.shapes import MAX_DIMENSION

#: The largest value of each size, if it has one.
_SIZES = {
    "num_layers": None,
    "max_batch_size": MAX_DIMENSION,
    "num_heads": None,
    "head_dim": None,
    "state_size": None,
    "conv_dim": None,
    "conv_kernel": None,
}
_DTYPES = ("recurrent_dtype", "conv_dtype")


@dataclass(frozen=True, kw_only=True)
class MambaCacheConfig:
    """States of equal recurrent layers.

    ``MambaCacheManager::Config`` of TensorRT Edge-LLM, which seed 003 names. A slot's state may have any size.

    Raises ConfigError: a field is out of range.

    Parameters
    ----------
    num_layers
        Recurrent layers.
    max_batch_size
        Slots, B.
    num_heads, head_dim, state_size
        The recurrent state of a layer is ``[B, num_heads, head_dim, state_size]``.
    conv_dim, conv_kernel
        The conv state of a layer is ``[B, conv_dim, conv_kernel]``.
    recurrent_dtype, conv_dtype
        ``"float16"``, ``"bfloat16"`` or ``"float32"``.
    ping_pong
        Two buffers, of which an enqueue reads one and writes the other: for engines that cannot update states in place, as
        native TensorRT layers cannot. Both count in ``nbytes``.
    """

    num_layers: int
    max_batch_size: int
    num_heads: int
    head_dim: int
    state_size: int
    conv_dim: int
    conv_kernel: int
    recurrent_dtype: str = "float32"
    conv_dtype: str = "float16"
    ping_pong: bool = False

    def __post_init__(self) -> None:
        for name, high in _SIZES.items():
            number = int_in_range(f"MambaCacheConfig.{name}", getattr(self, name), 1, high, error=ConfigError)
            object.__setattr__(self, name, number)
        for name in _DTYPES:
            one_of(f"MambaCacheConfig.{name}", getattr(self, name), MODEL_DTYPES)
        if not isinstance(self.ping_pong, bool):
            raise ConfigError(f"MambaCacheConfig.ping_pong: expected True or False, got {self.ping_pong!r}.")

    @cached_property
    def recurrent_storage(self) -> StateStorage:
        """Where the recurrent states of all layers lie in one buffer."""
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
        return self.num_buffers * (self.recurrent_storage.slot_nbytes + self.conv_storage.slot_nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of all states as allocated: padding and both buffers of ``ping_pong`` included."""
        return self.num_buffers * (self.recurrent_storage.nbytes + self.conv_storage.nbytes)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values that :meth:`from_dict` reads back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> MambaCacheConfig:
        """Read what :meth:`to_dict` wrote. Raises :class:`ConfigError` for a missing, unknown or wrong field."""
        return config_from_dict(cls, data)
