"""``DeviceTensor``: an address with a shape, strides, a dtype and an owner. No arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trt_kvcache._util.checks import as_int
from trt_kvcache.dtypes import itemsize
from trt_kvcache.errors import LayoutError, ShapeError
from trt_kvcache.memory.shapes import dense_nbytes, is_dense, row_major_strides, span_elements

if TYPE_CHECKING:
    import numpy as np

    from trt_kvcache.memory.base import Allocation, Memory


class DeviceTensor:
    """A view of memory that some :class:`~trt_kvcache.memory.base.Allocation` owns.

    The view keeps its owner alive. It is immutable; the bytes it shows are not.

    Raises ShapeError: the view does not fit into the allocation.

    Parameters
    ----------
    allocation
        The owner of the bytes, on the host or on a device.
    shape : sequence of int
    dtype
        A name of :mod:`trt_kvcache.dtypes`.
    strides : sequence of int, optional
        In elements. Dense (row-major) if left out.
    offset
        Bytes from the start of the allocation to the first element.
    """

    __slots__ = ("_allocation", "_dtype", "_is_contiguous", "_offset", "_shape", "_strides")

    def __init__(
        self, allocation: Allocation, *, shape: Sequence[int], dtype: str, strides: Sequence[int] | None = None, offset: int = 0
    ) -> None:
        self._allocation = allocation
        self._shape = tuple(int(size) for size in shape)
        self._strides = row_major_strides(self._shape) if strides is None else tuple(int(stride) for stride in strides)
        self._dtype = dtype
        self._offset = offset
        if len(self._strides) != len(self._shape) or min((*self._shape, *self._strides, offset), default=0) < 0:
            raise ShapeError(f"DeviceTensor: shape {self._shape}, strides {self._strides}, offset {offset} do not describe a view.")
        span = span_elements(self._shape, self._strides) * itemsize(dtype)
        end = offset + span
        if span and end > allocation.nbytes:
            raise ShapeError(f"DeviceTensor: a view of {self._shape} {dtype} ends at byte {end} of an allocation of {allocation.nbytes}.")
        self._is_contiguous = strides is None or is_dense(self._shape, self._strides)

    @property
    def allocation(self) -> Allocation:
        """The owner of the bytes."""
        return self._allocation

    @property
    def memory(self) -> Memory:
        """The memory that the bytes are in."""
        return self._allocation.memory

    @property
    def offset(self) -> int:
        """Bytes from the start of the allocation to the first element."""
        return self._offset

    @property
    def ptr(self) -> int:
        """Address of the first element. Raises :class:`ClosedError` once the owner is closed."""
        return self._allocation.ptr + self._offset

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the dimensions."""
        return self._shape

    @property
    def strides(self) -> tuple[int, ...]:
        """Elements from one index to the next, per dimension."""
        return self._strides

    @property
    def dtype(self) -> str:
        """Name of the dtype, such as ``"float16"``."""
        return self._dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self._shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements: what a dense copy would take."""
        return dense_nbytes(self._shape, self._dtype)

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie one after another. Dimensions of size 1 are ignored."""
        return self._is_contiguous

    def __len__(self) -> int:
        if not self._shape:
            raise TypeError("len() of a DeviceTensor without dimensions")
        return self._shape[0]

    def __getitem__(self, index: slice) -> DeviceTensor:
        """Return the view ``[start:stop]`` along dimension 0. Neither wraps nor clamps: see :class:`ShapeError`."""
        if not isinstance(index, slice) or index.step not in (None, 1):
            raise ShapeError(f"DeviceTensor: expected a slice [start:stop] of dimension 0, got {index!r}.")
        if not self._shape:
            raise ShapeError("DeviceTensor: a tensor without dimensions cannot be sliced.")
        start = 0 if index.start is None else as_int("DeviceTensor slice", index.start, error=ShapeError)
        stop = self._shape[0] if index.stop is None else as_int("DeviceTensor slice", index.stop, error=ShapeError)
        if not 0 <= start <= stop <= self._shape[0]:
            raise ShapeError(f"DeviceTensor: expected 0 <= start <= stop <= {self._shape[0]}, got [{start}:{stop}]. Slices never wrap.")
        return DeviceTensor(
            self._allocation,
            shape=(stop - start, *self._shape[1:]),
            dtype=self._dtype,
            strides=self._strides,
            offset=self._offset + start * self._strides[0] * itemsize(self._dtype),
        )

    def reshape(self, *shape: int) -> DeviceTensor:
        """Return a dense view of the same elements in another shape.

        Raises LayoutError: this view is not dense. ShapeError: the number of elements differs.
        """
        if not self.is_contiguous:
            raise LayoutError(f"DeviceTensor.reshape: a view of shape {self._shape} with strides {self._strides} is not dense.")
        if dense_nbytes(shape, self._dtype) != self.nbytes:
            raise ShapeError(f"DeviceTensor.reshape: {self._shape} has other elements than {shape}.")
        return DeviceTensor(self._allocation, shape=shape, dtype=self._dtype, offset=self._offset)

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return a copy on the host, of any dtype (ml_dtypes for those that NumPy lacks).

        Waits for the work that was given to the device before the call. Raises :class:`ClosedError` once the owner is closed.
        """
        return self.memory.read(self)

    def __dlpack__(self, **kwargs: Any) -> Any:
        """Export without a copy; the consumer keeps the memory alive, past ``close()`` too."""
        return self.memory.dlpack(self, **kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return the DLPack device type and index."""
        return self.memory.dlpack_device

    def __repr__(self) -> str:
        dense = "" if self.is_contiguous else f", strides={self._strides}"
        return f"DeviceTensor({self._shape}, {self._dtype}{dense}, {self.memory.device})"
