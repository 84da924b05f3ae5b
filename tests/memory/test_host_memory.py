"""What is special about ``HostMemory``: NumPy sees its bytes in place."""

import gc
from types import SimpleNamespace

import numpy as np
import pytest

from tests.helpers.assertions import raises
from trt_kvcache import DeviceTensor, HostMemory
from trt_kvcache.dtypes import dlpack_code, numpy_dtype
from trt_kvcache.errors import PlaceError, ShapeError
from trt_kvcache.memory.dlpack import dltensor_in
from trt_kvcache.memory.shapes import dense_nbytes


def random_array(shape, dtype, seed=0):
    """Any bytes at all, NaN and infinities among them."""
    raw = np.random.default_rng(seed).integers(0, 256, dense_nbytes(shape, dtype), np.uint8)
    return raw.view(numpy_dtype(dtype)).reshape(shape)


def same_bytes(left, right):
    return (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes())


class TestHostMemory:
    @pytest.fixture
    def host(self):
        return HostMemory()

    @pytest.fixture
    def host_stream(self, host):
        return host.create_stream()

    def test_where_it_is(self, host, host_stream):
        assert (host.device, host.is_host, host.dlpack_device) == ("cpu", True, (1, 0))
        host_stream.sync()
        host.check_stream(host_stream)
        assert not host.is_capturing(host_stream)

    @pytest.mark.parametrize("dtype", ["float16", "float32", "int8", "uint8", "int32", "int64"])
    def test_dlpack_shares_the_bytes(self, host, host_stream, dtype):
        whole = host.to_device(random_array((2, 3, 5), dtype), stream=host_stream)
        view = DeviceTensor(whole.allocation, shape=(2, 2), strides=(15, 5), dtype=dtype, offset=numpy_dtype(dtype).itemsize)
        array = np.from_dlpack(view)
        assert same_bytes(array, whole.numpy()[:, :2, 1])
        host.array(whole)[...] = 1
        assert array.tolist() == [[1, 1], [1, 1]]

    @pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
    def test_dlpack_of_what_numpy_does_not_know(self, host, host_stream, dtype):
        """A consumer that knows these dtypes, such as torch, reads code and bits in the capsule. NumPy refuses it."""
        tensor = host.to_device(random_array((3,), dtype), stream=host_stream)
        capsule = tensor.__dlpack__()
        found = dltensor_in(capsule)
        assert (found.dtype_code, found.dtype_bits, found.dtype_lanes) == (dlpack_code(dtype), 8 * tensor.numpy_dtype.itemsize, 1)
        assert (found.data, found.ndim, found.shape[0], found.strides[0]) == (tensor.ptr, 1, 3, 1)
        with pytest.raises((BufferError, RuntimeError), match=r"(?i)dtype|support"):
            np.from_dlpack(tensor)

    def test_a_dlpack_consumer_keeps_the_memory(self, host, host_stream):
        tensor = host.to_device(np.arange(4), stream=host_stream)
        array = np.from_dlpack(tensor)
        tensor.allocation.close()
        del tensor
        gc.collect()
        assert host.live_nbytes == 0
        assert array.tolist() == [0, 1, 2, 3]

    def test_array_writes_in_place(self, host, host_stream):
        tensor = host.to_device(np.zeros((2, 3), np.float32), stream=host_stream)
        array = host.array(tensor[1:])
        array[0, 2] = 5
        assert tensor.numpy().tolist() == [[0, 0, 0], [0, 0, 5]]
        assert array.ctypes.data == tensor.ptr + 12


class TestRefused:
    """Tensors of another host memory: there may be two, and neither knows when the other's bytes go."""

    @pytest.fixture
    def host(self):
        return HostMemory()

    @pytest.fixture
    def foreign(self):
        other = HostMemory()
        return other.to_device(np.ones(3, np.int32), stream=other.create_stream())

    def test_zero_of_another_memory(self, host, foreign):
        with raises(PlaceError, "zero", expected="tensor of this memory", got="cpu"):
            host.zero(foreign, stream=host.create_stream())
        assert foreign.numpy().tolist() == [1, 1, 1]

    def test_zero_of_a_view_with_gaps(self, host):
        stream = host.create_stream()
        whole = host.to_device(np.ones((2, 6), np.int32), stream=stream)
        gaps = DeviceTensor(whole.allocation, shape=(2, 3), strides=(6, 1), dtype="int32")
        with raises(ShapeError, "zero", expected="dense tensor", got="DeviceTensor"):
            host.zero(gaps, stream=stream)
        assert (whole.numpy() == 1).all()

    def test_an_array_over_a_device(self, host):
        class Elsewhere:
            """An allocation that is not in host memory."""

            memory, nbytes, ptr = SimpleNamespace(device="cuda:0"), 12, 0

        with pytest.raises(PlaceError, match=r"^expected a tensor in host memory, got one of cuda:0\.$"):
            host.array(DeviceTensor(Elsewhere(), shape=(3,), dtype="int32"))
