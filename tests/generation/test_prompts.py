"""``PromptReader``: prompts of text or token ids become checked rows of token ids."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.checkpoint.tokenizer_folders import BOS
from tests.helpers.assertions import raises
from trt_kvcache import ChatPrompt
from trt_kvcache.checkpoint import Tokenizer
from trt_kvcache.errors import ConfigError, KVCacheError, RangeError, ShapeError
from trt_kvcache.generation.prompts import PromptReader, as_prompts

READER = PromptReader(None, 9)


@pytest.mark.parametrize(
    "prompts",
    [[[1, 2], [8]], ((1, 2), (8,)), [np.array([1, 2]), np.array([8], np.uint8)], [range(1, 3), range(8, 9)]],
    ids=["lists", "tuples", "arrays", "ranges"],
)
def test_rows_are_lists_of_int(prompts: Any) -> None:
    rows = READER.rows(prompts)
    assert rows == [[1, 2], [8]]
    assert {type(token) for row in rows for token in row} == {int}


def test_one_array_of_prompts() -> None:
    assert READER.rows(np.array([[1, 2], [3, 4]])) == [[1, 2], [3, 4]]


def test_rows_do_not_alias_the_prompt() -> None:
    prompt = [1, 2]
    READER.rows([prompt])[0].append(3)
    assert prompt == [1, 2]


def test_an_empty_prompt_is_an_empty_row() -> None:
    assert READER.rows([[]]) == [[]]


def test_text_is_encoded_with_special_tokens(tokenizer: Tokenizer) -> None:
    (row,) = PromptReader(tokenizer, tokenizer.vocab_size).rows(["the sea"])
    assert row == tokenizer.encode("the sea")
    assert tokenizer.decode(row, skip_special_tokens=False).startswith(BOS)


def test_text_that_continues_is_encoded_without_special_tokens(tokenizer: Tokenizer) -> None:
    (row,) = PromptReader(tokenizer, tokenizer.vocab_size).rows(["the sea"], add_special_tokens=False)
    assert row == tokenizer.encode("the sea", add_special_tokens=False)


@pytest.mark.parametrize(
    ("prompts", "error", "message"),
    [
        ("text", ShapeError, "prompts: expected a sequence of prompts, got str."),
        (3, ShapeError, "prompts: expected a sequence of prompts, got int."),
        (b"ab", ShapeError, "prompts: expected a sequence of prompts, got bytes."),
        ([b"ab"], ShapeError, "prompts[0]: expected text or token ids, got bytes. Make it a text: prompt.decode()."),
        ([bytearray(b"ab")], ShapeError, "prompts[0]: expected text or token ids, got bytearray. Make it a text: prompt.decode()."),
        (
            [[{"role": "user"}]],
            ShapeError,
            "prompts[0]: expected text or token ids, got messages. Pass them to session.chat, or as a ChatPrompt.",
        ),
        ([[1], 2], ShapeError, "prompts[1]: expected a sequence of token ids, got int."),
        (["text"], ConfigError, "prompts[0]: expected token ids, got text. The model folder has no tokenizer.json."),
        ([[1, 9]], RangeError, "prompts[0][1]: expected an integer from 0 to 8, got 9."),
        ([[1], [-1]], RangeError, "prompts[1][0]: expected an integer from 0 to 8, got -1."),
        ([[1.0]], RangeError, "prompts[0][0]: expected an integer, got 1.0."),
        ([[True]], RangeError, "prompts[0][0]: expected an integer, got True."),
    ],
)
def test_what_is_refused(prompts: Any, error: type[KVCacheError], message: str) -> None:
    with pytest.raises(error) as raised:
        READER.rows(prompts)
    assert str(raised.value) == message


def test_a_vocabulary_smaller_than_the_tokenizer_refuses_its_tokens(tokenizer: Tokenizer) -> None:
    with raises(RangeError, "prompts[0][0]", expected="0 to 4"):
        PromptReader(tokenizer, 5).rows(["the"])


def test_tokens_are_named_in_messages() -> None:
    with raises(RangeError, "tokens[1]", expected="0 to 8", got=9):
        READER.tokens("tokens", [1, 9])


@pytest.mark.parametrize("prompt", ["text", [1, 2], (1, 2), range(3)])
def test_one_prompt_becomes_a_sequence_of_one(prompt: Any) -> None:
    assert as_prompts(prompt) == [prompt]


def test_one_array_becomes_a_sequence_of_one() -> None:
    (prompt,) = as_prompts(np.array([1, 2]))  # type: ignore[arg-type]
    assert prompt.tolist() == [1, 2]


@pytest.mark.parametrize("prompts", [[[1], [2]], [[1]], []])
def test_a_sequence_of_prompts_stays_as_it_is(prompts: Any) -> None:
    assert as_prompts(prompts) is prompts


def test_bytes_are_one_prompt_that_is_refused() -> None:
    with raises(ShapeError, "prompts[0]", expected="text or token ids", got="bytes"):
        READER.rows(as_prompts(b"abc"))  # type: ignore[arg-type]


def test_conversations_are_prompts() -> None:
    one = ChatPrompt([{"role": "user", "content": "hi"}])
    assert as_prompts(one) == [one]
    assert as_prompts([one, one]) == [one, one]
