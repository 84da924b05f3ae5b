"""Chat templates: Jinja in a sandbox, from ``tokenizer_config.json`` or a file of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from trt_kvcache.checkpoint import Tokenizer
from trt_kvcache.errors import CheckpointError, ConfigError

from .tokenizer_folders import BOS, EOS, byte_level_folder, opened

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}\n"
    "  {% if message.role == 'system' %}\n"
    "    {{- raise_exception('no system role here') }}\n"
    "  {% endif %}\n"
    "[{{ message.role }}]{{ message.content | trim }}{{ eos_token }}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
MESSAGES = [{"role": "user", "content": " hi "}, {"role": "assistant", "content": "yes"}]
RENDERED = "<s>[user]hi</s>\n[assistant]yes</s>\n"


@pytest.mark.parametrize("template", [TEMPLATE, [{"name": "tool", "template": "x"}, {"name": "default", "template": TEMPLATE}]])
def test_chat_template(tmp_path: Path, template: object) -> None:
    tokenizer = opened(byte_level_folder(tmp_path, bos_token=BOS, eos_token=EOS, chat_template=template))
    assert tokenizer.has_chat_template
    assert tokenizer.apply_chat_template(MESSAGES) == RENDERED + "[assistant]"
    assert tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=False) == RENDERED


def test_template_file_wins(tmp_path: Path) -> None:
    folder = byte_level_folder(tmp_path, chat_template="from the config")
    (folder / "chat_template.jinja").write_text("from the file")
    assert opened(folder).apply_chat_template(MESSAGES) == "from the file"


def test_what_templates_may_use(tmp_path: Path) -> None:
    template = (
        "{% for message in messages %}{% if loop.index == 2 %}{% break %}{% endif %}"
        "{% generation %}{{ message | tojson }}{% endgeneration %}{% endfor %}{{ strftime_now('%Y')[:2] }}"
        "{{ tools is none and documents is none }}"
    )
    tokenizer = opened(byte_level_folder(tmp_path, chat_template=template))
    assert tokenizer.apply_chat_template([{"content": "<é>"}, {"content": "no"}]) == '{"content": "<é>"}20True'


def test_tools_and_other_variables_reach_the_template(tmp_path: Path) -> None:
    template = "{{ bos_token }} {{ tools[0].name }} {{ enable_thinking }} {{ messages | length }}"
    tokenizer = opened(byte_level_folder(tmp_path, bos_token=BOS, chat_template=template))
    text = tokenizer.apply_chat_template(MESSAGES, tools=[{"name": "clock"}], template_args={"enable_thinking": False})
    assert text == "<s> clock False 2"


def test_variables_may_replace_special_tokens_but_not_the_messages(tmp_path: Path) -> None:
    tokenizer = opened(byte_level_folder(tmp_path, bos_token=BOS, chat_template="{{ bos_token }} {{ messages | length }}"))
    assert tokenizer.apply_chat_template(MESSAGES, template_args={"bos_token": "begin", "messages": []}) == "begin 2"


def test_template_that_refuses_the_messages(tmp_path: Path) -> None:
    tokenizer = opened(byte_level_folder(tmp_path, chat_template=TEMPLATE))
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: the chat template refuses these messages: no system role here"):
        tokenizer.apply_chat_template([{"role": "system", "content": ""}])


def test_template_that_fails(tmp_path: Path) -> None:
    tokenizer = opened(byte_level_folder(tmp_path, chat_template="{{ messages | length // 0 }}"))
    with pytest.raises(ConfigError, match=r"refuses these messages: .*by zero"):
        tokenizer.apply_chat_template(MESSAGES)


def test_template_cannot_reach_python(tmp_path: Path) -> None:
    tokenizer = opened(byte_level_folder(tmp_path, chat_template="{{ messages.__class__.__mro__ }}"))
    with pytest.raises(ConfigError, match=r"access to attribute '__class__' .* is unsafe"):
        tokenizer.apply_chat_template(MESSAGES)


@pytest.mark.parametrize(
    ("template", "message"), [("{% if %}", "the chat template cannot be read"), (3, "chat_template: expected a text .*, got int")]
)
def test_template_that_cannot_be_read(tmp_path: Path, template: object, message: str) -> None:
    folder = byte_level_folder(tmp_path, chat_template=template)
    with pytest.raises(CheckpointError, match=rf"tokenizer_config\.json: {message}"):
        Tokenizer.open(folder)


@pytest.mark.parametrize("config", [{}, {"chat_template": [{"name": "tool", "template": "x"}]}])
def test_no_chat_template(tmp_path: Path, config: dict[str, object]) -> None:
    tokenizer = opened(byte_level_folder(tmp_path, **config))
    assert not tokenizer.has_chat_template
    with pytest.raises(ConfigError, match=r"expected a chat template in tokenizer_config\.json or chat_template\.jinja, got none"):
        tokenizer.apply_chat_template(MESSAGES)
