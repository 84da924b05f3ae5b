from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.adapters import write_two_adapters
from trt_kvcache.checkpoint import Checkpoint, Tokenizer
from trt_kvcache.cli.chat_input import PlainReader
from trt_kvcache.session.session import InferenceSession

from .conftest import GOLDEN, NO_GPU, SHIPPED, Run, change_json

TypeLines = Callable[..., None]

CHAT = ("chat", SHIPPED, "--engine", "reference", "--max-new-tokens", 12)
ASKED, ANSWERED = "The rabbit-hole went straight", " on like a tunnel for some"
NEXT = "Alice was beginning"
BEGIN = 0  # the token that the shipped model puts before each text
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}<assistant>"
    "{% endif %}"
)


@dataclass
class Turn:
    """One call of ``chat``: the prompt, whether the tokens in the slot are reused, the adapter, and the answer of the session."""

    prompt: Any
    reuse: bool
    adapter: str | None
    answer: str = ""


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[Turn]:
    """The turns of a chat, as the session saw them."""
    seen: list[Turn] = []
    generate = InferenceSession.generate

    def note(self: InferenceSession, prompt: Any, params: Any, *, reuse: bool, adapter: str | None) -> Iterator[Any]:
        seen.append(Turn(prompt, reuse, adapter))
        for event in generate(self, prompt, params, reuse=reuse, adapter=adapter):
            seen[-1].answer += event.text
            yield event

    monkeypatch.setattr(InferenceSession, "generate", note)
    return seen


def test_a_pipe_gets_answers_only(run: Run, type_lines: TypeLines, turns: list[Turn]):
    type_lines(ASKED, "", "  ", NEXT)
    done = run(*CHAT)
    assert (done.code, done.err) == (0, "")
    assert done.out == f"{turns[0].answer}\n{turns[1].answer}\n"
    assert turns[0].answer.startswith(ANSWERED)


def test_without_a_template_the_text_goes_on(run: Run, type_lines: TypeLines, turns: list[Turn]):
    type_lines(ASKED, NEXT)
    run(*CHAT)
    assert [turn.prompt for turn in turns] == [ASKED, f"{ASKED}{turns[0].answer}\n{NEXT}"]
    assert [turn.reuse for turn in turns] == [False, True]


def test_with_a_template_the_messages_are_rendered_by_it(run: Run, type_lines: TypeLines, turns: list[Turn], model: Path):
    change_json(model / "tokenizer_config.json", lambda config: config.update(chat_template=TEMPLATE))
    tokenizer = Tokenizer.open(model)
    assert tokenizer is not None
    type_lines(ASKED, NEXT)
    run("chat", model, *CHAT[2:])
    texts = [f"<user>{ASKED}<assistant>", f"<user>{ASKED}<assistant>{turns[0].answer}<user>{NEXT}<assistant>"]
    assert [turn.prompt for turn in turns] == [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    assert [turn.reuse for turn in turns] == [False, True]
    assert turns[0].prompt[0] != BEGIN, "the template writes the special tokens itself"


@pytest.mark.parametrize("template", [None, TEMPLATE], ids=["no template", "template"])
def test_only_what_is_new_is_run(run: Run, type_lines: TypeLines, model: Path, template: str | None):
    if template:
        change_json(model / "tokenizer_config.json", lambda config: config.update(chat_template=template))
    type_lines(ASKED, "/stats", NEXT, "/stats")
    before, after = run("chat", model, *CHAT[2:]).err.splitlines()
    assert "in the cache" not in before
    run_first, run_in_all = (int(line.split("prefill ")[1].split()[0]) for line in (before, after))
    reused = int(after.split("tokens (")[1].split()[0])
    assert reused >= run_first, "the first turn stays in the cache"
    assert run_in_all - run_first < 25, "the second turn alone is run"


def test_undo_removes_the_last_turn(run: Run, type_lines: TypeLines, turns: list[Turn]):
    type_lines(ASKED, NEXT, "/undo", "Alice", "/undo", "/undo", "/undo")
    done = run(*CHAT)
    assert turns[2].prompt == f"{ASKED}{turns[0].answer}\nAlice"
    expected = [f"Taken back: {NEXT}", "Taken back: Alice", f"Taken back: {ASKED}", "There is no turn to take back."]
    assert done.err.splitlines() == expected


def test_reset_starts_a_new_conversation(run: Run, type_lines: TypeLines, turns: list[Turn]):
    type_lines(ASKED, "/reset", NEXT)
    assert run(*CHAT).err == "A new conversation begins.\n"
    assert [turn.prompt for turn in turns] == [ASKED, NEXT]


@pytest.mark.parametrize("command", ["/quit", "/exit"])
def test_quit_ends(run: Run, type_lines: TypeLines, command: str):
    type_lines(ASKED, command, NEXT)
    assert run(*CHAT).out.count("\n") == 1


def test_an_unknown_command_shows_the_known_ones(run: Run, type_lines: TypeLines):
    type_lines("/what")
    shown = run(*CHAT).err
    commands = ("/undo", "/reset", "/system", "/save", "/load", "/stats", "/quit")
    assert [line.split()[0] for line in shown.splitlines() if line.startswith("/")] == list(commands)


def test_a_terminal_gets_help_and_a_prompt(run: Run, type_lines: TypeLines):
    type_lines(ASKED, terminal=True)
    done = run(*CHAT)
    assert done.code == 0
    assert done.err.startswith("/help lists the commands")
    assert done.err.endswith("> \n"), "the end of input leaves the shell a line of its own"
    assert done.out.startswith(ANSWERED)


class TestCtrlC:
    @pytest.fixture
    def interrupt_after(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
        """Return a function that has Ctrl-C come after so many pieces of the first answer."""

        def plan(pieces: int) -> None:
            generate, used = InferenceSession.generate, False

            def generate_a_little(self: InferenceSession, *arguments: Any, **options: Any) -> Iterator[Any]:
                nonlocal used
                events = generate(self, *arguments, **options)
                if used:
                    yield from events
                used = True
                for _ in range(pieces):
                    yield next(events)
                raise KeyboardInterrupt

            monkeypatch.setattr(InferenceSession, "generate", generate_a_little)

        return plan

    def test_ctrl_c_stops_the_answer_only(self, run: Run, type_lines: TypeLines, interrupt_after: Callable[[int], None]):
        interrupt_after(3)
        type_lines(ASKED, "/stats", "/undo")
        done = run(*CHAT)
        assert (done.code, done.out) == (0, " on like\n")
        stopped, statistics, undo = done.err.splitlines()
        assert stopped == "(stopped)"
        assert "decode 2 tokens" in statistics
        assert undo == f"Taken back: {ASKED}"

    def test_ctrl_c_before_the_first_word_leaves_no_turn(self, run: Run, type_lines: TypeLines, interrupt_after: Callable[[int], None]):
        interrupt_after(0)
        type_lines(ASKED, "/undo")
        assert run(*CHAT).err.splitlines() == ["(stopped)", "There is no turn to take back."]

    def test_ctrl_c_at_the_prompt_of_a_pipe_ends_the_chat(self, run: Run, monkeypatch: pytest.MonkeyPatch, type_lines: TypeLines):
        def interrupt(self: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(PlainReader, "read", interrupt)
        type_lines()
        done = run(*CHAT)
        assert (done.code, done.err) == (130, "interrupted\n")

    def test_ctrl_c_at_the_prompt_of_a_terminal_asks_once(
        self, run: Run, monkeypatch: pytest.MonkeyPatch, type_lines: TypeLines, turns: list[Turn]
    ):
        """Ctrl-C, a message, Ctrl-C, Ctrl-C."""
        inputs = iter([None, ASKED, None, None])

        def read(self: object) -> str:
            line = next(inputs)
            if line is None:
                raise KeyboardInterrupt
            return line

        monkeypatch.setattr(PlainReader, "read", read)
        type_lines(terminal=True)
        done = run(*CHAT)
        assert (done.code, len(turns)) == (130, 1)
        asked = "Press Ctrl-C again to leave, or type on. /save FILE keeps the conversation."
        assert [line for line in done.err.splitlines() if "Ctrl-C again" in line or line == "interrupted"] == [asked, asked, "interrupted"]


class TestSystemMessage:
    @pytest.fixture
    def with_template(self, model: Path) -> tuple[object, ...]:
        change_json(model / "tokenizer_config.json", lambda config: config.update(chat_template=TEMPLATE))
        return ("chat", model, *CHAT[2:])

    def texts(self, turns: list[Turn]) -> list[str]:
        tokenizer = Tokenizer.open(SHIPPED)
        assert tokenizer is not None
        return [tokenizer.decode(turn.prompt, skip_special_tokens=False) for turn in turns]

    def test_it_comes_first(self, run: Run, type_lines: TypeLines, turns: list[Turn], with_template: tuple[object, ...]):
        type_lines(ASKED)
        run(*with_template, "--system", "Be brief.")
        assert self.texts(turns) == [f"<system>Be brief.<user>{ASKED}<assistant>"]

    def test_it_can_be_set_and_removed(self, run: Run, type_lines: TypeLines, turns: list[Turn], with_template: tuple[object, ...]):
        type_lines("/system Be kind.", ASKED, "/system", "/reset", ASKED)
        done = run(*with_template)
        assert done.err.splitlines()[:2] == ["The system message is set.", "The system message is removed."]
        assert self.texts(turns) == [f"<system>Be kind.<user>{ASKED}<assistant>", f"<user>{ASKED}<assistant>"]

    def test_raw_continues_the_text(self, run: Run, type_lines: TypeLines, turns: list[Turn], with_template: tuple[object, ...]):
        type_lines(ASKED)
        run(*with_template, "--raw")
        assert [turn.prompt for turn in turns] == [ASKED]

    def test_a_model_without_a_template_has_none(self, run: Run, type_lines: TypeLines):
        type_lines("/system Be kind.")
        assert run(*CHAT).err == "A model without a chat template has no system message.\n"
        assert run(*CHAT, "--system", "Be kind.").err == ("error: --system: expected a model with a chat template, this one has none.\n")


class TestFiles:
    def test_a_saved_conversation_goes_on_in_another_chat(self, run: Run, type_lines: TypeLines, turns: list[Turn], tmp_path: Path):
        type_lines(ASKED, f"/save {tmp_path / 'talk.json'}")
        assert run(*CHAT).err == f"{tmp_path / 'talk.json'}: 1 turn saved.\n"
        type_lines(f"/load {tmp_path / 'talk.json'}", NEXT)
        assert run(*CHAT).err == f"{tmp_path / 'talk.json'}: 1 turn loaded.\n"
        assert turns[1].prompt == f"{ASKED}{turns[0].answer}\n{NEXT}"

    def test_a_file_that_cannot_be_read_or_written_is_an_error(self, run: Run, type_lines: TypeLines, tmp_path: Path):
        type_lines(f"/load {tmp_path / 'none.json'}", f"/save {tmp_path / 'no' / 'folder'}", "/save", "/stats", terminal=True)
        done = run(*CHAT)
        assert done.code == 0
        assert done.err.count(": No such file or directory.\n") == 2
        assert "/save needs the name of a file." in done.err
        type_lines(f"/load {tmp_path / 'none.json'}")
        assert run(*CHAT).code == 1

    def test_the_home_folder_may_be_written_as_a_tilde(
        self, run: Run, type_lines: TypeLines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setenv("HOME", str(tmp_path))
        type_lines("/save ~/talk.json")
        run(*CHAT)
        assert (tmp_path / "talk.json").is_file()


def test_an_answer_of_the_greatest_length_is_said_to_be_cut(run: Run, type_lines: TypeLines):
    type_lines(ASKED, terminal=True)
    assert "(ended after 12 tokens: --max-new-tokens)" in run(*CHAT).err


def test_the_seed_is_shown_if_tokens_are_drawn(run: Run, type_lines: TypeLines, turns: list[Turn]):
    type_lines(ASKED, "/stats")
    seed = int(run(*CHAT, "--temperature", 2).err.splitlines()[-1].removeprefix("seed: "))
    run_again = ("--temperature", 2, "--seed", seed)
    type_lines(ASKED, "/stats")
    assert run(*CHAT, *run_again).err.endswith(f"seed: {seed}\n")
    assert turns[0].answer == turns[1].answer


class TestAFullCache:
    def test_a_full_cache_ends_an_answer_with_a_warning(self, run: Run, type_lines: TypeLines):
        type_lines(ASKED)
        done = run(*CHAT, "--max-sequence-length", 16)
        assert done.code == 0
        assert done.err == "warning: the cache is full: --max-sequence-length=16 ended the text of slot 0.\n"

    def test_a_full_cache_fails_the_next_turn_of_a_pipe(self, run: Run, type_lines: TypeLines):
        type_lines(ASKED, NEXT)
        done = run(*CHAT, "--max-sequence-length", 16)
        assert done.code == 1
        assert done.err.splitlines()[-1].startswith("error: prompt 0 has ")

    def test_a_full_cache_lets_a_terminal_go_on(self, run: Run, type_lines: TypeLines):
        type_lines(ASKED, NEXT, "/undo", NEXT, terminal=True)
        done = run(*CHAT, "--max-sequence-length", 16)
        assert done.code == 0
        assert "exceeds --max-sequence-length=16. Nothing was changed. /undo and /reset make room." in done.err
        assert f"Taken back: {ASKED}" in done.err, "the turn that failed was none"
        assert done.out.splitlines()[1].startswith(" to get very")


@pytest.mark.parametrize("terminal", [False, True])
def test_a_template_that_refuses_the_messages_fails_the_turn(run: Run, type_lines: TypeLines, model: Path, terminal: bool):
    change_json(model / "tokenizer_config.json", lambda config: config.update(chat_template="{{ raise_exception('no user here') }}"))
    type_lines(ASKED, terminal=terminal)
    done = run("chat", model, *CHAT[2:])
    assert (done.code, done.out) == (0 if terminal else 1, "")
    assert "the chat template refuses these messages: no user here\n" in done.err, "and no advice that does not help"


def test_a_model_without_a_tokenizer_is_refused_before_the_weights_are_loaded(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(InferenceSession, "from_model", lambda *arguments, **options: pytest.fail("loaded"))
    done = run("chat", GOLDEN / "llama")
    assert done.code == 1
    assert done.err.startswith(f"error: {GOLDEN / 'llama'}: chat needs a tokenizer.json.")


def test_a_model_that_is_not_supported_is_named_before_its_missing_tokenizer(run: Run, tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}')
    done = run("chat", tmp_path)
    assert done.code == 1
    assert done.err.startswith(f"error: {tmp_path / 'config.json'}: model_type: 'gpt2' is not supported.")


@pytest.mark.usefixtures("without_gpu")
def test_the_fallback_to_the_reference_engine_is_warned_of_once(run: Run, type_lines: TypeLines):
    type_lines(ASKED, NEXT)
    assert (
        run("chat", SHIPPED, "--max-new-tokens", 3).err
        == f"warning: running the NumPy reference engine: {NO_GPU}; torch is not installed.\n"
    )


def test_input_that_is_not_utf8_is_no_error(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "lines").write_bytes(b"Alice \xff\xfe\n")
    with (tmp_path / "lines").open(encoding="utf-8") as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        done = run(*CHAT)
    assert done.code == 0
    assert done.out.strip()


def test_wrong_usage(run: Run):
    done = run("chat", "no/such/folder", "--top-p", 2)
    assert done.code == 2
    assert "Invalid value for --top-p: expected 0 < top_p <= 1, got 2.0." in done.complaint


def test_a_chat_with_one_of_several_adapters(run: Run, turns: list[Turn], type_lines: TypeLines, tmp_path: Path) -> None:
    with Checkpoint.open(SHIPPED) as checkpoint:
        adapters = write_two_adapters(tmp_path, checkpoint.config)
    flags = [f"--adapters={name}={folder}" for name, folder in adapters.items()]
    type_lines(ASKED, NEXT)
    assert run(*CHAT, *flags, "--adapter", "poems").code == 0
    assert [turn.adapter for turn in turns] == ["poems", "poems"]
    assert turns[0].answer != ANSWERED
