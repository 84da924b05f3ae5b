"""The engine protocol: the methods with which a session runs the steps of a decoder.

:class:`~trt_kvcache.trt.tensorrt_engine.TensorRTEngine`, :class:`~trt_kvcache.trt.segmented_engine.SegmentedEngine`,
:class:`~trt_kvcache.reference.engine.ReferenceEngine` and ``trt_kvcache.torch_engine.TorchEngine`` implement it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from trt_kvcache.memory.base import Memory
    from trt_kvcache.memory.tensor import DeviceTensor


class TensorMode(Enum):
    """Direction of a tensor: read or written by the engine."""

    INPUT = "input"
    OUTPUT = "output"


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One input or output of an engine.

    Parameters
    ----------
    name : str
        Its name in the engine.
    shape : tuple of int
        ``-1`` for sizes that are known at run time only.
    dtype : str
        As in :mod:`trt_kvcache.dtypes`.
    mode : TensorMode
        Input or output.
    alias : str or None
        For an output that shares memory with an input: the name of that input. Both must be bound to the same address.

    Examples
    --------
    A cache that is updated in place, in the words of error messages:

    >>> present = TensorSpec.output("present_k_cache_0", (-1, 2, 256, 64), "float16", alias="k_cache_0")
    >>> print(present.describe())
    output `present_k_cache_0` float16 (-1, 2, 256, 64) sharing memory with `k_cache_0`
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    mode: TensorMode
    alias: str | None = None

    @classmethod
    def input(cls, name: str, shape: tuple[int, ...], dtype: str) -> TensorSpec:
        """Return the specification of an input.

        Parameters
        ----------
        name : str
            Its name in the engine.
        shape : tuple of int
            ``-1`` for sizes that are known at run time only.
        dtype : str
            As in :mod:`trt_kvcache.dtypes`.

        Returns
        -------
        TensorSpec
            Its mode is ``TensorMode.INPUT``, and it shares memory with no other tensor.
        """
        return cls(name=name, shape=shape, dtype=dtype, mode=TensorMode.INPUT)

    @classmethod
    def output(cls, name: str, shape: tuple[int, ...], dtype: str, *, alias: str | None = None) -> TensorSpec:
        """Return the specification of an output.

        Parameters
        ----------
        name : str
            Its name in the engine.
        shape : tuple of int
            ``-1`` for sizes that are known at run time only.
        dtype : str
            As in :mod:`trt_kvcache.dtypes`.
        alias : str, optional
            The input whose memory it shares.

        Returns
        -------
        TensorSpec
            Its mode is ``TensorMode.OUTPUT``.
        """
        return cls(name=name, shape=shape, dtype=dtype, mode=TensorMode.OUTPUT, alias=alias)

    def describe(self) -> str:
        """Return the tensor in words, for messages."""
        alias = f" sharing memory with `{self.alias}`" if self.alias else ""
        return f"{self.mode.value} `{self.name}` {self.dtype} {self.shape}{alias}"


@dataclass(frozen=True, kw_only=True)
class EngineProfile:
    """One optimisation profile: the input shapes that an engine accepts together.

    Parameters
    ----------
    name : str
        ``"prefill"``, ``"decode"`` or ``"verify"`` for engines of this package.
    min_batch, max_batch : int
        Fewest and most slots in one enqueue.
    min_width, max_width : int
        Fewest and most new tokens per slot in one enqueue, padding included.
    max_logits : int
        Most new tokens per slot whose logits one enqueue returns; 1 is the fewest.

    Examples
    --------
    >>> decode = EngineProfile(name="decode", min_batch=1, max_batch=8, min_width=1, max_width=1)
    >>> decode.accepts(batch=8, width=1), decode.accepts(batch=1, width=5)
    (True, False)
    """

    name: str
    min_batch: int
    max_batch: int
    min_width: int
    max_width: int
    max_logits: int = 1

    def accepts(self, batch: int, width: int, logits: int = 1) -> bool:
        """Return whether an enqueue fits the profile.

        Parameters
        ----------
        batch : int
            Slots.
        width : int
            New tokens per slot, padding included.
        logits : int
            Number of new tokens per slot whose logits are wanted.

        Returns
        -------
        bool
            True if all are from the profile's minimum to its maximum.
        """
        return self.min_batch <= batch <= self.max_batch and self.min_width <= width <= self.max_width and 1 <= logits <= self.max_logits


class Engine(Protocol):
    """Runs the steps of a decoder over bound memory. Not thread-safe.

    Addresses and shapes belong to an optimisation profile, and each profile keeps its own (in TensorRT, each has an execution context),
    so that a prefill does not change what a decode step has bound.

    Notes
    -----
    An engine may have three more properties. ``width_buckets`` (sequence of int, ascending) has the widths that a session pads enqueues to,
    so that a new prompt length is no new shape; widths above the last one, and all widths without it, are exact. ``coarse_width_buckets``
    has the few of them for prompts next to requests that decode; without it, or if it is empty, these have all. ``graph_refusals``
    (sequence of str) has the reasons why steps ran without a CUDA graph, for ``session.statistics``.
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
        """Choose the profile that ``bind``, ``set_input_shape`` and ``enqueue`` act on.

        The cost does not depend on the number of layers.

        Parameters
        ----------
        index : int
            Index into :attr:`profiles`.

        Raises
        ------
        BindingError
            There is no such profile.
        """

    def bind(self, name: str, tensor: DeviceTensor) -> None:
        """Bind the address of ``tensor`` in the profile in use, and keep ``tensor`` alive.

        Parameters
        ----------
        name : str
            An input or output of the engine.
        tensor : DeviceTensor
            Contiguous, aligned to 256 bytes, in :attr:`memory`. Only its address is bound: shapes come from :meth:`set_input_shape`.

        Raises
        ------
        BindingError
            There is no such tensor, or it has another dtype or is in another memory.
        LayoutError
            The view is not contiguous, or not aligned to 256 bytes.
        """

    def set_input_shape(self, name: str, shape: Sequence[int]) -> None:
        """Set the shape of an input for the next enqueues of the profile in use.

        Parameters
        ----------
        name : str
            An input of the engine.
        shape : sequence of int
            Its new shape, within the optimisation profile.

        Raises
        ------
        BindingError
            The name is not the name of an input, or the shape is outside the profile.
        """

    def enqueue(self, stream: Any) -> None:
        """Enqueue one step on ``stream`` in the profile in use. Does not wait.

        Parameters
        ----------
        stream : cuda.core.Stream or cuda.core.GraphBuilder
            A stream of :attr:`memory`; for host memory a ``HostStream``.

        Raises
        ------
        EngineError
            The engine failed; the text is what it logged.
        """

    def close(self) -> None:
        """Release everything that the engine holds, what was bound included. Idempotent."""


@runtime_checkable
class StatefulEngine(Engine, Protocol):
    """An engine whose states have two buffers, of which a step reads one and writes the other.

    Each profile keeps two sets of addresses and shapes, so that a step after a step binds nothing.
    """

    def use_bindings(self, index: int) -> None:
        """Choose the set of bindings that ``bind``, ``set_input_shape`` and ``enqueue`` act on, in every profile.

        The cost does not depend on the number of layers.

        Parameters
        ----------
        index : int
            0 or 1.

        Raises
        ------
        BindingError
            There is no such set.
        """
