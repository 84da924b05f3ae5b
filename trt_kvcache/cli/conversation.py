"""``Conversation``: the messages of a chat, in memory and in a file."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trt_kvcache._util.atomic_file import atomic_file
from trt_kvcache._util.json_text import JSONTextError, parse_json
from trt_kvcache.errors import ConfigError


class Conversation:
    """An optional system message, then questions and answers in turn."""

    def __init__(self, system: str | None = None) -> None:
        self.system = system
        self.turns: list[tuple[str, str]] = []

    def messages(self, question: str | None = None) -> list[dict[str, str]]:
        """Return all messages, oldest first, with an optional new question."""
        said = [] if self.system is None else [_message("system", self.system)]
        for asked, answered in self.turns:
            said += [_message("user", asked), _message("assistant", answered)]
        return said if question is None else [*said, _message("user", question)]

    def text(self, question: str) -> str:
        """Return the conversation as one text, for a model without a chat template."""
        return "".join(f"{asked}{answered}\n" for asked, answered in self.turns) + question

    def save(self, path: Path) -> None:
        """Write all messages to a JSON file. An existing one is replaced once the new one is complete."""
        with atomic_file(path) as file:
            file.write(json.dumps({"messages": self.messages()}, ensure_ascii=False, indent=2).encode() + b"\n")

    def load(self, path: Path) -> None:
        """Replace the conversation by a saved one; unchanged if the file has none. A list of messages is accepted too."""
        try:
            found = parse_json(path.read_bytes())
        except JSONTextError as error:
            raise ConfigError(f"{path}: {error}.") from None
        said = found.get("messages") if isinstance(found, dict) else found
        self.system, self.turns = _parse(said, path)


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _parse(said: Any, path: Path) -> tuple[str | None, list[tuple[str, str]]]:
    """Return the system message and the turns."""
    wrong = ConfigError(f"{path}: expected messages of a user and an assistant in turn, after a system message if there is one.")
    if not isinstance(said, Sequence) or not all(isinstance(message, dict) for message in said):
        raise wrong
    pairs = [(message.get("role"), message.get("content")) for message in said]
    if not all(isinstance(content, str) for _, content in pairs):
        raise wrong
    system = None
    if pairs and pairs[0][0] == "system":
        system, pairs = pairs[0][1], pairs[1:]
    if [role for role, _ in pairs] != ["user", "assistant"] * (len(pairs) // 2):
        raise wrong
    texts = [str(content) for _, content in pairs]
    return system, list(zip(texts[::2], texts[1::2], strict=True))
