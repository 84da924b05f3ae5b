"""What the commands refuse and in which words: wrong usage before a folder is opened, all else as one line."""

import shlex

import pytest

from .conftest import CONFIG, GOLDEN, SHIPPED

NUMBERS = "expected a folder, or --layers, --kv-heads, --head-dim and --max-sequence-length."
SETTLED = "expected with a Hugging Face folder only; ENGINE is an engine folder, built with its own."
TOKEN = f"expected an integer from 0 to {CONFIG.vocab_size - 1}, got "


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("build X", "Missing option '--output' / '-o'."),
        ("chat X --top-p 2", "Invalid value for --top-p: expected 0 < top_p <= 1, got 2.0."),
        ("generate X", "expected --prompt or --prompt-ids, got neither."),
        ("generate X --prompt-ids 1,a", "Invalid value for --prompt-ids: expected integers such as 1,2,3, got '1,a'."),
        ("generate X -p \udcff", "Invalid value for --prompt: expected UTF-8, got '\\udcff'."),
        ("generate X -p A --min-p 1", "Invalid value for --min-p: expected 0 <= min_p < 1, got 1.0."),
        ("generate X -p A --stop ''", "Invalid value for --stop: expected texts that are not empty, got ''."),
        ("memory", NUMBERS),
        ("memory X --layers 3", "expected a folder, or --layers, --kv-heads and --head-dim, got both."),
    ],
)
def test_wrong_usage_is_exit_code_2(run, line, complaint):
    done = run(*shlex.split(line))
    assert (done.code, done.out) == (2, "")
    assert complaint in done.complaint


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("compare ENGINE REF --prompt-ids 1 --prompt-ids 1 -p A -p B", "prompts: expected 1 to max_batch_size=3 of them, got 4."),
        ("generate ENGINE -p A --engine tensorrt", "CudaMemory: this test has no GPU."),
        ("generate ENGINE REF -p A --dtype float16", f"dtype: {SETTLED}"),
        ("generate IDS REF -p A", "prompts[0]: expected token ids, got text. The model folder has no tokenizer.json."),
        (f"generate MODEL REF --prompt-ids 1,{CONFIG.vocab_size}", f"prompts[0][1]: {TOKEN}"),
        (
            "generate MODEL REF --prompt-ids 1,2,3 --max-sequence-length 2",
            "prompt 0 has 3 tokens; that exceeds max_sequence_length=2. Nothing was",
        ),
        ("inspect MODEL", "MODEL: expected an engine folder, but it has no engine.plan. `trt-kvcache build` makes one."),
        ("memory NO-MODEL", "NO-MODEL/config.json: expected a file, got nothing there. A Hugging Face model folder has one."),
    ],
)
@pytest.mark.usefixtures("without_gpu")
def test_what_cannot_be_done_is_one_line(run, engine, line, complaint):
    places = {"NO-MODEL": GOLDEN, "IDS": GOLDEN / "llama", "MODEL": SHIPPED, "ENGINE": engine, "REF": "--engine reference"}
    for name, place in places.items():
        line, complaint = line.replace(name, str(place)), complaint.replace(name, str(place))
    done = run(*shlex.split(line))
    assert (done.code, done.out, done.err.count("\n")) == (1, "", 1)
    assert done.err.startswith("error: ")
    assert complaint in done.err
