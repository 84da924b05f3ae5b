"""A token for each row of logits: every memory against the definition, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.assertions import raises
from tests.kernels.plain_choice import plain_choice
from tests.kernels.sampling import CHOICES, KINDS, Row, make_logits, make_rows, make_tokens, params_of, random_edits, results_of
from trt_kvcache import DeviceTensor, HostMemory
from trt_kvcache.errors import DTypeError, PlaceError, RangeError, ShapeError
from trt_kvcache.kernels import SamplingWorkspace, choose_tokens, token_logprobs
from trt_kvcache.kernels.most_likely import log_probabilities
from trt_kvcache.kernels.philox import random_bits

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
@pytest.mark.parametrize("vocab_size", [1, 37, pytest.param(3001, marks=pytest.mark.long)])
def test_the_definition(memory, stream, kind, vocab_size):
    rng = np.random.default_rng(vocab_size)
    rows = [Row(seed=index + 5, counter=int(rng.integers(0, 9)), **one) for index, one in enumerate(CHOICES)]
    logits = np.stack([make_logits(kind, vocab_size, rng) for _ in rows])
    chosen, made = run(memory, stream, logits, rows, steps=2)
    assert chosen == plain_tokens(logits, rows, 2)
    assert params_of(made)["counter"].tolist() == [row.counter + 2 for row in rows]
    assert results_of(made)["token"].tolist() == chosen[-1]
    assert not results_of(made)["error"].any()


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [512, 32_000, 128_256, 262_144])
def test_as_many_rows_as_many_slots_verify(memory, stream, vocab_size):
    """All blocks of a launch must be resident, however many rows share the GPU."""
    rng = np.random.default_rng(vocab_size)
    for count in (1, 8, 33, 64, 128, 136, 264, 300):
        logits = rng.standard_normal((count, vocab_size)).astype(np.float32)
        chosen, _ = run(memory, stream, logits, [Row(temperature=0.0)] * count)
        assert chosen == [logits.argmax(-1).tolist()]


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


def test_rows_that_shared_memory_has_no_room_for(memory, stream, monkeypatch):
    """Blocks read their logits again, after bias and penalties from the workspace."""
    if memory.is_host:
        pytest.skip("shared memory is of a device")
    monkeypatch.setattr("trt_kvcache.kernels.sampling_kernels._BINS_NBYTES", 1 << 30)
    test_host_and_device_choose_the_same(memory, stream, "steps")


@pytest.mark.parametrize("counter", [0, 1, 2, 3, 4, 2**40 + 2])
@pytest.mark.parametrize("seed", [0, 2**63 - 1])
def test_random_numbers(memory, stream, seed, counter):
    """1024 tokens that are equally likely: ten bits of the random number."""
    chosen, _ = run(memory, stream, np.zeros((1, 1024), np.float32), [Row(seed=seed, counter=counter)], steps=3)
    assert [one for (one,) in chosen] == [random_bits(seed, counter + step) >> 43 for step in range(3)]


@pytest.mark.parametrize("options", [{}, {"top_p": 0.8}, {"top_k": 3}, {"top_k": 3, "top_p": 0.7}, {"min_p": 0.3}])
def test_ties_at_the_border(memory, stream, options):
    """Logits of three values, many of each, and more than the border has room for."""
    logits = np.tile(np.array([0.0, 1.0, 1.5, 1.0, -0.0, 1.5], np.float32), 500)[None].repeat(12, 0)
    rows = [Row(seed=seed, temperature=0.8, **options) for seed in range(12)]
    chosen, _ = run(memory, stream, logits, rows)
    assert chosen == plain_tokens(logits, rows)


@pytest.mark.parametrize("options", [{"top_p": 0.8}, {"top_k": 5}])
@pytest.mark.parametrize("vocab_size", [1024, 2000, 6100])
def test_weights_that_32_bits_have_no_room_for(memory, stream, vocab_size, options):
    """Equal logits: four sums of 256 tokens and nothing else are 0 in 32 bits, more are carried."""
    logits = np.full((4, vocab_size), 2.5, np.float32)
    logits[2:, ::3] = 1.25
    rows = [Row(seed=seed, **options) for seed in range(4)]
    chosen, _ = run(memory, stream, logits, rows)
    assert chosen == plain_tokens(logits, rows)


@pytest.mark.parametrize("options", [{"top_p": 0.8}, {"top_k": 3000, "top_p": 0.7}])
def test_sorted_logits(memory, stream, options):
    """Each block has classes that no other one has."""
    logits = np.linspace(3, -3, 6000, dtype=np.float32)[None].repeat(2, 0)
    rows = [Row(seed=seed, **options) for seed in range(2)]
    chosen, _ = run(memory, stream, logits, rows)
    assert chosen == plain_tokens(logits, rows)


def test_rows_that_are_not_active_are_left_alone(memory, stream):
    logits = np.random.default_rng(0).normal(size=(3, 5000)).astype(np.float32)
    logits[1] = np.nan
    rows = [Row(seed=3), Row(seed=4, active=False), Row(temperature=0.0)]
    ((first, idle, last),), made = run(memory, stream, logits, rows)
    assert (idle, last) == (-7, int(logits[2].argmax()))
    assert first == plain_tokens(logits[:1], rows[:1])[0][0]
    assert params_of(made)["counter"].tolist() == [1, 0, 1]
    assert made.results.numpy()[1].tolist() == [0xEE] * 16


@pytest.mark.parametrize("vocab_size", [5, 6000])
def test_errors_of_single_rows(memory, stream, vocab_size):
    logits = np.zeros((5, vocab_size), np.float32)
    logits[0, [2, 4]] = np.nan
    logits[1] = -np.inf
    logits[2, 3] = np.inf
    logits[4, 1] = 3e38
    rows = [Row(), Row(temperature=0.0), Row(top_p=0.5), Row(temperature=0.0), Row(bias={1: 3e38})]
    workspace = SamplingWorkspace(memory, rows=5, vocab_size=vocab_size, stream=stream)
    chosen, made = run(memory, stream, logits, rows, workspace=workspace)
    assert chosen == [[0, 0, 0, 0, 0]]
    results = results_of(made)
    assert results["token"].tolist() == [-1, -1, -1, 0, -1]
    assert results["error"].tolist() == [1, 1, 1, 0, 2]
    assert results["place"].tolist() == [2, 0, 3, 0, 1]
    np.testing.assert_array_equal(results["logit"], np.array([np.nan, -np.inf, np.inf, 0, np.inf], np.float32))
    assert params_of(made)["counter"].tolist() == [0, 0, 0, 1, 0]
    rows[4] = Row(temperature=0.0)
    assert run(memory, stream, np.ones_like(logits), rows, workspace=workspace)[0][0][3:] == [0, 0]  # the workspace is as it was


def test_a_bad_logit_of_an_edited_row_is_named_as_it_came(memory, stream):
    """Whichever block of the row has it, and whatever bias and penalties made of the logits."""
    logits = np.zeros((3, 6000), np.float32)
    logits[0, [4100, 5999]] = np.nan
    logits[1] = -np.inf
    logits[2, 2050] = np.inf
    rows = [Row(frequency=0.5, generated=(7, 4100)), Row(bias={5: 2.0}), Row(bias={9: 3.0}, presence=0.5)]
    _, made = run(memory, stream, logits, rows)
    results = results_of(made)
    assert results["error"].tolist() == [1, 1, 1]
    assert results["place"].tolist() == [4100, 0, 2050]
    np.testing.assert_array_equal(results["logit"], np.array([np.nan, -np.inf, np.inf], np.float32))


def test_the_workspace_is_left_as_it_was(memory, stream):
    rng = np.random.default_rng(1)
    rows = [Row(seed=index, **one) for index, one in enumerate(CHOICES)]
    logits = np.stack([make_logits("steps", 6001, rng) for _ in rows])
    workspace = SamplingWorkspace(memory, rows=len(rows), vocab_size=6001, stream=stream)
    first = run(memory, stream, logits, rows, workspace=workspace)[0]
    assert run(memory, stream, logits, rows, workspace=workspace)[0] == first


def test_a_replay_chooses_the_next_tokens(memory, stream):
    if memory.is_host:
        pytest.skip("graphs are of a device")
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(3, 5000)).astype(np.float32)
    rows = [Row(seed=1, top_p=0.9), Row(temperature=0.0, repetition=1.5, frequency=2.0), Row(seed=2, presence=3.0)]
    host = HostMemory()
    expected, _ = run(host, host.create_stream(), logits, rows, steps=5)
    made, tokens = make_rows(memory, rows, 5000, stream), make_tokens(memory, 3, stream)
    on_device, workspace = memory.to_device(logits, stream=stream), SamplingWorkspace(memory, rows=3, vocab_size=5000, stream=stream)
    choose_tokens(on_device, made, tokens, workspace=workspace, stream=stream)
    found = [tokens.numpy().tolist()]
    builder = stream.create_graph_builder().begin_building()
    choose_tokens(on_device, made, tokens, workspace=workspace, stream=builder)
    graph = builder.end_building().complete()
    for _ in range(4):
        graph.launch(stream)
        found.append(tokens.numpy().tolist())
    assert found == expected


def test_strided_rows(memory, stream):
    logits = np.random.default_rng(4).normal(size=(3, 2, 700)).astype(np.float32)
    rows = [Row(seed=index, top_p=0.9) for index in range(3)]
    every = memory.to_device(logits, stream=stream)
    last = DeviceTensor(every.allocation, shape=(3, 700), dtype="float32", strides=(1400, 1), offset=700 * 4)
    made, tokens = make_rows(memory, rows, 700, stream), make_tokens(memory, 3, stream)
    choose_tokens(last, made, tokens, workspace=SamplingWorkspace(memory, rows=3, vocab_size=700, stream=stream), stream=stream)
    assert tokens.numpy().tolist() == plain_tokens(logits[:, 1], rows)[0]


def test_log_probabilities_of_several_sizes_share_a_workspace(memory, stream):
    logits = np.random.default_rng(5).normal(size=(3, 5000)).astype(np.float32)
    rows = [Row(seed=index, logprobs=True) for index in range(3)]
    made, tokens = make_rows(memory, rows, 5000, stream), make_tokens(memory, 3, stream)
    on_device, workspace = memory.to_device(logits, stream=stream), SamplingWorkspace(memory, rows=3, vocab_size=5000, stream=stream)
    choose_tokens(on_device, made, tokens, workspace=workspace, stream=stream)
    for top in (20, 0, 3, 20):
        out = memory.to_device(np.full((3, 1 + 2 * top), -9, np.int32), stream=stream)
        token_logprobs(on_device, made, out, workspace=workspace, stream=stream)
        for row, (words, token) in enumerate(zip(out.numpy(), tokens.numpy().tolist(), strict=True)):
            chosen, ids, values = log_probabilities(logits[row], token, top)
            assert words[1 : 1 + top].tolist() == ids.tolist()
            np.testing.assert_allclose(words.view(np.float32)[[0, *range(1 + top, 1 + 2 * top)]], [chosen, *values], rtol=2e-6)


@pytest.mark.parametrize("vocab_size", [40, 5000])
def test_log_probabilities_of_all_tokens_that_a_workspace_has_room_for(memory, stream, vocab_size):
    """Many ties, tokens without a probability, and the likeliest tokens all in one block of a row, or in one thread of it."""
    logits = np.round(np.random.default_rng(6).normal(size=(4, vocab_size)) * 3).astype(np.float32)
    logits[1, : vocab_size - 30] = -np.inf
    logits[2] = np.linspace(-7, 7, vocab_size, dtype=np.float32)
    logits[3, :: 512 if vocab_size > 512 else 3] += 30
    rows = [Row(seed=index, logprobs=True) for index in range(4)]
    made, tokens = make_rows(memory, rows, vocab_size, stream), make_tokens(memory, 4, stream)
    workspace = SamplingWorkspace(memory, rows=4, vocab_size=vocab_size, max_top=63, stream=stream)
    on_device = memory.to_device(logits, stream=stream)
    choose_tokens(on_device, made, tokens, workspace=workspace, stream=stream)
    out = memory.to_device(np.full((4, 127), -9, np.int32), stream=stream)
    for _ in range(2):  # the workspace is left as it was
        token_logprobs(on_device, made, out, workspace=workspace, stream=stream)
    for words, of_row in zip(out.numpy(), logits.astype(np.float64), strict=True):
        best = np.lexsort((np.arange(vocab_size), -of_row))[:63]
        assert words[1 : 1 + len(best)].tolist() == best.tolist()
        assert words[1 + len(best) : 64].tolist() == [-1] * (63 - len(best))
        expected = of_row[best] - of_row.max() - np.log(np.exp(of_row - of_row.max()).sum())
        np.testing.assert_allclose(words.view(np.float32)[64 : 64 + len(best)], expected, rtol=2e-6)


class TestRefused:
    @pytest.fixture
    def scene(self, memory, stream):
        logits = memory.to_device(np.zeros((2, 9), np.float32), stream=stream)
        rows = make_rows(memory, [Row(bias={1: 1.0}, presence=1.0)] * 2, 9, stream)
        return {
            "logits": logits,
            "rows": rows,
            "tokens": make_tokens(memory, 2, stream),
            "workspace": SamplingWorkspace(memory, rows=2, vocab_size=9, stream=stream),
            "stream": stream,
        }

    @pytest.mark.parametrize(
        ("name", "shape", "dtype", "error", "message"),
        [
            ("logits", (2, 9), "float16", DTypeError, "logits: expected float32, got float16."),
            ("logits", (18,), "float32", ShapeError, r"logits: expected \[B, vocab\], got"),
            ("logits", (2, 8), "float32", ShapeError, r"rows.uses: expected a dense tensor of shape \(2, 8\)"),
            ("logits", (3, 9), "float32", ShapeError, r"rows.params: expected a dense tensor of shape \(3, 64\)"),
            ("tokens", (3,), "int32", ShapeError, r"tokens: expected a dense tensor of shape \(2,\)"),
            ("tokens", (2,), "int64", DTypeError, "tokens: expected int32, got int64."),
        ],
    )
    def test_what_does_not_fit(self, memory, stream, scene, name, shape, dtype, error, message):
        before = params_of(scene["rows"])
        wrong = {**scene, name: memory.to_device(np.zeros(shape, dtype), stream=stream)}
        with pytest.raises(error, match=message):
            choose_tokens(**wrong)
        assert scene["tokens"].numpy().tolist() == [-7, -7]
        np.testing.assert_array_equal(params_of(scene["rows"]), before)

    def test_a_workspace_that_is_too_small(self, memory, stream, scene):
        scene["workspace"] = SamplingWorkspace(memory, rows=1, vocab_size=9, stream=stream)
        with raises(ShapeError, "workspace", expected="for [2, 9]", got="for [1, 9]"):
            choose_tokens(**scene)

    def test_a_workspace_without_room_for_edits(self, memory, stream, scene):
        scene["workspace"] = SamplingWorkspace(memory, rows=2, vocab_size=9, edits=False, stream=stream)
        before = params_of(scene["rows"])
        with raises(ShapeError, "workspace", expected="room for penalties and bias", got="without"):
            choose_tokens(**scene)
        assert scene["tokens"].numpy().tolist() == [-7, -7]
        np.testing.assert_array_equal(params_of(scene["rows"]), before)
        scene["workspace"].make_room_for_edits(stream=stream)
        choose_tokens(**scene)

    def test_other_memory(self, scene):
        host = HostMemory()
        scene["tokens"] = make_tokens(host, 2, host.create_stream())
        with raises(PlaceError, "tokens", "tensor of"):
            choose_tokens(**scene)

    @pytest.mark.parametrize(
        "sizes", [{"rows": 0, "vocab_size": 5}, {"rows": 1, "vocab_size": 2**20 + 1}, {"rows": 1, "vocab_size": 5, "max_top": -1}]
    )
    def test_sizes_of_a_workspace(self, memory, stream, sizes):
        with pytest.raises(RangeError):
            SamplingWorkspace(memory, **sizes, stream=stream)

    @pytest.mark.parametrize("words", [2, 43])
    def test_room_for_log_probabilities(self, memory, stream, scene, words):
        del scene["tokens"]
        out = memory.to_device(np.zeros((2, words), np.int32), stream=stream)
        with raises(ShapeError, "out", expected="[2, 1 + 2 * top] with top from 0 to 20"):
            token_logprobs(**scene, out=out)
        if words == 43:
            scene["workspace"] = SamplingWorkspace(memory, rows=2, vocab_size=9, max_top=21, stream=stream)
            token_logprobs(**scene, out=out)
