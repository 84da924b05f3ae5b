"""``InferenceSession.generate``: tokens, texts, reasons to finish, seeds.

The engine is the exact one of ``tests.helpers.recording``: its logits are a function of all tokens that it finds in a slot.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.checkpoint.tokenizer_folders import BOS, EOS
from tests.helpers.assertions import raises
from tests.helpers.recording import (
    logits_after,
)
from tests.helpers.sessions import MAX_SEQUENCE_LENGTH, by_prompt, continuation, damage_logits, make, refuse
from trt_kvcache import SamplingParams
from trt_kvcache.errors import (
    ClosedError,
    EngineError,
)

S = MAX_SEQUENCE_LENGTH


class TestGenerate:
    def test_each_prompt_is_continued(self, session):
        prompts = [[1, 2, 3, 4, 5], [6], [7, 8]]
        found = by_prompt(session.generate(prompts, max_new_tokens=5))
        assert found == [(continuation(prompt, 5), "", "length") for prompt in prompts]

    def test_tokens_come_as_they_are_made(self, session):
        events = session.generate([[1, 2], [3]], max_new_tokens=3)
        assert session.engine.steps == []
        assert [next(events).index for _ in range(2)] == [0, 1]
        assert len(session.engine.steps) == 1
        next(events)
        assert len(session.engine.steps) == 2
        assert [event.index for event in events] == [1, 0, 1]

    def test_one_prompt_need_not_be_in_a_list(self, session):
        assert by_prompt(session.generate([1, 2], max_new_tokens=2))[0][0] == continuation([1, 2], 2)
        assert by_prompt(session.generate(np.array([1, 2]), max_new_tokens=2))[0][0] == continuation([1, 2], 2)

    def test_each_prompt_may_have_its_own_parameters(self, session):
        prompts = [[1, 2], [3], [4]]
        stop = continuation([4], 2)[-1]
        params = [SamplingParams(max_new_tokens=2), SamplingParams(max_new_tokens=6), SamplingParams(stop_token_ids=[stop])]
        found = by_prompt(session.generate(prompts, params))
        assert found[:2] == [(continuation([1, 2], 2), "", "length"), (continuation([3], 6), "", "length")]
        assert found[2] == (continuation([4], continuation([4], 2).index(stop) + 1), "", "stop")

    def test_one_set_of_parameters_for_all(self, session):
        found = by_prompt(session.generate([[1], [2]], SamplingParams(max_new_tokens=2)))
        assert [len(tokens) for tokens, _, _ in found] == [2, 2]

    def test_end_tokens_of_the_model(self):
        end = continuation([1, 2], 3)[-1]
        session = make(eos_token_ids=[end])
        assert by_prompt(session.generate([1, 2]))[0][2] == "stop"
        assert len(by_prompt(session.generate([1, 2], ignore_eos=True, max_new_tokens=7))[0][0]) == 7

    def test_the_defaults_of_the_session_apply(self):
        session = make(defaults=SamplingParams(max_new_tokens=4))
        assert len(list(session.generate([1, 2]))) == 4
        assert len(list(session.generate([1, 2], max_new_tokens=2))) == 2

    def test_a_full_slot_ends_its_sequence_and_the_others_continue(self):
        session = make(limit=7)
        prompts = [[1, 2, 3, 4, 5], [6], [7, 8, 9]]
        found = by_prompt(session.generate(prompts, [SamplingParams(max_new_tokens=count) for count in (9, 6, 1)]))
        assert found == [
            (continuation(prompts[0], 3), "", "length"),
            (continuation(prompts[1], 6), "", "length"),
            (continuation(prompts[2], 1), "", "length"),
        ]
        assert session.tokens(0) + session.pending_tokens(0) == (*prompts[0], *continuation(prompts[0], 3))
        assert session.tokens(2) + session.pending_tokens(2) == (*prompts[2], *continuation(prompts[2], 1))

    def test_a_prompt_that_fills_the_slot_gets_one_token(self, session):
        row = list(range(S))
        assert by_prompt(session.generate([row])) == [(continuation(row, 1), "", "length")]
        assert (session.tokens(0), session.pending_tokens(0)) == (tuple(row), tuple(continuation(row, 1)))

    def test_append_continues_each_sequence(self, session):
        first = by_prompt(session.generate([[1, 2], [3]], max_new_tokens=2))
        second = by_prompt(session.generate([[4], [5, 6]], max_new_tokens=2, append=True))
        for (before, _, _), (after, _, _), prompt, turn in zip(first, second, [[1, 2], [3]], [[4], [5, 6]], strict=True):
            assert after == continuation([*prompt, *before, *turn], 2)

    def test_reuse_runs_only_what_the_cache_does_not_hold(self, session):
        session.prefill([[1, 2, 3]])
        assert by_prompt(session.generate([1, 2, 3, 4], reuse=True, max_new_tokens=2))[0][0] == continuation([1, 2, 3, 4], 2)
        assert session.statistics.reused_tokens == 3

    def test_the_iterator_can_be_closed_after_any_token(self, session):
        for count in range(1, 7):
            seen: list[list[int]] = [[], []]
            events = session.generate([[1, 2], [3]], max_new_tokens=3)
            for _ in range(count):
                event = next(events)
                seen[event.index].append(event.token)
            events.close()
            for slot, prompt in enumerate([[1, 2], [3]]):
                assert session.tokens(slot) + session.pending_tokens(slot) == (*prompt, *seen[slot])

    @pytest.mark.parametrize(
        "meanwhile",
        [
            lambda session: session.prefill([[1], [2]]),
            lambda session: session.decode([1, 2]),
            lambda session: session.append([[1], []]),
            lambda session: session.rewind(0, 1),
            lambda session: next(session.generate([[1], [2]])),
        ],
        ids=["prefill", "decode", "append", "rewind", "generate"],
    )
    @pytest.mark.parametrize("read", [1, 2])
    def test_the_iterator_ends_when_another_call_changes_the_sequences(self, session, meanwhile, read):
        events = session.generate([[1, 2], [3]], max_new_tokens=3)
        for _ in range(read):
            next(events)
        meanwhile(session)
        text = refuse(session, ClosedError, lambda: next(events))
        assert text == "this iterator cannot continue: another call has changed the sequences since. Call generate again."

    def test_the_iterator_ends_when_the_session_is_closed(self, session):
        events = session.generate([[1, 2], [3]], max_new_tokens=3)
        next(events)
        session.close()
        with pytest.raises(ClosedError, match=r"^this InferenceSession is closed\.$"):
            next(events)

    def test_the_session_may_be_closed_after_the_last_token(self, session):
        for event in session.generate([1, 2], max_new_tokens=2):
            if event.finish_reason:
                session.close()

    def test_logits_that_are_not_finite_are_refused(self, session):
        events = session.generate([[1, 2], [3]], max_new_tokens=3)
        next(events)
        next(events)
        damage_logits(session, 0)
        with raises(EngineError, "logits", expected="finite numbers", got="nan for token 0"):
            next(events)


class TestSeeds:
    PARAMS = SamplingParams(temperature=3.0, top_k=50, top_p=0.95, seed=5, max_new_tokens=8)

    def alone(self, prompt):
        return by_prompt(make(slots=1).generate(prompt, self.PARAMS))[0][0]

    def test_a_sampled_sequence_does_not_depend_on_its_neighbours_or_its_slot(self, session):
        prompts = [[1, 2, 3], [4], [5, 6]]
        others = [SamplingParams(temperature=9.0, seed=seed, max_new_tokens=seed) for seed in (3, 6)]
        for place in range(3):
            params = others[:]
            params.insert(place, self.PARAMS)
            assert by_prompt(session.generate(prompts, params))[place][0] == self.alone(prompts[place])

    def test_one_seed_gives_equal_prompts_equal_tokens(self, session):
        found = by_prompt(session.generate([[1, 2], [1, 2]], self.PARAMS))
        assert found[0] == found[1]

    def test_without_a_seed_each_prompt_gets_its_own(self, session):
        found = by_prompt(session.generate([[1, 2]] * 3, temperature=9.0, max_new_tokens=8))
        assert len({tuple(tokens) for tokens, _, _ in found}) == 3

    def test_a_seed_gives_the_same_tokens_however_the_prompt_was_run(self, session):
        whole = self.alone([1, 2, 3, 4, 5, 6])
        session.prefill([[1, 2, 3]])
        assert by_prompt(session.generate([[4, 5, 6]], self.PARAMS, append=True))[0][0] == whole


class TestText:
    @pytest.fixture
    def session(self, tokenizer):
        (end,) = tokenizer.encode(EOS, add_special_tokens=False)
        with make(slots=2, limit=32, tokenizer=tokenizer, eos_token_ids=[end]) as session:
            yield session

    def test_prompts_are_encoded_with_special_tokens(self, session, tokenizer):
        ids = tokenizer.encode("see")
        assert tokenizer.decode(ids[:1], skip_special_tokens=False) == BOS
        np.testing.assert_array_equal(session.prefill(["see", [1]]), [logits_after(ids), logits_after([1])])
        assert by_prompt(session.generate("see", max_new_tokens=3))[0][0] == continuation(ids, 3)
        assert by_prompt(session.generate(["see"], max_new_tokens=3))[0][0] == continuation(ids, 3)

    def test_appended_text_is_encoded_without_special_tokens(self, session, tokenizer):
        ids = tokenizer.encode("see")
        more = tokenizer.encode(" the", add_special_tokens=False)
        session.prefill(["see"])
        np.testing.assert_array_equal(session.append([" the"]), [logits_after([*ids, *more])])
        session.prefill(["see"])
        assert by_prompt(session.generate(" the", append=True, max_new_tokens=2))[0][0] == continuation([*ids, *more], 2)

    def test_the_text_is_what_the_tokenizer_decodes(self, session, tokenizer):
        for tokens, text, _ in by_prompt(session.generate(["see", "the"], max_new_tokens=20, temperature=20.0, seed=3)):
            assert text == tokenizer.decode(tokens)

    def test_no_piece_holds_part_of_a_character(self, session, tokenizer):
        events = list(session.generate("the", max_new_tokens=20, temperature=20.0, seed=3))
        ids = tokenizer.encode("the")
        told = ""
        for place, event in enumerate(events):
            told += event.text
            whole = tokenizer.decode([*ids, *(one.token for one in events[: place + 1])])
            assert whole.startswith("the" + told)

    def test_a_stop_text_ends_one_sequence_and_the_other_continues(self, session):
        plain = by_prompt(session.generate(["see", "the"], max_new_tokens=12))
        stop = plain[0][1][3:6]
        found = by_prompt(session.generate(["see", "the"], max_new_tokens=12, stop=[stop]))
        assert found[0][1:] == (plain[0][1][: plain[0][1].index(stop)], "stop")
        if stop not in plain[1][1]:
            assert found[1] == plain[1]
        assert session.tokens(0) + session.pending_tokens(0) == (*session.tokenizer.encode("see"), *found[0][0])
