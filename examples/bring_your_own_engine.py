"""Bring your own engine: drive an engine that trt_kvcache did not build, with its own tensor names. Needs no GPU.

The engine here is written by hand in NumPy and has no weights. It is an induction head, the simplest thing that attention
can do: find the last place where the newest token stood before, and expect what came after it. So it goes on with whatever
pattern the prompt has. Its key for a token is the token *before* it and its value the token itself, both one-hot.

What an engine needs is in ``trt_kvcache.engine.protocol.Engine``: tensors, profiles, ``use_profile``, ``bind``, ``set_input_shape``,
``enqueue``, ``close``. A serialised TensorRT engine needs none of that: ``TensorRTEngine.open("engine.plan", memory=...,
names=...)`` is one already.

Run it::

    python examples/bring_your_own_engine.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trt_kvcache import (
    DeviceTensor,
    EngineProfile,
    HostMemory,
    InferenceSession,
    KVCacheConfig,
    KVCacheManager,
    KVLayerConfig,
    KVLayout,
    TensorMode,
    TensorNames,
    TensorSpec,
)

VOCAB = 32

#: What this engine calls its tensors. Both sides of a pair share one address: the cache is updated in place.
NAMES = TensorNames(
    input_ids="tokens",
    kvcache_start_index="past_lengths",
    last_token_ids="last",
    logits="scores",
    k_cache="keys_{i}",
    v_cache="values_{i}",
    present_k_cache="new_keys_{i}",
    present_v_cache="new_values_{i}",
)

#: The cache that it runs on: one layer of one head, K and V apart.
KV = KVCacheConfig(
    layers=(KVLayerConfig(num_kv_heads=1, head_dim=VOCAB),),
    max_batch_size=3,
    max_sequence_length=64,
    dtype="float32",
    layout=KVLayout.SEPARATE,
)


class InductionEngine:
    """One attention head in NumPy, behind the engine protocol."""

    def __init__(self, memory: HostMemory) -> None:
        rows = (-1, 1, KV.max_sequence_length, VOCAB)
        self.memory = memory
        self.tensors = {
            spec.name: spec
            for spec in (
                TensorSpec(name="tokens", shape=(-1, -1), dtype="int32", mode=TensorMode.INPUT),
                TensorSpec(name="past_lengths", shape=(-1,), dtype="int32", mode=TensorMode.INPUT),
                TensorSpec(name="last", shape=(-1, 1), dtype="int32", mode=TensorMode.INPUT),
                TensorSpec(name="keys_0", shape=rows, dtype="float32", mode=TensorMode.INPUT),
                TensorSpec(name="values_0", shape=rows, dtype="float32", mode=TensorMode.INPUT),
                TensorSpec(name="new_keys_0", shape=rows, dtype="float32", mode=TensorMode.OUTPUT, alias="keys_0"),
                TensorSpec(name="new_values_0", shape=rows, dtype="float32", mode=TensorMode.OUTPUT, alias="values_0"),
                TensorSpec(name="scores", shape=(-1, VOCAB), dtype="float32", mode=TensorMode.OUTPUT),
            )
        }
        # One profile for everything: up to 8 new tokens for each of up to 3 slots.
        self.profiles = [EngineProfile(name="any", min_batch=1, max_batch=KV.max_batch_size, min_width=1, max_width=8)]
        self._bound: dict[str, DeviceTensor] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}

    def use_profile(self, index: int) -> None:
        """There is only one."""

    def bind(self, name: str, tensor: DeviceTensor) -> None:
        """Remember where a tensor is, which also keeps it alive."""
        self._bound[name] = tensor

    def set_input_shape(self, name: str, shape: Sequence[int]) -> None:
        """Remember how large an input is."""
        self._shapes[name] = tuple(shape)

    def enqueue(self, stream: Any) -> None:
        """Write the rows of the new tokens, then let the last one attend to all that are in its slot."""
        inputs = ("tokens", "past_lengths", "last", "keys_0", "values_0")
        tokens, past, last, keys, values = (self._array(name, self._shapes[name]) for name in inputs)
        slots, width = tokens.shape
        scores = self._array("scores", (slots, VOCAB))
        one_hot = np.eye(VOCAB, dtype=np.float32)
        for slot in range(slots):
            start, end = past[slot], past[slot] + width
            values[slot, 0, start:end] = one_hot[tokens[slot]]
            keys[slot, 0, start:end] = 0
            first = max(start, 1)  # the very first token of a slot has none before it
            keys[slot, 0, first:end] = values[slot, 0, first - 1 : end - 1]
            live = start + last[slot, 0] + 1  # what lies behind is padding
            query = values[slot, 0, live - 1]
            found = keys[slot, 0, :live] @ query  # 1 where the token before was the same one
            recent = np.arange(1, live + 1, dtype=np.float32)  # of several places, the last
            scores[slot] = (found * recent) @ values[slot, 0, :live]

    def close(self) -> None:
        """Let go of what was bound."""
        self._bound.clear()

    def _array(self, name: str, shape: tuple[int, ...]) -> Any:
        """Return what is bound as a NumPy array over the same bytes. Its shape is that of the step."""
        bound = self._bound[name]
        return self.memory.array(DeviceTensor(bound.allocation, shape=shape, dtype=bound.dtype, offset=bound.offset))


def main() -> None:
    """Continue three patterns together."""
    memory = HostMemory()
    prompts = [[1, 2, 3, 4] * 3, [7, 7, 8] * 2, [5, 30, 5, 30]]
    with InferenceSession(InductionEngine(memory), KVCacheManager(KV, memory=memory), names=NAMES) as session:
        continued: list[list[int]] = [[] for _ in prompts]
        for event in session.generate(prompts, max_new_tokens=8):
            continued[event.index].append(event.token)
        for prompt, tokens in zip(prompts, continued, strict=True):
            print(*prompt, "->", *tokens)
        print(f"{session.statistics.cache_bytes_live} of {session.statistics.cache_bytes_reserved} bytes of the cache are live")


if __name__ == "__main__":
    main()
