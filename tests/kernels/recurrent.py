"""Calls of recurrent layers on a device: tensors strided as projections give them, padding of any content, and bounds of rounding."""

from __future__ import annotations

import numpy as np
import pytest

from trt_kvcache import DeviceTensor, HostMemory
from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.kernels.source_variants import STATE_DTYPES

#: max|error| / max|reference| of one slot: half a unit in the last place of what is stored, and what float32 sums add.
TOLERANCE = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 1e-5}

#: Activations and states.
DTYPES = [(dtype, state) for dtype, states in STATE_DTYPES.items() for state in states]


class Place:
    """A memory, and a stream on it."""

    def __init__(self, memory, stream):
        self.memory, self.stream = memory, stream

    def tensor(self, array):
        return self.memory.to_device(np.ascontiguousarray(array), stream=self.stream)

    def zeros(self, *shape, dtype=np.float16):
        return self.tensor(np.zeros(shape, dtype))

    def empty(self, shape, dtype):
        """Return a dense tensor full of NaN."""
        return self.tensor(np.full(shape, np.nan, numpy_dtype(dtype)))

    def packed(self, arrays, rows=None):
        """Return activations ``[B, s, ...]`` as parts of one tensor, as a projection gives them; a row takes ``rows`` elements or fewer."""
        flat = [array.reshape(*array.shape[:2], -1) for array in arrays]
        used = sum(array.shape[2] for array in flat)
        filler = np.full((*flat[0].shape[:2], max((rows or used) - used, 0)), np.nan, flat[0].dtype)
        whole, first, parts = self.tensor(np.concatenate([*flat, filler], axis=2)), 0, []
        for array, part in zip(arrays, flat, strict=True):
            inner = np.empty(array.shape[2:], np.int8).strides
            views = {"shape": array.shape, "strides": (*whole.strides[:2], *inner), "offset": first * array.itemsize}
            parts.append(DeviceTensor(whole.allocation, dtype=whole.dtype, **views))
            first += part.shape[2]
        return parts


def host_place():
    """Return a place on the host, for tests that launch nothing."""
    memory = HostMemory()
    return Place(memory, memory.create_stream())


def random_array(seed, shape, dtype, scale=1.0):
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(numpy_dtype(dtype))


def randomize(states, slots):
    """Fill the states of some slots with random bytes, NaN of any kind among them: what is kept bit for bit shows."""
    for slot in slots:
        states[slot].view(np.uint8)[...] = np.random.default_rng(slot).integers(0, 256, states[slot].view(np.uint8).shape, np.uint8)


def counts_of(new, slots, width):
    """Return the new tokens of each slot."""
    return [width] * slots if new is None else [max(min(count, width), 0) for count in new]


def pad(case, arrays, past):
    """Fill the padding of activations with NaN, and the states of slots without new tokens with random bytes."""
    counts = counts_of(case.new, case.slots, case.width)
    for slot, count in enumerate(counts):
        for array in arrays.values():
            array[slot, count:] = np.nan
    randomize(past, [slot for slot, count in enumerate(counts) if count == 0])


def run_call(place, case, function, given, *, past, out_shape, new):
    """Call a recurrent layer; return outputs and the present state. The past state of another tensor stays as it is."""
    before = place.tensor(past)
    present = before if case.in_place else place.empty(past.shape, case.dtypes[1])
    out = place.empty(out_shape, case.dtypes[0])
    if new is not None:
        given = {**given, "new_lengths": place.tensor(np.array(new, np.int32))}
    function(**given, past=before, present=present, out=out, stream=place.stream)
    place.memory.synchronize(place.stream)
    if not case.in_place:
        assert before.numpy().tobytes() == past.tobytes()
    return out.numpy(), present.numpy()


def check_call(case, found, expected, past):
    """Compare outputs and states of a call with float64: padding gets zeros, and a slot without new tokens keeps its state."""
    (out, present), (right_out, right_state) = found, expected
    check_slots(out, right_out, TOLERANCE[case.dtypes[0]])
    for slot, count in enumerate(counts_of(case.new, case.slots, case.width)):
        assert not out[slot, count:].any()
        if count:
            check_slots(present[slot][None], right_state[slot][None], TOLERANCE[case.dtypes[1]])
        else:
            assert present[slot].tobytes() == past[slot].tobytes()


def check_parts(run, arrays, past, parts, expected):
    """Run tokens in parts, ``run(arrays, past)``, each on the state that the one before left, and compare with float64."""
    out, state = expected
    first = 0
    for count in parts:
        found, past = run({name: array[:, first : first + count] for name, array in arrays.items()}, past)
        check_slots(found, out[:, first : first + count], TOLERANCE["float16"])
        first += count
    check_slots(past, state, TOLERANCE["float32"])


def check_slots(found, expected, tolerance):
    """Compare each slot with float64, relative to its largest value."""
    found = found.astype(np.float64)
    assert found.shape == expected.shape
    for slot, (mine, right) in enumerate(zip(found, expected, strict=True)):
        assert np.isfinite(mine).all(), f"slot {slot} has a value that is not finite"
        error, size = np.abs(mine - right).max(initial=0), np.abs(right).max(initial=0)
        assert error <= tolerance * size, (slot, error, size)


def refused(place, function, given, error, text):
    """Check that a call is refused, and that nothing was changed."""
    left = [tensor for tensor in given.values() if isinstance(tensor, DeviceTensor) and not tensor.allocation.closed]
    before = [tensor.numpy().tobytes() for tensor in left]
    with pytest.raises(error, match=text):
        function(**{"stream": place.stream, **given})
    assert [tensor.numpy().tobytes() for tensor in left] == before
