"""Check E: a lone IAttention layer of TensorRT attends to the live rows of each slot, as NumPy does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from trt_kvcache.builder.network import Graph
from trt_kvcache.builder.network.causal_mask import causal_masks
from trt_kvcache.builder.network.self_attention import bare_attention_layer
from trt_kvcache.doctor.cases import CaseLog, CheckFailure
from trt_kvcache.doctor.compare import TOLERANCES, Array, check_close
from trt_kvcache.doctor.settings import Settings
from trt_kvcache.doctor.single_layer import Runner, ShapeRange, SingleLayer, opened
from trt_kvcache.dtypes import numpy_dtype

_SLOTS, _HEADS, _KV_HEADS, _TOKENS, _HEAD_DIM, _MAX_WIDTH = 3, 4, 2, 2048, 128, 16

#: Dtypes of the layers that are built.
DTYPES = ("float16", "bfloat16")

#: Contents of rows that are not live: large but finite, which every variant must ignore; and NaN, which only tells.
LARGE = 1e4


class Attend(NamedTuple):
    """One step: the new tokens of each slot, and its keys with them."""

    name: str
    width: int
    key_lengths: tuple[int, int, int]


STEPS = (
    Attend("decode at 1, 17 and S", 1, (1, 17, _TOKENS)),
    Attend("chunk at an offset", _MAX_WIDTH, (_MAX_WIDTH, 300, _TOKENS)),
)


class AttentionLayer(SingleLayer):
    """An IAttention layer: with key lengths (native), or with an explicit mask."""

    def __init__(self, variant: str, dtype: str) -> None:
        self.variant, self.dtype = variant, dtype

    def define(self, graph: Graph) -> None:
        """See :meth:`SingleLayer.define`."""
        q = graph.input("q", self.dtype, (-1, _HEADS, -1, _HEAD_DIM))
        keys, values = (graph.input(name, self.dtype, (-1, _KV_HEADS, _TOKENS, _HEAD_DIM)) for name in ("keys", "values"))
        layer = bare_attention_layer(graph, "attend", q, keys, values, is_causal=self.variant == "native")
        if self.variant == "native":
            layer.key_value_lengths = graph.input("key_lengths", "int32", (-1,))
        else:
            positions = graph.input("position_ids", "int32", (-1, -1))
            layer.mask = causal_masks(graph, position_ids=positions, max_sequence_length=_TOKENS, windows=(None,))[None]
        graph.output(graph.result(layer), "attended")

    def shapes(self) -> Mapping[str, ShapeRange]:
        """See :meth:`SingleLayer.shapes`."""
        cache, widest = (_SLOTS, _KV_HEADS, _TOKENS, _HEAD_DIM), (_SLOTS, _HEADS, _MAX_WIDTH, _HEAD_DIM)
        cached = ((1, *cache[1:]), cache, cache)
        last: dict[str, ShapeRange] = {"key_lengths": ((1,), (_SLOTS,), (_SLOTS,))}
        if self.variant != "native":
            last = {"position_ids": ((1, 1), (_SLOTS, _MAX_WIDTH), (_SLOTS, _MAX_WIDTH))}
        return {"q": ((1, _HEADS, 1, _HEAD_DIM), widest, widest), "keys": cached, "values": cached, **last}

    def compute(self, tensors: Mapping[str, Array]) -> None:
        """See :meth:`SingleLayer.compute`."""
        width = tensors["q"].shape[2]
        ends = tensors["key_lengths"] if self.variant == "native" else tensors["position_ids"][:, 0] + width
        tensors["attended"][...] = attended(tensors["q"], tensors["keys"], tensors["values"], ends.tolist())


def attended(q: Array, keys: Array, values: Array, key_lengths: list[int]) -> Array:
    """Return the attention of new tokens, which are the last keys of each slot, in float32."""
    out = np.zeros(q.shape, np.float32)
    width = q.shape[2]
    for slot, length in enumerate(key_lengths):
        visible = np.arange(length) <= np.arange(length - width, length)[:, None]
        for head in range(q.shape[1]):
            kv_head = head * keys.shape[1] // q.shape[1]
            scores = q[slot, head].astype(np.float32) @ keys[slot, kv_head, :length].astype(np.float32).T
            scores[~visible] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[slot, head] = weights @ values[slot, kv_head, :length].astype(np.float32) / weights.sum(axis=1, keepdims=True)
    return out


def check(settings: Settings, log: CaseLog) -> None:
    """Check both variants in both dtypes, with clean and with poisoned rows."""
    for variant in ("native", "mask"):
        for dtype in DTYPES:
            for step in STEPS:
                name = f"{variant}, {dtype}, {step.name}"
                for poison in (0.0, LARGE):
                    case = name if poison == 0 else f"{name}, {poison:g} in rows that are not live"
                    log.run(case, lambda v=variant, d=dtype, s=step, p=poison: _agrees(settings, v, d, s, p), variant=variant)  # type: ignore[misc]
            log.run(f"{variant}, {dtype}, NaN", lambda v=variant, d=dtype: _nan(settings, log, v, d), variant=variant)  # type: ignore[misc]


def _agrees(settings: Settings, variant: str, dtype: str, step: Attend, poison: float) -> dict[str, Any]:
    with opened(settings, AttentionLayer(variant, dtype), variant) as runner:
        return {"relative_error": run_step(runner, variant, dtype, step, poison)}


def _nan(settings: Settings, log: CaseLog, variant: str, dtype: str) -> dict[str, Any]:
    """Tell whether NaN in rows that are not live reaches the result. Sessions never leave any there."""
    with opened(settings, AttentionLayer(variant, dtype), variant) as runner:
        reached = []
        for step in STEPS:
            try:
                run_step(runner, variant, dtype, step, float("nan"))
            except CheckFailure:
                reached.append(step.name)
    if reached:
        log.note(f"{variant}, {dtype}, NaN in rows that are not live", f"it reaches the results of: {', '.join(reached)}")
    return {"nan_reaches_results": bool(reached)}


def run_step(runner: Runner, variant: str, dtype: str, step: Attend, poison: float) -> float:
    """Run one step, and return its relative error; rows that are not live hold ``poison``."""
    memory = runner.memory
    stream, random, kind = memory.create_stream(), np.random.default_rng(7), numpy_dtype(dtype)
    q = (random.standard_normal((_SLOTS, _HEADS, step.width, _HEAD_DIM)) / np.sqrt(_HEAD_DIM)).astype(kind)
    keys, values = (random.standard_normal((_SLOTS, _KV_HEADS, _TOKENS, _HEAD_DIM)).astype(kind) for _ in range(2))
    for slot, length in enumerate(step.key_lengths):
        keys[slot, :, length:] = values[slot, :, length:] = poison
    arrays = {"q": q, "keys": keys, "values": values, "attended": np.zeros_like(q)}
    ends = np.array(step.key_lengths, np.int32)
    if variant == "native":
        arrays["key_lengths"] = ends
    else:
        arrays["position_ids"] = ends[:, None] - step.width + np.arange(step.width, dtype=np.int32)
    bound = {name: memory.to_device(array, stream=stream) for name, array in arrays.items()}
    memory.synchronize(stream)
    runner.run(bound)
    expected = attended(q, keys, values, list(step.key_lengths))
    return float(f"{check_close(step.name, bound['attended'].numpy(), expected, TOLERANCES[dtype]):.2g}")
