import pytest
from hypothesis import given
from hypothesis import strategies as st

from trt_kvcache.checkpoint import StreamDecoder

from .tokenizer_folders import EOS, byte_fallback_folder, byte_level_folder, opened

TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd▁"), max_size=12)


@pytest.fixture(scope="module", params=[byte_level_folder, byte_fallback_folder])
def tokenizer(request, tmp_path_factory):
    return opened(request.param(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def encode(tokenizer):
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


def stream(tokenizer, ids, context=()):
    decoder = StreamDecoder(tokenizer, context)
    return [decoder.push(token) for token in ids] + [decoder.flush()]


@given(TEXTS)
def test_any_text_comes_through(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    parts = stream(tokenizer, ids)
    assert ("".join(parts), parts[-1]) == (tokenizer.decode(ids), "")
    assert not any("\ufffd" in part or len(part) > len(" the") for part in parts)  # each comes as soon as it is complete


def test_flush_begins_anew(tokenizer, encode):
    decoder, ids = StreamDecoder(tokenizer), encode("漢")
    decoder.push(ids[-3])
    assert decoder.flush() == "\ufffd"
    assert ("".join(decoder.push(token) for token in ids), decoder.flush()) == ("漢", "")


def test_a_stray_byte_after_a_split_character_takes_nothing_back(tokenizer, encode):
    character = encode("漢")[-3:]
    parts = stream(tokenizer, [*character, character[0], encode("the the")[-1]])
    assert parts[:4] == ["", "", "漢", ""]
    assert parts[4].startswith("\ufffd")
    assert parts[4].lstrip("\ufffd") == " the"


def test_context_keeps_the_space_before_the_first_word(tokenizer, encode):
    *context, last = encode("the the")
    assert stream(tokenizer, [last], context) == [" the", ""]


def test_cost_of_a_step_does_not_grow(tokenizer, encode, monkeypatch):
    lengths, decode = [], tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids: lengths.append(len(ids)) or decode(ids))
    the, stray, special = encode("the 漢 " * 50), encode("a漢")[-3], encode(EOS)[-1]
    for context, ids in (([], the), (the, the), (the, [special] * 60 + the), ([], [stray] * 60)):
        assert "".join(stream(tokenizer, ids, context)).strip() == decode(ids).strip()
    assert max(lengths) <= 20
