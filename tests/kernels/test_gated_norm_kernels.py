"""RMS norm with a gate against float64, over padding of any content; and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.recurrent import TOLERANCE, Place, check_slots, counts_of, random_array
from trt_kvcache.errors import DTypeError, PlaceError, ShapeError
from trt_kvcache.kernels import gated_rms_norm

#: Slots, tokens, columns, columns of a group, elements of a row of the gate's tensor, new tokens.
CASES = {
    "heads": (2, 3, 64, 16, None, None),
    "ragged": (3, 5, 48, 24, 56, (5, 0, 2)),
    "groups of one block": (2, 2, 2048, 1024, None, (2, 1)),
    "one group": (1, 3, 1040, 1040, None, None),
    "rows that are no vectors": (2, 4, 24, 8, 29, (4, 9)),
    "groups that are no vectors": (2, 1, 21, 7, None, None),
    "large groups that are no vectors": (1, 2, 1034, 517, None, None),
}


def norm(x, gate, weight, size, gate_first, eps, counts):
    out, factors = np.zeros(x.shape), gate / (1 + np.exp(-gate))
    weights = np.resize(weight, x.shape[2])
    for slot, count in enumerate(counts):
        for token in range(count):
            for first in range(0, x.shape[2], size):
                part = (slot, token, slice(first, first + size))
                values = x[part] * factors[part] if gate_first else x[part]
                values = values / np.sqrt((values * values).mean() + eps) * weights[first : first + size]
                out[part] = values if gate_first else values * factors[part]
    return out


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize("name", list(CASES))
def test_outputs(memory, stream, name, gate_first, dtype):
    slots, width, columns, size, rows, new = CASES[name]
    x, gate = (random_array(seed, (slots, width, columns), dtype) for seed in (1, 2))
    weight = random_array(3, columns if gate_first else size, dtype)
    counts = counts_of(new, slots, width)
    wanted = norm(*(array.astype(np.float64) for array in (x, gate, weight)), size, gate_first, 1e-3, counts)
    for slot, count in enumerate(counts):
        x[slot, count:] = gate[slot, count:] = np.nan
    place = Place(memory, stream)
    given, out = place.tensor(x), place.empty(x.shape, dtype)
    if gate_first:
        out = given
    options = {} if new is None else {"new_lengths": place.tensor(np.array(new, np.int32))}
    [gates] = place.packed([gate], rows)
    gated_rms_norm(given, gates, place.tensor(weight), out=out, group_size=size, gate_first=gate_first, eps=1e-3, **options, stream=stream)
    check_slots(out.numpy(), wanted, TOLERANCE[dtype])
    assert not any(out.numpy()[slot, count:].any() for slot, count in enumerate(counts))


def test_what_does_not_fit(memory, stream):
    place = Place(memory, stream)

    def tensor(*shape, dtype=np.float16):
        return place.tensor(np.ones(shape, dtype))

    given = {"x": tensor(2, 3, 8), "gate": tensor(2, 3, 8), "weight": tensor(4), "out": tensor(2, 3, 8)}
    before = given["out"].numpy().tobytes()
    for change, error, text in (
        ({"group_size": 3}, ShapeError, "group_size: expected a divisor of 8 columns, got 3."),
        ({"gate": tensor(2, 3, 4)}, ShapeError, r"gate: expected shape \(2, 3, 8\), got "),
        ({"weight": tensor(6)}, ShapeError, r"weight: expected shape \(8,\), got "),
        ({"weight": tensor(4, dtype=np.float32)}, DTypeError, "weight: expected float16, got float32."),
        ({"out": tensor(2, 3, 8, dtype=np.float32)}, DTypeError, "out: expected float16, got float32."),
        ({"new_lengths": tensor(2)}, DTypeError, "new_lengths: expected int32, got float16."),
        ({"x": 3}, PlaceError, "x: expected a DeviceTensor, got int."),
    ):
        options = {"group_size": 4, "gate_first": True, "eps": 1e-5, **given, **change}
        with pytest.raises(error, match=text):
            gated_rms_norm(**options, stream=stream)
    assert given["out"].numpy().tobytes() == before
