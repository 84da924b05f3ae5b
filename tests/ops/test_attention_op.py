"""``AttentionOp`` on the host, beside attention written out token by token. On a device: tests/end_to_end/test_operations.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.helpers.assertions import assert_close, raises
from trt_kvcache.errors import ConfigError, DTypeError, ShapeError
from trt_kvcache.ops.attention_op import AttentionOp
from trt_kvcache.ops.borrowed_workspace import workspace_nbytes
from trt_kvcache.ops.custom_op import TensorType, run_on_host

# All different: B=4 slots of S=9 tokens, 3 K/V heads of 6 elements, 2 query heads each.
B, S, KV_HEADS, GROUP, D = 4, 9, 3, 2, 6
HEADS = {"num_heads": KV_HEADS * GROUP, "num_kv_heads": KV_HEADS, "head_dim": D}
LENGTHS = [0, 2, 5, 1]


def inputs(width: int, rotary_dim: int) -> list[np.ndarray]:
    random = np.random.default_rng(3)
    heads = [random.normal(size=(B, width, count, D)).astype(np.float32) for count in (KV_HEADS * GROUP, KV_HEADS, KV_HEADS)]
    cache = random.normal(size=(B, 2, KV_HEADS, S, D)).astype(np.float32)
    angles = random.uniform(0, 6, (S, rotary_dim // 2))
    cos_sin = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    return [*heads, cache, np.array(LENGTHS, np.int32), *([cos_sin] if rotary_dim else [])]


def rotated(row: np.ndarray, cos_sin: np.ndarray, position: int, rotary_dim: int) -> np.ndarray:
    """Apply RoPE to one row as complex numbers ``row[d] + i row[d + rotary_dim / 2]``."""
    half = rotary_dim // 2
    result = row.astype(np.float64)
    if half:
        pairs = (result[:half] + 1j * result[half:rotary_dim]) * (cos_sin[position, 0] + 1j * cos_sin[position, 1])
        result[:rotary_dim] = np.concatenate([pairs.real, pairs.imag])
    return result


def expected(
    arrays: list[np.ndarray], rotary_dim: int, *, scale: float, window: int, softcap: float, sinks: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    q, k, v, cache, lengths, *angles = arrays
    cos_sin = angles[0] if angles else np.zeros((S, 2, 0))
    out, cache = np.zeros(q.shape), cache.astype(np.float64)
    for slot, length in enumerate(lengths):
        for token in range(q.shape[1]):
            position = length + token
            for head in range(KV_HEADS):
                cache[slot, 0, head, position] = rotated(k[slot, token, head], cos_sin, position, rotary_dim)
                cache[slot, 1, head, position] = v[slot, token, head]
        for token in range(q.shape[1]):
            position = length + token
            seen = slice(max(0, position + 1 - window) if window else 0, position + 1)
            for head in range(KV_HEADS * GROUP):
                keys, values = cache[slot, :, head // GROUP, seen]
                scores = keys @ rotated(q[slot, token, head], cos_sin, position, rotary_dim) * scale
                scores = softcap * np.tanh(scores / softcap) if softcap else scores
                weights = np.exp(scores - scores.max())
                sink = 0.0 if sinks is None else np.exp(sinks[head] - scores.max())
                out[slot, token, head] = weights @ values / (weights.sum() + sink)
    return out, cache


@pytest.mark.parametrize("width", [1, 4], ids=["decode", "prefill"])
@pytest.mark.parametrize(
    ("options", "rotary_dim"),
    [({}, D), ({"rotary_dim": 2}, 2), ({"rotary_dim": 0}, 0), ({"scale": 0.3}, D), ({"window": 2}, D), ({"softcap": 1.5}, D)],
    ids=["RoPE", "RoPE of half a row", "no RoPE", "scale", "window", "softcap"],
)
def test_attention_is_that_of_the_definition(options: dict[str, Any], rotary_dim: int, width: int) -> None:
    arrays = inputs(width, rotary_dim)
    out, cache = run_on_host(AttentionOp(**HEADS, **options), *arrays)
    scores = {"scale": options.get("scale", D**-0.5), "window": options.get("window", 0), "softcap": options.get("softcap", 0.0)}
    wanted, wanted_cache = expected(arrays, rotary_dim, **scores)
    assert_close(out, wanted)
    assert_close(cache, wanted_cache)


@pytest.mark.parametrize("rotary_dim", [0, D])
def test_sinks_join_the_softmax(rotary_dim: int) -> None:
    arrays, sinks = inputs(4, rotary_dim), np.linspace(-2, 3, KV_HEADS * GROUP, dtype=np.float32)
    op = AttentionOp(**HEADS, rotary_dim=rotary_dim, sinks=1)
    out, _ = run_on_host(op, *arrays, sinks)
    assert_close(out, expected(arrays, rotary_dim, scale=D**-0.5, window=0, softcap=0.0, sinks=sinks)[0])
    assert op.attributes["sinks"] == 1
    with pytest.raises(ShapeError, match=r"^attention: expected inputs of shapes"):
        run_on_host(op, *arrays)


def test_attributes_are_what_the_operation_was_created_with() -> None:
    op = AttentionOp(**HEADS, scale=0.5, window=3, softcap=2.0, rotary_dim=2)
    assert op.attributes == {**HEADS, "scale": 0.5, "window": 3, "softcap": 2.0, "rotary_dim": 2}


def test_all_of_a_row_is_rotated_by_default() -> None:
    assert AttentionOp(**HEADS).attributes["rotary_dim"] == D


def types(**changes: TensorType) -> list[TensorType]:
    """Inputs with sizes that are not known yet."""
    known = {
        "q": TensorType((-1, -1, KV_HEADS * GROUP, D), "float16"),
        "k": TensorType((-1, -1, KV_HEADS, D), "float16"),
        "v": TensorType((-1, -1, KV_HEADS, D), "float16"),
        "cache": TensorType((-1, 2, KV_HEADS, S, D), "float16"),
        "lengths": TensorType((-1,), "int32"),
        "cos_sin": TensorType((S, 2, D // 2), "float32"),
    }
    return list({**known, **changes}.values())


def test_outputs_are_the_result_and_the_cache_in_place() -> None:
    assert AttentionOp(**HEADS).outputs(types()) == (
        TensorType((-1, -1, KV_HEADS * GROUP, D), "float16"),
        TensorType((-1, 2, KV_HEADS, S, D), "float16", alias=3),
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"k": TensorType((-1, -1, KV_HEADS + 1, D), "float16")},
        {"cache": TensorType((-1, KV_HEADS, 2, S, D), "float16")},
        {"lengths": TensorType((-1, 1), "int32")},
        {"cos_sin": TensorType((S, 2, D), "float32")},
        {"q": TensorType((-1, -1, KV_HEADS * GROUP, D + 2), "float16")},
    ],
    ids=["k", "cache", "lengths", "cos_sin", "q"],
)
def test_shapes_that_do_not_fit_are_refused(changes: dict[str, TensorType]) -> None:
    with raises(ShapeError, "attention", expected=("inputs of shapes", "and at most 9 new tokens")):
        AttentionOp(**HEADS).outputs(types(**changes))


def test_more_new_tokens_than_a_slot_holds_are_refused() -> None:
    wide = [(B, S + 1, heads, D) for heads in (KV_HEADS * GROUP, KV_HEADS, KV_HEADS)]
    q, k, v = (TensorType(shape, "float16") for shape in wide)
    cache, lengths = TensorType((B, 2, KV_HEADS, S, D), "float16"), TensorType((B,), "int32")
    with pytest.raises(ShapeError, match="at most 9 new tokens"):
        AttentionOp(**HEADS).outputs(types(q=q, k=k, v=v, cache=cache, lengths=lengths))


@pytest.mark.parametrize(
    "changes",
    [
        {"v": TensorType((-1, -1, KV_HEADS, D), "float32")},
        {"lengths": TensorType((-1,), "int64")},
        {"cos_sin": TensorType((S, 2, D // 2), "float16")},
    ],
    ids=["v", "lengths", "cos_sin"],
)
def test_dtypes_that_do_not_fit_are_refused(changes: dict[str, TensorType]) -> None:
    with raises(DTypeError, "attention", expected="q, k and v of one dtype"):
        AttentionOp(**HEADS).outputs(types(**changes))


def test_no_workspace_where_only_numpy_serves_the_head_dimension() -> None:
    assert AttentionOp(**HEADS).workspace_nbytes(types()) == 0


def test_no_workspace_where_only_numpy_serves_the_dtype() -> None:
    assert AttentionOp(num_heads=6, num_kv_heads=2, head_dim=64).workspace_nbytes(types(q=TensorType((1, 1, 6, 64), "float32"))) == 0


def test_the_workspace_is_that_of_the_kernels() -> None:
    op = AttentionOp(num_heads=6, num_kv_heads=2, head_dim=64)
    nbytes = op.workspace_nbytes(types(q=TensorType((1, 1, 6, 64), "float16")))
    assert nbytes == workspace_nbytes(op.kernel_attributes()) > 0


def test_attributes_beyond_the_kernels_are_refused_for_them() -> None:
    with raises(ConfigError, "head_dim", expected="64, 80, 96, 128, 256, 512", got=6):
        AttentionOp(**HEADS).kernel_attributes()
