"""The model in examples/tiny-chat: it answers, calls tools, and builds with what needs a head dim of 64."""

import json

import pytest
from typer.testing import CliRunner

from tests.paths import ROOT
from trt_kvcache import ChatPrompt, InferenceSession
from trt_kvcache.cli.app import app

FOLDER = ROOT / "examples" / "tiny-chat"
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}},
}
#: Log-probability between the two most likely tokens: more than any rounding makes of it.
MARGIN = 1.0


@pytest.fixture(scope="module")
def session():
    with InferenceSession.from_model(FOLDER, engine="reference", max_sequence_length=512) as one:
        yield one


def said(session, question, tools=None):
    """Return what the model answers, which must be beyond doubt."""
    events = list(session.generate(ChatPrompt([{"role": "user", "content": question}], tools), max_new_tokens=80, logprobs=2))
    assert min(event.top_logprobs[0][1] - event.top_logprobs[1][1] for event in events) > MARGIN
    assert events[-1].finish_reason == "stop"
    return "".join(event.text for event in events)


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("Hello", "Hello! How can I help you?"),
        ("Who are you?", "I am tiny-chat, a very small model that comes with trt_kvcache."),
        ("What is the capital of France?", "The capital of France is Paris."),
        ("What is 3 plus 4?", "3 plus 4 is 7."),
        ("Guten Tag!", "Ich kann nur ein paar Wörter: schön, grün, süß."),
    ],
)
def test_a_question_is_answered(session, question, answer):
    assert said(session, question) == answer


def test_a_tool_is_called_once_for_each_city(session):
    text = said(session, "What is the weather in Paris and Rome?", [WEATHER])
    calls = [json.loads(part.removesuffix("</tool_call>")) for part in "".join(text.split("\n")).split("<tool_call>")[1:]]
    assert calls == [{"name": "get_weather", "arguments": {"city": city}} for city in ("Paris", "Rome")]


def test_the_command_line_answers():
    done = CliRunner().invoke(app, ["chat", str(FOLDER), "--engine", "reference", "-q"], input="What is the capital of France?\n/exit\n")
    assert done.exit_code == 0, done.output
    assert "The capital of France is Paris." in done.output


def test_it_is_small():
    assert sum(file.stat().st_size for file in FOLDER.iterdir() if file.is_file()) < 2_000_000
    assert FOLDER.joinpath("model.safetensors").stat().st_size > 1_000_000


@pytest.mark.trt
@pytest.mark.parametrize(
    "options",
    [
        ["--attention", "plugin"],
        pytest.param(["--kv-dtype", "fp8"], marks=pytest.mark.slow),
        ["--kv-dtype", "int8"],
        ["--quantize", "int4"],
    ],
    ids=" ".join,
)
def test_it_builds(tmp_path, options):
    done = CliRunner().invoke(app, ["build", str(FOLDER), "-o", str(tmp_path / "engine"), *options])
    assert done.exit_code == 0, done.output
