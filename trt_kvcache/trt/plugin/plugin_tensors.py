"""Inputs and outputs of the attention plugin: their names, shapes and dtypes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trt_kvcache.engine.step_ancestors import ANCESTORS, WORDS_PER_TOKEN
from trt_kvcache.errors import DTypeError, ShapeError
from trt_kvcache.kernels.attention_tiles import ELEMENT_TYPES
from trt_kvcache.kernels.scale_views import saved_scales
from trt_kvcache.kernels.token_tree import MAX_TREE_TOKENS
from trt_kvcache.ops.attention_attributes import AttentionAttributes
from trt_kvcache.ops.int32_packing import VALUES_PER_INT32

#: Shape and dtype of an input.
Pattern = tuple[tuple[int | str, ...], str]

#: Shape and dtype of each input, in order. A dimension is a number, an attribute, or a symbol (B, s, S, P) for a size that the shapes
#: give. The dtype "q" is the dtype of q, float16 or bfloat16. ``cos_sin`` is not there if ``rotary_dim`` is 0; ``new_lengths`` is optional.
INPUTS: dict[str, Pattern] = {
    "q": (("B", "s", "num_heads", "head_dim"), "q"),
    "k": (("B", "s", "num_kv_heads", "head_dim"), "q"),
    "v": (("B", "s", "num_kv_heads", "head_dim"), "q"),
    "cache": (("B", 2, "num_kv_heads", "S", "head_dim"), "q"),
    "lengths": (("B",), "int32"),
    "cos_sin": (("P", 2, "rotary_dim / 2"), "float32"),
    "new_lengths": (("B",), "int32"),
}
#: For each output the input that it has shape and dtype of, and whether it is at the address of that input.
OUTPUTS = {"out": ("q", False), "cache": ("cache", True)}

#: The same over quantized K and V: four values of the cache are one int32, and S' is the smallest multiple of 4 from S on.
QUANTIZED_INPUTS: dict[str, Pattern] = {
    **{name: INPUTS[name] for name in ("q", "k", "v")},
    "cache": (("B", 2, "num_kv_heads", "S", "head_dim / 4"), "int32"),
    "lengths": INPUTS["lengths"],
    "kv_scales": (("B", 2, "num_kv_heads", "S'"), "float32"),
    "cos_sin": INPUTS["cos_sin"],
    "new_lengths": INPUTS["new_lengths"],
}
QUANTIZED_OUTPUTS = {**OUTPUTS, "kv_scales": ("kv_scales", True)}

#: Scales by head, which no step changes, in place of those by token.
HEAD_SCALES: Pattern = ((2, "num_kv_heads"), "float32")


def _with_ancestors(inputs: dict[str, Pattern]) -> dict[str, Pattern]:
    """Return inputs with the ancestors of new tokens after the lengths: of the table, the first B * s tokens are those of the enqueue."""
    names = [*inputs]
    place = 1 + names.index("lengths")
    ancestors: Pattern = (("slots", MAX_TREE_TOKENS, WORDS_PER_TOKEN), "int32")
    return {name: ancestors if name == ANCESTORS else inputs[name] for name in (*names[:place], ANCESTORS, *names[place:])}


#: The same where new tokens may be trees.
TREE_INPUTS, QUANTIZED_TREE_INPUTS = _with_ancestors(INPUTS), _with_ancestors(QUANTIZED_INPUTS)

#: Sizes of a shape; None for one that is not known yet.
Sizes = Sequence["int | None"]


def inputs_of(attributes: AttentionAttributes) -> dict[str, Pattern]:
    """Return the inputs of attention with these attributes, optional ones included."""
    if attributes.kv_dtype is None:
        return TREE_INPUTS if attributes.takes_trees else INPUTS
    inputs = QUANTIZED_TREE_INPUTS if attributes.takes_trees else QUANTIZED_INPUTS
    return inputs if attributes.kv_scales == "token" else inputs | {"kv_scales": HEAD_SCALES}


def outputs_of(attributes: AttentionAttributes) -> dict[str, tuple[str, bool]]:
    """Return the outputs of attention with these attributes."""
    return QUANTIZED_OUTPUTS if attributes.kv_scales == "token" else OUTPUTS


def input_names(attributes: AttentionAttributes, count: int) -> tuple[str, ...]:
    """Return the names of ``count`` inputs in order: without ``cos_sin`` if RoPE is not applied; ``new_lengths`` is optional."""
    names = tuple(name for name in inputs_of(attributes) if name != "cos_sin" or attributes.rotary_dim)
    if count not in (len(names), len(names) - 1):
        raise ShapeError(f"inputs: expected {', '.join(names[:-1])} and, if wanted, {names[-1]}, got {count}.")
    return names[:count]


def check_shapes(attributes: AttentionAttributes, shapes: Mapping[str, Sizes]) -> dict[str, int | None]:
    """Check the shapes of the inputs as far as they are known, and return the sizes B, s, S, P (positions), S' (scales) and slots."""
    sizes: dict[str, int | None] = {}
    fixed = {name: getattr(attributes, name) for name in ("num_heads", "num_kv_heads", "head_dim")}
    fixed |= {"rotary_dim / 2": attributes.rotary_dim // 2, "head_dim / 4": attributes.head_dim // VALUES_PER_INT32}
    inputs = inputs_of(attributes)
    for name, shape in shapes.items():
        pattern = inputs[name][0]
        known = fixed | {part: size for part, size in sizes.items() if size is not None}
        expected = [known.get(part, part) if isinstance(part, str) else part for part in pattern]
        differ = [part != size for part, size in zip(expected, shape, strict=False) if isinstance(part, int) and size is not None]
        if len(shape) != len(pattern) or any(differ):
            raise ShapeError(f"{name}: expected [{', '.join(map(str, expected))}], got {list(shape)}.")
        for part, size in zip(pattern, shape, strict=True):
            if isinstance(part, str) and part not in fixed and sizes.get(part) is None:
                sizes[part] = size
    if sizes.get("s") == 0:
        raise ShapeError("q: expected at least one new token, got s = 0.")
    for small, large, what in (("s", "S", "tokens in a slot of the cache"), ("S", "P", "positions in cos_sin")):
        less, more = sizes.get(small), sizes.get(large)
        if less is not None and more is not None and less > more:
            raise ShapeError(f"{what}: expected {less} ({small}) or more, got {more}.")
    tokens, scales = sizes.get("S"), sizes.get("S'")
    if tokens is not None and scales is not None and scales != saved_scales(tokens):
        raise ShapeError(f"kv_scales: expected scales of {saved_scales(tokens)} tokens with a cache of {tokens}, got {scales}.")
    return sizes


def check_dtypes(attributes: AttentionAttributes, dtypes: Mapping[str, str]) -> str:
    """Check the dtypes of the inputs, and return the dtype of q."""
    inputs = inputs_of(attributes)
    for name, dtype in dtypes.items():
        if name == "q" and dtype not in ELEMENT_TYPES:
            raise DTypeError(f"q: expected {' or '.join(ELEMENT_TYPES)}, got {dtype}.")
        expected = dtypes["q"] if inputs[name][1] == "q" else inputs[name][1]
        if dtype != expected:
            raise DTypeError(f"{name}: expected {expected}, got {dtype}.")
    return dtypes["q"]
