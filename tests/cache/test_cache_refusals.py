"""What the managers refuse: the error, its text, and that neither a byte nor what the host knows has changed.

Each operation of each manager is called on a closed cache, while a stream is captured, and without a stream. What single
operations refuse besides is here for slots and lengths, and in the file of the operation for the rest.
"""

import numpy as np
import pytest

from tests.helpers.assertions import raises
from tests.helpers.caches import ALL_KINDS, KINDS, B, CapturingMemory, S, Unchanged, cache_holding, on_device
from trt_kvcache import HostMemory
from trt_kvcache.errors import (
    CapacityError,
    CaptureError,
    ClosedError,
    DTypeError,
    LengthsUnknown,
    PlaceError,
    RangeError,
    ShapeError,
    SlotError,
)

HELD = (3, 5, 2)  # of S = 7 tokens, in three of B = 5 slots
WITH_ROWS, WITH_STATES = ("manager", "linear", "hybrid"), ("linear", "mamba", "hybrid")
HINT = "Capture commits of a number or a device tensor, and compactions with a device mapping. Nothing was changed."
FROZEN = "its host values would be frozen into the CUDA graph"
WAITS = "it waits for the device"

#: Arguments of the operations that every manager has.
ON_SLOTS = {
    "reset_for_new_sequences": ([1, 0],),
    "commit_sequence_length": ([1, 1, 1],),
    "sync_lengths": (),
    "set_active_batch_size": (4,),
    "clear_slot": (0,),
    "rewind": (0, 1),
    "compact_batch": ([1, 0, 2], 3, 3),
}
#: Of those of the managers with K and V, and with states. What is restored was captured before.
ON_ROWS = {"capture_kv_cache": (0, 1), "restore_kv_cache": ("kv_cache", 0)}
ON_STATES = {
    "capture_recurrent_states": (0,),
    "restore_recurrent_states": ("recurrent_states", 0),
    "capture_conv_states": (0,),
    "restore_conv_states": ("conv_states", 0),
    "copy_back": (0, 1),
    "keep_states": (0,),
    "clear_mamba_states": (),
}
OPERATIONS = [
    *((kind, name) for kind in KINDS for name in ON_SLOTS if name != "rewind" or kind == "manager"),
    *((kind, name) for kind in WITH_ROWS for name in ON_ROWS),
    *((kind, name) for kind in WITH_STATES for name in ON_STATES),
]
EACH_OPERATION = pytest.mark.parametrize(("kind", "name"), OPERATIONS)


def arguments_of(cache, name, stream):
    arguments = {**ON_SLOTS, **ON_ROWS, **ON_STATES}[name]
    if not name.startswith("restore"):
        return arguments
    part, slot = arguments
    return getattr(cache, f"capture_{part}")(*(slot, 1) if part == "kv_cache" else (slot,), stream=stream), slot


class TestEachOperation:
    @EACH_OPERATION
    def test_of_a_closed_cache(self, memory, stream, kind, name):
        cache = cache_holding(kind, memory, stream, *HELD)
        arguments = arguments_of(cache, name, stream)
        cache.close()
        with pytest.raises(ClosedError) as caught:
            getattr(cache, name)(*arguments, stream=stream)
        assert str(caught.value) == f"this {type(cache).__name__} is closed."

    @EACH_OPERATION
    def test_on_something_else_than_a_stream(self, memory, stream, kind, name):
        with cache_holding(kind, memory, stream, *HELD) as cache:
            arguments = arguments_of(cache, name, stream)
            with Unchanged(cache), pytest.raises(PlaceError, match=r"^stream: expected .*, got NoneType"):
                getattr(cache, name)(*arguments, stream=None)

    @EACH_OPERATION
    def test_without_a_stream(self, memory, stream, kind, name):
        with cache_holding(kind, memory, stream, *HELD) as cache:
            arguments = arguments_of(cache, name, stream)
            with Unchanged(cache), pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'stream'"):
                getattr(cache, name)(*arguments)

    @EACH_OPERATION
    def test_a_stream_is_given_by_name(self, memory, stream, kind, name):
        with cache_holding(kind, memory, stream, *HELD) as cache:
            arguments = arguments_of(cache, name, stream)
            with Unchanged(cache), pytest.raises(TypeError, match="positional argument"):
                getattr(cache, name)(*arguments, stream)

    @pytest.mark.parametrize(("kind", "name"), [each for each in OPERATIONS if each[1] not in ("copy_back", "clear_mamba_states")])
    def test_while_a_stream_is_captured(self, kind, name):
        memory = CapturingMemory()
        stream = memory.create_stream()
        reason = {"sync_lengths": WAITS, "keep_states": "a graph keeps nothing until it is replayed"}.get(name, FROZEN)
        what = {"commit_sequence_length": f"{name} with host values", "compact_batch": f"{name} with a host mapping"}.get(name, name)
        with cache_holding(kind, memory, stream, *HELD) as cache:
            arguments = arguments_of(cache, name, stream)
            memory.capturing = True
            with Unchanged(cache), pytest.raises(CaptureError) as caught:
                getattr(cache, name)(*arguments, stream=stream)
            assert str(caught.value) == f"{what} cannot be captured: {reason}. {HINT}"


class TestClosed:
    @ALL_KINDS
    @pytest.mark.parametrize("name", ["active_batch_size", "host_kv_cache_lengths", "kv_cache_all_empty", "kv_cache_lengths", "__enter__"])
    def test_lengths_are_not_told(self, memory, stream, kind, name):
        cache = cache_holding(kind, memory, stream, *HELD)
        cache.close()
        with pytest.raises(ClosedError, match=rf"^this {type(cache).__name__} is closed\.$"):
            getattr(cache, name)() if name == "__enter__" else getattr(cache, name)

    @pytest.mark.parametrize("kind", WITH_ROWS)
    @pytest.mark.parametrize("name", ["kv_head_dim_groups", "kv_scale_rows"])
    def test_groups_and_scales_are_not_told(self, memory, stream, kind, name):
        cache = cache_holding(kind, memory, stream, *HELD, dtype="int8")
        cache.close()
        with pytest.raises(ClosedError, match=rf"^this {type(cache).__name__} is closed\.$"):
            getattr(cache, name)

    @pytest.mark.parametrize(
        ("kind", "name", "layer"),
        [
            *((kind, name, 1) for kind in WITH_ROWS for name in ("get_combined_kv_cache", "get_separate_kv_cache")),
            *(
                (kind, name, 0)
                for kind in WITH_STATES
                for name in ("get_recurrent_state", "get_conv_state", "get_next_recurrent_state", "get_next_conv_state")
            ),
        ],
    )
    def test_no_view_is_given(self, memory, stream, kind, name, layer):
        cache = cache_holding(kind, memory, stream, *HELD)
        cache.close()
        with pytest.raises(ClosedError, match=rf"^this {type(cache).__name__} is closed\.$"):
            getattr(cache, name)(layer)

    @pytest.mark.parametrize("kind", WITH_STATES)
    def test_states_are_not_swapped(self, memory, stream, kind):
        cache = cache_holding(kind, memory, stream, *HELD)
        cache.close()
        with pytest.raises(ClosedError, match=rf"^this {type(cache).__name__} is closed\.$"):
            cache.swap()

    @pytest.mark.parametrize("name", ["kv_cache_manager", "mamba_cache_manager"])
    def test_the_managers_of_a_hybrid_are_not_given(self, memory, stream, name):
        cache = cache_holding("hybrid", memory, stream, *HELD)
        cache.close()
        with pytest.raises(ClosedError, match=r"^this HybridCacheManager is closed\.$"):
            getattr(cache, name)


#: What is said of S tokens is said where there are K and V: states alone have no limit.
FULL = f"exceeds max_sequence_length={S}"
ACTIVE, ANY = ("0 <= slot < 3", "active slots"), (f"0 <= slot < {B}", "batch slots")
BAD = [
    ("reset_for_new_sequences", ([1] * 6,), RangeError, ("reuse_lengths", f"at most max_batch_size={B} lengths", 6)),
    ("reset_for_new_sequences", (np.array([0.5]),), DTypeError, ("reuse_lengths", "int32 values on the host", "float64")),
    ("commit_sequence_length", (-1,), RangeError, ("increment", "at least 0", -1)),
    ("commit_sequence_length", ([0, -1, 0],), RangeError, ("increment[1]", "at least 0", -1)),
    ("commit_sequence_length", ([0],), ShapeError, ("increment", "one value for each of 3 active slots", 1)),
    ("set_active_batch_size", (6,), RangeError, ("active batch size", f"0 to {B}", 6)),
    ("set_active_batch_size", (-1,), RangeError, ("active batch size", f"0 to {B}", -1)),
    ("clear_slot", (3,), SlotError, ("slot 3", ACTIVE)),
    ("clear_slot", (-1,), SlotError, ("slot -1", ACTIVE)),
    ("rewind", (3, 0), SlotError, ("slot 3", ACTIVE)),
    ("rewind", (-1, 0), SlotError, ("slot -1", ACTIVE)),
]
BAD_WITH_ROWS = [
    ("reset_for_new_sequences", ([0, S + 1],), RangeError, ("reuse_lengths[1]", f"0 to {S}", 8)),
    ("commit_sequence_length", (3,), CapacityError, (f"slot 1 holds 5 tokens; committing 3 more {FULL}",)),
    ("commit_sequence_length", ([5, 4, 0],), CapacityError, (f"slot 0 holds 3 tokens; committing 5 more {FULL}",)),
    ("capture_kv_cache", (5, 1), SlotError, ("slot 5", ANY)),
    ("capture_kv_cache", (-1, 1), SlotError, ("slot -1", ANY)),
    ("capture_kv_cache", (0, S + 1), RangeError, ("sequence_length", f"0 to {S}", 8)),
]


class TestArguments:
    @ALL_KINDS
    @pytest.mark.parametrize(("name", "arguments", "error", "parts"), BAD)
    def test_of_every_manager(self, memory, stream, kind, name, arguments, error, parts):
        with cache_holding(kind, memory, stream, *HELD) as cache, Unchanged(cache), raises(error, *parts):
            getattr(cache, name)(*arguments, stream=stream)

    @pytest.mark.parametrize("kind", WITH_ROWS)
    @pytest.mark.parametrize(("name", "arguments", "error", "parts"), BAD_WITH_ROWS)
    def test_where_slots_have_an_end(self, memory, stream, kind, name, arguments, error, parts):
        with cache_holding(kind, memory, stream, *HELD) as cache, Unchanged(cache), raises(error, *parts):
            getattr(cache, name)(*arguments, stream=stream)

    def test_rewind_never_lengthens(self, memory, stream):
        refused = raises(RangeError, "rewind: slot 1 holds 5 tokens", expected="0 to 5", got=6)
        with cache_holding("manager", memory, stream, *HELD) as cache, Unchanged(cache), refused:
            cache.rewind(1, 6, stream=stream)

    @ALL_KINDS
    def test_increments_of_another_memory(self, memory, stream, kind):
        host = HostMemory()
        foreign = on_device(host, [1, 1, 1], host.create_stream())
        refused = raises(PlaceError, "increment", expected=f"tensor of {memory.device}", got="cpu")
        with cache_holding(kind, memory, stream, *HELD) as cache, Unchanged(cache), refused:
            cache.commit_sequence_length(foreign, max_increment=1, stream=stream)


class TestUnknownLengths:
    @pytest.fixture(params=KINDS)
    def cache(self, request, memory, stream):
        """A cache whose lengths only the device knows."""
        with cache_holding(request.param, memory, stream, *HELD) as cache:
            cache.commit_sequence_length(on_device(memory, [0, 1, 2], stream), max_increment=2, stream=stream)
            yield cache

    def test_the_host_does_not_tell_them(self, cache):
        with Unchanged(cache), pytest.raises(LengthsUnknown) as caught:
            _ = cache.host_kv_cache_lengths
        assert str(caught.value) == (
            "the lengths of slots [0, 1, 2] were changed by values that only the device has. Call sync_lengths(stream=) to read them."
        )

    def test_capacity_is_judged_by_what_they_may_be(self, memory, stream):
        with cache_holding("manager", memory, stream, *HELD) as cache:
            cache.commit_sequence_length(on_device(memory, [0, 1, 2], stream), max_increment=2, stream=stream)
            refused = raises(CapacityError, f"slot 1 holds at most 7 tokens; committing 1 more {FULL}", says="sync_lengths(stream=)")
            with Unchanged(cache), refused:
                cache.commit_sequence_length(1, stream=stream)
