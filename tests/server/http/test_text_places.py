"""``TextPlaces``: at which character of a text its tokens begin."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.tokenizer_folders import EOS, byte_fallback_folder, byte_level_folder
from trt_kvcache.checkpoint import Tokenizer
from trt_kvcache.server.http.text_places import TextPlaces


@pytest.mark.parametrize("make", [byte_level_folder, byte_fallback_folder])
@pytest.mark.parametrize("text", ["sea", "the s\u00e9a", "\u20ac2 \U0001f600!"])
def test_tokens_begin_where_their_characters_do(tmp_path: Path, make, text: str) -> None:
    tokenizer = Tokenizer.open(make(tmp_path))
    assert tokenizer is not None
    tokens = tokenizer.encode(text, add_special_tokens=False)
    places = TextPlaces(tokenizer)
    found = [places.of(token) for token in tokens]
    whole = [len(tokenizer.decode(tokens[:count])) for count in range(len(tokens)) if "\ufffd" not in tokenizer.decode(tokens[:count])]
    assert sorted(set(found)) == sorted(set(whole))
    assert found == sorted(found)


def test_special_tokens_take_no_place_and_a_place_can_be_set(tmp_path: Path) -> None:
    tokenizer = Tokenizer.open(byte_level_folder(tmp_path))
    assert tokenizer is not None
    [special], sea = (tokenizer.encode(text, add_special_tokens=False) for text in (EOS, "sea"))
    places = TextPlaces(tokenizer, context=sea)
    assert [places.of(token) for token in (special, sea[0], special)] == [0, 0, len(tokenizer.decode(sea[:1]))]
    places.go_to(40)
    assert [places.of(sea[0]), places.of(special)] == [40, 40 + len(tokenizer.decode(sea[:1]))]


def test_without_a_tokenizer_there_is_no_text() -> None:
    places = TextPlaces(None)
    assert [places.of(token) for token in (5, 6)] == [0, 0]
