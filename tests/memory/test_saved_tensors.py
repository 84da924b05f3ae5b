"""Several tensors in one allocation, and the check of tensors that come back. What caches refuse: tests/cache/test_kv_layers.py."""

import gc

import numpy as np
import pytest

from tests.helpers.assertions import raises
from tests.helpers.caches import FailingMemory
from trt_kvcache import DeviceTensor
from trt_kvcache.errors import CapacityError, ClosedError, LayoutError, ShapeError
from trt_kvcache.memory.saved_tensors import allocate_tensors, check_saved

SHAPES = [(2, 3), (100, 2), (5,)]


class TestAllocate:
    def test_shapes_and_dtype(self, memory, stream):
        tensors = allocate_tensors(memory, SHAPES, "float16", stream=stream)
        assert [(tensor.shape, tensor.dtype, tensor.is_contiguous) for tensor in tensors] == [(shape, "float16", True) for shape in SHAPES]

    def test_one_allocation_in_which_each_starts_at_256_bytes(self, memory, stream):
        tensors = allocate_tensors(memory, SHAPES, "float16", stream=stream)
        assert [tensor.offset for tensor in tensors] == [0, 256, 256 + 512]
        assert {id(tensor.allocation) for tensor in tensors} == {id(tensors[0].allocation)}
        assert memory.live_nbytes == 256 + 512 + 256

    def test_no_two_overlap(self, memory, stream):
        tensors = allocate_tensors(memory, SHAPES, "int32", stream=stream)
        for value, tensor in enumerate(tensors):
            memory.upload(tensor, np.full(tensor.shape, value, np.int32), stream=stream)
            memory.synchronize(stream)
        assert all((tensor.numpy() == value).all() for value, tensor in enumerate(tensors))

    def test_the_last_one_releases_them(self, memory, stream):
        *_, last = allocate_tensors(memory, SHAPES, "float16", stream=stream)
        assert memory.live_nbytes > 0
        del last, _
        gc.collect()
        assert memory.live_nbytes == 0

    def test_of_nothing(self, memory, stream):
        assert allocate_tensors(memory, [], "float16", stream=stream) == []

    def test_of_no_elements(self, memory, stream):
        (tensor,) = allocate_tensors(memory, [(2, 0, 3)], "float16", stream=stream)
        assert (tensor.shape, tensor.nbytes) == ((2, 0, 3), 0)

    def test_without_room(self):
        memory = FailingMemory()
        memory.failures = 1
        with pytest.raises(CapacityError, match="no room"):
            allocate_tensors(memory, SHAPES, "float16", stream=memory.create_stream())


class TestCheck:
    @pytest.fixture
    def saved(self, memory, stream):
        return allocate_tensors(memory, SHAPES, "float16", stream=stream)

    def check(self, saved, memory):
        check_saved(saved, SHAPES, "float16", memory, per="layer")

    @pytest.mark.parametrize("kind", [list, tuple])
    def test_what_fits(self, memory, saved, kind):
        self.check(kind(saved), memory)

    def test_a_generator_is_no_sequence(self, memory, saved):
        with raises(ShapeError, "saved", expected="sequence of tensors", got="generator"):
            self.check((tensor for tensor in saved), memory)

    def test_the_message_says_what_there_is_one_of_each_for(self, memory, saved):
        with raises(ShapeError, "saved", expected="3 tensors", got=2):
            self.check(saved[:2], memory)

    def test_a_view_with_gaps(self, memory, saved):
        gaps = DeviceTensor(saved[1].allocation, shape=(2, 3), strides=(4, 1), dtype="float16")
        with raises(LayoutError, "saved[0]", expected="dense tensor", got="DeviceTensor"):
            self.check([gaps, *saved[1:]], memory)

    def test_a_closed_tensor(self, memory, saved):
        saved[0].allocation.close()
        with pytest.raises(ClosedError, match=r"^saved\[0\]: the memory of this tensor is closed\.$"):
            self.check(saved, memory)
