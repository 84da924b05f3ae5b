"""The engine protocol: what a session needs of anything that runs a decoder step.

:class:`~trt_kvcache.trt.tensorrt_engine.TensorRTEngine` and :class:`~trt_kvcache.reference.engine.ReferenceEngine` implement it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from trt_kvcache.memory.base import Memory
    from trt_kvcache.memory.tensor import DeviceTensor


class TensorMode(Enum):
    """Whether the engine reads or writes a tensor."""

    INPUT = "input"
    OUTPUT = "output"


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One input or output of an engine.

    Parameters
    ----------
    name : str
    shape : tuple of int
        ``-1`` where the size is given at run time.
    dtype : str
        As in :mod:`trt_kvcache.dtypes`.
    mode : TensorMode
    alias : str or None
        Of an output: the input whose memory it shares. Both must be bound to one address.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    mode: TensorMode
    alias: str | None = None

    @classmethod
    def input(cls, name: str, shape: tuple[int, ...], dtype: str) -> TensorSpec:
        """Return an input."""
        return cls(name=name, shape=shape, dtype=dtype, mode=TensorMode.INPUT)

    @classmethod
    def output(cls, name: str, shape: tuple[int, ...], dtype: str, *, alias: str | None = None) -> TensorSpec:
        """Return an output."""
        return cls(name=name, shape=shape, dtype=dtype, mode=TensorMode.OUTPUT, alias=alias)


@dataclass(frozen=True, kw_only=True)
class EngineProfile:
    """One optimisation profile: the input shapes that an engine accepts together.

    Parameters
    ----------
    name : str
        ``"prefill"`` or ``"decode"`` for engines of this package.
    min_batch, max_batch : int
        Slots in one enqueue.
    min_width, max_width : int
        New tokens per slot in one enqueue (the padded width).
    """

    name: str
    min_batch: int
    max_batch: int
    min_width: int
    max_width: int

    def accepts(self, batch: int, width: int) -> bool:
        """Tell whether an enqueue of ``batch`` slots by ``width`` new tokens fits."""
        return self.min_batch <= batch <= self.max_batch and self.min_width <= width <= self.max_width


class Engine(Protocol):
    """Something that runs one decoder step over bound memory.

    Bindings and shapes belong to a profile: each profile keeps its own (TensorRT: one execution context per profile), so
    a prefill in between does not disturb what a decode step has bound. Not thread-safe.
    """

    @property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """Inputs and outputs by name, inputs first, in the engine's order."""

    @property
    def profiles(self) -> Sequence[EngineProfile]:
        """The optimisation profiles, by index."""

    @property
    def memory(self) -> Memory:
        """The memory that bound tensors must be in."""

    def use_profile(self, index: int) -> None:
        """Choose the profile that ``bind``, ``set_input_shape`` and ``enqueue`` act on. Costs nothing per layer."""

    def bind(self, name: str, tensor: DeviceTensor) -> None:
        """Read or write ``name`` at the address of ``tensor``, which the engine keeps alive.

        The address is bound, the shape is not: it comes from ``set_input_shape``. Raises :class:`BindingError` for an
        unknown name, another dtype or memory, and :class:`LayoutError` for a view that is not dense or not aligned to
        256 bytes.
        """

    def set_input_shape(self, name: str, shape: Sequence[int]) -> None:
        """Set the shape of an input for the next enqueues. Raises :class:`BindingError` outside the profile."""

    def enqueue(self, stream: Any) -> None:
        """Run one step on ``stream``. Does not wait. Raises :class:`EngineError` with what the engine logged."""

    def close(self) -> None:
        """Release everything the engine holds; what was bound is let go. Idempotent."""
