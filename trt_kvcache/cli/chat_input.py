"""Input of ``chat``: a line editor at a terminal, plain lines otherwise."""

import os
import sys
from typing import Protocol

from trt_kvcache.cli.console import messages, note

_PROMPT = "> "


class LineReader(Protocol):
    """Reads messages of the user."""

    @property
    def interactive(self) -> bool:
        """True at a terminal."""

    def read(self) -> str | None:
        """Return the next message without white space around it, or None at the end. Ctrl-C raises ``KeyboardInterrupt``."""


class PlainReader:
    """Reads lines from stdin: a pipe, a file, or a terminal that cannot edit."""

    def __init__(self) -> None:
        self.interactive = sys.stdin.isatty()

    def read(self) -> str | None:
        """Return the next line, or None at the end."""
        if self.interactive:
            messages().print(_PROMPT, style="bold", end="")
        line = sys.stdin.readline()
        if self.interactive and not line:
            note("")  # the shell prompt starts on a new line
        return line.strip() if line else None


class EditingReader:
    """Reads messages at a terminal, with arrow keys, history, and pasted text of several lines."""

    interactive = True

    def __init__(self) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
        from prompt_toolkit.output import create_output

        keys = KeyBindings()

        @keys.add("escape", "enter")
        def insert_line_end(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        @keys.add("c-c")
        @keys.add("<sigint>")
        def clear_or_interrupt(event: KeyPressEvent) -> None:
            """Ctrl-C clears the line; on an empty line it interrupts."""
            if event.current_buffer.text:
                event.current_buffer.reset()
            else:
                event.app.exit(exception=KeyboardInterrupt())

        self._session: PromptSession[str] = PromptSession(_PROMPT, key_bindings=keys, output=create_output(stdout=sys.stderr))

    def read(self) -> str | None:
        """Return the next message, or None after Ctrl-D."""
        try:
            return self._session.prompt().strip()
        except EOFError:
            return None


def open_reader() -> LineReader:
    """Return a reader for stdin."""
    can_edit = sys.stdin.isatty() and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    return EditingReader() if can_edit else PlainReader()
