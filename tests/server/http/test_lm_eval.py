"""lm-eval's client ``local-completions``: a task of our own, with the log-likelihoods that the session gives."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest

from tests.server.engines import MODEL, source
from tests.server.http.running import NAME, serving

TASK = """
task: local_choice
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
doc_to_choice: "{{{{choices}}}}"
target_delimiter: ""
metric_list:
  - metric: acc
"""

DOCUMENTS = [
    {"question": "Alice was", "choices": [" beginning to get very", " a queen of hearts"], "answer": 0},
    {"question": "The Queen", "choices": [" of Hearts", " zzzz"], "answer": 0},
    {"question": "Down the", "choices": [" xyzxyz", " rabbit hole"], "answer": 1},
]


def need_lm_eval() -> None:
    missing = [name for name in ("lm_eval", "datasets", "transformers") if importlib.util.find_spec(name) is None]
    if missing and os.environ.get("TRT_KVCACHE_REQUIRE_SERVE") == "1":
        pytest.fail(f"{missing[0]} is not installed", pytrace=False)
    if missing:
        pytest.skip(f"{missing[0]} is not installed: `make test-serve` installs it")


@pytest.mark.long
@pytest.mark.filterwarnings("default")
def test_a_task_has_the_scores_of_the_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    need_lm_eval()
    for name in ("HF_HOME", "HF_DATASETS_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / "hf"))
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    data = tmp_path / "documents.jsonl"
    data.write_text("".join(json.dumps(one) + "\n" for one in DOCUMENTS))
    (tmp_path / "task.yaml").write_text(TASK.format(data=data))
    import lm_eval
    from lm_eval.tasks import TaskManager

    with serving(4, max_sequence_length=128) as server:
        arguments = f"model={NAME},base_url={server.url}/v1/completions,tokenizer={MODEL},num_concurrent=1,max_retries=1,max_length=128"
        found = lm_eval.simple_evaluate(
            model="local-completions",
            model_args=arguments,
            tasks=["local_choice"],
            task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
            log_samples=True,
            bootstrap_iters=0,
        )
        prefilled, decoded = server.stats().session.prefill_tokens, server.stats().session.decode_steps
    samples = sorted(found["samples"]["local_choice"], key=lambda sample: sample["doc_id"])
    lengths = 0
    with source(1)() as session:
        for sample, document in zip(samples, DOCUMENTS, strict=True):
            for [[value, greedy]], choice in zip(sample["resps"], document["choices"], strict=True):
                context = session.tokenizer.encode(document["question"], add_special_tokens=False)
                whole = session.tokenizer.encode(document["question"] + choice, add_special_tokens=False)
                [score] = session.score([whole], top_logprobs=1)
                assert float(value) == pytest.approx(sum(score.logprobs[len(context) :]), rel=1e-4)
                likely = [top[0][0] for top in score.top_logprobs[len(context) :]]
                assert str(greedy) == str(likely == whole[len(context) :])
                lengths += len(whole)
    assert 0 <= found["results"]["local_choice"]["acc,none"] <= 1
    assert (prefilled, decoded) == (lengths, 0), "a text is scored in one prefill"
