"""Options for chat templates, of ``generate``, ``chat`` and ``serve-file``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from trt_kvcache._util.json_text import JSONTextError, parse_json
from trt_kvcache.checkpoint import Tokenizer
from trt_kvcache.cli.option_groups import WrongUsage
from trt_kvcache.errors import ConfigError
from trt_kvcache.generation.prompts import Prompt

_PANEL = "Chat template"

Raw = Annotated[
    bool,
    typer.Option("--raw", help="Continue texts without the chat template. Default: with it, if the model has one.", rich_help_panel=_PANEL),
]
System = Annotated[str | None, typer.Option("--system", metavar="TEXT", help="The system message.", rich_help_panel=_PANEL)]
TemplateArgs = Annotated[
    list[str] | None,
    typer.Option(
        "--template-arg",
        metavar="NAME=VALUE",
        help="A variable of the template, such as enable_thinking=false: JSON, or else a text. Can be given several times.",
        rich_help_panel=_PANEL,
    ),
]
Tools = Annotated[
    Path | None,
    typer.Option("--tools", metavar="FILE", help="A JSON file with a list of tools that the model may call.", rich_help_panel=_PANEL),
]

#: A message of a conversation: ``{"role": ..., "content": ...}``.
Message = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class ChatFlags:
    """Options that turn the text of a prompt into a conversation."""

    raw: Raw = False
    system: System = None
    template_args: TemplateArgs = None
    tools: Tools = None

    def __post_init__(self) -> None:
        if self.raw and self._needs_template:
            raise WrongUsage(f"expected --raw or {self._needs_template[0]}, got both.")
        for text in self.template_args or ():
            name, equals, _ = text.partition("=")
            if not equals or not name.isidentifier():
                raise typer.BadParameter(f"expected NAME=VALUE, got {text!r}.", param_hint="--template-arg")

    @property
    def _needs_template(self) -> list[str]:
        """The given options that need a chat template."""
        given = {"--system": self.system, "--template-arg": self.template_args, "--tools": self.tools}
        return [name for name, value in given.items() if value]

    def template(self, tokenizer: Tokenizer | None) -> "Template | None":
        """Return the template of a model with these options, or None if texts are continued without one."""
        if tokenizer is None or not tokenizer.has_chat_template:
            if self._needs_template:
                raise ConfigError(f"{', '.join(self._needs_template)}: expected a model with a chat template, this one has none.")
            return None
        if self.raw:
            return None
        arguments = dict(_argument(text) for text in self.template_args or ())
        return Template(tokenizer, self.system, None if self.tools is None else _read_tools(self.tools), arguments)


@dataclass(frozen=True)
class Template:
    """The chat template of a model, with the options of a command line."""

    tokenizer: Tokenizer
    system: str | None
    tools: list[Any] | None
    arguments: dict[str, Any]

    def prompt(self, prompt: Prompt) -> Prompt:
        """Return a prompt for the model: a text becomes a message of the user, token ids are unchanged."""
        return self.tokens([{"role": "user", "content": prompt}]) if isinstance(prompt, str) else prompt

    def tokens(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of a conversation, with the opening of the next answer."""
        first = [] if self.system is None or messages[0].get("role") == "system" else [{"role": "system", "content": self.system}]
        text = self.tokenizer.apply_chat_template([*first, *messages], tools=self.tools, template_args=self.arguments)
        return self.tokenizer.encode(text, add_special_tokens=False)


def _argument(text: str) -> tuple[str, Any]:
    """Parse ``name=value``. A value that is not JSON is a text."""
    name, _, value = text.partition("=")
    try:
        return name, parse_json(value)
    except JSONTextError:
        return name, value


def _read_tools(path: Path) -> list[Any]:
    try:
        tools = parse_json(path.read_bytes())
    except JSONTextError as error:
        raise ConfigError(f"{path}: {error}.") from None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ConfigError(f"{path}: expected a JSON list of objects, each the description of a tool.")
    return tools
