"""Rules for shapes and dtypes, and the workspace."""

from dataclasses import replace

import pytest

from tests.helpers.assertions import raises
from trt_kvcache.errors import DTypeError, ShapeError
from trt_kvcache.ops.attention_attributes import AttentionAttributes
from trt_kvcache.ops.borrowed_workspace import workspace_nbytes
from trt_kvcache.trt.plugin.plugin_tensors import check_dtypes, check_shapes, input_names, outputs_of

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

#: Attributes and inputs over quantized K and V, by what shares a scale. A row of 80 values is 20 words; 7 tokens have 8 scales.
QUANTIZED = {scales: replace(FIELDS, kv_dtype="int8", kv_scales=scales) for scales in ("head", "token")}
QUANTIZED_SHAPES = {
    scales: {name: SHAPES[name] for name in "qkv"}
    | {"cache": (3, 2, 2, 7, 20), "lengths": (3,), "kv_scales": shape}
    | {name: SHAPES[name] for name in ("cos_sin", "new_lengths")}
    for scales, shape in (("head", (2, 2)), ("token", (3, 2, 2, 8)))
}


def test_names_of_the_inputs():
    plain = AttentionAttributes(num_heads=6, num_kv_heads=2, head_dim=80)
    without = NAMES[:5] + NAMES[6:]
    assert [input_names(FIELDS, 7), input_names(FIELDS, 6)] == [NAMES, NAMES[:6]]
    assert [input_names(plain, 6), input_names(plain, 5)] == [without, without[:5]]
    for fields, count, last in ((FIELDS, 5, "lengths, cos_sin and"), (plain, 7, "lengths and")):
        with raises(ShapeError, "inputs", expected=(f"q, k, v, cache, {last}", "new_lengths"), got=count):
            input_names(fields, count)


@pytest.mark.parametrize("scales", ["head", "token"])
def test_names_of_the_inputs_over_quantized_k_and_v(scales):
    names = ("q", "k", "v", "cache", "lengths", "kv_scales", "cos_sin", "new_lengths")
    assert input_names(QUANTIZED[scales], 8) == names
    assert input_names(replace(QUANTIZED[scales], rotary_dim=0), 6) == names[:6]
    with raises(ShapeError, "inputs", expected=("q, k, v, cache, lengths, kv_scales, cos_sin and", "new_lengths"), got=6):
        input_names(QUANTIZED[scales], 6)


def test_scales_by_token_are_an_output_too():
    assert [list(outputs_of(attributes)) for attributes in (FIELDS, *QUANTIZED.values())] == [
        ["out", "cache"],
        ["out", "cache"],
        ["out", "cache", "kv_scales"],
    ]


@pytest.mark.parametrize("scales", ["head", "token"])
def test_sizes_are_read_from_the_shapes_over_quantized_k_and_v(scales):
    found = {"B": 3, "s": 4, "S": 7, "P": 9}
    assert check_shapes(QUANTIZED[scales], QUANTIZED_SHAPES[scales]) == (found | {"S'": 8} if scales == "token" else found)


@pytest.mark.parametrize(
    ("scales", "name", "shape", "parts"),
    [
        ("head", "cache", (3, 2, 2, 7, 80), ("cache", "[3, 2, 2, S, 20]", "[3, 2, 2, 7, 80]")),
        ("head", "kv_scales", (3, 2, 2, 8), ("kv_scales", "[2, 2]", "[3, 2, 2, 8]")),
        ("head", "kv_scales", (2, 6), ("kv_scales", "[2, 2]", "[2, 6]")),
        ("token", "kv_scales", (2, 2), ("kv_scales", "[3, 2, 2, S']", "[2, 2]")),
        ("token", "kv_scales", (4, 2, 2, 8), ("kv_scales", "[3, 2, 2, S']", "[4, 2, 2, 8]")),
        ("token", "kv_scales", (3, 2, 2, 7), ("kv_scales", "scales of 8 tokens with a cache of 7", 7)),
        ("token", "kv_scales", (3, 2, 2, 12), ("kv_scales", "scales of 8 tokens with a cache of 7", 12)),
    ],
)
def test_shapes_over_quantized_k_and_v_that_are_refused(scales, name, shape, parts):
    with raises(ShapeError, *parts):
        check_shapes(QUANTIZED[scales], QUANTIZED_SHAPES[scales] | {name: shape})


def test_sizes_are_read_from_the_shapes():
    assert check_shapes(FIELDS, SHAPES) == {"B": 3, "s": 4, "S": 7, "P": 9}
    assert check_shapes(FIELDS, SHAPES | {"q": (None, None, 6, 80), "lengths": (None,)}) == {"B": 3, "s": 4, "S": 7, "P": 9}
    assert check_shapes(FIELDS, {name: (None,) * len(shape) for name, shape in SHAPES.items()}) == dict.fromkeys("BsSP")


@pytest.mark.parametrize(
    ("name", "shape", "parts"),
    [
        ("q", (3, 4, 480), ("q", "[B, s, 6, 80]", "[3, 4, 480]")),
        ("q", (3, 4, 5, 80), ("q", "[B, s, 6, 80]", "[3, 4, 5, 80]")),
        ("q", (3, None, 6, 64), ("q", "[B, s, 6, 80]", "[3, None, 6, 64]")),
        ("k", (3, 5, 2, 80), ("k", "[3, 4, 2, 80]", "[3, 5, 2, 80]")),
        ("q", (3, 0, 6, 80), ("k", "[3, 0, 2, 80]", "[3, 4, 2, 80]")),
        ("q", (0, 4, 6, 80), ("k", "[0, 4, 2, 80]", "[3, 4, 2, 80]")),
        ("v", (2, 4, 2, 80), ("v", "[3, 4, 2, 80]", "[2, 4, 2, 80]")),
        ("cache", (2, 3, 2, 7, 80), ("cache", "[3, 2, 2, S, 80]", "[2, 3, 2, 7, 80]")),
        ("cache", (3, 2, 2, 3, 80), ("tokens in a slot of the cache", "4 (s) or more", 3)),
        ("lengths", (4,), ("lengths", "[3]", "[4]")),
        ("cos_sin", (9, 2, 20), ("cos_sin", "[P, 2, 10]", "[9, 2, 20]")),
        ("cos_sin", (6, 2, 10), ("positions in cos_sin", "7 (S) or more", 6)),
        ("new_lengths", (3, 1), ("new_lengths", "[3]", "[3, 1]")),
    ],
)
def test_shapes_that_do_not_fit_are_refused(name, shape, parts):
    with raises(ShapeError, *parts):
        check_shapes(FIELDS, SHAPES | {name: shape})


def test_a_step_without_new_tokens_is_refused():
    with raises(ShapeError, "q", expected="at least one new token", got="s = 0"):
        check_shapes(FIELDS, {"q": (3, 0, 6, 80)})


def test_dtypes_that_do_not_fit_are_refused():
    others = {"lengths": "int32", "cos_sin": "float32", "new_lengths": "int32"}
    right = dict.fromkeys(NAMES, "bfloat16") | others
    assert check_dtypes(FIELDS, right) == "bfloat16"
    for name in NAMES:
        expected, dtype = others.get(name, "bfloat16"), "int64" if name in ("q", "lengths") else "float16"
        expected = "float16 or bfloat16" if name == "q" else expected
        with pytest.raises(DTypeError, match=f"^{name}: expected {expected}, got {dtype}.$"):
            check_dtypes(FIELDS, right | {name: dtype})


def test_dtypes_over_quantized_k_and_v():
    others = {"cache": "int32", "lengths": "int32", "kv_scales": "float32", "cos_sin": "float32", "new_lengths": "int32"}
    right = dict.fromkeys(QUANTIZED_SHAPES["head"], "float16") | others
    assert check_dtypes(QUANTIZED["head"], right) == "float16"
    for name, expected in others.items():
        with pytest.raises(DTypeError, match=f"^{name}: expected {expected}, got int8.$"):
            check_dtypes(QUANTIZED["head"], right | {name: "int8"})


def test_the_workspace_is_that_of_the_largest_gpu():
    """256 multiprocessors: 128 rows of prefill blocks, and 32 of a decode block; 5 times 16 columns: 4 times 4 floats, and 4."""
    assert workspace_nbytes(FIELDS) == 256 * (128 + 32) * 5 * 5 * 4 * 4
    many = AttentionAttributes(num_heads=32, num_kv_heads=2, head_dim=80, rotary_dim=20)
    assert workspace_nbytes(many) == 256 * (128 + 2 * 16) * 5 * 5 * 4 * 4


@pytest.mark.parametrize("scales", [None, "head", "token"])
def test_ancestors_follow_the_lengths(scales):
    plain, shapes = (FIELDS, SHAPES) if scales is None else (QUANTIZED[scales], QUANTIZED_SHAPES[scales])
    attributes, names = replace(plain, takes_trees=True), [*shapes]
    place = names.index("lengths") + 1
    assert input_names(attributes, 1 + len(names)) == (*names[:place], "ancestors", *names[place:])
    found = check_shapes(attributes, {**shapes, "ancestors": (3, 64, 2)})
    assert found == {**check_shapes(plain, shapes), "slots": 3}
    assert check_shapes(attributes, {**shapes, "ancestors": (8, 64, 2)})["slots"] == 8
    for wrong, parts in (
        ((3, 63, 2), ("ancestors", "[slots, 64, 2]", "[3, 63, 2]")),
        ((3, 64), ("ancestors", "[slots, 64, 2]", "[3, 64]")),
    ):
        with raises(ShapeError, *parts):
            check_shapes(attributes, {**shapes, "ancestors": wrong})
