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
CACHE, SAVED = "KVLayerInfos of tensors [B, 2, H, S, D]", "KVLayerInfos of tensors [2, H, n, D]"
FOUR, ONE = (2, 2, 4, 8), (2, 1, 4, 8)

# Function: argument, what is wrong with it, error; a text that ends in a space is how the message starts.
REFUSED = {
    "single": [
        ("cache", 3, "PlaceError: kv_cache_layer: expected a DeviceTensor, got int."),
        ("cache", lambda s: s.tensors[0], "ShapeError: kv_cache_layer: expected a tensor [B, 2, H, S, D], got "),
        ("tensor", lambda s: s.layers[0], "ShapeError: kv_cache_tensor: expected a tensor [2, H, n, D], got "),
        ("tensor", lambda s: s.tensors[1], f"ShapeError: kv_cache_tensor: {FITS} (2, 1, 4, 8)."),
        ("tensor", lambda s: s.new(2, 2, 4, 16, dtype=HALF), f"ShapeError: {TENSOR} head_dim 8 as the cache layer, got 16."),
        (
            "tensor",
            lambda s: s.strided(s.new(2, 2, 4, 8, dtype=HALF), 2, 2, 2, 8, strides=(64, 32, 8, 1)),
            f"LayoutError: {TENSOR} a dense tensor [2, H, n, D], got ",
        ),
        ("slot", None, "SlotError: slot: expected an integer, got None."),
        ("tensor", lambda s: s.new(2, 2, 6, 8, dtype=HALF), f"ShapeError: kv_cache_tensor: {FITS} "),
        ("tensor", lambda s: s.new(*FOUR), f"DTypeError: {TENSOR} float16 as the cache layer, got float32."),
        ("tensor", lambda s: s.new(*FOUR, dtype=HALF, memory=HostMemory()), f"PlaceError: {TENSOR} a tensor of "),
    ],
    "batched": [
        ("cache", lambda s: s.layers, "ShapeError: cache layers: expected KVLayerInfos, got list."),
        ("cache", lambda s: s.saved, f"ShapeError: cache layers: expected {CACHE}, got [2, H, n, D]."),
        ("saved", lambda s: s.cache, f"ShapeError: {TENSORS} {SAVED}, got [B, 2, H, S, D]."),
        (
            "saved",
            lambda s: s.saved_of((2, 2, 4, 16), (2, 1, 4, 16)),
            f"ShapeError: {TENSORS} 2 layers of head_dim 8, got 2 of head_dim 16.",
        ),
        ("tokens", -1, "RangeError: sequence_length: expected at least 0, got -1."),
        ("tokens", 0.5, "RangeError: sequence_length: expected an integer, got 0.5."),
        (
            "saved, tokens",
            lambda s: (s.saved_of((2, 2, 6, 8), (2, 1, 6, 8)), 6),
            "RangeError: sequence_length: the slots of the cache hold at most 5 tokens, got 6.",
        ),
        ("saved", lambda s: s.saved_of(FOUR, ONE, memory=HostMemory()), f"PlaceError: {TENSORS} tensors of "),
        ("saved", lambda s: s.saved_of(FOUR, ONE, dtype=np.float32), f"DTypeError: {TENSORS} float16 as the cache, got float32."),
        ("saved", lambda s: s.saved_of(FOUR), f"ShapeError: {TENSORS} 2 layers of head_dim 8, got 1 of head_dim 8."),
        ("saved", lambda s: s.saved_of(FOUR, FOUR), "ShapeError: saved tensors: layer 1 has 1 heads, got a tensor of 2."),
        ("tokens", 5, "RangeError: sequence_length: the saved tensors hold at most 4 tokens, got 5."),
    ],
    "compact": [
        ("cache", lambda s: s.layers, "ShapeError: layer_infos: expected KVLayerInfos, got list."),
        ("cache", lambda s: s.saved, f"ShapeError: layer_infos: expected {CACHE}, got [2, H, n, D]."),
        ("plan", [1, 0, 2], "MappingError: moves: expected a CompactionPlan, got list."),
        ("plan", lambda s: s.plan_elsewhere(), "PlaceError: moves: expected a mapping of "),
        ("plan", TOO_MANY, MANY),
        ("plan", TOO_LONG, "RangeError: moves: expected lengths up to 5 tokens, got 6."),
    ],
    "compact_rows": [
        ("infos", lambda s: s.states, "ShapeError: states: expected StateInfos, got list."),
        ("plan", None, "MappingError: moves: expected a CompactionPlan, got NoneType."),
        ("plan", lambda s: s.plan_elsewhere(), "PlaceError: moves: expected a mapping of "),
        ("plan", TOO_MANY, MANY),
    ],
    "compact_lengths": [
        ("lengths", lambda s: s.lengths[:2], "MappingError: moves: expected a plan of at most 2 slots, got one of old_batch=3."),
        ("lengths", lambda s: s.new(3, dtype=np.int64), "DTypeError: length_tensor: expected int32, got int64."),
        ("plan", lambda s: s.plan_elsewhere(), "PlaceError: moves: expected a mapping of "),
        ("lengths", lambda s: s.new(3, 1, dtype=INT), f"ShapeError: length_tensor: {DENSE} (n,), got "),
    ],
    "zero": [
        ("infos", lambda s: s.states, "ShapeError: states: expected StateInfos, got list."),
        ("count", -1, "RangeError: count: expected an integer from 0 to 3, got -1."),
        ("slot, count", lambda s: (2, 2), "SlotError: slots 2 to 3: expected slots below 3. Slots never wrap."),
    ],
    "copy": [
        ("src", lambda s: s.infos_of(StateInfos, (3, 2, 3), (3, 5), memory=HostMemory()), "PlaceError: src: expected states of "),
        ("src", None, "ShapeError: src: expected StateInfos, got NoneType."),
        ("src", lambda s: StateInfos([state[:2] for state in s.states], stream=s.stream), f"ShapeError: {EQUAL} 2 of 2."),
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
        ("saved", lambda s: [s.rows[0], None], "PlaceError: saved[1]: expected a DeviceTensor, got NoneType."),
        ("saved", lambda s: [s.rows[0], s.new(5, memory=HostMemory())], "PlaceError: saved[1]: expected a tensor of "),
        ("saved", lambda s: [s.rows[0], s.new(1, 5)], "ShapeError: saved[1]: expected shape (5,), got (1, 5)."),
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
    "batched, no token": "layers tensors cache saved",
    "compact": "layers cache",
    "compact, mapped": "layers cache lengths mapping",
    "compact_rows": "states infos",
    "compact_rows, mapped": "states infos mapping",
    "compact_lengths": "lengths",
    "compact_lengths, mapped": "lengths mapping",
    "zero": "states infos",
    "copy": "states infos",
    "rows": "states rows infos",
}


@pytest.mark.parametrize(("case", "victim"), [(case, victim) for case, victims in TOUCHED.items() for victim in victims.split()])
def test_closed(memory, stream, case, victim):
    scene = Scene(memory, stream)
    closed = getattr(scene, victim)
    closed = closed[-1] if isinstance(closed, list) else closed
    (closed.allocation if isinstance(closed, DeviceTensor) else closed).close()
    left = [tensor for tensor in scene.everything if not tensor.allocation.closed]
    before = [tensor.numpy().tobytes() for tensor in left]
    name, _, how = case.partition(", ")
    single = {"cache": scene.layers[1], "tensor": scene.tensors[1]} if name == "single" else {}
    given = {"": {}, "mapped": {"plan": scene.mapped}, "no token": {"tokens": 0}}[how]
    for call in scene.calls(name, {**single, **given}):
        with pytest.raises(ClosedError):
            call()
    assert [tensor.numpy().tobytes() for tensor in left] == before
