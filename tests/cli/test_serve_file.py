from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from trt_kvcache.session.session import InferenceSession

from .conftest import GOLDEN, SHIPPED, change_json

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
    assert (done.code, done.out) == (0, "")
    summary, statistics = done.err.splitlines()
    assert summary == f"{tmp_path / 'answers.jsonl'}: 4 of 4 answers"
    assert statistics.startswith("ReferenceEngine on cpu: prefill ")
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
    assert (done.code, done.err.count("\n")) == (0, 1)
    assert [(answer["index"], len(answer["tokens"]), answer["finish_reason"]) for answer in answers] == [
        (1, 2, "length"),
        (0, 6, "length"),
        (2, 6, "length"),
    ]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
@pytest.mark.parametrize(("name", "code"), [("full", 1), ("null", 0)])
def test_answers_into_a_device(run, tmp_path, name, code):
    (tmp_path / "prompts.txt").write_text(ALICE)
    done = run("serve-file", SHIPPED, tmp_path / "prompts.txt", "-o", f"/dev/{name}", *REFERENCE, "--no-stats")
    assert done.code == code
    assert ("error: /dev/full: No space left on device." in done.err) == (name == "full")


def test_a_model_without_a_tokenizer(serve):
    options = ("--engine", "reference", "--max-new-tokens", 3, "--ignore-eos")
    _, answers = serve("[5, 7]", "[1]", name="prompts.jsonl", model=GOLDEN / "llama", options=options)
    assert [(answer["text"], len(answer["tokens"])) for answer in answers] == [("", 3)] * 2


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ([""], "prompts.jsonl: expected at least one prompt, got none."),
        ([b'"\xff"'], "prompts.jsonl: expected UTF-8, got byte 0xff at 1."),
        (['"a"', "{"], "prompts.jsonl:2: expected JSON, got a syntax error: Expecting property name"),
        (["[" * 9**5], "prompts.jsonl:1: expected JSON, got values nested more than 100 deep."),
        (['"\\ud800"'], "prompts.jsonl:1: expected JSON in UTF-8, got an error: 'utf-8' codec can't encode"),
        (["5"], 'prompts.jsonl:1: expected a text, a list of token ids, or an object with one as "prompt" or with "messages", got 5.'),
        (['{"text": "a"}'], 'with "messages", got {"text": "a"}.'),
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
        assert done.err.startswith(f"error: {tmp_path / 'none'}")
        assert done.err.endswith(": No such file or directory.\n")
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
    assert (done.code, done.out) == (130, "")
    assert done.err.endswith(": 2 of 3 answers\ninterrupted\n")
    assert [(answer["index"], len(answer["tokens"])) for answer in answers] == [(1, 2), (0, 6)]


def test_progress_is_shown_on_a_terminal(serve, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    done, _ = serve(STRAIGHT, ALICE, STRAIGHT)
    assert done.code == 0
    assert "3/3 18 tokens" in done.err


def test_stdin_and_stdout(run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(f"{ALICE}\n{STRAIGHT}\n".encode())))
    done = run("serve-file", SHIPPED, "-", "-o", "-", *REFERENCE)
    assert done.code == 0
    assert sorted(json.loads(line)["index"] for line in done.out.splitlines()) == [0, 1]
    assert "stdout: 2 of 2 answers" in done.err


def test_stdout_is_the_default(run, tmp_path):
    (tmp_path / "prompts.txt").write_text(ALICE)
    done = run("serve-file", SHIPPED, tmp_path / "prompts.txt", *REFERENCE)
    assert json.loads(done.out)["index"] == 0


def test_fields_of_the_prompt_come_back_with_the_answer(serve):
    _, (answer,) = serve(json.dumps({"custom_id": "a-1", "prompt": ALICE, "metadata": {"x": [1]}}), name="prompts.jsonl")
    assert list(answer) == ["custom_id", "metadata", "index", "text", "tokens", "finish_reason"]
    assert (answer["custom_id"], answer["metadata"]) == ("a-1", {"x": [1]})


def test_log_probabilities_are_part_of_the_answer(serve):
    _, answers = serve('"a"', '{"prompt": "b", "logprobs": 2}', name="prompts.jsonl", options=(*REFERENCE, "--logprobs", 0))
    assert {answer["index"]: {len(token["top"]) for token in answer["logprobs"]} for answer in answers} == {0: {0}, 1: {2}}
    assert all([token["token"] for token in answer["logprobs"]] == answer["tokens"] for answer in answers)


def test_a_drawn_seed_is_part_of_the_answer_and_gives_it_again(serve):
    options = (*REFERENCE, "--temperature", 2)
    _, (answer,) = serve(ALICE, options=options)
    _, (again,) = serve(ALICE, options=(*options, "--seed", answer["seed"], "--overwrite"))
    assert again == answer


def test_a_field_that_looks_like_a_misspelt_option_is_warned_of(serve):
    done, answers = serve('{"prompt": "a", "max_new_token": 2}', '{"prompt": "b", "max_new_token": 2}', name="prompts.jsonl")
    assert done.err.splitlines()[0].endswith(
        "prompts.jsonl:1: max_new_token: no sampling option (max_new_tokens is one); it is repeated in the answer."
    )
    assert done.err.count("warning") == 1
    assert all(answer["max_new_token"] == 2 for answer in answers)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_field_that_is_an_option_of_openai_is_warned_of(serve, name):
    done, _ = serve(json.dumps({"prompt": "a", name: 2}), name="prompts.jsonl")
    assert f"prompts.jsonl:1: {name}: no sampling option (max_new_tokens is one); it is repeated in the answer." in done.err


@pytest.mark.parametrize(("line", "noted"), [('{"prompt": "a"}', True), ('{"prompt": "a", "temperature": 0.5}', False)])
def test_a_flag_of_drawn_tokens_is_noted_unless_a_prompt_draws(serve, line, noted):
    done, _ = serve(line, name="prompts.jsonl", options=(*REFERENCE, "--top-p", 0.5))
    assert ("--top-p: without effect" in done.err) is noted


class TestMessages:
    @pytest.fixture
    def with_template(self, model):
        template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
        change_json(model / "tokenizer_config.json", lambda config: config.update(chat_template=template))
        return model

    @pytest.fixture
    def asked(self, monkeypatch):
        seen = []
        submit = InferenceSession.submit

        def note(session, prompt, params, **options):
            seen.append(prompt if isinstance(prompt, str) else session.tokenizer.decode(prompt, skip_special_tokens=False))
            return submit(session, prompt, params, **options)

        monkeypatch.setattr(InferenceSession, "submit", note)
        return seen

    def test_texts_and_conversations_are_answered_by_the_template(self, serve, with_template, asked):
        said = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
        lines = ['"A"', json.dumps({"messages": said}), json.dumps({"messages": said[1:]}), "[5, 9]"]
        serve(*lines, name="prompts.jsonl", model=with_template, options=(*REFERENCE, "--system", "B"))
        assert asked[:3] == ["<system>B<user>A<assistant>", "<system>S<user>U<assistant>", "<system>B<user>U<assistant>"]
        assert "<user>" not in asked[3]

    def test_raw_continues_texts_and_refuses_conversations(self, serve, with_template, asked):
        serve(ALICE, model=with_template, options=(*REFERENCE, "--raw"))
        assert asked == [ALICE]
        done, _ = serve('{"messages": [{"role": "user", "content": "U"}]}', name="p.jsonl", options=(*REFERENCE, "--overwrite"))
        assert (done.code, done.out) == (1, "")
        assert "p.jsonl:1: messages: expected a model with a chat template, and no --raw." in done.err


class TestContinue:
    LINES = ('{"prompt": "a", "id": 7}', '{"prompt": "b", "id": 8}', '{"prompt": "c", "id": 9}')

    def answer(self, index, **other):
        return json.dumps({"id": 7 + index, "index": index, "text": "kept", "tokens": [1], "finish_reason": "stop", **other}) + "\n"

    @pytest.fixture
    def again(self, run, tmp_path):
        """Return a function that serves the lines where the file of answers has this text."""

        def serve_again(text, *options):
            (tmp_path / "answers.jsonl").write_bytes(text.encode())
            (tmp_path / "prompts.jsonl").write_text("\n".join(self.LINES))
            output = tmp_path / "answers.jsonl"
            done = run("serve-file", SHIPPED, tmp_path / "prompts.jsonl", "-o", output, *REFERENCE, *options)
            return done, (tmp_path / "answers.jsonl").read_text()

        return serve_again

    def test_missing_answers_are_appended(self, again):
        done, text = again(self.answer(1), "--continue")
        assert done.code == 0
        assert "3 of 3 answers" in done.err
        assert text.startswith(self.answer(1))
        assert [json.loads(line)["index"] for line in text.splitlines()] == [1, 0, 2]

    def test_a_line_that_was_cut_off_is_answered_again(self, again):
        _, text = again(self.answer(0) + self.answer(1)[:-9], "--continue")
        assert text.startswith(self.answer(0))
        assert sorted(json.loads(line)["index"] for line in text.splitlines()) == [0, 1, 2]

    def test_nothing_is_opened_if_all_are_there(self, again, monkeypatch):
        monkeypatch.setattr(InferenceSession, "from_model", lambda *arguments, **options: pytest.fail("opened"))
        before = "".join(map(self.answer, range(3)))
        done, text = again(before, "--continue")
        assert (done.code, text) == (0, before)
        assert "3 answers, all there" in done.err

    def test_answers_are_not_replaced_unless_told_so(self, again):
        before = self.answer(0)
        done, text = again(before)
        assert (done.code, text) == (2, before)
        assert "has answers already. Give --continue to keep them, or --overwrite." in done.complaint
        _, text = again(before, "--overwrite")
        assert "kept" not in text
        assert text.count("\n") == 3

    @pytest.mark.parametrize(
        ("text", "complaint"),
        [
            ("notes\n", "answers.jsonl:1: expected an answer of serve-file, got notes. Nothing was changed."),
            ("[1]\n", "answers.jsonl:1: expected an answer of serve-file"),
            ('{"index": 3, "id": 7}\n', "answers.jsonl: answer 3: there is no such prompt in"),
            ('{"index": "0", "id": 7}\n', "answers.jsonl: answer 0: there is no such prompt in"),
            ('{"index": 0, "id": 8}\n', "answers.jsonl: answer 0: there is no such prompt in"),
        ],
    )
    def test_answers_to_other_prompts_are_refused(self, again, text, complaint):
        done, after = again(text, "--continue")
        assert (done.code, after) == (1, text)
        assert complaint in done.err

    @pytest.mark.parametrize("options", [("--continue", "--overwrite"), ("--continue", "-o", "-")])
    def test_options_that_contradict_each_other(self, run, tmp_path, options):
        (tmp_path / "prompts.txt").write_text("a")
        assert run("serve-file", SHIPPED, tmp_path / "prompts.txt", *options, *REFERENCE).code == 2


def test_the_timeline_of_a_run_is_drawn(run, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Alice\nThe rabbit\nDown\n")
    picture = tmp_path / "slots.svg"
    done = run(
        "serve-file", SHIPPED, prompts, "-o", tmp_path / "out.jsonl", "--timeline", picture, "--max-batch-size", 2, "--max-new-tokens", 3
    )
    assert done.code == 0
    assert "3 requests in 2 slots" in picture.read_text()


def test_a_timeline_that_cannot_be_saved_is_refused_before_the_work(run, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Alice\n")
    done = run("serve-file", SHIPPED, prompts, "-o", tmp_path / "out.jsonl", "--timeline", tmp_path / "slots.jpg")
    assert done.code == 1
    assert "expected a file name that ends with .svg, .png, .pdf" in " ".join(done.err.split())
    assert not (tmp_path / "out.jsonl").exists()
