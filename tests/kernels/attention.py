"""Attention calls with random inputs, and what they must give: in float64, token by token, from the same rounded inputs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tests.kernels.stored_kv import real, scale_of, stored
from trt_kvcache import DeviceTensor
from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.kernels import AttentionWorkspace, attend, split_qkv
from trt_kvcache.kernels.attention_tiles import HEAD_DIMS

#: max|error| / max|reference| over a (slot, head): probabilities and results are rounded to 11 and 8 bits.
TOLERANCE = {"float16": 1e-3, "bfloat16": 8e-3}

#: What dead rows of a cache hold, by its dtype if it is quantized. int8 has no NaN, but a scale for each token has.
POISON = {None: np.nan, "float8_e4m3fn": np.nan, "int8": -128}


@dataclass(frozen=True)
class Case:
    lengths: tuple[int, ...]
    new: tuple[int, ...] | None = None
    width: int = 1
    tokens: int = 150
    kv_heads: int = 2
    group: int = 1
    head_dim: int = 64
    dtype: str = "float16"
    rotary_dim: int | None = None  # None: head_dim
    window: int = 0
    softcap: float = 0.0
    scale: float | None = None
    layout: str = "combined"
    packed: bool = False
    in_place: bool = False  # out is q
    kv_dtype: str | None = None  # None: dtype
    scales: str = "token"  # of a quantized cache; or "head"
    sinks: float | None = None  # what attention sinks are added to; None: there are none
    shared: bool = False  # the new rows are in the cache already, and k and v are None
    tree: str | None = None  # a name of PARENTS: the new tokens are such a tree of draft tokens


def _apply_rope(row, angles):
    half = angles.shape[1]
    rotated, (cos, sin) = row.astype(np.float32), angles
    low, high = rotated[:half].copy(), rotated[half : 2 * half].copy()
    rotated[:half], rotated[half : 2 * half] = low * cos - high * sin, high * cos + low * sin
    return rotated.astype(row.dtype)


#: Parents of tokens 1, 2, ... of trees, from a random generator and the number of tokens.
PARENTS = {
    "chain": lambda random, count: range(count - 1),
    "star": lambda random, count: [0] * (count - 1),
    "comb": lambda random, count: [(token - 1) // 2 * 2 for token in range(1, count)],
    "random": lambda random, count: [int(random.integers(max(0, token - 5), token)) for token in range(1, count)],
}


def ancestors_of(parents):
    """Return the masks of the tokens of a tree, as Python integers."""
    masks = [1]
    for token, parent in enumerate(parents, 1):
        masks.append(masks[parent] | 1 << token)
    return masks


def _ancestors(case, random):
    """Return int64 ``[B, s]`` of another tree for each slot; anything in rows of padding."""
    masks = random.integers(-(2**63), 2**63, (len(case.lengths), case.width), np.int64)
    for slot in range(len(masks)):
        live = case.width if case.new is None else max(min(case.new[slot], case.width), 0)
        tree = ancestors_of(PARENTS[case.tree](random, case.width))[:live]
        masks[slot, :live] = np.array(tree, np.uint64).view(np.int64)
    return masks


def inputs(case, seed=0):
    """Return the arrays of a call; dead rows of the cache are NaN."""
    random, dtype = np.random.default_rng(seed), numpy_dtype(case.dtype)
    slots, heads, dim = len(case.lengths), case.kv_heads * case.group, case.head_dim
    qkv = random.standard_normal((slots, case.width, heads + 2 * case.kv_heads, dim)).astype(dtype)
    arrays = dict(zip("qkv", np.split(qkv, [heads, heads + case.kv_heads], axis=2), strict=True))
    arrays["cache"] = np.full((slots, 2, case.kv_heads, case.tokens, dim), POISON[case.kv_dtype], numpy_dtype(case.kv_dtype or case.dtype))
    for slot, past in enumerate(case.lengths):
        live = arrays["cache"][slot, :, :, : max(past, 0)]
        live[:] = np.clip(random.standard_normal(live.shape) * (40 if case.kv_dtype else 1), -127, 127)
    if case.kv_dtype:
        arrays["kv_scales"] = _scales(case, random)
    arrays["lengths"] = np.array(case.lengths, np.int32)
    if rotary := dim if case.rotary_dim is None else case.rotary_dim:
        angle = np.arange(case.tokens)[:, None] * 100.0 ** -(np.arange(rotary // 2) / (rotary // 2))
        arrays["cos_sin"] = np.stack([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)
    if case.sinks is not None:
        arrays["sinks"] = (case.sinks + random.standard_normal(heads)).astype(np.float32)
    if case.new is not None:
        arrays["new_lengths"] = np.array(case.new, np.int32)
    if case.tree is not None:
        arrays["ancestors"] = _ancestors(case, random)
    return arrays


def _scales(case, random):
    """Return scales that all differ; those of dead rows are NaN, as are those of the tokens that make it a multiple of 4."""
    if case.scales == "head":
        return random.uniform(0.01, 0.04, (2, case.kv_heads)).astype(np.float32)
    scales = np.full((len(case.lengths), 2, case.kv_heads, -(-case.tokens // 4) * 4), np.nan, np.float32)
    for slot, past in enumerate(case.lengths):
        live = scales[slot, :, :, : max(past, 0)]
        live[:] = random.uniform(0.01, 0.04, live.shape)
    return scales


def _store(case, cache, scales, place, row):
    """Write a row into the cache, and its scale."""
    if scales is None:
        cache[place] = row
        return
    if case.scales == "token":
        scales[place] = scale_of(row, case.kv_dtype)
    cache[place] = stored(row, scales[place if case.scales == "token" else place[1:3]], case.kv_dtype)


def _live_rows(case, cache, scales, slot, head, seen):
    """Return K and V of the rows in a list, in float64."""
    rows = cache[slot, :, head][:, seen]
    if scales is not None:
        rows = real(rows, scales[slot, :, head][:, seen] if case.scales == "token" else scales[:, head, None])
    return rows.astype(np.float64)


def reference(case, q, k, v, cache, cos_sin=None, kv_scales=None, sinks=None, ancestors=None, **_):
    """Return what is in ``out`` (float64), in the cache and in the scales afterwards."""
    out, cache, scales = np.zeros(q.shape), cache.copy(), None if kv_scales is None else kv_scales.copy()
    angles = np.zeros((case.tokens, 2, 0)) if cos_sin is None else cos_sin
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    for slot, past in enumerate(case.lengths):
        new = case.width if case.new is None else min(case.new[slot], case.width)
        for own in range(past, min(past + new, case.tokens)) if past >= 0 else ():
            token = own - past
            # The rows at positions 0, 1, ...: those before the call, and the path to the token.
            seen = [*range(past), *(past + j for j in range(token + 1) if ancestors is None or int(ancestors[slot, token]) >> j & 1)]
            position, seen = len(seen) - 1, seen[-case.window :]
            for head in range(case.kv_heads):
                _store(case, cache, scales, (slot, 0, head, own), _apply_rope(k[slot, token, head], angles[position]))
                _store(case, cache, scales, (slot, 1, head, own), v[slot, token, head])
                keys, values = _live_rows(case, cache, scales, slot, head, seen)
                for row in range(head * case.group, (head + 1) * case.group):
                    scores = keys @ _apply_rope(q[slot, token, row], angles[position]).astype(np.float64) * scale
                    if case.softcap:
                        scores = case.softcap * np.tanh(scores / case.softcap)
                    sink = -np.inf if sinks is None else float(sinks[row])
                    peak = max(scores.max(), sink)
                    weights = np.exp(scores - peak)
                    out[slot, token, row] = weights @ values / (weights.sum() + np.exp(sink - peak))
    return out, cache, scales


def _placed(array, layout, to_device):
    """Return a tensor ``[B, 2, ...]`` over the bytes of a layout, and what reads all of them back in that order."""
    if layout == "combined":
        tensor = to_device(array)
        return tensor, tensor.numpy
    stored = to_device(array.swapaxes(0, 1))
    strides = (stored.strides[1], stored.strides[0], *stored.strides[2:])
    view = DeviceTensor(stored.allocation, shape=array.shape, dtype=stored.dtype, strides=strides)
    return view, lambda: np.ascontiguousarray(stored.numpy().swapaxes(0, 1))


def make_workspace(case, memory, stream):
    sizes = {"num_heads": case.kv_heads * case.group, "num_kv_heads": case.kv_heads, "head_dim": case.head_dim}
    return AttentionWorkspace(memory, **sizes, stream=stream)


def check(case, memory, stream, seed=0):
    """Run the call, twice on one workspace, over a cache whose dead rows are NaN, and compare."""
    arrays = inputs(case, seed)
    q, before, heads = arrays["q"], arrays["cache"], case.kv_heads * case.group
    expected, expected_cache, expected_scales = reference(case, **arrays)
    if case.shared:
        arrays |= {"k": None, "v": None, "cache": expected_cache}
        arrays |= {} if expected_scales is None else {"kv_scales": expected_scales}
        before = expected_cache

    def to_device(array):
        return memory.to_device(np.ascontiguousarray(array), stream=stream)

    cache, read_cache = _placed(before, case.layout, to_device)
    tensors = {name: array if array is None else to_device(array) for name, array in arrays.items() if name != "cache"}
    if expected_scales is not None and case.scales == "token":
        tensors["kv_scales"], read_scales = _placed(arrays["kv_scales"], case.layout, to_device)
    if case.packed and not case.shared:
        qkv = to_device(np.concatenate([arrays[name] for name in "qkv"], axis=2))
        tensors.update(zip("qkv", split_qkv(qkv, heads, case.kv_heads), strict=True))
    workspace = make_workspace(case, memory, stream)
    for _ in range(2):  # the second time finds the same: nothing is left in the workspace, and the rows are written over
        out = to_device(q if case.in_place else np.full_like(q, np.nan))
        tensors |= {"q": out} if case.in_place else {}
        options = {"scale": case.scale, "window": case.window, "softcap": case.softcap}
        attend(**tensors, cache=cache, out=out, workspace=workspace, **options, stream=stream)
        memory.synchronize(stream)
        got = out.numpy().astype(np.float64)
        assert not np.isnan(got).any()
        error, size = (np.abs(x).max(axis=(1, 3)) for x in (got - expected, expected))
        assert (error <= TOLERANCE[case.dtype] * size).all(), (error.tolist(), size.tolist())
        assert np.array_equal(read_cache().view(np.uint8), np.ascontiguousarray(expected_cache).view(np.uint8))
        if expected_scales is not None:
            found = read_scales() if case.scales == "token" else tensors["kv_scales"].numpy()
            assert np.array_equal(found.view(np.uint32), expected_scales.view(np.uint32))
        assert not workspace.partials.numpy().reshape(-1, 4)[: workspace.flagged_nbytes // 16, 3].any()


#: Lengths at and beside borders of tiles and steps, 0, and the last that fits.
_RAGGED = (0, 15, 16, 129, 149)

DECODE_CASES = {
    "one head": Case(lengths=(37,)),
    "groups": Case(lengths=(130, 3), group=4, head_dim=128),
    "sixteen": Case(lengths=(20, 131), group=16, head_dim=80, rotary_dim=32, dtype="bfloat16"),
    "ragged": Case(lengths=_RAGGED, group=2, packed=True, layout="separate"),
    "some take no part": Case(lengths=(5, 140, 60), new=(1, 0, 1), group=7, rotary_dim=24),
    "out of bounds": Case(lengths=(150, 9, -(2**31)), new=(1, 3, 1), group=3),
    "window": Case(lengths=(149, 20, 0), window=33, group=8, head_dim=128),
    "window of large heads": Case(lengths=(580, 0, 3), new=(1, 1, 0), tokens=600, window=512, group=4, head_dim=256),
    "softcap and scale": Case(lengths=(140,), softcap=5.0, scale=0.3, head_dim=256, kv_heads=1, rotary_dim=0),
    "large softcap": Case(lengths=(40,), softcap=1e6),
    "short cache": Case(lengths=(3,), kv_heads=1, tokens=4, layout="separate"),
    "many slots": Case(lengths=tuple(range(40)), kv_heads=1, tokens=41),
    "many parts": Case(lengths=(1499,), kv_heads=1, tokens=1500),
    "some tiles more than their first ones": Case(lengths=(1100,), kv_heads=1, tokens=1101),
    "many large parts": Case(lengths=(3000,), kv_heads=1, tokens=3001, group=11, head_dim=256),  # several blocks put it together
    "more parts than there is room for": Case(lengths=(3000, *[5] * 7), kv_heads=1, tokens=3001, group=16, head_dim=256),
    "sinks": Case(lengths=_RAGGED, group=3, sinks=0.5, window=40),
    "sinks of many parts": Case(lengths=(1499, 7), kv_heads=2, tokens=1500, group=5, head_dim=128, sinks=3.0),
    "sinks with softcap": Case(lengths=(140, 3), softcap=5.0, scale=0.3, head_dim=256, kv_heads=1, group=2, sinks=4.0),
    "heads of 512": Case(lengths=(140, 0, 33), new=(1, 1, 0), group=8, head_dim=512, rotary_dim=128, scale=1.0, layout="separate"),
    "many parts of heads of 512": Case(lengths=(900,), kv_heads=1, tokens=901, group=16, head_dim=512, rotary_dim=24, sinks=1.0),
}

PREFILL_CASES = {
    "from the start": Case(lengths=(0,), width=70),
    "ragged": Case(lengths=(0, 63, 20), new=(5, 70, 0), width=70, group=3, head_dim=128, packed=True, layout="separate"),
    "borders": Case(lengths=(64, 1, 0), new=(64, 127, 128), width=129, kv_heads=1, tokens=130),
    "small heads": Case(lengths=(9, 70), width=40, head_dim=80, rotary_dim=32, dtype="bfloat16"),
    "window": Case(lengths=(100, 3), width=33, window=20, head_dim=128, group=2, rotary_dim=24, kv_heads=1),
    "softcap and scale": Case(lengths=(66,), width=9, softcap=5.0, scale=0.3, head_dim=256, kv_heads=1, rotary_dim=0, group=2),
    "out of bounds": Case(lengths=(148, 150, 10, -3, 20), new=(6, 6, 7, 5, -1), width=6),
    "large window": Case(lengths=(3,), width=5, window=2**32 + 1),
    "large softcap": Case(lengths=(40,), width=3, softcap=1e5),
    "large scores": Case(lengths=(120, 0), width=20, scale=1.5, kv_heads=1),  # some are far above those before
    "some keys for each part": Case(lengths=(1400,), width=2, tokens=1500, group=7, head_dim=128, kv_heads=1, in_place=True),
    "parts of different slots": Case(lengths=(1000, 3, 400), new=(5, 1, 0), width=5, tokens=1100, group=4, head_dim=128, kv_heads=1),
    "more slots than a warp has lanes": Case(lengths=tuple(range(3, 40)), width=2, tokens=60, kv_heads=1),
    "several row blocks of few tokens": Case(lengths=(700, 31), width=20, tokens=730, group=8, head_dim=128, kv_heads=1, in_place=True),
    "a window that begins behind the first part": Case(lengths=(900,), width=3, tokens=1000, group=16, window=130, kv_heads=1),
    "a window inside the new tokens": Case(lengths=(70, 200), width=30, tokens=240, group=2, window=5, dtype="bfloat16", head_dim=80),
    "parts with softcap": Case(lengths=(500,), width=8, tokens=600, group=4, softcap=5.0, head_dim=256, kv_heads=1, rotary_dim=16),
    "a full cache": Case(lengths=(496, 498), width=8, tokens=500, kv_heads=1, head_dim=128, group=3),
    "row blocks of many tokens": Case(lengths=(300, 0), new=(90, 33), width=90, tokens=400, group=3, head_dim=128, layout="separate"),
    "sinks": Case(lengths=(70, 0), new=(90, 33), width=90, tokens=200, group=3, sinks=0.5, window=40),
    "sinks of many parts": Case(lengths=(700, 31), width=20, tokens=730, group=8, head_dim=128, sinks=3.0),
    "sinks with softcap": Case(lengths=(66,), width=9, softcap=5.0, scale=0.3, head_dim=256, kv_heads=1, group=2, sinks=4.0),
    "heads of 512": Case(lengths=(100, 20), width=4, new=(4, 3), group=8, head_dim=512, rotary_dim=128, scale=1.0, packed=True),
    "many parts of heads of 512": Case(lengths=(600,), width=16, tokens=640, kv_heads=1, group=4, head_dim=512, sinks=1.0),
    "a window of heads of 512": Case(lengths=(70, 0), width=40, new=(40, 33), kv_heads=1, group=4, head_dim=512, window=50, softcap=5.0),
}

#: Several new tokens that the decode kernels take.
FEW_CASES = {
    "two": Case(lengths=(130, 3), width=2, group=4, head_dim=128),
    "eight": Case(lengths=(37, 0), width=8, group=4, head_dim=128, rotary_dim=48, packed=True),
    "ragged": Case(lengths=(0, 15, 16, 129, 149), new=(3, 0, 1, 4, 1), width=4, group=7, layout="separate"),
    "one each": Case(lengths=(31, 140), width=8, group=1, head_dim=80, dtype="bfloat16"),
    "sixteen heads": Case(lengths=(100,), width=2, group=16, head_dim=80, rotary_dim=32, dtype="bfloat16"),
    "large heads": Case(lengths=(140, 17), new=(4, 3), width=4, group=4, head_dim=256, rotary_dim=64, in_place=True),
    "many large heads": Case(lengths=(40, 3, 17, 100), new=(8, 8, 5, 7), width=8, kv_heads=4, group=2, head_dim=256),
    "large heads, few rows": Case(lengths=(33,), width=3, group=2, head_dim=256, softcap=5.0, scale=0.3),
    "out of bounds": Case(lengths=(148, 150, 10, -3, 20), new=(6, 6, 7, 5, -1), width=6, group=3),
    "window": Case(lengths=(149 - 7, 20, 0), window=33, width=5, new=(5, 5, 4), group=2, head_dim=128),
    "a window inside the new tokens": Case(lengths=(70, 3), window=3, width=8, group=4, dtype="bfloat16", head_dim=80),
    "a window of few rows": Case(lengths=(149 - 7, 20, 0), window=33, width=4, new=(4, 4, 3), group=2, head_dim=128),
    "a window inside few rows": Case(lengths=(70, 3), window=3, width=8, group=1, dtype="bfloat16", head_dim=80),
    "a window of one": Case(lengths=(64, 0), window=1, width=3, group=8),
    "large softcap": Case(lengths=(40,), softcap=1e6, width=3),
    "short cache": Case(lengths=(1,), kv_heads=1, width=3, tokens=4),
    "many slots": Case(lengths=tuple(range(40)), new=tuple(i % 4 for i in range(40)), width=3, kv_heads=1, tokens=43, group=2),
    "many parts": Case(lengths=(1496,), kv_heads=1, width=4, tokens=1500, group=7, head_dim=128, in_place=True),
    "many parts in a window": Case(lengths=(1496,), kv_heads=1, width=4, tokens=1500, group=4, window=1200),
    "many large parts": Case(lengths=(3000,), new=(3,), kv_heads=1, width=4, tokens=3004, group=4, head_dim=256),  # stream-K
    "parts of slots with different rows": Case(lengths=(3000, 400, 400), new=(5, 1, 4), kv_heads=1, width=5, tokens=3005),
    "more parts than there is room for": Case(
        lengths=(3000, *[5] * 7), new=(3, 1, 0, 4, 4, 2, 3, 1), width=4, kv_heads=1, tokens=3004, group=8, head_dim=128
    ),
    "sinks": Case(lengths=(37, 0), new=(8, 3), width=8, group=4, sinks=0.5, window=5),
    "sinks of few rows": Case(lengths=(149 - 7, 20, 0), width=2, group=3, head_dim=128, sinks=2.0),
    "sinks of many parts": Case(lengths=(1496,), kv_heads=2, width=4, tokens=1500, group=7, head_dim=128, sinks=3.0),
}  # fmt: skip

#: Trees of draft tokens.
TREE_CASES = {
    "a root alone": Case(lengths=(37, 0), tree="star", group=2),
    "a few tokens": Case(lengths=(37, 0), width=5, tree="random", group=2),
    "ragged": Case(lengths=(0, 63, 20, 130), new=(5, 17, 0, 1), width=17, tree="random", group=3, packed=True, layout="separate"),
    "as many tokens as a mask has bits": Case(lengths=(64, 3), width=64, tree="random", kv_heads=1, group=2),
    "a chain of 64": Case(lengths=(7,), width=64, tree="chain", kv_heads=1, window=40),
    "several row blocks": Case(lengths=(70, 0), new=(40, 33), width=40, tree="random", group=8, head_dim=128, kv_heads=1, in_place=True),
    "several row blocks of few tokens": Case(lengths=(400, 31), width=20, tokens=430, tree="random", group=8, head_dim=128, kv_heads=1),
    "a window": Case(lengths=(100, 3), width=33, tree="random", window=20, head_dim=128, group=2, rotary_dim=24, kv_heads=1),
    "a window that begins behind the first part": Case(lengths=(900,), width=16, tree="comb", tokens=1000, group=4, window=130, kv_heads=1),
    "a window inside the tree": Case(lengths=(70, 20), width=30, tree="random", group=2, window=3, dtype="bfloat16", head_dim=80),
    "a window of one": Case(lengths=(64, 0), width=9, tree="comb", window=1, group=8),
    "a window of several row blocks": Case(lengths=(130,), width=40, tokens=180, tree="star", window=10, kv_heads=1, group=8),
    "a star": Case(lengths=(66,), width=20, tree="star", softcap=5.0, scale=0.3, head_dim=256, kv_heads=1, group=2, sinks=4.0),
    "out of bounds": Case(lengths=(148, 150, 10, -3, 20), new=(6, 6, 7, 5, -1), width=6, tree="comb"),
    "a full cache": Case(lengths=(496, 498), width=8, tokens=500, tree="comb", kv_heads=1, head_dim=128, group=3),
    "many parts": Case(lengths=(1000, 3, 400), new=(25, 1, 0), width=25, tokens=1100, tree="random", group=4, head_dim=128, kv_heads=1),
    "small heads": Case(lengths=(9, 70), width=40, tree="random", head_dim=80, rotary_dim=32, dtype="bfloat16", window=30, sinks=0.5),
    "heads of 256": Case(lengths=(140, 17), new=(14, 13), width=14, tree="random", group=4, head_dim=256, rotary_dim=64, in_place=True),
    "heads of 512": Case(lengths=(100, 20), width=14, new=(14, 3), tree="comb", group=4, head_dim=512, rotary_dim=128, packed=True),
    "a window of heads of 512": Case(lengths=(70, 0), width=40, new=(40, 33), tree="comb", kv_heads=1, head_dim=512, window=5, softcap=5.0),
}  # fmt: skip


def _grid_case(head_dim, group, dtype, width):
    lengths, new = ((0, 15, 16, 17, 127, 128, 129, 139), None) if width == 1 else ((0, 140, 63, 64, 70), (65, 0, 1, 64, 70))
    return Case(
        lengths=lengths, new=new, width=width, tokens=140, kv_heads=2 if group < 7 else 1, group=group, head_dim=head_dim, dtype=dtype,
        rotary_dim={1: 0, 4: 32, 8: head_dim // 2}.get(group), window={2: 33, 7: 64, 16: 1}.get(group, 0),
        softcap=4.0 if group in (4, 16) else 0.0, layout="separate" if group % 2 else "combined", packed=group in (1, 8),
    )  # fmt: skip


#: By name, for width 1 and more.
GRID = {
    f"{dtype} D={head_dim} G={group} s={width}": _grid_case(head_dim, group, dtype, width)
    for dtype in ("float16", "bfloat16")
    for head_dim in HEAD_DIMS
    for group in (1, 2, 4, 7, 8, 16)
    for width in (1, 2, 3, 70)
}


def random_prefill(seed):
    """Return a case of several new tokens, over more keys than a block has."""
    random = np.random.default_rng(seed)

    def one_of(*values):
        return values[random.integers(len(values))]

    slots, tokens, width = one_of(1, 2, 3), one_of(200, 700, 1500), one_of(2, 3, 5, 8, 16, 17, 33, 40, 70, 150)
    head_dim, dtype = one_of((64, "float16"), (80, "bfloat16"), (128, "float16"), (256, "float16"))
    return Case(
        lengths=tuple(one_of(0, int(random.integers(tokens)), tokens - width, tokens - 1) for _ in range(slots)),
        new=one_of(None, tuple(random.integers(0, width + 1, slots).tolist())),
        width=width,
        tokens=tokens,
        kv_heads=one_of(1, 2),
        group=one_of(1, 2, 3, 4, 7, 8, 16),
        head_dim=head_dim,
        dtype=dtype,
        rotary_dim=one_of(None, 0, 32, 16),
        window=one_of(0, 0, 0, 1, 20, 130, 600),
        softcap=one_of(0.0, 0.0, 5.0),
        layout=one_of("combined", "separate"),
        packed=one_of(False, True),
    )


#: What a quantized cache can be: its dtype and its scales.
QUANTIZED = [(kv_dtype, scales) for kv_dtype in ("float8_e4m3fn", "int8") for scales in ("head", "token")]


def over_quantized(cases):
    """Return each case with both dtypes of K and V and both kinds of scales: two of the four pairs, and the other two for the next case."""
    return [(name, *pair) for number, name in enumerate(cases) for pair in (QUANTIZED[::3], QUANTIZED[1:3])[number % 2]]


def quantized(case, kv_dtype, scales):
    """Return the same call over a quantized cache."""
    return replace(case, kv_dtype=kv_dtype, scales=scales)
