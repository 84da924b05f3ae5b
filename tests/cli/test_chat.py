from __future__ import annotations

from types import SimpleNamespace

import pytest

from trt_kvcache.checkpoint import Tokenizer
from trt_kvcache.session import InferenceSession

from .conftest import GOLDEN, NO_GPU, SHIPPED, change_json

ASKED, ANSWERED = "The rabbit-hole went straight", " on like a tunnel for some"
NEXT = "Alice was beginning"
HELP = "/undo takes the last turn back, /reset starts anew, /stats shows times and bytes, /quit ends"
BEGIN = 0  # the token that the shipped model puts before each text
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}<assistant>"
    "{% endif %}"
)


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


@pytest.mark.parametrize("text", [None, TEMPLATE], ids=["no template", "template"])
def test_only_what_is_new_is_run(chat, model, template, text):
    template(text)
    before, after = chat(ASKED, "/stats", NEXT, "/stats", folder=model).err.splitlines()
    assert "in the cache" not in before
    run_first, run_in_all = (int(line.split("prefill ")[1].split()[0]) for line in (before, after))
    reused = int(after.split("tokens (")[1].split()[0])
    assert reused >= run_first, "the first turn stays in the cache"
    assert run_in_all - run_first < 24, "the second turn alone is run"


def test_undo_takes_the_last_turn_back(chat, turns):
    done = chat(ASKED, NEXT, "/undo", "Alice", "/undo", "/undo", "/undo")
    assert turns[2].prompt == f"{ASKED}{turns[0].answer}\nAlice"
    expected = [f"Taken back: {NEXT}", "Taken back: Alice", f"Taken back: {ASKED}", "There is no turn to take back."]
    assert done.err.splitlines() == expected


def test_reset_starts_anew(chat, turns):
    assert chat(ASKED, "/reset", NEXT).err == "The conversation starts anew.\n"
    assert [turn.prompt for turn in turns] == [ASKED, NEXT]


@pytest.mark.parametrize("end", ["/quit", "/exit"])
def test_quit_ends_and_an_unknown_command_shows_the_known_ones(chat, end):
    done = chat("/what", ASKED, end, NEXT)
    assert done.out.count("\n") == 1
    assert done.err.startswith(HELP)


def test_a_terminal_gets_help_and_a_prompt(chat):
    done = chat(ASKED, terminal=True)
    assert done.code == 0
    assert done.err.startswith(HELP)
    assert done.err.endswith("> > \n"), "the end of input leaves the shell a line of its own"
    assert done.out.startswith(ANSWERED)


def test_ctrl_c_stops_the_answer_only(chat, interrupt_after):
    interrupt_after(3)
    done = chat(ASKED, "/stats", "/undo")
    assert (done.code, done.out) == (0, " on like\n")
    stopped, statistics, undo = done.err.splitlines()
    assert (stopped, undo) == ("(stopped)", f"Taken back: {ASKED}")
    assert "decode 2 tokens" in statistics


def test_ctrl_c_before_the_first_word_leaves_no_turn(chat, interrupt_after):
    interrupt_after(0)
    assert chat(ASKED, "/undo").err.splitlines() == ["(stopped)", "There is no turn to take back."]


def test_a_full_cache_ends_an_answer_with_a_warning_and_fails_the_next_turn_of_a_pipe(chat):
    done = chat(ASKED, NEXT, options=("--max-sequence-length", 16))
    warning, error = done.err.splitlines()
    assert (done.code, done.out.count("\n")) == (1, 1)
    assert warning == "warning: the cache is full: max_sequence_length=16 ended the text of slot 0."
    assert error.startswith("error: prompt 0 has ")


def test_a_full_cache_leaves_somebody_at_a_terminal_the_choice(chat):
    done = chat(ASKED, NEXT, "/undo", NEXT, terminal=True, options=("--max-sequence-length", 16))
    assert done.code == 0
    assert "exceeds max_sequence_length=16. Nothing was changed. /undo and /reset make room." in done.err
    assert f"Taken back: {ASKED}" in done.err, "the turn that failed was none"
    assert done.out.splitlines()[1].startswith(" to get very")


@pytest.mark.parametrize("terminal", [False, True])
def test_a_template_that_refuses(chat, model, template, terminal):
    template("{{ raise_exception('no user here') }}")
    done = chat(ASKED, folder=model, terminal=terminal)
    assert (done.code, done.out) == (0 if terminal else 1, "")
    assert "the chat template refuses these messages: no user here\n" in done.err, "and no advice that does not help"


def test_a_model_without_a_tokenizer_is_refused_before_it_is_loaded(chat, monkeypatch):
    monkeypatch.setattr(InferenceSession, "from_model", lambda *arguments, **options: pytest.fail("loaded"))
    done = chat(folder=GOLDEN / "llama")
    assert (done.code, done.err.startswith(f"error: {GOLDEN / 'llama'}: chat needs a tokenizer.json.")) == (1, True)


@pytest.mark.usefixtures("without_gpu")
def test_auto_warns_once(run, type_lines):
    type_lines(ASKED, NEXT)
    assert run("chat", SHIPPED, "--max-new-tokens", 3).err == f"warning: running the NumPy reference engine: {NO_GPU}.\n"


def test_what_is_not_utf8_on_its_way_in_is_no_error(run, monkeypatch, tmp_path):
    (tmp_path / "lines").write_bytes(b"Alice \xff\xfe\n")
    with (tmp_path / "lines").open(encoding="utf-8") as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        done = run("chat", SHIPPED, "--engine", "reference", "--max-new-tokens", 2)
    assert done.code == 0
    assert done.out.strip()
