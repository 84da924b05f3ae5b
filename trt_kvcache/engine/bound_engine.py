"""``BoundEngine``: the base of all engines of this package, which binds tensors to profiles."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from trt_kvcache._util.lifetime import Uncopyable
from trt_kvcache.engine.protocol import EngineProfile, TensorSpec
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.tensor import DeviceTensor

_Self = TypeVar("_Self", bound="BoundEngine")


class _Bindings(Protocol):
    """Addresses and shapes for each profile and set. Every method raises ClosedError after ``release``."""

    def use_profile(self, index: int) -> None: ...

    def use_bindings(self, index: int) -> None: ...

    def bind(self, name: str, tensor: DeviceTensor) -> None: ...

    def set_input_shape(self, name: str, shape: Sequence[int]) -> None: ...

    def release(self) -> None: ...


class BoundEngine(Uncopyable, ABC):
    """An engine over bindings (implements :class:`trt_kvcache.engine.protocol.StatefulEngine`). A context manager."""

    tensors: Mapping[str, TensorSpec]
    profiles: Sequence[EngineProfile]
    memory: Memory
    #: See :class:`trt_kvcache.engine.protocol.Engine`.
    width_buckets: Sequence[int] = ()
    coarse_width_buckets: Sequence[int] = ()
    _bindings: _Bindings

    def use_profile(self, index: int) -> None:
        """Choose the optimisation profile that ``bind``, ``set_input_shape`` and ``enqueue`` act on.

        Parameters
        ----------
        index : int
            Index into ``profiles``.

        Raises
        ------
        BindingError, RangeError
            There is no such profile. The profile in use stays.
        ClosedError
            The engine is closed.
        """
        self._bindings.use_profile(index)

    def use_bindings(self, index: int) -> None:
        """Choose the set of bindings that ``bind``, ``set_input_shape`` and ``enqueue`` act on, in every profile.

        Parameters
        ----------
        index : int
            0, or 1 for the other of two buffers of states.

        Raises
        ------
        BindingError, RangeError
            There is no such set. The set in use stays.
        ClosedError
            The engine is closed.
        """
        self._bindings.use_bindings(index)

    def bind(self, name: str, tensor: DeviceTensor) -> None:
        """Bind the address of ``tensor`` in the profile and set in use, and keep ``tensor`` alive.

        Parameters
        ----------
        name : str
            An input or output of the engine.
        tensor : DeviceTensor
            Contiguous, aligned to 256 bytes, in the engine's memory. Only its address is bound: shapes come from
            :meth:`set_input_shape`.

        Raises
        ------
        BindingError
            There is no such tensor, or it has another dtype or is in another memory. Nothing was changed.
        LayoutError
            The view is not contiguous, or not aligned to 256 bytes. Nothing was changed.
        EngineError
            TensorRT refuses the address. The tensor is not bound any more.
        ClosedError
            The engine is closed.
        """
        self._bindings.bind(name, tensor)

    def set_input_shape(self, name: str, shape: Sequence[int]) -> None:
        """Set the shape of an input for the next enqueues of the profile in use.

        Parameters
        ----------
        name : str
            An input of the engine. In an engine in segments, the shape of the token ids gives the shapes of the intermediate tensors.
        shape : sequence of int
            Its new shape, within the optimisation profile.

        Raises
        ------
        BindingError
            The name is not the name of an input, or the shape is outside the profile. Nothing was changed.
        EngineError
            TensorRT refuses the shape. In an engine in segments, all shapes of the profile must be set again.
        ClosedError
            The engine is closed.
        """
        self._bindings.set_input_shape(name, shape)

    @abstractmethod
    def enqueue(self, stream: Any) -> None:
        """Enqueue one step on ``stream`` in the profile in use. Does not wait.

        Parameters
        ----------
        stream : cuda.core.Stream or cuda.core.GraphBuilder
            A stream of the engine's memory; for host memory a ``HostStream``.

        Raises
        ------
        EngineError
            The engine failed.
        """

    @abstractmethod
    def close(self) -> None:
        """Release everything that the engine holds, what was bound included. Idempotent."""

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
