"""Sequences by handle over caches of every kind, with random tokens, and everything that an operation could change in them."""

import inspect
from functools import lru_cache, partial

import numpy as np
import pytest

from tests.helpers.caches import Unchanged, make_cache
from trt_kvcache import SequenceCacheManager
from trt_kvcache.dtypes import numpy_dtype

#: Bytes of one token, and of the states of one slot, of the cases in float16.
TOKEN = {"manager": 2 * 2 * (2 * 16 + 48 + 3 * 16), "linear": 2 * 2 * 2 * (2 * 16), "hybrid": 2 * 2 * (2 * 16 + 48 + 3 * 16)}
STATES = 2 * (30 * 4 + 21 * 2)
#: Why a sequence is lost whose slot somebody else has used.
LOST = "a compaction took its slot for another one, and its tokens are gone. Unpin a sequence before its slot is dropped."


@lru_cache
def _takes_stream(function):
    return "stream" in inspect.signature(function).parameters


class On:
    """A manager whose calls are on one stream, if they do not say which."""

    def __init__(self, manager, stream):
        self._manager, self._stream = manager, stream

    @property
    def __class__(self):
        return type(self._manager)

    def __getattr__(self, name):
        value = getattr(self._manager, name)
        return partial(value, stream=self._stream) if inspect.ismethod(value) and _takes_stream(value.__func__) else value

    def __enter__(self):
        self._manager.__enter__()
        return self

    def __exit__(self, *_):
        self.close()


class Sequences(On):
    """Sequences on one stream, whose tokens are random by their id: what a sequence holds can be checked without keeping it."""

    def add(self, seq, count):
        """Append so many tokens to a sequence that has none."""
        self.append(seq, *tokens(self.cache, count, seq))

    def new(self, *counts):
        """Sequences of so many tokens, all created before any has some."""
        ids = [self.create_sequence() for _ in counts]
        for seq, count in zip(ids, counts, strict=True):
            self.add(seq, count)
        return ids

    def check(self, seq, count):
        """A sequence holds the tokens that ``add`` gave it."""
        assert raw(self.get(seq)) == raw(tokens(self.cache, count, seq))

    @property
    def slots(self):
        """The slot of each sequence, in the order of their ids; None for those on the host."""
        return [slot for _, slot in sorted(slots_of(self).items())]

    def refuses(self, error, text, call, *arguments, **keywords):
        """A call raises, and neither the cache nor a sequence has changed."""
        before = handles(self)
        with Unchanged(self.cache), pytest.raises(error) as caught:
            call(*arguments, **keywords)
        assert str(caught.value) == text
        assert handles(self) == before


def make_sequences(memory, stream, kind="manager", *, states=True, swapping=False, threshold=1, **changes):
    """A cache of a kind and the sequences over it, both on one stream. Of ``linear``, states can be left out."""
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


def slots_of(sequences):
    """Which sequence is in which slot; None for those on the host. No other test looks into the table."""
    return {entry.id: entry.slot for entry in sequences._table}


def handles(sequences):
    """Everything that an operation could change in the table."""
    table = sequences._table
    entries = [(e.id, e.slot, e.length, e.pinned, e.saved and [a.tobytes() for a in e.saved.arrays]) for e in table]
    return entries, sequences.memory_used, sequences.memory_swapped
