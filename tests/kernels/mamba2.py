"""Calls of the state space of Mamba-2 with random inputs, and what they must give: in float64, token by token."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tests.kernels.recurrent import check_call, counts_of, pad, random_array, run_call
from trt_kvcache.kernels import mamba2_scan


@dataclass(frozen=True)
class Case:
    heads: int
    head_dim: int
    state_size: int
    width: int = 1
    groups: int = 1
    slots: int = 1
    new: tuple[int, ...] | None = None
    dtypes: tuple[str, str] = ("float16", "float32")
    bias: bool = True
    skip: bool = True
    limits: tuple[float, float] = (0.0, math.inf)
    in_place: bool = True


CASES = {
    "a step": Case(2, 16, 32),
    "a step of some slots": Case(4, 24, 64, slots=4, groups=2, new=(1, 0, 2, -1), in_place=False),
    "a step without bias and skip": Case(3, 80, 128, groups=3, slots=2, bias=False, skip=False, dtypes=("bfloat16", "bfloat16")),
    "a step with limits": Case(4, 16, 16, slots=2, limits=(0.3, 0.9), dtypes=("float32", "float32")),
    "a step of large states": Case(2, 40, 256, dtypes=("bfloat16", "float32")),
    "a step of odd states": Case(2, 8, 88, slots=2, dtypes=("float16", "float16")),
    "a prompt": Case(2, 64, 128, width=37),
    "ragged": Case(4, 24, 64, width=33, groups=2, slots=4, new=(33, 0, 16, 17), in_place=False, dtypes=("bfloat16", "float32")),
    "ragged, in place": Case(2, 80, 24, width=18, slots=3, new=(5, 0, 40), dtypes=("bfloat16", "bfloat16")),
    "large states": Case(2, 24, 256, width=19, dtypes=("float32", "float32"), skip=False),
    "limits": Case(4, 8, 8, width=50, limits=(0.01, 0.5), dtypes=("float16", "float16"), bias=False),
    "a chunk": Case(2, 64, 128, width=64),
    "chunks": Case(4, 80, 128, width=150, groups=2, slots=4, new=(150, 0, 64, 65), in_place=False, dtypes=("bfloat16", "float32")),
    "chunks in place": Case(2, 24, 64, width=130, slots=3, new=(129, 0, 200), dtypes=("float16", "float16"), limits=(0.01, 0.2)),
    "small chunks": Case(3, 136, 64, width=17, slots=2, new=(17, 3), dtypes=("bfloat16", "bfloat16"), bias=False, skip=False),
    "odd states": Case(3, 16, 136, width=20, groups=3),
}


def softplus(values):
    return np.logaddexp(0, values)


def make(case, seed=0):
    """Return activations, parameters and the state before."""
    dtype, state = case.dtypes
    shape = (case.slots, case.width)
    arrays = {
        "x": random_array(seed, (*shape, case.heads, case.head_dim), dtype),
        "b": random_array(seed + 1, (*shape, case.groups, case.state_size), dtype),
        "c": random_array(seed + 2, (*shape, case.groups, case.state_size), dtype),
        "dt": random_array(seed + 3, (*shape, case.heads), dtype),
    }
    parameters = {"a": -np.exp(random_array(seed + 4, case.heads, "float32"))}
    if case.skip:
        parameters["d"] = random_array(seed + 5, case.heads, "float32")
    if case.bias:
        parameters["dt_bias"] = random_array(seed + 6, case.heads, "float32")
    past = random_array(seed + 7, (case.slots, case.heads, case.head_dim, case.state_size), state)
    return arrays, parameters, past


def scan(arrays, parameters, past, limits, counts):
    """Return outputs and states in float64, token by token and head by head."""
    x, b, c, dt = (arrays[name].astype(np.float64) for name in ("x", "b", "c", "dt"))
    out, state = np.zeros(x.shape), past.astype(np.float64)
    heads = x.shape[2]
    for slot, count in enumerate(counts):
        for token in range(count):
            for head in range(heads):
                group = head // (heads // b.shape[2])
                step = softplus(dt[slot, token, head] + (parameters["dt_bias"].astype(np.float64)[head] if "dt_bias" in parameters else 0))
                step = min(max(step, limits[0]), limits[1])
                decay = np.exp(step * parameters["a"].astype(np.float64)[head])
                state[slot, head] = state[slot, head] * decay + np.outer(step * x[slot, token, head], b[slot, token, group])
                out[slot, token, head] = state[slot, head] @ c[slot, token, group]
                if "d" in parameters:
                    out[slot, token, head] += parameters["d"].astype(np.float64)[head] * x[slot, token, head]
    return out, state


def run(place, case, arrays, parameters, past, new):
    """Run the call; return outputs and the present state."""
    given = dict(zip(("x", "b", "c"), place.packed([arrays[name] for name in ("x", "b", "c")]), strict=True))
    given["dt"] = place.packed([arrays["dt"]], rows=arrays["dt"].shape[2] + 3)[0]
    given |= {name: place.tensor(array) for name, array in parameters.items()}
    return run_call(place, case, mamba2_scan, {**given, "dt_limits": case.limits}, past=past, out_shape=arrays["x"].shape, new=new)


def check(place, case, seed=0):
    arrays, parameters, past = make(case, seed)
    expected = scan(arrays, parameters, past, case.limits, counts_of(case.new, case.slots, case.width))
    pad(case, arrays, past)
    check_call(case, run(place, case, arrays, parameters, past, case.new), expected, past)
