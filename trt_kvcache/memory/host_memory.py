"""``HostMemory``: caches in NumPy memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trt_kvcache._util.checks import int_in_range
from trt_kvcache._util.lifetime import Uncopyable
from trt_kvcache.dtypes import dlpack_code, dtype_name, numpy_dtype
from trt_kvcache.errors import CapacityError, PlaceError, ShapeError
from trt_kvcache.memory.base import Array, check_copy, check_row_moves
from trt_kvcache.memory.dlpack import dltensor_in
from trt_kvcache.memory.owned_bytes import OwnedBytes
from trt_kvcache.memory.shapes import ALIGNMENT
from trt_kvcache.memory.tensor import DeviceTensor

_DLPACK_CPU = 1


class HostStream:
    """A stream of host memory. It has nothing to do: host operations are done when their call returns."""

    def sync(self) -> None:
        """Return at once."""


class HostAllocation(OwnedBytes["HostMemory", Array]):
    """Bytes of one NumPy array."""

    @property
    def ptr(self) -> int:
        """Address of the first byte. Raises :class:`~trt_kvcache.errors.ClosedError` after ``close``."""
        return int(self.storage.ctypes.data)


class HostMemory(Uncopyable):
    """Caches in NumPy memory, for machines without a GPU and for tests: see :class:`~trt_kvcache.memory.base.Memory`.

    Every operation is done when its call returns.

    Examples
    --------
    >>> import numpy
    >>> from trt_kvcache import HostMemory
    >>> memory = HostMemory()
    >>> stream = memory.create_stream()
    >>> lengths = memory.to_device(numpy.array([3, 1], numpy.int32), stream=stream)
    >>> lengths.numpy()
    array([3, 1], dtype=int32)
    >>> memory.live_nbytes
    8
    """

    device = "cpu"
    is_host = True
    dlpack_device = (_DLPACK_CPU, 0)

    def __init__(self) -> None:
        #: Bytes of all allocations that are not closed.
        self.live_nbytes = 0

    def __repr__(self) -> str:
        return f"HostMemory(live_nbytes={self.live_nbytes})"

    def count_live(self, nbytes: int) -> None:
        """Add to ``live_nbytes``."""
        self.live_nbytes += nbytes

    def create_stream(self) -> HostStream:
        """Return a new stream, which has nothing to do: see :meth:`Memory.create_stream`."""
        return HostStream()

    def check_stream(self, stream: Any) -> None:
        """Check that :meth:`create_stream` made a stream: see :meth:`Memory.check_stream`."""
        if not isinstance(stream, HostStream):
            raise PlaceError(f"stream: expected one made by HostMemory.create_stream(), got {type(stream).__name__}.")

    def is_capturing(self, stream: Any) -> bool:
        """Return False: there are no CUDA graphs on the host."""
        self.check_stream(stream)
        return False

    def synchronize(self, stream: Any) -> None:
        """Return at once: see :meth:`Memory.synchronize`."""
        self.check_stream(stream)

    def allocate(self, nbytes: int, *, zeroed: bool = False, stream: Any) -> HostAllocation:
        """Allocate bytes, aligned to 256: see :meth:`Memory.allocate`."""
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
        """Return a zeroed NumPy array: see :meth:`Memory.staging`."""
        return np.zeros(tuple(shape), numpy_dtype(dtype))

    def to_device(self, array: Any, *, stream: Any) -> DeviceTensor:
        """Copy an array into a new tensor: see :meth:`Memory.to_device`."""
        source = np.ascontiguousarray(array)
        tensor = DeviceTensor(self.allocate(source.nbytes, stream=stream), shape=np.shape(array), dtype=dtype_name(source.dtype))
        self.array(tensor)[...] = array
        return tensor

    def upload(self, destination: DeviceTensor, source: Array, *, stream: Any) -> None:
        """Copy an array into a tensor: see :meth:`Memory.upload`."""
        self.check_stream(stream)
        check_copy("upload", destination, source, self)
        self.array(destination)[...] = source

    def download(self, destination: Array, source: DeviceTensor, *, stream: Any) -> None:
        """Copy a tensor into an array: see :meth:`Memory.download`."""
        self.check_stream(stream)
        check_copy("download", source, destination, self)
        destination[...] = self.array(source)

    def copy_rows(self, destination: DeviceTensor, source: DeviceTensor, moves: Sequence[tuple[int, int, int]], *, stream: Any) -> None:
        """Copy rows between tables: see :meth:`Memory.copy_rows`."""
        self.check_stream(stream)
        check_row_moves(destination, source, moves, self)
        into, out_of = self.array(destination), self.array(source)
        for to, first, count in moves:
            into[to : to + count] = out_of[first : first + count]

    def zero(self, tensor: DeviceTensor, *, stream: Any) -> None:
        """Set the bytes of a tensor to zero: see :meth:`Memory.zero`."""
        self.check_stream(stream)
        if tensor.memory is not self:
            raise PlaceError(f"zero: expected a tensor of this memory, got one of {tensor.memory.device}.")
        if not tensor.is_contiguous:
            raise ShapeError(f"zero: expected a dense tensor, got {tensor!r}.")
        self.array(tensor)[...] = 0

    def array(self, tensor: DeviceTensor) -> Array:
        """Return a tensor as a NumPy array over the same bytes. It is writable, and may be of any dtype.

        Parameters
        ----------
        tensor : DeviceTensor
            Any view of host memory.

        Returns
        -------
        ndarray
            Of the same shape, dtype and strides.

        Raises
        ------
        PlaceError, ClosedError
            The tensor is of another kind of memory, or its owner is closed.
        """
        allocation = tensor.allocation
        if not isinstance(allocation, HostAllocation):
            raise PlaceError(f"expected a tensor in host memory, got one of {tensor.memory.device}.")
        dtype = tensor.numpy_dtype
        strides = None if tensor.is_contiguous else [stride * dtype.itemsize for stride in tensor.strides]
        array: Array = np.ndarray(tensor.shape, dtype, allocation.storage, tensor.offset if tensor.nbytes else 0, strides)
        return array

    def read(self, tensor: DeviceTensor) -> Array:
        """Return a copy of a view: see :meth:`Memory.read`."""
        return np.array(self.array(tensor))

    def dlpack(self, tensor: DeviceTensor, **kwargs: Any) -> Any:
        """Return a DLPack capsule that shares the bytes of a tensor: see :meth:`Memory.dlpack`."""
        array = self.array(tensor)
        # NumPy makes the capsule. It does not know bfloat16 and float8: they are exported as integers, and the dtype is corrected after.
        if array.dtype.kind in "iuf":
            return array.__dlpack__(**kwargs)
        capsule = array.view(f"i{array.itemsize}").__dlpack__(**kwargs)
        dltensor_in(capsule).dtype_code = dlpack_code(tensor.dtype)
        return capsule
