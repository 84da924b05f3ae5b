"""Sampling on the device beside ``Request.choose``: the same tokens, log-probabilities and errors, also after a compaction."""

from __future__ import annotations

import numpy as np
import pytest

from tests.generation.stepping import next_token
from tests.helpers.assertions import raises
from trt_kvcache import SamplingParams
from trt_kvcache.errors import CapacityError, ConfigError, EngineError, ProcessorError, RangeError, ShapeError, SlotError
from trt_kvcache.generation.device_sampler import DeviceSampler
from trt_kvcache.generation.request import Request
from trt_kvcache.kernels import CompactionPlan

VOCAB = 2500

PARAMS = [
    SamplingParams(seed=1),
    SamplingParams(seed=2, temperature=0.9, top_p=0.9, logprobs=0),
    SamplingParams(seed=3, temperature=1.3, top_k=40, repetition_penalty=1.4, logprobs=5),
    SamplingParams(seed=4, temperature=0.7, min_p=0.02, frequency_penalty=0.6, presence_penalty=-0.2),
    SamplingParams(seed=5, logit_bias={3: 9.0, 4: float("-inf"), 2499: 8.5}, presence_penalty=4.0, logprobs=20),
    SamplingParams(seed=6, temperature=2.0, logit_bias={7: 6.0}, counter=11),
]
PROMPT = [5, 6, 7, 6, 9]


def requests_of(params=PARAMS):
    return [Request(index, PROMPT, one, tokenizer=None, eos_token_ids=()) for index, one in enumerate(params)]


def test_ids_past_the_vocabulary_have_no_penalty(memory, stream):
    """They stand for rows in the place of tokens."""
    params = SamplingParams(temperature=0.0, repetition_penalty=9.0)
    requests = [Request(0, prompt, params, tokenizer=None, eos_token_ids=()) for prompt in ([5, VOCAB, VOCAB + 3], [5])]
    sampler = DeviceSampler(memory, max_batch_size=2, vocab_size=VOCAB, stream=stream)
    logits = np.zeros((2, VOCAB), np.float32)
    logits[:, 5], logits[:, 9] = 2.0, 1.0
    for slot, request in enumerate(requests):
        request.enter(sampler, slot, stream=stream)
        assert next_token(request, logits[slot]).token == 9
    tokens = memory.to_device(np.zeros(2, np.int32), stream=stream)
    sampler.sample(memory.to_device(logits, stream=stream), tokens, stream=stream)
    host = np.empty(2, np.int32)
    memory.download(host, tokens, stream=stream)
    memory.synchronize(stream)
    assert host.tolist() == [9, 9]


@pytest.fixture
def scene(memory, stream):
    return Scene(memory, stream)


class Scene:
    """A device sampler, and requests that choose from the same logits on the host."""

    def __init__(self, memory, stream, params=PARAMS):
        self.memory, self.stream = memory, stream
        self.sampler = DeviceSampler(memory, max_batch_size=len(params), vocab_size=VOCAB, stream=stream)
        self.requests = requests_of(params)
        self.params = list(params)
        self.rng = np.random.default_rng(8)
        self.tokens = memory.to_device(np.full(len(params), -7, np.int32), stream=stream)
        for slot in range(len(params)):
            self.set_slot(slot)

    def set_slot(self, slot):
        seed, counter = self.requests[slot].sampler
        generated = self.requests[slot].tokens
        self.sampler.set_slot(slot, self.params[slot], seed=seed, counter=counter, prompt=PROMPT, generated=generated, stream=self.stream)

    def logits(self, batch=None):
        return (self.rng.normal(size=(batch or len(self.params), VOCAB)) * 2).astype(np.float32)

    def sample(self, logits):
        self.sampler.sample(self.memory.to_device(logits, stream=self.stream), self.tokens[: len(logits)], stream=self.stream)
        return self.sampler.download(len(logits), stream=self.stream)

    def step(self):
        logits = self.logits()
        sampled = self.sample(logits).read()
        assert self.tokens.numpy().tolist() == [one.token for one in sampled]
        for slot, request in enumerate(self.requests):
            expected = next_token(request, logits[slot])
            assert sampled[slot].token == expected.token
            assert (sampled[slot].logprobs is None) == (expected.logprob is None)
            if expected.logprob is not None:
                found = sampled[slot].logprobs
                assert found.chosen == pytest.approx(expected.logprob, rel=2e-6)
                assert [token for token, _ in found.top] == [token for token, _ in expected.top_logprobs]
                assert [value for _, value in found.top] == pytest.approx([value for _, value in expected.top_logprobs], rel=2e-6)


def test_the_same_as_on_the_host(scene):
    for _ in range(6):
        scene.step()


def test_a_request_that_continues_elsewhere(scene):
    for _ in range(2):
        scene.step()
    for slot in (3, 0, 2):
        scene.sampler.clear_slot(slot, stream=scene.stream)
        scene.set_slot(slot)
    scene.step()


def test_a_request_enters_with_all_that_it_has_counted(memory, stream):
    """Token 3 is the most likely one until it has come four times: twice in an earlier part of the request, and twice in this one."""
    params = SamplingParams(logit_bias={3: 1.0, 4: 0.05}, frequency_penalty=0.3, max_new_tokens=9)
    logits = np.zeros(VOCAB, np.float32)
    request = Request(0, [5, 3, 3], params, tokenizer=None, eos_token_ids=(), generated=2)
    assert [next_token(request, logits).token for _ in range(2)] == [3, 3]
    sampler = DeviceSampler(memory, max_batch_size=1, vocab_size=VOCAB, stream=stream)
    request.enter(sampler, 0, stream=stream)
    token = memory.to_device(np.zeros(1, np.int32), stream=stream)
    sampler.sample(memory.to_device(logits[None], stream=stream), token, stream=stream)
    assert token.numpy().tolist() == [4] == [next_token(request, logits).token]


def test_compaction(scene):
    for _ in range(2):
        scene.step()
    mapping = [-1, 3, 0, -1, 1, 2]
    scene.sampler.compact(CompactionPlan.from_host(mapping, 6, 4, [0] * 6), mapping, stream=scene.stream)
    old = list(zip(scene.requests, scene.params, strict=True))
    for before, after in enumerate(mapping):
        if after >= 0:
            scene.requests[after], scene.params[after] = old[before]
    del scene.requests[4:], scene.params[4:]
    scene.tokens = scene.tokens[:4]
    for _ in range(2):
        scene.step()
    scene.tokens = scene.memory.to_device(np.full(6, -7, np.int32), stream=scene.stream)
    assert [one.token for one in scene.sample(scene.logits(6)).read()][4:] == [-1, -1]
    assert scene.tokens.numpy().tolist()[4:] == [-7, -7]


def test_idle_slots_keep_their_tokens(scene):
    scene.sampler.clear_slot(1, stream=scene.stream)
    sampled = scene.sample(scene.logits())
    assert scene.tokens.numpy().tolist()[1] == -7
    assert sampled.read()[1].token == -1
    assert sampled.read()[1].error is None


def test_errors_are_those_of_the_host(memory, stream):
    params = [
        SamplingParams(),
        SamplingParams(temperature=1.0, seed=3),
        SamplingParams(logit_bias={0: 1.0}),
        SamplingParams(logit_bias={0: 3e38}),
    ]
    scene = Scene(memory, stream, params)
    logits = scene.logits()
    logits[0, [9, 800]] = np.nan
    logits[1] = -np.inf
    logits[2, 6] = np.inf
    logits[3, 0] = 3e38
    sampled = scene.sample(logits).read()
    for slot, request in enumerate(scene.requests):
        with pytest.raises((EngineError, ProcessorError)) as caught:
            next_token(request, logits[slot])
        assert type(sampled[slot].error) is type(caught.value)
        assert str(sampled[slot].error) in str(caught.value)
        assert sampled[slot].token == -1
    scene.step()  # nothing was counted


def test_a_step_is_read_while_the_next_one_is_on_its_way(scene):
    first, second = scene.logits(), scene.logits()
    steps = [scene.sample(logits) for logits in (first, second)]
    for logits, step in zip((first, second), steps, strict=True):
        assert [one.token for one in step.read()] == [
            next_token(request, row).token for request, row in zip(scene.requests, logits, strict=True)
        ]


def test_as_many_slots_are_sent_as_are_asked_for(scene):
    """Whatever was sampled last: a graph that is replayed may have been captured before another size was sampled."""
    logits = scene.logits()
    all_of_them = [one.token for one in scene.sample(logits).read()]
    scene.sample(logits[:2])
    assert [one.token for one in scene.sampler.download(6, stream=scene.stream).read()][2:] == all_of_them[2:]
    assert len(scene.sampler.download(3, stream=scene.stream).read()) == 3
    for batch in (0, 7):
        with raises(RangeError, "batch", expected="1 to 6", got=batch):
            scene.sampler.download(batch, stream=scene.stream)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            SamplingParams(logits_processors=[lambda tokens, logits: logits]),
            "sampling on the device: expected no logits_processors, got some.",
        ),
        (SamplingParams(logprobs=21), "sampling on the device: expected at most 20 logprobs, got 21."),
        (SamplingParams(logit_bias={VOCAB: 1.0}), "SamplingParams.logit_bias: expected an integer from 0 to 2499, got 2500."),
    ],
)
def test_requests_that_only_the_host_takes(scene, params, message):
    with pytest.raises((ConfigError, RangeError), match=f"^{message}"):
        scene.sampler.set_slot(1, params, seed=1, counter=0, stream=scene.stream)
    scene.step()


@pytest.mark.parametrize("failing", [0, 1, 2, 3])
def test_room_for_penalties_that_cannot_be_had(memory, stream, failing, monkeypatch):
    """Whichever allocation fails, the sampler is as it was, and the next attempt succeeds."""
    scene = Scene(memory, stream, PARAMS[:2])
    allocate, calls = type(memory).allocate, iter(range(99))

    def allocate_or_fail(self, *arguments, **options):
        if next(calls) == failing:
            raise CapacityError("full")
        return allocate(self, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(type(memory), "allocate", allocate_or_fail)
        with pytest.raises(CapacityError, match="full"):
            scene.sampler.set_slot(1, PARAMS[4], seed=9, counter=0, stream=stream)
    scene.step()
    scene.sampler.compact(CompactionPlan.from_host([0, 1], 2, 2, [0] * 2), [0, 1], stream=stream)
    scene.params[1], scene.requests[1] = PARAMS[4], requests_of()[4]
    scene.set_slot(1)
    scene.step()


def test_numbers_of_any_size(memory, stream):
    params = [SamplingParams(seed=2**63 - 1, counter=2**40 + 3, temperature=1.0), SamplingParams(seed=1, temperature=1.0, top_k=10**30)]
    scene = Scene(memory, stream, params)
    for _ in range(3):
        scene.step()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": -1, "counter": 0}, "seed: expected an integer from 0 to 18446744073709551615, got -1."),
        ({"seed": 1, "counter": 2**64}, "counter: expected an integer from 0 to 18446744073709551615, got 18446744073709551616."),
    ],
)
def test_random_numbers_that_there_are_not(scene, arguments, message):
    with pytest.raises(RangeError, match=f"^{message}"):
        scene.sampler.set_slot(2, PARAMS[2], **arguments, stream=scene.stream)
    scene.step()


@pytest.mark.parametrize("shape", [(7, VOCAB), (6, VOCAB - 1), (6,)])
def test_logits_of_another_shape(scene, shape):
    logits = scene.memory.to_device(np.zeros(shape, np.float32), stream=scene.stream)
    with raises(ShapeError, "logits", expected=f"[B, {VOCAB}] with B up to 6", got=f"[{', '.join(map(str, shape))}]"):
        scene.sampler.sample(logits, scene.tokens, stream=scene.stream)
    assert scene.tokens.numpy().tolist() == [-7] * 6
    scene.step()


def test_refused_before_anything_changed(scene):
    for arguments in ({"prompt": [VOCAB]}, {"generated": [-1]}):
        with pytest.raises(RangeError, match="expected token ids from 0 to 2499"):
            scene.sampler.set_slot(2, PARAMS[2], seed=1, counter=0, **arguments, stream=scene.stream)
    with pytest.raises(SlotError):
        scene.sampler.clear_slot(6, stream=scene.stream)
    scene.step()
