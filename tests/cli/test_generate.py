from __future__ import annotations

import pytest

from trt_kvcache.cli import generate as generate_module
from trt_kvcache.cli.console import size
from trt_kvcache.session import InferenceSession

from .conftest import CACHE_NBYTES, GOLDEN, NO_GPU, SHIPPED, TOKEN_NBYTES

PROMPT = "The rabbit-hole went straight"
CONTINUED = f"{PROMPT} on like a tunnel for some way, and then dipped suddenly down"


@pytest.fixture
def generate(run):
    def generate_here(*arguments, folder=SHIPPED):
        return run("generate", folder, "--engine", "reference", *arguments)

    return generate_here


@pytest.fixture
def seen(monkeypatch):
    """What the session is asked for: ``seen["generate"]`` and ``seen["from_model"]``."""
    asked = {}

    def note(name, result):
        def noted(first, *more, **options):
            asked[name] = {**options, "folder": first} if name == "from_model" else options
            return result(first)

        return noted

    monkeypatch.setattr(InferenceSession, "generate", note("generate", lambda session: iter(())))
    opened = InferenceSession.from_model
    monkeypatch.setattr(InferenceSession, "from_model", note("from_model", lambda folder: opened(folder, engine="reference")))
    return asked


def test_one_prompt_is_continued_with_statistics_as_one_line_on_stderr(generate):
    done = generate("--prompt", PROMPT, "--max-new-tokens", 7)
    assert done.code == 0
    assert CONTINUED.startswith(done.out.removesuffix("\n"))
    assert done.out.startswith(f"{PROMPT} on like a")
    assert (done.out.count("\n"), done.err.count("\n")) == (1, 1)
    assert done.err.startswith("ReferenceEngine on cpu: prefill 13 tokens in ")
    assert "; decode 6 tokens, " in done.err
    assert done.err.endswith(f"; cache {size(19 * TOKEN_NBYTES)} live of {size(512 * TOKEN_NBYTES)}\n")
    assert generate("-p", PROMPT, "--max-new-tokens", 7, "--no-stats").err == ""


def test_text_is_written_as_it_comes(generate, monkeypatch):
    pieces = []
    monkeypatch.setattr(generate_module, "put", pieces.append)
    generate("-p", PROMPT, "--max-new-tokens", 5)
    assert (pieces[0], pieces[-1], len(pieces)) == (PROMPT, "\n", 7)


def test_several_prompts_are_written_one_after_another(generate):
    done = generate("-p", PROMPT, "-p", "Alice was beginning", "--prompt-ids", "0 5,9", "--max-new-tokens", 14)
    first, second, third = done.out.splitlines()
    assert done.code == 0
    assert first == f"[0] {CONTINUED[: len(first) - 4]}"
    assert second.startswith("[1] Alice was beginning to get very tired")
    assert third.startswith("[2] 0 5 9")


def test_a_model_without_a_tokenizer_works_on_token_ids(generate):
    done = generate("--prompt-ids", "5,7,11", "--max-new-tokens", 4, "--ignore-eos", folder=GOLDEN / "llama")
    numbers = [int(part) for part in done.out.split()]
    assert (done.code, numbers[:3], len(numbers)) == (0, [5, 7, 11], 7)


def test_options_reach_the_sampler(generate, seen):
    options = ["--max-new-tokens", 3, "--temperature", 0.5, "--top-k", 4, "--top-p", 0.75, "--min-p", 0.125]
    generate("-p", "A", *options, "--seed", 6, "--stop", ".", "--stop", "!", "--ignore-eos")
    expected = {"max_new_tokens": 3, "temperature": 0.5, "top_k": 4, "top_p": 0.75, "min_p": 0.125, "seed": 6, "stop": (".", "!")}
    assert seen["generate"] == {**expected, "ignore_eos": True}
    generate("-p", "A")
    assert seen["generate"] == {"max_new_tokens": 128}, "the model's own defaults hold for what was not given"


def test_options_reach_the_session(run, generate, seen):
    sizes = ["--max-batch-size", 3, "--max-sequence-length", 99, "--dtype", "float32", "--attention", "mask", "--flavour", "tensorrt_rtx"]
    generate("-p", "A", *sizes)
    expected = {"max_batch_size": 3, "max_sequence_length": 99, "dtype": "float32", "attention": "mask", "flavour": "tensorrt_rtx"}
    assert callable(seen["from_model"].pop("progress"))
    assert seen["from_model"] == {**expected, "engine": "reference", "device": 0, "folder": str(SHIPPED)}
    run("generate", SHIPPED, "-p", "A", "-p", "B")
    assert callable(seen["from_model"].pop("progress"))
    assert seen["from_model"] == {"max_batch_size": 2, "engine": "auto", "flavour": "auto", "device": 0, "folder": str(SHIPPED)}


def test_a_full_cache_ends_the_text_with_a_warning(generate):
    done = generate("-p", PROMPT, "-p", "Alice", "--max-sequence-length", 16, "--max-new-tokens", 8)
    assert done.code == 0
    assert done.err.splitlines()[0] == "warning: the cache is full: max_sequence_length=16 ended the text of slot 0."
    assert done.out.startswith(f"[0] {PROMPT} on")
    assert "warning" not in generate("-p", PROMPT, "--max-sequence-length", 16, "--max-new-tokens", 3).err


def test_ctrl_c_keeps_what_was_written(generate, interrupt_after):
    interrupt_after(3)
    done = generate("-p", PROMPT)
    assert (done.code, done.out, done.err) == (130, f"{PROMPT} on like\n", "interrupted\n")


@pytest.mark.usefixtures("without_gpu")
def test_auto_warns_once_on_every_run_and_says_why(run, engine):
    for folder, nbytes in ((SHIPPED, 512 * TOKEN_NBYTES), (engine, CACHE_NBYTES)):
        for _ in range(2):  # although Python shows a warning of one place once
            done = run("generate", folder, "-p", PROMPT, "--max-new-tokens", 4)
            assert done.code == 0
            assert CONTINUED.startswith(done.out.rstrip("\n"))
            warning, statistics = done.err.splitlines()
            assert warning == f"warning: running the NumPy reference engine: {NO_GPU}."
            assert statistics.endswith(f" of {size(nbytes)}")


def test_a_saved_sequence_goes_on(generate, tmp_path):
    saved, refused = tmp_path / "one.kv", ("--resume", tmp_path / "one.kv", "--prompt", "x")
    first = generate("-p", PROMPT, "--max-new-tokens", 4, "--save-snapshot", saved)
    assert (first.out + generate("--resume", saved, "--max-new-tokens", 3).out).replace("\n", "") in CONTINUED
    assert "expected prompts or --resume, got both" in generate(*refused).err
    assert "--save-snapshot: expected with one prompt, got 2" in generate("-p", "a", "-p", "b", "--save-snapshot", saved).err
    saved.write_bytes(saved.read_bytes()[:99])
    assert "expected a snapshot" in generate("--resume", saved).err
