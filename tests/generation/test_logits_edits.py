"""Bias, penalties and logits processors, against definitions written out token by token."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, strategies as st

from tests.generation.stepping import next_token
from tests.helpers.assertions import raises
from trt_kvcache.errors import EngineError, ProcessorError, RangeError
from trt_kvcache.generation.logits_edits import LogitsEdits
from trt_kvcache.generation.request import Request
from trt_kvcache.generation.sampling import SamplingParams

VOCAB = 12
LOGITS = np.array([1.0, 3.0, 2.5, -1.0, 3.0, 0.0, 2.0, -8.0, 0.5, -0.5, 1.5, 2.75], np.float32)


def by_definition(logits, params, prompt, generated):
    """Hugging Face's ``SequenceBiasLogitsProcessor`` and ``RepetitionPenaltyLogitsProcessor``, then OpenAI's formula."""
    one = np.float32
    result = [one(value) for value in logits]
    for token, bias in params.logit_bias.items():
        result[token] = one(result[token] + one(bias))
    for token in {*prompt, *generated}:
        penalty = one(params.repetition_penalty)
        result[token] = result[token] * penalty if result[token] < 0 else result[token] / penalty
    for token, count in Counter(generated).items():
        result[token] = one(result[token] - one(params.frequency_penalty) * one(count))
        result[token] = one(result[token] - one(params.presence_penalty))
    return np.array(result, np.float32)


def request_for(params=None, prompt=(1, 2), generated=0, **options):
    params = SamplingParams(**options) if params is None else params
    return Request(0, prompt, params, tokenizer=None, eos_token_ids=(), generated=generated)


def bad(values):
    """A processor that returns these, whatever it gets."""

    def answer(tokens, logits):
        return values

    return answer


class TestPenalties:
    tokens = st.lists(st.integers(0, VOCAB - 1), max_size=8)

    @given(
        logits=st.lists(st.floats(-9, 9, width=32), min_size=VOCAB, max_size=VOCAB),
        prompt=tokens,
        earlier=tokens,
        generated=tokens,
        repetition=st.sampled_from([1.0, 1.3, 0.7]),
        presence=st.sampled_from([0.0, 1.5, -0.25]),
        frequency=st.sampled_from([0.0, 0.75, -2.0]),
        bias=st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-3.5, 0.25, 7.0]), max_size=3),
    )
    def test_are_those_of_the_definition(self, logits, prompt, earlier, generated, repetition, presence, frequency, bias):
        params = SamplingParams(
            repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency, logit_bias=bias, max_new_tokens=99
        )
        edits = LogitsEdits(params, [*prompt, *earlier], generated=len(earlier))
        given_logits = np.array(logits, np.float32)
        found, best = edits.apply(given_logits, generated)
        assert best == np.argmax(found)
        np.testing.assert_array_equal(found, by_definition(given_logits, params, prompt, [*earlier, *generated]))
        np.testing.assert_array_equal(given_logits, np.array(logits, np.float32))

    def test_more_different_tokens_than_there_is_room_for_at_first(self):
        logits = np.linspace(-3, 3, 500, dtype=np.float32)
        params = SamplingParams(frequency_penalty=0.5, presence_penalty=1.0)
        edits = LogitsEdits(params, [])
        generated = [*range(0, 400, 2), *range(0, 400, 3)]
        np.testing.assert_array_equal(edits.apply(logits, generated)[0], by_definition(logits, params, [], generated))

    def test_without_any_the_logits_are_not_copied(self):
        assert LogitsEdits(SamplingParams(temperature=1.0, logprobs=3), [1]).apply(LOGITS, [])[0] is LOGITS

    def test_a_biased_token_is_chosen_and_an_excluded_one_is_not(self):
        assert next_token(request_for(logit_bias={7: 100}), LOGITS).token == 7
        assert next_token(request_for(logit_bias={1: -math.inf, "4": -math.inf}), LOGITS).token == 11

    def test_a_request_counts_what_it_chooses(self):
        request = request_for(frequency_penalty=0.3, max_new_tokens=99)
        generated = []
        for _ in range(12):
            expected = int(np.argmax(by_definition(LOGITS, SamplingParams(frequency_penalty=0.3), [1, 2], generated)))
            generated.append(next_token(request, LOGITS).token)
            assert generated[-1] == expected
        assert len(set(generated)) > 2

    @pytest.mark.parametrize("before", range(4))
    def test_a_rollback_forgets_what_came_after(self, before):
        options = {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.5, "temperature": 1.0, "seed": 3}
        calm = request_for(**options)
        expected = [next_token(calm, LOGITS) for _ in range(9)]
        request = request_for(**options)
        for _ in range(before):
            next_token(request, LOGITS)
        earlier = request.progress
        for _ in range(4):
            next_token(request, LOGITS)
        request.restore(earlier)
        assert [next_token(request, LOGITS) for _ in range(before, 9)] == expected[before:]

    def test_an_earlier_part_of_the_request_counts_as_generated(self):
        options = {"frequency_penalty": 0.4, "presence_penalty": 0.2, "repetition_penalty": 1.1, "max_new_tokens": 99}
        whole = request_for(prompt=[5, 6], **options)
        tokens = [next_token(whole, LOGITS).token for _ in range(10)]
        rest = request_for(prompt=[5, 6, *tokens[:4]], generated=4, **options)
        assert [next_token(rest, LOGITS).token for _ in range(6)] == tokens[4:]
        assert rest.generated == 10

    def test_no_token_left_is_an_error_that_changes_nothing(self):
        request = request_for(logit_bias=dict.fromkeys(range(VOCAB), -math.inf))
        with raises(ProcessorError, "request 0: logit_bias and penalties", expected="largest logit that is finite after them", got="-inf"):
            next_token(request, LOGITS)
        assert (request.tokens, request.sampler[1]) == ([], 0)

    def test_a_nan_of_the_engine_is_not_blamed_on_the_options(self):
        with raises(EngineError, "logits", expected="finite numbers", got="nan for token 3"):
            next_token(request_for(logit_bias={3: 1.0}), np.where(np.arange(VOCAB) == 3, np.float32(np.nan), LOGITS))


class TestProcessors:
    def test_they_see_all_tokens_and_the_penalised_logits_which_they_may_keep(self):
        seen = []

        def look(tokens, logits):
            seen.append((tokens, logits, logits.dtype))
            return logits

        request = request_for(prompt=[5, 6], logits_processors=[look], presence_penalty=1.0)
        chosen = [next_token(request, LOGITS).token for _ in range(3)]
        assert [tokens for tokens, _, _ in seen] == [(5, 6), (5, 6, chosen[0]), (5, 6, *chosen[:2])]
        for count, (_, logits, dtype) in enumerate(seen):
            assert dtype == np.float32
            np.testing.assert_array_equal(logits, by_definition(LOGITS, SamplingParams(presence_penalty=1.0), [5, 6], chosen[:count]))

    def test_one_after_another(self):
        double, ban = lambda tokens, logits: logits * 2, lambda tokens, logits: np.where(logits > 5.25, -np.inf, logits)
        assert next_token(request_for(logits_processors=[double, ban]), LOGITS).token == 2
        assert next_token(request_for(logits_processors=[ban, double]), LOGITS).token == 1

    def test_they_may_change_the_array_that_they_get(self):
        def force(tokens, logits):
            logits[:] = -np.inf
            logits[9] = 0
            return logits

        before = LOGITS.copy()
        assert next_token(request_for(logits_processors=force, temperature=1.0), LOGITS).token == 9
        np.testing.assert_array_equal(LOGITS, before)

    def test_what_they_say_of_the_request_is_passed_on(self):
        def refuse(tokens, logits):
            raise ProcessorError("grammar: expected another one.")

        with raises(ProcessorError, "request 0: grammar", expected="another one"):
            next_token(request_for(logits_processors=[refuse]), LOGITS)

    def test_float64_is_accepted(self):
        assert next_token(request_for(logits_processors=[lambda _, logits: -logits.astype(np.float64)]), LOGITS).token == 7

    def test_the_temperature_comes_after_them(self):
        fix = np.array([0.0, 0.5, *[-np.inf] * (VOCAB - 2)], np.float32)
        request = request_for(logits_processors=[bad(fix)], temperature=1e-3, seed=1, max_new_tokens=99)
        assert {next_token(request, LOGITS).token for _ in range(20)} == {1}

    @pytest.mark.parametrize(
        ("returned", "text"),
        [
            (None, "expected to get back a NumPy array of shape (12,), got NoneType."),
            ([0.0] * VOCAB, "expected to get back a NumPy array of shape (12,), got list."),
            (LOGITS[:3], "expected to get back floating point logits of shape (12,), got float32 (3,)."),
            (LOGITS[None], "expected to get back floating point logits of shape (12,), got float32 (1, 12)."),
            (np.zeros(VOCAB, int), "expected to get back floating point logits of shape (12,), got int64 (12,)."),
            (np.full(VOCAB, -np.inf), "expected at least one finite logit and no NaN or +inf, but it excluded all tokens."),
            (np.full(VOCAB, 1e300), "expected at least one finite logit and no NaN or +inf, but it returned inf for token 0."),
            (
                np.where(np.arange(VOCAB) == 4, np.nan, 0),
                "expected at least one finite logit and no NaN or +inf, but it returned nan for token 4.",
            ),
        ],
        ids=["None", "list", "short", "nested", "integers", "nothing left", "too large", "NaN"],
    )
    def test_what_is_not_logits_is_refused_by_name(self, returned, text):
        request = request_for(logits_processors=[lambda _, logits: logits, bad(returned)], presence_penalty=1.0, temperature=1.0, seed=2)
        with pytest.raises(ProcessorError) as error:
            next_token(request, LOGITS)
        assert str(error.value) == f"request 0: logits_processors[1] (bad.<locals>.answer): {text}"
        assert (request.tokens, request.sampler, error.value.request) == ([], (2, 0), 0)

    def test_one_that_raises_is_named_and_changes_nothing(self):
        class Picky:
            calls = 0

            def __call__(self, tokens, logits):
                self.calls += 1
                if self.calls == 2:
                    raise KeyError("x")
                return logits

        options = {"frequency_penalty": 1.0, "temperature": 1.0, "seed": 5}
        request, calm = request_for(logits_processors=[Picky()], **options), request_for(**options)
        first = next_token(request, LOGITS)
        with pytest.raises(ProcessorError) as error:
            next_token(request, LOGITS)
        assert str(error.value) == f"request 0: logits_processors[0] ({Picky.__qualname__}): it raised KeyError: 'x'"
        assert isinstance(error.value.__cause__, KeyError)
        assert [first, next_token(request, LOGITS)] == [next_token(calm, LOGITS) for _ in range(2)]

    def test_an_interruption_is_not_wrapped(self):
        def interrupted(tokens, logits):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            next_token(request_for(logits_processors=[interrupted]), LOGITS)


class TestLogprobs:
    @pytest.mark.parametrize("options", [{}, {"temperature": 2.0, "seed": 1}, {"logit_bias": {7: 50}, "repetition_penalty": 2.0}])
    def test_are_those_of_the_logits_as_the_model_gave_them(self, options):
        event = next_token(request_for(logprobs=3, **options), LOGITS)
        total = math.log(sum(math.exp(value) for value in LOGITS.tolist()))
        assert event.logprob == pytest.approx(float(LOGITS[event.token]) - total, rel=1e-6)
        assert [token for token, _ in event.top_logprobs] == [1, 4, 11]
        assert [value for _, value in event.top_logprobs] == pytest.approx([3 - total, 3 - total, 2.75 - total], rel=1e-6)

    def test_none_unless_asked_for(self):
        event = next_token(request_for(), LOGITS)
        assert (event.logprob, event.top_logprobs) == (None, None)

    def test_of_the_chosen_token_alone(self):
        event = next_token(request_for(logprobs=0), LOGITS)
        assert (event.logprob is not None, event.top_logprobs) == (True, ())

    def test_at_most_the_vocabulary(self):
        event = next_token(request_for(logprobs=99), LOGITS)
        assert sum(math.exp(value) for _, value in event.top_logprobs) == pytest.approx(1, rel=1e-6)
        assert len(event.top_logprobs) == VOCAB

    def test_an_excluded_token_of_the_model_has_none(self):
        event = next_token(request_for(logprobs=VOCAB), np.where(np.arange(VOCAB) == 2, np.float32(-np.inf), LOGITS))
        assert dict(event.top_logprobs)[2] == -math.inf

    def test_in_words(self):
        event = next_token(request_for(logprobs=2), LOGITS)
        assert repr(event) == f"GeneratedToken(index=0, token=1, text='', logprob={event.logprob:.4f}, top_logprobs=<2>)"


class TestParams:
    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"repetition_penalty": 0}, "repetition_penalty: expected a finite number above 0, got 0."),
            ({"repetition_penalty": -1.0}, "repetition_penalty: expected a finite number above 0, got -1.0."),
            ({"repetition_penalty": math.inf}, "repetition_penalty: expected a finite number above 0, got inf."),
            ({"repetition_penalty": 1e-60}, "repetition_penalty: expected a finite number above 0, got 1e-60."),
            ({"presence_penalty": math.nan}, "presence_penalty: expected a finite number, got nan."),
            ({"presence_penalty": "1"}, "presence_penalty: expected a finite number, got '1'."),
            ({"frequency_penalty": 1e60}, "frequency_penalty: expected a finite number, got 1e+60."),
            ({"frequency_penalty": True}, "frequency_penalty: expected a finite number, got True."),
            ({"logit_bias": [(1, 2)]}, "logit_bias: expected a mapping of token ids to numbers, got [(1, 2)]."),
            ({"logit_bias": {-1: 2}}, "logit_bias: expected at least 0, got -1."),
            ({"logit_bias": {"x": 2}}, "logit_bias: expected an integer, got 'x'."),
            ({"logit_bias": {1.0: 2}}, "logit_bias: expected an integer, got 1.0."),
            ({"logit_bias": {3: math.inf}}, "logit_bias[3]: expected a finite number or -inf, got inf."),
            ({"logit_bias": {3: "a"}}, "logit_bias[3]: expected a finite number or -inf, got 'a'."),
            ({"logprobs": -1}, "logprobs: expected at least 0, got -1."),
            ({"logprobs": True}, "logprobs: expected an integer, got True."),
            ({"logits_processors": 3}, "logits_processors: expected a sequence of callables, got 3."),
            ({"logits_processors": [len, 3]}, "logits_processors[1]: expected a callable f(tokens, logits), got 3."),
        ],
    )
    def test_values_out_of_range_are_refused(self, options, text):
        with pytest.raises(RangeError) as error:
            SamplingParams(**options)
        assert str(error.value) == f"SamplingParams.{text}"

    def test_huge_integers_are_refused_as_numbers(self):
        with raises(RangeError, "SamplingParams.temperature", expected="finite number"):
            SamplingParams(temperature=10**400)

    def test_the_bias_is_copied_and_may_come_from_json(self):
        bias = {"7": 1, 8: -2.5}
        params = SamplingParams(logit_bias=bias)
        bias.clear()
        assert params.logit_bias == {7: 1.0, 8: -2.5}

    def test_tokens_beyond_the_vocabulary(self):
        params = SamplingParams(logit_bias={11: 1})
        params.check_vocabulary(12)
        with raises(RangeError, "SamplingParams.logit_bias", expected="0 to 10", got=11):
            params.check_vocabulary(11)
