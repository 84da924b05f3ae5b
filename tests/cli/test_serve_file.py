from __future__ import annotations

import json
import sys

import pytest

from trt_kvcache.session.session import InferenceSession

from .conftest import GOLDEN, SHIPPED

REFERENCE = ("--engine", "reference", "--max-batch-size", 2, "--max-new-tokens", 6, "--max-sequence-length", 64)
STRAIGHT, ALICE = "The rabbit-hole went straight", "Alice was beginning to"


@pytest.fixture
def serve(run, tmp_path):
    """Return a function that serves a file of these lines, and returns the outcome and the answers, None where there is no file."""

    def serve_lines(*lines, name="prompts.txt", model=SHIPPED, options=REFERENCE):
        (tmp_path / name).write_bytes(b"\n".join(line.encode() if isinstance(line, str) else line for line in lines))
        output = tmp_path / "answers.jsonl"
        done = run("serve-file", model, tmp_path / name, "-o", output, *options)
        return done, [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()] if output.exists() else None

    return serve_lines


def test_each_line_of_a_text_file_is_answered(serve, tmp_path):
    done, answers = serve(STRAIGHT + "\r", " ", ALICE, "“Oh", STRAIGHT, options=(*REFERENCE, "--prompt-cache", 1))
    assert (done.code, done.out) == (0, f"{tmp_path / 'answers.jsonl'}: 4 of 4 answers\n")
    assert done.err.startswith("ReferenceEngine on cpu: prefill ")
    assert " more were in the cache) in " in done.err
    assert [sorted(answer) for answer in answers] == [["finish_reason", "index", "text", "tokens"]] * 4
    assert sorted(answer["index"] for answer in answers) == [0, 1, 2, 3]
    texts = {answer["index"]: answer["text"] for answer in answers}
    assert texts[0] == texts[3]
    with InferenceSession.from_model(SHIPPED, engine="reference", max_sequence_length=64) as session:
        assert texts[1] == "".join(event.text for event in session.generate(ALICE, max_new_tokens=6))


def test_json_lines_in_order_of_finishing(serve):
    lines = ["\ufeff" + json.dumps(ALICE), '{"prompt": [0, 5, 9], "max_new_tokens": 2, "temperature": 1.5, "seed": 4}', "[0, 5, 9]"]
    done, answers = serve(*lines, name="prompts.jsonl", options=(*REFERENCE, "--no-stats"))
    assert (done.code, done.err) == (0, "")
    assert [(answer["index"], len(answer["tokens"]), answer["finish_reason"]) for answer in answers] == [
        (1, 2, "length"),
        (0, 6, "length"),
        (2, 6, "length"),
    ]


def test_a_model_without_a_tokenizer(serve):
    options = ("--engine", "reference", "--max-new-tokens", 3, "--ignore-eos")
    _, answers = serve("[5, 7]", "[1]", name="prompts.jsonl", model=GOLDEN / "llama", options=options)
    assert [(answer["text"], len(answer["tokens"])) for answer in answers] == [("", 3)] * 2


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ([""], "prompts.jsonl: expected at least one prompt, got none."),
        ([b'"\xff"'], "prompts.jsonl: expected UTF-8, got byte 0xff at 1."),
        (['"a"', "{"], "prompts.jsonl:2: expected JSON in UTF-8, got an error: Expecting property name"),
        (["[" * 9**5], "prompts.jsonl:1: expected JSON in UTF-8, got an error:"),
        (['"\\ud800"'], "prompts.jsonl:1: expected JSON in UTF-8, got an error: 'utf-8' codec can't encode"),
        (["5"], 'prompts.jsonl:1: expected a text, a list of token ids, or an object with one as "prompt", got 5.'),
        (['{"text": "a"}'], 'prompts.jsonl:1: expected a text, a list of token ids, or an object with one as "prompt", got {"text": "a"}.'),
        (['{"prompt": "a", "self": 1}'], "prompts.jsonl:1: generate: unknown option self. Expected "),
        (['{"prompt": "a", "top_p": "b"}'], "prompts.jsonl:1: SamplingParams.top_p: expected 0 < top_p <= 1, got 'b'."),
        (["[1, [2]]"], "prompts.jsonl:1: prompts[0][1]: expected an integer"),
        (["[]"], "prompts.jsonl:1: prompts[0]: expected at least one token, got none."),
        (['"a"', str([1] * 65)], "prompts.jsonl:2: prompt 0 has 65 tokens; that exceeds max_sequence_length=64."),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bad_lines_are_refused_with_their_number(serve, lines, complaint):
    done, answers = serve(*lines, name="prompts.jsonl")
    assert (done.code, done.out, done.err.count("\n"), answers) == (1, "", 1, None)
    assert complaint in done.err


def test_files_that_cannot_be_opened(run, tmp_path):
    (tmp_path / "prompts.txt").write_text("a")
    done = run("serve-file", SHIPPED, tmp_path / "prompts.txt", "-o", tmp_path / "prompts.txt", *REFERENCE)
    assert done.code == 2
    assert "expected another file than the prompts" in done.complaint
    for prompts, output in (("none.txt", "out"), ("prompts.txt", "none/out")):
        done = run("serve-file", SHIPPED, tmp_path / prompts, "-o", tmp_path / output, *REFERENCE)
        assert (done.code, done.out) == (1, "")
        assert done.err.startswith("error: [Errno 2] No such file or directory: ")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("prompts.txt", "a")]


@pytest.mark.parametrize("after", [False, True], ids=["before the step", "after the step"])
def test_ctrl_c_keeps_the_answers_that_are_finished(serve, monkeypatch, after):
    step, calls = InferenceSession.step, []

    def interrupted(self):
        calls.append(1)
        moved = step(self) if len(calls) < 7 or after else []
        if len(calls) == 7 - after:
            raise KeyboardInterrupt
        return moved

    monkeypatch.setattr(InferenceSession, "step", interrupted)
    done, answers = serve(f'"{STRAIGHT}"', '{"prompt": "a", "max_new_tokens": 2}', f'"{STRAIGHT}"', name="prompts.jsonl")
    assert (done.code, done.err, done.out[-17:]) == (130, "interrupted\n", ": 2 of 3 answers\n")
    assert [(answer["index"], len(answer["tokens"])) for answer in answers] == [(1, 2), (0, 6)]


def test_progress_is_shown_on_a_terminal(serve, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    done, _ = serve(STRAIGHT, ALICE, STRAIGHT)
    assert done.code == 0
    assert "3/3 18 tokens" in done.err
