"""SmolLM2-135M-Instruct, as users meet it: text, chat, streams, reuse, snapshots, fewer bits, an engine folder, the server."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.assertions import SAME_SUMS, assert_close
from tests.paths import ROOT
from tests.real.conftest import opened
from trt_kvcache import ChatPrompt, InferenceSession, build_engine, text_perplexity
from trt_kvcache.engine_folder.folder import EngineFolder

pytestmark = [pytest.mark.real, pytest.mark.filterwarnings("ignore:.*are dequantized when they are read:UserWarning")]

PROMPTS = [
    "What is the capital of France?",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Die Straße nach Zürich: 12345 km, naïve 漢字 🙂👩‍🚀 — it's\t\n\n done.",
]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
TURNS = ["What is the capital of France?", "And of Italy?", "Which of the two is larger?"]


def test_token_ids_are_those_of_transformers(session: InferenceSession, hugging_face: tuple[Any, Any]) -> None:
    _, tokenizer = hugging_face
    for prompt in PROMPTS:
        ids = session.tokenizer.encode(prompt)
        assert ids == tokenizer(prompt).input_ids
        assert session.tokenizer.decode(ids) == prompt
    text = tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    assert session.tokenizer.apply_chat_template(QUESTION) == text


def log_probabilities(hugging_face: tuple[Any, Any], ids: list[int]) -> np.ndarray[Any, Any]:
    """Return those of transformers, (tokens, vocabulary): row i is of the token behind token i."""
    import torch

    with torch.no_grad():
        return torch.log_softmax(hugging_face[0](torch.tensor([ids])).logits[0].double(), dim=-1).numpy()


@pytest.mark.parametrize("engine", ["reference", "torch"])
def test_tokens_and_log_probabilities_are_those_of_transformers(engine: str, model_file: Path, hugging_face: tuple[Any, Any]) -> None:
    with opened(model_file, engine, max_sequence_length=64) as session:
        prompts = [session.tokenizer.encode(prompt) for prompt in PROMPTS]
        answers: list[list[Any]] = [[], [], []]
        for event in session.generate(prompts, max_new_tokens=8, ignore_eos=True, temperature=0, logprobs=0):
            answers[event.index].append(event)
        scores = session.score([ids + [event.token for event in events] for ids, events in zip(prompts, answers, strict=True)])
    for ids, events, score in zip(prompts, answers, scores, strict=True):
        tokens = [event.token for event in events]
        expected = log_probabilities(hugging_face, ids + tokens)
        largest = np.abs(expected).max()
        chosen = expected[np.arange(len(ids) + len(tokens) - 1), (ids + tokens)[1:]]
        assert (chosen[-8:] >= expected[-9:-1].max(axis=1) - 2 * SAME_SUMS * largest).all()
        assert_close([*[event.logprob for event in events], largest], [*chosen[-8:], largest])
        assert_close([*score.logprobs[1:], largest], [*chosen, largest])


def test_the_answer_to_a_question(session: InferenceSession) -> None:
    assert "Paris" in "".join(event.text for event in session.chat(QUESTION, max_new_tokens=12, temperature=0))


@pytest.mark.parametrize(("cut", "end"), [(None, ""), (-1, "\ufffd")], ids=["whole", "cut inside a character"])
def test_streamed_text_has_whole_characters(session: InferenceSession, cut: int | None, end: str) -> None:
    text = " 漢字かな ကမ္ဘာ 👩‍🚀🙂"
    ids = session.tokenizer.encode(text)[:cut]
    assert len(ids) > len(text)  # most characters are several tokens

    def write(tokens: tuple[int, ...], logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        logits[:] = -np.inf
        logits[ids[len(tokens) - 1]] = 0
        return logits

    parts = [event.text for event in session.generate([[504]], max_new_tokens=len(ids), logits_processors=[write])]
    assert "".join(parts) == text[: None if cut is None else -1] + end
    assert not any("\ufffd" in part for part in parts[:-1])


def conversation(session: InferenceSession) -> list[list[int]]:
    """Return the tokens of three answers, with another conversation in the slot between two of them."""
    messages: list[dict[str, str]] = []
    answers = []
    for turn in TURNS:
        messages.append({"role": "user", "content": turn})
        events = list(session.generate([ChatPrompt(messages)], max_new_tokens=10, temperature=0))
        answers.append([event.token for event in events])
        messages.append({"role": "assistant", "content": "".join(event.text for event in events)})
        list(session.generate("Something else", max_new_tokens=2))
    return answers


def test_a_prompt_cache_over_three_turns_changes_no_token(model_file: Path) -> None:
    with opened(model_file, "torch") as session:
        expected = conversation(session)
        run = session.statistics.prefill_tokens
    with opened(model_file, "torch", prompt_cache_bytes=1 << 26) as session:
        assert conversation(session) == expected
        assert session.prompt_cache.hits >= 2
        assert session.statistics.prefill_tokens <= run - session.statistics.reused_tokens
        assert session.statistics.reused_tokens > 80  # the turns before: 38 tokens and more


RESUME = """
import json, sys, warnings
warnings.simplefilter("ignore")
from trt_kvcache import InferenceSession
with InferenceSession.from_model(sys.argv[1], engine="torch", dtype="float32", max_sequence_length=128) as session:
    print(json.dumps([event.token for event in session.resume(sys.argv[2], max_new_tokens=8, temperature=0.8)]))
"""


def test_another_process_goes_on_from_a_snapshot(model_file: Path, tmp_path: Path) -> None:
    options = {"temperature": 0.8, "seed": 7}
    with opened(model_file, "torch") as session:
        whole = [event.token for event in session.generate(PROMPTS[0], max_new_tokens=16, ignore_eos=True, **options)]
        begun = [event.token for event in session.generate(PROMPTS[0], max_new_tokens=8, ignore_eos=True, **options)]
        session.save_snapshot(tmp_path / "half.kv")
    command = [sys.executable, "-c", RESUME, str(model_file), str(tmp_path / "half.kv")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True, cwd=ROOT)
    assert begun + json.loads(done.stdout) == whole


def test_fewer_bits_cost_what_they_should(half_file: Path) -> None:
    text = (ROOT / "examples" / "tiny-llama" / "text.txt").read_text(encoding="utf-8")[:2000]
    found = {}
    for quantize in (None, "int8", "int4"):
        with opened(half_file, "torch", dtype=None, max_batch_size=1, quantize=quantize) as session:
            found[quantize or "float16"] = text_perplexity(session, text, window=256).perplexity
    assert 3 < found["float16"] < 60
    assert abs(found["int8"] / found["float16"] - 1) < 0.03
    assert 1 < found["int4"] / found["float16"] < 1.4


def test_an_engine_is_built_without_a_gpu(model_file: Path, tmp_path: Path) -> None:
    options = {"max_sequence_length": 64, "compute_capabilities": ["8.6"], "builder_optimization_level": 0}
    report = build_engine(model_file, tmp_path / "engine", **options)
    assert report.plan_nbytes > 0
    folder = EngineFolder.open(report.path)
    assert folder.config.model.num_layers == 30
    with InferenceSession.open(report.path, engine="reference") as session:
        assert "Paris" in "".join(event.text for event in session.chat(QUESTION, max_new_tokens=12, temperature=0))


@contextmanager
def server(*options: str) -> Iterator[str]:
    """Run ``trt-kvcache serve``; yield its address."""
    command = [sys.executable, "-W", "ignore", "-m", "trt_kvcache", "serve", *options, "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            lines: list[str] = []
            while not (found := re.search(r"http://[\d.]+:\d+", lines[-1] if lines else "")):
                lines.append(process.stderr.readline())
                assert lines[-1], "".join(lines)
            yield found[0]
        finally:
            process.kill()


def test_the_server_answers_the_client_of_openai(model_file: Path) -> None:
    import openai

    # In float32: the first token is 0.08 ahead of the second, which bfloat16, the default dtype of such a file, rounds to a tie.
    with server(str(model_file), "--engine", "torch", "--dtype", "float32", "--max-sequence-length", "256") as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=120)
        [model] = client.models.list().data
        asked: dict[str, Any] = {"model": model.id, "messages": QUESTION, "max_tokens": 12, "temperature": 0}
        answer = client.chat.completions.create(**asked).choices[0]
        assert "Paris" in answer.message.content
        assert answer.finish_reason == "stop"
        parts = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**asked, stream=True) if chunk.choices]
        assert "".join(parts) == answer.message.content
        assert len(parts) > 3
