"""The bindings of an engine: the address of each tensor and the shape of each input, for each optimisation profile.

Double-buffered states have two sets of bindings, one for each order of the two buffers.

Used by ``TensorRTEngine`` and ``SegmentedEngine``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from trt_kvcache.dtypes import itemsize
from trt_kvcache.engine.bindable import check_bindable
from trt_kvcache.engine.protocol import TensorMode, TensorSpec
from trt_kvcache.errors import BindingError, ClosedError, PlaceError
from trt_kvcache.memory.base import Allocation, Memory
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.trt.tensors import ProfileRanges


class BindingTarget(Protocol):
    """Receiver of addresses and shapes: the execution contexts of one plan, or of all segments.

    There is a context for each profile in each set of bindings: :attr:`ProfileBindings.context`.
    """

    def set_tensor_address(self, context: int, name: str, address: int) -> None:
        """Set the device address of a tensor in one context.

        Parameters
        ----------
        context : int
            Index of the execution context.
        name : str
            An input or output.
        address : int
            Device address.

        Raises
        ------
        EngineError
            TensorRT refuses the address; the text is what it logged.
        """

    def set_input_shape(self, context: int, name: str, shape: tuple[int, ...]) -> None:
        """Set the shape of an input in one context.

        Parameters
        ----------
        context : int
            Index of the execution context.
        name : str
            An input.
        shape : tuple of int
            Its new shape.

        Raises
        ------
        EngineError
            TensorRT refuses the shape; the text is what it logged.
        """

    def tensor_shape(self, context: int, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor in one context.

        Parameters
        ----------
        context : int
            Index of the execution context.
        name : str
            An input or output.

        Returns
        -------
        tuple of int
            ``-1`` for sizes that are not known yet.
        """


class ProfileBindings:
    """Bound tensors of one optimisation profile in one set of bindings, which are kept alive."""

    def __init__(self, profile: int, context: int, ranges: ProfileRanges) -> None:
        self.profile = profile
        self.context = context
        self.ranges = ranges
        self.tensors: dict[str, DeviceTensor] = {}
        self.is_checked = False
        self._allocations: list[Allocation] | None = None

    def set(self, name: str, tensor: DeviceTensor) -> None:
        """Note that a tensor is bound."""
        self.tensors[name] = tensor
        self._allocations = None

    def discard(self, name: str) -> None:
        """Note that a tensor is not bound."""
        self.tensors.pop(name, None)
        self._allocations = None

    def require_open(self) -> None:
        """Check that no bound memory is closed. Allocations are checked once each, whatever the number of layers."""
        if self._allocations is None:
            self._allocations = list({id(tensor.allocation): tensor.allocation for tensor in self.tensors.values()}.values())
        for allocation in self._allocations:
            if allocation.closed:
                name = next(name for name, tensor in self.tensors.items() if tensor.allocation is allocation)
                raise ClosedError(f"`{name}`: the memory that is bound is closed. Bind other memory, or keep its cache open.")


class EngineBindings:
    """Bindings of all optimisation profiles of an engine, with the profile and the set in use."""

    def __init__(
        self,
        owner: str,
        *,
        tensors: Mapping[str, TensorSpec],
        ranges: Sequence[ProfileRanges],
        memory: Memory,
        target: BindingTarget,
        num_sets: int = 1,
    ) -> None:
        self._owner = owner
        self._tensors = tensors
        self._memory = memory
        self._target = target
        self._sets = [
            [ProfileBindings(profile, first * len(ranges) + profile, one) for profile, one in enumerate(ranges)]
            for first in range(num_sets)
        ]
        self._set = 0
        self._active: ProfileBindings | None = self._sets[0][0]

    @property
    def active(self) -> ProfileBindings:
        """Bindings of the profile and set in use; raises ClosedError after :meth:`release`."""
        if self._active is None:
            raise ClosedError(f"this {self._owner} is closed.")
        return self._active

    def use_profile(self, index: int) -> None:
        """See :meth:`trt_kvcache.engine.protocol.Engine.use_profile`."""
        _ = self.active  # raises ClosedError for a closed engine
        profiles = self._sets[self._set]
        if not 0 <= index < len(profiles):
            raise BindingError(f"profile {index}: expected 0 <= index < {len(profiles)}.")
        self._active = profiles[index]

    def use_bindings(self, index: int) -> None:
        """See :meth:`trt_kvcache.engine.protocol.StatefulEngine.use_bindings`."""
        profile = self.active.profile
        if not 0 <= index < len(self._sets):
            raise BindingError(f"bindings {index}: expected 0 <= index < {len(self._sets)}.")
        self._set = index
        self._active = self._sets[index][profile]

    def bind(self, name: str, tensor: DeviceTensor) -> None:
        """See :meth:`trt_kvcache.engine.protocol.Engine.bind`. If TensorRT refuses the address, ``name`` is not bound any more."""
        active = self.active
        check_bindable(self._spec(name), tensor, self._memory)
        active.is_checked = False
        active.discard(name)
        self._target.set_tensor_address(active.context, name, tensor.ptr)
        active.set(name, tensor)

    def set_input_shape(self, name: str, shape: Sequence[int]) -> None:
        """See :meth:`trt_kvcache.engine.protocol.Engine.set_input_shape`."""
        active = self.active
        if self._spec(name).mode is not TensorMode.INPUT:
            raise BindingError(f"`{name}`: expected an input, it is an output; its shape follows from the inputs.")
        active.ranges.check(name, shape)
        active.is_checked = False
        self._target.set_input_shape(active.context, name, tuple(shape))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the current shape of a tensor in the profile and set in use."""
        return self._target.tensor_shape(self.active.context, name)

    def check(self) -> None:
        """Check that all tensors are bound, have shapes and are large enough, and that aliases share their address."""
        active = self.active
        for name, spec in self._tensors.items():
            tensor = active.tensors.get(name)
            if tensor is None:
                raise BindingError(f"`{name}`: it is not bound in this profile.")
            shape = self.shape(name)
            if min(shape, default=0) < 0:
                raise BindingError(f"`{name}`: its shape {shape} is not known. Set the shape of every input of this profile.")
            needed = math.prod(shape) * itemsize(spec.dtype)
            if needed > tensor.nbytes:
                raise BindingError(f"`{name}`: shape {shape} takes {needed} bytes, the bound tensor has {tensor.nbytes}.")
            if spec.alias is not None and active.tensors[spec.alias].ptr != tensor.ptr:
                raise BindingError(f"`{name}`: expected the address of `{spec.alias}`, whose memory it shares.")

    def release(self) -> None:
        """Release what is bound; from now on every method raises ClosedError. Idempotent."""
        self._sets.clear()
        self._active = None

    def _spec(self, name: str) -> TensorSpec:
        spec = self._tensors.get(name)
        if spec is None:
            raise BindingError(f"`{name}`: the engine has no such tensor, it has {', '.join(f'`{known}`' for known in self._tensors)}.")
        return spec


def stream_handle(stream: Any) -> int:
    """Return the ``cudaStream_t`` of a stream as a number."""
    try:
        _, handle = stream.__cuda_stream__()
    except AttributeError:
        raise PlaceError(f"stream: expected a CUDA stream or graph builder, got {type(stream).__name__}.") from None
    return int(handle)
