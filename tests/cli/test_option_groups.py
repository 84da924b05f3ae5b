"""Groups of options in dataclasses, and changes of their options by a command."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from trt_kvcache.cli.option_groups import Changed, call_with_flat, flat_parameters


@dataclass(frozen=True, kw_only=True)
class Group:
    """A group."""

    slots: Annotated[int, typer.Option(min=1, metavar="N", help="Slots.")] = 1
    path: Annotated[Path | None, typer.Option(help="A file.")] = None


def plain(group: Group, name: str = "") -> None:
    """Take a group."""


def changed(group: Annotated[Group, Changed("slots", help="Slots of a file.", default=8)]) -> None:
    """Take a changed group."""


def options(command):
    return {one.name: (one.default, one.annotation) for one in flat_parameters(command)}


def test_a_group_becomes_its_options():
    found = options(plain)
    assert list(found) == ["slots", "path", "name"]
    assert found["slots"][0] == 1
    assert found["slots"][1].__metadata__[0].help == "Slots."


def test_a_command_changes_help_and_default_of_one_option():
    default, annotation = options(changed)["slots"]
    option = annotation.__metadata__[0]
    assert (default, option.help, option.min, option.metavar) == (8, "Slots of a file.", 1, "N")
    assert options(changed)["path"][1].__metadata__[0].help == "A file."


def test_a_change_is_of_its_command_alone():
    options(changed)
    assert options(plain)["slots"][1].__metadata__[0].help == "Slots."


def test_a_command_gets_its_group_with_home_in_paths(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    found = []

    def command(group: Annotated[Group, Changed("slots", default=8)], name: str) -> None:
        found.append((group, name))

    command.__annotations__ = {"group": Annotated[Group, Changed("slots", default=8)], "name": str, "return": None}
    call_with_flat(command, {"slots": 3, "path": Path("~/x"), "name": "a"})
    assert found == [(Group(slots=3, path=Path("/home/somebody/x")), "a")]
