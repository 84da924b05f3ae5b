"""Tokens that are chosen on the device, one step ahead, by the CUDA kernels: on the emulated device, or a GPU."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.recording import engine_tensors, kv_config, logits_after, two_profiles
from tests.helpers.sessions import ahead
from trt_kvcache import DeviceTensor, InferenceSession, KVCacheManager, SamplingParams
from trt_kvcache.engine.names import DEFAULT_NAMES as NAMES

PARAMS = [
    SamplingParams(max_new_tokens=9, logprobs=2),
    SamplingParams(max_new_tokens=7, temperature=1.2, seed=5, top_p=0.9, stop_token_ids=range(0, 263, 9)),
    SamplingParams(max_new_tokens=5, temperature=0.8, seed=6, frequency_penalty=0.7, repetition_penalty=1.3),
]
PROMPTS = [[1, 2, 3], [4], [5, 6]]


class ReadingEngine:
    """Runs in any memory: it reads what is bound on the host, keeps tokens in K of the first layer, and uploads its answers."""

    def __init__(self, kv, memory):
        self.tensors, self.profiles, self.memory = engine_tensors(kv), two_profiles(kv.max_batch_size, 4), memory
        self._bound, self._shapes, self._profile = [{}, {}], [{}, {}], 0

    def use_profile(self, index):
        self._profile = index

    def bind(self, name, tensor):
        self._bound[self._profile][name] = tensor

    def set_input_shape(self, name, shape):
        self._shapes[self._profile][name] = tuple(shape)

    def close(self):
        self._bound = [{}, {}]

    def enqueue(self, stream):
        shapes = self._shapes[self._profile]
        slots, width = shapes[NAMES.input_ids]
        ids, start, last = (
            self.memory.read(self._tensor(name, shapes[name]))
            for name in (NAMES.input_ids, NAMES.kvcache_start_index, NAMES.last_token_ids)
        )
        cache = self._tensor("k_cache_0", shapes["k_cache_0"])
        rows = self.memory.read(cache)
        logits = np.empty((slots, 263), np.float32)
        for slot in range(slots):
            rows[slot, :, start[slot] : start[slot] + width] = ids[slot][:, np.newaxis]
            logits[slot] = logits_after(rows[slot, 0, : start[slot] + last[slot, 0] + 1, 0])
        self.memory.upload(cache, rows, stream=stream)
        self.memory.upload(self._tensor(NAMES.logits, (slots, 263)), logits, stream=stream)
        self.memory.synchronize(stream)

    def _tensor(self, name, shape):
        tensor = self._bound[self._profile][name]
        return DeviceTensor(tensor.allocation, shape=shape, dtype=tensor.dtype, offset=tensor.offset)


@pytest.fixture
def sessions(memory):
    """One that chooses on the host, and one that chooses on the device."""
    kv = kv_config(slots=3, limit=16)
    both = [InferenceSession(ReadingEngine(kv, memory), KVCacheManager(kv, memory=memory)) for _ in range(2)]
    both[0]._decode_steps.on_device = False
    ahead(both[1])
    yield both
    for session in both:
        session.close()


def test_a_gpu_is_where_tokens_are_chosen(memory):
    kv = kv_config()
    with InferenceSession(ReadingEngine(kv, memory), KVCacheManager(kv, memory=memory)) as session:
        assert session._decode_steps.on_device == (not memory.is_host)


def test_generate(sessions):
    host, device = (list(session.generate(PROMPTS, PARAMS)) for session in sessions)
    assert [(one.index, one.token, one.finish_reason) for one in device] == [(one.index, one.token, one.finish_reason) for one in host]
    assert [one.logprob for one in device if one.logprob] == pytest.approx([one.logprob for one in host if one.logprob], rel=2e-6)
    assert sessions[1].cache.kv_cache_lengths.numpy().tolist() == list(sessions[0].cache.host_kv_cache_lengths)
    assert sessions[1].cache.host_kv_cache_lengths == sessions[0].cache.host_kv_cache_lengths


def test_a_queue(sessions):
    outcomes = []
    for session in sessions:
        handles = [session.submit(prompt, params) for prompt, params in zip(PROMPTS * 2, PARAMS * 2, strict=True)]
        while session.step():
            pass
        outcomes.append([(handle.tokens, handle.finish_reason, handle.sampler[1]) for handle in handles])
    assert outcomes[0] == outcomes[1]
