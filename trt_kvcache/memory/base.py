"""The ``Memory`` protocol, which ``HostMemory`` and ``CudaMemory`` follow. Everything above it is written once for both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.errors import ClosedError, DTypeError, PlaceError, ShapeError
from trt_kvcache.memory.tensor import DeviceTensor

#: Of any shape and dtype.
Array = np.ndarray[Any, Any]


class Allocation(Protocol):
    """Bytes that were allocated once and never move. Aligned to 256 bytes."""

    @property
    def memory(self) -> Memory:
        """The memory that made it."""

    @property
    def ptr(self) -> int:
        """Address of the first byte. Raises :class:`ClosedError` after ``close``."""

    @property
    def nbytes(self) -> int:
        """Size in bytes, as asked for."""

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""

    def close(self) -> None:
        """Let go of the bytes: they are freed when the last DLPack consumer has let go too. Idempotent."""


class Memory(Protocol):
    """A place where caches live: allocation, copies, streams.

    Copies and fills are ordered on ``stream`` and do not wait, unless it is said. ``stream`` is keyword-only and
    mandatory, on host memory too, so that code runs unchanged on a device.
    """

    @property
    def device(self) -> str:
        """``"cpu"`` or ``"cuda:0"``."""

    @property
    def is_host(self) -> bool:
        """Whether NumPy can read the memory in place."""

    @property
    def dlpack_device(self) -> tuple[int, int]:
        """DLPack device type and index."""

    @property
    def live_nbytes(self) -> int:
        """Bytes of all allocations that are not closed."""

    def create_stream(self) -> Any:
        """Return a new stream of this memory: a ``cuda.core.Stream``, or on the host an object that does nothing."""

    def check_stream(self, stream: Any) -> None:
        """Raise :class:`PlaceError` if ``stream`` is not one of this memory (or a graph builder of it)."""

    def is_capturing(self, stream: Any) -> bool:
        """Tell whether what is ordered on ``stream`` now is captured in a CUDA graph instead of run."""

    def synchronize(self, stream: Any) -> None:
        """Wait until everything ordered on ``stream`` is done."""

    def allocate(self, nbytes: int, *, zeroed: bool = False, stream: Any) -> Allocation:
        """Allocate bytes, aligned to 256. Raises :class:`CapacityError` where there is no room."""

    def staging(self, shape: Sequence[int], dtype: str) -> Array:
        """Return a zeroed host array that ``upload`` and ``download`` can use without a wait (page-locked for a device)."""

    def to_device(self, array: Any, *, stream: Any) -> DeviceTensor:
        """Return a dense copy of a host array in this memory. The array may be changed as soon as the call returns."""

    def upload(self, destination: DeviceTensor, source: Array, *, stream: Any) -> None:
        """Copy a dense host array of the same shape and dtype into a dense tensor. ``source`` must stay until it is done."""

    def download(self, destination: Array, source: DeviceTensor, *, stream: Any) -> None:
        """Copy a dense tensor into a dense host array of the same shape and dtype; it is there after ``synchronize``."""

    def zero(self, tensor: DeviceTensor, *, stream: Any) -> None:
        """Set the bytes of a dense tensor to zero."""

    def read(self, tensor: DeviceTensor) -> Array:
        """Return a copy of any view on the host, after all work given to the device before the call."""

    def dlpack(self, tensor: DeviceTensor, **kwargs: Any) -> Any:
        """Return a DLPack capsule that shares the memory and keeps it alive."""


def check_copy(what: str, tensor: DeviceTensor, array: Array, memory: Memory) -> None:
    """Check a copy between a dense tensor of ``memory`` and a dense host array; raise before a byte has moved."""
    if tensor.memory is not memory:
        raise PlaceError(f"{what}: expected a tensor of {memory.device}, got one of {tensor.memory.device}.")
    if tensor.shape != array.shape:
        raise ShapeError(f"{what}: the tensor has shape {tensor.shape}, the host array {array.shape}.")
    if numpy_dtype(tensor.dtype) != array.dtype:
        raise DTypeError(f"{what}: the tensor holds {tensor.dtype}, the host array {array.dtype}.")
    if not (tensor.is_contiguous and array.flags.c_contiguous):
        raise ShapeError(f"{what}: expected a dense tensor and a dense host array.")


class _Counting(Protocol):
    def count_live(self, nbytes: int) -> None: ...


_Counter = TypeVar("_Counter", bound=_Counting)
_Owner = TypeVar("_Owner")


class OwnedBytes(Generic[_Counter, _Owner]):
    """Bytes of an owner, counted until they are closed: an :class:`Allocation` but for the address."""

    def __init__(self, memory: _Counter, owner: _Owner, nbytes: int) -> None:
        #: The memory that made it.
        self.memory = memory
        #: Size in bytes, as asked for.
        self.nbytes = nbytes
        self._storage: _Owner | None = owner

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._storage is None

    @property
    def storage(self) -> _Owner:
        """Their owner: a uint8 array, or a CudaBuffer. Raises :class:`ClosedError` after ``close``."""
        if self._storage is None:
            raise ClosedError("the memory behind this tensor is closed. Keep its cache open, or copy with .numpy() before.")
        return self._storage

    def close(self) -> None:
        """Let go of the bytes: with no DLPack consumer they are freed, after a wait for a device, else by the last one. Idempotent."""
        if self._storage is not None:
            self._storage = None
            self.memory.count_live(-self.nbytes)

    def __del__(self) -> None:
        self.close()
