"""A small hybrid decoder in NumPy: Mamba-2 and attention layers over a real cache in host memory, one token after another.

Nothing here knows of prompt caches or snapshots. Everything that a token leaves behind is in the cache: rows of K and V, and
the states, which are read and written where they are.
"""

import numpy as np

from tests.helpers.caches import kv_config, mamba_config
from trt_kvcache import HybridCacheConfig, HybridCacheManager, LayerType

VOCAB, HIDDEN = 41, 24
HEADS, HEAD_DIM, STATE = 2, 6, 5
INNER = HEADS * HEAD_DIM
CONV_DIM, CONV_KERNEL = INNER + 2 * STATE, 4
KV_HEADS, KV_DIM = 2, 8
LAYER_TYPES = [LayerType.MAMBA, LayerType.ATTENTION, LayerType.MAMBA]


def hybrid_cache(memory, *, slots=3, limit=24, **kv):
    kv = kv_config([(KV_HEADS, KV_DIM)], **{"max_batch_size": slots, "max_sequence_length": limit, "dtype": "float32", **kv})
    sizes = {"num_heads": HEADS, "head_dim": HEAD_DIM, "state_size": STATE, "conv_dim": CONV_DIM, "conv_kernel": CONV_KERNEL}
    mamba = mamba_config(max_batch_size=slots, **sizes)
    return HybridCacheManager(HybridCacheConfig(layer_types=LAYER_TYPES, kv=kv, mamba=mamba), memory=memory)


def _normed(x):
    return x / np.sqrt(np.mean(x**2) + 1e-5)


def _silu(x):
    return x / (1 + np.exp(-x))


class HybridModel:
    """Random weights, and the steps of the slots of one cache."""

    def __init__(self, cache, seed=5):
        self.cache, self.stream = cache, cache.memory.create_stream()
        random = np.random.default_rng(seed)

        def weight(*shape):
            return random.normal(0, shape[-1] ** -0.5, shape).astype(np.float32)

        self.head = weight(VOCAB, HIDDEN)
        self.embedding = random.normal(0, 1, (VOCAB, HIDDEN)).astype(np.float32)
        self.layers = [
            {
                "in": weight(INNER + CONV_DIM + HEADS, HIDDEN),
                "conv": weight(CONV_DIM, CONV_KERNEL),
                "decay": random.uniform(0.1, 0.4, HEADS).astype(np.float32),
                "skip": weight(HEADS),
                "out": weight(HIDDEN, INNER),
            }
            if kind is LayerType.MAMBA
            else {**{name: weight(KV_HEADS * KV_DIM, HIDDEN) for name in "qkv"}, "out": weight(HIDDEN, KV_HEADS * KV_DIM)}
            for kind in LAYER_TYPES
        ]

    def run(self, slot, tokens):
        """Run tokens in a slot; return the logits after the last, float32 ``[VOCAB]``."""
        for token in tokens:
            position = self.cache.host_kv_cache_lengths[slot]
            hidden = self.embedding[token]
            for index, (kind, layer) in enumerate(zip(LAYER_TYPES, self.layers, strict=True)):
                step = self._mamba if kind is LayerType.MAMBA else self._attend
                hidden = hidden + step(index, slot, layer, _normed(hidden), position)
            increments = [int(other == slot) for other in range(self.cache.active_batch_size)]
            self.cache.commit_sequence_length(increments, stream=self.stream)
        return self.head @ _normed(hidden)

    def generate(self, slot, prompt, count):
        """Continue a slot greedily; return tokens, and the logits that each was chosen from."""
        logits, tokens = [self.run(slot, prompt)], []
        for _ in range(count):
            tokens.append(int(np.argmax(logits[-1])))
            logits.append(self.run(slot, tokens[-1:]))
        return tokens, logits[:-1]

    def _mamba(self, index, slot, layer, x, _):
        memory = self.cache.memory
        state, window = memory.array(self.cache.get_recurrent_state(index))[slot], memory.array(self.cache.get_conv_state(index))[slot]
        gate, row, step = np.split(layer["in"] @ x, [INNER, INNER + CONV_DIM])
        window[...] = np.concatenate([window[:, 1:], row[:, None]], axis=1)
        row = _silu(np.sum(window * layer["conv"], axis=1))
        values, b, c = row[:INNER].reshape(HEADS, HEAD_DIM), row[INNER : INNER + STATE], row[INNER + STATE :]
        step = np.log1p(np.exp(step))
        state *= np.exp(-step * layer["decay"])[:, None, None]
        state += (step[:, None] * values)[:, :, None] * b
        return layer["out"] @ ((state @ c + layer["skip"][:, None] * values).reshape(-1) * _silu(gate))

    def _attend(self, index, slot, layer, x, position):
        keys, values = (self.cache.memory.array(view)[slot] for view in self.cache.get_separate_kv_cache(index))
        q = (layer["q"] @ x).reshape(KV_HEADS, KV_DIM)
        keys[:, position] = (layer["k"] @ x).reshape(KV_HEADS, KV_DIM)
        values[:, position] = (layer["v"] @ x).reshape(KV_HEADS, KV_DIM)
        scores = np.einsum("hd,htd->ht", q, keys[:, : position + 1]) * KV_DIM**-0.5
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        mixed = np.einsum("ht,htd->hd", weights / weights.sum(axis=1, keepdims=True), values[:, : position + 1])
        return layer["out"] @ mixed.reshape(-1)
