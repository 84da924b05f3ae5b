"""``--prompt`` and ``--prompt-ids``."""

from __future__ import annotations

import pytest
import typer

from trt_kvcache.cli.prompt_flags import read_prompts


def test_texts_come_first() -> None:
    assert read_prompts(["one", "two"], ["1,2"]) == ["one", "two", [1, 2]]


@pytest.mark.parametrize("text", ["1,2,3", "1 2 3", "1, 2,3 ", "1,,2 3"])
def test_token_ids_are_separated_by_commas_or_spaces(text: str) -> None:
    assert read_prompts(None, [text]) == [[1, 2, 3]]


def test_an_empty_text_is_a_prompt() -> None:
    assert read_prompts([""], None) == [""]


@pytest.mark.parametrize(
    ("texts", "ids", "message"),
    [
        (None, None, "expected --prompt or --prompt-ids, got neither."),
        ([], [], "expected --prompt or --prompt-ids, got neither."),
        (None, [""], "expected integers such as 1,2,3, got ''."),
        (None, ["1,a"], "expected integers such as 1,2,3, got '1,a'."),
        (["\udcff"], None, "expected UTF-8, got '\\udcff'."),
    ],
)
def test_wrong_usage(texts: list[str] | None, ids: list[str] | None, message: str) -> None:
    with pytest.raises(typer.BadParameter) as raised:
        read_prompts(texts, ids)
    assert raised.value.message == message
