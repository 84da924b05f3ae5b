import shlex

import pytest

from .conftest import GOLDEN, SHIPPED

NUMBERS = "expected a folder, or --layers, --kv-heads, --head-dim and --max-sequence-length."
SETTLED = "expected with a Hugging Face folder only; ENGINE is an engine folder, built with its own."


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("build X", "Missing option '--output' / '-o'."),
        ("generate X", "expected --prompt or --prompt-ids, got neither."),
        ("generate X -p \udcff", "Invalid value for --prompt: expected UTF-8, got '\\udcff'."),
        ("memory", NUMBERS),
    ],
)
def test_wrong_usage_is_exit_code_2(run, line, complaint):
    done = run(*shlex.split(line))
    assert (done.code, done.out) == (2, "")
    assert complaint in done.complaint


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("generate ENGINE -p A --engine tensorrt", "CudaMemory: this test has no GPU."),
        ("generate ENGINE REF -p A --dtype float16", f"dtype: {SETTLED}"),
        ("generate IDS REF -p A", "prompts[0]: expected token ids, got text. The model folder has no tokenizer.json."),
        (
            "generate MODEL REF --prompt-ids 1,2,3 --max-sequence-length 2",
            "prompt 0 has 3 tokens; that exceeds max_sequence_length=2. Nothing was",
        ),
        ("inspect MODEL", "MODEL: expected an engine folder, but it has no engine.plan. `trt-kvcache build` makes one."),
    ],
)
@pytest.mark.usefixtures("without_gpu")
def test_what_cannot_be_done_is_one_line(run, engine, line, complaint):
    places = {"IDS": GOLDEN / "llama", "MODEL": SHIPPED, "ENGINE": engine, "REF": "--engine reference"}
    for name, place in places.items():
        line, complaint = line.replace(name, str(place)), complaint.replace(name, str(place))
    done = run(*shlex.split(line))
    assert (done.code, done.out, done.err.count("\n")) == (1, "", 1)
    assert done.err.startswith("error: ")
    assert complaint in done.err
