"""``CudaMemory``: what tests/memory/test_host.py does not ask of every memory."""

import gc
import subprocess
import sys
import threading

import numpy as np
import pytest

from tests.simt.standin import StandIn, need_cuda_memory, needs_standin
from trt_kvcache import HostMemory
from trt_kvcache.errors import CapacityError, CaptureError, CudaError, PlaceError

need_cuda_memory()


@pytest.fixture
def standin(memory, stream):
    return StandIn()


def tensor_of(memory, values, stream, dtype=np.int32):
    return memory.to_device(np.array(values, dtype), stream=stream)


def test_tensors_that_are_refused(memory, stream):
    host = HostMemory()
    foreign = host.to_device(np.ones(3, np.int32), stream=host.create_stream())
    calls = {"zero": lambda tensor: memory.zero(tensor, stream=stream), "read": memory.read, "dlpack": memory.dlpack}
    for name, call in calls.items():
        with pytest.raises(PlaceError, match=rf"^{name}: expected a tensor of this cuda:0, got one of cpu\.$"):
            call(foreign)
    assert foreign.numpy().tolist() == [1, 1, 1]


def test_streams(memory, stream):
    from cuda.core import Stream

    assert isinstance(stream, Stream)
    memory.check_stream(stream)
    memory.check_stream(stream.create_graph_builder())
    with pytest.raises(PlaceError, match=r"^stream: expected a cuda\.core Stream or GraphBuilder of cuda:0, got HostStream\.$"):
        memory.check_stream(HostMemory().create_stream())
    for closed in (stream, memory.create_stream()):  # one that was used before, and one that was not
        closed.close()
        with pytest.raises(PlaceError, match=r"^stream: expected an open one of cuda:0, got a closed Stream\.$"):
            memory.check_stream(closed)


def test_capturing(memory, stream):
    builder = stream.create_graph_builder()
    assert not memory.is_capturing(builder)
    builder.begin_building()
    assert memory.is_capturing(builder)
    assert memory.is_capturing(stream)
    message = r"^cuda:0: memory cannot be allocated while the stream is captured\. Allocate before\.$"
    for call in (lambda: memory.allocate(16, stream=builder), lambda: memory.to_device([1], stream=builder)):
        with pytest.raises(CaptureError, match=message):
            call()
    builder.end_building()
    assert not memory.is_capturing(builder)
    assert memory.live_nbytes == 0


@needs_standin
class TestOrder:
    """The stand-in driver does what a stream was given when the host waits."""

    def test_upload_and_download_do_not_wait(self, memory, stream, standin):
        tensor = tensor_of(memory, [0, 0], stream)
        source, target = memory.staging((2,), "int32"), memory.staging((2,), "int32")
        source[:] = [1, 2]
        standin.take_calls()
        memory.upload(tensor, source, stream=stream)
        memory.download(target, tensor, stream=stream)
        assert standin.take_calls() == ["cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2"]
        source[:] = [3, 4]
        assert target.tolist() == [0, 0]
        memory.synchronize(stream)
        assert target.tolist() == [3, 4]

    def test_memory_goes_back_after_the_device_is_done(self, memory, stream, standin):
        tensor = tensor_of(memory, [1, 2], stream)
        before = standin.device_nbytes
        standin.take_calls()
        tensor.allocation.close()
        assert standin.take_calls() == ["cuCtxSynchronize", "cuMemFreeAsync", "cuCtxSynchronize"]
        assert standin.device_nbytes == before - 8

    def test_letting_go_in_another_thread_leaves_its_context_alone(self, memory, stream, standin):
        from cuda.bindings import driver

        tensors, contexts = [tensor_of(memory, [1, 2], stream)], []

        def work():
            contexts.append(int(driver.cuCtxGetCurrent()[1]))
            tensors.clear()
            contexts.append(int(driver.cuCtxGetCurrent()[1]))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert contexts == [0, 0]
        assert standin.device_nbytes == 0

    def test_what_the_driver_refuses(self, memory, stream):
        tensor = tensor_of(memory, [1, 2], stream)
        builder = stream.create_graph_builder()
        builder.begin_building()
        with pytest.raises(CudaError, match=r"^the CUDA driver refused a call: CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED \(.*\)\.$"):
            tensor.numpy()
        builder.end_building()
        assert tensor.numpy().tolist() == [1, 2]

    def test_page_locked_memory_goes_back_with_the_last_view(self, memory, standin):
        view = memory.staging((4, 3), "bfloat16")[1:3].reshape(6)
        assert standin.page_locked_nbytes == 24
        view[:] = 2
        assert view.base is not None
        standin.take_calls()
        del view
        gc.collect()
        assert standin.page_locked_nbytes == 0
        assert standin.take_calls()[0] == "cuCtxSynchronize"


@needs_standin
def test_no_room(memory, stream, standin):
    standin.fail_allocation(1)
    with pytest.raises(CapacityError, match=r"^cuda:0: 1000 bytes could not be allocated\. Nothing was changed\.$"):
        memory.allocate(1000, stream=stream)
    standin.fail_allocation(1)
    with pytest.raises(CapacityError, match=r"^page-locked host memory: 12 bytes could not be allocated\. Nothing was changed\.$"):
        memory.staging((3,), "int32")
    assert (memory.live_nbytes, standin.device_nbytes, standin.page_locked_nbytes) == (0, 0, 0)


@needs_standin
def test_a_device_without_pools():
    program = """
import ctypes
from tests.simt.standin import StandIn
ctypes.CDLL("libcuda.so.1").standin_take_pools_away()
import numpy
from trt_kvcache import CudaMemory, DeviceTensor
memory = CudaMemory()
stream, standin = memory.create_stream(), StandIn()
tensor = DeviceTensor(memory.allocate(12, zeroed=True, stream=stream), shape=(3,), dtype="int32")
assert standin.take_calls() == ["cuStreamIsCapturing", "cuMemAlloc_v2", "cuMemsetD8Async"]
assert tensor.ptr % 256 == 0 and tensor.numpy().tolist() == [0, 0, 0]
standin.take_calls()
tensor.allocation.close()
assert "cuMemFree_v2" in standin.take_calls() and standin.device_nbytes == 0
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)
