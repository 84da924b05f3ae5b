"""Inputs and outputs of the plugin: names, shapes, dtypes, and the bytes of its workspace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trt_kvcache.errors import DTypeError, ShapeError
from trt_kvcache.kernels.attention_tiles import ELEMENT_TYPES
from trt_kvcache.kernels.attention_workspace import MAX_BLOCKS_PER_SM, partials_shape
from trt_kvcache.memory.shapes import dense_nbytes
from trt_kvcache.ops.attention_fields import AttentionFields

#: Shape and dtype of each input, in order: a number, a field, or a name for what the shapes say. "q": float16 or bfloat16, as q.
#: ``cos_sin`` is there where ``rotary_dim`` is not 0; ``new_lengths`` may be left out.
INPUTS: dict[str, tuple[tuple[int | str, ...], str]] = {
    "q": (("B", "s", "num_heads", "head_dim"), "q"),
    "k": (("B", "s", "num_kv_heads", "head_dim"), "q"),
    "v": (("B", "s", "num_kv_heads", "head_dim"), "q"),
    "cache": (("B", 2, "num_kv_heads", "S", "head_dim"), "q"),
    "lengths": (("B",), "int32"),
    "cos_sin": (("P", 2, "rotary_dim / 2"), "float32"),
    "new_lengths": (("B",), "int32"),
}
#: Each output, with the input that it is like, and whether it is at the same address.
OUTPUTS = {"out": ("q", False), "cache": ("cache", True)}

#: Multiprocessors of a GPU at most: the workspace is sized for as many, so that an engine may move to another GPU.
MOST_MULTIPROCESSORS = 256

Sizes = Sequence["int | None"]


def input_names(fields: AttentionFields, count: int) -> tuple[str, ...]:
    """Return the names of ``count`` inputs. Raises ShapeError for another number than these fields have."""
    names = tuple(name for name in INPUTS if name != "cos_sin" or fields.rotary_dim)
    if count not in (len(names), len(names) - 1):
        raise ShapeError(f"inputs: expected {', '.join(names[:-1])} and, if wanted, {names[-1]}, got {count}.")
    return names[:count]


def check_shapes(fields: AttentionFields, shapes: Mapping[str, Sizes]) -> dict[str, int | None]:
    """Check the shapes of the inputs, as far as they are known.

    Parameters
    ----------
    fields : AttentionFields
    shapes : mapping of str to sequence of int or None
        By name; None for a size that is not known yet.

    Returns
    -------
    dict of str to int or None
        ``B`` slots, ``s`` new tokens of each, ``S`` tokens of a slot of the cache, ``P`` positions of ``cos_sin``.

    Raises
    ------
    ShapeError
        They do not fit the fields, or each other.
    """
    sizes: dict[str, int | None] = {}
    fixed = {name: getattr(fields, name) for name in ("num_heads", "num_kv_heads", "head_dim")}
    fixed["rotary_dim / 2"] = fields.rotary_dim // 2
    for name, shape in shapes.items():
        pattern = INPUTS[name][0]
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
    return sizes


def check_dtypes(dtypes: Mapping[str, str]) -> str:
    """Return the dtype of q. Raises DTypeError where it is not one of the kernels', or an input is not what goes with it."""
    for name, dtype in dtypes.items():
        if name == "q" and dtype not in ELEMENT_TYPES:
            raise DTypeError(f"q: expected {' or '.join(ELEMENT_TYPES)}, got {dtype}.")
        expected = dtypes["q"] if INPUTS[name][1] == "q" else INPUTS[name][1]
        if dtype != expected:
            raise DTypeError(f"{name}: expected {expected}, got {dtype}.")
    return dtypes["q"]


def workspace_nbytes(fields: AttentionFields, width: int) -> int:
    """Return the bytes of workspace for at least ``width`` new tokens of each slot. Only a decode step needs any."""
    partials = partials_shape(MAX_BLOCKS_PER_SM * MOST_MULTIPROCESSORS, fields.group, fields.head_dim)
    return dense_nbytes(partials, "float32") if width == 1 else 0
