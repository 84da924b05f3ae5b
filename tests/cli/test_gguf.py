"""Commands on a GGUF file, with the tokenizer and the chat template in its metadata."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

pytest.importorskip("gguf")

from tokenizers import Tokenizer as Backend

from tests.checkpoint.gguf.convert import convert
from tests.checkpoint.gguf.tokenizers_in_metadata import write_tokenizer
from tests.cli.conftest import GOLDEN, Run
from tests.paths import ROOT

CHAT = ROOT / "examples" / "tiny-chat"
GREETING = "Hello! How can I help you?\n"


def chat_file(path: Path, kind: str) -> Path:
    def add_tokenizer(writer):
        write_tokenizer(writer, Backend.from_file(str(CHAT / "tokenizer.json")), kind="gpt2", pre="gpt-2", eos=2)
        writer.add_chat_template((CHAT / "chat_template.jinja").read_text(encoding="utf-8"))

    return convert(CHAT, path, kind=kind, edit=add_tokenizer)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_file(tmp_path_factory.mktemp("gguf") / "chat.gguf", "Q8_0")


def test_generate_answers_by_the_template_of_the_file(run: Run, model: Path):
    done = run("generate", model, "--engine", "numpy", "--prompt", "hello", "-n", 8)
    assert (done.code, done.out) == (0, GREETING)
    assert "weights: GGUF Q8_0" in done.err


def test_chat_answers(run: Run, type_lines, model: Path):
    type_lines("Hello", terminal=False)
    done = run("chat", model, "--engine", "numpy", "-n", 8)
    assert (done.code, done.out) == (0, GREETING)


def test_score_and_perplexity(run: Run, model: Path, tmp_path: Path):
    text = tmp_path / "text.txt"
    text.write_text("Hello! How can I help you? " * 3, encoding="utf-8")
    scored = run("score", model, text, "--engine", "numpy")
    measured = run("perplexity", model, text, "--engine", "numpy", "--window", 16)
    assert (scored.code, measured.code) == (0, 0)
    assert "perplexity" in scored.out
    assert "windows of 16 tokens" in measured.out


def test_memory_counts_packed_weights(run: Run, model: Path):
    done = run("memory", model, "--engine")
    assert done.code == 0
    assert "weights:      GGUF Q8_0" in done.out


def test_a_snapshot_does_not_repeat_the_warning_of_dequantized_weights(run: Run, tmp_path: Path):
    file = chat_file(tmp_path / "chat.gguf", "Q4_1")
    snapshot = tmp_path / "x.snapshot"
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        done = run("generate", file, "--engine", "numpy", "--prompt", "hello", "-n", 8, "--save-snapshot", snapshot)
    assert (done.code, done.out, snapshot.exists()) == (0, GREETING, True)
    assert done.err.count("are dequantized when they are read") == 1


@pytest.mark.trt
def test_an_engine_folder_runs_on_the_file_that_it_embeds(run: Run, tmp_path: Path):
    file, engine = convert(GOLDEN / "qwen2-tied", tmp_path / "model.gguf", kind="F32"), tmp_path / "engine"
    built = run("build", file, "-o", engine, "--embed-weights", "--max-sequence-length", 29)
    assert built.code == 0, built.err
    file.unlink()
    assert (engine / "checkpoint" / "model.gguf").is_file()
    done = run("generate", engine, "--engine", "numpy", "--prompt-ids", "5,6,7", "-n", 2)
    assert done.code == 0, done.err
