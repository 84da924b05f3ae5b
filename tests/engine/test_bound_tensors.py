"""The tensors of a step are made once, and again when an address or a shape changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.helpers.assertions import raises
from tests.helpers.recording import VOCAB, engine_tensors, kv_config, two_profiles
from tests.paths import GOLDEN
from trt_kvcache import HostMemory, InferenceSession, KVCacheManager
from trt_kvcache.engine.bound_tensors import BoundTensors, StepTensors
from trt_kvcache.engine.names import DEFAULT_NAMES
from trt_kvcache.engine.protocol import TensorMode
from trt_kvcache.errors import ClosedError, EngineError
from trt_kvcache.memory.tensor import DeviceTensor

CONFIG = kv_config()


class Bound:
    """A decode profile over a cache of three slots and two layers, of which two slots run."""

    def __init__(self) -> None:
        self.memory = HostMemory()
        self.stream = self.memory.create_stream()
        self.cache = KVCacheManager(CONFIG, memory=self.memory)
        self.specs = engine_tensors(CONFIG)
        profile = two_profiles(3, 4)[1]
        self.tensors = BoundTensors(self.specs, profile, cache=CONFIG, names=DEFAULT_NAMES, memory=self.memory)
        self.bind_caches(0)
        for name, shape in (("input_ids", (3, 1)), ("kvcache_start_index", (3,)), ("last_token_ids", (3, 1)), ("logits", (3, VOCAB))):
            self.tensors.bind(name, self.memory.to_device(np.zeros(shape, self.specs[name].dtype), stream=self.stream))
        self.set_slots(2)

    def bind_caches(self, first_slot: int) -> None:
        for layer in range(CONFIG.num_layers):
            views = self.cache.get_separate_kv_cache(layer)
            for names, view in zip(DEFAULT_NAMES.cache_pairs(layer), views, strict=True):
                for name in names:
                    self.tensors.bind(name, view[first_slot:])

    def set_slots(self, slots: int) -> None:
        for name, spec in self.specs.items():
            if spec.mode is TensorMode.INPUT:
                self.tensors.set_input_shape(name, (slots, *(1 if size < 0 else size for size in spec.shape[1:])))


def addresses(step: StepTensors) -> list[tuple[int, tuple[int, ...]]]:
    tensors = [step.input_ids, step.start, step.last, step.logits, *(tensor for cache in step.caches for tensor in cache)]
    return [(tensor.ptr, tensor.shape) for tensor in tensors]


@pytest.fixture
def bound() -> Bound:
    return Bound()


def test_nothing_is_made_again_while_nothing_changes(bound: Bound) -> None:
    first = bound.tensors.step_tensors()
    assert [cache[0].shape for cache in first.caches] == [(2, 1, 16, 16), (2, 2, 16, 16)]
    bound.set_slots(2)
    assert bound.tensors.step_tensors() is first


def test_a_change_of_the_batch_makes_views_of_it(bound: Bound) -> None:
    bound.tensors.step_tensors()
    bound.set_slots(3)
    assert {tensor.shape[0] for cache in bound.tensors.step_tensors().caches for tensor in cache} == {3}


def test_another_address_is_taken(bound: Bound) -> None:
    bound.tensors.step_tensors()
    bound.bind_caches(1)
    (k, _), _ = bound.tensors.step_tensors().caches
    assert k.ptr == bound.cache.get_separate_kv_cache(0)[0][1:].ptr


def test_a_change_that_does_not_fit_is_refused_until_it_is_undone(bound: Bound) -> None:
    before = bound.tensors.step_tensors()
    bound.tensors.set_input_shape("k_cache_1", (3, 2, 16, 16))
    with raises(EngineError, "`k_cache_1`", "2 slots"):
        bound.tensors.step_tensors()
    bound.tensors.set_input_shape("k_cache_1", (2, 2, 16, 16))
    assert addresses(bound.tensors.step_tensors()) == addresses(before)


def test_a_cache_that_was_closed_is_noticed(bound: Bound) -> None:
    bound.tensors.step_tensors()
    bound.cache.close()
    with pytest.raises(ClosedError):
        bound.tensors.step_tensors()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[DeviceTensor]:
    """Tensors that are made during a test."""
    tensors: list[DeviceTensor] = []
    original = DeviceTensor.__init__

    def init(self: DeviceTensor, *arguments: object, **options: object) -> None:
        tensors.append(self)
        original(self, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(DeviceTensor, "__init__", init)
    return tensors


def test_a_decode_step_makes_no_tensors(made: list[DeviceTensor]) -> None:
    with InferenceSession.from_model(GOLDEN / "llama", engine="numpy", max_batch_size=3, max_sequence_length=24) as session:
        session.prefill([[1, 2, 3], [4, 5], [6]])
        session.decode([7, 8, 9])
        made.clear()
        session.decode([7, 8, 9])
        session.decode([9, 8, 7])
    assert made == []


EARLIER: list[list[list[list[int]]]] = [[], [[[1, 2, 3], [4, 5], [6]]], [[[9, 8, 7, 6], [5]]], [[[1, 2, 3], [4, 5], [6]], [[9, 8], [5]]]]


@pytest.mark.parametrize("model", ["llama", "mamba2", "qwen3_next"])  # states have two buffers, which swap in each step
@pytest.mark.parametrize("earlier", EARLIER, ids=["none", "as wide", "fewer slots", "both"])
@pytest.mark.parametrize("steps", [1, 2])
def test_earlier_steps_do_not_change_later_ones(model: str, earlier: list[list[list[int]]], steps: int) -> None:
    def run(session: InferenceSession) -> np.ndarray:
        return np.concatenate([session.prefill([[2, 3], [4, 5, 6], [1]]), *(session.decode([3, 1, 2]) for _ in range(3))])

    options: dict[str, Any] = {"engine": "numpy", "max_batch_size": 3, "max_sequence_length": 24}
    with InferenceSession.from_model(GOLDEN / model, **options) as fresh, InferenceSession.from_model(GOLDEN / model, **options) as used:
        for prompts in earlier:
            used.prefill(prompts)
            for _ in range(steps):
                used.decode([1, 2, 3][: len(prompts)])
        np.testing.assert_array_equal(run(used), run(fresh))


@pytest.mark.parametrize("model", ["llama", "mamba2", "qwen3_next"])
def test_requests_go_on_after_others_were_evicted(model: str) -> None:
    prompts, counts = [[1, 2, 3], [4, 5], [6, 7, 8]], [2, 7, 4]
    with InferenceSession.from_model(GOLDEN / model, engine="numpy", max_batch_size=3, max_sequence_length=24) as session:
        alone = [
            [token.token for token in session.generate(prompt, max_new_tokens=count, temperature=0)]
            for prompt, count in zip(prompts, counts, strict=True)
        ]
        requests = [session.submit(prompt, max_new_tokens=count, temperature=0) for prompt, count in zip(prompts, counts, strict=True)]
        while session.running_requests or session.num_waiting_requests:
            session.step()
        assert [list(request.tokens) for request in requests] == alone
