"""What the kernel functions refuse: the error, its text, and not a byte has changed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kernels.layers import make_layer, make_saved, saved_tensor
from trt_kvcache import DeviceTensor, HostMemory, KVLayout, kernels
from trt_kvcache.errors import ClosedError, KVCacheError
from trt_kvcache.kernels import CompactionPlan, KVLayerInfos, StateInfos

HALF = np.float16


class Scene:
    """A cache of two layers (B=3, H=2 and 1, S=5, D=8, float16), saved tensors of 4 tokens, states, lengths.

    Its methods call a function with arguments that fit, but for those that are given.
    """

    def __init__(self, memory: Any, stream: Any) -> None:
        self.memory, self.stream = memory, stream
        self.made = 0  # tensors, which hold their number
        cache = [make_layer(memory, stream, KVLayout.SEPARATE, (3, h, 5, 8), "float16", h) for h in (2, 1)]
        saved = [make_saved(memory, stream, (h, 4, 8), "float16", 10 + h) for h in (2, 1)]
        self.layers, self.tensors = [layer.tensor for layer in cache], [saved_tensor(layer) for layer in saved]
        self.states, self.rows = [self.new((3, 2, 3)), self.new((3, 5))], [self.new((2, 3)), self.new((5,))]
        self.lengths = self.new((3,), np.int32)
        self.cache, self.saved = KVLayerInfos(self.layers, stream=stream), KVLayerInfos(self.tensors, stream=stream)
        self.infos = StateInfos(self.states, stream=stream)
        self.plan = CompactionPlan.from_host([1, 0, 2], 3, 3, [5, 4, 3])
        self.too_many = CompactionPlan.from_host([0, 1, 3, 2], 4, 4, [1] * 4)
        self.mapping = memory.to_device(np.array([-1, 0, 1], np.int32), stream=stream)
        self.mapped = CompactionPlan.from_device(self.mapping, 3, 2, self.lengths)
        self.everything = [layer.whole for layer in (*cache, *saved)] + self.states + self.rows + [self.lengths]

    def new(self, shape: tuple[int, ...], dtype: Any = np.float32, memory: Any = None) -> DeviceTensor:
        self.made += 1
        stream = self.stream if memory is None else memory.create_stream()
        return (memory or self.memory).to_device(np.full(shape, self.made, dtype), stream=stream)

    def saved_of(self, *shapes: tuple[int, ...], dtype: Any = HALF, memory: Any = None) -> KVLayerInfos:
        stream = self.stream if memory is None else memory.create_stream()
        return KVLayerInfos([self.new(shape, dtype, memory) for shape in shapes], stream=stream)

    def elsewhere(self) -> SimpleNamespace:
        """Arguments in another memory."""
        host = HostMemory()
        stream = host.create_stream()
        return SimpleNamespace(
            layer=self.new((2, 2, 4, 8), HALF, host),
            saved=self.saved_of((2, 2, 4, 8), (2, 1, 4, 8), memory=host),
            row=self.new((5,), memory=host),
            infos=StateInfos([self.new((3, 2, 3), memory=host), self.new((3, 5), memory=host)], stream=stream),
            compact=lambda plan: kernels.compact_kv_cache_batched(
                KVLayerInfos([self.new((3, 2, 1, 5, 8), HALF, host)], stream=stream), plan, stream=stream
            ),
        )

    def arguments(self, given: dict[str, Any], **fitting: Any) -> list[Any]:
        self.on = given.pop("stream", self.stream)
        return list({**fitting, **given}.values())

    def single(self, **given: Any) -> list[Any]:
        cache, tensor, slot = self.arguments(given, cache=self.layers[0], tensor=self.tensors[0], slot=1)
        return [
            lambda: kernels.save_kv_cache_layer_into_tensor(tensor, cache, slot, stream=self.on),
            lambda: kernels.instantiate_kv_cache_layer_from_tensor(cache, tensor, slot, stream=self.on),
        ]

    def batched(self, **given: Any) -> list[Any]:
        words = self.arguments(given, cache=self.cache, saved=self.saved, slot=1, tokens=4)
        both = (kernels.save_kv_cache_batched, kernels.instantiate_kv_cache_batched)
        return [lambda function=function: function(*words, stream=self.on) for function in both]

    def save_rows(self, **given: Any) -> list[Any]:
        words = self.arguments(given, infos=self.infos, rows=self.rows, slot=0)
        both = (kernels.save_rows, kernels.instantiate_rows)
        return [lambda function=function: function(*words, stream=self.on) for function in both]

    def compact(self, **given: Any) -> list[Any]:
        words = self.arguments(given, cache=self.cache, plan=self.plan)
        return [lambda: kernels.compact_kv_cache_batched(*words, stream=self.on)]

    def compact_rows(self, **given: Any) -> list[Any]:
        words = self.arguments(given, infos=self.infos, plan=self.plan)
        return [lambda: kernels.compact_rows(*words, stream=self.on)]

    def compact_lengths(self, **given: Any) -> list[Any]:
        words = self.arguments(given, lengths=self.lengths, plan=self.plan)
        return [lambda: kernels.compact_length_tensor(*words, stream=self.on)]

    def zero(self, **given: Any) -> list[Any]:
        infos, slot, count = self.arguments(given, infos=self.infos, slot=0, count=1)
        return [lambda: kernels.zero_rows(infos, slot, count=count, stream=self.on)]

    def copy(self, **given: Any) -> list[Any]:
        dst, src, slot = self.arguments(given, dst=self.infos, src=self.infos, slot=0)
        return [lambda: kernels.copy_rows(dst, src, slot, stream=self.on)]


SLOT_3 = "SlotError: slot 3: expected 0 <= slot < 3 (batch slots). Slots never wrap."
SLOT_MINUS_1 = "SlotError: slot -1: expected 0 <= slot < 3 (batch slots). Slots never wrap."
TOO_MANY = "MappingError: moves: expected a plan of at most 3 slots, got one of old_batch=4."
CACHE, SAVED = "KVLayerInfos of tensors [B, 2, H, S, D]", "KVLayerInfos of tensors [2, H, n, D]"

REFUSED = [
    (lambda s: s.single(cache=3), "PlaceError: kv_cache_layer: expected a DeviceTensor, got int."),
    (lambda s: s.single(cache=s.tensors[0]), "ShapeError: kv_cache_layer: expected a tensor [B, 2, H, S, D], got "),
    (lambda s: s.single(tensor=s.layers[0]), "ShapeError: kv_cache_tensor: expected a tensor [2, H, n, D], got "),
    (lambda s: s.single(tensor=s.tensors[1]), "ShapeError: kv_cache_tensor: expected shape (2, 2, n, 8) with n <= 5, got (2, 1, 4, 8)."),
    (lambda s: s.single(tensor=s.new((2, 2, 6, 8), HALF)), "ShapeError: kv_cache_tensor: expected shape (2, 2, n, 8) with n <= 5, got "),
    (lambda s: s.single(tensor=s.new((2, 2, 4, 16), HALF)), "ShapeError: kv_cache_tensor: expected head_dim 8 as the cache layer, got 16."),
    (lambda s: s.single(tensor=s.new((2, 2, 4, 8))), "DTypeError: kv_cache_tensor: expected float16 as the cache layer, got float32."),
    (lambda s: s.single(tensor=s.elsewhere().layer), "PlaceError: kv_cache_tensor: expected a tensor of "),
    (lambda s: s.single(tensor=s.strided), "LayoutError: kv_cache_tensor: expected a dense tensor [2, H, n, D], got "),
    (lambda s: s.single(slot=3), SLOT_3),
    (lambda s: s.single(slot=-1), SLOT_MINUS_1),
    (lambda s: s.single(slot=None), "SlotError: slot: expected an integer, got None."),
    (lambda s: s.single(stream=None), "PlaceError: stream: expected "),
    (lambda s: s.batched(cache=s.layers), "ShapeError: cache layers: expected KVLayerInfos, got list."),
    (lambda s: s.batched(cache=s.saved), f"ShapeError: cache layers: expected {CACHE}, got those of [2, H, n, D]."),
    (lambda s: s.batched(saved=s.cache), f"ShapeError: saved tensors: expected {SAVED}, got those of [B, 2, H, S, D]."),
    (lambda s: s.batched(saved=s.elsewhere().saved), "PlaceError: saved tensors: expected tensors of "),
    (
        lambda s: s.batched(saved=s.saved_of((2, 2, 4, 8), (2, 1, 4, 8), dtype=np.float32)),
        "DTypeError: saved tensors: expected float16 as the cache, got float32.",
    ),
    (
        lambda s: s.batched(saved=s.saved_of((2, 2, 4, 16), (2, 1, 4, 16))),
        "ShapeError: saved tensors: expected 2 layers of head_dim 8, got 2 of head_dim 16.",
    ),
    (
        lambda s: s.batched(saved=s.saved_of((2, 2, 4, 8))),
        "ShapeError: saved tensors: expected 2 layers of head_dim 8, got 1 of head_dim 8.",
    ),
    (
        lambda s: s.batched(saved=s.saved_of((2, 2, 4, 8), (2, 2, 4, 8))),
        "ShapeError: saved tensors: layer 1 has 1 heads, got a tensor of 2.",
    ),
    (lambda s: s.batched(slot=3), SLOT_3),
    (lambda s: s.batched(slot=-1), SLOT_MINUS_1),
    (lambda s: s.batched(tokens=-1), "RangeError: sequence_length: expected at least 0, got -1."),
    (lambda s: s.batched(tokens=0.5), "RangeError: sequence_length: expected an integer, got 0.5."),
    (lambda s: s.batched(tokens=5), "RangeError: sequence_length: the saved tensors hold at most 4 tokens, got 5."),
    (
        lambda s: s.batched(saved=s.saved_of((2, 2, 6, 8), (2, 1, 6, 8)), tokens=6),
        "RangeError: sequence_length: the slots of the cache hold at most 5 tokens, got 6.",
    ),
    (lambda s: s.batched(stream=None), "PlaceError: stream: expected "),
    (lambda s: s.compact(cache=s.layers), "ShapeError: layer_infos: expected KVLayerInfos, got list."),
    (lambda s: s.compact(cache=s.saved), f"ShapeError: layer_infos: expected {CACHE}, got those of [2, H, n, D]."),
    (lambda s: s.compact(plan=[1, 0, 2]), "MappingError: moves: expected a CompactionPlan, got list."),
    (lambda s: s.compact(plan=s.too_many), TOO_MANY),
    (
        lambda s: s.compact(plan=CompactionPlan.from_host([1, 0], 2, 2, [6, 1])),
        "RangeError: moves: expected lengths up to 5 tokens, got 6.",
    ),
    (lambda s: s.compact(stream=None), "PlaceError: stream: expected "),
    (lambda s: [lambda: s.elsewhere().compact(s.mapped)], "PlaceError: moves: expected a mapping of cpu, got one of "),
    (lambda s: s.compact_rows(infos=s.states), "ShapeError: states: expected StateInfos, got list."),
    (lambda s: s.compact_rows(plan=None), "MappingError: moves: expected a CompactionPlan, got NoneType."),
    (lambda s: s.compact_rows(plan=s.too_many), TOO_MANY),
    (lambda s: s.compact_rows(stream=None), "PlaceError: stream: expected "),
    (
        lambda s: s.compact_lengths(lengths=s.lengths[:2]),
        "MappingError: moves: expected a plan of at most 2 slots, got one of old_batch=3.",
    ),
    (lambda s: s.compact_lengths(lengths=s.new((3,), np.int64)), "DTypeError: length_tensor: expected int32, got int64."),
    (
        lambda s: s.compact_lengths(lengths=s.new((3, 1), np.int32)),
        "ShapeError: length_tensor: expected a dense tensor of shape (n,), got ",
    ),
    (lambda s: s.compact_lengths(stream=None), "PlaceError: stream: expected "),
    (lambda s: s.zero(infos=s.states), "ShapeError: states: expected StateInfos, got list."),
    (lambda s: s.zero(slot=3), SLOT_3),
    (lambda s: s.zero(slot=-1), SLOT_MINUS_1),
    (lambda s: s.zero(slot=2, count=2), "SlotError: slots 2 to 3: expected slots below 3. Slots never wrap."),
    (lambda s: s.zero(count=-1), "RangeError: count: expected an integer from 0 to 3, got -1."),
    (lambda s: s.zero(stream=None), "PlaceError: stream: expected "),
    (lambda s: s.copy(src=None), "ShapeError: src: expected StateInfos, got NoneType."),
    (lambda s: s.copy(src=s.elsewhere().infos), "PlaceError: src: expected states of "),
    (
        lambda s: s.copy(src=StateInfos(s.states[::-1], stream=s.stream)),
        "ShapeError: src: expected 3 slots of 2 layers with equal state bytes, got 3 of 2.",
    ),
    (
        lambda s: s.copy(src=StateInfos([state[:2] for state in s.states], stream=s.stream)),
        "ShapeError: src: expected 3 slots of 2 layers with equal state bytes, got 2 of 2.",
    ),
    (lambda s: s.copy(slot=3), SLOT_3),
    (lambda s: s.copy(stream=None), "PlaceError: stream: expected "),
    (lambda s: s.save_rows(infos=s.states), "ShapeError: states: expected StateInfos, got list."),
    (lambda s: s.save_rows(rows=s.rows[:1]), "ShapeError: saved: expected one tensor for each of 2 layers, got 1."),
    (lambda s: s.save_rows(rows=[s.rows[0], None]), "PlaceError: saved[1]: expected a DeviceTensor, got NoneType."),
    (lambda s: s.save_rows(rows=[s.rows[0], s.elsewhere().row]), "PlaceError: saved[1]: expected a tensor of "),
    (lambda s: s.save_rows(rows=[s.rows[0], s.new((5,), np.int32)]), "DTypeError: saved[1]: expected float32, got int32."),
    (lambda s: s.save_rows(rows=[s.rows[0], s.new((1, 5))]), "ShapeError: saved[1]: expected shape (5,), got (1, 5)."),
    (lambda s: s.save_rows(rows=[s.strided_row, s.rows[1]]), "LayoutError: saved[0]: expected a dense tensor, got "),
    (lambda s: s.save_rows(slot=3), SLOT_3),
    (lambda s: s.save_rows(stream=None), "PlaceError: stream: expected "),
]


@pytest.mark.parametrize(("calls", "message"), REFUSED, ids=[f"{index}-{message}" for index, (_, message) in enumerate(REFUSED)])
def test_refused(memory, stream, calls, message):
    scene = Scene(memory, stream)
    scene.strided = DeviceTensor(scene.tensors[0].allocation, shape=(2, 2, 2, 8), dtype="float16", strides=(64, 32, 8, 1), offset=256)
    scene.strided_row = DeviceTensor(scene.states[0].allocation, shape=(2, 3), dtype="float32", strides=(4, 1))
    before = [tensor.numpy().tobytes() for tensor in scene.everything]
    for call in calls(scene):
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
    "save_rows": "states rows infos",
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
    for call in getattr(scene, name)(**single, **given):
        with pytest.raises(ClosedError):
            call()
    assert [tensor.numpy().tobytes() for tensor in left] == before
