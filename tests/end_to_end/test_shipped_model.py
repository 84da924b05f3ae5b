"""The model in examples/tiny-llama: small, complete, and generating readable text through the cache."""

import json
import re

import pytest
import tokenizers
from safetensors import safe_open

from tests.paths import SHIPPED as FOLDER
from trt_kvcache import InferenceSession

TEXT = (FOLDER / "text.txt").read_text(encoding="utf-8")

WORDS = 200
# Prompt and continuation must fit into 512 tokens; no stretch of 200 words of the text takes more than 475.
MAX_NEW_TOKENS = 490
SENTENCE_STARTS = [
    "Alice was beginning",
    "The rabbit-hole went straight",
    "Either the well was",
    "She took down a",
    "Down, down, down. Would",
]
NOT_IN_THE_TEXT = ["Once upon a time", "The capital of France is"]


def words(text):
    """Return the words of a text in lower case, without punctuation around them."""
    return re.findall(r"[a-z]+(?:'[a-z]+)*", text.lower())


def share_known(generated):
    """Return which part of the words occurs in the training text."""
    known = set(words(TEXT))
    return sum(word in known for word in generated) / len(generated)


def share_distinct(generated):
    """Return which part of the 3-grams is distinct."""
    grams = list(zip(generated, generated[1:], generated[2:], strict=False))
    return len(set(grams)) / len(grams)


@pytest.fixture(scope="module")
def session():
    with InferenceSession.from_model(FOLDER, engine="reference", max_batch_size=1, max_sequence_length=512, dtype="float32") as session:
        yield session


@pytest.mark.parametrize("prompt", [*SENTENCE_STARTS, *NOT_IN_THE_TEXT])
def test_two_hundred_greedy_words_are_readable(session, prompt):
    text = "".join(event.text for event in session.generate([prompt], max_new_tokens=MAX_NEW_TOKENS))
    generated = words(text)[:WORDS]
    assert len(generated) == WORDS
    assert share_known(generated) >= 0.9
    assert share_distinct(generated) >= 0.6


@pytest.mark.parametrize("prompt", SENTENCE_STARTS)
def test_a_sentence_start_is_continued_as_in_the_text(session, prompt):
    start = TEXT.index(prompt) + len(prompt)
    text = "".join(event.text for event in session.generate([prompt], max_new_tokens=40))
    assert text == TEXT[start : start + len(text)]


def test_the_end_of_the_text_ends_the_generation(session):
    prompt = "No, it'll never do to ask"
    *before, last = session.generate([prompt], max_new_tokens=100)
    assert last.token == 1
    assert last.finish_reason == "stop"
    assert (prompt + "".join(event.text for event in [*before, last])).strip() == TEXT[TEXT.index(prompt) :].strip()


def test_the_measures_see_unknown_words():
    assert share_known(words("Alice and Xerxes, Bartleby")) == pytest.approx(0.5)


def test_the_measures_see_loops():
    assert share_distinct(words("the cat sat " * 10)) == pytest.approx(3 / 28)
    assert share_distinct(words(TEXT)[:WORDS]) > 0.9


def test_the_folder_is_small():
    files = {path.name: path.stat().st_size for path in FOLDER.iterdir() if path.is_file()}
    assert sum(files.values()) <= 85 * 2**10, files


def test_the_folder_is_complete():
    files = {path.name for path in FOLDER.iterdir() if path.is_file()}
    of_the_model = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert files == {"README.md", "text.txt", "train.py", *of_the_model}


def test_weights_are_float16_and_tied():
    with safe_open(FOLDER / "model.safetensors", framework="numpy") as weights:
        assert weights.metadata() == {"format": "pt"}
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"F16"}  # noqa: SIM118 - not iterable itself
        assert "lm_head.weight" not in weights.keys()  # noqa: SIM118
    assert json.loads((FOLDER / "config.json").read_text())["tie_word_embeddings"] is True


def test_the_configuration_is_spelled_as_transformers_5_writes_it():
    config = json.loads((FOLDER / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["LlamaForCausalLM"], "float16")
    assert config["rope_parameters"] == {"rope_theta": 10000.0, "rope_type": "default"}
    assert not {"torch_dtype", "rope_theta", "rope_scaling"} & set(config)
    assert json.loads((FOLDER / "generation_config.json").read_text())["eos_token_id"] == config["eos_token_id"]


@pytest.mark.parametrize(
    ("text", "decoded"), [*((text, text) for text in ("", " ", "Alice", TEXT, "#1 {~}\n", "</s")), ("na\N{CAT FACE}ïve\t!", "nave!")]
)
def test_ascii_survives_the_tokenizer_and_other_bytes_are_unknown(text, decoded):
    tokenizer = tokenizers.Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    ids = tokenizer.encode(text).ids
    assert ids[0] == tokenizer.token_to_id("<s>") == 0
    assert tokenizer.token_to_id("</s>") == 1
    assert max(ids) < tokenizer.get_vocab_size() == 320
    assert ids.count(tokenizer.token_to_id("<unk>")) == len(text.encode()) - len(decoded)
    assert tokenizer.decode(ids) == decoded
