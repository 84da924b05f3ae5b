"""The ``Memory`` protocol, on whichever memory the run is for, and what is special about ``HostMemory``."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trt_kvcache import DeviceTensor, HostMemory
from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.errors import CapacityError, ClosedError, DTypeError, PlaceError, RangeError, ShapeError
from trt_kvcache.memory.shapes import dense_nbytes, span_elements

DTYPES = ["float16", "bfloat16", "float32", "float8_e4m3fn", "int8", "uint8", "int32", "int64"]
SHAPE = (2, 3, 5)


def random_array(shape, dtype):
    """Any bytes at all, NaN and infinities among them."""
    raw = np.random.default_rng(0).integers(0, 256, dense_nbytes(shape, dtype), np.uint8)
    return raw.view(numpy_dtype(dtype)).reshape(shape)


def same_bytes(left, right):
    return (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes())


class TestAllocate:
    @pytest.mark.parametrize("nbytes", [0, 1, 255, 256, 1000])
    def test_addresses_are_aligned_and_stay_and_bytes_are_counted(self, memory, stream, nbytes):
        allocations = [memory.allocate(nbytes, stream=stream) for _ in range(3)]
        addresses = [allocation.ptr for allocation in allocations]
        assert ([address % 256 for address in addresses], len({*addresses})) == ([0, 0, 0], 3)
        assert all((allocation.nbytes, allocation.memory, allocation.closed) == (nbytes, memory, False) for allocation in allocations)
        assert memory.live_nbytes == 3 * nbytes
        zeroed = memory.allocate(nbytes, zeroed=True, stream=stream)
        assert not DeviceTensor(zeroed, shape=(nbytes,), dtype="uint8").numpy().any()
        assert [allocation.ptr for allocation in allocations] == addresses
        for _ in range(2):
            zeroed.close()
            assert (zeroed.closed, memory.live_nbytes) == (True, 3 * nbytes)

    def test_address_after_close(self, memory, stream):
        tensor = memory.to_device(np.arange(3), stream=stream)
        tensor.allocation.close()
        message = r"^the memory behind this tensor is closed\. Keep its cache open, or copy with \.numpy\(\) before\.$"
        for use in (lambda: tensor.ptr, lambda: tensor[1:].ptr, tensor.numpy, tensor.__dlpack__):
            with pytest.raises(ClosedError, match=message):
                use()

    def test_refused(self, memory, stream):
        for nbytes in (-1, 1.5):
            with pytest.raises(RangeError, match=rf"^nbytes: expected .*, got {nbytes}\.$"):
                memory.allocate(nbytes, stream=stream)
        with pytest.raises(CapacityError, match=rf"{1 << 60} bytes could not be allocated"):
            memory.allocate(1 << 60, zeroed=True, stream=stream)
        with pytest.raises(DTypeError, match=r"^dtype: expected one of .*, got NumPy dtype complex64\.$"):
            memory.to_device(np.zeros(3, np.complex64), stream=stream)


class TestCopies:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_up_and_down(self, memory, stream, dtype):
        source, target = random_array(SHAPE, dtype), memory.staging(SHAPE, dtype)
        assert same_bytes(target, np.zeros(SHAPE, numpy_dtype(dtype)))
        source.flags.writeable = False
        tensor = memory.to_device(np.zeros_like(source), stream=stream)
        assert (tensor.shape, tensor.dtype, tensor.is_contiguous) == (SHAPE, dtype, True)
        memory.upload(tensor, source, stream=stream)
        memory.download(target, tensor, stream=stream)
        memory.synchronize(stream)
        assert same_bytes(target, source)

    def test_only_the_view_is_written(self, memory, stream):
        whole = memory.to_device(np.arange(8, dtype=np.int32).reshape(4, 2), stream=stream)
        memory.upload(whole[1:2], np.full((1, 2), -1, np.int32), stream=stream)
        memory.zero(whole[2:3], stream=stream)
        assert whole.numpy().tolist() == [[0, 1], [-1, -1], [0, 0], [6, 7]]

    def test_to_device_copies_whatever_it_is_given(self, memory, stream):
        array = memory.staging((4,), "int32")
        array[:] = [1, 2, 3, 4]
        tensor = memory.to_device(array, stream=stream)
        array[:] = -1
        assert tensor.numpy().tolist() == [1, 2, 3, 4]
        for array in (np.arange(24, dtype=np.int64).reshape(2, 3, 4).transpose(2, 0, 1), np.zeros((0, 3), np.float16)):
            assert same_bytes(memory.to_device(array, stream=stream).numpy(), np.ascontiguousarray(array))
        assert memory.to_device([[1, 2]], stream=stream).numpy().tolist() == [[1, 2]]


@pytest.mark.parametrize("name", ["upload", "download"])
def test_copies_that_are_refused_move_nothing(memory, stream, name):
    whole, host = memory.to_device(np.ones((2, 6), np.int32), stream=stream), HostMemory()
    dense = DeviceTensor(whole.allocation, shape=(2, 3), dtype="int32")
    strided = DeviceTensor(whole.allocation, shape=(2, 3), strides=(6, 1), dtype="int32")
    foreign, zeros = host.to_device(np.ones(3, np.int32), stream=host.create_stream()), np.zeros((2, 6), np.int32)
    for tensor, array, error, text in (
        (dense, zeros.reshape(6, 2)[:3], ShapeError, r"the tensor has shape \(2, 3\), the host array \(3, 2\)"),
        (dense, zeros[:, :3].astype(np.float32), DTypeError, "the tensor holds int32, the host array float32"),
        (strided, zeros[:1].reshape(2, 3), ShapeError, "expected a dense tensor and a dense host array"),
        (dense, zeros[:, :3], ShapeError, "expected a dense tensor and a dense host array"),
        (foreign, zeros[0, :3], PlaceError, "expected a tensor of (cpu|cuda:0), got one of cpu"),
    ):
        with pytest.raises(error, match=rf"^{name}: {text}\.$"):
            getattr(memory, name)(*((tensor, array) if name == "upload" else (array, tensor)), stream=stream)
    assert (whole.numpy() == 1).all()
    assert not zeros.any()


def test_streams_of_something_else_are_refused(memory, stream):
    tensor, array = memory.to_device(np.ones(3, np.int32), stream=stream), np.zeros(3, np.int32)
    calls = ((memory.allocate, 16), (memory.upload, tensor, array), (memory.download, array, tensor), (memory.zero, tensor))
    for call, *arguments in (*calls, (memory.to_device, array)):
        with pytest.raises(PlaceError, match=r"^stream: expected .*, got NoneType\.$"):
            call(*arguments, stream=None)
    with pytest.raises(PlaceError):
        memory.synchronize(None)
    assert (tensor.numpy().tolist(), array.tolist()) == ([1, 1, 1], [0, 0, 0])


@given(data=st.data())
def test_any_view_is_read_and_copied(memory, data):
    shape = tuple(data.draw(st.lists(st.integers(0, 4), max_size=3)))
    strides = tuple(data.draw(st.lists(st.integers(0, 9), min_size=len(shape), max_size=len(shape))))
    offset, dtype = data.draw(st.integers(0, 5)), data.draw(st.sampled_from(DTYPES))
    size = numpy_dtype(dtype).itemsize
    whole = random_array((offset + span_elements(shape, strides) + 2,), dtype)
    tensor = memory.to_device(whole, stream=memory.create_stream())
    view = DeviceTensor(tensor.allocation, shape=shape, strides=strides, dtype=dtype, offset=offset * size)
    expected = np.lib.stride_tricks.as_strided(whole[offset:], shape, tuple(stride * size for stride in strides))
    read = view.numpy()
    assert same_bytes(read, expected)
    read[...] = 0
    assert same_bytes(view.numpy(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dlpack_and_array_share_the_bytes_of_the_host(dtype):
    host = HostMemory()
    assert (host.device, host.is_host, host.dlpack_device) == ("cpu", True, (1, 0))
    whole = host.to_device(random_array((2, 3, 5), dtype), stream=host.create_stream())
    view = DeviceTensor(whole.allocation, shape=(2, 2), strides=(15, 5), dtype=dtype, offset=numpy_dtype(dtype).itemsize)
    host.array(view)[0, 1] = 1
    assert (host.array(view).ctypes.data, whole.numpy()[0, 1, 1]) == (view.ptr, 1)
    if dtype in ("bfloat16", "float8_e4m3fn"):
        with pytest.raises(DTypeError, match=rf"^DLPack from host memory: NumPy does not know {dtype}\. Use \.numpy\(\), which copies\.$"):
            np.from_dlpack(view)
    else:
        array = np.from_dlpack(view)
        assert same_bytes(array, whole.numpy()[:, :2, 1])
