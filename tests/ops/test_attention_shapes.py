"""Rules for shapes and dtypes, and the workspace."""

import pytest

from trt_kvcache.errors import DTypeError, ShapeError
from trt_kvcache.ops.attention_attributes import AttentionAttributes
from trt_kvcache.ops.attention_shapes import check_dtypes, check_shapes, input_names, workspace_nbytes

FIELDS = AttentionAttributes(num_heads=6, num_kv_heads=2, head_dim=80, rotary_dim=20)
SHAPES = {
    "q": (3, 4, 6, 80),
    "k": (3, 4, 2, 80),
    "v": (3, 4, 2, 80),
    "cache": (3, 2, 2, 7, 80),
    "lengths": (3,),
    "cos_sin": (9, 2, 10),
    "new_lengths": (3,),
}
NAMES = tuple(SHAPES)


def test_names_of_the_inputs():
    plain = AttentionAttributes(num_heads=6, num_kv_heads=2, head_dim=80)
    without = NAMES[:5] + NAMES[6:]
    assert [input_names(FIELDS, 7), input_names(FIELDS, 6)] == [NAMES, NAMES[:6]]
    assert [input_names(plain, 6), input_names(plain, 5)] == [without, without[:5]]
    for fields, count, said in (
        (FIELDS, 5, "cos_sin and, if wanted, new_lengths, got 5."),
        (plain, 7, "lengths and, if wanted, new_lengths, got 7."),
    ):
        with pytest.raises(ShapeError, match=f"^inputs: expected q, k, v, cache,.* {said}$"):
            input_names(fields, count)


def test_sizes_are_read_from_the_shapes():
    assert check_shapes(FIELDS, SHAPES) == {"B": 3, "s": 4, "S": 7, "P": 9}
    assert check_shapes(FIELDS, SHAPES | {"q": (None, None, 6, 80), "lengths": (None,)}) == {"B": 3, "s": 4, "S": 7, "P": 9}
    assert check_shapes(FIELDS, {name: (None,) * len(shape) for name, shape in SHAPES.items()}) == dict.fromkeys("BsSP")


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("q", (3, 4, 480), "q: expected [B, s, 6, 80], got [3, 4, 480]."),
        ("q", (3, 4, 5, 80), "q: expected [B, s, 6, 80], got [3, 4, 5, 80]."),
        ("q", (3, None, 6, 64), "q: expected [B, s, 6, 80], got [3, None, 6, 64]."),
        ("k", (3, 5, 2, 80), "k: expected [3, 4, 2, 80], got [3, 5, 2, 80]."),
        ("q", (3, 0, 6, 80), "k: expected [3, 0, 2, 80], got [3, 4, 2, 80]."),
        ("q", (0, 4, 6, 80), "k: expected [0, 4, 2, 80], got [3, 4, 2, 80]."),
        ("v", (2, 4, 2, 80), "v: expected [3, 4, 2, 80], got [2, 4, 2, 80]."),
        ("cache", (2, 3, 2, 7, 80), "cache: expected [3, 2, 2, S, 80], got [2, 3, 2, 7, 80]."),
        ("cache", (3, 2, 2, 3, 80), "tokens in a slot of the cache: expected 4 (s) or more, got 3."),
        ("lengths", (4,), "lengths: expected [3], got [4]."),
        ("cos_sin", (9, 2, 20), "cos_sin: expected [P, 2, 10], got [9, 2, 20]."),
        ("cos_sin", (6, 2, 10), "positions in cos_sin: expected 7 (S) or more, got 6."),
        ("new_lengths", (3, 1), "new_lengths: expected [3], got [3, 1]."),
    ],
)
def test_shapes_that_do_not_fit_are_refused(name, shape, said):
    with pytest.raises(ShapeError) as caught:
        check_shapes(FIELDS, SHAPES | {name: shape})
    assert str(caught.value) == said


def test_a_step_without_new_tokens_is_refused():
    with pytest.raises(ShapeError, match=r"^q: expected at least one new token, got s = 0\.$"):
        check_shapes(FIELDS, {"q": (3, 0, 6, 80)})


def test_dtypes_that_do_not_fit_are_refused():
    others = {"lengths": "int32", "cos_sin": "float32", "new_lengths": "int32"}
    right = dict.fromkeys(NAMES, "bfloat16") | others
    assert check_dtypes(right) == "bfloat16"
    for name in NAMES:
        expected, dtype = others.get(name, "bfloat16"), "int64" if name in ("q", "lengths") else "float16"
        expected = "float16 or bfloat16" if name == "q" else expected
        with pytest.raises(DTypeError, match=f"^{name}: expected {expected}, got {dtype}.$"):
            check_dtypes(right | {name: dtype})


def test_the_workspace_is_that_of_the_largest_gpu():
    """256 multiprocessors: 128 rows of prefill blocks, and 32 of a decode block; 5 times 16 columns: 4 times 4 floats, and 4."""
    assert workspace_nbytes(FIELDS) == 256 * (128 + 32) * 5 * 5 * 4 * 4
    many = AttentionAttributes(num_heads=32, num_kv_heads=2, head_dim=80, rotary_dim=20)
    assert workspace_nbytes(many) == 256 * (128 + 2 * 16) * 5 * 5 * 4 * 4
