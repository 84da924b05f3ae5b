"""The messages of a chat, in memory and in a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trt_kvcache.cli.conversation import Conversation
from trt_kvcache.errors import ConfigError


@pytest.fixture
def conversation() -> Conversation:
    made = Conversation("Be brief.")
    made.turns = [("one", "1"), ("two", "2")]
    return made


def test_messages_are_in_the_order_they_were_said(conversation: Conversation) -> None:
    said = [(message["role"], message["content"]) for message in conversation.messages("three")]
    asked = [("user", "one"), ("assistant", "1"), ("user", "two"), ("assistant", "2"), ("user", "three")]
    assert said == [("system", "Be brief."), *asked]


def test_without_a_template_it_is_one_text(conversation: Conversation) -> None:
    assert conversation.text("three") == "one1\ntwo2\nthree"


def test_what_is_saved_is_loaded(conversation: Conversation, tmp_path: Path) -> None:
    conversation.save(tmp_path / "talk.json")
    loaded = Conversation("another")
    loaded.load(tmp_path / "talk.json")
    assert loaded.messages() == conversation.messages()


def test_a_list_of_messages_is_loaded_too(tmp_path: Path) -> None:
    (tmp_path / "talk.json").write_text(json.dumps([{"role": "user", "content": "é"}, {"role": "assistant", "content": "1"}]))
    loaded = Conversation("removed")
    loaded.load(tmp_path / "talk.json")
    assert (loaded.system, loaded.turns) == (None, [("é", "1")])


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "3",
        "{}",
        '["a"]',
        '[{"role": "user", "content": "a"}]',
        '[{"role": "user", "content": 3}, {"role": "assistant", "content": "a"}]',
        '[{"role": "assistant", "content": "a"}, {"role": "user", "content": "a"}]',
        "[" * 9**5,
    ],
)
def test_a_file_without_a_conversation_changes_nothing(conversation: Conversation, tmp_path: Path, content: str) -> None:
    (tmp_path / "talk.json").write_text(content)
    before = conversation.messages()
    with pytest.raises(ConfigError, match=r"talk\.json: expected "):
        conversation.load(tmp_path / "talk.json")
    assert conversation.messages() == before
