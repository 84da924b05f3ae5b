from types import SimpleNamespace

import pytest

from trt_kvcache.checkpoint import Tokenizer
from trt_kvcache.session.session import InferenceSession

from .conftest import SHIPPED, change_json

ASKED, ANSWERED = "The rabbit-hole went straight", " on like a tunnel for some"
NEXT = "Alice was beginning"
HELP = "/undo takes the last turn back, /reset starts anew, /stats shows times and bytes, /quit ends"
TEMPLATE = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}<assistant>"


@pytest.fixture
def turns(monkeypatch):
    seen = []
    generate = InferenceSession.generate

    def note(self, prompt, *, reuse, **options):
        seen.append(SimpleNamespace(prompt=prompt, reuse=reuse, answer=""))
        for event in generate(self, prompt, reuse=reuse, **options):
            seen[-1].answer += event.text
            yield event

    monkeypatch.setattr(InferenceSession, "generate", note)
    return seen


@pytest.fixture
def chat(run, type_lines):

    def chat_here(*lines, folder=SHIPPED):
        type_lines(*lines)
        return run("chat", folder, "--engine", "reference", "--max-new-tokens", 12)

    return chat_here


def test_a_pipe_gets_answers_only_and_without_a_template_the_text_goes_on(chat, turns):
    done = chat(ASKED, "", "  ", NEXT)
    assert (done.code, done.err) == (0, "")
    assert done.out == f"{turns[0].answer}\n{turns[1].answer}\n"
    assert turns[0].answer.startswith(ANSWERED)
    assert [turn.prompt for turn in turns] == [ASKED, f"{ASKED}{turns[0].answer}\n{NEXT}"]
    assert [turn.reuse for turn in turns] == [False, True]


def test_with_a_template_the_messages_go_through_it(chat, turns, model):
    change_json(model / "tokenizer_config.json", lambda config: config.update(chat_template=TEMPLATE))
    chat(ASKED, NEXT, folder=model)
    texts = [f"<user>{ASKED}<assistant>", f"<user>{ASKED}<assistant>{turns[0].answer}<user>{NEXT}<assistant>"]
    tokenizer = Tokenizer.open(model)
    assert [turn.prompt for turn in turns] == [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    assert [turn.reuse for turn in turns] == [False, True]


def test_commands(chat, turns):
    done = chat(ASKED, NEXT, "/undo", "Alice", "/undo", "/undo", "/undo", "/what", ASKED, "/reset", NEXT, "/quit", "more")
    assert [turn.prompt for turn in turns[2:]] == [f"{ASKED}{turns[0].answer}\nAlice", ASKED, NEXT]
    expected = [f"Taken back: {NEXT}", "Taken back: Alice", f"Taken back: {ASKED}", "There is no turn to take back."]
    assert done.err.splitlines()[:4] == expected
    assert HELP in done.err
    assert done.err.endswith("The conversation starts anew.\n")


def test_ctrl_c_stops_the_answer_only(chat, monkeypatch):
    generate = InferenceSession.generate

    def generate_a_little(*arguments, **options):
        answer = generate(*arguments, **options)
        for _ in range(3):
            yield next(answer)
        raise KeyboardInterrupt

    monkeypatch.setattr(InferenceSession, "generate", generate_a_little)
    done = chat(ASKED, "/stats", "/undo")
    assert (done.code, done.out) == (0, " on like\n")
    stopped, statistics, undo = done.err.splitlines()
    assert (stopped, undo) == ("(stopped)", f"Taken back: {ASKED}")
    assert "decode 2 tokens" in statistics
