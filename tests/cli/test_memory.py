import pytest

from .conftest import SHIPPED, TOKEN_NBYTES

LLAMA_7B = ("--layers", 32, "--kv-heads", 32, "--head-dim", 128, "--max-sequence-length", 2048)
WITH_GIB = """\
1 slot of 2048 tokens, float16, separate
per token:    524288 B (512.0 KiB)
per sequence: 1073741824 B (1.0 GiB)
in all:       1073741824 B (1.0 GiB)
in 4 GiB (4294967296 B):
  longest sequence with 1 slot: 8192 tokens
  largest batch of 2048 tokens: 4 slots
"""


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ((*LLAMA_7B, "--gib", 4), ["│ 0-31   │ 32       │ 128      │        33554432 │ 32.0 MiB │", WITH_GIB]),
        ((SHIPPED, "--gib", 0.5), [f"per token:    {TOKEN_NBYTES} B", f"longest sequence with 1 slot: {2**29 // TOKEN_NBYTES} tokens"]),
    ],
)
def test_what_is_shown(run, arguments, shown):
    done = run("memory", *arguments)
    assert (done.code, done.err) == (0, "")
    for text in shown:
        assert text in done.out


def test_an_engine_folder(run, engine):
    assert "3 slots of 38 tokens, float16, separate" in run("memory", engine).out
    assert "5 slots of 38 tokens, float16, separate" in run("memory", engine, "--max-batch-size", 5).out
