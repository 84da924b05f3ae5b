"""``Request``: which token, which text, and when and why it ends."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.checkpoint.tokenizer_folders import EOS, byte_fallback_folder
from trt_kvcache.checkpoint import Tokenizer
from trt_kvcache.errors import EngineError
from trt_kvcache.generation.request import GeneratedToken, Request
from trt_kvcache.generation.sampling import SamplingParams


def request_for(tokenizer=None, *, eos=(), prompt=(1, 2), index=0, **options):
    return Request(index, prompt, SamplingParams(**options), tokenizer=tokenizer, eos_token_ids=eos)


def say(request, tokens, *, full_at=None):
    """Let a request choose these tokens until it ends; return what it handed out."""
    events = []
    for place, token in enumerate(tokens):
        if not request.finished:
            events.append(request.choose(np.eye(1, 300, token, dtype=np.float32)[0], full=place == full_at))
    return events


def ids_of(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


def said(events):
    return "".join(event.text for event in events), events[-1].finish_reason


def test_each_token_is_handed_out_and_a_step_that_fails_leaves_it_as_it_was():
    request = request_for(index=2)
    with pytest.raises(EngineError):
        request.choose(np.full(300, np.nan, np.float32), full=False)
    assert (request.tokens, request.finished) == ([], False)
    assert say(request, [5, 9]) == [GeneratedToken(2, 5, "", None), GeneratedToken(2, 9, "", None)]
    assert (request.tokens, request.finished, request.finish_reason, request.index) == ([5, 9], False, None, 2)


@pytest.mark.parametrize(
    ("options", "full_at", "reasons"),
    [
        ({"eos": {7, 9}}, None, [None, "stop"]),
        ({"eos": [9], "ignore_eos": True, "max_new_tokens": 3}, None, [None, None, "length"]),
        ({"max_new_tokens": 1}, None, ["length"]),
        ({}, 1, [None, "length"]),
        ({"eos": [9], "max_new_tokens": 2}, 1, [None, "stop"]),
    ],
    ids=["end token", "ignored", "enough tokens", "full slot", "a stop token goes before"],
)
def test_why_it_ends(options, full_at, reasons):
    request = request_for(**options)
    assert [event.finish_reason for event in say(request, [5, 9, 6], full_at=full_at)] == reasons
    assert (request.tokens, request.finished) == ([5, 9, 6][: len(reasons)], True)


def test_the_space_before_the_first_word_is_kept(tmp_path):
    # This kind of tokenizer drops the space in front of a text.
    tokenizer = Tokenizer.open(byte_fallback_folder(tmp_path))
    prompt, word = ids_of(tokenizer, "tea"), ids_of(tokenizer, "the")
    assert tokenizer.decode(word) == "the"
    assert said(say(request_for(tokenizer, prompt=prompt), word))[0] == " the"


@pytest.mark.parametrize(
    ("stop", "text", "pieces"),
    [
        ((), "aé漢👩b", ["a", "", "é", "", "", "漢", "", "", "", "👩", "b"]),
        ("</END>", "sea</END>more", ["s", "e", "a", *[""] * 6]),
        ("</END>", "a</x", ["a", "", "", "</x"]),
        ("字", "漢字!", ["", "", "漢", "", "", ""]),
    ],
    ids=["whole characters only", "a stop text is not handed out", "what only looked like it comes with the next", "several bytes"],
)
def test_the_text_in_pieces(tokenizer, stop, text, pieces):
    events = say(request_for(tokenizer, stop=stop), ids_of(tokenizer, text))
    assert [event.text for event in events] == pieces
    assert events[-1].finish_reason == ("stop" if stop and stop in text else None)


@pytest.mark.parametrize(
    ("options", "text", "last", "expected"),
    [
        ({"eos": "last"}, "sea", EOS, ("sea", "stop")),
        ({"stop_token_ids": "last"}, "sea", ".", ("sea", "stop")),
        ({"max_new_tokens": 3, "stop": "</END>"}, "a<", "/", ("a</", "length")),
        ({"max_new_tokens": 3, "stop": "a"}, "se", "a", ("se", "stop")),
        ({"max_new_tokens": 3}, "a", "漢", ("a\ufffd", "length")),
        ({"max_new_tokens": 3, "stop": "a\ufffd"}, "a", "漢", ("", "stop")),
    ],
    ids=[
        "an end token is no text",
        "a stop token is no text even if it has one",
        "what was held back comes with the last token",
        "a stop text is the reason where the tokens run out too",
        "a character that is never complete",
        "a stop text across one",
    ],
)
def test_the_text_at_the_end(tokenizer, options, text, last, expected):
    tokens = ids_of(tokenizer, text) + ids_of(tokenizer, last)
    options = {name: [tokens[-1]] if value == "last" else value for name, value in options.items()}
    assert said(say(request_for(tokenizer, **options), tokens)) == expected


@given(text=st.text("ab é", max_size=20), stops=st.lists(st.text("ab é", min_size=1, max_size=3), max_size=2), length=st.integers(1, 24))
def test_all_in_all_it_is_the_text_up_to_the_stop(tokenizer, text, stops, length):
    tokens = ids_of(tokenizer, text)[:length]
    request = request_for(tokenizer, stop=stops, max_new_tokens=length)
    out, whole = "".join(event.text for event in say(request, tokens)), tokenizer.decode(tokens)
    if request.finish_reason == "stop":
        assert any(whole.startswith(out + stop) for stop in stops)
    elif request.finish_reason == "length":
        assert out == whole
    assert not any(stop in out for stop in stops)
