"""``Graph``: names, constants without copies, and refusals that become exceptions with TensorRT's text."""

import numpy as np
import pytest

from trt_kvcache.builder.network.graph import Graph
from trt_kvcache.errors import BuildError

pytestmark = pytest.mark.trt


@pytest.fixture
def graph(rtx):
    with rtx.log.collect(ignore_missing_driver=True) as messages:
        builder = rtx.module.Builder(rtx.log.logger)
        yield Graph(rtx, builder.create_network(0), messages, dtype="float16")


def test_names_scalars_and_casts(graph):
    x = graph.input("x", "float16", (-1, 3))
    assert graph.cast("same", x, "float16") is x
    assert graph.network.num_layers == 0
    assert graph.elementwise("sum/of/two", x, "SUM", x).name == graph.network.get_layer(0).name == "sum/of/two"
    assert graph.cast("other", x, "float32").dtype == graph.trt.float32
    assert [tuple(graph.scalar(f"of {rank}", 1, "int32", rank).shape) for rank in (0, 3)] == [(), (1, 1, 1)]


def sum_with(dtype, shape):
    return lambda graph: graph.elementwise("here", graph.input("x", "float16", (-1, 3)), "SUM", graph.input("y", dtype, shape))


def input_twice(graph):
    for _ in range(2):
        graph.input("twice", "int32", (-1,))


def update_of_five_dimensions(graph):
    shapes = {"cache": (2, 2, 1, 8, 16), "rows": (2, 1, 3, 16)}
    tensors = [graph.input(name, "float16", shape) for name, shape in shapes.items()]
    graph.layer("update", "kv_cache_update", *tensors, graph.input("start", "int32", (2,)), graph.trt.KVCacheMode.LINEAR)


def mask_beside_a_causal_kind(graph):
    """TensorRT takes it, says so in its log, and drops the mask."""
    q, kv = graph.input("q", "float16", (1, 2, 3, 16)), graph.input("kv", "float16", (1, 2, 5, 16))
    causal = graph.trt.CausalMaskKind.LOWER_RIGHT
    layer = graph.layer("both", "attention_v2", q, kv, kv, graph.trt.AttentionNormalizationOp.SOFTMAX, causal)
    layer.mask = graph.input("mask", "float16", (1, 1, 3, 5))
    graph.result(layer)


@pytest.mark.parametrize(
    ("add", "message"),
    [
        (sum_with("float16", (-1, 4)), "layer `here`: its inputs do not fit. TensorRT says: .*broadcast dimensions"),
        (sum_with("float32", (-1, 3)), "layer `here`.*must have same input types"),
        (input_twice, "network input `twice`: TensorRT refused it. TensorRT says: .*knownInput"),
        (update_of_five_dimensions, "layer `update`: TensorRT refused kv_cache_update. TensorRT says: "),
        (mask_beside_a_causal_kind, "layer `both`. TensorRT says: .*mask"),
    ],
)
def test_what_tensorrt_refuses_is_named(graph, add, message):
    with pytest.raises(BuildError, match=message) as raised:
        add(graph)
    assert "cudaError" not in str(raised.value)


@pytest.mark.parametrize("how", ["not copied", "not dense", "not aligned"])
def test_a_constant_is_copied_only_where_tensorrt_could_not_read_it(graph, how):
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    if how == "not dense":
        array = array.T
    elif how == "not aligned":
        array = np.frombuffer(b"\0" + array.tobytes(), np.uint8)[1:].view(np.float32).reshape(2, 3)
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
