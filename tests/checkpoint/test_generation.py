import json

import pytest

from trt_kvcache.checkpoint import GenerationDefaults

ON = {"repetition_penalty": 1.05, "no_repeat_ngram_size": 3, "typical_p": 0.9, "forced_eos_token_id": 0, "suppress_tokens": [4]}
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
        (ON, {"ignored": NAMES}),
    ],
)
def test_what_is_read(tmp_path, values, expected):
    if values is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(values))
    assert GenerationDefaults.open(tmp_path) == GenerationDefaults(**expected)
