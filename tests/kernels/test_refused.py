"""What the kernel functions refuse: the error, its text, and not a byte has changed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kernels.layers import make_layer, make_saved, saved_tensor
from trt_kvcache import DeviceTensor, HostMemory, KVLayout
from trt_kvcache.errors import ClosedError, DTypeError, LayoutError, MappingError, PlaceError, RangeError, ShapeError, SlotError
from trt_kvcache.kernels import (
    CompactionPlan,
    KVLayerInfos,
    StateInfos,
    compact_kv_cache_batched,
    compact_length_tensor,
    compact_rows,
    copy_rows,
    instantiate_kv_cache_batched,
    instantiate_kv_cache_layer_from_tensor,
    instantiate_rows,
    save_kv_cache_batched,
    save_kv_cache_layer_into_tensor,
    save_rows,
    zero_rows,
)


class Scene:
    """A cache of two layers (B=3, H=2 and 1, S=5, D=8, float16), saved tensors of 4 tokens, states, lengths."""

    def __init__(self, memory: Any, stream: Any) -> None:
        self.memory, self.stream = memory, stream
        self.cache = [make_layer(memory, stream, KVLayout.SEPARATE, (3, h, 5, 8), "float16", h) for h in (2, 1)]
        self.saved = [make_saved(memory, stream, (h, 4, 8), "float16", 10 + h) for h in (2, 1)]
        self.layers, self.tensors = [layer.tensor for layer in self.cache], [saved_tensor(layer) for layer in self.saved]
        self.states = [self.tensor((3, 2, 3)), self.tensor((3, 5))]
        self.rows = [self.tensor((2, 3)), self.tensor((5,))]
        self.lengths = self.tensor((3,), np.int32)
        self.infos, self.saved_infos = KVLayerInfos(self.layers, stream=stream), KVLayerInfos(self.tensors, stream=stream)
        self.state_infos = StateInfos(self.states, stream=stream)
        self.plan = CompactionPlan.from_host([1, 0, 2], 3, 3, [5, 4, 3])
        mapping = memory.to_device(np.array([-1, 0, 1], np.int32), stream=stream)
        self.device_plan = CompactionPlan.from_device(mapping, 3, 2, self.lengths)
        self.everything = [layer.whole for layer in (*self.cache, *self.saved)] + self.states + self.rows + [self.lengths]

    def tensor(self, shape: tuple[int, ...], dtype: Any = np.float32, memory: Any = None) -> DeviceTensor:
        place = memory or self.memory
        return place.to_device(np.ones(shape, dtype), stream=self.stream if memory is None else memory.create_stream())

    def saved_of(self, *shapes: tuple[int, ...], dtype: Any = np.float16, memory: Any = None) -> KVLayerInfos:
        tensors = [self.tensor(shape, dtype, memory) for shape in shapes]
        return KVLayerInfos(tensors, stream=self.stream if memory is None else memory.create_stream())

    def elsewhere(self) -> SimpleNamespace:
        """The same in another memory."""
        host = HostMemory()
        return SimpleNamespace(
            infos=KVLayerInfos([self.tensor((3, 2, h, 5, 8), np.float16, host) for h in (2, 1)], stream=host.create_stream()),
            saved=self.saved_of((2, 2, 4, 8), (2, 1, 4, 8), memory=host),
            states=StateInfos([self.tensor((3, 2, 3), memory=host), self.tensor((3, 5), memory=host)], stream=host.create_stream()),
            row=self.tensor((5,), memory=host),
            layer=self.tensor((2, 2, 4, 8), np.float16, host),
        )


def single(s: Scene, cache: Any = None, tensor: Any = None, slot: Any = 1, stream: Any = "mine") -> tuple[Any, ...]:
    return (
        s.layers[0] if cache is None else cache,
        s.tensors[0] if tensor is None else tensor,
        slot,
        s.stream if stream == "mine" else stream,
    )


def batched(s: Scene, cache: Any = None, saved: Any = None, slot: Any = 1, tokens: Any = 4, stream: Any = "mine") -> tuple[Any, ...]:
    return (cache or s.infos, saved or s.saved_infos, slot, tokens, s.stream if stream == "mine" else stream)


SINGLE = {
    "the cache is no tensor": (lambda s: single(s, cache=3), PlaceError, "kv_cache_layer: expected a DeviceTensor, got int."),
    "a saved tensor as the cache": (
        lambda s: single(s, cache=s.tensors[0]),
        ShapeError,
        "kv_cache_layer: expected a tensor [B, 2, H, S, D], got",
    ),
    "a cache as the saved tensor": (
        lambda s: single(s, tensor=s.layers[0]),
        ShapeError,
        "kv_cache_tensor: expected a tensor [2, H, n, D], got",
    ),
    "other heads": (
        lambda s: single(s, tensor=s.tensors[1]),
        ShapeError,
        "kv_cache_tensor: expected shape (2, 2, n, 8) with n <= 5, got (2, 1, 4, 8).",
    ),
    "too many tokens": (
        lambda s: single(s, tensor=s.tensor((2, 2, 6, 8), np.float16)),
        ShapeError,
        "kv_cache_tensor: expected shape (2, 2, n, 8) with n <= 5, got (2, 2, 6, 8).",
    ),
    "another head dim": (
        lambda s: single(s, tensor=s.tensor((2, 2, 4, 16), np.float16)),
        ShapeError,
        "kv_cache_tensor: expected head_dim 8 as the cache layer, got 16.",
    ),
    "another dtype": (
        lambda s: single(s, tensor=s.tensor((2, 2, 4, 8), np.float32)),
        DTypeError,
        "kv_cache_tensor: expected float16 as the cache layer, got float32.",
    ),
    "another memory": (lambda s: single(s, tensor=s.elsewhere().layer), PlaceError, "kv_cache_tensor: expected a tensor of "),
    "a strided saved tensor": (
        lambda s: single(
            s, tensor=DeviceTensor(s.tensors[0].allocation, shape=(2, 2, 2, 8), dtype="float16", strides=(64, 32, 8, 1), offset=256)
        ),
        LayoutError,
        "kv_cache_tensor: expected a dense tensor [2, H, n, D], got",
    ),
    "a slot too far": (lambda s: single(s, slot=3), SlotError, "slot 3: expected 0 <= slot < 3 (batch slots). Slots never wrap."),
    "a negative slot": (lambda s: single(s, slot=-1), SlotError, "slot -1: expected 0 <= slot < 3 (batch slots). Slots never wrap."),
    "no slot": (lambda s: single(s, slot=None), SlotError, "slot: expected an integer, got None."),
    "no stream": (lambda s: single(s, stream=None), PlaceError, "stream: expected "),
}

BATCHED = {
    "no infos": (lambda s: batched(s, cache=s.layers), ShapeError, "cache layers: expected KVLayerInfos, got list."),
    "saved tensors as the cache": (
        lambda s: batched(s, cache=s.saved_infos),
        ShapeError,
        "cache layers: expected KVLayerInfos of tensors [B, 2, H, S, D], got those of [2, H, n, D].",
    ),
    "a cache as saved tensors": (
        lambda s: batched(s, saved=s.infos),
        ShapeError,
        "saved tensors: expected KVLayerInfos of tensors [2, H, n, D], got those of [B, 2, H, S, D].",
    ),
    "another memory": (lambda s: batched(s, saved=s.elsewhere().saved), PlaceError, "saved tensors: expected tensors of "),
    "another dtype": (
        lambda s: batched(s, saved=s.saved_of((2, 2, 4, 8), (2, 1, 4, 8), dtype=np.float32)),
        DTypeError,
        "saved tensors: expected float16 as the cache, got float32.",
    ),
    "another head dim": (
        lambda s: batched(s, saved=s.saved_of((2, 2, 4, 16), (2, 1, 4, 16))),
        ShapeError,
        "saved tensors: expected 2 layers of head_dim 8, got 2 of head_dim 16.",
    ),
    "a layer is missing": (
        lambda s: batched(s, saved=s.saved_of((2, 2, 4, 8))),
        ShapeError,
        "saved tensors: expected 2 layers of head_dim 8, got 1 of head_dim 8.",
    ),
    "other heads": (
        lambda s: batched(s, saved=s.saved_of((2, 2, 4, 8), (2, 2, 4, 8))),
        ShapeError,
        "saved tensors: layer 1 has 1 heads, got a tensor of 2.",
    ),
    "a slot too far": (lambda s: batched(s, slot=3), SlotError, "slot 3: expected 0 <= slot < 3 (batch slots). Slots never wrap."),
    "a negative slot": (lambda s: batched(s, slot=-1), SlotError, "slot -1: expected 0 <= slot < 3 (batch slots). Slots never wrap."),
    "negative tokens": (lambda s: batched(s, tokens=-1), RangeError, "sequence_length: expected at least 0, got -1."),
    "half a token": (lambda s: batched(s, tokens=0.5), RangeError, "sequence_length: expected an integer, got 0.5."),
    "more than was saved": (
        lambda s: batched(s, tokens=5),
        RangeError,
        "sequence_length: the saved tensors holds at most 4 tokens, got 5.",
    ),
    "more than a slot": (
        lambda s: batched(s, saved=s.saved_of((2, 2, 6, 8), (2, 1, 6, 8)), tokens=6),
        RangeError,
        "sequence_length: a slot of the cache holds at most 5 tokens, got 6.",
    ),
    "no stream": (lambda s: batched(s, stream=None), PlaceError, "stream: expected "),
}

OTHERS = {
    "compact: no infos": (
        lambda s: compact_kv_cache_batched(s.layers, s.plan, stream=s.stream),
        ShapeError,
        "layer_infos: expected KVLayerInfos, got list.",
    ),
    "compact: saved tensors": (
        lambda s: compact_kv_cache_batched(s.saved_infos, s.plan, stream=s.stream),
        ShapeError,
        "layer_infos: expected KVLayerInfos of tensors [B, 2, H, S, D], got those of [2, H, n, D].",
    ),
    "compact: no plan": (
        lambda s: compact_kv_cache_batched(s.infos, [1, 0, 2], stream=s.stream),
        MappingError,
        "moves: expected a CompactionPlan, got list.",
    ),
    "compact: more slots": (
        lambda s: compact_kv_cache_batched(s.infos, CompactionPlan.from_host([0, 1, 3, 2], 4, 4, [1] * 4), stream=s.stream),
        MappingError,
        "moves: expected a plan of at most 3 slots, got one of old_batch=4.",
    ),
    "compact: longer slots": (
        lambda s: compact_kv_cache_batched(s.infos, CompactionPlan.from_host([1, 0], 2, 2, [6, 1]), stream=s.stream),
        RangeError,
        "moves: expected lengths up to 5 tokens, got 6.",
    ),
    "compact: no stream": (lambda s: compact_kv_cache_batched(s.infos, s.plan, stream=None), PlaceError, "stream: expected "),
    "compact: a mapping elsewhere": (
        lambda s: compact_kv_cache_batched(s.elsewhere().infos, s.device_plan, stream=HostMemory().create_stream()),
        PlaceError,
        "moves: expected a mapping of cpu, got one of ",
    ),
    "rows: no infos": (lambda s: compact_rows(s.states, s.plan, stream=s.stream), ShapeError, "states: expected StateInfos, got list."),
    "rows: no plan": (
        lambda s: compact_rows(s.state_infos, None, stream=s.stream),
        MappingError,
        "moves: expected a CompactionPlan, got NoneType.",
    ),
    "rows: more slots": (
        lambda s: compact_rows(s.state_infos, CompactionPlan.from_host([0, 1, 3, 2], 4, 4, [1] * 4), stream=s.stream),
        MappingError,
        "moves: expected a plan of at most 3 slots, got one of old_batch=4.",
    ),
    "rows: no stream": (lambda s: compact_rows(s.state_infos, s.plan, stream=None), PlaceError, "stream: expected "),
    "lengths: more slots": (
        lambda s: compact_length_tensor(s.lengths[:2], s.plan, stream=s.stream),
        MappingError,
        "moves: expected a plan of at most 2 slots, got one of old_batch=3.",
    ),
    "lengths: dtype": (
        lambda s: compact_length_tensor(s.tensor((3,), np.int64), s.plan, stream=s.stream),
        DTypeError,
        "length_tensor: expected int32, got int64.",
    ),
    "lengths: shape": (
        lambda s: compact_length_tensor(s.tensor((3, 1), np.int32), s.plan, stream=s.stream),
        ShapeError,
        "length_tensor: expected a dense tensor of shape (n,), got",
    ),
    "lengths: no stream": (lambda s: compact_length_tensor(s.lengths, s.plan, stream=None), PlaceError, "stream: expected "),
    "zero: no infos": (lambda s: zero_rows(s.states, 0, stream=s.stream), ShapeError, "states: expected StateInfos, got list."),
    "zero: a slot too far": (
        lambda s: zero_rows(s.state_infos, 3, stream=s.stream),
        SlotError,
        "slot 3: expected 0 <= slot < 3 (batch slots). Slots never wrap.",
    ),
    "zero: a negative slot": (
        lambda s: zero_rows(s.state_infos, -1, stream=s.stream),
        SlotError,
        "slot -1: expected 0 <= slot < 3 (batch slots). Slots never wrap.",
    ),
    "zero: too many": (
        lambda s: zero_rows(s.state_infos, 2, count=2, stream=s.stream),
        SlotError,
        "slots 2 to 3: expected slots below 3. Slots never wrap.",
    ),
    "zero: a negative count": (
        lambda s: zero_rows(s.state_infos, 0, count=-1, stream=s.stream),
        RangeError,
        "count: expected an integer from 0 to 3, got -1.",
    ),
    "zero: no stream": (lambda s: zero_rows(s.state_infos, 0, stream=None), PlaceError, "stream: expected "),
    "copy: no infos": (lambda s: copy_rows(s.state_infos, None, 0, stream=s.stream), ShapeError, "src: expected StateInfos, got NoneType."),
    "copy: another memory": (
        lambda s: copy_rows(s.state_infos, s.elsewhere().states, 0, stream=s.stream),
        PlaceError,
        "src: expected states of ",
    ),
    "copy: other rows": (
        lambda s: copy_rows(s.state_infos, StateInfos(s.states[::-1], stream=s.stream), 0, stream=s.stream),
        ShapeError,
        "src: expected 3 slots of 2 layers with equal state bytes, got 3 of 2.",
    ),
    "copy: fewer slots": (
        lambda s: copy_rows(s.state_infos, StateInfos([state[:2] for state in s.states], stream=s.stream), 0, stream=s.stream),
        ShapeError,
        "src: expected 3 slots of 2 layers with equal state bytes, got 2 of 2.",
    ),
    "copy: a slot too far": (
        lambda s: copy_rows(s.state_infos, s.state_infos, 3, stream=s.stream),
        SlotError,
        "slot 3: expected 0 <= slot < 3 (batch slots). Slots never wrap.",
    ),
    "copy: no stream": (lambda s: copy_rows(s.state_infos, s.state_infos, 0, stream=None), PlaceError, "stream: expected "),
}

ROWS = {
    "no infos": (lambda s: (s.states, s.rows, 0, s.stream), ShapeError, "states: expected StateInfos, got list."),
    "a layer is missing": (
        lambda s: (s.state_infos, s.rows[:1], 0, s.stream),
        ShapeError,
        "saved: expected one tensor for each of 2 layers, got 1.",
    ),
    "no tensor": (
        lambda s: (s.state_infos, [s.rows[0], None], 0, s.stream),
        PlaceError,
        "saved[1]: expected a DeviceTensor, got NoneType.",
    ),
    "another memory": (
        lambda s: (s.state_infos, [s.rows[0], s.elsewhere().row], 0, s.stream),
        PlaceError,
        "saved[1]: expected a tensor of ",
    ),
    "another dtype": (
        lambda s: (s.state_infos, [s.rows[0], s.tensor((5,), np.int32)], 0, s.stream),
        DTypeError,
        "saved[1]: expected float32, got int32.",
    ),
    "another shape": (
        lambda s: (s.state_infos, [s.rows[0], s.tensor((1, 5))], 0, s.stream),
        ShapeError,
        "saved[1]: expected shape (5,), got (1, 5).",
    ),
    "a strided one": (
        lambda s: (
            s.state_infos,
            [DeviceTensor(s.states[0].allocation, shape=(2, 3), dtype="float32", strides=(4, 1)), s.rows[1]],
            0,
            s.stream,
        ),
        LayoutError,
        "saved[0]: expected a dense tensor, got",
    ),
    "a slot too far": (
        lambda s: (s.state_infos, s.rows, 3, s.stream),
        SlotError,
        "slot 3: expected 0 <= slot < 3 (batch slots). Slots never wrap.",
    ),
    "no stream": (lambda s: (s.state_infos, s.rows, 0, None), PlaceError, "stream: expected "),
}


@pytest.fixture
def refuse(memory, stream):
    """Return a function: what it is given raises the message, and no byte changes."""
    scene = Scene(memory, stream)

    def check(call: Any, error: type[Exception], message: str) -> None:
        before = [tensor.numpy().tobytes() for tensor in scene.everything]
        with pytest.raises(error) as caught:
            call(scene)
        assert str(caught.value).startswith(message)
        assert len(str(caught.value)) == len(message) or not message.endswith(".")
        assert [tensor.numpy().tobytes() for tensor in scene.everything] == before

    return check


@pytest.mark.parametrize("save", [True, False], ids=["save", "instantiate"])
@pytest.mark.parametrize("case", list(SINGLE))
def test_single_layer(refuse, case, save):
    arguments, error, message = SINGLE[case]

    def call(scene: Scene) -> None:
        cache, tensor, slot, stream = arguments(scene)
        if save:
            save_kv_cache_layer_into_tensor(tensor, cache, slot, stream=stream)
        else:
            instantiate_kv_cache_layer_from_tensor(cache, tensor, slot, stream=stream)

    refuse(call, error, message)


@pytest.mark.parametrize("function", [save_kv_cache_batched, instantiate_kv_cache_batched])
@pytest.mark.parametrize("case", list(BATCHED))
def test_batched(refuse, case, function):
    arguments, error, message = BATCHED[case]

    def call(scene: Scene) -> None:
        *positional, stream = arguments(scene)
        function(*positional, stream=stream)

    refuse(call, error, message)


@pytest.mark.parametrize("function", [save_rows, instantiate_rows])
@pytest.mark.parametrize("case", list(ROWS))
def test_rows(refuse, case, function):
    arguments, error, message = ROWS[case]

    def call(scene: Scene) -> None:
        *positional, stream = arguments(scene)
        function(*positional, stream=stream)

    refuse(call, error, message)


@pytest.mark.parametrize("case", list(OTHERS))
def test_others(refuse, case):
    refuse(*OTHERS[case])


VICTIMS = {
    "layer": lambda s: s.layers[1].allocation,
    "saved": lambda s: s.tensors[1].allocation,
    "state": lambda s: s.states[1].allocation,
    "row": lambda s: s.rows[1].allocation,
    "lengths": lambda s: s.lengths.allocation,
    "mapping": lambda s: s.device_plan.mapping.allocation,
    "infos": lambda s: s.infos,
    "saved infos": lambda s: s.saved_infos,
    "state infos": lambda s: s.state_infos,
}

# What each call touches.
TOUCHED = {
    "save a layer": (lambda s: save_kv_cache_layer_into_tensor(s.tensors[1], s.layers[1], 0, stream=s.stream), "layer, saved"),
    "fill a layer": (lambda s: instantiate_kv_cache_layer_from_tensor(s.layers[1], s.tensors[1], 0, stream=s.stream), "layer, saved"),
    "save": (lambda s: save_kv_cache_batched(s.infos, s.saved_infos, 0, 4, stream=s.stream), "layer, saved, infos, saved infos"),
    "save no token": (lambda s: save_kv_cache_batched(s.infos, s.saved_infos, 0, 0, stream=s.stream), "layer, saved, infos, saved infos"),
    "instantiate": (lambda s: instantiate_kv_cache_batched(s.infos, s.saved_infos, 0, 4, stream=s.stream), "layer, saved, infos"),
    "compact": (lambda s: compact_kv_cache_batched(s.infos, s.plan, stream=s.stream), "layer, infos"),
    "compact, mapped": (lambda s: compact_kv_cache_batched(s.infos, s.device_plan, stream=s.stream), "layer, infos, lengths, mapping"),
    "compact rows": (lambda s: compact_rows(s.state_infos, s.plan, stream=s.stream), "state, state infos"),
    "compact rows, mapped": (lambda s: compact_rows(s.state_infos, s.device_plan, stream=s.stream), "state, state infos, mapping"),
    "compact lengths": (lambda s: compact_length_tensor(s.lengths, s.plan, stream=s.stream), "lengths"),
    "compact lengths, mapped": (lambda s: compact_length_tensor(s.lengths, s.device_plan, stream=s.stream), "lengths, mapping"),
    "zero": (lambda s: zero_rows(s.state_infos, 0, stream=s.stream), "state, state infos"),
    "copy": (lambda s: copy_rows(s.state_infos, s.state_infos, 0, stream=s.stream), "state, state infos"),
    "save rows": (lambda s: save_rows(s.state_infos, s.rows, 0, stream=s.stream), "state, row, state infos"),
    "instantiate rows": (lambda s: instantiate_rows(s.state_infos, s.rows, 0, stream=s.stream), "state, row, state infos"),
}


@pytest.mark.parametrize(("case", "victim"), [(case, victim) for case, (_, victims) in TOUCHED.items() for victim in victims.split(", ")])
def test_closed(memory, stream, case, victim):
    scene = Scene(memory, stream)
    VICTIMS[victim](scene).close()
    left = [tensor for tensor in scene.everything if not tensor.allocation.closed]
    before = [tensor.numpy().tobytes() for tensor in left]
    with pytest.raises(ClosedError):
        TOUCHED[case][0](scene)
    assert [tensor.numpy().tobytes() for tensor in left] == before
