"""``trt-kvcache score``: tables and JSON of what the session gives, for texts of the command line, of files and of stdin."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.engine_files import make_engine_folder
from trt_kvcache import InferenceSession, perplexity

from .conftest import CONFIG, GOLDEN, SHIPPED, Run

REFERENCE = ("--engine", "reference")
TEXTS = ["Alice was beginning to get very tired.", "Down the rabbit hole."]


@pytest.fixture(scope="module")
def scores() -> list[Any]:
    with InferenceSession.from_model(SHIPPED, engine="reference", max_batch_size=2, max_logits_per_slot=64) as session:
        return session.score(TEXTS, top_logprobs=2)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("│┃").replace("┃", "│").split("│")]


def test_a_table_of_the_texts_and_the_perplexity_of_all(run: Run, scores: list[Any]):
    done = run("score", SHIPPED, *REFERENCE, "-p", TEXTS[0], "-p", TEXTS[1])
    assert done.code == 0
    rows = [cells(line) for line in done.out.splitlines() if line.startswith("│")]
    assert [[row[0], row[1], row[4]] for row in rows] == [
        [str(index), str(len(score.tokens)), text] for index, (score, text) in enumerate(zip(scores, TEXTS, strict=True))
    ]
    for row, score in zip(rows, scores, strict=True):
        assert float(row[2]) == pytest.approx(score.logprob, rel=1e-3)
        assert float(row[3]) == pytest.approx(score.perplexity, rel=1e-3)
    last = done.out.splitlines()[-1]
    assert last.endswith("tokens of 2 texts; the first token of a text is not scored")
    assert float(last.split()[1]) == pytest.approx(perplexity(scores), rel=1e-3)
    assert done.err.startswith("ReferenceEngine on cpu: prefill ")


def test_a_table_of_the_tokens(run: Run, scores: list[Any]):
    done = run("score", SHIPPED, *REFERENCE, "-p", TEXTS[0], "--tokens", "--top", 2, "--no-stats")
    rows = [cells(line) for line in done.out.splitlines() if line.startswith("│")][:-1]
    assert [int(row[1]) for row in rows] == list(scores[0].tokens)
    assert rows[0][3:] == ["", ""]
    assert rows[3][2] == "' was'"
    for row, value in zip(rows[1:], scores[0].logprobs[1:], strict=True):
        assert float(row[3]) == pytest.approx(value, rel=1e-3, abs=1e-3)
        assert row[4].count(", ") == 1 or "','" in row[4]
    assert done.err == ""


def test_json_is_one_document(run: Run, scores: list[Any]):
    done = run("score", SHIPPED, *REFERENCE, "-p", TEXTS[0], "-p", TEXTS[1], "--json", "--top", 2, "-q")
    found = json.loads(done.out)
    assert [text["prompt"] for text in found["texts"]] == TEXTS
    for index, (text, score) in enumerate(zip(found["texts"], scores, strict=True)):
        assert (text["index"], text["tokens"], text["logprobs"][0], text["top_logprobs"][0]) == (index, list(score.tokens), None, None)
        assert text["logprobs"][1:] == pytest.approx(score.logprobs[1:], rel=1e-3, abs=1e-3)
        assert [[token for token, _ in top] for top in text["top_logprobs"][1:3]] == [
            [token for token, _ in top] for top in score.top_logprobs[1:3]
        ]
        assert (text["logprob"], text["perplexity"]) == pytest.approx((score.logprob, score.perplexity), rel=1e-3)
    assert found["perplexity"] == pytest.approx(perplexity(scores), rel=1e-3)
    assert found["num_scored"] == sum(score.num_scored for score in scores)
    assert (found["engine"], found["statistics"]["decode_steps"]) == ("ReferenceEngine", 0)


def test_texts_of_a_file(run: Run, tmp_path: Path):
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS), encoding="utf-8")
    (tmp_path / "texts.jsonl").write_text(json.dumps({"prompt": TEXTS[0]}) + "\n[0, 5, 9]\n", encoding="utf-8")
    assert [
        text["prompt"] for text in json.loads(run("score", SHIPPED, tmp_path / "texts.txt", *REFERENCE, "--json").out)["texts"]
    ] == TEXTS
    found = json.loads(run("score", SHIPPED, tmp_path / "texts.jsonl", *REFERENCE, "--json").out)["texts"]
    assert (found[0]["prompt"], found[1]["tokens"]) == (TEXTS[0], [0, 5, 9])


def test_texts_of_stdin(run: Run, monkeypatch: pytest.MonkeyPatch):
    import io
    import sys

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\n".join(TEXTS).encode())))
    assert len(json.loads(run("score", SHIPPED, "-", *REFERENCE, "--json").out)["texts"]) == 2


def test_token_ids_without_a_tokenizer(run: Run):
    done = run("score", GOLDEN / "llama", *REFERENCE, "--prompt-ids", "5,7,11", "--tokens", "--max-sequence-length", 9)
    assert done.code == 0
    assert "5 7 11" in done.out


def test_one_token_has_no_perplexity(run: Run):
    done = run("score", SHIPPED, *REFERENCE, "--prompt-ids", "5", "--json")
    [text] = json.loads(done.out)["texts"]
    assert (text["logprobs"], text["perplexity"]) == ([None], None)
    assert "nan" in run("score", SHIPPED, *REFERENCE, "--prompt-ids", "5").out


def test_an_engine_folder_needs_no_option_with_numpy(run: Run, tmp_path: Path, without_gpu: None):
    """The limit of its plan is that of TensorRT alone."""
    few, many = (
        make_engine_folder(SHIPPED, tmp_path / name, max_logits_per_slot=logits).path for name, logits in (("few", 1), ("many", 5))
    )
    ids = ("--prompt-ids", "5,7,11,9,2,1,4", "--json", *REFERENCE)
    found = [json.loads(run("score", folder, *ids).out)["texts"] for folder in (few, many, SHIPPED)]
    assert found[0] == found[1]
    assert found[0][0]["perplexity"] == pytest.approx(found[2][0]["perplexity"], rel=0.01)  # in another dtype
    done = run("score", many, *ids, "--max-logits-per-slot", 3)
    assert (done.code, done.out) == (1, "")
    assert "--max-logits-per-slot: expected with a Hugging Face folder only" in done.complaint


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "Invalid value for TEXTS: expected a file of texts, --prompt or --prompt-ids, got none of them."),
        (["--prompt", "a", "--top", 2], 2, "Invalid value for --top: expected --tokens or --json with it, which show them."),
        (["-", "-p", "x"], 2, "expected a file or --prompt, got both."),
        (["--prompt-ids", CONFIG.vocab_size], 1, f"prompts[0][0]: expected an integer from 0 to {CONFIG.vocab_size - 1}"),
        (
            ["--prompt-ids", "1,2", "--max-sequence-length", 4, "--max-logits-per-slot", 5],
            1,
            "--max-logits-per-slot: expected at most --max-prefill-length=4",
        ),
    ],
)
def test_what_cannot_be_scored(run: Run, arguments: list[Any], code: int, message: str):
    done = run("score", SHIPPED, *REFERENCE, *arguments)
    assert (done.code, done.out) == (code, "")
    assert message in done.complaint
