"""``Graph``: names, constants without copies, and refusals that become exceptions with TensorRT's text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.helpers.assertions import raises
from trt_kvcache.builder.network.graph import Graph
from trt_kvcache.errors import BuildError
from trt_kvcache.trt.module import TensorRT

pytestmark = pytest.mark.trt


@pytest.fixture
def graph(rtx: TensorRT) -> Iterator[Graph]:
    with rtx.log.collect(ignore_missing_driver=True) as messages:
        builder = rtx.module.Builder(rtx.log.logger)
        yield Graph(rtx, builder.create_network(0), messages, dtype="float16")


def test_layer_and_its_output_carry_the_name(graph: Graph) -> None:
    x = graph.input("x", "float16", (-1, 3))
    y = graph.elementwise("sum/of/two", x, "SUM", x)
    assert y.name == "sum/of/two"
    assert graph.network.get_layer(0).name == "sum/of/two"


def test_shapes_that_do_not_fit_name_the_layer_at_fault(graph: Graph) -> None:
    x, y = graph.input("x", "float16", (-1, 3)), graph.input("y", "float16", (-1, 4))
    with pytest.raises(BuildError, match=r"layer `here`: its inputs do not fit. TensorRT says: .*broadcast dimensions"):
        graph.elementwise("here", x, "SUM", y)


def test_dtypes_that_differ_name_the_layer_at_fault(graph: Graph) -> None:
    x, y = graph.input("x", "float16", (2, 3)), graph.input("y", "float32", (2, 3))
    with pytest.raises(BuildError, match=r"layer `here`.*must have same input types"):
        graph.elementwise("here", x, "SUM", y)


def test_input_that_tensorrt_refuses(graph: Graph) -> None:
    graph.input("twice", "int32", (-1,))
    with pytest.raises(BuildError, match=r"network input `twice`: TensorRT refused it. TensorRT says: .*knownInput"):
        graph.input("twice", "int32", (-1,))


def test_layer_that_tensorrt_refuses(graph: Graph) -> None:
    combined = graph.input("cache", "float16", (2, 2, 1, 8, 16))  # five dimensions: only a 4-D cache can be updated
    rows, start = graph.input("rows", "float16", (2, 1, 3, 16)), graph.input("start", "int32", (2,))
    with pytest.raises(BuildError, match=r"layer `update`: TensorRT refused kv_cache_update. TensorRT says: "):
        graph.layer("update", "kv_cache_update", combined, rows, start, graph.trt.KVCacheMode.LINEAR)


def test_error_that_is_only_logged_is_raised(graph: Graph) -> None:
    # TensorRT takes a mask beside a causal kind, says so in its log, and drops the mask.
    q, kv = graph.input("q", "float16", (1, 2, 3, 16)), graph.input("kv", "float16", (1, 2, 5, 16))
    mask = graph.input("mask", "float16", (1, 1, 3, 5))
    causal = graph.trt.CausalMaskKind.LOWER_RIGHT
    layer = graph.layer("both", "attention_v2", q, kv, kv, graph.trt.AttentionNormalizationOp.SOFTMAX, causal)
    layer.mask = mask
    with pytest.raises(BuildError, match=r"layer `both`. TensorRT says: .*mask"):
        graph.result(layer)


def test_no_cuda_line_in_the_text(graph: Graph) -> None:
    x, y = graph.input("x", "float16", (-1, 3)), graph.input("y", "float16", (-1, 4))
    with pytest.raises(BuildError) as raised:
        graph.elementwise("here", x, "SUM", y)
    assert "cudaError" not in str(raised.value)


def test_constant_is_not_copied_and_is_kept_alive(graph: Graph) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    array.flags.writeable = False
    tensor = graph.constant("weights", array)
    assert tuple(tensor.shape) == (2, 3)
    assert any(kept is array for kept in graph._owners)
    layer: Any = graph.network.get_layer(0)
    layer.__class__ = graph.trt.IConstantLayer
    assert layer.weights.ctypes.data == array.ctypes.data


@pytest.mark.parametrize("how", ["not dense", "not aligned"])
def test_constant_that_tensorrt_could_not_read_is_copied(graph: Graph, how: str) -> None:
    if how == "not dense":
        array = np.arange(6, dtype=np.float32).reshape(3, 2).T
    else:
        array = np.frombuffer(bytearray(25), np.uint8)[1:].view(np.float32).reshape(2, 3)
        array[...] = np.arange(6).reshape(2, 3)
        assert not array.flags.aligned
    graph.constant("weights", array)
    layer: Any = graph.network.get_layer(0)
    layer.__class__ = graph.trt.IConstantLayer
    np.testing.assert_array_equal(layer.weights.reshape(array.shape), array)
    assert layer.weights.ctypes.data != array.ctypes.data
    assert layer.weights.ctypes.data % 4 == 0


def test_scalar_of_rank_0(graph: Graph) -> None:
    assert tuple(graph.scalar("zero", 0, "int32", 0).shape) == ()
    assert tuple(graph.scalar("one", 1, "float32", 3).shape) == (1, 1, 1)


def test_cast_to_the_same_dtype_adds_nothing(graph: Graph) -> None:
    x = graph.input("x", "float16", (2,))
    assert graph.cast("same", x, "float16") is x
    assert graph.network.num_layers == 0
    assert graph.cast("other", x, "float32").dtype == graph.trt.float32


def test_layer_that_this_tensorrt_does_not_have(graph: Graph) -> None:
    x = graph.input("x", "float16", (-1, 3))
    layers = graph.network.num_layers
    with raises(BuildError, "layer `new`", expected=("TensorRT with layers of kind attention_v9, tensorrt_rtx", "has none")):
        graph.op("new", "attention_v9", x)
    assert graph.network.num_layers == layers
