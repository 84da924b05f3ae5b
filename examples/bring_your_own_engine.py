"""Bring your own engine: drive an engine that trt_kvcache did not build, with its own tensor names. Needs no GPU.

The engine is written in NumPy and has no weights. It is an induction head, the simplest use of attention: it finds the last
earlier occurrence of the newest token and predicts the token that followed it. So it continues any pattern that the prompt
repeats. The key of a token is the token *before* it, and its value is the token itself, both one-hot.

``trt_kvcache.Engine`` is the protocol that an engine implements: tensors, profiles, a memory, ``use_profile``, ``bind``,
``set_input_shape``, ``enqueue``, ``close``. A serialised TensorRT engine needs none of that code:
``TensorRTEngine.open("engine.plan", memory=..., names=...)`` opens it as such an engine.

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

#: The names of the tensors of this engine. Input and output of a cache tensor share one address: it is updated in place.
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

#: The cache of this engine: one layer with one head, K and V in separate tensors.
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
        """Do nothing: there is only one profile."""

    def bind(self, name: str, tensor: DeviceTensor) -> None:
        """Store the tensor that a name is bound to, which also keeps its memory alive."""
        self._bound[name] = tensor

    def set_input_shape(self, name: str, shape: Sequence[int]) -> None:
        """Store the shape of an input."""
        self._shapes[name] = tuple(shape)

    def enqueue(self, stream: Any) -> None:
        """Write K and V of the new tokens, then compute the attention of the last one over all tokens of its slot."""
        inputs = ("tokens", "past_lengths", "last", "keys_0", "values_0")
        tokens, past, last, keys, values = (self._array(name, self._shapes[name]) for name in inputs)
        slots, width = tokens.shape
        scores = self._array("scores", (slots, VOCAB))
        one_hot = np.eye(VOCAB, dtype=np.float32)
        for slot in range(slots):
            start, end = past[slot], past[slot] + width
            values[slot, 0, start:end] = one_hot[tokens[slot]]
            keys[slot, 0, start:end] = 0
            first = max(start, 1)  # the first token of a slot has no token before it
            keys[slot, 0, first:end] = values[slot, 0, first - 1 : end - 1]
            live = start + last[slot, 0] + 1  # the tokens after it are padding
            query = values[slot, 0, live - 1]
            found = keys[slot, 0, :live] @ query  # 1 where the token before is the newest token
            recent = np.arange(1, live + 1, dtype=np.float32)  # weighs later occurrences more
            scores[slot] = (found * recent) @ values[slot, 0, :live]

    def close(self) -> None:
        """Release the bound tensors."""
        self._bound.clear()

    def _array(self, name: str, shape: tuple[int, ...]) -> Any:
        """Return a bound tensor as a NumPy array over the same bytes, with the shape of this step."""
        bound = self._bound[name]
        return self.memory.array(DeviceTensor(bound.allocation, shape=shape, dtype=bound.dtype, offset=bound.offset))


def main() -> None:
    """Continue three patterns in one batch."""
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
