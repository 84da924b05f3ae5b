import numpy as np
import pytest

from trt_kvcache.reference import attention


def normal(*shape):
    return np.random.default_rng(7).normal(size=shape).astype(np.float32)


def attend_one_by_one(q, keys, values, first):
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
def test_attend(monkeypatch, block, width, first, rows):
    monkeypatch.setattr(attention, "_QUERY_BLOCK", block)
    q, keys, values = normal(width, 6, 4), normal(2, rows, 4), -normal(2, rows, 4)[::-1]
    np.testing.assert_allclose(attention.attend(q, keys, values, first), attend_one_by_one(q, keys, values, first), rtol=1e-5, atol=1e-6)


def test_softmax_of_large_scores():
    np.testing.assert_allclose(attention.softmax(np.array([[1000.0, 1000.0, -np.inf]], np.float32)), [[0.5, 0.5, 0.0]])
