"""``check_bindable``: what any engine checks before it binds an address."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.assertions import raises
from trt_kvcache import DeviceTensor, HostMemory
from trt_kvcache.engine.bindable import check_bindable
from trt_kvcache.engine.protocol import TensorSpec
from trt_kvcache.errors import BindingError, LayoutError

SPEC = TensorSpec.input("x", (-1, 3), "float32")


@pytest.fixture
def memory() -> HostMemory:
    return HostMemory()


def tensor(memory: HostMemory, *shape: int, dtype: type = np.float32) -> DeviceTensor:
    return memory.to_device(np.zeros(shape, dtype), stream=memory.create_stream())


def test_a_tensor_that_fits(memory: HostMemory) -> None:
    check_bindable(SPEC, tensor(memory, 4, 3), memory)


def test_the_shape_is_not_looked_at(memory: HostMemory) -> None:
    check_bindable(SPEC, tensor(memory, 5), memory)


def test_a_tensor_in_another_memory_is_refused(memory: HostMemory) -> None:
    with raises(BindingError, "`x`", expected="tensor in the engine's memory (cpu)", got=("DeviceTensor", "in another")):
        check_bindable(SPEC, tensor(HostMemory(), 4, 3), memory)


def test_another_dtype_is_refused(memory: HostMemory) -> None:
    with pytest.raises(BindingError, match=r"^`x` expects float32 \(-1, 3\), got float16 \(4, 3\)\.$"):
        check_bindable(SPEC, tensor(memory, 4, 3, dtype=np.float16), memory)


def test_a_strided_view_is_refused(memory: HostMemory) -> None:
    wide = tensor(memory, 4, 2, 3)
    view = DeviceTensor(wide.allocation, shape=(4, 3), dtype="float32", strides=(6, 1))
    with raises(LayoutError, "`x`", expected="contiguous view", got="(4, 3) with strides (6, 1)"):
        check_bindable(SPEC, view, memory)


def test_an_address_that_is_not_aligned_is_refused(memory: HostMemory) -> None:
    whole = tensor(memory, 90)
    view = DeviceTensor(whole.allocation, shape=(4, 3), dtype="float32", offset=16)
    with raises(LayoutError, "`x`", expected="multiple of 256", got=hex(view.ptr)):
        check_bindable(SPEC, view, memory)
