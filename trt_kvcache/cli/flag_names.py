"""Replaces Python names of options in messages by flags, such as ``--max-sequence-length``."""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields
from inspect import Parameter
from typing import get_args

from typer.models import OptionInfo

from trt_kvcache.session.session_options import SessionOptions

#: Arguments of the package whose option has another name.
_OTHER_NAMES = {
    "api_keys": "api_key_file",
    "any_host": "allow_anyone",
    "compute_capabilities": "compute_capability",
    "adapters_modules": "adapters_module",
}

#: Options of one word: they are replaced only at the beginning of a message, as the word is common in texts.
_AT_BEGINNING = {field.name for field in fields(SessionOptions)} | {"host", "port"}

#: Beginning of messages about a line of a file, whose fields have Python names.
_PLACE_IN_FILE = re.compile(r"\S+:\d+: ")

#: Options that are also fields of a model: messages mean the field.
_OF_MODELS = {"head_dim", "kv_heads"}

_FLAGS: ContextVar[Mapping[str, str] | None] = ContextVar("flags", default=None)


@contextmanager
def naming_flags(flags: Mapping[str, str]) -> Iterator[None]:
    """Set the flags for :func:`in_flags` while a command runs."""
    token = _FLAGS.set(flags)
    try:
        yield
    finally:
        _FLAGS.reset(token)


def in_flags(text: str) -> str:
    """Replace the Python names of options in a message by flags."""
    flags = _FLAGS.get()
    if flags is None or _PLACE_IN_FILE.match(text):
        return text
    beginning, colon, _ = text.partition(":")
    names = beginning.split(", ")
    if colon and all(name in flags and ("_" in name or name in _AT_BEGINNING) for name in names):
        text = ", ".join(flags[name] for name in names) + text[len(beginning) :]
    long = sorted((name for name in flags if "_" in name), key=len, reverse=True)
    # Not in a path, in a longer name, or between quotation marks; ``=True`` is dropped: such a flag has no value.
    pattern = rf"(?<![\w./\\'\"-])({'|'.join(map(re.escape, long))})(?:=True\b)?(?![\w/\\'\"-]|\.\w)"
    return re.sub(pattern, lambda found: flags[found[1]], text) if long else text


def flags_of(parameters: Iterable[Parameter]) -> dict[str, str]:
    """Return the flag of each option by Python name: of several flags the one with this name, else the first long one."""
    flags = {}
    for parameter in parameters:
        option = next((one for one in (*get_args(parameter.annotation), parameter.default) if isinstance(one, OptionInfo)), None)
        if option is not None and parameter.name not in _OF_MODELS:
            own = f"--{parameter.name.replace('_', '-')}"
            # in an annotation, typer stores the first name as the default until it reads the signature
            names = (option.default, *(option.param_decls or ()))
            declared = [name.partition("/")[0] for name in names if isinstance(name, str) and name.startswith("--")]
            flags[parameter.name] = own if own in declared or not declared else declared[0]
    return flags | {name: flags[option] for name, option in _OTHER_NAMES.items() if option in flags}
