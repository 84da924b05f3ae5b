"""What the managers refuse: the error, its text, and that neither a byte nor what the host knows has changed."""

import gc
from contextlib import nullcontext
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import pytest

from tests.helpers.cache_cases import HEADS, KINDS, LAYER_TYPES, MAMBA, FailingMemory, Unchanged, fill_all, kv_config, make_cache
from trt_kvcache import HostMemory, KVCacheManager, Lengths
from trt_kvcache.errors import (
    CapacityError,
    CaptureError,
    ClosedError,
    ConfigError,
    DTypeError,
    LayerIndexError,
    LengthsUnknown,
    MappingError,
    PlaceError,
    RangeError,
    ShapeError,
    SlotError,
)

KV, STATES = ("manager", "linear", "hybrid"), ("linear", "mamba", "hybrid")
COMMIT = "commit_sequence_length"


def tensor(*values, dtype="int32"):
    """An argument that is made when the cache is there: of it and of a stream."""
    return lambda cache, stream: cache.memory.to_device(np.array(values, dtype), stream=stream)


def ones(*shape, dtype="float16"):
    return tensor(*np.ones(shape), dtype=dtype)


def foreign(values):
    return HostMemory().to_device(values, stream=HostMemory().create_stream())


def captured(name, *arguments):
    return lambda cache, stream: getattr(cache, name)(*arguments, stream=stream)


def resolve(argument, *made):
    if callable(argument):
        return argument(*made)
    return [resolve(part, *made) for part in argument] if isinstance(argument, list) else argument


class Bad(NamedTuple):
    """What is called with what, and what it raises. In ``text`` DEVICE and CLASS stand for those of the cache."""

    operation: str
    arguments: list
    keywords: dict
    error: type
    text: str
    kinds: tuple = KINDS
    state: str = "open"  # or closed, capturing, full, unknown (a device tensor was committed), debug


BAD = []


def refuse(operation, *rows, **same):
    for error, text, *arguments in rows:
        keywords = arguments.pop() if arguments and isinstance(arguments[-1], dict) else {}
        BAD.append(Bad(operation, arguments, keywords, error, text, **same))


INT32 = "expected int32 values on the host, got"
refuse(
    "reset_for_new_sequences",
    (RangeError, "reuse_lengths: expected at most max_batch_size=5 lengths, got 6.", [1] * 6),
    (RangeError, "reuse_lengths[1]: expected an integer from 0 to ", [0, -1]),
    (DTypeError, f"reuse_lengths: {INT32} float64.", np.array([0.5])),
)
ROOM, ONE = "exceeds max_sequence_length=7. Nothing was changed.", {"max_increment": 1}
refuse(
    COMMIT,
    (RangeError, "increment: expected at least 0, got -1.", -1),
    (ShapeError, "increment: expected one value for each of 3 active slots, got 4.", [1] * 4),
    (PlaceError, "increment: expected a tensor of DEVICE, got one of cpu.", foreign(np.ones(3, np.int32)), ONE),
)
refuse(COMMIT, (CapacityError, f"slot 1 holds 5 tokens; committing 3 more {ROOM}", 3), kinds=KV)
EXACT = " Call sync_lengths(stream=) to learn its exact length."
refuse(COMMIT, (CapacityError, f"slot 1 holds at most 7 tokens; committing 1 more {ROOM}{EXACT}", 1), kinds=KV, state="unknown")
ONLY_DEVICE = "were changed by values that only the device has. Call sync_lengths(stream=) to read them."
refuse("host_kv_cache_lengths", (LengthsUnknown, f"the lengths of slots [0, 1, 2] {ONLY_DEVICE}"), state="unknown")
refuse("set_active_batch_size", (RangeError, "active batch size: expected an integer from 0 to 5, got 6.", 6))
ACTIVE = [(slot, f"slot {slot}: expected 0 <= slot < 3 (active slots). Slots never wrap.") for slot in (3, -1)]
refuse("clear_slot", *[(SlotError, text, slot) for slot, text in ACTIVE])
refuse("rewind", *[(SlotError, text, slot, 0) for slot, text in ACTIVE])
refuse("rewind", (RangeError, "rewind: slot 1 holds 5 tokens; expected 0 to 5, got 6.", 1, 6), kinds=("manager",))
NO_WAY_BACK = "rewind: recurrent states cannot go back to an earlier token. Restore captured ones, or clear_slot."
refuse("rewind", (ConfigError, NO_WAY_BACK, 1, 0), kinds=STATES)
TEXT = "batch_mapping: expected"
OLD = "compact_batch: expected old_batch=3, the active batch size, got"
refuse(
    "compact_batch",
    (MappingError, f"{OLD} 2.", [0, 1], 2, 2),
    (MappingError, "batch_mapping: old slots 1 and 2 both go to slot 1.", [0, 1, 1], 3, 3),
    (DTypeError, f"{TEXT} int32, got int64.", tensor(-1, 0, 1, dtype="int64"), 3, 2),
)
ORDER = "batch_mapping: a mapping on the device must keep the order of the slots, got [1, 0, -1]."
refuse("compact_batch", (MappingError, ORDER, tensor(1, 0, -1), 3, 2), state="debug")
SLOTS = [(slot, f"slot {slot}: expected 0 <= slot < 5 (batch slots). Slots never wrap.") for slot in (5, -1)]
refuse("capture_kv_cache", *[(SlotError, text, slot, 1) for slot, text in SLOTS], kinds=KV)
SAVED_KV = captured("capture_kv_cache", 0, 1)
refuse("restore_kv_cache", *[(SlotError, text, SAVED_KV, slot) for slot, text in SLOTS], kinds=KV)
LAYER = [ones(2, h, 4, d) for h, d in HEADS]
ANOTHER = "saved[0]: expected a tensor of the cache's memory, got one of another (cpu)."
SAVED = [
    (PlaceError, ANOTHER, [foreign(np.ones((2, 2, 4, 16), np.float16)), *LAYER[1:]]),
    (ShapeError, "saved[0]: expected shape (2, 2, 4, 16), got (2, 3, 4, 16).", LAYER[::-1]),
]
refuse("restore_kv_cache", *[(*row, 1) for row in SAVED], kinds=("manager", "hybrid"))
STATE = ones(2, 3, 5, dtype="float32")
refuse(
    "restore_recurrent_states",
    (ShapeError, "saved[1]: expected shape (2, 3, 5), got (3, 2, 5).", [STATE, ones(3, 2, 5, dtype="float32")], 1),
    kinds=STATES,
)
for states in ("recurrent_states", "conv_states"):
    refuse(f"capture_{states}", *[(SlotError, text, slot) for slot, text in SLOTS], kinds=STATES)
    refuse(f"restore_{states}", *[(SlotError, text, captured(f"capture_{states}", 0), slot) for slot, text in SLOTS], kinds=STATES)
refuse(
    "copy_back",
    *[(SlotError, text, slot, 0) for slot, text in ACTIVE],
    (RangeError, "count: expected at most 2 active slots from slot 1 on, got 3.", 1, 3),
    kinds=STATES,
)

KV_GETTERS = ["get_combined_kv_cache", "get_separate_kv_cache", "get_layer_config"]
STATE_GETTERS = ["get_recurrent_state", "get_conv_state", "get_next_recurrent_state", "get_next_conv_state"]
for kind, count, getters, name in (
    ("manager", 3, KV_GETTERS, "attn_layer_idx"),
    ("linear", 2, KV_GETTERS, "attn_layer_idx"),
    ("linear", 2, STATE_GETTERS, "recurrent_layer_idx"),
    ("mamba", 2, STATE_GETTERS, "recurrent_layer_idx"),
    ("hybrid", 5, KV_GETTERS + STATE_GETTERS, "layer_idx"),
):
    wrong = {index: f"{name} {index}: expected 0 <= {name} < {count}. Indices never wrap." for index in (count, -1)}
    for getter in getters:
        refuse(getter, *[(LayerIndexError, text, index) for index, text in wrong.items()], kinds=(kind,))
for index, layer_type in enumerate(LAYER_TYPES):
    wanted, getters = ("attention", KV_GETTERS) if layer_type is MAMBA else ("mamba", STATE_GETTERS)
    text = f"layer_idx {index}: expected a layer of kind {wanted}, got {layer_type.value}."
    for getter in getters:
        refuse(getter, (LayerIndexError, text, index), kinds=("hybrid",))

CLOSED = (ClosedError, "this CLASS is closed.")
LENGTHS_CLOSED = (ClosedError, "these Lengths are closed.")
HINT = "Capture commits of a number or a device tensor, and compactions with a device mapping. Nothing was changed."
FROZEN = f"cannot be captured: its host values would be frozen into the CUDA graph. {HINT}"
OPERATIONS = {
    "reset_for_new_sequences": (KINDS, ([1, 0],)),
    COMMIT: (KINDS, (1,)),
    "sync_lengths": (KINDS, ()),
    "set_active_batch_size": (KINDS, (4,)),
    "clear_slot": (KINDS, (0,)),
    "rewind": (("manager",), (0, 1)),
    "compact_batch": (KINDS, ([1, 0, 2], 3, 3)),
    "capture_kv_cache": (KV, (0, 1)),
    "restore_kv_cache": (KV, (SAVED_KV, 0)),
    "capture_recurrent_states": (STATES, (0,)),
    "restore_recurrent_states": (STATES, (captured("capture_recurrent_states", 0), 0)),
    "capture_conv_states": (STATES, (0,)),
    "restore_conv_states": (STATES, (captured("capture_conv_states", 0), 0)),
    "copy_back": (STATES, (0, 1)),
    "clear_mamba_states": (STATES, ()),
}
OF_LENGTHS = ["reset", "commit", "sync_lengths", "set_active_batch_size", "clear_slot", "rewind", "compact"]
for name, (kinds, given) in OPERATIONS.items():
    refuse(name, (PlaceError, "stream: expected", *given, {"stream": None}), (TypeError, "", *given, {"stream": "left out"}), kinds=kinds)
    refuse(name, (*CLOSED, *given), kinds=kinds, state="closed")
    if name.startswith("capture"):
        refuse(name, (CapacityError, "no room.", *given), kinds=kinds, state="full")
    if name not in (COMMIT, "sync_lengths", "compact_batch", "copy_back", "clear_mamba_states"):
        refuse(name, (CaptureError, f"{name} {FROZEN}", *given), kinds=kinds, state="capturing")
for name, operation in zip(OF_LENGTHS, OPERATIONS, strict=False):
    refuse(f"lengths.{name}", (*LENGTHS_CLOSED, *OPERATIONS[operation][1]), state="closed")
refuse("sync_lengths", (CaptureError, f"sync_lengths cannot be captured: it waits for the device. {HINT}"), state="capturing")
refuse(COMMIT, (CaptureError, f"{COMMIT} with host values {FROZEN}", [1, 1, 1]), state="capturing")
refuse("compact_batch", (CaptureError, f"compact_batch with a host mapping {FROZEN}", [0, 1, 2], 3, 3), state="capturing")
for kinds, names in (
    (KINDS, ["active_batch_size", "host_kv_cache_lengths", "kv_cache_all_empty", "kv_cache_lengths", "__enter__"]),
    (KV, ["kv_head_dim_groups", "kv_scales"]),
):
    for name in names:
        refuse(name, CLOSED, kinds=kinds, state="closed")
for name in KV_GETTERS[:2] + STATE_GETTERS:
    refuse(name, (*CLOSED, 1), kinds=KV if name in KV_GETTERS else STATES, state="closed")
for name in ("__copy__", "lengths.__copy__"):
    refuse(name, (TypeError, f"a {'Lengths' if '.' in name else 'CLASS'} owns device memory and cannot be copied or pickled."))


def test_the_table_is_as_long_as_the_issue_asks():
    assert len(BAD) >= 160


@pytest.mark.parametrize(("kind", "row"), [pytest.param(kind, row, id=f"{kind}-{row.state}-{row[0]}") for row in BAD for kind in row.kinds])
def test_what_is_refused_changes_nothing(memory, monkeypatch, kind, row):
    if row.state in ("capturing", "full"):
        memory = FailingMemory()
    stream = memory.create_stream()
    cache = make_cache(kind, memory)
    cache.reset_for_new_sequences([3, 5, 2], stream=stream)
    fill_all(cache, stream)
    arguments, keywords = resolve(row.arguments, cache, stream), dict(row.keywords)
    if row.operation.removeprefix("lengths.") in {*OPERATIONS, *OF_LENGTHS}:
        keywords.setdefault("stream", stream)
    if keywords.get("stream") == "left out":
        del keywords["stream"]
    if row.state == "unknown":
        cache.commit_sequence_length(tensor(0, 1, 2)(cache, stream), max_increment=2, stream=stream)
    elif row.state == "debug":
        monkeypatch.setenv("TRT_KVCACHE_DEBUG", "1")
    elif row.state == "capturing":
        memory.capturing = True
    elif row.state == "full":
        memory.failures = 1
    elif row.state == "closed":
        cache.close()
    with nullcontext() if row.state == "closed" else Unchanged(cache), pytest.raises(row.error) as caught:
        attrgetter(row.operation)(cache)(*arguments, **keywords)
    text = str(caught.value)
    assert text.startswith(row.text.replace("DEVICE", memory.device).replace("CLASS", type(cache).__name__))
    assert row.text or "stream" in text
    assert cache.lengths.upper_bounds == ((5, 7, 4) if row.state == "unknown" else (3, 5, 2))
    cache.close()


def test_a_manager_is_not_made_of_lengths_of_another_size_or_place(memory):
    for error, text, lengths in (
        (ConfigError, "lengths: expected those of 5 slots of 7 tokens, got 6 slots of 7.", Lengths(6, 7, memory=memory)),
        (PlaceError, "lengths: expected those of the memory that the cache is in", Lengths(5, 7, memory=HostMemory())),
    ):
        with pytest.raises(error, match=text):
            KVCacheManager(kv_config(), memory=memory, lengths=lengths)


@pytest.mark.parametrize(("kind", "allocations"), [("manager", 7), ("linear", 12), ("mamba", 9), ("hybrid", 15)])
def test_an_allocation_that_fails_releases_everything(kind, allocations):
    gc.disable()  # release is not left to the garbage collector
    try:
        for step in range(allocations):
            memory = FailingMemory()
            memory.left, memory.failures = step, 1
            with pytest.raises(CapacityError, match="no room"):
                make_cache(kind, memory, ping_pong=True, dtype="int8")
            assert memory.live_nbytes == 0
    finally:
        gc.enable()
