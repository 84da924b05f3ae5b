import json

import pytest

from trt_kvcache.checkpoint import GenerationDefaults
from trt_kvcache.errors import CheckpointError

ON = {"repetition_penalty": 1.05, "no_repeat_ngram_size": 3, "typical_p": 0.9, "forced_eos_token_id": 0, "suppress_tokens": [4]}
OFF = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "typical_p": 1.0, "num_beams": 1, "suppress_tokens": [], "top_h": None}
NAMES = ("repetition_penalty", "no_repeat_ngram_size", "suppress_tokens", "forced_eos_token_id")
ALL = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({**ALL, "eos_token_id": [7, 9], "transformers_version": "5.0.0"}, {**ALL, "eos_token_ids": (7, 9)}),
        (None, {"eos_token_ids": (), "do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}),
        (
            {"temperature": 0.0, "top_k": 0, "min_p": 0, "eos_token_id": 3},
            {"temperature": 0.0, "top_k": 0, "min_p": 0.0, "eos_token_ids": (3,)},
        ),
        (ON, {"ignored": NAMES}),  # greedy: typical_p plays no part
        ({"do_sample": True, **OFF}, {"do_sample": True, "ignored": ()}),
    ],
)
def test_what_is_read(tmp_path, values, expected):
    if values is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(values))
    assert GenerationDefaults.open(tmp_path) == GenerationDefaults(**expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"temperature": -1}', "temperature: expected a finite number > 0, got -1"),
        ('{"min_p": 1}', r"min_p: expected a number in \[0, 1\), got 1"),
        ("{", "expected JSON"),
    ],
)
def test_nonsense_is_refused_with_its_file(tmp_path, text, message):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: {message}"):
        GenerationDefaults.open(tmp_path)
