"""Chat templates: Jinja in a sandbox, from ``tokenizer_config.json`` or a file of their own."""

from __future__ import annotations

import gc
from pathlib import Path
from types import MappingProxyType

import pytest

from trt_kvcache.checkpoint import Tokenizer, template_process
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


def test_the_template_of_a_processor_is_the_last_choice(tmp_path: Path) -> None:
    folder = byte_level_folder(tmp_path / "own", chat_template="from the config")
    (folder / "chat_template.json").write_text('{"chat_template": "from the processor"}')
    assert opened(folder).apply_chat_template(MESSAGES) == "from the config"
    folder = byte_level_folder(tmp_path / "none")
    (folder / "chat_template.json").write_text('{"chat_template": "from the processor"}')
    assert opened(folder).apply_chat_template(MESSAGES) == "from the processor"
    (folder / "chat_template.json").write_text('{"chat_template": 3}')
    with pytest.raises(CheckpointError, match=r"chat_template\.json: chat_template: expected a text or a list of named texts, got int"):
        Tokenizer.open(folder)


def test_what_templates_may_use(tmp_path: Path) -> None:
    template = (
        "{% for message in messages %}{% if loop.index == 2 %}{% break %}{% endif %}"
        "{% generation %}{{ message | tojson }}{% endgeneration %}{% endfor %}{{ strftime_now('%Y')[:2] }}"
        "{{ tools is none and documents is none }}"
    )
    tokenizer = opened(byte_level_folder(tmp_path, chat_template=template))
    assert tokenizer.apply_chat_template([{"content": "<é>"}, {"content": "no"}]) == '{"content": "<é>"}20True'


@pytest.mark.parametrize(
    ("filters", "text"),
    [
        ("tojson", '{"b": ["é"], "a": "<&\'>"}'),
        ("tojson(true)", '{"b": ["\\u00e9"], "a": "<&\'>"}'),
        ("tojson(ensure_ascii=True, sort_keys=True)", '{"a": "<&\'>", "b": ["\\u00e9"]}'),
        ("tojson(False, 1)", '{\n "b": [\n  "é"\n ],\n "a": "<&\'>"\n}'),
        ("tojson(separators=(',', ':'))", '{"b":["é"],"a":"<&\'>"}'),
        ("tojson(False, None, [';', '='], true)", '{"a"="<&\'>";"b"=["é"]}'),
        ("tojson(indent='--')", '{\n--"b": [\n----"é"\n--],\n--"a": "<&\'>"\n}'),
    ],
)
def test_tojson_takes_the_options_that_it_has_in_transformers(tmp_path: Path, filters: str, text: str) -> None:
    tokenizer = opened(byte_level_folder(tmp_path, chat_template=f"{{{{ messages[0].x | {filters} }}}}"))
    assert tokenizer.apply_chat_template([{"x": {"b": ["é"], "a": "<&'>"}}]) == text


@pytest.mark.parametrize("value", ["nothing", "messages.append", "joiner(1)"])
def test_tojson_of_what_is_no_json_is_refused(tmp_path: Path, value: str) -> None:
    tokenizer = opened(byte_level_folder(tmp_path, chat_template=f"{{{{ {value} | tojson }}}}"))
    with pytest.raises(ConfigError, match=r"the chat template refuses these messages: .*not JSON serializable"):
        tokenizer.apply_chat_template(MESSAGES)


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


def test_tools_and_other_variables_are_passed(tmp_path: Path) -> None:
    template = "{{ tools | tojson }} {{ thinking }} {{ messages[0].content }}"
    tokenizer = opened(byte_level_folder(tmp_path, chat_template=template))
    text = tokenizer.apply_chat_template(MESSAGES, tools=[MappingProxyType({"name": "add"})], template_args={"thinking": False})
    assert text == '[{"name": "add"}] False  hi '


def test_values_that_json_has_not_are_refused(tmp_path: Path) -> None:
    tokenizer = opened(byte_level_folder(tmp_path, chat_template=TEMPLATE))
    with pytest.raises(ConfigError, match=r"expected messages and variables of plain values, as JSON has them: got object\."):
        tokenizer.apply_chat_template([{"role": "user", "content": object()}])


ENDLESS = {
    "constant, when compiled": "{{ '%1000000000d' % 1 }}",
    "power, when compiled": "{{ 9 ** (9 ** 9) }}",
    "when rendered": "{{ ('%' ~ 1000000000 ~ 'd') % messages | length }}",
    "nested ranges": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "growing text": "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "a filter": "{{ 'x' | center(9999999999) }}",
    "much text": "{{ 'x' * 20000000 }}",
    "calling itself": "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
}


@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS)
def test_a_template_without_end_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str) -> None:
    monkeypatch.setattr(template_process, "TIMEOUT_SECONDS", 0.5)
    tokenizer = opened(byte_level_folder(tmp_path, chat_template=template))
    with pytest.raises((ConfigError, CheckpointError), match=r"tokenizer_config\.json: the chat template (refuses|cannot be read)"):
        tokenizer.apply_chat_template(MESSAGES)


def test_a_template_that_was_stopped_can_be_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{% if messages | length > 1 %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}fine"
    tokenizer = opened(byte_level_folder(tmp_path, chat_template=template))
    assert tokenizer.apply_chat_template(MESSAGES[:1]) == "fine"
    with monkeypatch.context() as patch:
        patch.setattr(template_process, "TIMEOUT_SECONDS", 0.5)
        with pytest.raises(ConfigError, match=r"it was stopped, because it took longer than 0\.5 s or too much memory"):
            tokenizer.apply_chat_template(MESSAGES)
    assert tokenizer.apply_chat_template(MESSAGES[:1]) == "fine"


def test_the_process_ends_with_the_tokenizer(tmp_path: Path) -> None:
    tokenizer = opened(byte_level_folder(tmp_path, chat_template=TEMPLATE))
    tokenizer.apply_chat_template(MESSAGES)
    process = tokenizer._chat_template._processes._idle[0]._process  # type: ignore[union-attr]
    assert process is not None
    assert process.poll() is None
    del tokenizer
    gc.collect()
    assert process.poll() is not None


def test_a_process_that_was_killed_is_started_again(tmp_path: Path) -> None:
    tokenizer = opened(byte_level_folder(tmp_path, chat_template="fine"))
    assert tokenizer.apply_chat_template(MESSAGES) == "fine"
    process = tokenizer._chat_template._processes._idle[0]._process  # type: ignore[union-attr]
    assert process is not None
    process.kill()
    process.wait()
    assert tokenizer.apply_chat_template(MESSAGES) == "fine"


@pytest.mark.parametrize(
    "text",
    ["{{" + "(" * 100_000, "{% if x %}" * 5000, "{{ 1 if " * 3000, "x" * (1 << 21), "{{ " + "9" * 5000 + " }}"],
    ids=["parentheses", "statements", "conditions", "long", "digits"],
)
def test_a_template_that_cannot_be_parsed_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: the chat template cannot be read: "):
        opened(byte_level_folder(tmp_path, chat_template=text))


def test_a_template_with_an_unknown_filter_is_refused_when_it_is_used(tmp_path: Path) -> None:
    tokenizer = opened(byte_level_folder(tmp_path, chat_template="{{ messages | nothing }}"))
    with pytest.raises(CheckpointError, match="the chat template cannot be read: No filter named 'nothing'"):
        tokenizer.apply_chat_template(MESSAGES)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ '{0.__class__}'.format(1) }}",
    ],
)
def test_no_template_leaves_the_sandbox(tmp_path: Path, template: str) -> None:
    tokenizer = opened(byte_level_folder(tmp_path, chat_template=template))
    try:
        text = tokenizer.apply_chat_template(MESSAGES)
    except (ConfigError, CheckpointError):
        return
    assert "root:" not in text
    assert "class" not in text


@pytest.mark.parametrize(("template", "text"), [("", "system"), ("{# developer #}", "developer")], ids=["not known", "known"])
def test_the_role_of_developers_is_that_of_the_system_where_a_template_does_not_know_it(tmp_path: Path, template: str, text: str) -> None:
    tokenizer = opened(byte_level_folder(tmp_path, chat_template=template + "{{ messages[0].role }}"))
    messages = [{"role": "developer", "content": "x"}]
    assert tokenizer.apply_chat_template(messages) == text
    assert messages[0]["role"] == "developer"
