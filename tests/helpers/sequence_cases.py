"""Sequences by handle over caches of every kind, with random tokens, and everything that an operation could change in them."""

import inspect
from functools import partial

import numpy as np
import pytest

from tests.helpers.cache_cases import (
    Unchanged,
    make_cache,
)
from trt_kvcache import SequenceCacheManager
from trt_kvcache.dtypes import numpy_dtype

#: Bytes of one token, and of the states of one slot, of the cases in float16.
TOKEN = {"manager": 2 * 2 * (2 * 16 + 48 + 3 * 16), "linear": 2 * 2 * 2 * (2 * 16), "hybrid": 2 * 2 * (2 * 16 + 48 + 3 * 16)}
STATES = 2 * (30 * 4 + 21 * 2)
TAKEN = "its slot was taken by whoever runs the cache, and its tokens are gone. Pin a sequence after its slot was made active."
#: How tokens are committed that the host knows, or not.
LIMIT = [{"max_increment": 1}, {}]


class On:
    """A manager whose calls are on one stream, if they do not say which."""

    def __init__(self, manager, stream):
        self._manager, self._stream = manager, stream

    @property
    def __class__(self):
        return type(self._manager)

    def __getattr__(self, name):
        value = getattr(self._manager, name)
        takes = inspect.ismethod(value) and "stream" in inspect.signature(value).parameters
        return partial(value, stream=self._stream) if takes else value


class Sequences(On):
    """Whose tokens are random, by the id of a sequence."""

    def add(self, seq, count):
        self.append(seq, *tokens(self.cache, count, seq))

    def new(self, *counts):
        """Sequences of so many tokens, all created before any has some."""
        ids = [self.create_sequence() for _ in counts]
        for seq, count in zip(ids, counts, strict=True):
            self.add(seq, count)
        return ids

    def check(self, seq, count):
        assert raw(self.get(seq)) == raw(tokens(self.cache, count, seq))

    @property
    def slots(self):
        return [entry.slot for entry in sorted(self._table, key=lambda entry: entry.id)]

    def refuses(self, error, text, call, *arguments, **keywords):
        before = handles(self)
        with Unchanged(self.cache), pytest.raises(error) as caught:
            call(*arguments, **keywords)
        assert str(caught.value) == text
        assert handles(self) == before


def make(kind, memory, stream, *, states=True, swapping=False, threshold=1, **changes):
    changes |= {} if states or kind != "linear" else {"num_mamba_layers": 0}
    cache = make_cache(kind, memory, **changes)
    return On(cache, stream), Sequences(SequenceCacheManager(cache, enable_swapping=swapping, swap_threshold=threshold), stream)


def tokens(cache, count, seed):
    """Keys and values of new tokens as ``append`` takes them: any bits, NaN with a payload among them."""
    kv, pair = cache.kv_config, []
    size = numpy_dtype(kv.dtype).itemsize
    for which in (0, 1):
        draws = [np.random.default_rng(100 * seed + 10 * which + index) for index in range(len(kv.layers))]
        shapes = [(layer.num_kv_heads, count, layer.head_dim * size) for layer in kv.layers]
        pair.append([draw.integers(0, 256, shape, np.uint8).view(numpy_dtype(kv.dtype)) for draw, shape in zip(draws, shapes, strict=True)])
    return tuple(np.stack(arrays) if kv.is_uniform else arrays for arrays in pair)


def raw(pair):
    """K and V of each layer, in a form that compares bits."""
    return [(layer.shape, layer.tobytes()) for arrays in pair for layer in arrays]


def joined(*parts, count=None):
    """The (first) tokens of several appends."""
    return [[np.concatenate(layers, axis=1)[:, :count] for layers in zip(*arrays, strict=True)] for arrays in zip(*parts, strict=True)]


def handles(sequences):
    """Everything that an operation could change in the table."""
    table = sequences._table
    entries = [(e.id, e.slot, e.length, e.pinned, e.saved and [a.tobytes() for a in e.saved.arrays]) for e in table]
    return entries, sequences.memory_used, sequences.memory_swapped


def three_swaps(memory, stream):
    """Three sequences of four tokens past the threshold, of which the calls that are returned send one or two out."""
    cache, sequences = make("manager", memory, stream, swapping=True, threshold=12 / 35)
    cache.reset_for_new_sequences([0])
    sequences.new(4, 4, 4)
    assert sequences.memory_swapped == 0
    into, out = partial(sequences.pin, 2, slot=0), partial(sequences.unpin, 2)
    return cache, sequences, [partial(sequences.add, 0, 3), partial(sequences.pin, 2, slot=3), lambda: (into(), out())]
