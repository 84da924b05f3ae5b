"""The options of a command line for chat templates."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from trt_kvcache.checkpoint import Tokenizer
from trt_kvcache.cli.chat_flags import ChatFlags
from trt_kvcache.errors import ConfigError

from .conftest import SHIPPED, change_json


@pytest.fixture
def tokenizer(model: Path) -> Tokenizer:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ value | tojson }}"
    change_json(model / "tokenizer_config.json", lambda config: config.update(chat_template=template))
    opened = Tokenizer.open(model)
    assert opened is not None
    return opened


@pytest.mark.parametrize(
    ("given", "rendered"),
    [("false", "false"), ("3", "3"), ('{"a": [1]}', '{"a": [1]}'), ("some text", '"some text"'), ("", '""'), ("a=b", '"a=b"')],
)
def test_values_are_json_or_else_texts(tokenizer: Tokenizer, given: str, rendered: str) -> None:
    template = ChatFlags(template_args=[f"value={given}"]).template(tokenizer)
    assert template is not None
    assert tokenizer.decode(template.tokens([{"role": "user", "content": "A"}]), skip_special_tokens=False) == f"<user>A{rendered}"


@pytest.mark.parametrize("text", ["value", "=3", "a b=3"])
def test_an_argument_without_a_name_is_wrong_usage(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="expected NAME=VALUE, got"):
        ChatFlags(template_args=[text])


@pytest.mark.parametrize("option", [{"system": "a"}, {"template_args": ["a=1"]}, {"tools": Path("a")}])
def test_raw_and_options_of_the_template_contradict_each_other(option: dict[str, object]) -> None:
    with pytest.raises(typer.BadParameter, match="expected --raw or --"):
        ChatFlags(raw=True, **option)


def test_no_template_without_a_tokenizer_or_one_in_the_model() -> None:
    assert ChatFlags().template(None) is None
    assert ChatFlags().template(Tokenizer.open(SHIPPED)) is None


def test_raw_uses_no_template(tokenizer: Tokenizer) -> None:
    assert ChatFlags(raw=True).template(tokenizer) is None


@pytest.mark.parametrize(
    ("text", "complaint"), [("{", "tools.json: expected JSON, got a syntax error"), ("{}", "expected a JSON list of objects")]
)
def test_a_file_that_holds_no_tools(tokenizer: Tokenizer, tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "tools.json").write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        ChatFlags(tools=tmp_path / "tools.json").template(tokenizer)
