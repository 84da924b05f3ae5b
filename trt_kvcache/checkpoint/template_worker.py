"""Program of the process that renders chat templates: see :mod:`trt_kvcache.checkpoint.template_process`.

It reads a line of JSON and writes one. The first line has the template, each further one the values to render it with. It imports
nothing of this package, because it is run as a file.
"""

import json
import os
import sys
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from jinja2.nodes import Node
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment


def make_environment() -> "ImmutableSandboxedEnvironment":
    """Return the sandbox of templates, with the functions that templates of Hugging Face use."""
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlock(Extension):
        """``{% generation %}``: marks the assistant's text, for training; its body is simply rendered here."""

        tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as a plain class attribute

        def parse(self, parser: "Parser") -> "Node | list[Node]":
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


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | str | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return JSON; unlike Jinja's own filter without HTML escapes. Options, order and defaults are those of transformers."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def main() -> None:
    """Answer until the input ends."""
    if hasattr(os, "nice"):  # long conversations must not slow down token generation
        os.nice(5)
    start = json.loads(sys.stdin.readline())
    sys.path[:] = start["path"]
    template, failure = None, {}
    try:
        _limit_memory(start["memory_nbytes"])
        template = make_environment().from_string(start["template"])
    except Exception as error:  # noqa: BLE001 - whatever it is, the other process says so
        failure = {"cannot_be_read": _told(error)}
    for line in sys.stdin:
        answer = failure
        if template is not None:
            try:
                text = template.render(**json.loads(line))
                answer = {"text": text} if len(text) <= start["max_length"] else {"refuses": f"its text has {len(text)} characters"}
            except Exception as error:  # noqa: BLE001 - a template can raise anything
                answer = {"refuses": _told(error)}
        print(json.dumps(answer), flush=True)


def _told(error: Exception) -> str:
    if isinstance(error, MemoryError | RecursionError):
        return "it needs too much memory" if isinstance(error, MemoryError) else "it is nested too deeply, or calls itself"
    return str(error)[:1000] or type(error).__name__


def _limit_memory(nbytes: int) -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    resource.setrlimit(resource.RLIMIT_AS, (nbytes, nbytes))


if __name__ == "__main__":
    main()
