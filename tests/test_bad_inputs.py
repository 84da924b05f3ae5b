"""What the managers refuse: the error, its text, and that neither a byte nor what the host knows has changed.

A cache of five slots of seven tokens holds sequences of 3, 5 and 2 tokens in its first three. A row of the table calls an operation of
it with something wrong, or while the cache is in a state in which that cannot be done.
"""

from __future__ import annotations

import gc
from contextlib import nullcontext
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import pytest
from cache_cases import (
    HEADS,
    KINDS,
    LAYER_TYPES,
    MAMBA,
    CapturingMemory,
    Unchanged,
    fill_all,
    hybrid_config,
    kv_config,
    linear_config,
    make_cache,
    mamba_config,
)

from trt_kvcache import HostMemory, HybridCacheManager, KVCacheManager, Lengths, LinearKVCache, MambaCacheManager
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


class FailingMemory(CapturingMemory):
    """Host memory whose n-th allocation fails."""

    left = 0

    def allocate(self, *arguments, **keywords):
        self.left -= 1
        if self.left == 0:
            raise CapacityError("no room.")
        return super().allocate(*arguments, **keywords)


def tensor(*values, dtype="int32"):
    """An argument that is made when the cache is there: of it and of a stream."""
    return lambda cache, stream: cache.memory.to_device(np.array(values, dtype), stream=stream)


def ones(*shape, dtype="float16"):
    return lambda cache, stream: cache.memory.to_device(np.ones(shape, dtype), stream=stream)


def foreign(values):
    return HostMemory().to_device(values, stream=HostMemory().create_stream())


def captured(name, *arguments):
    return lambda cache, stream: getattr(cache, name)(*arguments, stream=stream)


def closed(cache, stream):
    tensor = LAYER[2](cache, stream)
    tensor.allocation.close()
    return tensor


def resolve(argument, cache, stream):
    if callable(argument):
        return argument(cache, stream)
    return [resolve(part, cache, stream) for part in argument] if isinstance(argument, list) else argument


class Bad(NamedTuple):
    """One row: what is called with what, and what it raises. In ``text`` DEVICE and CLASS stand for those of the cache."""

    operation: str
    arguments: list[Any]
    keywords: dict[str, Any]
    error: type[Exception]
    text: str
    kinds: tuple[str, ...] = KINDS
    state: str = "open"  # or closed, capturing, full, unknown (a device tensor was committed), debug


BAD = []


def refuse(operation, *rows, **same):
    """Add rows ``(error, text, *arguments)``; a dict at the end holds keywords."""
    for error, text, *arguments in rows:
        keywords = arguments.pop() if arguments and isinstance(arguments[-1], dict) else {}
        BAD.append(Bad(operation, arguments, keywords, error, text, **same))


INT32 = "expected int32 values on the host, got"
refuse(
    "reset_for_new_sequences",
    (RangeError, "reuse_lengths: expected at most max_batch_size=5 lengths, got 6.", [1] * 6),
    (RangeError, "reuse_lengths[1]: expected an integer from 0 to ", [0, -1]),
    (RangeError, "reuse_lengths[0]: expected an integer, got True.", [True]),
    (DTypeError, f"reuse_lengths: {INT32} float64.", np.array([0.5])),
    (PlaceError, f"reuse_lengths: {INT32} DeviceTensor((2,), int32, DEVICE).", tensor(1, 1)),
)
refuse("reset_for_new_sequences", (RangeError, "reuse_lengths[1]: expected an integer from 0 to 7, got 8.", [0, 8]), kinds=KV)
ROOM, ONE, KNOWN = "exceeds max_sequence_length=7. Nothing was changed.", {"max_increment": 1}, "max_increment: expected"
refuse(
    COMMIT,
    (RangeError, "increment: expected at least 0, got -1.", -1),
    (RangeError, "increment: expected an integer, got 1.0.", 1.0),
    (ShapeError, "increment: expected one value for each of 3 active slots, got 4.", [1] * 4),
    (RangeError, f"{KNOWN} with a device tensor only; the host knows the values it was given.", 1, ONE),
    (RangeError, f"{KNOWN} with a device tensor, whose values the host does not know.", tensor(1, 1, 1)),
    (PlaceError, "increment: expected a tensor of DEVICE, got one of cpu.", foreign(np.ones(3, np.int32)), ONE),
)
refuse(
    COMMIT,
    (CapacityError, f"slot 1 holds 5 tokens; committing 3 more {ROOM}", 3),
    (CapacityError, f"slot 0 holds 3 tokens; committing 5 more {ROOM}", [5, 4, 0]),
    (CapacityError, f"slot 1 holds 5 tokens; committing 3 more {ROOM}", tensor(1, 1, 1), {"max_increment": 3}),
    kinds=KV,
)
refuse("lengths.replayed", (CapacityError, f"slot 1 holds 5 tokens; committing 3 more {ROOM}", 3), kinds=KV)
EXACT = " Call sync_lengths(stream=) to learn its exact length."
refuse(COMMIT, (CapacityError, f"slot 1 holds at most 7 tokens; committing 1 more {ROOM}{EXACT}", 1), kinds=KV, state="unknown")
ONLY_DEVICE = "were changed by values that only the device has. Call sync_lengths(stream=) to read them."
refuse("host_kv_cache_lengths", (LengthsUnknown, f"the lengths of slots [0, 1, 2] {ONLY_DEVICE}"), state="unknown")
refuse(
    "set_active_batch_size", *[(RangeError, f"active batch size: expected an integer from 0 to 5, got {size}.", size) for size in (6, -1)]
)
ACTIVE = [(slot, f"slot {slot}: expected 0 <= slot < 3 (active slots). Slots never wrap.") for slot in (3, -1)]
refuse("clear_slot", *[(SlotError, text, slot) for slot, text in ACTIVE], (SlotError, "slot: expected an integer, got 0.0.", 0.0))
refuse("rewind", *[(SlotError, text, slot, 0) for slot, text in ACTIVE])
BEYOND = [(RangeError, f"rewind: slot 1 holds 5 tokens; expected 0 to 5, got {length}.", 1, length) for length in (6, -1)]
refuse("rewind", *BEYOND, (RangeError, "length: expected an integer, got 1.0.", 1, 1.0), kinds=("manager",))
NO_WAY_BACK = "rewind: recurrent states cannot go back to an earlier token. Restore captured ones, or clear_slot."
refuse("rewind", *[(ConfigError, NO_WAY_BACK, 1, length) for length in (0, 5)], kinds=STATES)
UNREAD = "rewind: only the device knows the length of slot 1. Call sync_lengths(stream=) before."
refuse("rewind", (LengthsUnknown, UNREAD, 1, 2), kinds=("manager",), state="unknown")

TEXT = "batch_mapping: expected"
OLD, NEW = "compact_batch: expected old_batch=3, the active batch size, got", "new_batch: expected an integer from 0 to 3, got"
HOLE = f"{TEXT} survivors for all of new_batch=2 slots, got none for [1]."
BELOW = "batch_mapping[1]: expected -1 or a slot below new_batch=2, got"
refuse(
    "compact_batch",
    (MappingError, f"{OLD} 2.", [0, 1], 2, 2),
    (MappingError, f"{TEXT} old_batch=3 entries, got 4.", [0, 1, 2, -1], 3, 3),
    (MappingError, "batch_mapping: old slots 1 and 2 both go to slot 1.", [0, 1, 1], 3, 3),
    (MappingError, f"{BELOW} -2.", [0, -2, 1], 3, 2),
    (MappingError, HOLE, [0, -1, -1], 3, 2),
    (PlaceError, f"{TEXT} a tensor of DEVICE, got one of cpu.", foreign(np.zeros(3, np.int32)), 3, 2),
    (DTypeError, f"{TEXT} int32, got int64.", tensor(-1, 0, 1, dtype="int64"), 3, 2),
)
ORDER = "batch_mapping: a mapping on the device must keep the order of the slots, got [1, 0, -1]."
refuse("compact_batch", (MappingError, ORDER, tensor(1, 0, -1), 3, 2), state="debug")
refuse("lengths.replayed_compaction", (MappingError, f"{OLD} 2.", 2, 1), (RangeError, f"{NEW} 4.", 3, 4))

SLOTS = [(slot, f"slot {slot}: expected 0 <= slot < 5 (batch slots). Slots never wrap.") for slot in (5, -1)]
BEYOND = [(RangeError, f"sequence_length: expected an integer from 0 to 7, got {length}.", 0, length) for length in (8, -1)]
refuse("capture_kv_cache", *[(SlotError, text, slot, 1) for slot, text in SLOTS], *BEYOND, kinds=KV)
SAVED_KV = captured("capture_kv_cache", 0, 1)
refuse("restore_kv_cache", *[(SlotError, text, SAVED_KV, slot) for slot, text in SLOTS], kinds=KV)
LAYER = [ones(2, h, 4, d) for h, d in HEADS]
ANOTHER = "expected a tensor of the cache's memory, got one of another (cpu)."
PER, FIRST = "one per attention layer, got", "saved[0]: expected"
SAVED = [
    (ShapeError, f"saved: expected 3 tensors, {PER} 2.", LAYER[:2]),
    (PlaceError, f"saved[0]: {ANOTHER}", [foreign(np.ones((2, 2, 4, 16), np.float16)), *LAYER[1:]]),
    (DTypeError, "saved[2]: expected float16, got float32.", [*LAYER[:2], ones(2, 3, 4, 16, dtype="float32")]),
    (ShapeError, f"{FIRST} shape (2, 2, 4, 16), got (2, 3, 4, 16).", LAYER[::-1]),
    (ShapeError, f"{FIRST} a tensor [2, H, n, D], got DeviceTensor((2, 2, 2, 2, 16)", [ones(2, 2, 2, 2, 16), *LAYER[1:]]),
    (ClosedError, "saved[2]: the memory behind this tensor is closed.", [*LAYER[:2], closed]),
    (ShapeError, f"{FIRST} at most max_sequence_length=7 tokens, got 8 in DeviceTensor((2,", [ones(2, h, 8, d) for h, d in HEADS]),
]
refuse("restore_kv_cache", *[(*row, 1) for row in SAVED], kinds=("manager", "hybrid"))
STATE = ones(2, 3, 5, dtype="float32")
SAVED_STATES = [
    (PlaceError, f"saved[1]: {ANOTHER}", [STATE, foreign(np.ones((2, 3, 5), np.float32))]),
    (ShapeError, "saved[1]: expected shape (2, 3, 5), got (3, 2, 5).", [STATE, ones(3, 2, 5, dtype="float32")]),
]
refuse("restore_recurrent_states", *[(*row, 1) for row in SAVED_STATES], kinds=STATES)
refuse("restore_conv_states", (DTypeError, f"{FIRST} float16, got float32.", [STATE] * 2, 1), kinds=STATES)
for states in ("recurrent_states", "conv_states"):
    refuse(f"capture_{states}", *[(SlotError, text, slot) for slot, text in SLOTS], kinds=STATES)
    refuse(f"restore_{states}", *[(SlotError, text, captured(f"capture_{states}", 0), slot) for slot, text in SLOTS], kinds=STATES)
refuse(
    "copy_back",
    *[(SlotError, text, slot, 0) for slot, text in ACTIVE],
    (RangeError, "count: expected at most 2 active slots from slot 1 on, got 3.", 1, 3),
    kinds=STATES,
)

# Layers that are not there, or of another kind.
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
    wrong |= {0.0: f"{name}: expected an integer, got 0.0."}
    for getter in getters:
        refuse(getter, *[(LayerIndexError, text, index) for index, text in wrong.items()], kinds=(kind,))
for index, layer_type in enumerate(LAYER_TYPES):
    kind, wanted, getters = layer_type.value, *(("attention", KV_GETTERS) if layer_type is MAMBA else ("mamba", STATE_GETTERS))
    for getter in getters:
        text = f"layer_idx {index}: expected a layer of kind {wanted}, got {kind}."
        refuse(getter, (LayerIndexError, text, index), kinds=("hybrid",))

CLOSED = (ClosedError, "this CLASS is closed.")
LENGTHS_CLOSED = (ClosedError, "these Lengths are closed.")
HINT = "Capture commits of a number or a device tensor, and compactions with a device mapping. Nothing was changed."
FROZEN = f"cannot be captured: its host values would be frozen into the CUDA graph. {HINT}"
#: Every operation with arguments that are right: on no stream, on a closed cache, while capturing.
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
#: What the first seven are called by ``Lengths``.
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
    (STATES, ["swap"]),
):
    for name in names:
        refuse(name, CLOSED, kinds=kinds, state="closed")
for name in KV_GETTERS[:2] + STATE_GETTERS:
    refuse(name, (*CLOSED, 1), kinds=KV if name in KV_GETTERS else STATES, state="closed")
for name, given in (("__copy__", ()), ("__deepcopy__", (0,)), ("__reduce_ex__", (4,))):
    refuse(name, (TypeError, "a CLASS owns device memory and cannot be copied or pickled.", *given))
    refuse(f"lengths.{name}", (TypeError, "a Lengths owns device memory and cannot be copied or pickled.", *given))


def test_the_table_is_as_long_as_the_issue_asks():
    assert len(BAD) >= 150


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
        memory.left = 1
    elif row.state == "closed":
        cache.close()
    with nullcontext() if row.state == "closed" else Unchanged(cache), pytest.raises(row.error) as caught:
        attrgetter(row.operation)(cache)(*arguments, **keywords)
    text = str(caught.value)
    assert text.startswith(row.text.replace("DEVICE", memory.device).replace("CLASS", type(cache).__name__))
    assert row.text or "stream" in text
    assert cache.lengths.upper_bounds == ((5, 7, 4) if row.state == "unknown" else (3, 5, 2))
    cache.close()


CONFIGS = {
    KVCacheManager: kv_config(),
    LinearKVCache: linear_config(),
    MambaCacheManager: mamba_config(),
    HybridCacheManager: hybrid_config(),
}


@pytest.mark.parametrize("manager", CONFIGS)
def test_what_a_manager_is_not_made_of(memory, manager):
    right, wrong = CONFIGS[manager], next(config for config in CONFIGS.values() if config is not CONFIGS[manager])
    rows = [(ConfigError, f"{manager.__name__}: expected a {type(right).__name__}, got {type(wrong).__name__}.", wrong, {})]
    if manager is not HybridCacheManager:
        one, other = Lengths(6, 7, memory=memory), Lengths(5, 7, memory=HostMemory())
        place = "lengths: expected those of the memory that the cache is in, got another one's (cpu)."
        rows.append((ConfigError, "lengths: expected those of 5 slots of 7 tokens, got 6 slots of 7.", right, {"lengths": one}))
        rows.append((PlaceError, place, right, {"lengths": other}))
    before = memory.live_nbytes
    for error, text, config, lengths in rows:
        with pytest.raises(error) as caught:
            manager(config, memory=memory, **lengths)
        assert (str(caught.value), memory.live_nbytes) == (text, before)


@pytest.mark.parametrize(("kind", "allocations"), [("manager", 7), ("linear", 12), ("mamba", 9), ("hybrid", 15)])
def test_an_allocation_that_fails_releases_everything(kind, allocations):
    """Lengths, layers, scales, groups by head dim, states and their infos."""
    gc.disable()  # release is not left to the garbage collector
    try:
        for step in range(1, allocations + 1):
            memory = FailingMemory()
            memory.left = step
            with pytest.raises(CapacityError, match="no room"):
                make_cache(kind, memory, ping_pong=True, dtype="int8")
            assert memory.live_nbytes == 0
    finally:
        gc.enable()
    memory = FailingMemory()
    memory.left = allocations + 1
    make_cache(kind, memory, ping_pong=True, dtype="int8").close()
    assert memory.left == 1
