"""The ``Memory`` protocol, on whichever memory the run is for: allocation, copies, reads, and what is refused."""

import gc

import numpy as np
import pytest
from hypothesis import given, strategies as st

from tests.helpers.assertions import raises
from trt_kvcache import DeviceTensor, HostMemory
from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.errors import CapacityError, ClosedError, DTypeError, PlaceError, RangeError, ShapeError
from trt_kvcache.memory.shapes import dense_nbytes, span_elements

DTYPES = ["float16", "bfloat16", "float32", "float8_e4m3fn", "int8", "uint8", "int32", "int64"]
SHAPE = (2, 3, 5)


def random_array(shape, dtype, seed=0):
    """Any bytes at all, NaN and infinities among them."""
    raw = np.random.default_rng(seed).integers(0, 256, dense_nbytes(shape, dtype), np.uint8)
    return raw.view(numpy_dtype(dtype)).reshape(shape)


def same_bytes(left, right):
    return (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes())


def empty(memory, shape, dtype, stream):
    return DeviceTensor(memory.allocate(dense_nbytes(shape, dtype), stream=stream), shape=shape, dtype=dtype)


class TestAllocate:
    @pytest.mark.parametrize("nbytes", [0, 1, 255, 256, 1000])
    def test_address_is_aligned_and_bytes_are_counted(self, memory, stream, nbytes):
        allocations = [memory.allocate(nbytes, stream=stream) for _ in range(3)]
        assert [allocation.ptr % 256 for allocation in allocations] == [0, 0, 0]
        assert len({allocation.ptr for allocation in allocations}) == 3
        assert {allocation.nbytes for allocation in allocations} == {nbytes}
        assert memory.live_nbytes == 3 * nbytes
        assert all(allocation.memory is memory for allocation in allocations)

    def test_zeroed(self, memory, stream):
        allocation = memory.allocate(1000, zeroed=True, stream=stream)
        assert DeviceTensor(allocation, shape=(1000,), dtype="uint8").numpy().tolist() == [0] * 1000

    def test_address_stays(self, memory, stream):
        allocation = memory.allocate(512, stream=stream)
        ptr = allocation.ptr
        memory.to_device(np.arange(7), stream=stream)
        memory.synchronize(stream)
        assert allocation.ptr == ptr

    def test_close_is_idempotent_and_counts_once(self, memory, stream):
        kept, closed = memory.allocate(100, stream=stream), memory.allocate(30, stream=stream)
        assert not closed.closed
        closed.close()
        closed.close()
        assert closed.closed
        assert not kept.closed
        assert memory.live_nbytes == 100

    def test_address_after_close(self, memory, stream):
        tensor = empty(memory, (3,), "int32", stream)
        view = tensor[1:]
        tensor.allocation.close()
        message = r"^the memory of this tensor is closed\. Keep its cache open, or copy with \.numpy\(\) before\.$"
        for use in (lambda: tensor.ptr, lambda: view.ptr, tensor.numpy, tensor.__dlpack__):
            with pytest.raises(ClosedError, match=message):
                use()

    def test_is_freed_with_the_last_view(self, memory, stream):
        view = empty(memory, (4, 3), "float32", stream)[1:2]
        assert memory.live_nbytes == 48
        del view
        gc.collect()
        assert memory.live_nbytes == 0

    @pytest.mark.parametrize(("nbytes", "got"), [(-1, "-1"), (1.5, "1.5"), (True, "True")])
    def test_not_a_size(self, memory, stream, nbytes, got):
        with pytest.raises(RangeError, match=rf"^nbytes: expected .*, got {got}\.$"):
            memory.allocate(nbytes, stream=stream)
        assert memory.live_nbytes == 0

    def test_no_room(self, memory, stream):
        with pytest.raises(CapacityError, match=rf"{1 << 60} bytes could not be allocated"):
            memory.allocate(1 << 60, zeroed=True, stream=stream)
        assert memory.live_nbytes == 0

    def test_foreign_stream(self, memory):
        for stream in (None, 0, "stream"):
            with pytest.raises(PlaceError, match=rf"^stream: expected .*, got {type(stream).__name__}\.$"):
                memory.allocate(16, stream=stream)
        assert memory.live_nbytes == 0


class TestCopies:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_up_and_down(self, memory, stream, dtype):
        source, target = memory.staging(SHAPE, dtype), memory.staging(SHAPE, dtype)
        source[...] = random_array(SHAPE, dtype)
        tensor = empty(memory, SHAPE, dtype, stream)
        memory.upload(tensor, source, stream=stream)
        memory.download(target, tensor, stream=stream)
        memory.synchronize(stream)
        assert same_bytes(target, source)
        assert same_bytes(tensor.numpy(), source)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_ordinary_arrays_too(self, memory, stream, dtype):
        source, target = random_array(SHAPE, dtype), np.zeros(SHAPE, numpy_dtype(dtype))
        source.flags.writeable = False
        tensor = memory.to_device(source, stream=stream)
        assert (tensor.shape, tensor.dtype, tensor.is_contiguous) == (SHAPE, dtype, True)
        memory.upload(tensor, source, stream=stream)
        memory.download(target, tensor, stream=stream)
        memory.synchronize(stream)
        assert same_bytes(target, source)

    def test_only_the_view_is_written(self, memory, stream):
        whole = memory.to_device(np.arange(15, dtype=np.int32).reshape(5, 3), stream=stream)
        memory.upload(whole[1:3], np.full((2, 3), -1, np.int32), stream=stream)
        memory.zero(whole[3:4], stream=stream)
        assert whole.numpy().tolist() == [[0, 1, 2], [-1, -1, -1], [-1, -1, -1], [0, 0, 0], [12, 13, 14]]

    def test_empty(self, memory, stream):
        tensor = memory.to_device(np.zeros((0, 3), np.float16), stream=stream)
        memory.upload(tensor, memory.staging((0, 3), "float16"), stream=stream)
        memory.download(memory.staging((0, 3), "float16"), tensor, stream=stream)
        memory.zero(tensor, stream=stream)
        assert same_bytes(tensor.numpy(), np.zeros((0, 3), np.float16))

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_staging_is_zero_dense_and_writable(self, memory, dtype):
        array = memory.staging(SHAPE, dtype)
        assert same_bytes(array, np.zeros(SHAPE, numpy_dtype(dtype)))
        assert array.flags.c_contiguous
        array[1, 2, 3] = 2
        assert array[1, 2, 3] == 2

    def test_to_device_keeps_no_hold_of_the_array(self, memory, stream):
        array = memory.staging((4,), "int32")
        array[:] = [1, 2, 3, 4]
        tensor = memory.to_device(array, stream=stream)
        array[:] = -1
        assert tensor.numpy().tolist() == [1, 2, 3, 4]

    def test_to_device_of_what_is_not_dense(self, memory, stream):
        array = np.arange(24, dtype=np.int64).reshape(2, 3, 4).transpose(2, 0, 1)
        assert same_bytes(memory.to_device(array, stream=stream).numpy(), np.ascontiguousarray(array))
        assert memory.to_device(np.float32(7), stream=stream).shape == ()
        assert memory.to_device([[1, 2]], stream=stream).numpy().tolist() == [[1, 2]]

    def test_to_device_of_an_unknown_dtype(self, memory, stream):
        with raises(DTypeError, "dtype", got="NumPy dtype complex64"):
            memory.to_device(np.zeros(3, np.complex64), stream=stream)
        gc.collect()
        assert memory.live_nbytes == 0


class TestRefusedCopies:
    """Each copy checks the same things, before a byte has moved."""

    @pytest.fixture(params=["upload", "download"])
    def copy(self, request, memory, stream):
        def call(tensor, array):
            if request.param == "upload":
                memory.upload(tensor, array, stream=stream)
            else:
                memory.download(array, tensor, stream=stream)

        call.name = request.param
        return call

    def refuse(self, copy, tensor, array, error, message):
        before = (tensor.numpy(), array.copy())
        with pytest.raises(error, match=rf"^{copy.name}: {message}\.$"):
            copy(tensor, array)
        assert same_bytes(tensor.numpy(), before[0])
        assert same_bytes(array, before[1])

    def test_other_shape(self, memory, stream, copy):
        tensor = memory.to_device(np.ones((2, 3), np.int32), stream=stream)
        self.refuse(copy, tensor, np.zeros((3, 2), np.int32), ShapeError, r"the tensor has shape \(2, 3\), the host array \(3, 2\)")

    def test_other_dtype(self, memory, stream, copy):
        tensor = memory.to_device(np.ones((2, 3), np.float32), stream=stream)
        self.refuse(copy, tensor, np.zeros((2, 3), np.int32), DTypeError, "the tensor holds float32, the host array int32")

    def test_tensor_that_is_not_dense(self, memory, stream, copy):
        whole = memory.to_device(np.ones((2, 6), np.int32), stream=stream)
        view = DeviceTensor(whole.allocation, shape=(2, 3), strides=(6, 1), dtype="int32")
        self.refuse(copy, view, np.zeros((2, 3), np.int32), ShapeError, "expected a dense tensor and a dense host array")

    def test_array_that_is_not_dense(self, memory, stream, copy):
        tensor = memory.to_device(np.ones((2, 3), np.int32), stream=stream)
        self.refuse(copy, tensor, np.zeros((2, 6), np.int32)[:, :3], ShapeError, "expected a dense tensor and a dense host array")

    def test_tensor_of_another_memory(self, copy):
        tensor = HostMemory().to_device(np.ones(3, np.int32), stream=HostMemory().create_stream())
        self.refuse(copy, tensor, np.zeros(3, np.int32), PlaceError, r"expected a tensor of (cpu|cuda:0), got one of cpu")

    def test_foreign_stream(self, memory, stream):
        tensor, array = memory.to_device(np.ones(3, np.int32), stream=stream), np.zeros(3, np.int32)
        calls = (
            lambda: memory.upload(tensor, array, stream=None),
            lambda: memory.download(array, tensor, stream=None),
            lambda: memory.zero(tensor, stream=None),
            lambda: memory.synchronize(None),
            lambda: memory.check_stream(None),
            lambda: memory.to_device(array, stream=None),
        )
        for call in calls:
            with pytest.raises(PlaceError, match=r"^stream: expected .*, got NoneType\.$"):
                call()
        assert tensor.numpy().tolist() == [1, 1, 1]
        assert array.tolist() == [0, 0, 0]


class TestCopyRows:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_rows_of_tables(self, memory, stream, dtype):
        source, target = random_array((6, 3, 5), dtype), random_array((4, 3, 5), dtype, seed=1)
        table, into = memory.to_device(source, stream=stream), memory.to_device(target, stream=stream)
        memory.copy_rows(into, table, [(0, 4, 2), (3, 1, 1), (2, 0, 0)], stream=stream)
        target[0:2], target[3] = source[4:6], source[1]
        assert same_bytes(into.numpy(), target)
        assert same_bytes(table.numpy(), source)

    def test_within_one_table_and_in_views(self, memory, stream):
        table = memory.to_device(np.arange(10, dtype=np.int32), stream=stream)
        memory.copy_rows(table[6:], table[:3], [(1, 0, 2)], stream=stream)
        assert table.numpy().tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1, 9]

    @pytest.mark.parametrize("move", [(3, 0, 2), (0, 5, 2), (-1, 0, 1), (0, -1, 1), (0, 0, -1)])
    def test_rows_that_are_not_there(self, memory, stream, move):
        table, into = (
            memory.to_device(np.ones((6, 2), np.int32), stream=stream),
            memory.to_device(np.zeros((4, 2), np.int32), stream=stream),
        )
        with raises(RangeError, "copy_rows", expected="rows within 6 and 4", got=f"{move[2]} of them from {move[1]} to {move[0]}"):
            memory.copy_rows(into, table, [(0, 0, 1), move], stream=stream)
        assert not into.numpy().any()

    def test_tables_that_do_not_fit(self, memory, stream):
        host = HostMemory()
        foreign = host.to_device(np.ones((4, 2), np.int32), stream=host.create_stream())
        into = memory.to_device(np.zeros((4, 2), np.int32), stream=stream)
        of_floats, of_three = (memory.to_device(array, stream=stream) for array in (np.ones((4, 2), np.float32), np.ones((4, 3), np.int32)))
        part = DeviceTensor(of_three.allocation, shape=(4, 2), strides=(3, 1), dtype="int32")
        for source, error, expected in (
            (foreign, PlaceError, "a tensor of"),
            (of_floats, DTypeError, "rows of one dtype"),
            (of_three, ShapeError, "rows of one shape"),
            (part, ShapeError, "a dense tensor of rows"),
        ):
            with raises(error, "copy_rows", expected=expected):
                memory.copy_rows(into, source, [(0, 0, 1)], stream=stream)
        assert not into.numpy().any()


class TestRead:
    @given(data=st.data())
    def test_any_view(self, memory, data):
        shape = tuple(data.draw(st.lists(st.integers(0, 4), max_size=3)))
        strides = tuple(data.draw(st.lists(st.integers(0, 9), min_size=len(shape), max_size=len(shape))))
        offset = data.draw(st.integers(0, 5))
        dtype = data.draw(st.sampled_from(DTYPES))
        size = numpy_dtype(dtype).itemsize
        whole = random_array((offset + span_elements(shape, strides) + 2,), dtype)
        tensor = memory.to_device(whole, stream=memory.create_stream())
        view = DeviceTensor(tensor.allocation, shape=shape, strides=strides, dtype=dtype, offset=offset * size)
        byte_strides = tuple(stride * size for stride in strides)
        expected = np.lib.stride_tricks.as_strided(whole[offset:], shape, byte_strides)
        assert same_bytes(view.numpy(), expected)

    def test_is_a_copy(self, memory, stream):
        tensor = memory.to_device(np.arange(3), stream=stream)
        for array in (tensor.numpy(), DeviceTensor(tensor.allocation, shape=(2,), strides=(2,), dtype="int64").numpy()):
            array[...] = -1
        assert tensor.numpy().tolist() == [0, 1, 2]
