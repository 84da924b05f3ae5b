"""``HostMemory``: caches in NumPy memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trt_kvcache._util.checks import int_in_range
from trt_kvcache.dtypes import dtype_name, numpy_dtype
from trt_kvcache.errors import CapacityError, DTypeError, PlaceError, ShapeError
from trt_kvcache.memory.base import Array, OwnedBytes, check_copy
from trt_kvcache.memory.shapes import ALIGNMENT
from trt_kvcache.memory.tensor import DeviceTensor

_DLPACK_CPU = 1


class HostStream:
    """The stream of host memory. Host operations are done when they return, so it has nothing to do."""

    def sync(self) -> None:
        """Return at once."""


class HostAllocation(OwnedBytes["HostMemory", Array]):
    """Bytes of one NumPy array."""

    @property
    def ptr(self) -> int:
        """Address of the first byte. Raises :class:`ClosedError` after ``close``."""
        return int(self.storage.ctypes.data)


class HostMemory:
    """Caches in NumPy memory: for a machine without a GPU, for tests, and for swapped-out sequences."""

    device = "cpu"
    is_host = True
    dlpack_device = (_DLPACK_CPU, 0)

    def __init__(self) -> None:
        #: Bytes of all allocations that are not closed.
        self.live_nbytes = 0

    def count_live(self, nbytes: int) -> None:
        """Add to ``live_nbytes``."""
        self.live_nbytes += nbytes

    def create_stream(self) -> HostStream:
        """Return an object that does nothing: host operations are done when they return."""
        return HostStream()

    def check_stream(self, stream: Any) -> None:
        """Raise :class:`PlaceError` if ``stream`` is not a ``HostStream``."""
        if not isinstance(stream, HostStream):
            raise PlaceError(f"stream: expected one made by HostMemory.create_stream(), got {type(stream).__name__}.")

    def is_capturing(self, stream: Any) -> bool:
        """Return False: there are no CUDA graphs on the host."""
        return False

    def synchronize(self, stream: Any) -> None:
        """Return at once."""
        self.check_stream(stream)

    def allocate(self, nbytes: int, *, zeroed: bool = False, stream: Any) -> HostAllocation:
        """See :class:`Memory`."""
        self.check_stream(stream)
        nbytes = int_in_range("nbytes", nbytes, 0)
        try:
            padded = (np.zeros if zeroed else np.empty)(nbytes + ALIGNMENT, dtype=np.uint8)
        except (MemoryError, ValueError):
            raise CapacityError(f"host memory: {nbytes} bytes could not be allocated.") from None
        start = -padded.ctypes.data % ALIGNMENT
        self.count_live(nbytes)
        return HostAllocation(self, padded[start:][:nbytes], nbytes)  # an empty slice with both ends loses its place

    def staging(self, shape: Sequence[int], dtype: str) -> Array:
        """Return a zeroed NumPy array."""
        return np.zeros(tuple(shape), numpy_dtype(dtype))

    def to_device(self, array: Any, *, stream: Any) -> DeviceTensor:
        """See :class:`Memory`."""
        source = np.ascontiguousarray(array)
        tensor = DeviceTensor(self.allocate(source.nbytes, stream=stream), shape=np.shape(array), dtype=dtype_name(source.dtype))
        self.array(tensor)[...] = array
        return tensor

    def upload(self, destination: DeviceTensor, source: Array, *, stream: Any) -> None:
        """See :class:`Memory`."""
        self.check_stream(stream)
        check_copy("upload", destination, source, self)
        self.array(destination)[...] = source

    def download(self, destination: Array, source: DeviceTensor, *, stream: Any) -> None:
        """See :class:`Memory`."""
        self.check_stream(stream)
        check_copy("download", source, destination, self)
        destination[...] = self.array(source)

    def zero(self, tensor: DeviceTensor, *, stream: Any) -> None:
        """See :class:`Memory`."""
        self.check_stream(stream)
        if tensor.memory is not self:
            raise PlaceError(f"zero: expected a tensor of this memory, got one of {tensor.memory.device}.")
        if not tensor.is_contiguous:
            raise ShapeError(f"zero: expected a dense tensor, got {tensor!r}.")
        self.array(tensor)[...] = 0

    def array(self, tensor: DeviceTensor) -> Array:
        """Return the tensor as a NumPy array over the same bytes, writable, of any dtype.

        Raises PlaceError: the tensor is of another memory. ClosedError: its owner is closed.
        """
        allocation = tensor.allocation
        if not isinstance(allocation, HostAllocation):
            raise PlaceError(f"expected a tensor in host memory, got one of {tensor.memory.device}.")
        dtype = numpy_dtype(tensor.dtype)
        strides = None if tensor.is_contiguous else tuple(stride * dtype.itemsize for stride in tensor.strides)
        array: Array = np.ndarray(tensor.shape, dtype, allocation.storage, tensor.offset if tensor.nbytes else 0, strides)
        return array

    def read(self, tensor: DeviceTensor) -> Array:
        """Return a copy of any view."""
        return np.array(self.array(tensor))

    def dlpack(self, tensor: DeviceTensor, **kwargs: Any) -> Any:
        """Return a capsule over the same bytes. Raises :class:`DTypeError` for the dtypes that NumPy does not know."""
        array = self.array(tensor)
        if array.dtype.kind not in "iuf":
            raise DTypeError(f"DLPack from host memory: NumPy does not know {tensor.dtype}. Use .numpy(), which copies.")
        return array.__dlpack__(**kwargs)
