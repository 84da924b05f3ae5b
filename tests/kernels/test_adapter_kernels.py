"""Updates of products by adapters, on the host, the emulated device and a GPU, against sums in float64."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest

from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.kernels.adapter_kernels import UpdateTensors, adapter_outputs_kernel, adapter_ranks_kernel

ROUNDING = {"float16": 2**-10, "bfloat16": 2**-7}


def update_of(generator, inputs, outputs, ranks, first_outputs):
    """Return arrays of an update: ``ranks`` of each adapter by part, ``outputs`` of each part, which begin at ``first_outputs``."""
    totals = [sum(of_part) for of_part in ranks]
    b = [generator.standard_normal((count, total)) for count, total in zip(outputs, totals, strict=True)]
    firsts = [*accumulate((part.size for part in b), initial=0)][:-1]
    first_ranks = [*accumulate(totals, initial=0)]
    return {
        "a": generator.standard_normal((sum(totals), inputs)) / inputs**0.5,
        "b": b,
        "owners": [1 + adapter for of_part in ranks for adapter, count in enumerate(of_part) for _ in range(count)],
        "parts": [*zip(first_outputs, outputs, firsts, totals, strict=True)],
        "starts": [[*accumulate((0, *of_part), initial=first)] for first, of_part in zip(first_ranks, ranks, strict=False)],
    }


def expected_change(update, x, numbers, width, total_outputs):
    """Return the update of each row in float64."""
    found = np.zeros((len(x), total_outputs))
    rank = 0
    for (first, outputs, _, ranks), b in zip(update["parts"], update["b"], strict=True):
        owners = np.array(update["owners"][rank : rank + ranks])
        for row, inputs in enumerate(x.astype(np.float64)):
            mine = owners == numbers[row // width]
            a = update["a"][rank : rank + ranks][mine].astype(np.float64)
            found[row, first : first + outputs] = b[:, mine].astype(np.float64) @ (a @ inputs)
        rank += ranks
    return found


CASES = {
    "one part, one adapter": (16, [5], [[8]], [0], 5, [1, 0], 1),
    "two adapters, several groups of tokens": (40, [130], [[8, 16]], [0], 130, [2, 0, 1], 11),
    "parts with others between them": (264, [3, 140], [[16, 0, 8], [8, 64, 0]], [2, 9], 160, [3, 2, 1, 0, 2], 2),
    "more inputs than are loaded early": (8 * 1024 + 808, [7], [[24]], [0], 7, [0, 1], 1),
    "no slot has an adapter": (64, [9], [[8, 8]], [0], 9, [0, 0], 2),
    "the highest rank": (72, [129], [[64, 64]], [0], 129, [2, 1], 1),
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_updates(memory, dtype, case):
    inputs, outputs, ranks, first_outputs, total_outputs, numbers, width = CASES[case]
    generator, kind, stream = np.random.default_rng(3), numpy_dtype(dtype), memory.create_stream()
    update = update_of(generator, inputs, outputs, ranks, first_outputs)
    update |= {"a": update["a"].astype(kind), "b": [part.astype(kind) for part in update["b"]]}
    x, before = (generator.standard_normal((len(numbers) * width, columns)).astype(kind) for columns in (inputs, total_outputs))

    def upload(array):
        return memory.to_device(np.ascontiguousarray(array), stream=stream)

    tensors = UpdateTensors(
        a=upload(update["a"]),
        b=upload(np.concatenate([part.ravel() for part in update["b"]])),
        owners=upload(np.array(update["owners"], np.int32)),
        parts=upload(np.array(update["parts"], np.int64)),
        starts=upload(np.array(update["starts"], np.int32)),
        max_outputs=max(outputs),
    )
    slots, rows, out = upload(np.array(numbers, np.int32)), upload(x), upload(before)
    sums = upload(np.full((len(x), len(update["owners"])), np.nan, np.float32))
    adapter_ranks_kernel(tensors, rows, slots, sums, stream)
    adapter_outputs_kernel(tensors, sums, slots, out, stream)
    change = expected_change(update, x, numbers, width, total_outputs)
    expected = before.astype(np.float64) + change
    bound = ROUNDING[dtype] * (np.abs(expected) + np.abs(change) + 1e-3 * np.abs(change).max(initial=0))
    assert (np.abs(out.numpy().astype(np.float64) - expected) <= bound).all()
    untouched = change == 0
    np.testing.assert_array_equal(out.numpy()[untouched], before[untouched])
