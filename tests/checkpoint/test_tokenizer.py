import pytest

from trt_kvcache.checkpoint import Tokenizer
from trt_kvcache.errors import CheckpointError, ConfigError

from .tokenizer_folders import BOS, EOS, byte_fallback_folder, byte_level_folder, opened

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'system' %}{{ raise_exception('no system role here') }}{% endif %}"
    "[{{ message.role }}]{{ message.content | trim }}{{ eos_token }}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
MESSAGES = [{"role": "user", "content": " hi "}, {"role": "assistant", "content": "yes"}]
RENDERED = "<s>[user]hi</s>\n[assistant]yes</s>\n"


@pytest.mark.parametrize("make", [byte_level_folder, byte_fallback_folder])
def test_round_trip_and_special_tokens(tmp_path, make):
    tokenizer = opened(make(tmp_path))
    text = "the tea: 漢字 👩‍🚀"
    plain, bos = tokenizer.encode(text, add_special_tokens=False), tokenizer.encode(BOS, add_special_tokens=False)[-1]
    assert tokenizer.encode(text) == [bos, *plain]
    assert tokenizer.decode(plain) == tokenizer.decode([bos, *plain]) == text
    assert tokenizer.decode([bos, *plain], skip_special_tokens=False).startswith(BOS)
    assert max(plain) < bos < tokenizer.vocab_size


@pytest.mark.parametrize("template", [TEMPLATE, [{"name": "tool", "template": "x"}, {"name": "default", "template": TEMPLATE}]])
def test_chat_template(tmp_path, template):
    tokenizer = opened(byte_level_folder(tmp_path, bos_token=BOS, eos_token=EOS, chat_template=template))
    assert tokenizer.has_chat_template
    assert tokenizer.apply_chat_template(MESSAGES) == RENDERED + "[assistant]"
    assert tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=False) == RENDERED


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"chat_template": TEMPLATE}, r"tokenizer_config\.json: the chat template refuses these messages: no system role here"),
        ({"chat_template": "{{ messages.__class__.__mro__ }}"}, r"access to attribute '__class__' .* is unsafe"),
        ({}, r"expected a chat template in tokenizer_config\.json or chat_template\.jinja, got none"),
    ],
)
def test_messages_that_are_refused(tmp_path, config, message):
    tokenizer = opened(byte_level_folder(tmp_path, **config))
    assert tokenizer.has_chat_template == ("got none" not in message)
    with pytest.raises(ConfigError, match=message):
        tokenizer.apply_chat_template([{"role": "system", "content": ""}])


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("tokenizer_config.json", "{", "expected JSON"),
        ("tokenizer_config.json", '{"chat_template": "{% if %}"}', "the chat template cannot be read"),
        ("tokenizer.json", '{"version": "1.0"', "expected a tokenizer, got an error: .* The file may be truncated"),
    ],
)
def test_files_that_are_refused(tmp_path, file, text, message):
    (byte_level_folder(tmp_path) / file).write_text(text)
    with pytest.raises(CheckpointError, match=f"{file}: {message}"):
        Tokenizer.open(tmp_path)
