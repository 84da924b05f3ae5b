"""Chat templates: Jinja text from a model folder, rendered in a sandbox. Jinja is imported where there is a template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from trt_kvcache.checkpoint.json_file import read_text
from trt_kvcache.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from jinja2.nodes import Node
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

TEMPLATE_FILE = "chat_template.jinja"


class ChatTemplate:
    """One template, compiled.

    ``text``: Jinja, as Hugging Face's templates are written.
    ``source``: The file it comes from, for messages.

    Raises CheckpointError: the text is not a template.
    """

    def __init__(self, text: str, source: Path) -> None:
        from jinja2 import TemplateError

        self._source = source
        try:
            self._template = _environment().from_string(text)
        except TemplateError as error:
            raise CheckpointError(f"{source}: the chat template cannot be read: {error}.") from error

    def render(self, messages: Sequence[Mapping[str, Any]], special_tokens: Mapping[str, str], *, add_generation_prompt: bool) -> str:
        """Return the text of a conversation.

        Raises ConfigError: the template refuses the messages (roles out of order, ...), or fails on them.
        """
        try:
            return self._template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=add_generation_prompt, **special_tokens
            )
        except Exception as error:
            raise ConfigError(f"{self._source}: the chat template refuses these messages: {error}") from error


def find_chat_template(folder: Path, tokenizer_config: Mapping[str, Any], config_file: Path) -> ChatTemplate | None:
    """Return the chat template of a model folder, ``None`` where there is none.

    ``folder``: May hold ``chat_template.jinja``, which wins.
    ``tokenizer_config``: mapping. May hold ``chat_template``: a text, or a list of named ones of which ``default`` is taken.
    ``config_file``: Where ``tokenizer_config`` comes from.
    """
    file = folder / TEMPLATE_FILE
    if file.is_file():
        return ChatTemplate(read_text(file), file)
    given = tokenizer_config.get("chat_template")
    if isinstance(given, list):
        named = {item["name"]: item["template"] for item in given if isinstance(item, dict) and {"name", "template"} <= item.keys()}
        given = named.get("default")
    if given is None:
        return None
    if not isinstance(given, str):
        raise CheckpointError(f"{config_file}: chat_template: expected a text or a list of named texts, got {type(given).__name__}.")
    return ChatTemplate(given, config_file)


def _environment() -> ImmutableSandboxedEnvironment:
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlock(Extension):
        """``{% generation %}``: marks what the assistant said, for training; here its body is simply rendered."""

        tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as a plain class attribute

        def parse(self, parser: Parser) -> Node | list[Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlock])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(value: Any, indent: int | None = None) -> str:
    """Unlike Jinja's own filter, escape nothing for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)
