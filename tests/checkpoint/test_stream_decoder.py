from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from trt_kvcache.checkpoint import StreamDecoder, Tokenizer

from .tokenizer_folders import EOS, byte_fallback_folder, byte_level_folder

MAKERS: dict[str, Callable[[Path], Path]] = {"byte-level": byte_level_folder, "byte-fallback": byte_fallback_folder}

# What the normalizer of a tokenizer, or an incomplete character, would look the same as.
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd▁"), max_size=12)


def opened(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.open(folder)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module", params=list(MAKERS))
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return opened(MAKERS[request.param](tmp_path_factory.mktemp(request.param)))


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return opened(byte_level_folder(tmp_path_factory.mktemp("bytes")))


def stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    decoder = StreamDecoder(tokenizer)
    return [decoder.push(token) for token in ids] + [decoder.flush()]


@pytest.mark.parametrize("text", ["漢字かな", "🙂👩‍🚀🇪🇺", "the é the 漢 the", "naïve 🙂 the"])
def test_characters_come_as_soon_as_they_are_complete(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) > len(text.replace("the", "x"))  # some characters are split over tokens
    parts = stream(tokenizer, ids)
    assert "".join(parts) == text
    assert parts[-1] == ""
    assert not any("\ufffd" in part for part in parts)
    assert max(len(part) for part in parts) <= len(" the")


@given(TEXTS)
def test_the_pieces_of_any_text_join_to_it(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    parts = stream(tokenizer, ids)
    assert "".join(parts) == tokenizer.decode(ids)
    assert parts[-1] == ""
    assert not any("\ufffd" in part for part in parts)


@given(st.lists(st.integers(0, 255), max_size=12))
def test_invalid_bytes_come_as_decode_shows_them(byte_level: Tokenizer, ids: list[int]) -> None:
    assert "".join(stream(byte_level, ids)) == byte_level.decode(ids)


def test_incomplete_character_at_the_end_is_flushed(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a漢", add_special_tokens=False)[:-1]
    parts = stream(tokenizer, ids)
    assert "".join(parts[:-1]).strip() == "a"
    assert parts[-1] == "\ufffd"


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("start", ["", "the", "éé", " éé", "the 漢🙂"])
def test_a_stream_that_ends_inside_a_character_ends_in_one_replacement(tokenizer: Tokenizer, start: str, count: int) -> None:
    ids = tokenizer.encode(f"{start}🙂", add_special_tokens=False)[: count - 4]
    assert "".join(stream(tokenizer, ids)) == f"{start}\ufffd"


def test_a_stray_byte_comes_with_the_next_token(tokenizer: Tokenizer) -> None:
    first_byte = tokenizer.encode("a漢", add_special_tokens=False)[-3]
    letter = tokenizer.encode("a", add_special_tokens=False)[-1]
    assert stream(tokenizer, [letter, first_byte, letter]) == ["a", "", "\ufffda", ""]


def test_a_stray_byte_after_a_split_character_changes_no_earlier_text(tokenizer: Tokenizer) -> None:
    """Byte fallback decodes a run of bytes as a whole: one that is wrong makes those before it look wrong too."""
    character = tokenizer.encode("漢", add_special_tokens=False)[-3:]
    the = tokenizer.encode("the the", add_special_tokens=False)[-1]
    parts = stream(tokenizer, [*character, character[0], the])
    assert parts[:4] == ["", "", "漢", ""]
    assert parts[4] == "\ufffd the"


def test_special_tokens_have_no_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(f"a{EOS}a", add_special_tokens=False)
    assert EOS in tokenizer.decode(ids, skip_special_tokens=False)
    assert EOS not in "".join(stream(tokenizer, ids))


def test_after_flush_a_new_text_begins(tokenizer: Tokenizer) -> None:
    decoder = StreamDecoder(tokenizer)
    ids = tokenizer.encode("漢", add_special_tokens=False)
    decoder.push(ids[-3])
    assert decoder.flush() == "\ufffd"
    assert "".join(decoder.push(token) for token in ids) == "漢"
    assert decoder.flush() == ""


def test_a_copy_goes_on_where_the_decoder_was(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a漢b", add_special_tokens=False)
    for count in range(len(ids)):
        decoder = StreamDecoder(tokenizer)
        before = "".join(decoder.push(token) for token in ids[:count])
        copy = decoder.copy()
        for one in (decoder, copy):  # what the first is given does not reach the second
            assert before + "".join(one.push(token) for token in ids[count:]) + one.flush() == "a漢b"


@pytest.mark.parametrize("context", ["🙂🙂🙂", "漢漢漢", "éa漢漢漢漢", "éééé漢🙂"])
def test_a_context_of_split_characters_leaves_those_of_the_stream_whole(tokenizer: Tokenizer, context: str) -> None:
    ids = tokenizer.encode(f"{context}漢é🙂", add_special_tokens=False)
    decoder = StreamDecoder(tokenizer, ids[:-9])
    assert [text for token in ids[-9:] if (text := decoder.push(token))] == ["漢", "é", "🙂"]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_character_that_begins_in_the_context_belongs_to_the_stream(tokenizer: Tokenizer, count: int) -> None:
    ids = tokenizer.encode("漢漢🙂é", add_special_tokens=False)
    decoder = StreamDecoder(tokenizer, ids[: count - 6])
    assert "".join(decoder.push(token) for token in ids[count - 6 :]) + decoder.flush() == "🙂é"


def test_context_keeps_the_space_before_the_first_word(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the the", add_special_tokens=False)
    decoder = StreamDecoder(tokenizer, ids[:-1])
    assert decoder.push(ids[-1]) == " the"


def test_cost_of_a_step_does_not_grow(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    longest = 0
    decode = tokenizer.decode

    def counting(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(ids)

    monkeypatch.setattr(tokenizer, "decode", counting)
    the, stray = tokenizer.encode("the 漢 " * 50, add_special_tokens=False), tokenizer.encode("a漢", add_special_tokens=False)[-3]
    special = tokenizer.encode(EOS, add_special_tokens=False)[-1]
    for context, ids in (([], the), (the, the), (the, [special] * 60 + the), ([], [stray] * 60)):
        decoder = StreamDecoder(tokenizer, context)
        text = "".join([decoder.push(token) for token in ids] + [decoder.flush()])
        assert text.strip() == decode(ids).strip()
    assert longest <= 20
