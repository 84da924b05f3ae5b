"""``CudaMemory``: caches in the memory of an NVIDIA GPU, through cuda-python.

Importing this file imports nothing of cuda-python.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from trt_kvcache._util.checks import int_in_range
from trt_kvcache._util.lifetime import Uncopyable
from trt_kvcache.dtypes import dtype_name, numpy_dtype
from trt_kvcache.errors import CaptureError, CudaError, PlaceError, RangeError, ShapeError
from trt_kvcache.memory.base import Array, check_copy, check_row_moves
from trt_kvcache.memory.cuda_buffer import CudaBuffer, bytes_of
from trt_kvcache.memory.cuda_driver import check, find_gpu
from trt_kvcache.memory.dlpack import device_capsule
from trt_kvcache.memory.owned_bytes import OwnedBytes
from trt_kvcache.memory.shapes import ALIGNMENT, dense_nbytes, span_elements
from trt_kvcache.memory.tensor import DeviceTensor

__all__ = ["CudaAllocation", "CudaMemory", "find_gpu"]

_DLPACK_CUDA = 2

#: ``stream`` of ``__dlpack__`` by which a consumer says that it synchronizes by itself.
_DLPACK_NO_SYNC = -1


class CudaAllocation(OwnedBytes["CudaMemory", CudaBuffer]):
    """Bytes in the memory of one GPU."""

    @property
    def ptr(self) -> int:
        """Address of the first byte. Raises :class:`~trt_kvcache.errors.ClosedError` after ``close``."""
        return self.storage.ptr


class CudaMemory(Uncopyable):
    """Caches in the memory of one NVIDIA GPU: see :class:`~trt_kvcache.memory.base.Memory`.

    Parameters
    ----------
    device : int
        Number of the GPU, from 0, as the driver counts.
    keep_bytes : int
        Freed bytes that the pool may keep for later allocations instead of giving them back to the system. Captures that come and
        go, as with prefix caching, then map no memory. Without a pool it does nothing.

    Raises
    ------
    CudaError
        There is no such GPU, no driver, or no cuda-python; the text says which.
    RangeError
        An argument is negative.

    Notes
    -----
    Memory comes from a private stream-ordered pool if the device has pools, else from plain allocations. Streams are
    ``cuda.core.Stream``; a ``cuda.core.graph.GraphBuilder`` is accepted where the operation can be captured. Every operation makes
    the device current in the calling thread.

    Examples
    --------
    >>> from trt_kvcache import CacheConfig, CudaMemory, LinearKVCache
    >>> memory = CudaMemory(device=0)  # doctest: +SKIP
    >>> stream = memory.create_stream()  # doctest: +SKIP
    >>> config = CacheConfig(num_attention_layers=2, max_batch_size=4, max_sequence_length=256, num_kv_heads=2, head_dim=64)
    >>> cache = LinearKVCache(config, memory=memory)  # doctest: +SKIP
    >>> cache.reset_for_new_sequences([0, 5], stream=stream)  # doctest: +SKIP
    """

    is_host = False

    def __init__(self, device: int = 0, *, keep_bytes: int = 0) -> None:
        self._index = int_in_range("device", device, 0)
        kept = int_in_range("keep_bytes", keep_bytes, 0)
        reason = find_gpu(self._index)
        if reason is not None:
            raise CudaError(f"CudaMemory: {reason}")
        from cuda.bindings import driver
        from cuda.core import Device, DeviceMemoryResource, DeviceMemoryResourceOptions, LegacyPinnedMemoryResource, Stream
        from cuda.core.graph import GraphBuilder

        self._driver = driver
        self._stream_types = (Stream, GraphBuilder)
        self._gpu = Device(self._index)
        self._gpu.set_current()
        pooled = self._gpu.properties.memory_pools_supported
        self._resource = DeviceMemoryResource(self._gpu, DeviceMemoryResourceOptions()) if pooled else self._gpu.memory_resource
        self._kept_nbytes = kept if pooled else 0
        self._pinned_resource = LegacyPinnedMemoryResource()
        self._in_flight: list[tuple[Any, Array]] = []
        self._last_checked: Any = lambda: None
        #: Architecture of the device, such as ``"sm_90"``.
        self.arch = f"sm_{self._gpu.arch}"
        #: Multiprocessors of the device.
        self.multiprocessor_count: int = self._gpu.properties.multiprocessor_count
        #: Bytes of all allocations that are not closed.
        self.live_nbytes = 0

    def __repr__(self) -> str:
        return f"CudaMemory(device={self._index}, live_nbytes={self.live_nbytes})"

    @property
    def device(self) -> str:
        """The device, such as ``"cuda:0"``."""
        return f"cuda:{self._index}"

    @property
    def dlpack_device(self) -> tuple[int, int]:
        """DLPack device type and index."""
        return (_DLPACK_CUDA, self._index)

    def make_current(self) -> None:
        """Make the device current in the calling thread."""
        self._gpu.set_current()

    def create_stream(self) -> Any:
        """Return a new ``cuda.core.Stream`` of the device: see :meth:`Memory.create_stream`."""
        self.make_current()
        return self._gpu.create_stream()

    def check_stream(self, stream: Any) -> None:
        """Check that this is an open stream or graph builder of the device: see :meth:`Memory.check_stream`."""
        checked = self._last_checked()
        if checked is None or stream is not checked:
            self._check_kind_and_device(stream)
            self._last_checked = weakref.ref(stream)
        if stream.is_closed:
            raise PlaceError(f"stream: expected an open one of {self.device}, got a closed {type(stream).__name__}.")

    def _check_kind_and_device(self, stream: Any) -> None:
        if not isinstance(stream, self._stream_types):
            raise PlaceError(f"stream: expected a cuda.core Stream or GraphBuilder of {self.device}, got {type(stream).__name__}.")
        if stream.is_closed:
            return
        index = _stream_of(stream).device.device_id
        if index != self._index:
            raise PlaceError(f"stream: expected one of {self.device}, got one of cuda:{index}.")

    def is_capturing(self, stream: Any) -> bool:
        """Return True if a stream captures a CUDA graph: see :meth:`Memory.is_capturing`."""
        self.check_stream(stream)
        status = check(self._driver.cuStreamIsCapturing(_handle(stream)))
        return bool(status != self._driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)

    def synchronize(self, stream: Any) -> None:
        """Wait for a stream: see :meth:`Memory.synchronize`."""
        self.check_stream(stream)
        self.make_current()
        check(self._driver.cuStreamSynchronize(_handle(stream)))
        if self._in_flight:
            self._drop_finished_copies()

    def allocate(self, nbytes: int, *, zeroed: bool = False, stream: Any) -> CudaAllocation:
        """Allocate bytes, aligned to 256: see :meth:`Memory.allocate`."""
        nbytes = int_in_range("nbytes", nbytes, 0)
        if self.is_capturing(stream):
            raise CaptureError(f"{self.device}: memory cannot be allocated while the stream is captured. Allocate before.")
        self.make_current()
        buffer = CudaBuffer(self._resource, nbytes, place=self.device, stream=_stream_of(stream))
        if buffer.ptr % ALIGNMENT:
            raise CudaError(f"{self.device}: the driver returned the address {buffer.ptr:#x}, which is not a multiple of {ALIGNMENT}.")
        if zeroed:
            self._fill_with_zeros(buffer.ptr, nbytes, stream)
        self.count_live(nbytes)
        return CudaAllocation(self, buffer, nbytes)

    def count_live(self, nbytes: int) -> None:
        """Add to ``live_nbytes``, and let the pool keep ``keep_bytes`` more. Memory above that is released at the next wait."""
        self.live_nbytes += nbytes
        if self._kept_nbytes:
            limit = self._driver.cuuint64_t(self.live_nbytes + self._kept_nbytes)
            release_threshold = self._driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
            check(self._driver.cuMemPoolSetAttribute(int(self._resource.handle), release_threshold, limit))

    def staging(self, shape: Sequence[int], dtype: str) -> Array:
        """Return a zeroed array in pinned memory, which is freed with its last view: see :meth:`Memory.staging`."""
        nbytes = dense_nbytes(shape, dtype)
        self.make_current()
        buffer = CudaBuffer(self._pinned_resource, nbytes, place="page-locked host memory", stream=None)
        array = bytes_of(buffer, nbytes)
        array[...] = 0
        return array.view(numpy_dtype(dtype)).reshape(tuple(shape))

    def to_device(self, array: Any, *, stream: Any) -> DeviceTensor:
        """Copy a host array into a new tensor: see :meth:`Memory.to_device`."""
        source = np.array(array, order="C")  # ours alone
        dtype = dtype_name(source.dtype)
        tensor = DeviceTensor(self.allocate(source.nbytes, stream=stream), shape=source.shape, dtype=dtype)
        self.upload(tensor, source, stream=stream)
        self._drop_finished_copies()
        self._in_flight.append((_stream_of(stream).record(), source))
        return tensor

    def _drop_finished_copies(self) -> None:
        """Drop the host arrays that ``to_device`` made and whose copies are done."""
        self._in_flight = [(event, array) for event, array in self._in_flight if not event.is_done]

    def upload(self, destination: DeviceTensor, source: Array, *, stream: Any) -> None:
        """Copy a host array into a tensor: see :meth:`Memory.upload`."""
        self.check_stream(stream)
        check_copy("upload", destination, source, self)
        if source.nbytes:
            self.make_current()
            check(self._driver.cuMemcpyHtoDAsync(destination.ptr, _address(source), source.nbytes, _handle(stream)))

    def download(self, destination: Array, source: DeviceTensor, *, stream: Any) -> None:
        """Copy a tensor into a host array: see :meth:`Memory.download`."""
        self.check_stream(stream)
        check_copy("download", source, destination, self)
        if destination.nbytes:
            self.make_current()
            check(self._driver.cuMemcpyDtoHAsync(_address(destination), source.ptr, destination.nbytes, _handle(stream)))

    def copy_rows(self, destination: DeviceTensor, source: DeviceTensor, moves: Sequence[tuple[int, int, int]], *, stream: Any) -> None:
        """Copy rows between tables: see :meth:`Memory.copy_rows`."""
        self.check_stream(stream)
        check_row_moves(destination, source, moves, self)
        self.make_current()
        nbytes = source.nbytes // max(1, len(source))
        for to, first, count in moves:
            if count and nbytes:
                copied = self._driver.cuMemcpyDtoDAsync(
                    destination.ptr + to * nbytes, source.ptr + first * nbytes, count * nbytes, _handle(stream)
                )
                check(copied)

    def zero(self, tensor: DeviceTensor, *, stream: Any) -> None:
        """Set the bytes of a tensor to zero: see :meth:`Memory.zero`."""
        self.check_stream(stream)
        self._check_own_tensor("zero", tensor)
        if not tensor.is_contiguous:
            raise ShapeError(f"zero: expected a dense tensor, got {tensor!r}.")
        self.make_current()
        self._fill_with_zeros(tensor.ptr, tensor.nbytes, stream)

    def _fill_with_zeros(self, ptr: int, nbytes: int, stream: Any) -> None:
        if nbytes:
            check(self._driver.cuMemsetD8Async(ptr, 0, nbytes, _handle(stream)))

    def read(self, tensor: DeviceTensor) -> Array:
        """Return a copy of a view on the host: see :meth:`Memory.read`."""
        self._check_own_tensor("read", tensor)
        ptr, dtype = tensor.ptr, numpy_dtype(tensor.dtype)
        # Of a view that is not contiguous, everything from its first to its last element is copied.
        span = np.empty(span_elements(tensor.shape, tensor.strides), dtype)
        self.make_current()
        check(self._driver.cuCtxSynchronize())
        if span.nbytes:
            check(self._driver.cuMemcpyDtoH(_address(span), ptr, span.nbytes))
        if tensor.is_contiguous:
            return span.reshape(tensor.shape)
        strides = tuple(stride * dtype.itemsize for stride in tensor.strides)
        return np.array(np.ndarray(tensor.shape, dtype, span.view(np.uint8), 0, strides))

    def dlpack(self, tensor: DeviceTensor, **kwargs: Any) -> Any:
        """Return a DLPack capsule of any view and dtype: see :meth:`Memory.dlpack`."""
        self._check_own_tensor("dlpack", tensor)
        stream, target = kwargs.pop("stream", None), kwargs.pop("dl_device", None)
        if target is not None and tuple(target) != self.dlpack_device:
            raise BufferError(f"DLPack: expected device {self.dlpack_device}, got {tuple(target)}. Use .numpy(), which copies to the host.")
        if stream == 0:
            raise RangeError("DLPack: stream 0 is ambiguous; expected None, -1, 1, 2 or a stream's address.")
        assert isinstance(tensor.allocation, CudaAllocation)
        owner = tensor.allocation.storage
        self.make_current()
        if stream != _DLPACK_NO_SYNC:  # the streams that wrote the bytes are not known here
            check(self._driver.cuCtxSynchronize())
        return device_capsule(tensor, owner, **kwargs)

    def _check_own_tensor(self, what: str, tensor: DeviceTensor) -> None:
        if tensor.memory is not self:
            raise PlaceError(f"{what}: expected a tensor of this {self.device}, got one of {tensor.memory.device}.")


def _stream_of(stream: Any) -> Any:
    return getattr(stream, "stream", stream)


def _handle(stream: Any) -> int:
    return int(stream.__cuda_stream__()[1])


def _address(array: Array) -> int:
    """Return the address of an array. (cuda.bindings takes arrays too, but takes one of a single element for a number.)"""
    return int(array.ctypes.data)
