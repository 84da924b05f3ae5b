"""The text of a stream: ``TokenStream.text`` and ``texts``, and ``InferenceSession.complete``."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tests.helpers.assertions import raises
from tests.helpers.sessions import make
from tests.session.reference_sessions import SAMPLED, fails
from trt_kvcache import AsyncSession, InferenceSession, SamplingParams, SessionSource
from trt_kvcache.errors import ClosedError, ConfigError, ProcessorError, RangeError, ShapeError, ThreadError

PROMPT = "The rabbit-hole went"
PROMPTS = [PROMPT, "Alice was", "Down"]
OPTIONS = {"max_new_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def session():
    with InferenceSession.from_model("examples/tiny-llama", engine="reference", max_batch_size=2, max_sequence_length=64) as opened:
        yield opened


@pytest.fixture(scope="module")
def expected(session):
    return ["".join(event.text for event in session.generate(prompt, **OPTIONS)) for prompt in PROMPTS]


def test_the_text_of_a_stream(session, expected):
    assert session.generate(PROMPT, **OPTIONS).text == expected[0] != ""


def test_the_text_has_what_was_read_before(session, expected):
    stream = session.generate(PROMPT, **OPTIONS)
    next(stream)
    next(stream)
    assert stream.text == expected[0]


def test_the_text_can_be_read_again(session, expected):
    stream = session.generate(PROMPT, **OPTIONS)
    assert stream.text == stream.text == expected[0]
    assert list(stream) == []


@pytest.mark.parametrize("count", [2, 3], ids=["in slots", "queued"])
def test_the_texts_of_a_batch(session, expected, count):
    stream = session.generate(PROMPTS[:count], **OPTIONS)
    next(stream)
    assert stream.texts == expected[:count]


def test_one_text_of_a_batch_is_refused_before_it_runs(session):
    stream = session.generate(PROMPTS[:2], **OPTIONS)
    with raises(ShapeError, "text", expected="stream of one prompt", got=2):
        stream.text  # noqa: B018
    assert "tokens=0" in repr(stream)


def test_a_stop_text_is_not_part_of_it(session, expected):
    stop = expected[0][3:5]
    assert session.generate(PROMPT, stop=[stop], **OPTIONS).text == expected[0][: expected[0].index(stop)]


def test_after_close_it_is_what_was_read(session):
    stream = session.generate(PROMPT, **OPTIONS)
    read = next(stream).text
    stream.close()
    assert stream.text == read


def test_the_text_outlives_the_session():
    with InferenceSession.from_model("examples/tiny-llama", engine="reference") as short:
        read, unread = short.generate(PROMPT, **OPTIONS), short.generate([5], **OPTIONS)
        text = short.generate(PROMPT, **OPTIONS).text
        read = short.generate(PROMPT, **OPTIONS)
        assert read.text == text
    assert read.text == text
    with pytest.raises(ClosedError, match="this InferenceSession is closed"):
        unread.text  # noqa: B018


def test_after_an_error_there_is_no_part_of_a_text(session):
    stream = session.generate(PROMPT, **OPTIONS)
    next(stream)
    fails(session, lambda: list(stream))
    for _ in range(2):
        with pytest.raises(ClosedError, match="expected all of its tokens, but it ended with ZeroDivisionError: division by zero"):
            stream.texts  # noqa: B018


def test_after_another_call_there_is_no_part_of_a_text(session):
    stream = session.generate(PROMPT, **OPTIONS)
    next(stream)
    session.prefill([[5]])
    with pytest.raises(ClosedError, match="another call has changed the sequences since"):
        stream.text  # noqa: B018


def test_a_refused_thread_does_not_end_a_stream(session, expected):
    """Reading in a second thread while the first one is in a step is refused, and changes nothing."""
    refused, inside, go_on = [], threading.Event(), threading.Event()

    def wait(tokens, logits):
        inside.set()
        go_on.wait(10)
        return logits

    stream = session.generate(PROMPT, logits_processors=[wait], **OPTIONS)
    texts = []
    first = threading.Thread(target=lambda: texts.append(stream.text))
    first.start()
    inside.wait(10)
    try:
        stream.text  # noqa: B018
    except ThreadError as error:
        refused.append(error)
    go_on.set()
    first.join()
    assert len(refused) == 1
    assert texts == [stream.text] == [expected[0]]


def test_a_processor_that_reads_its_own_stream(session):
    def nested(tokens, logits):
        stream.text  # noqa: B018
        return logits

    stream = session.generate(PROMPT, logits_processors=[nested], **OPTIONS)
    with pytest.raises(ProcessorError, match="already executing"):
        stream.text  # noqa: B018


def test_without_a_tokenizer_there_is_no_text():
    session = make()
    stream = session.generate([1, 2], max_new_tokens=2)
    for call in (lambda: stream.text, lambda: stream.texts, lambda: session.complete([1, 2])):
        with pytest.raises(ConfigError, match=r"expected a model folder with tokenizer\.json, got none"):
            call()
    assert len(list(stream)) == 2


# --- complete ---


def test_complete_returns_texts_in_order(session, expected):
    assert session.complete(PROMPTS, **OPTIONS) == expected


def test_complete_of_one_prompt_is_a_list_too(session, expected):
    assert session.complete(PROMPT, **OPTIONS) == expected[:1]
    assert session.complete(session.tokenizer.encode(PROMPT), **OPTIONS) == expected[:1]


def test_complete_takes_what_generate_takes(session):
    params = [SamplingParams(**SAMPLED, max_new_tokens=count) for count in (2, 3)]
    streamed = session.generate(PROMPTS[:2], params).texts
    assert session.complete(PROMPTS[:2], params) == streamed
    follows = session.generate(["a", "b"], append=True, **OPTIONS).texts
    session.complete(PROMPTS[:2], params)
    assert session.complete(["a", "b"], append=True, **OPTIONS) == follows


@pytest.mark.parametrize("prompts", [[], [[]], {"a": 1}, None, 5, b"bytes"])
def test_complete_refuses_what_generate_refuses(session, prompts):
    with pytest.raises(Exception) as by_generate:
        session.generate(prompts)
    with pytest.raises(type(by_generate.value)) as by_complete:
        session.complete(prompts)
    assert str(by_complete.value) == str(by_generate.value)


def completed(source, prompts, **options):
    async def main():
        async with AsyncSession(source, max_requests=2) as served:
            try:
                return await served.complete(prompts, **options)
            finally:
                await asyncio.sleep(0)
                assert await served.run(lambda session: session.num_waiting_requests) == 0

    return asyncio.run(asyncio.wait_for(main(), 60))


def source(**options):
    return SessionSource("examples/tiny-llama", engine="reference", max_batch_size=2, max_sequence_length=64, **options)


@pytest.mark.parametrize("prompts", [PROMPTS, PROMPT], ids=["more than may be submitted", "one"])
def test_complete_of_many_callers(expected, prompts):
    assert completed(source(), prompts, **OPTIONS) == expected[: len(prompts) if isinstance(prompts, list) else 1]


@pytest.mark.parametrize("prompts", [[], {"a": 1}, None, 5, b"bytes", [PROMPT, []], [PROMPT, [99999]]])
def test_complete_of_many_callers_refuses_and_leaves_nothing(prompts):
    with pytest.raises((ShapeError, RangeError), match="prompts"):
        completed(source(), prompts, max_new_tokens=40)


def test_complete_of_many_callers_without_a_tokenizer():
    with raises(ConfigError, "text", expected="model folder with tokenizer.json", got="none"):
        completed(make(), [1])
