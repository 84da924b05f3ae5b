from __future__ import annotations

from pathlib import Path

import pytest

from trt_kvcache.checkpoint import Tokenizer
from trt_kvcache.errors import CheckpointError, ConfigError

from .tokenizer_folders import BOS, EOS, byte_fallback_folder, byte_level_folder, opened

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}\n"
    "  {% if message.role == 'system' %}\n"
    "    {{- raise_exception('no system role here') }}\n"
    "  {% endif %}\n"
    "[{{ message.role }}]{{ message.content | trim }}{{ eos_token }}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def test_a_folder_without_tokenizer_json_has_no_tokenizer(tmp_path: Path) -> None:
    assert Tokenizer.open(tmp_path) is None


@pytest.mark.parametrize("make", [byte_level_folder, byte_fallback_folder])
def test_round_trip(tmp_path: Path, make: object) -> None:
    tokenizer = opened(make(tmp_path))  # type: ignore[operator]
    text = "the tea: 漢字 👩‍🚀"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert max(ids) < tokenizer.vocab_size


def test_special_tokens_are_added_and_skipped(tmp_path: Path) -> None:
    tokenizer = opened(byte_level_folder(tmp_path))
    plain = tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.encode("the") == [tokenizer.encode(BOS, add_special_tokens=False)[0], *plain]
    assert tokenizer.decode(tokenizer.encode("the")) == "the"
    assert tokenizer.decode(tokenizer.encode("the"), skip_special_tokens=False) == f"{BOS}the"


@pytest.mark.parametrize("eos", [EOS, {"content": EOS, "special": True}])
def test_end_token(tmp_path: Path, eos: object) -> None:
    tokenizer = opened(byte_level_folder(tmp_path, eos_token=eos, pad_token=None))
    assert tokenizer.eos_token_ids == tuple(tokenizer.encode(EOS, add_special_tokens=False))
    assert tokenizer.special_tokens == {"eos_token": EOS}


def test_no_end_token(tmp_path: Path) -> None:
    assert opened(byte_level_folder(tmp_path)).eos_token_ids == ()
    assert opened(byte_level_folder(tmp_path, eos_token="<nowhere>")).eos_token_ids == ()


def test_damaged_files(tmp_path: Path) -> None:
    folder = byte_level_folder(tmp_path, eos_token=EOS)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: expected JSON"):
        Tokenizer.open(folder)
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text()[:100])
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: expected a tokenizer, got an error: .* The file may be truncated"):
        Tokenizer.open(folder)


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
