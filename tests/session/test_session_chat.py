"""Conversations as prompts: ``session.chat``, and ``ChatPrompt`` in ``generate`` and ``submit``."""

from __future__ import annotations

import pytest

from tests.checkpoint.tokenizer_folders import BOS, byte_level_folder
from tests.helpers.assertions import raises
from tests.helpers.models import write_model
from tests.helpers.sessions import drain, make, refuse
from trt_kvcache import ChatPrompt, InferenceSession
from trt_kvcache.errors import ConfigError

TEMPLATE = (
    "{{ bos_token }}{% if tools %}[{{ tools[0].name }}]{% endif %}{% if brief %}!{% endif %}"
    "{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('no such role') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
HELLO = [{"role": "user", "content": "the sea"}]
OPTIONS = {"max_new_tokens": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = write_model(tmp_path_factory.mktemp("chat") / "model", vocab_size=300, torch_dtype="float32", max_position_embeddings=256)
    return byte_level_folder(path, bos_token=BOS, chat_template=TEMPLATE)


@pytest.fixture
def session(folder):
    with InferenceSession.from_model(folder, engine="reference", max_batch_size=2) as opened:
        yield opened


def held(session, slot=0):
    """The prompt in a slot, as text."""
    tokens = session.tokens(slot)
    assert tokens.count(session.tokenizer.encode("")[0]) == 1, "special tokens were added twice"
    return session.tokenizer.decode(tokens, skip_special_tokens=False)


def test_the_template_writes_the_prompt(session):
    next(session.chat(HELLO, **OPTIONS))
    assert held(session) == f"{BOS}<user>the sea<assistant>"


@pytest.mark.parametrize("text", ["the sea", "", "<assistant>"])
def test_a_text_is_one_message_of_the_user(session, text):
    answer = session.chat(text, **OPTIONS).text
    assert held(session).startswith(f"{BOS}<user>{text}<assistant>")
    assert answer == session.chat([{"role": "user", "content": text}], **OPTIONS).text


@pytest.mark.parametrize("messages", [b"hi", 5, None, {}, [], {"role": "user"}, ["hi"], [None]])
def test_what_is_no_conversation_is_refused(session, messages):
    with pytest.raises(ConfigError, match=r"messages.*: expected"):
        session.chat(messages)


def test_tools_and_variables_reach_the_template(session):
    next(session.chat(HELLO, tools=[{"name": "clock"}], template_args={"brief": True}, **OPTIONS))
    assert held(session) == f"{BOS}[clock]!<user>the sea<assistant>"


def test_a_next_turn_runs_only_what_is_new(session):
    answer = "".join(event.text for event in session.chat(HELLO, **OPTIONS))
    turns = [*HELLO, {"role": "assistant", "content": answer}, {"role": "user", "content": "tea"}]
    before = session.statistics
    again = [event.token for event in session.chat(turns, **OPTIONS)]
    assert session.statistics.reused_tokens - before.reused_tokens >= len(session.tokenizer.encode("<user>the sea<assistant>"))
    list(session.generate([[1], [2]], max_new_tokens=1))  # two slots: nothing to keep
    assert [event.token for event in session.chat(turns, **OPTIONS)] == again


def test_conversations_in_a_batch_and_in_the_queue(session):
    prompts = [ChatPrompt(HELLO), ChatPrompt([{"role": "user", "content": "tea"}])]
    batch = list(session.generate(prompts, **OPTIONS))
    handles = [session.submit(prompt, **OPTIONS) for prompt in prompts]
    drain(session)
    for index, (prompt, handle) in enumerate(zip(prompts, handles, strict=True)):
        alone = [event.token for event in session.chat(prompt.messages, **OPTIONS)]
        assert alone == [event.token for event in batch if event.index == index] == list(handle.tokens)


def test_the_last_message_can_be_continued(session):
    next(session.generate(ChatPrompt([*HELLO, {"role": "assistant", "content": "the"}], add_generation_prompt=False), **OPTIONS))
    assert held(session) == f"{BOS}<user>the sea<assistant>the"


def test_messages_that_the_template_refuses(session):
    text = r"tokenizer_config\.json: the chat template refuses these messages: no such role"
    with pytest.raises(ConfigError, match=text):
        session.chat([{"role": "bad", "content": ""}])


def test_a_conversation_is_no_next_turn(session):
    list(session.generate([1, 2], **OPTIONS))
    with raises(ConfigError, "prompts[0]", expected="text or token ids for a next turn", got="conversation"):
        session.generate(ChatPrompt(HELLO), append=True)


def test_without_a_template_it_is_refused_at_once(tokenizer):
    session = make(tokenizer=tokenizer)
    assert not session.has_chat_template
    for call in (
        lambda: session.chat(HELLO),
        lambda: session.submit(ChatPrompt(HELLO)),
        lambda: session.generate([[1], ChatPrompt(HELLO)]),
    ):
        text = refuse(session, ConfigError, call)
        assert text.endswith("expected a model with a chat template for a conversation, got one without. Pass a text to continue.")


def test_without_a_tokenizer_it_is_refused_at_once():
    session = make()
    assert not session.has_chat_template
    text = refuse(session, ConfigError, lambda: session.chat(HELLO))
    assert text == "prompts[0]: expected token ids, got a conversation. The model folder has no tokenizer.json."


def test_whether_there_is_a_template(session):
    assert session.has_chat_template
