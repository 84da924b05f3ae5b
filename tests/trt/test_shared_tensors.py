"""``SharedTensors``: constants once, and intermediate tensors that share bytes over their lifetimes."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.fake_tensorrt import FakeGpuMemory, fake_module
from trt_kvcache.engine.protocol import EngineProfile, TensorSpec
from trt_kvcache.ops.segments import CustomOpNode
from trt_kvcache.trt.engine_resources import EngineResources
from trt_kvcache.trt.log import TensorRTLog
from trt_kvcache.trt.module import TensorRT
from trt_kvcache.trt.shared_tensors import SharedTensors

PROFILES = [
    EngineProfile(name="prefill", min_batch=1, max_batch=3, min_width=1, max_width=11),
    EngineProfile(name="decode", min_batch=1, max_batch=5, min_width=1, max_width=1),
]
TABLE = np.arange(35, dtype=np.float32).reshape(7, 5)


def stage(before: str, after: str) -> CustomOpNode:
    return CustomOpNode(operation="embedding", attributes={}, inputs=(before,), outputs=(after,))


STAGES = [stage("a", "b"), stage("b", "c"), stage("c", "d")]
SPECS = {name: TensorSpec.output(name, (-1, -1, 5), "float32") for name in "abcd"}


@pytest.fixture
def memory() -> FakeGpuMemory:
    return FakeGpuMemory()


@pytest.fixture
def resources(memory: FakeGpuMemory) -> EngineResources:
    module = fake_module("1.7.1")
    return EngineResources(TensorRT(module=module, flavour="tensorrt_rtx", version="1.7.1", log=TensorRTLog(module)), memory)


@pytest.fixture
def shared(resources: EngineResources, memory: FakeGpuMemory) -> SharedTensors:
    return SharedTensors(
        STAGES, constants={"table": TABLE}, intermediates=SPECS, profiles=PROFILES, resources=resources, stream=memory.create_stream()
    )


def test_constants_are_uploaded(shared: SharedTensors) -> None:
    np.testing.assert_array_equal(shared.tensor("table", 1, 1).numpy(), TABLE)


def test_a_constant_is_in_memory_once(shared: SharedTensors) -> None:
    assert shared.tensor("table", 1, 1) is shared.tensor("table", 3, 11)


@pytest.mark.parametrize(("batch", "width"), [(3, 11), (5, 1), (1, 1)])
def test_an_intermediate_tensor_has_the_shape_of_the_enqueue(shared: SharedTensors, batch: int, width: int) -> None:
    tensor = shared.tensor("b", batch, width)
    assert (tensor.shape, tensor.dtype) == ((batch, width, 5), "float32")


def test_addresses_do_not_depend_on_the_shape(shared: SharedTensors) -> None:
    assert len({shared.tensor("b", batch, width).ptr for batch, width in ((1, 1), (5, 1), (3, 11))}) == 1


def test_tensors_that_are_live_together_do_not_overlap(shared: SharedTensors) -> None:
    for one, other in (("a", "b"), ("b", "c"), ("c", "d")):
        first, second = sorted((shared.tensor(name, 3, 11) for name in (one, other)), key=lambda tensor: tensor.ptr)
        assert first.ptr + first.nbytes <= second.ptr


def test_tensors_that_are_never_live_together_share_bytes(shared: SharedTensors) -> None:
    assert shared.tensor("a", 3, 11).ptr == shared.tensor("c", 3, 11).ptr


def test_the_allocation_is_for_the_largest_enqueue(shared: SharedTensors, memory: FakeGpuMemory) -> None:
    largest = 3 * 11 * 5 * 4
    aligned = -(-largest // 256) * 256
    assert memory.live_nbytes == TABLE.nbytes + aligned + largest  # two at a time


def test_everything_is_released_with_the_engine(shared: SharedTensors, resources: EngineResources, memory: FakeGpuMemory) -> None:
    resources.close()
    assert memory.live_nbytes == 0
