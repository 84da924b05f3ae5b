from types import SimpleNamespace

import pytest

from trt_kvcache.checkpoint import Tokenizer
from trt_kvcache.session import InferenceSession

from .conftest import GOLDEN, SHIPPED, change_json

ASKED, ANSWERED = "The rabbit-hole went straight", " on like a tunnel for some"
NEXT = "Alice was beginning"
HELP = "/undo takes the last turn back, /reset starts anew, /stats shows times and bytes, /quit ends"
BEGIN = 0  # the token that the shipped model puts before each text
TEMPLATE = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}<assistant>"


@pytest.fixture
def turns(monkeypatch):
    """The turns of a chat, as the session saw them: a prompt, whether to reuse what the cache holds, and the answer."""
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
    """Run a chat of these lines."""

    def chat_here(*lines, folder=SHIPPED, terminal=False, options=()):
        type_lines(*lines, terminal=terminal)
        return run("chat", folder, "--engine", "reference", "--max-new-tokens", 12, *options)

    return chat_here


@pytest.fixture
def template(model):
    """Return a function that gives the model a chat template."""
    return lambda text: change_json(model / "tokenizer_config.json", lambda config: config.update(chat_template=text))


def test_a_pipe_gets_answers_only_and_without_a_template_the_text_goes_on(chat, turns):
    done = chat(ASKED, "", "  ", NEXT)
    assert (done.code, done.err) == (0, "")
    assert done.out == f"{turns[0].answer}\n{turns[1].answer}\n"
    assert turns[0].answer.startswith(ANSWERED)
    assert [turn.prompt for turn in turns] == [ASKED, f"{ASKED}{turns[0].answer}\n{NEXT}"]
    assert [turn.reuse for turn in turns] == [False, True]


def test_with_a_template_the_messages_go_through_it(chat, turns, model, template):
    template(TEMPLATE)
    chat(ASKED, NEXT, folder=model)
    texts = [f"<user>{ASKED}<assistant>", f"<user>{ASKED}<assistant>{turns[0].answer}<user>{NEXT}<assistant>"]
    tokenizer = Tokenizer.open(model)
    assert [turn.prompt for turn in turns] == [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    assert [turn.reuse for turn in turns] == [False, True]
    assert turns[0].prompt[0] != BEGIN, "the template writes the special tokens itself"


def test_commands(chat, turns):
    done = chat(ASKED, NEXT, "/undo", "Alice", "/undo", "/undo", "/undo", "/what", ASKED, "/reset", NEXT, "/quit", "more")
    assert [turn.prompt for turn in turns[2:]] == [f"{ASKED}{turns[0].answer}\nAlice", ASKED, NEXT]
    expected = [f"Taken back: {NEXT}", "Taken back: Alice", f"Taken back: {ASKED}", "There is no turn to take back."]
    assert done.err.splitlines()[:4] == expected
    assert HELP in done.err
    assert done.err.endswith("The conversation starts anew.\n")


def test_ctrl_c_stops_the_answer_only(chat, interrupt_after):
    interrupt_after(3)
    done = chat(ASKED, "/stats", "/undo")
    assert (done.code, done.out) == (0, " on like\n")
    stopped, statistics, undo = done.err.splitlines()
    assert (stopped, undo) == ("(stopped)", f"Taken back: {ASKED}")
    assert "decode 2 tokens" in statistics


def test_a_full_cache_ends_an_answer_and_fails_the_next_turn(chat):
    done = chat(ASKED, NEXT, options=("--max-sequence-length", 16))
    warning, error = done.err.splitlines()
    assert (done.code, done.out.count("\n")) == (1, 1)
    assert warning == "warning: the cache is full: max_sequence_length=16 ended the text of slot 0."
    assert error.startswith("error: prompt 0 has ")


@pytest.mark.parametrize("terminal", [False, True])
def test_a_template_that_refuses(chat, model, template, terminal):
    template("{{ raise_exception('no user here') }}")
    done = chat(ASKED, folder=model, terminal=terminal)
    assert (done.code, done.out) == (0 if terminal else 1, "")
    assert "the chat template refuses these messages: no user here\n" in done.err, "and no advice that does not help"


