"""Calls of the short convolution with random inputs, and what they must give: in float64, token by token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.kernels.recurrent import TOLERANCE, check_slots, counts_of, pad, random_array, run_call
from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.kernels import causal_conv1d


@dataclass(frozen=True)
class Case:
    channels: int
    width: int
    kernel: int = 4
    slots: int = 1
    new: tuple[int, ...] | None = None
    dtypes: tuple[str, str] = ("float16", "float16")
    bias: bool = False
    silu: bool = False
    gates: bool = False
    in_place: bool = True
    rows: int | None = None  # elements of a row of the tensor that x is a part of


CASES = {
    "one token": Case(8, 1),
    "one token of some slots": Case(24, 1, slots=4, new=(1, 0, 3, -1), bias=True, silu=True, in_place=False),
    "Mamba-2": Case(72, 21, slots=3, new=(21, 0, 2), bias=True, silu=True, dtypes=("bfloat16", "float32")),
    "Qwen3-Next": Case(40, 17, slots=2, silu=True, dtypes=("bfloat16", "bfloat16"), rows=64),
    "LFM2": Case(48, 18, kernel=3, slots=4, new=(18, 1, 16, 0), gates=True, dtypes=("bfloat16", "bfloat16"), in_place=False),
    "LFM2, a step": Case(48, 1, kernel=3, slots=3, bias=True, gates=True),
    "a step of some slots, gated": Case(24, 1, slots=3, new=(1, 0, 1), gates=True, in_place=False, dtypes=("bfloat16", "float32")),
    "a step of two inputs": Case(16, 1, kernel=2, slots=2, new=(1, 0), silu=True, dtypes=("float32", "float32")),
    "two inputs": Case(16, 35, kernel=2, slots=2, new=(35, 33), bias=True),
    "channels that are no vectors": Case(7, 34, slots=3, new=(17, 34, 3), bias=True, silu=True, gates=True),
    "rows that are no vectors": Case(8, 5, slots=2, rows=13, in_place=False),
    "rows that are no vectors, wide": Case(16, 19, slots=2, rows=21, silu=True, dtypes=("float32", "float32")),
    "several blocks": Case(1100, 3, slots=2, new=(2, 3)),
    "a tile and what is before it": Case(4, 49, slots=4, new=(47, 48, 49, 16), dtypes=("float32", "float32"), bias=True),
}


def convolve(x, weight, bias, past, silu, gate_in, gate_out, counts):
    """Return outputs and states in float64, token by token, from the same rounded inputs."""
    out, state = np.zeros(x.shape), past.astype(np.float64)
    for slot, count in enumerate(counts):
        for token in range(count):
            entering = x[slot, token] if gate_in is None else (x[slot, token].astype(np.float32) * gate_in[slot, token].astype(np.float32))
            state[slot] = np.concatenate([state[slot][:, 1:], entering.astype(x.dtype).astype(np.float64)[:, None]], axis=1)
            total = (state[slot] * weight.astype(np.float64)).sum(axis=1) + (0 if bias is None else bias.astype(np.float64))
            total = total / (1 + np.exp(-total)) if silu else total
            out[slot, token] = total if gate_out is None else total * gate_out[slot, token].astype(np.float64)
    return out, state


def make(case, seed=0):
    dtype, state = case.dtypes
    shape = (case.slots, case.width, case.channels)
    arrays = {"x": random_array(seed, shape, dtype)}
    if case.gates:
        arrays |= {"gate_in": random_array(seed + 1, shape, dtype), "gate_out": random_array(seed + 2, shape, dtype)}
    weight, bias = random_array(seed + 3, (case.channels, case.kernel), dtype), random_array(seed + 4, case.channels, dtype)
    past = random_array(seed + 5, (case.slots, case.channels, case.kernel), dtype).astype(numpy_dtype(state))
    return arrays, weight, bias if case.bias else None, past


def run(place, case, arrays, weight, bias, past, new):
    """Run the call; return outputs and the present state."""
    tensors = dict(zip(arrays, place.packed(list(arrays.values()), case.rows), strict=True))
    given = {**tensors, "weight": place.tensor(weight), "bias": None if bias is None else place.tensor(bias), "silu": case.silu}
    return run_call(place, case, causal_conv1d, given, past=past, out_shape=arrays["x"].shape, new=new)


def check(place, case, seed=0):
    arrays, weight, bias, past = make(case, seed)
    counts = counts_of(case.new, case.slots, case.width)
    wanted = convolve(arrays["x"], weight, bias, past, case.silu, arrays.get("gate_in"), arrays.get("gate_out"), counts)
    pad(case, arrays, past)
    out, state = run(place, case, arrays, weight, bias, past, case.new)
    check_slots(out, wanted[0], TOLERANCE[case.dtypes[0]])
    for slot, count in enumerate(counts):
        assert not out[slot, count:].any()
        assert state[slot].tobytes() == (wanted[1][slot].astype(past.dtype) if count else past[slot]).tobytes()
