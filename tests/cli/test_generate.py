import pytest

from trt_kvcache.cli.console import size
from trt_kvcache.session.session import InferenceSession

from .conftest import CACHE_NBYTES, NO_GPU, SHIPPED, TOKEN_NBYTES

PROMPT = "The rabbit-hole went straight"
CONTINUED = f"{PROMPT} on like a tunnel for some way, and then dipped suddenly down"


@pytest.fixture
def generate(run):
    def generate_here(*arguments, folder=SHIPPED):
        return run("generate", folder, "--engine", "reference", *arguments)

    return generate_here


@pytest.fixture
def seen(monkeypatch):
    asked = {}

    def note(name, result):
        def noted(first, *more, **options):
            asked[name] = options
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


def test_options_reach_the_session(generate, seen):
    options = ["--max-new-tokens", 3, "--temperature", 0.5, "--top-k", 4, "--top-p", 0.75, "--min-p", 0.125]
    sizes = ["--max-batch-size", 3, "--max-sequence-length", 99, "--dtype", "float32", "--attention", "mask", "--flavour", "tensorrt_rtx"]
    generate("-p", "A", *options, "--seed", 6, "--stop", ".", "--stop", "!", "--ignore-eos", *sizes)
    opened = {"max_batch_size": 3, "max_sequence_length": 99, "dtype": "float32", "attention": "mask", "flavour": "tensorrt_rtx"}
    assert seen["from_model"].items() >= {**opened, "engine": "reference", "device": 0}.items()
    expected = {"max_new_tokens": 3, "temperature": 0.5, "top_k": 4, "top_p": 0.75, "min_p": 0.125, "seed": 6, "stop": (".", "!")}
    assert seen["generate"] == {**expected, "ignore_eos": True}
    generate("-p", "A")
    assert seen["generate"] == {"max_new_tokens": 128}, "the model's own defaults hold for what was not given"


@pytest.mark.usefixtures("without_gpu")
def test_auto_warns_once_on_every_run_and_says_why(run, engine):
    for folder, nbytes in ((SHIPPED, 512 * TOKEN_NBYTES), (engine, CACHE_NBYTES)):  # although Python shows a warning of one place once
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
