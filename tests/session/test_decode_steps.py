"""Tokens that are chosen on the device, one step ahead: what a session gives and holds is what it is with the host's choice."""

from __future__ import annotations

import itertools
from pathlib import Path
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest

from tests.checkpoint.tokenizer_folders import byte_level_folder, opened
from tests.helpers.interrupts import ERRORS, LineTracer, before_or_after, calls_of, count_calls, first_or_last, journal, lengths, names
from tests.helpers.recording import VOCAB, cache_rows, kv_config, recorded
from tests.helpers.sessions import ahead, damage_logits
from tests.session.every_logit import with_every_logit
from trt_kvcache import GeneratedToken, InferenceSession, ModelIdentity, PromptCache, SamplingParams
from trt_kvcache.errors import ClosedError, CudaError, EngineError, KVCacheError, ProcessorError
from trt_kvcache.generation.device_sampler import SampledTokens
from trt_kvcache.kernels.sampling_rows import ROW_RESULT
from trt_kvcache.memory.cuda_driver import cuda_core_error

S = 16


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return opened(byte_level_folder(tmp_path_factory.mktemp("tokenizer")))


def make(*, on_device=True, tokenizer=None, slots=3, limit=S, reuse=0, **kv):
    engine, cache = recorded(kv_config(slots=slots, limit=limit, **kv))
    session = InferenceSession(
        engine,
        cache,
        tokenizer=tokenizer,
        prompt_cache=PromptCache(cache, max_bytes=reuse),
        identity=lambda: ModelIdentity(fingerprint="recorded"),
    )
    return ahead(session) if on_device else session


def random_params(chance: Random) -> SamplingParams:
    """Every option that changes which token is chosen, or when a request ends."""
    options = [
        {"temperature": chance.choice([0.0, 0.7, 1.5]), "seed": chance.randrange(99)},
        {"top_k": 20, "top_p": 0.9} if chance.random() < 0.3 else {},
        {"min_p": 0.05} if chance.random() < 0.2 else {},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.8, "presence_penalty": -0.4} if chance.random() < 0.5 else {},
        {"logit_bias": dict.fromkeys(range(9), 6.0)} if chance.random() < 0.3 else {},
        {"logprobs": chance.choice([0, 2, 5])} if chance.random() < 0.4 else {},
        {"stop_token_ids": range(0, VOCAB, 5)} if chance.random() < 0.3 else {},
        {"stop": ["e", "1"]} if chance.random() < 0.3 else {},
        {"logits_processors": [lambda tokens, logits: logits]} if chance.random() < 0.05 else {},
    ]
    merged = {name: value for one in options for name, value in one.items()}
    return SamplingParams(max_new_tokens=chance.choice([1, 2, 5, 9]), **merged)


class Program:
    """Random calls on one session, with a diary of all that came back."""

    def __init__(self, session: InferenceSession, seed: int, folder: Path) -> None:
        self.session, self.chance, self.folder = session, Random(seed), folder
        self.diary: list[object] = []
        self.handles: list[object] = []
        self.timeline = session.record()

    def prompt(self) -> list[int]:
        first = self.chance.choice([[1, 2, 3, 4, 5], [6], [7, 8]])  # some begin alike: the prompt cache has them
        limit = self.session.max_sequence_length
        return (first + [self.chance.randrange(VOCAB) for _ in range(self.chance.randrange(12))])[: self.chance.randrange(1, limit + 1)]

    def run(self, calls: int) -> None:
        for _ in range(calls):
            name = self.chance.choice(["generate", "generate", "leave", "queue", "turn", "edit", "snapshot"])
            try:
                self.diary.append(getattr(self, name)())
            except KVCacheError as error:
                self.diary.append((type(error).__name__, str(error)))
            self.look()

    def look(self) -> None:
        session = self.session
        slots = range(len(lengths(session)))
        counted = session.statistics
        self.diary.append(
            (
                [(session.tokens(slot), session.pending_tokens(slot)) for slot in slots],
                [(session._batch[slot].sampler, session._batch[slot].generated) for slot in slots],
                cache_rows(session.cache),
                (counted.prefill_tokens, counted.reused_tokens, counted.decode_steps, counted.decode_tokens),
                (session.prompt_cache.hits, session.prompt_cache.misses, session.prompt_cache.reused_tokens),
                [(span.slot, span.request, span.activity) for span in self.timeline.spans],
                [handle.events for handle in self.handles],
            )
        )

    def params(self, count: int) -> list[SamplingParams]:
        return [random_params(self.chance) for _ in range(count)]

    def generate(self):
        prompts = [self.prompt() for _ in range(self.chance.choice([1, 2, 3, 5]))]
        return list(self.session.generate(prompts, self.params(len(prompts))))

    def leave(self):
        prompts = [self.prompt() for _ in range(self.chance.choice([2, 3, 4]))]
        events = self.session.generate(prompts, self.params(len(prompts)))
        seen = list(itertools.islice(events, self.chance.randrange(1, 12)))
        self.look()
        if self.chance.random() < 0.5:
            seen += self.session_goes_on(events)
        return seen

    def session_goes_on(self, events):
        """Something else between two tokens: the iterator goes on only if the sequences are as they were."""
        active = len(lengths(self.session))
        if active and self.chance.random() < 0.5:
            self.session.save_snapshot(self.folder / "between.kv", self.chance.randrange(active))
        elif active:
            self.session.decode([3] * active)
        try:
            return list(events)
        except ClosedError as error:
            return [str(error)]

    def queue(self):
        moved = []
        for _ in range(self.chance.randrange(1, 7)):
            self.handles.append(self.session.submit(self.prompt(), *self.params(1)))
        for _ in range(self.chance.choice([3, 40])):
            moved.append([handle.index for handle in self.session.step()])
            if self.chance.random() < 0.1:
                moved.append(self.chance.choice(self.handles).cancel())
            if self.chance.random() < 0.1:
                self.handles.append(self.session.submit(self.prompt(), *self.params(1)))
            if self.chance.random() < 0.2:
                self.look()
        return moved

    def turn(self):
        turns = [[self.chance.randrange(VOCAB)] for _ in lengths(self.session)]
        return list(self.session.generate(turns, self.params(len(turns)), append=True))

    def edit(self):
        held = lengths(self.session)
        for slot, length in enumerate(held):
            if self.chance.random() < 0.5:
                self.session.rewind(slot, max(1, length - 2))
        return self.session.append([[self.chance.randrange(VOCAB)] for _ in held]).tolist()

    def snapshot(self):
        slot = self.chance.randrange(max(1, len(lengths(self.session))))
        saved = self.session.save_snapshot(self.folder / "saved.kv", slot)
        return saved.sampler, list(self.session.resume(self.folder / "saved.kv", self.params(1)))


def split(value, logprobs):
    """The diary without logarithms of probabilities, which go to a list: they are sums."""
    if isinstance(value, GeneratedToken):
        logprobs += [] if value.logprob is None else [value.logprob, *(number for _, number in value.top_logprobs)]
        top = value.top_logprobs and [token for token, _ in value.top_logprobs]
        return value.index, value.token, value.text, value.finish_reason, top
    return [split(one, logprobs) for one in value] if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize("seed", range(30))
def test_random_programs_give_the_same_as_with_the_host_s_choice(seed, tokenizer, tmp_path):
    limit = 7 if seed % 5 == 4 else S
    programs = []
    for on_device in (False, True):
        session = make(on_device=on_device, tokenizer=tokenizer, limit=limit, reuse=4000 * (seed % 2))
        programs.append(Program(session, seed, tmp_path))
        programs[-1].run(8)
    logprobs = [[], []]
    host, device = (split(program.diary, found) for program, found in zip(programs, logprobs, strict=True))
    for number, (expected, found) in enumerate(zip(host, device, strict=True)):
        assert found == expected, number
    assert logprobs[1] == pytest.approx(logprobs[0], rel=2e-6)
    assert programs[1].session._decode_steps._sampler is not None
    assert len(programs[1].session.engine.steps) >= len(programs[0].session.engine.steps)


def endless(count, **options):
    return [SamplingParams(max_new_tokens=11, temperature=1.0, seed=seed, **options) for seed in range(count)]


def decoding(count=2, **options):
    """A session and its tokens, in steady decoding."""
    session = make(**options)
    events = session.generate([[1, 2], [3], [4, 5]][:count], endless(count, repetition_penalty=1.2))
    for _ in range(2 * count + 1):
        next(events)
    for _ in range(count - 1):
        next(events)
    return session, events


def note_reads(session, monkeypatch):
    read = SampledTokens.read

    def noted(self):
        with journal(session).call("read"):
            return read(self)

    monkeypatch.setattr(SampledTokens, "read", noted)


STEADY = ["commit", "use_profile", "enqueue", "download", "read"]


def test_the_next_step_is_enqueued_before_the_tokens_of_this_one_are_read(monkeypatch):
    session, events = decoding()
    note_reads(session, monkeypatch)
    live = session.cache.memory.live_nbytes
    for _ in range(3):
        calls = calls_of(session, lambda: [next(events), next(events)])
        assert names(calls) == STEADY
        assert [call[1] for call in calls if call[0] == "download"] == [(2, ROW_RESULT.itemsize)]  # nothing else goes to the host
    assert session.cache.memory.live_nbytes == live


def test_so_it_is_in_a_queue(monkeypatch):
    session = make()
    for token, params in enumerate(endless(2)):
        session.submit([token], params)
    for _ in range(3):
        session.step()
    note_reads(session, monkeypatch)
    assert [names(calls_of(session, session.step)) for _ in range(3)] == [STEADY] * 3


def test_a_step_does_nothing_per_layer():
    def count(layers):
        session, events = decoding(layers=layers)
        session.engine._run = lambda: None
        return count_calls(lambda: [next(events), next(events)])

    count(2)  # what is done once in a process
    assert count(2) == count(9)


def test_the_tokens_are_read_after_the_wait():
    results = np.zeros(1, ROW_RESULT)
    results["token"] = -5
    done = SimpleNamespace(sync=lambda: results.__setitem__("token", 7))
    assert SampledTokens(results, None, [-1], done).read()[0].token == 7


def test_work_that_failed_on_the_device_is_an_error_of_ours():
    pytest.importorskip("cuda.core")

    def fail():
        raise cuda_core_error()("the launch failed")

    with pytest.raises(CudaError, match=r"^the tokens of a step could not be read: the launch failed$"):
        SampledTokens(np.zeros(1, ROW_RESULT), None, [-1], SimpleNamespace(sync=fail)).read()


def test_a_step_that_no_request_needs_is_not_enqueued():
    session = make()
    assert len(list(session.generate([[1, 2], [3]], max_new_tokens=5))) == 10
    assert len(session.engine.steps) == 1 + 4


def test_a_slot_that_becomes_full_is_not_run_beyond_its_end():
    """The engine fails for a row past the end of a slot."""
    session = make(limit=7)
    events = list(session.generate([[1, 2, 3], [4]], max_new_tokens=20))
    assert [event.finish_reason for event in events if event.finish_reason] == ["length"] * 2
    assert lengths(session) == [6, 7]  # the last token of an idle slot makes room for its rows


@pytest.mark.parametrize(("prompts", "wasted"), [([[1]], 1), ([[1], [2]], 0)], ids=["alone", "beside another"])
def test_what_is_run_beyond_a_stop_does_not_count(prompts, wasted):
    whole = [event.token for event in make(on_device=False).generate([1], max_new_tokens=6)]
    stop = next(token for place, token in enumerate(whole) if place > 2 and token not in whole[:place])
    count = whole.index(stop) + 1
    params = [SamplingParams(max_new_tokens=9, stop_token_ids=[stop]), SamplingParams(max_new_tokens=9)][: len(prompts)]
    session = make()
    events = list(session.generate(prompts, params))
    assert [event.token for event in events if event.index == 0] == whole[:count]
    assert session.tokens(0) + session.pending_tokens(0) == (1, *whole[:count])
    assert session.statistics.decode_steps == len([event for event in events if event.index == len(prompts) - 1]) - 1
    assert len(session.engine.steps) == 1 + session.statistics.decode_steps + wasted


@pytest.mark.parametrize("damaged", [0, 1])
def test_logits_that_are_not_numbers_are_refused_in_the_same_step(damaged):
    """The step after the bad one is on its way when it is found."""
    found = []
    for on_device in (False, True):
        session = make(on_device=on_device)
        handles = [session.submit([token], params) for token, params in enumerate(endless(2, presence_penalty=1.0))]
        for _ in range(4):
            session.step()
        mend = damage_logits(session, damaged)
        for number in range(4):
            before = [handle.tokens for handle in handles]
            try:
                session.step()
            except EngineError as error:
                assert ([handle.tokens for handle in handles], lengths(session)) == (before, [])  # rows that are not finite go
                found.append((str(error), number - on_device))
                break
        mend()
        while session.step():
            pass
        found.append([handle.tokens for handle in handles])
    assert found[0][0] == found[2][0]
    assert found[1] == found[3]


def test_bias_that_leaves_no_token_names_the_request():
    messages = []
    for on_device in (False, True):
        session = make(on_device=on_device)
        session.submit([1], max_new_tokens=9)
        session.submit([2], max_new_tokens=9, logit_bias={0: 1.0})
        session.step()
        run, memory = session.engine._run, session.cache.memory

        def too_large(run=run, session=session, memory=memory):
            run()
            memory.array(session.engine.steps[-1].bound["logits"])[1, 0] = 3.4028235e38

        session.engine._run = too_large
        session.engine.steps.clear()
        params = session._queue.scheduler.running[1].request._params
        object.__setattr__(params, "logit_bias", {0: 3.4028235e38})
        session._queue.scheduler.running[1].request._edits._bias[:] = 3.4028235e38
        with pytest.raises(ProcessorError, match=r"^request 1: ") as caught:
            ended(session, [])
        messages.append((str(caught.value), caught.value.request))
    assert messages[0] == messages[1]


def test_a_failure_of_the_step_ahead_is_raised_when_its_turn_comes():
    session, events = decoding()
    calm = [event.token for event in decoding()[1]]
    journal(session).fail_at(2, EngineError("the engine said no"), after=False)
    seen = [next(events).token, next(events).token]
    with pytest.raises(EngineError, match="the engine said no"):
        next(events)
    assert seen == calm[:2]
    assert session.pending_tokens(0) == (seen[0],)
    lengths(session)


def serving():
    """A queue of requests in steady decoding."""
    session = make()
    handles = [session.submit([token], one) for token, one in enumerate(endless(3, frequency_penalty=0.5))]
    for _ in range(4):
        session.step()
    return session, handles


def ended(session, handles):
    moved = True
    while moved:
        try:
            moved = session.step()
        except EngineError:
            continue  # of a step ahead
    return [handle.tokens for handle in handles]


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
@before_or_after
def test_after_a_failure_of_any_call_the_step_can_be_repeated(after, error):
    expected = ended(*serving())
    failures = 0
    for index in range(100):
        session, handles = serving()
        journal(session).fail_at(index, error, after=after)
        for _ in range(2):
            before = [handle.tokens for handle in handles], lengths(session)
            try:
                session.step()
            except type(error):
                failures += 1
                assert ([handle.tokens for handle in handles], lengths(session)) == before, index
        if not journal(session).failed:
            break
        assert ended(session, handles) == expected, index
    assert failures >= 5


@pytest.mark.long
def test_ctrl_c_at_any_line_of_a_step_can_be_repeated():
    expected = ended(*serving())
    session, _ = serving()
    visits = LineTracer(session.step).visits
    assert len(visits) > 60
    for line, visit in first_or_last(visits):
        session, handles = serving()
        with pytest.raises(KeyboardInterrupt):
            LineTracer(session.step, at=(line, visit))
        lengths(session)
        assert ended(session, handles) == expected, line


def test_ctrl_c_at_any_line_between_two_tokens_of_generate():
    """What was handed out is in the slots, and going on from there gives the same tokens."""
    session, events = decoding()
    held = [session.tokens(slot) + session.pending_tokens(slot) for slot in range(2)]
    visits = LineTracer(lambda: next(events)).visits
    greedy = {"max_new_tokens": 4}
    expected = [event.token for event in make().generate([list(row) for row in held], **greedy)]
    for line, visit in first_or_last(visits):
        session, events = decoding()
        with pytest.raises(KeyboardInterrupt):
            LineTracer(lambda events=events: next(events), at=(line, visit))
        lengths(session)
        rows = [session.tokens(slot) + session.pending_tokens(slot) for slot in range(2)]
        assert [row[: len(old)] for row, old in zip(rows, held, strict=True)] == held, line
        assert [event.token for event in session.generate([list(row) for row in held], **greedy)] == expected, line


def test_verify_between_two_tokens_does_not_disturb_them():
    """It writes rows where the step ahead has: that one is run again."""
    outcomes = []
    for disturbed in (False, True):
        session = ahead(with_every_logit())
        events = session.generate([[1, 2], [3]], endless(2))
        tokens = [next(events).token for _ in range(6)]
        if disturbed:
            session.verify([[200, 201], [202]])
        outcomes.append(tokens + [event.token for event in events])
    assert outcomes[0] == outcomes[1]


def test_what_a_forgotten_step_has_chosen_is_not_counted():
    """Its logits are others than those with which the request is run again; the penalties of the sampler must not see its token."""
    outcomes = []
    for disturbed in (False, True):
        session = make()
        handle = session.submit([1, 2], max_new_tokens=12, frequency_penalty=9.0, logit_bias={10: 20.0, 11: 20.0, 12: 20.0})
        session.step()
        if disturbed:
            run, memory = session.engine._run, session.cache.memory

            def other(run=run, session=session, memory=memory):
                run()
                memory.array(session.engine.steps[-1].bound["logits"])[0, 10] = 90.0

            journal(session).take()
            run_first = iter([run, other])  # the step, and the one ahead
            session.engine._run = lambda steps=run_first: next(steps)()
            session.step()
            session.engine._run = run
            session.prefill([[9]])
        outcomes += ended(session, [handle])
    assert outcomes[0] == outcomes[1]


def test_nothing_is_chosen_for_a_slot_that_is_idle(monkeypatch):
    read, found = SampledTokens.read, []
    monkeypatch.setattr(SampledTokens, "read", lambda self: found.append(read(self)) or found[-1])
    list(make().generate([[1], [2]], [SamplingParams(max_new_tokens=3, logprobs=1), SamplingParams(max_new_tokens=6)]))
    assert [one[0].token >= 0 for one in found] == [True, True, True, False, False]


def test_close_releases_the_sampler():
    session = make()
    events = session.generate([[1], [2]], max_new_tokens=9, logprobs=1)
    for _ in range(5):
        next(events)
    session.close()
    assert session._decode_steps._sampler is not None
    assert session.cache.memory.live_nbytes == 0
