"""Bindings of an engine by themselves: no TensorRT, no GPU, a target that records what it is told."""

import numpy as np
import pytest

from tests.helpers.assertions import raises
from trt_kvcache import HostMemory
from trt_kvcache.engine.protocol import TensorSpec
from trt_kvcache.errors import BindingError, ClosedError, EngineError, PlaceError
from trt_kvcache.trt.engine_bindings import EngineBindings, stream_handle
from trt_kvcache.trt.tensors import ProfileRanges

CACHE = (-1, 2, 64)
TENSORS = {
    spec.name: spec
    for spec in (
        TensorSpec.input("ids", (-1, -1), "int32"),
        TensorSpec.input("past", CACHE, "float16"),
        TensorSpec.output("present", CACHE, "float16", alias="past"),
    )
}


class Target:
    """Notes addresses and shapes by profile."""

    def __init__(self):
        self.addresses, self.shapes, self.refuses = {}, {}, False

    def set_tensor_address(self, profile, name, address):
        if self.refuses:
            raise EngineError("refused")
        self.addresses[profile, name] = address

    def set_input_shape(self, profile, name, shape):
        self.shapes[profile, name] = shape

    def tensor_shape(self, profile, name):
        return self.shapes.get((profile, TENSORS[name].alias or name), TENSORS[name].shape)


@pytest.fixture
def memory():
    return HostMemory()


@pytest.fixture
def target():
    return Target()


@pytest.fixture
def bindings(memory, target):
    ranges = [ProfileRanges({"ids": ((1, 1), (3, width)), "past": ((1, 2, 64), (3, 2, 64))}) for width in (5, 1)]
    return EngineBindings("SomeEngine", tensors=TENSORS, ranges=ranges, memory=memory, target=target)


@pytest.fixture
def tensors(memory):
    stream = memory.create_stream()
    ids, cache = (memory.to_device(array, stream=stream) for array in (np.zeros((3, 5), "int32"), np.zeros((3, 2, 64), "float16")))
    return {"ids": ids, "past": cache, "present": cache}


def make_ready(bindings, tensors, *, batch=3, width=1):
    for name, tensor in tensors.items():
        bindings.bind(name, tensor)
    bindings.set_input_shape("ids", (batch, width))
    bindings.set_input_shape("past", (batch, 2, 64))


def test_addresses_and_shapes_go_to_the_profile_in_use(bindings, target, tensors):
    make_ready(bindings, tensors, width=5)
    bindings.use_profile(1)
    bindings.bind("ids", tensors["ids"])
    assert {profile for profile, _ in target.shapes} == {0}
    assert [name for profile, name in target.addresses if profile == 1] == ["ids"]
    assert bindings.active.tensors == {"ids": tensors["ids"]}


@pytest.mark.parametrize("change", [lambda b, t: b.bind("ids", t["ids"]), lambda b, t: b.set_input_shape("ids", (2, 1))])
def test_a_change_is_to_be_checked(bindings, tensors, change):
    make_ready(bindings, tensors)
    bindings.check()
    bindings.active.is_checked = True
    change(bindings, tensors)
    assert not bindings.active.is_checked


def test_an_address_that_is_refused_leaves_the_tensor_unbound(bindings, target, tensors):
    make_ready(bindings, tensors)
    target.refuses = True
    with pytest.raises(EngineError, match="refused"):
        bindings.bind("ids", tensors["ids"])
    with pytest.raises(BindingError, match="`ids`: it is not bound in this profile"):
        bindings.check()


def test_a_shape_that_was_never_set(bindings, tensors):
    for name, tensor in tensors.items():
        bindings.bind(name, tensor)
    with pytest.raises(BindingError, match=r"`ids`: its shape \(-1, -1\) is not known"):
        bindings.check()


def test_a_tensor_that_is_too_small(bindings, memory, tensors):
    make_ready(bindings, tensors)
    bindings.bind("ids", memory.to_device(np.zeros(2, "int32"), stream=memory.create_stream()))
    with pytest.raises(BindingError, match=r"`ids`: shape \(3, 1\) takes 12 bytes, the bound tensor has 8"):
        bindings.check()


def test_an_output_that_is_not_bound_where_its_input_is(bindings, memory, tensors):
    other = memory.to_device(np.zeros((3, 2, 64), "float16"), stream=memory.create_stream())
    make_ready(bindings, {**tensors, "present": other})
    with raises(BindingError, "`present`", expected="address of `past`"):
        bindings.check()


def test_bound_memory_that_was_closed_is_named(bindings, tensors):
    make_ready(bindings, tensors)
    bindings.active.require_open()
    tensors["past"].allocation.close()
    with pytest.raises(ClosedError, match="`past`: the memory that is bound is closed"):
        bindings.active.require_open()


def test_bound_memory_that_replaces_closed_memory(bindings, memory, tensors):
    make_ready(bindings, tensors)
    bindings.active.require_open()
    tensors["ids"].allocation.close()
    bindings.bind("ids", memory.to_device(np.zeros((3, 5), "int32"), stream=memory.create_stream()))
    bindings.active.require_open()


def test_views_of_one_allocation_are_looked_at_once(bindings, tensors):
    """A decode step must not cost more with more layers."""

    class Counting:
        looks = 0

        @property
        def closed(self):
            Counting.looks += 1
            return False

    allocation = Counting()
    for index in range(20):
        bindings.active.set(f"view {index}", type("View", (), {"allocation": allocation})())
    bindings.active.require_open()
    assert Counting.looks == 1
    bindings.active.set("another", type("View", (), {"allocation": Counting()})())
    bindings.active.require_open()
    assert Counting.looks == 3


@pytest.mark.parametrize("index", [-1, 2])
def test_a_profile_that_is_not_there(bindings, index):
    with pytest.raises(BindingError, match=rf"profile {index}: expected 0 <= index < 2"):
        bindings.use_profile(index)
    assert bindings.active.profile == 0


def test_released_bindings(bindings, tensors):
    make_ready(bindings, tensors)
    for _ in range(2):
        bindings.release()
    for call, *arguments in (
        (bindings.bind, "ids", tensors["ids"]),
        (bindings.set_input_shape, "ids", (1, 1)),
        (bindings.use_profile, 0),
        (bindings.check,),
    ):
        with pytest.raises(ClosedError, match="this SomeEngine is closed"):
            call(*arguments)


def test_a_stream_of_host_memory_has_no_handle(memory):
    with raises(PlaceError, "stream", expected="CUDA stream or graph builder", got="HostStream"):
        stream_handle(memory.create_stream())


class TestTwoSets:
    """Those of an engine whose states have two buffers."""

    @pytest.fixture
    def bindings(self, memory, target):
        ranges = [ProfileRanges({"ids": ((1, 1), (3, width)), "past": ((1, 2, 64), (3, 2, 64))}) for width in (5, 1)]
        return EngineBindings("SomeEngine", tensors=TENSORS, ranges=ranges, memory=memory, target=target, num_sets=2)

    def test_each_profile_has_a_context_in_each_set(self, bindings):
        found = []
        for index in (0, 1):
            bindings.use_bindings(index)
            for profile in (0, 1):
                bindings.use_profile(profile)
                found.append((bindings.active.profile, bindings.active.context))
        assert found == [(0, 0), (1, 1), (0, 2), (1, 3)]

    def test_a_set_keeps_the_profile_and_what_it_was_told(self, bindings, target, tensors):
        bindings.use_profile(1)
        bindings.bind("past", tensors["past"])
        bindings.use_bindings(1)
        assert (bindings.active.profile, bindings.active.tensors) == (1, {})
        bindings.set_input_shape("ids", (2, 1))
        bindings.use_bindings(0)
        assert bindings.active.tensors == {"past": tensors["past"]}
        assert (list(target.addresses), list(target.shapes)) == ([(1, "past")], [(3, "ids")])

    @pytest.mark.parametrize("index", [-1, 2])
    def test_a_set_that_is_not_there(self, bindings, index):
        bindings.use_bindings(1)
        with raises(BindingError, f"bindings {index}", expected="0 <= index < 2"):
            bindings.use_bindings(index)
        assert bindings.active.context == 2

    def test_after_release(self, bindings):
        bindings.release()
        with pytest.raises(ClosedError, match="this SomeEngine is closed"):
            bindings.use_bindings(0)
