"""Two ways to the same tokens, on small models. Chunks of other widths: test_equivalence; new processes: test_session_reuse."""

import numpy as np
import pytest

from tests.helpers.assertions import assert_close, assert_same_choice
from tests.helpers.caches import next_states_of, rows_of, states_of, whole
from tests.helpers.models import write_model
from tests.sequences.hybrid_model import HybridModel, hybrid_cache
from trt_kvcache import HostMemory, InferenceSession, KVLayout

PROMPTS = [[3, 17, 5, 29, 11], [8, 1], [30, 4, 4, 19], [9, 21, 6, 2, 13, 7, 7]]
NEXT, LATER = [12, 25, 31, 1], [6, 18, 2, 33]


class Llama:
    """The reference engine, driven by a session that chunks prompts."""

    def __init__(self, folder):
        sizes = {"max_batch_size": 4, "max_sequence_length": 24, "max_prefill_length": 3}
        self.session = InferenceSession.from_model(folder, engine="reference", dtype="float32", **sizes)
        self.cache = self.session.cache
        self.stream = self.cache.memory.create_stream()
        self.prefill, self.decode, self.compact = self.session.prefill, self.session.decode, self.session._batch.compact


class Hybrid:
    """The hybrid in NumPy, which runs each slot by itself."""

    def __init__(self, layout):
        self.cache = hybrid_cache(HostMemory(), slots=4, layout=layout)
        self.model = HybridModel(self.cache)
        self.stream = self.model.stream

    def prefill(self, prompts):
        self.cache.reset_for_new_sequences([0] * len(prompts), stream=self.stream)
        return np.stack([self.model.run(slot, prompt) for slot, prompt in enumerate(prompts)])

    def decode(self, tokens):
        return np.stack([self.model.run(slot, [token]) for slot, token in enumerate(tokens)])

    def compact(self, mapping):
        kept = sum(new >= 0 for new in mapping)
        self.cache.compact_batch(mapping, len(mapping), kept, stream=self.stream)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("metamorphic") / "small")


@pytest.fixture(params=["llama", *KVLayout], ids=["llama", *(f"hybrid-{layout.value}" for layout in KVLayout)])
def make(request, folder):
    return (lambda: Llama(folder)) if request.param == "llama" else (lambda: Hybrid(request.param))


def check(got, expected):
    """Equal bits are promised only where the shapes of an enqueue and its slots are equal."""
    for row, wanted in zip(got, expected, strict=True):
        assert_close(row, wanted)
        assert_same_choice(row, wanted)


def pick(values, order):
    return [values[index] for index in order]


@pytest.mark.parametrize("order", [[2, 0], [3, 2, 1], [1, 3, 0, 2], [0], [1, 0, 3, 2]])
def test_compaction_and_decode_in_either_order(make, order):
    mapping = [order.index(slot) if slot in order else -1 for slot in range(4)]
    one, two = make(), make()
    assert np.array_equal(one.prefill(PROMPTS), two.prefill(PROMPTS))
    one.compact(mapping)
    first = one.decode(pick(NEXT, order))
    check(first, two.decode(NEXT)[order])
    two.compact(mapping)
    last = one.decode(pick(LATER, order))
    check(last, two.decode(pick(LATER, order)))
    assert one.cache.host_kv_cache_lengths == two.cache.host_kv_cache_lengths == tuple(len(PROMPTS[slot]) + 2 for slot in order)
    assert np.abs(first - last).max() > 0.01, "the model says something else after each token"


@pytest.mark.parametrize("order", [[1, 0, 3, 2], [3, 1, 0, 2]])
def test_permuted_slots(make, order):
    one, two = make(), make()
    check(two.prefill(pick(PROMPTS, order)), one.prefill(PROMPTS)[order])
    check(two.decode(pick(NEXT, order)), one.decode(NEXT)[order])


@pytest.mark.parametrize(("source", "target"), [(0, 3), (3, 1), (2, 2)])
def test_captured_and_restored_elsewhere(make, source, target):
    """In another slot of another cache, which held as many other tokens."""
    one, two = make(), make()
    length = len(PROMPTS[source])
    expected = one.prefill(PROMPTS), one.decode(NEXT), one.decode(LATER)
    one.prefill(PROMPTS)
    two.prefill([[20] * (length if slot == target else 3) for slot in range(4)])
    saved = {"kv_cache": one.cache.capture_kv_cache(source, length, stream=one.stream)}
    if isinstance(one, Hybrid):
        saved |= {part: getattr(one.cache, f"capture_{part}")(source, stream=one.stream) for part in ("recurrent_states", "conv_states")}
    for part, tensors in saved.items():
        arrays = [two.cache.memory.to_device(tensor.numpy(), stream=two.stream) for tensor in tensors]
        getattr(two.cache, f"restore_{part}")(arrays, target, stream=two.stream)
    for tokens, logits in zip((NEXT, LATER), expected[1:], strict=True):
        check(two.decode([tokens[source]] * 4)[target : target + 1], logits[source : source + 1])


def test_dirty_and_clean_cache(make):
    clean, dirty = make(), make()
    for view in [*rows_of(dirty.cache), *states_of(dirty.cache), *next_states_of(dirty.cache)]:
        dirty.cache.memory.upload(whole(view), np.full(view.allocation.nbytes, 0xFF, np.uint8), stream=dirty.stream)  # NaN
    for call, arguments in (("prefill", PROMPTS), ("decode", NEXT), ("compact", [-1, 1, -1, 0]), ("decode", NEXT[:2])):
        assert np.array_equal(getattr(clean, call)(arguments), getattr(dirty, call)(arguments)) or call == "compact"
