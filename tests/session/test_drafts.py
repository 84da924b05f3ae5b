"""Speculative decoding: whatever a drafter proposes, tokens, texts and sequences are those without drafts."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests.checkpoint.tokenizer_folders import byte_level_folder, opened
from tests.helpers.interrupts import ERRORS, LineTracer, before_or_after, calls_of, journal, names
from tests.helpers.recording import VOCAB, Drafter, TreeDrafter, cache_rows, chosen, logits_after, poison
from tests.helpers.sessions import ahead, by_prompt, damage_logits, drain, make, outcome, refuse
from tests.session.every_logit import with_every_logit
from tests.session.test_decode_steps import random_params
from tests.session.test_deferred_processors import Late
from trt_kvcache import DraftedSequence, InferenceSession, ModelIdentity, PromptCache, SamplingParams
from trt_kvcache.errors import ClosedError, ConfigError, EngineError, ProcessorError

RIGHT = [0, 0.5, 1]
every_quality = pytest.mark.parametrize("right", RIGHT)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return opened(byte_level_folder(tmp_path_factory.mktemp("tokenizer")))


def open_session(
    *, on_device: bool = False, reuse: int = 0, tokenizer: Any = None, buckets: bool = False, **options: Any
) -> InferenceSession:
    session = with_every_logit(**options, tokenizer=tokenizer, identity=lambda: ModelIdentity(fingerprint="recorded"))
    session.engine.width_buckets = [1, 2, 4, 5] if buckets else ()  # type: ignore[attr-defined]
    session._prompt_cache = session._batch._prompt_cache = PromptCache(session.cache, max_bytes=reuse)
    return ahead(session) if on_device else session


def drafter(right: float, seed: int = 0, *, trees: bool = False) -> Drafter:
    return (TreeDrafter if trees else Drafter)(chosen, right, seed=seed, vocab_size=VOCAB)


#: Room of enqueues for trees.
WIDE = {"trees": True, "width": 14, "logits": 14}


def prompts_of(random: Random, limit: int) -> list[list[int]]:
    """Return prompts, of which some begin alike."""
    first = [[1, 2, 3, 4, 5], [6], [7, 8]]
    rows = [[*random.choice(first), *(random.randrange(VOCAB) for _ in range(random.randrange(6)))] for _ in range(random.randint(1, 5))]
    return [row[: random.randint(1, limit)] for row in rows]


def held(session: InferenceSession) -> list[Any]:
    """Return what the slots hold and who goes on from it."""
    slots = [session._batch[slot] for slot in range(session.cache.active_batch_size)]
    return [
        [(slot.tokens, slot.pending, slot.sampler, slot.generated) for slot in slots],
        hashlib.sha256(b"".join(cache_rows(session.cache))).hexdigest(),
    ]


def of_each(events: Sequence[Any]) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    for event in events:
        found.setdefault(event.index, []).append(event)
    return found


def same(found: Any, expected: Any) -> None:
    """Compare events of requests, whose logarithms of probabilities are sums of the host or of the device."""
    assert found.keys() == expected.keys()
    for index, events in expected.items():
        assert [(event.token, event.text, event.finish_reason) for event in found[index]] == [
            (event.token, event.text, event.finish_reason) for event in events
        ]
        for event, wanted in zip(found[index], events, strict=True):
            assert (event.logprob is None) == (wanted.logprob is None)
            assert (event.logprob or 0) == pytest.approx(wanted.logprob or 0, rel=2e-6)
            assert [token for token, _ in event.top_logprobs or ()] == [token for token, _ in wanted.top_logprobs or ()]


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    right=st.sampled_from(RIGHT),
    on_device=st.booleans(),
    buckets=st.booleans(),
    limit=st.sampled_from([16, 16, 7]),
    trees=st.booleans(),
)
def test_generate_gives_the_tokens_without_drafts(tokenizer, seed, right, on_device, buckets, limit, trees):
    random = Random(seed)
    prompts = prompts_of(random, limit)
    params = [random_params(random) for _ in prompts]
    plain = open_session(on_device=on_device, tokenizer=tokenizer, limit=limit, reuse=4000 * (seed % 2))
    options = WIDE if trees else {}
    drafted = open_session(on_device=on_device, tokenizer=tokenizer, buckets=buckets, limit=limit, reuse=4000 * (seed % 2), **options)
    for _ in range(2):  # the second time, the prompt cache has the answers too
        poison(drafted.cache)
        expected = of_each([*plain.generate(prompts, params)])
        same(of_each([*drafted.generate(prompts, params, draft=drafter(right, seed, trees=trees))]), expected)
        assert held(drafted) == held(plain)
    counts = drafted.statistics
    assert counts.decode_tokens == plain.statistics.decode_tokens
    assert counts.accepted_tokens <= counts.draft_tokens
    if right == 1 and not trees:
        assert counts.accepted_tokens == counts.draft_tokens
    if len(prompts) <= 3:
        assert drafted.prompt_cache.reused_tokens == plain.prompt_cache.reused_tokens


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), right=st.sampled_from(RIGHT), on_device=st.booleans(), count=st.integers(1, 14), trees=st.booleans())
def test_an_iterator_may_be_left_at_any_token(tokenizer, tmp_path_factory, seed, right, on_device, count, trees):
    random = Random(seed)
    prompts = prompts_of(random, 16)[:3]
    params = [random_params(random) for _ in prompts]
    whole = of_each([*open_session(tokenizer=tokenizer).generate(prompts, params)])
    session = open_session(on_device=on_device, tokenizer=tokenizer, **(WIDE if trees else {}))
    stream = session.generate(prompts, params, draft=drafter(right, seed, trees=trees))
    handed_out = of_each([*itertools.islice(stream, count)])
    for index, prompt in enumerate(prompts):
        seen = handed_out.get(index, [])
        same({index: seen}, {index: whole[index][: len(seen)]})
        slot = session._batch[index]
        assert [*slot.tokens, *slot.pending] == [*prompt, *(event.token for event in seen)]
        assert slot.generated == len(seen)
        assert session.cache.host_kv_cache_lengths[index] == slot.length
    between = random.choice(["nothing", "look", "verify", "snapshot", "append"])
    path = tmp_path_factory.mktemp("left") / "saved.kv"
    if between == "snapshot":
        session.save_snapshot(path, 0)
    if between == "verify":  # writes rows past the lengths, and changes no sequence
        rows = [[3] if slot.length < 16 else [] for slot in map(session._batch.__getitem__, range(len(prompts)))]
        if any(rows):
            session.verify(rows)
    if between == "append":
        turns = [[9] if len(slot.tokens) + len(slot.pending) < 16 else [] for slot in map(session._batch.__getitem__, range(len(prompts)))]
        logits = session.append(turns)
        for slot, turn in enumerate(turns):
            if turn:
                np.testing.assert_array_equal(logits[slot], logits_after(session.tokens(slot)))
        if any(turns):
            if any(not events[-1].finish_reason for events in handed_out.values()):
                with pytest.raises(ClosedError, match="another call has changed the sequences"):
                    next(stream)
            return
    rest = of_each([*stream])
    same({index: handed_out.get(index, []) + rest.get(index, []) for index in whole}, whole)
    if between == "snapshot" and not handed_out[0][-1].finish_reason and "logprobs" not in str(params[0]):
        left = [*session.resume(path, params[0].__class__(**{**vars(params[0]), "seed": None}), draft=drafter(right))]
        tokens = [event.token for event in left]
        known = [event.token for event in whole[0]]
        rest_of = known[len(handed_out[0]) :]
        assert tokens[: len(rest_of)] == rest_of[: len(tokens)]


@settings(max_examples=80)
@given(
    seed=st.integers(0, 2**32),
    right=st.sampled_from(RIGHT),
    on_device=st.booleans(),
    slots=st.integers(1, 4),
    limit=st.sampled_from([16, 7]),
    trees=st.booleans(),
)
def test_a_queue_gives_the_tokens_without_drafts(tokenizer, seed, right, on_device, slots, limit, trees):
    random = Random(seed)
    options = WIDE if trees else {}
    session = open_session(on_device=on_device, tokenizer=tokenizer, slots=slots, limit=limit, reuse=4000 * (seed % 2), **options)
    proposed = drafter(right, seed, trees=trees)
    handles: list[Any] = []
    asked = []
    for _ in range(30):
        what = random.choice(["submit", "step", "step", "step", "cancel", "prefill"])
        if what == "submit":
            [prompt, *_] = prompts_of(random, limit)
            asked.append((prompt, random_params(random)))
            handles.append(session.submit(*asked[-1], draft=proposed if random.random() < 0.7 else "off"))
        elif what == "cancel" and handles and random.random() < 0.3:
            random.choice(handles).cancel()
        elif what == "prefill" and random.random() < 0.2:
            session.prefill([[1, 2]])
        elif what == "step":
            before = {handle.index: len(handle.tokens) for handle in handles}
            moved = session.step()
            assert all(handle in moved for handle in handles if len(handle.tokens) > before[handle.index])
            for index, handle in enumerate(session.running_requests):
                if handle.state == "decoding":  # what a snapshot of the slot would have
                    slot = session._batch[index]
                    assert [*slot.tokens, *slot.pending] == [*handle.prompt, *handle.tokens]
                    assert (slot.sampler, slot.generated) == (handle.sampler, len(handle.tokens))
            if not on_device:  # the step ahead has written after the lengths
                poison(session.cache)
    drain(session)
    alone = open_session(tokenizer=tokenizer, slots=slots, limit=limit)
    for handle, (prompt, params) in zip(handles, asked, strict=True):
        expected = [*alone.generate([prompt], params)]
        if handle.finish_reason == "cancelled":
            expected = expected[: len(handle.tokens)]
        wanted = {0: expected} if expected else {}
        same({0: list(handle.events)} if handle.events else {}, wanted)


def decoding(right: float, *, prompts: Sequence[Sequence[int]] = ([1, 2],), count: int = 12, **options: Any) -> Any:
    session = open_session(**options)
    params = SamplingParams(max_new_tokens=count, temperature=1.0, seed=5, ignore_eos=True)
    return session, session.generate(prompts, params, draft=drafter(right))


def test_right_drafts_save_steps() -> None:
    session, stream = decoding(1)
    assert len([*stream]) == 12
    # The first token is of the prompt, and each step verifies up to 4 tokens: of 3, then 4 and 1 that are left.
    assert [len(step.input_ids[0]) for step in session.engine.steps] == [2, 4, 5, 2]
    counts = session.statistics
    assert (counts.decode_steps, counts.decode_tokens, counts.draft_tokens, counts.accepted_tokens) == (3, 11, 8, 8)
    assert counts.acceptance_rate == 1
    assert (counts.drafts, counts.mean_acceptance_length) == (3, 1 + 8 / 3)


def test_wrong_drafts_become_shorter_and_pause() -> None:
    session, stream = decoding(0, count=13)
    assert len([*stream]) == 13
    widths = [len(step.input_ids[0]) for step in session.engine.steps[1:]]
    assert widths[0] > max(widths[-3:]) == 1
    assert session.statistics.accepted_tokens == 0
    assert session.statistics.decode_tokens == 12
    assert session.statistics.drafts > 0
    assert session.statistics.mean_acceptance_length == 1


@every_quality
def test_a_slot_that_is_nearly_full_gets_no_row_past_its_end(right: float) -> None:
    session, stream = decoding(right, prompts=[[*range(12)], [1, 2, 3], [*range(9)]], count=16)
    found = by_prompt(stream)  # the recording engine refuses rows past the end of a slot
    assert [len(tokens) for tokens, _, _ in found] == [5, 14, 8]
    assert session.cache.host_kv_cache_lengths[1] == 16


def test_an_end_token_inside_a_draft_ends_the_request() -> None:
    whole = [event.token for event in decoding(0)[1]]
    place = next(place for place in range(2, 6) if whole[place] not in whole[:place])
    session = open_session()
    params = SamplingParams(max_new_tokens=12, temperature=1.0, seed=5, stop_token_ids=[whole[place]])
    events = [*session.generate([[1, 2]], params, draft=drafter(1))]
    assert ([event.token for event in events], events[-1].finish_reason) == (whole[: place + 1], "stop")
    assert (session.tokens(0), session.pending_tokens(0)) == ((1, 2, *whole[:place]), (whole[place],))


def test_rows_of_a_draft_that_another_call_overwrites_run_again() -> None:
    whole = [event.token for event in decoding(1)[1]]
    session, stream = decoding(1)
    found = [next(stream).token for _ in range(3)]
    assert (session.tokens(0), session.pending_tokens(0)) == ((1, 2), tuple(whole[:3]))  # in the middle of the first draft
    session.verify([[200, 201, 202]])
    poison(session.cache)
    assert found + [event.token for event in stream] == whole


def test_a_request_that_ends_inside_the_draft_of_another_is_in_the_prompt_cache() -> None:
    session = open_session(reuse=1 << 14)
    params = [SamplingParams(max_new_tokens=count, ignore_eos=True) for count in (3, 9)]
    events = [*session.generate([[1, 2], [5]], params, draft=drafter(1))]
    answer = [event.token for event in events if event.index == 0]
    assert [event.index for event in events[2:8]] == [0, 1, 0, 1, 1, 1]
    found = session.prompt_cache.find([1, 2, *answer, 9])
    assert found is not None
    assert found.length == 4  # all but its last token, which has not run


def test_an_answer_of_the_queue_that_ends_with_a_draft_is_in_the_prompt_cache() -> None:
    session = open_session(reuse=1 << 14)
    handle = session.submit([1, 2], max_new_tokens=5, ignore_eos=True, draft=drafter(1))
    drain(session)
    assert session.statistics.decode_steps == 1
    found = session.prompt_cache.find([1, 2, *handle.tokens, 9])
    assert found is not None
    assert found.length == 6


def test_slots_with_and_without_drafts_share_a_step() -> None:
    session = open_session()
    params = SamplingParams(max_new_tokens=9, ignore_eos=True)
    handles = [session.submit([5 + index], params, draft=choice) for index, choice in enumerate([drafter(1), "off", drafter(1, 2)])]
    session.step()
    session.step()
    assert [len(handle.tokens) for handle in handles] == [5, 2, 5]
    drain(session)
    assert [handle.draft_tokens for handle in handles] == [handles[0].accepted_tokens, 0, handles[2].accepted_tokens]
    assert [outcome(handle) for handle in handles] == [outcome_alone([5 + index], params) for index in range(3)]


def outcome_alone(prompt: list[int], params: SamplingParams) -> Any:
    [found] = by_prompt(make().generate([prompt], params))
    return (tuple(found[0]), *found[1:])


def test_a_drafter_is_called_once_for_all_of_its_requests() -> None:
    session, one = open_session(), drafter(0.5)
    by_prompt(session.generate([[1], [2], [3]], max_new_tokens=6, ignore_eos=True, draft=one))
    assert max(map(len, one.calls)) == 3
    assert len(one.calls) < session.statistics.decode_steps + 1


# --- errors ---


def queued(right: float) -> tuple[InferenceSession, list[Any]]:
    """Return a session whose next step verifies drafts of two of three requests, and its requests."""
    session = open_session()
    choices = [drafter(right, 1), drafter(right, 2), "off"]
    handles = [session.submit([1 + seed], failing_params(seed), draft=choices[seed]) for seed in range(3)]
    session.step()
    session.step()
    return session, handles


def failing_params(seed: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=10, temperature=1.0, seed=seed, repetition_penalty=1.2)


@every_quality
@before_or_after
@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
def test_a_step_of_the_queue_that_fails_loses_nothing(right: float, after: bool, error: BaseException) -> None:
    expected = [outcome_alone([1 + seed], failing_params(seed)) for seed in range(3)]
    session, _ = queued(right)
    count = len(calls_of(session, session.step))
    assert session.statistics.draft_tokens
    for index in range(count):
        session, handles = queued(right)
        before = held(session), [handle.events for handle in handles]
        journal(session).fail_at(index, error, after=after)
        with pytest.raises(type(error)):
            session.step()
        assert (held(session), [handle.events for handle in handles]) == before
        drain(session)
        assert [outcome(handle) for handle in handles] == expected


MINE = ("decode_steps", "draft_plan", "drafting", "request", "request_queue", "step_outcome", "generate_tokens", "slots")


def lines_of(call: Callable[[], object]) -> list[tuple[tuple[str, int], int]]:
    """Return the lines of these files that a call visits, each with its first or its last visit, in turn."""
    visits = {line: count for line, count in LineTracer(call).visits.items() if line[0].endswith(tuple(f"{name}.py" for name in MINE))}
    return [(line, range(count)[-(number % 2)]) for number, (line, count) in enumerate(visits.items())]


def test_ctrl_c_at_any_line_of_a_step_of_the_queue_loses_nothing() -> None:
    expected = [outcome_alone([1 + seed], failing_params(seed)) for seed in range(3)]
    calm, _ = queued(0.5)
    lines = lines_of(calm.step)
    assert calm.statistics.draft_tokens
    assert len(lines) > 60
    for place in lines:
        session, handles = queued(0.5)
        with pytest.raises(KeyboardInterrupt):
            LineTracer(session.step, at=place)
        drain(session)
        assert [outcome(handle) for handle in handles] == expected, place


def test_ctrl_c_at_any_line_between_two_tokens_leaves_what_was_handed_out() -> None:
    def drafted() -> tuple[InferenceSession, Any, list[int]]:
        session, stream = decoding(1)
        return session, stream, [1, 2, *(next(stream).token for _ in range(2))]  # in the middle of the first draft

    calm, stream, known = drafted()
    lines = lines_of(lambda: [next(stream) for _ in range(4)])
    whole = [*calm.tokens(0), *calm.pending_tokens(0)]
    assert len(lines) > 60
    for place in lines:
        session, stream, _ = drafted()
        with pytest.raises(KeyboardInterrupt):
            LineTracer(lambda stream=stream: [next(stream) for _ in range(4)], at=place)
        row = [*session.tokens(0), *session.pending_tokens(0)]
        assert session.cache.host_kv_cache_lengths == (len(session.tokens(0)),)
        assert row == whole[: len(row)], place
        assert len(row) >= len(known)
        logits = session.append([[9]])
        np.testing.assert_array_equal(logits[0], logits_after([*row, 9]))


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32), right=st.sampled_from(RIGHT), on_device=st.booleans())
def test_processors_that_are_late_change_no_token(seed: int, right: float, on_device: bool) -> None:
    random = Random(seed)
    prompts = [row[:12] for row in prompts_of(random, 12)]
    params = [SamplingParams(max_new_tokens=random.randint(1, 10), temperature=1.2, seed=index) for index in range(len(prompts))]
    expected = [outcome_alone(prompt, one) for prompt, one in zip(prompts, params, strict=True)]

    def truth(sequence: DraftedSequence, count: int) -> list[int]:
        row = [*prompts[sequence.request.index], *expected[sequence.request.index][0]]
        return row[sequence.num_tokens : sequence.num_tokens + count]

    def late(one: SamplingParams) -> SamplingParams:
        delays = [random.randrange(4) for _ in range(17)]
        return replace(one, logits_processors=[Late(lambda count: delays[count])]) if random.random() < 0.7 else one

    session = open_session(on_device=on_device)
    draft = Drafter(truth, right, seed=seed, vocab_size=VOCAB)
    handles = [session.submit(prompt, late(one), draft=draft) for prompt, one in zip(prompts, params, strict=True)]
    while session.step():
        if not on_device:
            poison(session.cache)
        assert all(handle.sampler[1] == len(handle.tokens) for handle in handles)
    assert [outcome(handle) for handle in handles] == expected


@every_quality
def test_an_error_of_a_processor_comes_after_the_tokens_before_it(right: float) -> None:
    def fail(tokens: tuple[int, ...], logits: Any) -> Any:
        if len(tokens) == 6:
            raise ProcessorError("failed")
        return logits

    params = SamplingParams(max_new_tokens=10, logits_processors=[fail])
    session = open_session()
    handle = session.submit([1, 2], params, draft=drafter(right))
    with pytest.raises(ProcessorError, match="request 0: failed"):
        drain(session)
    assert handle.tokens == outcome_alone([1, 2], SamplingParams(max_new_tokens=4))[0]
    stream, found = session.generate([[1, 2]], params, draft=drafter(right)), []
    with pytest.raises(ProcessorError, match="request 0: failed"):
        found.extend(event.token for event in stream)
    assert tuple(found) == handle.tokens


def test_logits_that_are_not_finite_end_the_sequences() -> None:
    session, stream = decoding(1)
    next(stream)
    mend = damage_logits(session, 0)
    with pytest.raises(EngineError, match="logits: expected finite numbers, got nan"):
        next(stream)
    assert session.cache.active_batch_size == 0
    mend()
    assert len([*session.generate([[1, 2]], max_new_tokens=5, ignore_eos=True, draft=drafter(1))]) == 5


# --- the step ahead ---


def test_a_step_without_drafts_runs_one_step_ahead_as_without_a_drafter() -> None:
    class Silent:
        def propose(self, sequences: Sequence[Any]) -> list[list[int]]:
            return [[] for _ in sequences]

    def calls(draft: Any) -> list[str]:
        session = open_session(on_device=True)
        return names(calls_of(session, lambda: [*session.generate([[1, 2]], max_new_tokens=12, ignore_eos=True, draft=draft)]))

    assert calls(Silent()) == calls("off")


def test_a_step_ahead_is_not_wasted_by_a_draft() -> None:
    class After(Drafter):
        """Proposes from the sixth token on."""

        def propose(self, sequences: Sequence[Any]) -> list[list[int]]:
            return super().propose(sequences) if sequences[0].num_tokens >= 6 else [[] for _ in sequences]

    session = open_session(on_device=True)
    events = [*session.generate([[1, 2]], max_new_tokens=14, ignore_eos=True, draft=After(chosen, 1, vocab_size=VOCAB))]
    assert [event.token for event in events] == [*outcome_alone([1, 2], SamplingParams(max_new_tokens=14))[0]]
    assert len(session.engine.steps) == 1 + session.statistics.decode_steps  # none was enqueued in vain
    assert session.statistics.accepted_tokens


# --- choice of a drafter ---


@pytest.mark.parametrize("draft", ["eagle", 3, object()])
def test_another_draft_is_refused(draft: Any) -> None:
    session = open_session()
    text = refuse(session, ConfigError, lambda: session.generate([[1]], draft=draft))
    assert text.startswith(f"draft: expected 'ngram', 'mtp', 'off' or an object with a method propose, got {draft!r}")


def test_an_engine_with_the_logits_of_one_token_is_refused() -> None:
    session = make()
    for call in (session.generate, session.submit):
        text = refuse(session, ConfigError, lambda call=call: call([1], draft="ngram"))
        assert text.startswith("draft: expected an engine with the logits of 2 new tokens per slot or more, got one with those of 1.")
        assert "--max-logits-per-slot" in text
    assert len([*session.generate([1], max_new_tokens=2, ignore_eos=True, draft="off")]) == 2


def test_a_session_may_draft_for_all_requests() -> None:
    session = open_session(draft=drafter(1))
    assert len([*session.generate([[1, 2]], max_new_tokens=6, ignore_eos=True)]) == 6
    assert session.statistics.draft_tokens
    before = session.statistics.draft_tokens
    assert len([*session.generate([[1, 2]], max_new_tokens=6, ignore_eos=True, draft="off")]) == 6
    assert session.statistics.draft_tokens == before


@pytest.mark.parametrize("proposal", [[[VOCAB]], [[-1]], [], [[1], [2]], [["word"]], None, [3]])
def test_a_proposal_that_is_none_is_an_error_of_the_step(proposal: Any) -> None:
    class Wrong:
        def propose(self, sequences: Sequence[Any]) -> Any:
            return proposal

    session = open_session()
    handle = session.submit([1, 2], max_new_tokens=6, draft=Wrong())
    session.step()
    before = held(session)
    with pytest.raises(ConfigError) as error:
        session.step()
    assert str(error.value).startswith(f"Wrong.propose: expected token ids from 0 to {VOCAB - 1} for each of 1 sequences, got {proposal!r}")
    assert (held(session), len(handle.tokens)) == (before, 1)


def test_a_proposal_that_is_too_long_is_cut() -> None:
    class Long:
        def propose(self, sequences: Sequence[Any]) -> list[list[int]]:
            return [chosen(one, 40) for one in sequences]

    session = open_session()
    assert len([*session.generate([[1, 2]], max_new_tokens=12, ignore_eos=True, draft=Long())]) == 12
    assert session.statistics.accepted_tokens == session.statistics.draft_tokens


def test_prompt_lookup_finds_what_repeats() -> None:
    session = open_session(limit=64, width=20, logits=17)

    # A large bias makes the greedy tokens repeat: whatever the logits are, the model counts up.
    def count_up(tokens: tuple[int, ...], logits: Any) -> Any:
        logits[(tokens[-1] + 1) % 5] += 1000
        return logits

    params = SamplingParams(max_new_tokens=40, logits_processors=[count_up])
    [found] = by_prompt(session.generate([[0, 1, 2, 3, 4, 0, 1]], params, draft="ngram"))
    assert found[0] == [(2 + place) % 5 for place in range(40)]
    counts = session.statistics
    assert counts.accepted_tokens == counts.draft_tokens
    assert counts.decode_steps <= 6
