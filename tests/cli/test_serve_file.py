import json

import pytest

from trt_kvcache.session.session import InferenceSession

from .conftest import SHIPPED

REFERENCE = ("--engine", "reference", "--max-batch-size", 2, "--max-new-tokens", 6, "--max-sequence-length", 64)
STRAIGHT, ALICE = "The rabbit-hole went straight", "Alice was beginning to"


@pytest.fixture
def serve(run, tmp_path):
    def serve_lines(*lines, name="prompts.txt", options=REFERENCE):
        (tmp_path / name).write_bytes(b"\n".join(line.encode() if isinstance(line, str) else line for line in lines))
        output = tmp_path / "answers.jsonl"
        done = run("serve-file", SHIPPED, tmp_path / name, "-o", output, *options)
        return done, [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()] if output.exists() else None

    return serve_lines


def test_lines_of_text(serve, tmp_path):
    done, answers = serve(STRAIGHT + "\r", " ", ALICE, "“Oh", STRAIGHT, options=(*REFERENCE, "--prompt-cache", 1))
    assert (done.code, done.out) == (0, f"{tmp_path / 'answers.jsonl'}: 4 of 4 answers\n")
    assert done.err.startswith("ReferenceEngine on cpu: prefill ")
    assert " more were in the cache) in " in done.err
    assert sorted(answer["index"] for answer in answers) == [0, 1, 2, 3]
    texts = {answer["index"]: answer["text"] for answer in answers}
    assert texts[0] == texts[3]
    with InferenceSession.from_model(SHIPPED, engine="reference", max_sequence_length=64) as session:
        assert texts[1] == "".join(event.text for event in session.generate(ALICE, max_new_tokens=6))


def test_json_lines_in_order_of_finishing(serve):
    lines = ["\ufeff" + json.dumps(ALICE), '{"prompt": [0, 5, 9], "max_new_tokens": 2, "temperature": 1.5, "seed": 4}', "[0, 5, 9]"]
    done, answers = serve(*lines, name="prompts.jsonl", options=(*REFERENCE, "--no-stats"))
    assert (done.code, done.err) == (0, "")
    assert [(answer["index"], len(answer["tokens"])) for answer in answers] == [(1, 2), (0, 6), (2, 6)]


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        (['"a"', "{"], "prompts.jsonl:2: expected JSON in UTF-8, got an error: Expecting property name"),
        (['"a"', str([1] * 65)], "prompts.jsonl:2: prompt 0 has 65 tokens; that exceeds max_sequence_length=64."),
    ],
)
def test_a_file_that_cannot_be_served(serve, lines, complaint):
    done, answers = serve(*lines, name="prompts.jsonl")
    assert (done.code, done.out, done.err.count("\n"), answers) == (1, "", 1, None)
    assert complaint in done.err


def test_ctrl_c_keeps_what_is_finished(serve, monkeypatch):
    step, calls = InferenceSession.step, []

    def interrupted(self):
        calls.append(1)
        moved = step(self) if len(calls) < 7 else []
        if len(calls) == 7:
            raise KeyboardInterrupt
        return moved

    monkeypatch.setattr(InferenceSession, "step", interrupted)
    done, answers = serve(f'"{STRAIGHT}"', '{"prompt": "a", "max_new_tokens": 2}', f'"{STRAIGHT}"', name="prompts.jsonl")
    assert (done.code, done.err, done.out[-17:]) == (130, "interrupted\n", ": 2 of 3 answers\n")
    assert [(answer["index"], len(answer["tokens"])) for answer in answers] == [(1, 2), (0, 6)]
