"""What the kernel functions refuse: the error, its text, and not a byte has changed."""

import numpy as np
import pytest

from tests.kernels.scene import Scene
from trt_kvcache import DeviceTensor, HostMemory
from trt_kvcache.errors import ClosedError, KVCacheError
from trt_kvcache.kernels import CompactionPlan, StateInfos

HALF, INT = np.float16, np.int32
TENSOR, FITS = "kv_cache_tensor: expected", "expected shape (2, 2, n, 8) with n <= 5, got"
TENSORS, EQUAL = "saved tensors: expected", "src: expected 3 slots of 2 layers with equal state bytes, got"
DENSE, INCREMENT = "expected a dense tensor of shape", "increment: expected a"
TOO_MANY = CompactionPlan.from_host([0, 1, 3, 2], 4, 4, [1] * 4)
TOO_LONG = CompactionPlan.from_host([1, 0], 2, 2, [6, 1])
MANY = "MappingError: moves: expected a plan of at most 3 slots, got one of old_batch=4."
FOUR, ONE = (2, 2, 4, 8), (2, 1, 4, 8)

# Function: argument, what is wrong with it, error; a text that ends in a space is how the message starts.
REFUSED = {
    "single": [
        ("cache", 3, "PlaceError: kv_cache_layer: expected a DeviceTensor, got int."),
        ("tensor", lambda s: s.new(2, 2, 6, 8, dtype=HALF), f"ShapeError: kv_cache_tensor: {FITS} "),
        ("tensor", lambda s: s.new(*FOUR), f"DTypeError: {TENSOR} float16 as the cache layer, got float32."),
        ("tensor", lambda s: s.new(*FOUR, dtype=HALF, memory=HostMemory()), f"PlaceError: {TENSOR} a tensor of "),
    ],
    "batched": [
        ("cache", lambda s: s.layers, "ShapeError: cache layers: expected KVLayerInfos, got list."),
        ("saved", lambda s: s.saved_of(FOUR, ONE, memory=HostMemory()), f"PlaceError: {TENSORS} tensors of "),
        ("saved", lambda s: s.saved_of(FOUR, ONE, dtype=np.float32), f"DTypeError: {TENSORS} float16 as the cache, got float32."),
        ("saved", lambda s: s.saved_of(FOUR), f"ShapeError: {TENSORS} 2 layers of head_dim 8, got 1 of head_dim 8."),
        ("saved", lambda s: s.saved_of(FOUR, FOUR), "ShapeError: saved tensors: layer 1 has 1 heads, got a tensor of 2."),
        ("tokens", 5, "RangeError: sequence_length: the saved tensors hold at most 4 tokens, got 5."),
    ],
    "compact": [
        ("cache", lambda s: s.layers, "ShapeError: layer_infos: expected KVLayerInfos, got list."),
        ("plan", TOO_MANY, MANY),
        ("plan", TOO_LONG, "RangeError: moves: expected lengths up to 5 tokens, got 6."),
    ],
    "compact_rows": [("infos", lambda s: s.states, "ShapeError: states: expected StateInfos, got list."), ("plan", TOO_MANY, MANY)],
    "compact_lengths": [
        ("lengths", lambda s: s.lengths[:2], "MappingError: moves: expected a plan of at most 2 slots, got one of old_batch=3."),
        ("lengths", lambda s: s.new(3, 1, dtype=INT), f"ShapeError: length_tensor: {DENSE} (n,), got "),
    ],
    "zero": [
        ("infos", lambda s: s.states, "ShapeError: states: expected StateInfos, got list."),
        ("slot, count", lambda s: (2, 2), "SlotError: slots 2 to 3: expected slots below 3. Slots never wrap."),
    ],
    "copy": [
        ("src", lambda s: s.infos_of(StateInfos, (3, 2, 3), (3, 5), memory=HostMemory()), "PlaceError: src: expected states of "),
        ("src", lambda s: StateInfos(s.states[::-1], stream=s.stream), f"ShapeError: {EQUAL} 3 of 2."),
    ],
    "rows": [
        ("infos", lambda s: s.states, "ShapeError: states: expected StateInfos, got list."),
        ("saved", lambda s: s.rows[:1], "ShapeError: saved: expected one tensor for each of 2 layers, got 1."),
        (
            "saved",
            lambda s: [s.strided(s.states[0], 2, 3, strides=(4, 1)), s.rows[1]],
            "LayoutError: saved[0]: expected a dense tensor, got ",
        ),
        ("saved", lambda s: [s.rows[0], s.new(5, dtype=INT)], "DTypeError: saved[1]: expected float32, got int32."),
    ],
    "increment": [
        ("increment", 2**31, f"RangeError: {INCREMENT}n int32, got 2147483648."),
        ("increment", lambda s: s.new(3, dtype=INT, memory=HostMemory()), f"PlaceError: {INCREMENT} tensor of "),
        ("increment", lambda s: s.new(3, dtype=np.int64), "DTypeError: increment: expected int32, got int64."),
    ],
    "store": [("values", [1, 2**31, 1], "RangeError: values: expected int32 values, got [1, 2147483648, 1].")],
}
for function in ("increment", "store"):
    REFUSED[function] += [
        ("lengths", lambda s: s.new(3, dtype=np.int64), "DTypeError: length_tensor: expected int32, got int64."),
        ("lengths", lambda s: s.strided(s.new(6, dtype=INT), 3, strides=(2,)), f"ShapeError: length_tensor: {DENSE} (n,), got "),
    ]
for function in ("single", "batched", "zero", "copy", "rows"):
    REFUSED[function] += [
        ("slot", slot, f"SlotError: slot {slot}: expected 0 <= slot < 3 (batch slots). Slots never wrap.") for slot in (3, -1)
    ]
for cases in REFUSED.values():
    cases.append(("stream", None, "PlaceError: stream: expected "))


@pytest.mark.parametrize(
    ("function", "argument", "wrong", "message"),
    [pytest.param(function, *case, id=f"{function}-{case[0]}-{case[2]}") for function, cases in REFUSED.items() for case in cases],
)
def test_refused(memory, stream, function, argument, wrong, message):
    scene = Scene(memory, stream)
    value = wrong(scene) if callable(wrong) else wrong
    before = [tensor.numpy().tobytes() for tensor in scene.everything]
    for call in scene.calls(function, dict(zip(argument.split(", "), value, strict=True)) if ", " in argument else {argument: value}):
        with pytest.raises(KVCacheError) as caught:
            call()
        text = f"{type(caught.value).__name__}: {caught.value}"
        assert text == message or (text.startswith(message) and message.endswith(" "))
    assert [tensor.numpy().tobytes() for tensor in scene.everything] == before


# What a call touches: names of a Scene, of whose tensors the last is closed.
TOUCHED = {
    "single": "layers tensors",
    "batched": "layers tensors cache saved",
    "compact": "layers cache",
    "compact_rows": "states infos",
    "compact_lengths": "lengths",
    "zero": "states infos",
    "copy": "states infos",
    "rows": "states rows infos",
}


@pytest.mark.parametrize(("name", "victim"), [(name, victim) for name, victims in TOUCHED.items() for victim in victims.split()])
def test_closed(memory, stream, name, victim):
    scene = Scene(memory, stream)
    closed = getattr(scene, victim)
    closed = closed[-1] if isinstance(closed, list) else closed
    (closed.allocation if isinstance(closed, DeviceTensor) else closed).close()
    left = [tensor for tensor in scene.everything if not tensor.allocation.closed]
    before = [tensor.numpy().tobytes() for tensor in left]
    for call in scene.calls(name, {"cache": scene.layers[1], "tensor": scene.tensors[1]} if name == "single" else {}):
        with pytest.raises(ClosedError):
            call()
    assert [tensor.numpy().tobytes() for tensor in left] == before
