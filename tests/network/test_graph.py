"""``Graph``: names, constants without copies, and refusals that become exceptions with TensorRT's text."""

from __future__ import annotations

import numpy as np
import pytest

from trt_kvcache.errors import BuildError
from trt_kvcache.network.graph import Graph

pytestmark = pytest.mark.trt


@pytest.fixture
def graph(rtx):
    with rtx.log.collect(ignore_missing_driver=True) as messages:
        builder = rtx.module.Builder(rtx.log.logger)
        yield Graph(rtx, builder.create_network(0), messages, dtype="float16")


def test_layer_and_its_output_carry_the_name(graph):
    x = graph.input("x", "float16", (-1, 3))
    y = graph.elementwise("sum/of/two", x, "SUM", x)
    assert y.name == "sum/of/two"
    assert graph.network.get_layer(0).name == "sum/of/two"


@pytest.mark.parametrize(
    ("dtype", "shape", "message"),
    [
        ("float16", (-1, 4), "layer `here`: its inputs do not fit. TensorRT says: .*broadcast dimensions"),
        ("float32", (-1, 3), "layer `here`.*must have same input types"),
    ],
)
def test_inputs_that_do_not_fit_name_the_layer_at_fault(graph, dtype, shape, message):
    x, y = graph.input("x", "float16", (-1, 3)), graph.input("y", dtype, shape)
    with pytest.raises(BuildError, match=message) as raised:
        graph.elementwise("here", x, "SUM", y)
    assert "cudaError" not in str(raised.value)


def test_input_that_tensorrt_refuses(graph):
    graph.input("twice", "int32", (-1,))
    with pytest.raises(BuildError, match=r"network input `twice`: TensorRT refused it. TensorRT says: .*knownInput"):
        graph.input("twice", "int32", (-1,))


def test_layer_that_tensorrt_refuses(graph):
    combined = graph.input("cache", "float16", (2, 2, 1, 8, 16))  # five dimensions: only a 4-D cache can be updated
    rows, start = graph.input("rows", "float16", (2, 1, 3, 16)), graph.input("start", "int32", (2,))
    with pytest.raises(BuildError, match=r"layer `update`: TensorRT refused kv_cache_update. TensorRT says: "):
        graph.layer("update", "kv_cache_update", combined, rows, start, graph.trt.KVCacheMode.LINEAR)


def test_error_that_is_only_logged_is_raised(graph):
    # TensorRT takes a mask beside a causal kind, says so in its log, and drops the mask.
    q, kv = graph.input("q", "float16", (1, 2, 3, 16)), graph.input("kv", "float16", (1, 2, 5, 16))
    mask = graph.input("mask", "float16", (1, 1, 3, 5))
    causal = graph.trt.CausalMaskKind.LOWER_RIGHT
    layer = graph.layer("both", "attention_v2", q, kv, kv, graph.trt.AttentionNormalizationOp.SOFTMAX, causal)
    layer.mask = mask
    with pytest.raises(BuildError, match=r"layer `both`. TensorRT says: .*mask"):
        graph.result(layer)


@pytest.mark.parametrize("how", ["not copied", "not dense", "not aligned"])
def test_a_constant_is_copied_only_where_tensorrt_could_not_read_it(graph, how):
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    if how == "not dense":
        array = array.T
    elif how == "not aligned":
        values, array = array, np.frombuffer(bytearray(25), np.uint8)[1:].view(np.float32).reshape(2, 3)
        array[...] = values
        assert not array.flags.aligned
    array.flags.writeable = False
    assert tuple(graph.constant("weights", array).shape) == array.shape
    layer = graph.network.get_layer(0)
    layer.__class__ = graph.trt.IConstantLayer
    np.testing.assert_array_equal(layer.weights.reshape(array.shape), array)
    assert layer.weights.ctypes.data % 4 == 0
    kept = how == "not copied"
    assert (layer.weights.ctypes.data == array.ctypes.data) is kept
    assert any(each is array for each in graph._arrays) is kept


def test_scalar_of_rank_0(graph):
    assert tuple(graph.scalar("zero", 0, "int32", 0).shape) == ()
    assert tuple(graph.scalar("one", 1, "float32", 3).shape) == (1, 1, 1)


def test_cast_to_the_same_dtype_adds_nothing(graph):
    x = graph.input("x", "float16", (2,))
    assert graph.cast("same", x, "float16") is x
    assert graph.network.num_layers == 0
    assert graph.cast("other", x, "float32").dtype == graph.trt.float32
