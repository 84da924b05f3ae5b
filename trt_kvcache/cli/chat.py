"""``trt-kvcache chat``: a chat in the terminal."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.checkpoint.model_files import CONFIG_FILE, TOKENIZER_FILE, ModelFiles
from trt_kvcache.cli import session_flags
from trt_kvcache.cli.chat_flags import ChatFlags, Template
from trt_kvcache.cli.chat_input import LineReader, open_reader
from trt_kvcache.cli.console import complain, count, message_of, note, put
from trt_kvcache.cli.conversation import Conversation
from trt_kvcache.cli.option_groups import Changed
from trt_kvcache.cli.sampling_flags import SamplingFlags, note_unused, with_drawn_seed
from trt_kvcache.cli.session_flags import SessionFlags
from trt_kvcache.cli.session_notes import note_seeds, note_statistics, warn_of_full_cache
from trt_kvcache.engine_folder.folder import is_engine_folder
from trt_kvcache.errors import CapacityError, ConfigError, KVCacheError
from trt_kvcache.generation.prompts import Prompt
from trt_kvcache.generation.sampling import with_options
from trt_kvcache.session.session import InferenceSession

_HELP = """\
/undo          remove the last question and its answer
/reset         begin a new conversation
/system TEXT   set the system message; without TEXT, remove it
/save FILE     write the conversation to a file
/load FILE     continue the conversation of a file
/stats         show times, bytes and the seed
/quit          end; so does Ctrl-D
Ctrl-C stops an answer. Alt-Enter begins a new line."""
_WELCOME = "/help lists the commands, Ctrl-C stops an answer, Ctrl-D ends."
_ASK = "Press Ctrl-C again to leave, or type on. /save FILE keeps the conversation."


def chat(
    folder: session_flags.Folder,
    chat_flags: ChatFlags,
    sampling: Annotated[SamplingFlags, Changed("max_new_tokens", default=512)],
    flags: SessionFlags,
    draft: session_flags.DraftOption = None,
    draft_tree: session_flags.DraftTreeOption = None,
) -> None:
    """Chat with a model.

    Each turn runs only the new tokens: the cache keeps the conversation so far. A model without a chat template continues your text.
    Type /help for the commands.
    """
    options = sampling.options()
    folder = session_flags.located(folder)
    if folder.is_dir() and not ModelFiles(folder).has(TOKENIZER_FILE):
        _check_family(folder)
        raise ConfigError(f"{folder}: chat needs a {TOKENIZER_FILE}. `trt-kvcache generate --prompt-ids` works on token ids.")
    with session_flags.open_session(flags.source(folder, slots=1).replace(draft=draft, draft_tree=draft_tree)) as session:
        template = chat_flags.template(session.tokenizer)
        Chat(session, template, options, open_reader(), adapter=flags.request_adapter).run()


def _check_family(folder: Path) -> None:
    """Raise an error if the model is not supported: it comes before an error about missing files."""
    if not is_engine_folder(folder) and ModelFiles(folder).has(CONFIG_FILE):
        Checkpoint.read_config(folder)


class Chat:
    """A chat on slot 0 of a session."""

    def __init__(
        self,
        session: InferenceSession,
        template: Template | None,
        options: dict[str, Any],
        reader: LineReader,
        *,
        adapter: str | None = None,
    ) -> None:
        self._session = session
        self._adapter = adapter
        self._template = template
        note_unused(options, session.defaults)
        self._params = with_drawn_seed(with_options(session.defaults, options))
        self._reader = reader
        self._conversation = Conversation(None if template is None else template.system)
        self._commands: dict[str, Callable[[str], None]] = {
            "/undo": self._undo,
            "/reset": self._reset,
            "/system": self._set_system,
            "/save": self._save,
            "/load": self._load,
            "/stats": self._show_statistics,
        }

    def run(self) -> None:
        """Read messages until the end of input or ``/quit``. At a terminal, a single Ctrl-C does not end it."""
        if self._reader.interactive:
            note(_WELCOME)
        asked_to_leave = False
        while True:
            try:
                line = self._reader.read()
                if line is None or line in ("/quit", "/exit"):
                    return
                if line:
                    asked_to_leave = False
                    self._take(line)
            except KeyboardInterrupt:
                if asked_to_leave or not self._reader.interactive:
                    raise
                asked_to_leave = True
                note(_ASK)

    def _take(self, line: str) -> None:
        """Run a command or answer a message. At a terminal, an error is printed and the chat goes on."""
        name, _, rest = line.partition(" ")
        try:
            if not line.startswith("/"):
                self._answer(line)
            elif name in self._commands:
                self._commands[name](rest.strip())
            else:
                note(_HELP)
        except (KVCacheError, OSError) as error:
            if not self._reader.interactive:
                raise
            complain("error:", f"{error} /undo and /reset make room." if isinstance(error, CapacityError) else message_of(error))

    def _answer(self, question: str) -> None:
        """Print the answer as it is generated. The turn is dropped if it fails, or is stopped before its first token."""
        pieces: list[str] = []
        reason = None
        stopped = False
        try:
            reuse = self._session.cache.active_batch_size == 1
            for event in self._session.generate(self._prompt(question), self._params, reuse=reuse, adapter=self._adapter):
                pieces.append(event.text)
                put(event.text)
                reason = event.finish_reason
        except KeyboardInterrupt:
            stopped = True
        if pieces or not stopped:
            self._conversation.turns.append((question, "".join(pieces)))
        put("\n")
        if stopped:
            note("(stopped)")
        elif reason == "length" and self._reader.interactive and len(pieces) == self._params.max_new_tokens:
            note(f"(ended after {count(len(pieces), 'token')}: --max-new-tokens)")
        warn_of_full_cache(self._session)

    def _prompt(self, question: str) -> Prompt:
        """Return the whole conversation; the session runs only tokens that its cache does not hold."""
        if self._template is None:
            return self._conversation.text(question)
        return self._template.tokens(self._conversation.messages(question))

    def _undo(self, _: str) -> None:
        turns = self._conversation.turns
        note(f"Taken back: {turns.pop()[0]}" if turns else "There is no turn to take back.")

    def _reset(self, _: str) -> None:
        self._conversation.turns.clear()
        note("A new conversation begins.")

    def _set_system(self, text: str) -> None:
        if self._template is None:
            note("A model without a chat template has no system message.")
            return
        self._conversation.system = text or None
        note("The system message is set." if text else "The system message is removed.")

    def _save(self, name: str) -> None:
        if path := _path(name, "/save"):
            self._conversation.save(path)
            note(f"{path}: {count(len(self._conversation.turns), 'turn')} saved.")

    def _load(self, name: str) -> None:
        if path := _path(name, "/load"):
            self._conversation.load(path)
            note(f"{path}: {count(len(self._conversation.turns), 'turn')} loaded.")

    def _show_statistics(self, _: str) -> None:
        note_statistics(self._session)
        note_seeds([self._params.seed] if self._params.temperature > 0 else [])


def _path(name: str, command: str) -> Path | None:
    if not name:
        note(f"{command} needs the name of a file.")
        return None
    return Path(os.path.expanduser(name))
