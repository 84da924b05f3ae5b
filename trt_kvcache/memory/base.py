"""The ``Memory`` protocol, which ``HostMemory`` and ``CudaMemory`` follow. All higher layers are independent of the kind of memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from trt_kvcache._util.short_repr import short_repr
from trt_kvcache.errors import DTypeError, PlaceError, RangeError, ShapeError
from trt_kvcache.memory.tensor import DeviceTensor

#: A NumPy array of any shape and dtype.
Array = np.ndarray[Any, Any]


class Allocation(Protocol):
    """Bytes that were allocated once and never move. Aligned to 256 bytes."""

    @property
    def memory(self) -> Memory:
        """The memory that made it."""

    @property
    def ptr(self) -> int:
        """Address of the first byte.

        Raises
        ------
        ClosedError
            The allocation is closed.
        """

    @property
    def nbytes(self) -> int:
        """Size in bytes, as requested."""

    @property
    def closed(self) -> bool:
        """True after ``close``."""

    def close(self) -> None:
        """Release the bytes: they are freed when the last DLPack consumer is gone too. Closing again does nothing."""


class Memory(Protocol):
    """Memory of the host or of a GPU: it allocates, copies, and makes streams.

    Code over this type runs unchanged on :class:`~trt_kvcache.memory.host_memory.HostMemory` and on
    :class:`~trt_kvcache.memory.cuda_memory.CudaMemory`.

    Notes
    -----
    Copies and writes are stream-ordered and do not wait, unless they say so. In host memory every operation is done when its call
    returns; ``stream`` is mandatory there too.

    Examples
    --------
    >>> import numpy
    >>> from trt_kvcache import DeviceTensor, HostMemory, Memory
    >>> def ones(memory: Memory, count: int) -> DeviceTensor:
    ...     stream = memory.create_stream()
    ...     tensor = memory.to_device(numpy.ones(count, numpy.float32), stream=stream)
    ...     memory.synchronize(stream)
    ...     return tensor
    >>> ones(HostMemory(), 3).numpy()
    array([1., 1., 1.], dtype=float32)
    """

    @property
    def device(self) -> str:
        """``"cpu"`` or ``"cuda:0"``."""

    @property
    def is_host(self) -> bool:
        """True if NumPy can read the memory in place."""

    @property
    def dlpack_device(self) -> tuple[int, int]:
        """DLPack device type and index."""

    @property
    def live_nbytes(self) -> int:
        """Bytes of all allocations that are not closed."""

    def create_stream(self) -> Any:
        """Return a new stream of this memory.

        Returns
        -------
        cuda.core.Stream or HostStream
            A HostStream has nothing to do.
        """

    def check_stream(self, stream: Any) -> None:
        """Check that a stream belongs to this memory.

        Parameters
        ----------
        stream : object
            Argument of a caller.

        Raises
        ------
        PlaceError
            It is not an open ``Stream`` or ``GraphBuilder`` of this device; in host memory, not a stream of ``create_stream``.
        """

    def is_capturing(self, stream: Any) -> bool:
        """Return True if the work on a stream is captured in a CUDA graph instead of run.

        Parameters
        ----------
        stream : cuda.core.Stream or GraphBuilder, or HostStream
            The stream.

        Returns
        -------
        bool
            Always False in host memory.

        Raises
        ------
        PlaceError
            The stream is not one of this memory.
        """

    def synchronize(self, stream: Any) -> None:
        """Wait until everything that was ordered on a stream is done.

        Parameters
        ----------
        stream : cuda.core.Stream or HostStream
            The stream.

        Raises
        ------
        PlaceError
            The stream is not one of this memory.
        CudaError
            Some of that work failed.
        """

    def allocate(self, nbytes: int, *, zeroed: bool = False, stream: Any) -> Allocation:
        """Allocate bytes, aligned to 256.

        Parameters
        ----------
        nbytes : int
            Bytes, 0 or more.
        zeroed : bool
            True to set them to zero.
        stream : cuda.core.Stream, or HostStream
            The allocation is ordered on it.

        Returns
        -------
        Allocation
            The bytes. They are freed when it is closed and the last DLPack consumer is gone.

        Raises
        ------
        CapacityError
            The memory has no room.
        CaptureError
            The stream is capturing: the memory would belong to the graph.
        RangeError, PlaceError
            ``nbytes`` is negative, or the stream is not one of this memory.
        """

    def staging(self, shape: Sequence[int], dtype: str) -> Array:
        """Return a zeroed host array that ``upload`` and ``download`` can use without a wait.

        Parameters
        ----------
        shape : sequence of int
            Its shape.
        dtype : str
            A name of :mod:`trt_kvcache.dtypes`.

        Returns
        -------
        ndarray
            In pinned (page-locked) memory for a device, which is freed with its last view; in ordinary memory for the host.

        Raises
        ------
        CapacityError
            The system has no more pinned memory.
        """

    def to_device(self, array: Any, *, stream: Any) -> DeviceTensor:
        """Copy a host array into a new tensor in this memory. This allocates.

        Parameters
        ----------
        array : array_like
            Of any shape, with a dtype of :mod:`trt_kvcache.dtypes`. It may be changed as soon as the call returns.
        stream : cuda.core.Stream, or HostStream
            The copy is ordered on it.

        Returns
        -------
        DeviceTensor
            Contiguous, of the shape and dtype of the array.

        Raises
        ------
        CapacityError
            The memory has no room.
        DTypeError, PlaceError
            The dtype is unknown, or the stream is not one of this memory.
        """

    def upload(self, destination: DeviceTensor, source: Array, *, stream: Any) -> None:
        """Copy a host array into a tensor of this memory.

        Parameters
        ----------
        destination : DeviceTensor
            Contiguous.
        source : ndarray
            Contiguous, of the same shape and dtype. It must not change until the copy is done. The call does not wait if it is an array of
            ``staging``.
        stream : cuda.core.Stream, or HostStream
            The copy is ordered on it.

        Raises
        ------
        PlaceError, ShapeError, DTypeError
            The tensor and the array do not fit, or are not contiguous. Nothing was copied.
        """

    def download(self, destination: Array, source: DeviceTensor, *, stream: Any) -> None:
        """Copy a tensor of this memory into a host array.

        Parameters
        ----------
        destination : ndarray
            Contiguous, of the same shape and dtype. The values are there after ``synchronize``. Into an array of ``staging`` the call
            does not wait.
        source : DeviceTensor
            Contiguous.
        stream : cuda.core.Stream, or HostStream
            The copy is ordered on it.

        Raises
        ------
        PlaceError, ShapeError, DTypeError
            The tensor and the array do not fit, or are not contiguous. Nothing was copied.
        """

    def zero(self, tensor: DeviceTensor, *, stream: Any) -> None:
        """Set the bytes of a tensor to zero.

        Parameters
        ----------
        tensor : DeviceTensor
            Contiguous, of this memory.
        stream : cuda.core.Stream or GraphBuilder, or HostStream
            The write is ordered on it.

        Raises
        ------
        PlaceError, ShapeError
            The tensor is of another memory, or is not contiguous.
        """

    def copy_rows(self, destination: DeviceTensor, source: DeviceTensor, moves: Sequence[tuple[int, int, int]], *, stream: Any) -> None:
        """Copy rows between two tables of this memory.

        Parameters
        ----------
        destination, source : DeviceTensor (n, ...)
            Contiguous, with rows of the same shape and dtype. They may be one tensor if no move overlaps itself.
        moves : sequence of (int, int, int)
            First row of the destination, first row of the source, and number of rows. One copy each, in this order.
        stream : cuda.core.Stream or GraphBuilder, or HostStream
            The copies are ordered on it.

        Raises
        ------
        PlaceError, ShapeError, DTypeError, RangeError
            The tables do not fit, or have no such rows. Nothing was copied.
        """

    def read(self, tensor: DeviceTensor) -> Array:
        """Return a copy of a view on the host. Waits for all work given to the device before the call.

        Parameters
        ----------
        tensor : DeviceTensor
            Any view of this memory.

        Returns
        -------
        ndarray
            Of the same shape and dtype.

        Raises
        ------
        PlaceError, ClosedError
            The tensor is of another memory, or its owner is closed.
        """

    def dlpack(self, tensor: DeviceTensor, **kwargs: Any) -> Any:
        """Return a DLPack capsule that shares the bytes of a tensor and keeps them alive.

        Parameters
        ----------
        tensor : DeviceTensor
            Any view of this memory.
        **kwargs : object
            ``stream``, ``max_version``, ``dl_device`` and ``copy`` of the ``__dlpack__`` protocol. ``stream`` is the consumer's stream. The
            streams that wrote the bytes are not known here, so the call waits for all work of the device, unless ``stream`` is -1.

        Returns
        -------
        capsule
            For one consumer.

        Raises
        ------
        BufferError
            A copy or another device was requested: use ``.numpy()``.
        RangeError
            ``stream`` is 0, which the protocol leaves ambiguous.
        PlaceError, ClosedError
            The tensor is of another memory, or its owner is closed.
        """


def check_memory_given(memory: Any) -> None:
    """Check that an argument is a memory, before anything is allocated in it."""
    if isinstance(memory, type) or not callable(getattr(memory, "allocate", None)):
        name = getattr(memory, "__name__", "")
        got = f"the class {name}. Create one: {name}()" if isinstance(memory, type) else short_repr(memory)
        raise PlaceError(f"memory: expected a HostMemory or CudaMemory, got {got}.")


def check_copy(what: str, tensor: DeviceTensor, array: Array, memory: Memory) -> None:
    """Check a copy between a tensor and a host array before it starts."""
    if tensor.memory is not memory:
        raise PlaceError(f"{what}: expected a tensor of {memory.device}, got one of {tensor.memory.device}.")
    if tensor.shape != array.shape:
        raise ShapeError(f"{what}: the tensor has shape {tensor.shape}, the host array {array.shape}.")
    if tensor.numpy_dtype != array.dtype:
        raise DTypeError(f"{what}: the tensor holds {tensor.dtype}, the host array {array.dtype}.")
    if not (tensor.is_contiguous and array.flags.c_contiguous):
        raise ShapeError(f"{what}: expected a dense tensor and a dense host array.")


def check_row_moves(destination: DeviceTensor, source: DeviceTensor, moves: Sequence[tuple[int, int, int]], memory: Memory) -> None:
    """Check copies of rows between two tables before they start."""
    for name, table in (("destination", destination), ("source", source)):
        if table.memory is not memory:
            raise PlaceError(f"copy_rows: {name}: expected a tensor of {memory.device}, got one of {table.memory.device}.")
        if not (table.ndim and table.is_contiguous):
            raise ShapeError(f"copy_rows: {name}: expected a dense tensor of rows, got {table!r}.")
    if destination.shape[1:] != source.shape[1:]:
        raise ShapeError(f"copy_rows: expected rows of one shape, got {source.shape[1:]} and {destination.shape[1:]}.")
    if destination.dtype != source.dtype:
        raise DTypeError(f"copy_rows: expected rows of one dtype, got {source.dtype} and {destination.dtype}.")
    for to, first, count in moves:
        if min(to, first, count) < 0 or to + count > len(destination) or first + count > len(source):
            raise RangeError(
                f"copy_rows: expected rows within {len(source)} and {len(destination)}, got {count} of them from {first} to {to}."
            )
