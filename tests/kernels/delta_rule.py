"""Calls of the gated delta rule with random inputs, and what they must give: in float64, token by token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.kernels.recurrent import check_call, counts_of, pad, random_array, run_call
from trt_kvcache.kernels import gated_delta_rule


@dataclass(frozen=True)
class Case:
    heads: int
    key_dim: int
    value_dim: int
    width: int = 1
    key_heads: int = 1
    slots: int = 1
    new: tuple[int, ...] | None = None
    dtypes: tuple[str, str] = ("float16", "float32")
    bias: bool = True
    in_place: bool = True
    scale: float = 1.0  # of queries and keys
    common: float = 0.0  # of a part that all keys have


CASES = {
    "a step": Case(2, 16, 32),
    "a step of some slots": Case(4, 24, 40, slots=4, key_heads=2, new=(1, 0, 2, -1), in_place=False),
    "a step of several blocks": Case(3, 128, 136, key_heads=3, slots=2, bias=False, dtypes=("bfloat16", "bfloat16")),
    "a step in float32": Case(4, 64, 64, key_heads=2, slots=2, dtypes=("float32", "float32")),
    "a step of small keys": Case(2, 8, 8, slots=2, scale=1e-3, dtypes=("float32", "float32")),
    "Qwen3-Next": Case(8, 128, 128, width=19, key_heads=4, dtypes=("bfloat16", "float32")),
    "ragged": Case(4, 24, 40, width=33, key_heads=2, slots=4, new=(33, 0, 16, 17), in_place=False, dtypes=("bfloat16", "float32")),
    "ragged, in place": Case(2, 80, 24, width=18, slots=3, new=(5, 0, 40), dtypes=("bfloat16", "bfloat16")),
    "in float32": Case(2, 128, 72, width=35, dtypes=("float32", "float32"), bias=False),
    "several blocks": Case(3, 104, 200, width=20, key_heads=3, dtypes=("float16", "float16")),
    "no query": Case(2, 16, 16, width=5, scale=0.0),
    "a scan": Case(4, 128, 136, width=16, key_heads=2, dtypes=("bfloat16", "float32")),
    "a chunk": Case(2, 128, 32, width=64),
    "chunks": Case(4, 128, 72, width=150, key_heads=2, slots=4, new=(150, 0, 64, 65), in_place=False, dtypes=("bfloat16", "float32")),
    "chunks in place": Case(2, 64, 24, width=200, slots=3, new=(193, 0, 300), dtypes=("float16", "float16"), bias=False),
    "chunks of odd keys": Case(3, 72, 8, width=129, slots=2, new=(129, 3), dtypes=("bfloat16", "bfloat16")),
    "chunks of small keys": Case(2, 8, 16, width=70, scale=1e-3),
    "chunks of keys that are alike": Case(2, 64, 16, width=80, common=2.0, dtypes=("bfloat16", "float32")),
    "chunks without queries and keys": Case(2, 24, 16, width=70, scale=0.0),
}


def make(case, seed=0):
    """Return activations, parameters and the state before."""
    dtype, state = case.dtypes
    shape = (case.slots, case.width)
    arrays = {
        "q": random_array(seed, (*shape, case.key_heads, case.key_dim), dtype, case.scale),
        "k": random_array(seed + 1, (*shape, case.key_heads, case.key_dim), dtype, case.scale),
        "v": random_array(seed + 2, (*shape, case.heads, case.value_dim), dtype),
        "a": random_array(seed + 3, (*shape, case.heads), dtype),
        "b": random_array(seed + 4, (*shape, case.heads), dtype),
    }
    arrays["k"] += random_array(seed + 8, case.key_dim, dtype, case.common)
    parameters = {"decay": -np.exp(random_array(seed + 5, case.heads, "float32") - 2)}
    if case.bias:
        parameters["dt_bias"] = random_array(seed + 6, case.heads, "float32")
    return arrays, parameters, random_array(seed + 7, (case.slots, case.heads, case.key_dim, case.value_dim), state)


def normed(row):
    return row / np.sqrt((row * row).sum() + 1e-6)


def delta(arrays, parameters, past, counts):
    """Return outputs and states in float64, token by token and head by head."""
    q, k, v, a, b = (arrays[name].astype(np.float64) for name in "qkvab")
    out, state = np.zeros(v.shape), past.astype(np.float64)
    heads, key_heads, key_dim = v.shape[2], q.shape[2], q.shape[3]
    for slot, count in enumerate(counts):
        for token in range(count):
            for head in range(heads):
                key, query = (normed(rows[slot, token, head // (heads // key_heads)]) for rows in (k, q))
                bias = parameters["dt_bias"].astype(np.float64)[head] if "dt_bias" in parameters else 0
                mine = state[slot, head]
                mine *= np.exp(parameters["decay"].astype(np.float64)[head] * np.logaddexp(0, a[slot, token, head] + bias))
                mine += np.outer(key, (v[slot, token, head] - key @ mine) / (1 + np.exp(-b[slot, token, head])))
                out[slot, token, head] = query @ mine / np.sqrt(key_dim)
    return out, state


def run(place, case, arrays, parameters, past, new):
    """Run the call; return outputs and the present state."""
    given = dict(zip("qkv", place.packed([arrays[name] for name in "qkv"]), strict=True))
    given |= zip("ab", place.packed([arrays[name] for name in "ab"], rows=2 * case.heads + 3), strict=True)
    given |= {name: place.tensor(array) for name, array in parameters.items()}
    return run_call(place, case, gated_delta_rule, given, past=past, out_shape=arrays["v"].shape, new=new)


def check(place, case, seed=0):
    arrays, parameters, past = make(case, seed)
    expected = delta(arrays, parameters, past, counts_of(case.new, case.slots, case.width))
    pad(case, arrays, past)
    check_call(case, run(place, case, arrays, parameters, past, case.new), expected, past)
