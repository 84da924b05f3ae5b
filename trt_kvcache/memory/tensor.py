"""``DeviceTensor``: an address with a shape, strides, a dtype and an owner. No arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from trt_kvcache._util.checks import as_int
from trt_kvcache._util.lifetime import Uncopyable
from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.errors import LayoutError, ShapeError
from trt_kvcache.memory.shapes import dense_nbytes, is_dense, row_major_strides, span_elements

if TYPE_CHECKING:
    import numpy as np

    from trt_kvcache.memory.base import Allocation, Memory


class DeviceTensor(Uncopyable):
    """A view of memory, on the host or on a device, that some :class:`~trt_kvcache.memory.base.Allocation` owns.

    The view keeps its owner alive. It is immutable; the bytes that it shows are not.

    Parameters
    ----------
    allocation : Allocation
        The owner of the bytes.
    shape : sequence of int
        Sizes of the dimensions.
    dtype : str
        A name of :mod:`trt_kvcache.dtypes`, such as ``"float16"``.
    strides : sequence of int, optional
        Elements from one index to the next, per dimension. Without, the view is contiguous (row-major).
    offset : int
        Bytes from the start of the allocation to the first element.

    Raises
    ------
    ShapeError
        The view does not fit into the allocation.
    DTypeError
        The dtype is unknown.

    Examples
    --------
    >>> import numpy
    >>> from trt_kvcache import HostMemory
    >>> memory = HostMemory()
    >>> stream = memory.create_stream()
    >>> tensor = memory.to_device(numpy.arange(6, dtype=numpy.int32).reshape(3, 2), stream=stream)
    >>> tensor, tensor.strides, tensor.nbytes
    (DeviceTensor((3, 2), int32, cpu), (2, 1), 24)
    >>> tensor[1:3].numpy()
    array([[2, 3],
           [4, 5]], dtype=int32)
    >>> numpy.from_dlpack(tensor)[0, 0] = 7  # shares the bytes
    >>> tensor.reshape(6).numpy()
    array([7, 1, 2, 3, 4, 5], dtype=int32)
    """

    # Fields, not properties: kernels and bindings read them for every tensor of a launch.
    __slots__ = {
        "allocation": "The owner of the bytes.",
        "dtype": 'Name of the dtype, such as ``"float16"``.',
        "is_contiguous": "True if the elements are contiguous in row-major order. Dimensions of size 1 are ignored.",
        "memory": "The memory that the bytes are in.",
        "nbytes": "Bytes of the elements, as of a contiguous copy.",
        "ndim": "Number of dimensions.",
        "numpy_dtype": "NumPy dtype of the elements; from ml_dtypes if NumPy has none.",
        "offset": "Bytes from the start of the allocation to the first element.",
        "shape": "Sizes of the dimensions.",
        "strides": "Elements from one index to the next, per dimension.",
    }

    allocation: Allocation
    memory: Memory
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    numpy_dtype: np.dtype[Any]
    ndim: int
    nbytes: int
    is_contiguous: bool

    def __init__(
        self, allocation: Allocation, *, shape: Sequence[int], dtype: str, strides: Sequence[int] | None = None, offset: int = 0
    ) -> None:
        shape = tuple(int(size) for size in shape)
        elements = row_major_strides(shape) if strides is None else tuple(int(stride) for stride in strides)
        if len(elements) != len(shape) or min((*shape, *elements, offset), default=0) < 0:
            raise ShapeError(f"DeviceTensor: shape {shape}, strides {elements}, offset {offset} do not describe a view.")
        element_dtype = numpy_dtype(dtype)
        span = span_elements(shape, elements) * element_dtype.itemsize
        end = offset + span
        if span and end > allocation.nbytes:
            raise ShapeError(f"DeviceTensor: a view of {shape} {dtype} ends at byte {end} of an allocation of {allocation.nbytes}.")
        fields = (
            ("allocation", allocation),
            ("memory", allocation.memory),
            ("offset", offset),
            ("shape", shape),
            ("strides", elements),
            ("dtype", dtype),
            ("numpy_dtype", element_dtype),
            ("ndim", len(shape)),
            ("nbytes", dense_nbytes(shape, dtype)),
            ("is_contiguous", strides is None or is_dense(shape, elements)),
        )
        for name, value in fields:
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"a DeviceTensor is immutable; `{name}` cannot be set.")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a DeviceTensor is immutable; `{name}` cannot be deleted.")

    def __copy__(self) -> DeviceTensor:  # type: ignore[override]
        return self  # it is immutable

    @property
    def ptr(self) -> int:
        """Address of the first element. Raises :class:`~trt_kvcache.errors.ClosedError` once the owner is closed."""
        return self.allocation.ptr + self.offset

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a DeviceTensor without dimensions")
        return self.shape[0]

    def __getitem__(self, index: slice) -> DeviceTensor:
        """Return the view ``[start:stop]`` along dimension 0."""
        if not isinstance(index, slice) or index.step not in (None, 1):
            raise ShapeError(f"DeviceTensor: expected a slice [start:stop] of dimension 0, got {index!r}.")
        if not self.shape:
            raise ShapeError("DeviceTensor: a tensor without dimensions cannot be sliced.")
        start = 0 if index.start is None else as_int("DeviceTensor slice", index.start, error=ShapeError)
        stop = self.shape[0] if index.stop is None else as_int("DeviceTensor slice", index.stop, error=ShapeError)
        if not 0 <= start <= stop <= self.shape[0]:
            raise ShapeError(f"DeviceTensor: expected 0 <= start <= stop <= {self.shape[0]}, got [{start}:{stop}]. Slices never wrap.")
        return DeviceTensor(
            self.allocation,
            shape=(stop - start, *self.shape[1:]),
            dtype=self.dtype,
            strides=self.strides,
            offset=self.offset + start * self.strides[0] * self.numpy_dtype.itemsize,
        )

    def reshape(self, *shape: int) -> DeviceTensor:
        """Return a contiguous view of the same elements in another shape.

        Parameters
        ----------
        *shape : int
            The new sizes, none of them -1.

        Raises
        ------
        LayoutError
            This view is not contiguous.
        ShapeError
            The number of elements differs.
        """
        if not self.is_contiguous:
            raise LayoutError(f"DeviceTensor.reshape: a view of shape {self.shape} with strides {self.strides} is not dense.")
        if dense_nbytes(shape, self.dtype) != self.nbytes:
            raise ShapeError(f"DeviceTensor.reshape: expected a shape with as many elements as {self.shape}, got {shape}.")
        return DeviceTensor(self.allocation, shape=shape, dtype=self.dtype, offset=self.offset)

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return a copy on the host. Waits for the work that was given to the device before the call.

        Returns
        -------
        ndarray
            Of any dtype, with ml_dtypes for those that NumPy lacks.

        Raises
        ------
        ClosedError
            The owner is closed.
        """
        return self.memory.read(self)

    def __dlpack__(self, **kwargs: Any) -> Any:
        """Return a DLPack capsule over the same bytes. The consumer keeps the memory alive, even after ``close()``."""
        return self.memory.dlpack(self, **kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return the DLPack device type and index."""
        return self.memory.dlpack_device

    def __repr__(self) -> str:
        strides = "" if self.is_contiguous else f", strides={self.strides}"
        return f"DeviceTensor({self.shape}, {self.dtype}{strides}, {self.memory.device})"
