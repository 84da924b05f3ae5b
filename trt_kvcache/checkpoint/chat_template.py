"""Chat templates: Jinja text of a model folder, rendered in a sandbox. Jinja is imported only if a folder has a template."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trt_kvcache._util.extras import naming_the_extra
from trt_kvcache.checkpoint.json_file import read_json_if_present, read_text
from trt_kvcache.checkpoint.template_process import TemplateFailure
from trt_kvcache.checkpoint.template_processes import TemplateProcesses
from trt_kvcache.checkpoint.template_worker import make_environment
from trt_kvcache.errors import CheckpointError, ConfigError

TEMPLATE_FILE = "chat_template.jinja"

#: File of a processor (of a vision model), from versions of transformers before ``chat_template.jinja``.
PROCESSOR_FILE = "chat_template.json"

# Limit of a template in bytes: 20 times the longest one in use.
_MAX_NBYTES = 1 << 20

_DEVELOPER = "developer"

_LOGGER = logging.getLogger("trt_kvcache.checkpoint")


class ChatTemplate:
    """A chat template in Jinja, rendered in separate processes with limits of time and memory.

    ``source``: its file, for error messages. Raises CheckpointError if the text is no template.
    """

    def __init__(self, text: str, source: Path) -> None:
        with naming_the_extra():
            from jinja2 import TemplateError

        self.text = text
        self._source = source
        self._knows_developers = _DEVELOPER in text
        if len(text) > _MAX_NBYTES:
            raise CheckpointError(
                f"{source}: the chat template cannot be read: expected at most {_MAX_NBYTES} characters, got {len(text)}."
            )
        try:
            make_environment().parse(text)  # compiling it would evaluate its constant expressions
        except (TemplateError, RecursionError, ValueError) as error:
            raise CheckpointError(f"{source}: the chat template cannot be read: {error!s:.1000}.") from error
        self._processes = TemplateProcesses(text)

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], *, add_generation_prompt: bool) -> str:
        """Return the text of messages, oldest first. Raises ConfigError if the template refuses them or was stopped."""
        if not self._knows_developers:  # OpenAI's newer name of the role; many templates would leave the message out
            messages = [{**one, "role": "system"} if one.get("role") == _DEVELOPER else one for one in messages]
        known = {"tools": None, "documents": None, **variables, "messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return self._processes.render(known)
        except TemplateFailure as error:
            if error.cannot_be_read:
                raise CheckpointError(f"{self._source}: the chat template cannot be read: {error}.") from None
            _LOGGER.info("%s: the chat template refuses a conversation: %s", self._source, error)
            # Clients of a server read this: no path of its disk.
            raise ConfigError(f"{self._source.name}: the chat template refuses these messages: {error}") from None
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"chat template: expected messages and variables of plain values, as JSON has them: {error}.") from error

    def close(self) -> None:
        """End the processes; a text that is being rendered raises :class:`ClosedError`. Thread-safe, idempotent."""
        self._processes.close()


def find_chat_template(folder: Path, tokenizer_config: Mapping[str, Any], config_file: Path) -> ChatTemplate | None:
    """Return the chat template of a model folder, or None.

    Order: ``chat_template.jinja``, the text or the named text ``default`` in ``tokenizer_config.json``, ``chat_template.json``.
    """
    file = folder / TEMPLATE_FILE
    if file.exists():
        return ChatTemplate(read_text(file, _MAX_NBYTES), file)
    given = tokenizer_config.get("chat_template")
    if given is None:
        config_file = folder / PROCESSOR_FILE
        given = read_json_if_present(config_file).get("chat_template")
    if isinstance(given, list):
        named = [item for item in given if isinstance(item, dict) and item.get("name") == "default" and "template" in item]
        given = named[-1]["template"] if named else None
    if given is None:
        return None
    if not isinstance(given, str):
        raise CheckpointError(f"{config_file}: chat_template: expected a text or a list of named texts, got {type(given).__name__}.")
    return ChatTemplate(given, config_file)
