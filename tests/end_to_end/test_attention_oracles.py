"""The attention kernels and their NumPy form against GroupQueryAttention of onnxruntime: RoPE, window, softcap, ragged lengths."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trt_kvcache import HostMemory
from trt_kvcache.kernels import AttentionWorkspace, attend
from trt_kvcache.kernels.attention_kernels import attend_kernel
from trt_kvcache.kernels.attention_params import AttentionParams

S, D = 24, 64
_INPUTS = ("query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length", "cos_cache", "sin_cache")


def group_query_attention(feed: dict[str, Any], **attributes: Any) -> list[Any]:
    """Run the operator alone; return the output, and K and V of the cache afterwards."""
    onnxruntime = pytest.importorskip("onnxruntime")  # the dev extra has it; a GPU machine need not
    from onnx import TensorProto, helper

    names = [name if name in feed else "" for name in _INPUTS]
    outputs = ["output", "present_key", "present_value"]
    node = helper.make_node("GroupQueryAttention", names, outputs, domain="com.microsoft", **attributes)
    info, kind = helper.make_tensor_value_info, helper.np_dtype_to_tensor_dtype
    inputs = [info(name, kind(array.dtype), array.shape) for name, array in feed.items()]
    graph = helper.make_graph([node], "attention", inputs, [info(name, TensorProto.FLOAT, None) for name in outputs])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    found: list[Any] = session.run(outputs, feed)
    return found


#: Past tokens, new tokens and width. onnxruntime takes several slots at once only for a first prompt or for one new token each.
STEPS = {
    "decode": ((0, 7, 23, 15), (1, 1, 1, 1), 1),
    "first prompt": ((0, 0, 0), (9, 2, 5), 9),
    "whole cache": ((0,), (S,), S),
    "continued": ((7,), (6,), 6),
}
SHAPES = [(2, 2, 0, None, 0, 0.0), (6, 2, D, None, 0, 0.0), (4, 1, 16, 0.2, 5, 0.0), (3, 3, D, 0.5, 0, 3.0), (8, 2, D, None, 3, 2.0)]


class Scene:
    """One call over random values that ``dtype`` can hold, dead rows NaN, and what onnxruntime makes of it in float32."""

    def __init__(self, memory, stream, dtype, step, heads, kv_heads, rotary_dim, scale, window, softcap):
        past, self.new, width = STEPS[step]
        random, slots = np.random.default_rng(len(past) + heads), len(past)

        def draw(*shape):
            return random.standard_normal(shape).astype(dtype).astype(np.float32)

        q, k, v = (draw(slots, width, count, D) for count in (heads, kv_heads, kv_heads))
        before = draw(slots, 2, kv_heads, S, D)
        angles = np.arange(S)[:, None] * 50.0 ** -(np.arange(rotary_dim // 2) / max(rotary_dim // 2, 1))
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        self.total = np.add(past, self.new)
        parts = [part.reshape(slots, width, -1) for part in (q, k, v)] + [before[:, 0].copy(), before[:, 1].copy()]
        parts += [(self.total - 1).astype(np.int32), np.array(self.total.max(), np.int32)] + [cos, sin] * (rotary_dim > 0)
        feed = dict(zip(_INPUTS, parts, strict=False))
        attributes = {"num_heads": heads, "kv_num_heads": kv_heads, "softcap": softcap, "do_rotary": int(rotary_dim > 0)}
        attributes |= {"scale": scale or D**-0.5, "local_window_size": window or -1}
        self.expected, *self.sides = group_query_attention(feed, **attributes)

        before[np.broadcast_to((np.arange(S) >= np.array(past)[:, None])[:, None, None], before.shape[:-1])] = np.nan
        values = {"q": q, "k": k, "v": v, "cache": before, "out": np.full_like(q, np.nan)}
        arrays = {name: array.astype(dtype) for name, array in values.items()} | {"cos_sin": np.stack([cos, sin], axis=1)}
        arrays |= {"lengths": np.array(past, np.int32), "new_lengths": np.array(self.new, np.int32)}
        self.arguments = {name: memory.to_device(array, stream=stream) for name, array in arrays.items()}
        self.arguments |= {"scale": scale or D**-0.5, "window": window, "softcap": softcap}
        if not rotary_dim:
            self.arguments["cos_sin"] = None
        sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": D}
        self.workspace = AttentionWorkspace(memory, **sizes, stream=stream)

    def check(self, tolerance):
        """Compare the new tokens' results and the rows that live now, relative to the largest value."""
        out, cache = (self.arguments[name].numpy().astype(np.float32) for name in ("out", "cache"))
        for slot, (length, count) in enumerate(zip(self.total, self.new, strict=True)):
            pairs = [(out[slot, :count].reshape(count, -1), self.expected[slot, :count])]
            pairs += [(cache[slot, side, :, :length], rows[slot, :, :length]) for side, rows in enumerate(self.sides)]
            for found, expected in pairs:
                np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize("step", list(STEPS))
@pytest.mark.parametrize("shape", SHAPES)
def test_numpy_in_float32(step, shape):
    memory = HostMemory()
    stream = memory.create_stream()
    scene = Scene(memory, stream, np.float32, step, *shape)
    attend_kernel(AttentionParams(**scene.arguments), scene.workspace, stream)
    scene.check(1e-6)  # both sum in float32, in another order


@pytest.mark.parametrize("step", list(STEPS))
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_in_float16(memory, stream, step, shape):
    scene = Scene(memory, stream, np.float16, step, *shape)
    attend(**scene.arguments, workspace=scene.workspace, stream=stream)
    memory.synchronize(stream)
    scene.check(2e-3)  # probabilities and results are rounded to 11 bits, and turned keys, which onnxruntime does not round
