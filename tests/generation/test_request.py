"""``Request``: which token, which text, and when and why it ends."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from tests.checkpoint.tokenizer_folders import EOS, byte_fallback_folder, byte_level_folder
from tests.generation.stepping import next_token
from tests.helpers.assertions import raises
from trt_kvcache.checkpoint import Tokenizer
from trt_kvcache.errors import ConfigError, EngineError
from trt_kvcache.generation.request import GeneratedToken, Request
from trt_kvcache.generation.sampling import DeferredProcessor, SamplingParams


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.open(byte_level_folder(tmp_path_factory.mktemp("tokenizer")))


def logits_for(token: int, vocab: int = 300) -> np.ndarray:
    logits = np.zeros(vocab, np.float32)
    logits[token] = 1
    return logits


def request_for(tokenizer=None, *, eos=(), prompt=(1, 2), index=0, **options):
    return Request(index, prompt, SamplingParams(**options), tokenizer=tokenizer, eos_token_ids=eos)


def say(request, tokens, *, full_at=None):
    """Let a request choose these tokens until it ends; return what it handed out."""
    events = []
    for place, token in enumerate(tokens):
        if request.finished:
            break
        events.append(next_token(request, logits_for(token), full=place == full_at))
    return events


def ids_of(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


def said(events):
    return "".join(event.text for event in events), events[-1].finish_reason


class TestTokens:
    def test_each_token_is_returned(self):
        request = request_for(index=2)
        assert say(request, [5, 9]) == [GeneratedToken(2, 5, "", None), GeneratedToken(2, 9, "", None)]
        assert (request.tokens, request.finished, request.finish_reason, request.index) == ([5, 9], False, None, 2)

    def test_an_end_token_ends_the_request(self):
        request = request_for(eos={7, 9})
        assert [event.finish_reason for event in say(request, [5, 9, 6])] == [None, "stop"]
        assert (request.tokens, request.finished) == ([5, 9], True)

    def test_ignore_eos_continues_past_the_end_token(self):
        assert [event.finish_reason for event in say(request_for(eos=[9], ignore_eos=True, max_new_tokens=3), [5, 9, 6])] == [
            None,
            None,
            "length",
        ]

    def test_a_stop_token_ends_the_request(self):
        assert [event.finish_reason for event in say(request_for(eos=[9], ignore_eos=True, stop_token_ids=[6]), [5, 9, 6])] == [
            None,
            None,
            "stop",
        ]

    def test_max_new_tokens_ends_the_request(self):
        assert [event.finish_reason for event in say(request_for(max_new_tokens=2), [5, 6, 7])] == [None, "length"]
        assert [event.finish_reason for event in say(request_for(max_new_tokens=1), [5, 6, 7])] == ["length"]

    def test_a_full_slot_ends_the_request(self):
        assert [event.finish_reason for event in say(request_for(), [5, 6, 7], full_at=1)] == [None, "length"]

    def test_a_stop_token_takes_precedence_over_the_length(self):
        assert say(request_for(eos=[6], max_new_tokens=2), [5, 6], full_at=1)[-1].finish_reason == "stop"

    def test_logits_that_are_refused_change_nothing(self):
        request = request_for()
        with pytest.raises(EngineError):
            next_token(request, np.full(300, np.nan, np.float32))
        assert (request.tokens, request.finished) == ([], False)


class TestText:
    def test_the_text_of_the_tokens(self, tokenizer):
        events = say(request_for(tokenizer), ids_of(tokenizer, "see the sea"))
        assert said(events) == ("see the sea", None)
        assert all(event.text for event in events)

    def test_the_space_before_the_first_word_is_kept(self, tmp_path):
        # This kind of tokenizer drops the space in front of a text.
        tokenizer = Tokenizer.open(byte_fallback_folder(tmp_path))
        prompt, word = ids_of(tokenizer, "tea"), ids_of(tokenizer, "the")
        assert tokenizer.decode(word) == "the"
        assert said(say(request_for(tokenizer, prompt=prompt), word))[0] == " the"

    def test_text_comes_in_whole_characters(self, tokenizer):
        tokens = ids_of(tokenizer, "aé漢👩b")
        texts = [event.text for event in say(request_for(tokenizer), tokens)]
        assert len(texts) == 1 + 2 + 3 + 4 + 1
        assert texts == ["a", "", "é", "", "", "漢", "", "", "", "👩", "b"]

    def test_an_incomplete_character_comes_with_the_last_token(self, tokenizer):
        tokens = ids_of(tokenizer, "a漢")[:-1]
        assert said(say(request_for(tokenizer, max_new_tokens=3), tokens)) == ("a\ufffd", "length")

    def test_the_end_token_has_no_text(self, tokenizer):
        (eos,) = ids_of(tokenizer, EOS)
        assert said(say(request_for(tokenizer, eos=[eos]), [*ids_of(tokenizer, "sea"), eos])) == ("sea", "stop")

    def test_a_stop_token_has_no_text(self, tokenizer):
        *tokens, stop = ids_of(tokenizer, "sea.")
        assert said(say(request_for(tokenizer, stop_token_ids=[stop]), [*tokens, stop])) == ("sea", "stop")

    def test_without_a_tokenizer_there_is_no_text(self):
        assert {event.text for event in say(request_for(), [5, 6, 7])} == {""}


class TestStopText:
    def test_a_stop_text_ends_the_request_and_is_not_returned(self, tokenizer):
        events = say(request_for(tokenizer, stop=["</END>"]), ids_of(tokenizer, "sea</END>more"))
        assert said(events) == ("sea", "stop")
        assert [event.text for event in events] == ["s", "e", "a", *[""] * 6]

    def test_a_stop_text_that_is_a_special_token_ends_the_request_with_it(self, tokenizer):
        [special] = ids_of(tokenizer, EOS)
        request = request_for(tokenizer, stop=[EOS, "!"], ignore_eos=True, eos=[special])
        assert said(say(request, [*ids_of(tokenizer, "sea"), special, *ids_of(tokenizer, "!")])) == ("sea", "stop")
        assert request.tokens[-1] == special

    def test_text_that_turns_out_to_be_no_stop_text_comes_later(self, tokenizer):
        events = say(request_for(tokenizer, stop="</END>"), ids_of(tokenizer, "a</x"))
        assert [event.text for event in events] == ["a", "", "", "</x"]

    @pytest.mark.parametrize(("options", "reason"), [({"max_new_tokens": 3}, "length"), ({"stop_token_ids": [0]}, "stop")])
    def test_text_held_back_comes_with_the_last_token(self, tokenizer, options, reason):
        events = say(request_for(tokenizer, stop=["</END>"], **options), [*ids_of(tokenizer, "a</"), 0])
        assert said(events) == ("a</", reason)

    def test_a_stop_text_takes_precedence_over_the_length(self, tokenizer):
        assert said(say(request_for(tokenizer, stop=["a"], max_new_tokens=3), ids_of(tokenizer, "sea"))) == ("se", "stop")

    def test_a_stop_text_of_several_bytes_per_character(self, tokenizer):
        assert said(say(request_for(tokenizer, stop=["字"]), ids_of(tokenizer, "漢字!"))) == ("漢", "stop")

    def test_a_stop_text_across_a_character_that_is_not_complete(self, tokenizer):
        # The last character never becomes one, and the stop text is in what is let go at the end.
        tokens = ids_of(tokenizer, "a漢")[:-1]
        assert said(say(request_for(tokenizer, stop=["a\ufffd"], max_new_tokens=3), tokens)) == ("", "stop")

    def test_a_stop_text_needs_a_tokenizer(self):
        with raises(ConfigError, "stop texts", expected="model folder with tokenizer.json", got="none"):
            request_for(stop=["x"])

    @given(
        text=st.text("ab é", max_size=20), stops=st.lists(st.text("ab é", min_size=1, max_size=3), max_size=2), length=st.integers(1, 24)
    )
    def test_the_whole_text_is_that_before_the_stop_text(self, tokenizer, text, stops, length):
        tokens = ids_of(tokenizer, text)[:length]
        request = request_for(tokenizer, stop=stops, max_new_tokens=length)
        events = say(request, tokens)
        out = "".join(event.text for event in events)
        whole = tokenizer.decode(tokens)
        if request.finish_reason == "stop":
            assert any(whole.startswith(out + stop) for stop in stops)
        elif request.finish_reason == "length":
            assert out == whole
        assert not any(stop in out for stop in stops)


class TestChoice:
    """Choosing changes nothing; taking a choice changes all."""

    @pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 5}, {"frequency_penalty": 0.5, "repetition_penalty": 1.2}])
    def test_the_same_choice_until_it_is_taken(self, tokenizer, options):
        logits = np.random.default_rng(3).normal(size=(6, tokenizer.vocab_size)).astype(np.float32)
        calm, request = (request_for(tokenizer, stop=("zz",), **options) for _ in range(2))
        for row in logits:
            before = (request.progress, request.tokens, request.sampler)
            first, again = (request.choose(row, full=False) for _ in range(2))
            assert first == again
            assert (request.progress, request.tokens, request.sampler) == before
            assert request.take(first) == next_token(calm, row)
            assert (request.tokens, request.sampler[1]) == (calm.tokens, calm.sampler[1])

    def test_a_choice_that_is_not_taken_leaves_no_trace(self, tokenizer):
        logits = np.random.default_rng(3).normal(size=(2, tokenizer.vocab_size)).astype(np.float32)
        request = request_for(tokenizer, temperature=1.0, seed=5, presence_penalty=1.0)
        request.choose(logits[1], full=True)
        assert next_token(request, logits[0]) == next_token(
            request_for(tokenizer, temperature=1.0, seed=5, presence_penalty=1.0), logits[0]
        )

    def test_logits_are_kept_while_a_processor_is_not_ready(self):
        late = Late()
        request = request_for(logits_processors=[late])
        logits = logits_for(5)
        assert request.take(request.choose_or_keep(logits, full=True)) is None
        logits[:] = 0  # the request has a copy
        assert (request.waits, request.resume(), request.tokens) == (True, None, [])
        late.is_ready = True
        choice = request.resume()
        assert (request.waits, request.tokens) == (True, [])
        assert request.take(choice) == GeneratedToken(0, 5, "", "length")
        assert (request.waits, request.tokens) == (False, [5])

    def test_processors_begin_with_the_next_token_when_one_is_chosen(self):
        late = Late(is_ready=True)
        request = request_for(logits_processors=[late], max_new_tokens=2)
        request.choose(logits_for(5), full=False)
        assert late.begun[-1] == (1, 2, 5)
        next_token(request, logits_for(6))
        assert late.begun[-1] == (1, 2, 6)
        next_token(request, logits_for(7))
        assert late.begun[-1] == (1, 2, 6)  # it has ended


class Late(DeferredProcessor):
    """A logits processor that changes nothing."""

    def __init__(self, is_ready=False):
        self.is_ready = is_ready
        self.begun = []

    def ready(self, tokens, seconds=0.0):
        self.begun.append(tuple(tokens))
        return self.is_ready

    def __call__(self, tokens, logits):
        return logits


class TestRestore:
    """A request returns to earlier progress, and chooses and says the same from there on."""

    @pytest.mark.parametrize("before", range(5))
    def test_tokens_text_and_random_numbers_are_as_before(self, tokenizer, before):
        logits = np.random.default_rng(3).normal(size=(12, tokenizer.vocab_size)).astype(np.float32)
        options = {"temperature": 1.0, "seed": 5, "stop": ("zz",)}
        calm = [next_token(request, row) for request in [request_for(tokenizer, **options)] for row in logits]
        request = request_for(tokenizer, **options)
        for row in logits[:before]:
            next_token(request, row)
        earlier = request.progress
        for row in logits[before : before + 3][::-1]:
            next_token(request, row)
        request.restore(earlier)
        assert (request.tokens, request.sampler) == ([event.token for event in calm[:before]], (5, before))
        assert [next_token(request, row) for row in logits[before:]] == calm[before:]

    def test_text_that_was_held_back_is_held_back_again(self, tokenizer):
        request = request_for(tokenizer, stop=("END",))
        say(request, ids_of(tokenizer, "aEN"))
        earlier = request.progress
        assert said(say(request, ids_of(tokenizer, "D"))) == ("", "stop")
        request.restore(earlier)
        assert (request.finished, request.finish_reason) == (False, None)
        assert said(say(request, ids_of(tokenizer, "x"))) == ("ENx", None)

    def test_nothing_is_decoded_again(self, tokenizer, monkeypatch):
        request = request_for(tokenizer)
        say(request, ids_of(tokenizer, "some text"))
        earlier = request.progress
        say(request, ids_of(tokenizer, "more"))
        monkeypatch.setattr(type(tokenizer), "decode", lambda *_: pytest.fail("it decodes"))
        request.restore(earlier)
