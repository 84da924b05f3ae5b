"""Stand-ins for an engine, a memory and a cache that record what is called, in order, and fail where they are told to.

``RecordingEngine`` stores tokens in the cache rows that it is bound to, and its logits are a hash of all tokens of a slot as it
reads them back: a token that was lost, doubled, moved or read from a dead row shows.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any

import numpy as np

from trt_kvcache import DeviceTensor, HostMemory, KVCacheConfig, KVCacheManager, KVLayerConfig, KVLayout
from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.engine.names import DEFAULT_NAMES
from trt_kvcache.engine.protocol import EngineProfile, TensorMode, TensorSpec
from trt_kvcache.engine.step_ancestors import StepAncestors
from trt_kvcache.errors import KVCacheError
from trt_kvcache.generation.draft_tree import DraftTree
from trt_kvcache.generation.drafter import DraftedSequence

VOCAB = 263
_HASHES = 997
_TABLE = np.random.default_rng(11).normal(0, 3, (_HASHES, VOCAB)).astype(np.float32)


def logits_after(tokens):
    """Return the logits of ``RecordingEngine`` after these tokens, float32 ``[VOCAB]``."""
    value = 1
    for token in tokens:
        value = (value * 31 + int(token) + 1) % _HASHES
    return _TABLE[value]


def kv_config(*, slots=3, limit=16, layers=2, dtype="float32", head_dim=16, layout=KVLayout.SEPARATE):
    """A cache of layers that differ. With ``limit=16`` every slot starts at an aligned address, with 7 only some do."""
    each = [KVLayerConfig(num_kv_heads=1 + layer % 2, head_dim=head_dim) for layer in range(layers)]
    return KVCacheConfig(layers=each, max_batch_size=slots, max_sequence_length=limit, dtype=dtype, layout=layout)


def engine_tensors(kv, names=DEFAULT_NAMES, *, index_dtype="int32", logits_dtype="float32", combined=False, more_logits=False):
    """The inputs and outputs of an engine over this cache, written out without the package's own list."""
    inputs = {
        names.input_ids: ((-1, -1), index_dtype),
        names.kvcache_start_index: ((-1,), "int32"),
        names.last_token_ids: ((-1, -1 if more_logits else 1), index_dtype),
    }
    outputs = {names.logits: ((-1, *[-1] * more_logits, VOCAB), logits_dtype, None)}
    for index, layer in enumerate(kv.layers):
        pairs = [names.combined_pair(index)] if combined else names.cache_pairs(index)
        for before, after in pairs:
            inputs[before] = ((-1, *[2] * combined, layer.num_kv_heads, kv.max_sequence_length, layer.head_dim), kv.dtype)
            outputs[after] = (*inputs[before], before)
    specs = {name: TensorSpec.input(name, shape, dtype) for name, (shape, dtype) in inputs.items()}
    for name, (shape, dtype, alias) in outputs.items():
        specs[name] = TensorSpec.output(name, shape, dtype, alias=alias)
    return specs


def two_profiles(slots, width):
    """One profile for prefill and one for decode."""
    widest = {"prefill": width, "decode": 1}
    return [EngineProfile(name=name, min_batch=1, max_batch=slots, min_width=1, max_width=most) for name, most in widest.items()]


class Journal:
    """Calls in the order in which they came, ``(what, *details)``, and the failure to come."""

    def __init__(self):
        self.calls = []
        self._error = None
        self._until = 0
        self._after = False

    def fail_at(self, index, error, *, after):
        """Raise ``error`` at the call that is ``index`` calls away: before it does anything, or after it has."""
        self._until, self._error, self._after = index, error, after

    @contextmanager
    def call(self, *what):
        self.calls.append(what)
        error = self._error if self._until == 0 else None
        self._until -= 1
        if error is not None:
            self._error = None
            if not self._after:
                raise error
        yield
        if error is not None:
            raise error

    @property
    def failed(self):
        """Whether the failure that was planned has come."""
        return self._error is None

    def take(self):
        """Return the calls so far, and forget them."""
        calls, self.calls = self.calls, []
        return calls


def _noted(method, what, details):
    """A method that writes its calls down."""

    def call(self, *arguments, **keywords):
        memory = self if isinstance(self, HostMemory) else self.memory
        with memory.journal.call(what, *details(*arguments, **keywords)):
            return method(self, *arguments, **keywords)

    return call


class RecordingMemory(HostMemory):
    """Host memory that writes copies, waits and allocations down."""

    def __init__(self, journal):
        super().__init__()
        self.journal = journal
        self.allocations = []

    def allocate(self, nbytes, *, zeroed=False, stream):
        """Keep what is allocated, so that a test sees what was given back."""
        with self.journal.call("allocate", nbytes):
            self.allocations.append(super().allocate(nbytes, zeroed=zeroed, stream=stream))
            return self.allocations[-1]

    upload = _noted(HostMemory.upload, "upload", lambda destination, source, *, stream: (destination.shape, stream))
    download = _noted(HostMemory.download, "download", lambda destination, source, *, stream: (source.shape, stream))
    synchronize = _noted(HostMemory.synchronize, "synchronize", lambda stream: (stream,))
    staging = _noted(HostMemory.staging, "staging", lambda shape, dtype: (tuple(shape),))


class RecordingCache(KVCacheManager):
    """A cache that writes changes of its lengths down."""

    commit_sequence_length = _noted(KVCacheManager.commit_sequence_length, "commit", lambda new, *, stream, **_: (new, stream))
    reset_for_new_sequences = _noted(KVCacheManager.reset_for_new_sequences, "reset", lambda lengths, *, stream: (tuple(lengths), stream))
    rewind = _noted(KVCacheManager.rewind, "rewind", lambda slot, length, *, stream: (slot, length, stream))


#: What one enqueue read.
Step = namedtuple("Step", "profile input_ids start last bound shapes")


class RecordingEngine:
    """Follows the engine protocol to the letter, writes every call down, and hashes the tokens that it finds in the cache."""

    def __init__(self, kv, memory, *, names=DEFAULT_NAMES, profiles=None, trees=False, **options):
        self.tensors = engine_tensors(kv, names, **options)
        self.profiles = two_profiles(kv.max_batch_size, 4) if profiles is None else list(profiles)
        self.memory = memory
        self.steps = []
        self.closed = self._profile = 0
        self._names, self._kv, self._journal, self._combined = names, kv, memory.journal, options.get("combined", False)
        self._bound = [{} for _ in self.profiles]
        self._shapes = [{} for _ in self.profiles]
        self.ancestors = StepAncestors(memory, max_slots=kv.max_batch_size) if trees else None

    def use_profile(self, index):
        with self._journal.call("use_profile", index):
            self._profile = range(len(self.profiles))[index]

    def bind(self, name, tensor):
        with self._journal.call("bind", name, tensor.ptr):
            assert tensor.dtype == self.tensors[name].dtype
            assert tensor.memory is self.memory
            assert tensor.is_contiguous
            assert tensor.ptr % 256 == 0
            self._bound[self._profile][name] = tensor

    def set_input_shape(self, name, shape):
        with self._journal.call("set_input_shape", name, tuple(shape)):
            spec, profile = self.tensors[name], self.profiles[self._profile]
            assert spec.mode is TensorMode.INPUT
            assert all(size in (-1, given) for size, given in zip(spec.shape, shape, strict=True))
            assert profile.min_batch <= shape[0] <= profile.max_batch
            if name == self._names.input_ids:
                assert profile.min_width <= shape[1] <= profile.max_width
            if name == self._names.last_token_ids:
                assert 1 <= shape[1] <= profile.max_logits
            self._shapes[self._profile][name] = tuple(shape)

    def enqueue(self, stream):
        with self._journal.call("enqueue", stream):
            self._run()

    def close(self):
        self.closed += 1
        if self.ancestors is not None:
            self.ancestors.close()

    def _run(self):
        names, shapes = self._names, self._shapes[self._profile]
        assert set(self._bound[self._profile]) == set(self.tensors)
        assert set(shapes) == {name for name, spec in self.tensors.items() if spec.mode is TensorMode.INPUT}
        slots, width = shapes[names.input_ids]
        assert all(shape[0] == slots for shape in shapes.values())
        ids = self._array(names.input_ids, (slots, width))
        start = self._array(names.kvcache_start_index, (slots,))
        chosen = self._array(names.last_token_ids, shapes[names.last_token_ids])
        last = chosen[:, -1]
        assert (start + width <= self._kv.max_sequence_length).all(), "a row would be written past the end of its slot"
        assert ((chosen >= 0) & (chosen < width)).all()
        self.steps.append(
            Step(
                self.profiles[self._profile].name,
                ids.tolist(),
                start.tolist(),
                last.tolist(),
                dict(self._bound[self._profile]),
                dict(shapes),
            )
        )
        logits = self._array(names.logits, (*chosen.shape, VOCAB))
        sees = self._tree(slots, width)
        for layer in range(self._kv.num_layers):
            pairs = [names.combined_pair(layer)] if self._combined else names.cache_pairs(layer)
            sides = [self._in_place(before, after, shapes[before]) for before, after in pairs]
            k, v = sides[0].swapaxes(0, 1) if self._combined else sides
            for slot in range(slots):
                rows, live = slice(start[slot], start[slot] + width), start[slot] + last[slot] + 1
                k[slot, :, rows] = ids[slot][:, np.newaxis]
                v[slot, :, rows] = layer + start[slot] + sees[slot].sum(axis=-1)[:, np.newaxis] - 1  # the position
                k[slot, :, live : rows.stop] = np.nan  # rows of padding hold whatever
                seen = k[slot, 0, :live, 0]
                assert (k[slot, :, :live] == seen[:, np.newaxis]).all(), "a row was lost"
                past = slice(start[slot])
                assert (v[slot, :, past] == layer + np.arange(start[slot])[:, np.newaxis]).all(), "a row was moved"
                for place, index in enumerate(chosen[slot]):
                    logits[slot, place] = logits_after([*seen[past], *seen[rows][: index + 1][sees[slot, index, : index + 1]]])

    def _tree(self, slots, width):
        """Return the new tokens that each new token sees, bool [slots, width, width]."""
        if self.ancestors is None or not self.ancestors.in_use:
            return np.broadcast_to(np.tri(width, dtype=bool), (slots, width, width))
        bits = self.memory.array(self.ancestors.of_step(slots, width))
        assert (bits >> np.arange(width) & 1).all(), "a token does not see itself"
        return (bits[:, :, np.newaxis] >> np.arange(width) & 1).astype(bool)

    def _array(self, name, shape):
        tensor = self._bound[self._profile][name]
        return self.memory.array(DeviceTensor(tensor.allocation, shape=shape, dtype=tensor.dtype, offset=tensor.offset))

    def _in_place(self, before, after, shape):
        bound = self._bound[self._profile]
        assert bound[before].ptr == bound[after].ptr
        return self._array(before, shape)


def recorded(kv=None, **options):
    """An engine and a cache that fit, over one memory with a new journal."""
    kv = kv_config() if kv is None else kv
    memory = RecordingMemory(Journal())
    return RecordingEngine(kv, memory, **options), RecordingCache(kv, memory=memory)


def poison(cache, value=np.nan):
    """Overwrite every row that is not live: beyond the length of active slots, and all of the others; and states that are not current."""
    lengths = list(cache.host_kv_cache_lengths)
    active = len(lengths)
    lengths += [0] * (cache.max_batch_size - len(lengths))
    memory = cache.memory
    assert isinstance(memory, HostMemory)
    for view in kv_views(cache):
        array = memory.array(view)
        for slot, length in enumerate(lengths):
            array[slot, :, length:] = numpy_dtype(view.dtype).type(value)
    for kind in cache.states.kinds if cache.states is not None else ():
        for current, following in zip(cache.states.current(kind).layers, cache.states.next(kind).layers, strict=True):
            memory.array(following)[...] = value
            memory.array(current)[active:] = value


def kv_views(cache):
    """The views of K and V of every attention layer."""
    return [] if cache.kv_layers is None else [view for layer in cache.kv_layers.separate for view in layer]


def cache_rows(cache):
    """The bytes of all live rows, layer by layer and slot by slot, and of the current states of active slots."""
    lengths = cache.host_kv_cache_lengths
    rows = [view.numpy()[slot, :, :length].tobytes() for view in kv_views(cache) for slot, length in enumerate(lengths)]
    kinds = () if cache.states is None else cache.states.kinds
    states = [view.numpy()[: len(lengths)].tobytes() for kind in kinds for view in cache.states.current(kind).layers]
    return rows + states


# --- drafters of known quality: each token that they propose is right with a probability ---

#: Returns so many tokens that will follow a sequence, or fewer.
Truth = Callable[[DraftedSequence, int], list[int]]


class Drafter:
    """Proposes what will follow; each token is replaced by another with the probability ``1 - right``. Shorter drafts unless it is 1."""

    def __init__(self, truth: Truth, right: float, *, seed: int = 0, vocab_size: int = 30) -> None:
        self.truth, self.right, self.random, self.vocab_size = truth, right, Random(seed), vocab_size
        self.calls: list[list[tuple[int, ...]]] = []

    def propose(self, sequences: Sequence[DraftedSequence]) -> list[Any]:
        drafts = [self._draft(one) for one in sequences]
        self.calls.append([tuple(draft.tokens if isinstance(draft, DraftTree) else draft) for draft in drafts])
        return drafts

    def _draft(self, sequence: DraftedSequence) -> Any:
        assert sequence.limit >= 1
        count = sequence.limit if self.right == 1 else self.random.randint(0, sequence.limit)
        known = self.truth(sequence, count)
        known += [0] * (count - len(known) if self.right < 1 else 0)
        return [token if self.random.random() < self.right else (token + 1) % self.vocab_size for token in known]


class TreeDrafter(Drafter):
    """Proposes trees: each token of the path that will follow is among the children with a probability, beside wrong ones, in any order."""

    def _draft(self, sequence: DraftedSequence) -> DraftTree:
        path, nodes = [-1], list[tuple[int, int]]()  # token and parent
        assert sequence.tree_limit >= sequence.limit
        known = self.truth(sequence, sequence.limit)
        for token in known:
            is_right = self.random.random() < self.right
            children = self.random.sample(range(self.vocab_size), self.random.randint(0, 2)) + [token] * is_right
            self.random.shuffle(children)
            nodes += [(child, path[-1]) for child in children]
            nodes += [(self.random.randrange(self.vocab_size), self.random.randrange(len(nodes))) for _ in range(bool(nodes) and 1)]
            if token not in children:
                break
            path.append(nodes.index((token, path[-1])))
        return DraftTree([token for token, _ in nodes], [parent for _, parent in nodes])


def chosen(sequence: DraftedSequence, count: int) -> list[int]:
    """Return the tokens that a request over the recording engine will choose."""
    request, tokens, before = sequence.request, sequence.tokens, sequence.request.progress
    found: list[int] = []
    try:
        while len(found) < count:
            choice = request.choose(logits_after([*tokens, *found]), full=False)
            request.take(choice)
            assert choice.token is not None
            found.append(choice.token.token)
            if choice.token.finish_reason is not None:
                break
    except KVCacheError:
        pass  # what comes after an error does not matter
    finally:
        request.restore(before)
    return found


def known_truth(events: Iterable[Any], prompts: Sequence[Sequence[int]]) -> Truth:
    """Return the truth of requests that have been run without drafts, from their tokens, by the index of the request."""
    rows = [list(prompt) for prompt in prompts]
    for event in events:
        rows[event.index].append(event.token)

    def truth(sequence: DraftedSequence, count: int) -> list[int]:
        row, tokens = rows[sequence.request.index], sequence.tokens
        return row[len(tokens) : len(tokens) + count] if row[: len(tokens)] == tokens else []

    return truth
