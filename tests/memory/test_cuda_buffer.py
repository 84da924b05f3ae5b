"""``CudaBuffer``: bytes that are freed when nothing refers to them and the device is done."""

import gc

import numpy as np
import pytest

from tests.simt.standin import StandIn, need_cuda_memory, needs_standin
from trt_kvcache.errors import CapacityError
from trt_kvcache.memory.cuda_buffer import CudaBuffer, bytes_of

need_cuda_memory()


@pytest.fixture
def resource(memory):
    """Page-locked host memory, which the tests can look into."""
    from cuda.core import LegacyPinnedMemoryResource

    memory.make_current()
    return LegacyPinnedMemoryResource()


def pinned(resource, nbytes):
    return CudaBuffer(resource, nbytes, place="page-locked host memory", stream=None)


def test_an_empty_one_has_an_address_too(resource):
    assert pinned(resource, 0).ptr != 0


def test_two_do_not_overlap(resource):
    first, second = pinned(resource, 16), pinned(resource, 16)
    assert abs(first.ptr - second.ptr) >= 16


def test_its_bytes_are_read_and_written(resource):
    buffer = pinned(resource, 8)
    bytes_of(buffer, 8)[:] = np.arange(8)
    assert bytes_of(buffer, 8).tolist() == list(range(8))


def test_an_array_of_its_bytes_keeps_it_alive(resource):
    buffer = pinned(resource, 8)
    array = bytes_of(buffer, 8)[2:4]
    array[:] = [5, 6]
    del buffer
    gc.collect()
    assert array.tolist() == [5, 6]


@needs_standin
class TestRelease:
    def test_it_goes_with_the_last_reference(self, resource):
        standin = StandIn()
        buffer = pinned(resource, 100)
        array = bytes_of(buffer, 100)
        del buffer
        assert standin.page_locked_nbytes == 100
        del array
        gc.collect()
        assert standin.page_locked_nbytes == 0

    def test_the_device_is_waited_for_before(self, resource):
        standin = StandIn()
        buffer = pinned(resource, 100)
        standin.take_calls()
        del buffer
        made = standin.take_calls()
        assert made.index("cuCtxSynchronize") < made.index("cuMemFreeHost")

    def test_one_that_could_not_be_made_frees_nothing(self, resource):
        standin = StandIn()
        standin.fail_allocation(1)
        with pytest.raises(CapacityError, match=r"^page-locked host memory: 100 bytes could not be allocated\. Nothing was changed\.$"):
            pinned(resource, 100)
        gc.collect()
        assert standin.page_locked_nbytes == 0
