"""``CudaMemory``: what tests/memory/test_base.py does not ask of every memory."""

import gc
import subprocess
import sys
import threading

import numpy as np
import pytest

from tests.helpers.assertions import raises
from tests.simt.standin import ALLOCATIONS, WAITS, StandIn, need_cuda_memory, needs_standin
from trt_kvcache import CudaMemory, DeviceTensor, HostMemory, KVCacheConfig, KVCacheManager, KVLayerConfig
from trt_kvcache.errors import CapacityError, CaptureError, CudaError, PlaceError, RangeError, ShapeError
from trt_kvcache.kernels import increment_length_tensor, store_length_values
from trt_kvcache.memory.cuda_memory import find_gpu

need_cuda_memory()


@pytest.fixture
def standin(memory, stream):
    return StandIn()


def tensor_of(memory, values, stream, dtype=np.int32):
    return memory.to_device(np.array(values, dtype), stream=stream)


class TestPlace:
    def test_where_it_is(self, memory):
        assert (memory.device, memory.is_host, memory.dlpack_device) == ("cuda:0", False, (2, 0))
        assert memory.arch.startswith("sm_")
        assert find_gpu(0) is None

    def test_another_thread_may_use_it(self, memory, stream):
        tensor, results = tensor_of(memory, [1, 2, 3], stream), []

        def work():
            own = memory.create_stream()
            increment_length_tensor(tensor, 4, stream=own)
            memory.synchronize(own)
            results.append(tensor.numpy().tolist())
            results.append(memory.staging((2,), "int32").tolist())
            memory.allocate(16, zeroed=True, stream=own).close()

        memory.synchronize(stream)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert results == [[5, 6, 7], [0, 0]]

    def test_tensors_of_another_memory(self, memory, stream):
        host = HostMemory()
        foreign = host.to_device(np.ones(3, np.int32), stream=host.create_stream())
        for name, call in {
            "zero": lambda: memory.zero(foreign, stream=stream),
            "read": lambda: memory.read(foreign),
            "dlpack": lambda: memory.dlpack(foreign),
        }.items():
            with raises(PlaceError, name, expected="tensor of this cuda:0", got="cpu"):
                call()
        assert foreign.numpy().tolist() == [1, 1, 1]

    def test_zero_of_what_is_not_dense(self, memory, stream):
        whole = tensor_of(memory, np.ones((2, 6)), stream)
        view = DeviceTensor(whole.allocation, shape=(2, 3), strides=(6, 1), dtype="int32")
        with raises(ShapeError, "zero", expected="dense tensor", got="DeviceTensor((2, 3), int32, strides=(6, 1), cuda:0)"):
            memory.zero(view, stream=stream)
        assert whole.numpy().tolist() == [[1] * 6] * 2


class TestStreams:
    def test_kinds(self, memory, stream):
        from cuda.core import Stream

        assert isinstance(stream, Stream)
        memory.check_stream(stream)
        memory.check_stream(stream.create_graph_builder())
        with raises(PlaceError, "stream", expected="cuda.core Stream or GraphBuilder of cuda:0", got="HostStream"):
            memory.check_stream(HostMemory().create_stream())

    @pytest.mark.parametrize("used_before", [False, True])
    def test_closed(self, memory, used_before):
        stream = memory.create_stream()
        if used_before:
            memory.check_stream(stream)
        stream.close()
        with raises(PlaceError, "stream", expected="cuda:0", got="closed Stream"):
            memory.check_stream(stream)

    def test_another_device(self, memory, monkeypatch):
        stream = memory.create_stream()
        monkeypatch.setattr(memory, "_index", 1)
        with raises(PlaceError, "stream", expected="cuda:1", got="cuda:0"):
            memory.check_stream(stream)

    def test_capturing(self, memory, stream):
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

    def test_captured_increments_are_replayed(self, memory, stream):
        lengths, increments = tensor_of(memory, [1, 2, 3], stream), tensor_of(memory, [10, 20, 30], stream)
        increment_length_tensor(lengths, 0, stream=stream)
        memory.synchronize(stream)
        builder = stream.create_graph_builder()
        builder.begin_building()
        increment_length_tensor(lengths, 5, stream=builder)
        increment_length_tensor(lengths, increments, stream=builder)
        graph = builder.end_building().complete()
        assert lengths.numpy().tolist() == [1, 2, 3]
        graph.launch(stream)
        graph.launch(stream)
        assert lengths.numpy().tolist() == [31, 52, 73]


@needs_standin
class TestOrder:
    """The stand-in driver does what a stream was given when the host waits, and writes down every call."""

    def test_fresh_memory_is_poison(self, memory, stream):
        allocation = memory.allocate(4, stream=stream)
        assert DeviceTensor(allocation, shape=(4,), dtype="uint8").numpy().tolist() == [255] * 4

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

    def test_a_step_neither_waits_nor_allocates(self, memory, stream, standin):
        lengths, increments = tensor_of(memory, np.zeros(40), stream), tensor_of(memory, np.ones(40), stream)
        for _ in range(2):  # the first round loads the kernels
            standin.take_calls()
            increment_length_tensor(lengths, 2, stream=stream)
            increment_length_tensor(lengths, increments, stream=stream)
            store_length_values(lengths, list(range(40)), accumulate=True, stream=stream)
            memory.zero(increments, stream=stream)
            memory.is_capturing(stream)
            calls = standin.take_calls()
        assert calls == ["cuLaunchKernelEx"] * 5 + ["cuMemsetD8Async", "cuStreamIsCapturing"]
        assert not (WAITS | ALLOCATIONS) & set(calls)
        assert lengths.numpy().tolist() == [2 * (2 + i) + 1 for i in range(40)]

    def test_read_waits_for_every_stream(self, memory, stream):
        tensor = tensor_of(memory, [1, 2], stream)
        memory.synchronize(stream)
        increment_length_tensor(tensor, 5, stream=memory.create_stream())
        assert tensor.numpy().tolist() == [6, 7]

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

    def test_host_copies_are_dropped_when_they_were_read(self, memory, stream):
        tensors = [tensor_of(memory, [i], stream) for i in range(3)]
        assert len(memory._in_flight) == 3
        memory.synchronize(stream)
        assert memory._in_flight == []
        assert [int(tensor.numpy()[0]) for tensor in tensors] == [0, 1, 2]


@needs_standin
class TestNoRoom:
    def test_message_and_nothing_changed(self, memory, stream, standin):
        standin.fail_allocation(1)
        with pytest.raises(CapacityError, match=r"^cuda:0: 1000 bytes could not be allocated\. Nothing was changed\.$"):
            memory.allocate(1000, stream=stream)
        standin.fail_allocation(1)
        with pytest.raises(CapacityError, match=r"^page-locked host memory: 12 bytes could not be allocated\. Nothing was changed\.$"):
            memory.staging((3,), "int32")
        assert (memory.live_nbytes, standin.device_nbytes, standin.page_locked_nbytes) == (0, 0, 0)

    @pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
    def test_a_cache_releases_what_it_had(self, memory, standin, n):
        layers = [KVLayerConfig(num_kv_heads=heads, head_dim=16) for heads in (1, 2, 3)]
        config = KVCacheConfig(layers=layers, max_batch_size=3, max_sequence_length=7, dtype="float16")
        standin.fail_allocation(n)
        with pytest.raises(CapacityError):
            KVCacheManager(config, memory=memory)
        gc.collect()
        assert (memory.live_nbytes, standin.device_nbytes) == (0, 0)
        standin.fail_allocation(0)
        with KVCacheManager(config, memory=memory) as cache:
            (group,) = cache.kv_head_dim_groups
            infos = group.device_layer_infos.nbytes
            assert standin.device_nbytes == memory.live_nbytes == cache.nbytes + cache.lengths.nbytes + infos
        assert (memory.live_nbytes, standin.device_nbytes) == (0, 0)


@pytest.mark.usefixtures("memory")  # so that it runs on the device
@needs_standin
def test_a_device_without_pools():
    program = """
import ctypes
from tests.simt.standin import ALLOCATIONS, WAITS, StandIn, need_cuda_memory, needs_standin
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


@pytest.mark.usefixtures("memory")  # so that it runs on the device
@needs_standin
class TestPool:
    """How many freed bytes stay mapped is the pool's; the stand-in driver only writes down that it was told."""

    def calls_of_an_allocation(self, **options):
        memory = CudaMemory(**options)
        stream, standin = memory.create_stream(), StandIn()
        allocation = memory.allocate(1000, stream=stream)
        made = standin.take_calls()
        allocation.close()
        return made, standin.take_calls()

    def test_without_bytes_to_keep_it_is_left_alone(self):
        assert not any("cuMemPoolSetAttribute" in calls for calls in self.calls_of_an_allocation())

    def test_it_is_told_what_to_keep_when_something_is_allocated_or_freed(self):
        assert all("cuMemPoolSetAttribute" in calls for calls in self.calls_of_an_allocation(keep_bytes=4096))

    @pytest.mark.parametrize("keep_bytes", [-1, 1.5])
    def test_bytes_to_keep_are_a_size(self, keep_bytes):
        with pytest.raises(RangeError, match=r"^keep_bytes: expected "):
            CudaMemory(keep_bytes=keep_bytes)
