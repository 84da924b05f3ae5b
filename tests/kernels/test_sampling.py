"""A token for each row of logits: every memory against the definition, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.plain_choice import plain_choice
from tests.kernels.sampling import CHOICES, KINDS, Row, make_logits, make_rows, make_tokens, params_of, random_edits, results_of
from trt_kvcache import HostMemory
from trt_kvcache.kernels import SamplingWorkspace, choose_tokens
from trt_kvcache.kernels.host.philox import random_bits

OPTIONS = ("temperature", "top_k", "top_p", "min_p")


def run(memory, stream, logits, rows, *, steps=1, workspace=None):
    """The tokens of each step, and the arrays of the rows afterwards."""
    batch, vocab_size = logits.shape
    made, tokens = make_rows(memory, rows, vocab_size, stream), make_tokens(memory, batch, stream)
    on_device = memory.to_device(logits, stream=stream)
    workspace = workspace or SamplingWorkspace(memory, rows=batch, vocab_size=vocab_size, stream=stream)
    chosen = []
    for _ in range(steps):
        choose_tokens(on_device, made, tokens, workspace=workspace, stream=stream)
        chosen.append(tokens.numpy().tolist())
    np.testing.assert_array_equal(on_device.numpy(), logits)
    return chosen, made


def plain_tokens(logits, rows, steps=1):
    """The tokens that the definition gives for rows without penalties and bias."""
    tokens = []
    for step in range(steps):
        for values, row in zip(logits, rows, strict=True):
            options = {name: getattr(row, name) for name in OPTIONS}
            uniform = random_bits(row.seed, row.counter + step) / 2**53
            tokens.append(int(np.argmax(values)) if row.temperature == 0 else plain_choice(values, uniform=uniform, **options))
    return [tokens[start : start + len(rows)] for start in range(0, len(tokens), len(rows))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab_size", [1, 37, 3001])
def test_the_definition(memory, stream, kind, vocab_size):
    rng = np.random.default_rng(vocab_size)
    rows = [Row(seed=index + 5, counter=int(rng.integers(0, 9)), **one) for index, one in enumerate(CHOICES)]
    logits = np.stack([make_logits(kind, vocab_size, rng) for _ in rows])
    chosen, made = run(memory, stream, logits, rows, steps=2)
    assert chosen == plain_tokens(logits, rows, 2)
    assert params_of(made)["counter"].tolist() == [row.counter + 2 for row in rows]
    assert results_of(made)["token"].tolist() == chosen[-1]
    assert not results_of(made)["error"].any()


@pytest.mark.parametrize("kind", ["normal", "coarse", "steps"])
def test_host_and_device_choose_the_same(memory, stream, kind):
    rng = np.random.default_rng(3)
    rows = [Row(seed=index, **one, **random_edits(7001, rng)) for index, one in enumerate(CHOICES)]
    logits = np.stack([make_logits(kind, 7001, rng) for _ in rows])
    host = HostMemory()
    expected, of_host = run(host, host.create_stream(), logits, rows, steps=3)
    chosen, made = run(memory, stream, logits, rows, steps=3)
    assert chosen == expected
    for name in ("params", "results", "uses"):
        np.testing.assert_array_equal(getattr(made, name).numpy(), getattr(of_host, name).numpy(), name)
