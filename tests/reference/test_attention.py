"""Attention in NumPy: causal over the live rows, RoPE, and where new rows are written."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.assertions import assert_close
from trt_kvcache.model import RopeConfig, rope_table
from trt_kvcache.reference import attention


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(7).normal(size=shape).astype(np.float32)


def attend_one_by_one(q: np.ndarray, keys: np.ndarray, values: np.ndarray, first: int) -> np.ndarray:
    width, query_heads, _ = q.shape
    result = np.zeros(q.shape)
    for token in range(width):
        for head in range(query_heads):
            kv_head = head * len(keys) // query_heads
            seen = slice(0, first + token + 1)
            weights = np.exp(keys[kv_head, seen].astype(np.float64) @ q[token, head])
            result[token, head] = weights / weights.sum() @ values[kv_head, seen]
    return result


@pytest.mark.parametrize("block", [2, 256])
@pytest.mark.parametrize(("width", "first", "rows"), [(5, 0, 5), (5, 3, 8), (1, 6, 7), (5, 3, 11), (3, 6, 7)])
def test_attend(monkeypatch: pytest.MonkeyPatch, block: int, width: int, first: int, rows: int) -> None:
    monkeypatch.setattr(attention, "_QUERY_BLOCK", block)
    q, keys, values = normal(width, 6, 4), normal(2, rows, 4), -normal(2, rows, 4)[::-1]
    assert_close(attention.attend(q, keys, values, first), attend_one_by_one(q, keys, values, first))


@pytest.mark.parametrize("large", [0.0, 300.0, -300.0])
def test_a_sink_is_a_key_without_a_value(large: float) -> None:
    """It takes its part of the softmax, however large it is: with one far above all scores nothing of the values is left."""
    random = np.random.default_rng(9)
    q, keys, values = (random.normal(size=shape).astype(np.float32) for shape in ((5, 6, 8), (3, 9, 8), (3, 9, 8)))
    sinks = (random.normal(size=6) + large).astype(np.float32)
    found = attention.attend(q, keys, values, 4, window=4, softcap=2.0, sinks=sinks)
    for token, head in np.ndindex(5, 6):
        seen = slice(token + 1, token + 5)
        scores = 2.0 * np.tanh(keys[head // 2, seen].astype(np.float64) @ q[token, head] / 2.0)
        peak = max(scores.max(), float(sinks[head]))
        weights = np.exp(scores - peak)
        expected = weights @ values[head // 2, seen] / (weights.sum() + np.exp(float(sinks[head]) - peak))
        np.testing.assert_allclose(found[token, head], expected, rtol=1e-4, atol=1e-6)


def test_rotation_is_a_complex_product() -> None:
    x = normal(2, 3, 5, 8)
    cos, sin = rope_table(RopeConfig(kind="default", theta=50.0), head_dim=8, length=9)
    positions = np.array([[0, 1, 2], [6, 7, 8]])
    rotated = (x[..., :4] + 1j * x[..., 4:]) * (cos + 1j * sin)[positions][:, :, None]
    result = attention.apply_rope(x, (cos[positions][:, :, None], sin[positions][:, :, None]))
    np.testing.assert_allclose(result, np.concatenate((rotated.real, rotated.imag), axis=-1), atol=1e-6)


def test_write_rows() -> None:
    cache = np.full((3, 2, 7, 4), -1, np.float16)
    rows = normal(3, 4, 2, 4)
    attention.write_rows(cache, rows, np.array([0, 5, 7], np.int32))
    expected = np.full((3, 2, 7, 4), -1, np.float16)
    expected[0, :, 0:4] = rows[0].transpose(1, 0, 2)
    expected[1, :, 5:7] = rows[1, :2].transpose(1, 0, 2)
    np.testing.assert_array_equal(cache, expected)


def test_softmax_of_large_scores() -> None:
    np.testing.assert_allclose(attention.softmax(np.array([[1000.0, 1000.0, -np.inf]], np.float32)), [[0.5, 0.5, 0.0]])
