"""``trt-kvcache chat``: talk to a model in the terminal."""

import sys
from typing import Any

from trt_kvcache.checkpoint.tokenizer import TOKENIZER_FILE
from trt_kvcache.cli import session_flags
from trt_kvcache.cli.console import complain, messages, note, put
from trt_kvcache.cli.sampling_flags import MaxNewTokens, MinP, SamplingFlags, Seed, Stop, Temperature, TopK, TopP
from trt_kvcache.cli.session_notes import note_statistics, warn_of_full_cache
from trt_kvcache.errors import CapacityError, ConfigError, KVCacheError
from trt_kvcache.generation.prompts import Prompt
from trt_kvcache.session.session import InferenceSession

_HELP = "/undo removes the last turn, /reset begins a new conversation, /stats shows times and bytes, /quit ends; Ctrl-C stops an answer."


def chat(
    folder: session_flags.Folder,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Seed = None,
    stop: Stop = None,
    engine: session_flags.EngineOption = "auto",
    flavour: session_flags.FlavourOption = "auto",
    cuda_graphs: session_flags.CudaGraphs = True,
    max_sequence_length: session_flags.MaxSequenceLength = None,
    dtype: session_flags.DTypeOption = None,
    attention: session_flags.AttentionOption = None,
) -> None:
    """Talk to a model. A model without a chat template continues your text instead.

    In each turn only what is new is run: the cache keeps the conversation so far.
    """
    options = SamplingFlags(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stop=stop,
    ).options()
    if folder.is_dir() and not (folder / TOKENIZER_FILE).is_file():
        raise ConfigError(f"{folder}: chat needs a {TOKENIZER_FILE}. `trt-kvcache generate --prompt-ids` works on token ids.")
    flags = session_flags.SessionFlags(
        folder=folder,
        engine=engine,
        flavour=flavour,
        cuda_graphs=cuda_graphs,
        max_sequence_length=max_sequence_length,
        dtype=dtype,
        attention=attention,
    )
    with session_flags.open_session(flags.source(slots=1)) as session:
        Conversation(session, options).run()


class Conversation:
    """The turns of a chat, on slot 0 of a session.

    Parameters
    ----------
    session : InferenceSession
        With a tokenizer. Stays its owner's to close.
    options : dict
        Sampling options of each answer.
    """

    def __init__(self, session: InferenceSession, options: dict[str, Any]) -> None:
        self._session = session
        self._options = options
        self._interactive = sys.stdin.isatty()
        #: What was asked, and what was answered.
        self._turns: list[tuple[str, str]] = []

    def run(self) -> None:
        """Read lines until the end of input or ``/quit``."""
        if self._interactive:
            note(_HELP)
        while (line := self._read()) is not None and line not in ("/quit", "/exit"):
            if line.startswith("/"):
                self._command(line)
            elif line:
                self._answer(line)

    def _read(self) -> str | None:
        if self._interactive:
            messages().print("> ", style="bold", end="")
        line = sys.stdin.readline()
        if self._interactive and not line:
            note("")  # the shell prompt starts on a new line
        return line.strip() if line else None

    def _command(self, line: str) -> None:
        if line == "/reset":
            self._turns.clear()
            note("A new conversation begins.")
        elif line == "/undo":
            note(f"Taken back: {self._turns.pop()[0]}" if self._turns else "There is no turn to take back.")
        elif line == "/stats":
            note_statistics(self._session)
        else:
            note(_HELP)

    def _answer(self, line: str) -> None:
        """Print the answer to a line as it is generated. If it fails, or is stopped before its first word, the turn is not kept."""
        answer: list[str] = []
        stopped = False
        try:
            for event in self._session.generate(self._prompt(line), reuse=self._session.cache.active_batch_size == 1, **self._options):
                put(event.text)
                answer.append(event.text)
        except KeyboardInterrupt:
            stopped = True
        except KVCacheError as error:
            if not self._interactive:
                raise
            complain("error:", f"{error} /undo and /reset make room." if isinstance(error, CapacityError) else str(error))
            return
        put("\n")
        if stopped:
            note("(stopped)")
        if answer or not stopped:
            self._turns.append((line, "".join(answer)))
        warn_of_full_cache(self._session)

    def _prompt(self, line: str) -> Prompt:
        """Return the whole conversation; the session runs what its cache does not hold yet."""
        tokenizer = self._session.tokenizer
        assert tokenizer is not None
        if not tokenizer.has_chat_template:
            return "".join(f"{asked}{answered}\n" for asked, answered in self._turns) + line
        messages = [
            message
            for asked, answered in self._turns
            for message in ({"role": "user", "content": asked}, {"role": "assistant", "content": answered})
        ]
        text = tokenizer.apply_chat_template([*messages, {"role": "user", "content": line}])
        return tokenizer.encode(text, add_special_tokens=False)
