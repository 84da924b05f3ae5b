"""Enqueue of the plugin library against the Python plugin: the same launches, so the same bits."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from tests.kernels.attention import DECODE_CASES, FEW_CASES, PREFILL_CASES, QUANTIZED, quantized
from tests.plugin_library.build import build_library, embed_kernels, need_cmake
from tests.plugin_library.creators import DATA_TYPES, create
from tests.simt.run import ARCH, VARIANTS
from tests.simt.standin import ALLOCATIONS, WAITS, StandIn, need_cuda_memory, needs_standin
from tests.trt.plugin.bound import Bound
from trt_kvcache.kernels.attention_tiles import STORED_TYPES
from trt_kvcache.ops.int32_packing import packed_shape

need_cuda_memory()
need_cmake()

_ONE = {"groups": DECODE_CASES, "one head": DECODE_CASES, "some take no part": DECODE_CASES, "window": DECODE_CASES,
        "softcap and scale": DECODE_CASES, "sixteen": DECODE_CASES}  # fmt: skip
_FEW = dict.fromkeys(("a window inside the new tokens", "large heads, few rows"), FEW_CASES)
_MANY = dict.fromkeys(("ragged", "small heads"), PREFILL_CASES)
_ROW_BLOCKS = dict.fromkeys(("several row blocks of few tokens", "row blocks of many tokens", "a full cache"), PREFILL_CASES)
_PLAIN = {
    name: replace(cases[name], layout="combined", packed=False, in_place=False)
    for name, cases in (_ONE | _FEW | _MANY | _ROW_BLOCKS).items()
}
_QUANTIZED = {
    f"{name}, {kv_dtype}, {scales}": quantized(_PLAIN[name], kv_dtype, scales)
    for kv_dtype, scales in QUANTIZED
    for name in ("groups", "a window inside the new tokens", "ragged")
}
_CASES = _PLAIN | _QUANTIZED


_library_for = cache(lambda arch: build_library(arch, [arch], VARIANTS, [None, *STORED_TYPES]))


@pytest.fixture
def library(memory):
    """The library with the kernels of the emulated device, or of the GPU that is there."""
    return _library_for(memory.arch)


class LibraryBound(Bound):
    """Tensors with a plugin of the library, which TensorRT would call at these places."""

    def __init__(self, library, case, memory, stream):
        super().__init__(case, memory, stream)
        self.plugin = create(library, self.fields).attach()
        types = {name: (tensor.shape, DATA_TYPES.get(tensor.dtype, 3)) for name, tensor in self.tensors.items()}
        if case.kv_dtype:
            types["cache"] = (packed_shape(types["cache"][0]), DATA_TYPES["int32"])
        self.typed = [*types.values(), types["q"], *(types[name] for name in self.updated)]
        assert self.plugin.on_shape_change(self.typed, len(types))

    def enqueue(self, **changed):
        inputs = [tensor.ptr for tensor in self.tensors.values()]
        outputs = [self.out.ptr, *(changed.get(name, self.tensors[name].ptr) for name in self.updated)]
        assert self.plugin.enqueue(self.typed, inputs, outputs, self.workspace.ptr, self.handle)


@pytest.mark.parametrize("name", list(_CASES))
def test_the_result_is_that_of_the_python_plugin(library, memory, stream, name):
    bound, other = LibraryBound(library, _CASES[name], memory, stream), Bound(_CASES[name], memory, stream)
    for _ in range(2):
        bound.fill()
        bound.enqueue()
        other.fill()
        other.enqueue()
        memory.synchronize(stream)
        assert bound.out.numpy().tobytes() == other.out.numpy().tobytes()
        for one in bound.updated:
            assert bound.tensors[one].numpy().tobytes() == other.tensors[one].numpy().tobytes()
    bound.check(_CASES[name].dtype)


_KINDS = ["groups", "ragged", "groups, float8_e4m3fn, token", "ragged, int8, token", "groups, int8, head"]


@pytest.mark.parametrize("name", _KINDS)
def test_a_step_can_be_captured_in_a_graph(library, memory, stream, name):
    bound = LibraryBound(library, _CASES[name], memory, stream)
    bound.enqueue()
    builder = stream.create_graph_builder()
    builder.begin_building()
    bound.enqueue()
    graph = builder.end_building().complete()
    bound.out.numpy()  # waits for all streams
    for _ in range(2):
        bound.fill()
        graph.launch(stream)
        bound.check(_CASES[name].dtype)


@needs_standin
@pytest.mark.parametrize("name", _KINDS)
def test_the_calls_of_the_driver_are_those_of_the_python_plugin(library, memory, stream, name):
    bound, other = LibraryBound(library, _CASES[name], memory, stream), Bound(_CASES[name], memory, stream)
    calls = []
    for one in (bound, other):
        one.enqueue()
        standin = StandIn()
        one.enqueue()
        calls.append([call for call in standin.take_calls() if "Launch" in call or "Mem" in call])
    assert calls[0] == calls[1]
    assert not {*calls[0]} & (WAITS | ALLOCATIONS)


@needs_standin
def test_a_step_calls_the_driver_for_nothing_else(library, memory, stream):
    bound = LibraryBound(library, _CASES["groups"], memory, stream)
    bound.enqueue()
    standin = StandIn()
    bound.enqueue()
    assert standin.take_calls() == ["cuMemsetD8Async", "cuLaunchKernelEx"]


@pytest.mark.parametrize("name", _KINDS)
def test_an_input_that_is_not_aliased_is_copied(library, memory, stream, name):
    """The cache, and the scales of its tokens."""
    bound = LibraryBound(library, _CASES[name], memory, stream)
    past = {name: bound.tensors[name] for name in bound.updated}
    present = {name: memory.to_device(np.full_like(bound.host[name], 77), stream=stream) for name in bound.updated}
    bound.enqueue(**{name: tensor.ptr for name, tensor in present.items()})
    memory.synchronize(stream)
    for name, tensor in past.items():
        assert tensor.numpy().tobytes() == bound.host[name].tobytes()
    bound.tensors |= present
    bound.check(bound.case.dtype)


def test_shapes_may_change_between_steps(library, memory, stream):
    first = LibraryBound(library, _CASES["groups"], memory, stream)
    larger = LibraryBound(library, replace(_CASES["groups"], lengths=(4, 0, 9)), memory, stream)
    first.enqueue()
    larger.plugin = first.plugin
    assert larger.plugin.on_shape_change(larger.typed, len(larger.tensors))
    larger.enqueue()
    larger.check("float16")


def test_kernels_that_the_driver_has_compiled_are_said_once(memory, stream, capfd):
    """PTX, for which the emulated device takes its machine code."""
    arch = memory.arch if memory.arch == ARCH else embed_kernels().PTX_ARCH
    library = build_library(f"{arch}-ptx", [arch], ["float16-128"], [None], is_ptx=True)
    for name in ("groups", "window"):
        bound = LibraryBound(library, _PLAIN[name], memory, stream)
        bound.enqueue()
        bound.check(_PLAIN[name].dtype)
    assert capfd.readouterr().err == (
        "The plugin library has no machine code for this GPU: the driver has compiled its PTX. Build the library for it.\n"
    )


def test_kernels_that_the_library_has_not_are_named(library, memory, stream, capfd):
    bound = LibraryBound(library, replace(_CASES["groups"], head_dim=96), memory, stream)
    with pytest.raises(AssertionError):
        bound.enqueue()
    said = capfd.readouterr().err
    assert f"KVCacheAttention.enqueue: kernels: expected float16-96 for {memory.arch} in this library, got float16-64 for " in said
