"""DLPack capsules of CUDA memory: their fields, what they keep alive, and what is refused."""

import gc

import ml_dtypes
import numpy as np
import pytest

from tests.helpers.assertions import raises
from tests.simt.standin import StandIn, need_cuda_memory, needs_standin
from trt_kvcache import DeviceTensor
from trt_kvcache.dtypes import dlpack_code, numpy_dtype
from trt_kvcache.errors import RangeError
from trt_kvcache.memory.dlpack import dltensor_in

need_cuda_memory()


@pytest.fixture
def standin(memory, stream):
    return StandIn()


@pytest.fixture
def tensor(memory, stream):
    return memory.to_device(np.array([1, 2, 3], np.int32), stream=stream)


@pytest.mark.parametrize(("max_version", "name"), [(None, "dltensor"), ((0, 8), "dltensor"), ((1, 0), "dltensor_versioned")])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float8_e4m3fn", "int8", "uint8", "int32", "int64"])
def test_fields(memory, stream, dtype, max_version, name):
    size = numpy_dtype(dtype).itemsize
    whole = DeviceTensor(memory.allocate(60 * size, stream=stream), shape=(60,), dtype=dtype)
    view = DeviceTensor(whole.allocation, shape=(2, 3, 4), strides=(24, 6, 1), dtype=dtype, offset=5 * size)
    assert view.__dlpack_device__() == (2, 0)
    capsule = view.__dlpack__(max_version=max_version)
    assert f'"{name}"' in repr(capsule)
    inside = dltensor_in(capsule)
    assert inside.data + inside.byte_offset == view.ptr == whole.ptr + 5 * size
    assert (inside.device_type, inside.device_id) == (2, 0)
    assert (inside.dtype_code, inside.dtype_bits, inside.dtype_lanes) == (dlpack_code(dtype), 8 * size, 1)
    assert (inside.ndim, inside.shape[:3], inside.strides[:3]) == (3, [2, 3, 4], [24, 6, 1])


@pytest.mark.parametrize("shape", [(), (0, 3), (1,)])
def test_shapes_at_the_edge(memory, stream, shape):
    tensor = memory.to_device(np.zeros(shape, ml_dtypes.bfloat16), stream=stream)
    capsule = tensor.__dlpack__()
    inside = dltensor_in(capsule)
    assert (inside.ndim, inside.shape[: len(shape)]) == (len(shape), list(shape))


def test_cuda_core_reads_it(memory, stream):
    from cuda.core.utils import StridedMemoryView

    tensor = memory.to_device(np.zeros((3, 4), ml_dtypes.bfloat16), stream=stream)
    view = StridedMemoryView.from_dlpack(tensor, stream_ptr=-1)
    assert (view.ptr, view.shape, view.dtype, view.is_device_accessible) == (tensor.ptr, (3, 4), ml_dtypes.bfloat16, True)


def test_refused(tensor):
    message = r"^DLPack: expected device \(2, 0\), got \(1, 0\)\. Use \.numpy\(\), which copies to the host\.$"
    with pytest.raises(BufferError, match=message):
        tensor.__dlpack__(dl_device=(1, 0))
    with pytest.raises(BufferError, match="copy=True"):
        tensor.__dlpack__(copy=True)
    with raises(RangeError, "DLPack: stream 0 is ambiguous", expected="None, -1, 1, 2 or a stream's address"):
        tensor.__dlpack__(stream=0)
    tensor.__dlpack__(dl_device=(2, 0), copy=False)


@needs_standin
@pytest.mark.parametrize(("asked", "waits"), [({}, True), ({"stream": None}, True), ({"stream": 1}, True), ({"stream": -1}, False)])
def test_stream_of_the_consumer(tensor, standin, asked, waits):
    standin.take_calls()
    capsule = tensor.__dlpack__(**asked)
    assert ("cuCtxSynchronize" in standin.take_calls()) == waits
    del capsule


@needs_standin
@pytest.mark.parametrize("max_version", [None, (1, 0)])
def test_the_consumer_keeps_the_memory(memory, stream, standin, max_version):
    tensor = memory.to_device(np.array([1, 2, 3], np.int32), stream=stream)
    capsule = tensor.__dlpack__(max_version=max_version)
    tensor.allocation.close()
    del tensor
    gc.collect()
    assert (memory.live_nbytes, standin.device_nbytes) == (0, 12)
    standin.take_calls()
    del capsule
    gc.collect()
    assert standin.device_nbytes == 0
    assert standin.take_calls()[:2] == ["cuCtxSynchronize", "cuMemFreeAsync"]
