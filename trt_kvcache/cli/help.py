"""How commands print their help: option names in full, at any width, in groups."""

from typing import Any

from typer.core import TyperCommand

_FIRST_GROUP = "Options"
_NAME_COLUMNS = 26


class Command(TyperCommand):
    """A command whose help lists its options in groups, the ``rich_help_panel`` of each. Names are never cut; long ones get a line."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and the groups of options.

        Parameters
        ----------
        ctx : click.Context
            The command and its width.
        formatter : click.HelpFormatter
            Receives the text.
        """
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
