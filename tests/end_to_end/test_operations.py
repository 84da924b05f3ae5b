"""The custom operations, plainly and in a CUDA graph, beside their NumPy twins."""

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from tests.helpers.assertions import assert_close
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.ops.attention_op import AttentionOp
from trt_kvcache.ops.custom_op import TensorType, run_on_host
from trt_kvcache.ops.embedding_op import EmbeddingOp
from trt_kvcache.trt.cuda_graphs import CudaGraphCache
from trt_kvcache.trt.engine_bindings import stream_handle

RANDOM = np.random.default_rng(2)
B, H, GROUP, S, D = 3, 2, 3, 21, 64


def normal(*shape, dtype=np.float16):
    return RANDOM.normal(size=shape).astype(dtype)


def attention_inputs(width, rotary_dim=D):
    angles = RANDOM.uniform(0, 6, (S, rotary_dim // 2))
    heads = (normal(B, width, count, D) for count in (H * GROUP, H, H))
    cos_sin = np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
    return [*heads, normal(B, 2, H, S, D), np.array([0, 5, S - width], np.int32), cos_sin]


def tree_inputs():
    """Four tokens of a tree, or of a chain, in a table of more slots; and attention sinks."""
    *inputs, cos_sin = attention_inputs(4)
    table = np.full((B + 2, 64, 2), -1, np.int32)
    masks = np.array([[0b1, 0b11, 0b101, 0b1011], [0b1, 0b11, 0b111, 0b1111], [0b1, 0b11, 0b101, 0b1001]], np.int64)
    table.reshape(-1)[: 2 * masks.size] = masks.view(np.int32).ravel()
    return [*inputs, table, cos_sin, normal(H * GROUP, dtype=np.float32)]


def embedding_inputs(dtype, hidden):
    ids = np.array([[0, 36, 4, 4, -1], [37, 2**31 - 1, 9, 1, 2]], np.int32)
    return [normal(37, hidden, dtype=dtype), ids]


ATTENTION = AttentionOp(num_heads=H * GROUP, num_kv_heads=H, head_dim=D)
SCORES = {"scale": 0.3, "window": 7, "softcap": 5.0}
PARTLY, UNTURNED = (AttentionOp(num_heads=H * GROUP, num_kv_heads=H, head_dim=D, rotary_dim=size, **SCORES) for size in (32, 0))


@pytest.mark.parametrize(
    ("op", "inputs"),
    [
        (ATTENTION, attention_inputs(1)),
        (ATTENTION, attention_inputs(4)),
        (PARTLY, attention_inputs(4, 32)),
        (UNTURNED, attention_inputs(1)[:5]),
        (AttentionOp(num_heads=H * GROUP, num_kv_heads=H, head_dim=D, sinks=1, trees=1), tree_inputs()),
        (EmbeddingOp(), embedding_inputs(np.float16, 40)),
        (EmbeddingOp(), embedding_inputs(ml_dtypes.bfloat16, 3)),
        (EmbeddingOp(), embedding_inputs(np.float32, 1032)),
    ],
)
def test_the_same_as_the_twin_plainly_and_in_a_graph(memory, stream, op, inputs):
    twin = run_on_host(op, *inputs)
    tensors = [memory.to_device(array, stream=stream) for array in inputs]
    types = [TensorType(one.shape, one.dtype) for one in tensors]
    first = [
        memory.to_device(np.full(one.shape, 7, twin[index].dtype), stream=stream) if one.alias is None else tensors[one.alias]
        for index, one in enumerate(op.outputs(types))
    ]
    nbytes = op.workspace_nbytes(types)
    workspace = DeviceTensor(memory.allocate(nbytes, zeroed=True, stream=stream), shape=(nbytes,), dtype="uint8")
    graphs, ran = CudaGraphCache(memory), []

    def run(stream):
        ran.append(1 if memory.is_host else stream_handle(stream))
        op.enqueue(tensors, first, workspace, stream)

    copy = SimpleNamespace(run=run, refusal=lambda stream: None, close=lambda: None)
    work = SimpleNamespace(run=run, copy=lambda stream: copy)
    for _ in range(4):
        memory.zero(first[0], stream=stream)
        graphs.run("step", stream, work)
        memory.synchronize(stream)
        for actual, expected in zip(first, twin, strict=True):
            tolerance = 0 if op.name == "embedding" else 4e-3
            assert_close(actual.numpy(), expected, tolerance)
    assert len(ran) == (4 if memory.is_host else 3)  # then its graph ran
    assert len(set(ran)) == 1  # a graph builder has the address of its stream
    graphs.close()
