"""Chat templates: Jinja text from a model folder, rendered in a sandbox. Jinja is imported only if a folder has a template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from trt_kvcache._util.extras import naming_the_extra
from trt_kvcache.checkpoint.json_file import read_text
from trt_kvcache.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from jinja2.nodes import Node
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

TEMPLATE_FILE = "chat_template.jinja"


class ChatTemplate:
    """A compiled chat template.

    Parameters
    ----------
    text : str
        The template in Jinja, as Hugging Face's templates are written.
    source : Path
        The file that it comes from; error messages name it.

    Raises
    ------
    CheckpointError
        The text is not a valid template.

    Examples
    --------
    >>> from pathlib import Path
    >>> from trt_kvcache.checkpoint.chat_template import ChatTemplate
    >>> text = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    >>> template = ChatTemplate(text, Path("chat_template.jinja"))
    >>> template.render([{"role": "user", "content": "Hello"}], {"eos_token": "</s>"}, add_generation_prompt=False)
    'user: Hello</s>'
    """

    def __init__(self, text: str, source: Path) -> None:
        with naming_the_extra():
            from jinja2 import TemplateError

        self._source = source
        try:
            self._template = _environment().from_string(text)
        except TemplateError as error:
            raise CheckpointError(f"{source}: the chat template cannot be read: {error}.") from error

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], *, add_generation_prompt: bool) -> str:
        """Return the text of a conversation.

        Parameters
        ----------
        messages : sequence of mapping
            ``{"role": ..., "content": ...}``, oldest first.
        variables : mapping of str to object
            The other variables of the template: texts of the special tokens (``"bos_token"``, ``"eos_token"``, ...), ``"tools"``, and those
            that this template alone knows.
        add_generation_prompt : bool
            Whether the text ends with the opening of the assistant's turn.

        Returns
        -------
        str
            The rendered text, special tokens included.

        Raises
        ------
        ConfigError
            The template rejects the messages (roles out of order, ...), or fails on them.
        """
        try:
            known = {"tools": None, "documents": None, **variables, "messages": messages, "add_generation_prompt": add_generation_prompt}
            return self._template.render(known)
        except Exception as error:
            raise ConfigError(f"{self._source}: the chat template refuses these messages: {error}") from error


def find_chat_template(folder: Path, tokenizer_config: Mapping[str, Any], config_file: Path) -> ChatTemplate | None:
    """Find and compile the chat template of a model folder.

    Parameters
    ----------
    folder : Path
        The model folder. Its ``chat_template.jinja`` takes precedence if there is one.
    tokenizer_config : mapping of str to object
        The parsed ``tokenizer_config.json``. Its ``chat_template`` is a text, or a list of named texts of which ``default`` is used.
    config_file : Path
        The file that ``tokenizer_config`` was read from; error messages name it.

    Returns
    -------
    ChatTemplate or None
        None if the folder has no template.

    Raises
    ------
    CheckpointError
        The template has the wrong type, is not valid, or its file cannot be read.
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
