"""Functions that take the options of a dataclass show them as their own."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from trt_kvcache._util.keyword_options import show_as_keywords


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes.

    Parameters
    ----------
    slots : int
        Slots.
    tokens : int, optional
        Tokens, of which
        there are two lines.

    Raises
    ------
    ValueError
        Never.
    """

    slots: int
    tokens: int | None = None


def allocate(place: str, *, stream: int = 3, **options: Any) -> Any:
    """Allocate.

    Parameters
    ----------
    place : str
        Place.
    **options
        Fields of ``Sizes``.
    stream : int
        Stream.
    """
    return place, stream, options


shown = show_as_keywords(Sizes, allocate)


def test_the_signature_has_the_fields_in_place_of_the_options() -> None:
    assert str(inspect.signature(shown)) == "(place: 'str', *, slots: 'int', tokens: 'int | None' = None, stream: 'int' = 3) -> 'Any'"


def test_the_documentation_has_them_too() -> None:
    assert inspect.getdoc(shown) == (
        "Allocate.\n\nParameters\n----------\nplace : str\n    Place.\nslots : int\n    Slots.\n"
        "tokens : int, optional\n    Tokens, of which\n    there are two lines.\nstream : int\n    Stream."
    )


def test_calls_are_as_before() -> None:
    assert shown("here", slots=2) == ("here", 3, {"slots": 2})


def test_a_class_shows_them_without_self() -> None:
    class Allocation:
        """Allocation.

        Parameters
        ----------
        **options
            Fields of ``Sizes``.
        """

        def __init__(self, **options: Any) -> None:
            self.options = options

    show_as_keywords(Sizes, Allocation)
    assert [*inspect.signature(Allocation).parameters] == ["slots", "tokens"]
    assert Allocation(slots=1).options == {"slots": 1}


def test_without_documentation_there_is_none() -> None:
    def bare(**options: Any) -> None:
        pass

    assert show_as_keywords(Sizes, bare).__doc__ is None
