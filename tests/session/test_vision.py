"""Sessions of models with a vision tower: of every engine, equal to those of the text decoder as a model of its own."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest

import trt_kvcache
from tests.golden.weights import VISION, VISION_SEEDS
from tests.helpers.assertions import raises
from tests.helpers.models import write_text_decoder
from tests.sweeps import one_of_each_family
from trt_kvcache import ChatPrompt
from trt_kvcache.errors import ConfigError

SIZES = {"max_batch_size": 3, "max_sequence_length": 24, "max_prefill_length": 5}
PROMPTS = [[5, 9, 2, 14, 8, 3, 11, 6, 1, 4, 7, 10], [4, 1], [7, 3, 9, 12, 2, 2, 15]]
OPTIONS = [{}, {"quantize": "int8"}, {"kv_dtype": "int8", "attention": "plugin"}]


def answers(folder: Path, engine: str, **options: object) -> tuple[list[list[int]], np.ndarray]:
    """Return the tokens of a ragged batch, and the logits of one prompt."""
    if engine == "torch":
        pytest.importorskip("torch").set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about rounding
        with trt_kvcache.load(folder, engine=engine, dtype="float32", **SIZES, **options) as session:
            tokens: list[list[int]] = [[], [], []]
            for event in session.generate(PROMPTS, max_new_tokens=6, ignore_eos=True):
                tokens[event.index].append(event.token)
            return tokens, session.prefill(PROMPTS[:1])[0].copy()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("engine", ["numpy", "torch"])
@pytest.mark.parametrize("name", one_of_each_family(VISION_SEEDS))
def test_answers_are_those_of_the_text_decoder(tmp_path: Path, name: str, engine: str, options: dict[str, object]) -> None:
    tokens, logits = answers(VISION / name, engine, **options)
    text_tokens, text_logits = answers(write_text_decoder(tmp_path / "text", name), engine, **options)
    assert tokens == text_tokens
    np.testing.assert_array_equal(logits, text_logits)


def test_its_end_tokens_end_an_answer() -> None:
    with trt_kvcache.load(VISION / "gemma3", engine="numpy", **SIZES) as session:
        assert session.eos_token_ids == (3, 7)


def test_an_image_is_refused_before_anything_runs() -> None:
    part = "messages[0].content[0]"
    with raises(ConfigError, part, expected="text", got="'image'", says="The text decoder alone runs, without image input."):
        ChatPrompt([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]}])
