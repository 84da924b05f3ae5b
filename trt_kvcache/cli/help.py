"""Help of commands: full option names at any width, in groups. Suggestions for unknown commands and options."""

from difflib import get_close_matches
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from trt_kvcache.generation import sampling
from trt_kvcache.session import session_options

_FIRST_GROUP = "Options"
_NAME_COLUMNS = 26

#: Names of options in other projects, and our names.
_OTHER_OPTIONS = {
    **session_options.OTHER_NAMES,
    **sampling.OTHER_NAMES,
    "max_length": "max_sequence_length",
    "ctx_size": "max_sequence_length",
}

#: Names of commands in other projects, and our names.
_OTHER_COMMANDS = {
    "run": ("generate", "chat"),
    "complete": ("generate",),
    "convert": ("build",),
    "compile": ("build",),
    "quantize": ("build",),
    "server": ("serve",),
    "batch": ("serve-file",),
    "benchmark": ("bench",),
    "eval": ("score", "perplexity"),
    "ppl": ("perplexity",),
    "info": ("inspect",),
}


class Commands(TyperGroup):
    """The commands. An unknown one gets suggestions."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the name, the command and its arguments."""
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            meant = _OTHER_COMMANDS.get(name) or get_close_matches(name, self.list_commands(ctx), n=2)
            hint = f" Did you mean {' or '.join(meant)}?" if meant else ""
            ctx.fail(f"No such command {name!r}.{hint}")
        return super().resolve_command(ctx, args)


class Command(TyperCommand):
    """A command whose help groups options by ``rich_help_panel``. Long names get a line of their own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. An unknown option gets the suggestion of ours, if another project has this name."""
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter:
            raise
        except Exception as error:
            given = getattr(error, "option_name", None)
            meant = _OTHER_OPTIONS.get(str(given).lstrip("-").replace("-", "_"))
            flag = None if meant is None else f"--{meant.replace('_', '-')}"
            if flag is not None and any(flag in parameter.opts for parameter in self.get_params(ctx)):
                error.possibilities = [flag]  # type: ignore[attr-defined]
            raise

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and the groups of options."""
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], _FIRST_GROUP: []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            record = (record[0], record[1].replace("\\[", "["))  # typer before 0.20 marks them for rich
            if parameter.param_type_name == "argument":
                groups["Arguments"].append((parameter.metavar or record[0], record[1]))
            else:
                groups.setdefault(getattr(parameter, "rich_help_panel", None) or _FIRST_GROUP, []).append(record)
        for title, records in groups.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records, col_max=_NAME_COLUMNS)
