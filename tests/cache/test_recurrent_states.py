"""Capture and restore of recurrent and conv states: which bytes, and what is refused."""

import numpy as np
import pytest

from tests.helpers.cache_cases import (
    Image,
    Unchanged,
    fill_all,
    make_cache,
)
from trt_kvcache import HostMemory
from trt_kvcache.errors import (
    DTypeError,
    PlaceError,
    ShapeError,
)

STATE_KINDS = pytest.mark.parametrize("kind", ["linear", "mamba", "hybrid"])
RECURRENT, CONV = ("capture_recurrent_states", "restore_recurrent_states"), ("capture_conv_states", "restore_conv_states")


def bytes_of(tensor):
    """A tensor as bytes [..., row]: NaN is equal to itself."""
    return tensor.numpy().view(np.uint8)


@STATE_KINDS
@pytest.mark.parametrize("ping_pong", [False, True])
def test_states(memory, stream, kind, ping_pong):
    source, target = (make_cache(kind, memory, ping_pong=ping_pong) for _ in range(2))
    target.reset_for_new_sequences([1, 2], stream=stream)
    for parity in (0, 1, 0):
        fill_all(source, stream, parity)
        fill_all(target, stream, 7)
        states, expected = Image(source).states, Image(target)
        with Unchanged(source):
            for half, (capture, restore), shape in ((slice(0, 2), RECURRENT, (2, 3, 5)), (slice(2, 4), CONV, (7, 3))):
                saved = getattr(source, capture)(3, stream=stream)
                for array, tensor in zip(states[half], saved, strict=True):
                    assert (tensor.shape, tensor.memory, tensor.is_contiguous, tensor.ptr % 256) == (shape, memory, True, 0)
                    assert np.array_equal(bytes_of(tensor), array[3])
                getattr(target, restore)(saved, 4, stream=stream)
                for into, array in zip(expected.states[half], states[half], strict=True):
                    into[4] = array[3]
                del saved, tensor
        expected.check(target)
        assert target.host_kv_cache_lengths == (1, 2)
        source.swap()
    source.close()
    target.close()


def test_the_states_of_the_two_dtypes(memory, stream):
    with make_cache("mamba", memory) as cache:
        assert [tensor.dtype for tensor in cache.capture_recurrent_states(0, stream=stream)] == ["float32"] * 2
        assert [tensor.dtype for tensor in cache.capture_conv_states(0, stream=stream)] == ["float16"] * 2


@STATE_KINDS
def test_old_bug_states_where_the_old_batch_is_smaller_than_the_cache(memory, stream, kind):
    """The original takes the old batch for the slots of the buffer: states of later layers come from the wrong place."""
    with make_cache(kind, memory) as cache:
        cache.reset_for_new_sequences([0, 0, 0], stream=stream)
        fill_all(cache, stream)
        cache.commit_sequence_length([2, 4, 3], stream=stream)
        expected = Image(cache)
        expected.compact([-1, 0, 1], [2, 4, 3])
        cache.compact_batch([-1, 0, 1], 3, 2, stream=stream)
        expected.check(cache)


def test_saved_states_that_do_not_fit_change_nothing(memory, stream):
    host = HostMemory()
    other = host.create_stream()

    def states(place, on, dtype=np.float32, shape=(2, 3, 5)):
        return place.to_device(np.ones(shape, dtype), stream=on)

    good = states(memory, stream)
    bad = [
        ([good], ShapeError, "saved: expected 2 tensors, one per recurrent layer, got 1."),
        ([good] * 3, ShapeError, "saved: expected 2 tensors, one per recurrent layer, got 3."),
        (good, ShapeError, "saved: expected a sequence of tensors, one per recurrent layer, got DeviceTensor."),
        ([good, np.ones((2, 3, 5))], PlaceError, f"saved[1]: expected a DeviceTensor of {memory.device}, got ndarray."),
        ([good, states(host, other)], PlaceError, "saved[1]: expected a tensor of the cache's memory, got one of another (cpu)."),
        ([good, states(memory, stream, np.float16)], DTypeError, "saved[1]: expected float32, got float16."),
        ([good, states(memory, stream, shape=(3, 2, 5))], ShapeError, "saved[1]: expected shape (2, 3, 5), got (3, 2, 5)."),
        ([good, states(memory, stream, shape=(1, 2, 3, 5))], ShapeError, "saved[1]: expected shape (2, 3, 5), got (1, 2, 3, 5)."),
    ]
    for kind in ("linear", "mamba", "hybrid"):
        with make_cache(kind, memory) as cache:
            cache.reset_for_new_sequences([3, 5], stream=stream)
            fill_all(cache, stream)
            for saved, error, text in bad:
                with Unchanged(cache), pytest.raises(error) as caught:
                    cache.restore_recurrent_states(saved, 1, stream=stream)
                assert str(caught.value) == text
            with Unchanged(cache), pytest.raises(DTypeError, match=r"^saved\[0\]: expected float16, got float32"):
                cache.restore_conv_states([states(memory, stream, shape=(7, 3))] * 2, 1, stream=stream)
