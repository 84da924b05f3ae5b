"""Products of a few rows with weights on a GPU, beside those of torch: are they right, and how fast are they. Needs torch.

    python benchmarks/linear.py [--quick] [--max-seconds 60] [--tiles WARPS=16,LOADS=8,LARGE=97,PREFETCH=32,...]

Products alone: weights take turns, so that none is in L2. Layers: whole layers of a decode step in one graph, products, attention and
norms; their results are those of one launch after another, bit for bit. The limit is the time in which the GPU copies as many bytes as the
weights have, and in layers K and V. ``--tiles`` may be given several times: each is tried with the first model, and nothing is written.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from attention import Gpu, _copy_bandwidth, _elapsed, _repeated
from environment import describe_environment, to_table, write_result

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))

from trt_kvcache import DeviceTensor  # noqa: E402
from trt_kvcache.kernels import (  # noqa: E402
    AttentionWorkspace,
    add_rms_norm,
    attend,
    launch as launches,
    linear,
    linear_silu_mul,
    linear_tiles,
    qk_rms_norm,
    silu_mul,
    split_qkv,
)
from trt_kvcache.memory.shapes import dense_nbytes  # noqa: E402

#: Share of the copy bandwidth, from 64 MB of weights and up to 8 rows: of a product alone, and of layers. A product's time over torch's.
LIMITS = {"of_copy": 0.9, "layers_of_copy": 0.9, "of_torch": 1.02}
_LARGE_MB, _MAX_LIMITED_ROWS = 64, 8

DTYPE, _ELEMENT_NBYTES, _MIB = "bfloat16", 2, 2**20

#: Tokens of each row in the caches of layers.
PAST = 1024

#: Largest error of a product, relative to the largest result: half a unit in the last place, and sums of 32 bits in any order.
_TOLERANCE = 2**-8

_ROTATED_NBYTES, _EPSILON = 256 * _MIB, 1e-5

Pair = tuple[DeviceTensor, torch.Tensor]


class Model(NamedTuple):
    """The sizes of a decoder."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    qk_norm: bool = False  # of each head

    @property
    def qkv(self) -> int:
        """Return the columns of q, k and v."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def attended(self) -> int:
        """Return the columns of the output of attention."""
        return self.heads * self.head_dim

    def products(self) -> dict[str, tuple[int, int]]:
        """Return outputs and inputs of each product."""
        return {
            "qkv": (self.qkv, self.hidden),
            "o": (self.hidden, self.attended),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
            "head": (self.vocab, self.hidden),
        }

    def layer_nbytes(self, rows: int) -> int:
        """Return the bytes of the weights of a layer, and of K and V."""
        weights = sum(outputs * inputs for name, (outputs, inputs) in self.products().items() if name != "head")
        return (weights + rows * 2 * self.kv_heads * PAST * self.head_dim) * _ELEMENT_NBYTES


MODELS = (
    Model("Llama-3-8B", 32, 4096, 32, 8, 128, 14336, 128256),
    Model("Qwen2-0.5B", 24, 896, 14, 2, 64, 4864, 151936),
    Model("Qwen3-4B", 36, 2560, 32, 8, 128, 9728, 151936, qk_norm=True),
)


class Tensors:
    """Tensors of one GPU, and torch's views of them."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def new(self, *shape: int, dtype: str = DTYPE, scale: float = 1.0) -> Pair:
        """Return normally distributed numbers."""
        mine = DeviceTensor(self._gpu.memory.allocate(dense_nbytes(shape, dtype), stream=self._gpu.stream), shape=shape, dtype=dtype)
        return mine, torch.from_dlpack(mine).normal_().mul_(scale)

    def weights(self, outputs: int, inputs: int, copies: int) -> list[Pair]:
        """Return so many matrices, whose products are about as large as what they are multiplied with."""
        return [self.new(outputs, inputs, scale=inputs**-0.5) for _ in range(copies)]


def seconds(gpu: Gpu, calls: Sequence[Callable[[], object]], least: float) -> float:
    """Return the seconds of a call, in a graph of all of them; ``least`` is about what one takes."""
    repeated = _repeated(calls, least)
    replay = captured(gpu, repeated)
    return _elapsed(replay) / len(repeated)


def captured(gpu: Gpu, calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """Return what replays a graph of these calls, after each of them ran once."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=gpu.torch_stream, capture_error_mode="thread_local"):
        for call in calls:
            call()
    return graph.replay


def product_row(
    gpu: Gpu, model: Model, name: str, rows: int, weights: Sequence[Pair], copy: float, with_torch: bool = True
) -> dict[str, Any]:
    """Check and measure a product over weights that take turns."""
    outputs, inputs = model.products()[name]
    tensors, dtype = Tensors(gpu), "float32" if name == "head" else DTYPE
    (x, x_view), (out, out_view) = tensors.new(rows, inputs), tensors.new(rows, outputs, dtype=dtype)
    torch.cuda.synchronize()  # weights are read early
    ours = [lambda w=weight: linear(x, w, out=out, stream=gpu.stream) for weight, _ in weights]
    ours[0]()
    error = largest_error(out_view, x_view, weights[0][1])
    assert error <= _TOLERANCE, f"{model.name} {name}, {rows} rows: error {error:.2e} over {_TOLERANCE:g}"

    def by_torch(weight: torch.Tensor) -> None:
        if name == "head":
            torch.mm(x_view, weight.t(), out_dtype=torch.float32, out=out_view)
        else:
            F.linear(x_view, weight)

    nbytes = outputs * inputs * _ELEMENT_NBYTES
    times = {"ours": seconds(gpu, ours, nbytes / copy)}
    if with_torch:
        times["torch"] = seconds(gpu, [lambda w=view: by_torch(w) for _, view in weights], nbytes / copy)
    row = {"model": model.name, "product": name, "outputs": outputs, "inputs": inputs, "rows": rows, "mb": round(nbytes / _MIB, 1)}
    return {**row, **_figures(times, nbytes / copy), "error": float(f"{error:.1e}")}


def _figures(times: dict[str, float], least: float) -> dict[str, Any]:
    return {
        "us": {side: round(one * 1e6, 2) for side, one in times.items()},
        "of_copy": {side: round(least / one, 3) for side, one in times.items()},
    }


def largest_error(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> float:
    """Return max|error| / max|result|, against float64."""
    worst = largest = 0.0
    for some, weights in zip(out.split(8192, dim=1), weight.split(8192), strict=True):
        expected = x.double() @ weights.double().t()
        worst = max(worst, float((some.double() - expected).abs().max().nan_to_num(torch.inf)))
        largest = max(largest, float(expected.abs().max()))
    return worst / largest


class Layers:
    """All layers of a decode step of one new token for each row: fewer would have an easier address translation."""

    def __init__(self, gpu: Gpu, model: Model, rows: int) -> None:
        tensors, self._gpu, self.count = Tensors(gpu), gpu, model.layers
        shapes = {name: shape for name, shape in model.products().items() if name != "head"}
        self._layers = [{name: tensors.new(*shape, scale=shape[1] ** -0.5) for name, shape in shapes.items()} for _ in range(self.count)]
        self._norm = tensors.new(model.hidden)
        self._normed, self._change, self.hidden = (tensors.new(rows, model.hidden) for _ in range(3))
        self._qkv, self._gated, self._attended = (tensors.new(rows, size) for size in (model.qkv, model.intermediate, model.attended))
        self._first_hidden, self._first_normed = self.hidden[1].clone(), self._normed[1].clone()
        dim, heads, kv_heads = model.head_dim, model.heads, model.kv_heads
        q, k, v = split_qkv(self._qkv[0].reshape(rows, 1, heads + 2 * kv_heads, dim), heads, kv_heads)
        lengths, view = gpu.tensor((rows,), "int32")
        view.fill_(PAST)
        workspace = AttentionWorkspace(gpu.memory, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, stream=gpu.stream)
        options = {"out": self._attended[0].reshape(rows, 1, heads, dim), "workspace": workspace, "stream": gpu.stream}
        caches = [tensors.new(rows, 2, kv_heads, PAST + 1, dim)[0] for _ in range(self.count)]
        heads_of_rows, counts = self._qkv[0].reshape(rows, heads + 2 * kv_heads, dim), {"num_heads": heads, "num_kv_heads": kv_heads}
        norms = [tensors.new(dim)[0] for _ in range(2)] if model.qk_norm else []
        self._norm_qk = [lambda: qk_rms_norm(heads_of_rows, *norms, **counts, eps=_EPSILON, stream=gpu.stream)] if norms else []
        self._attend = [lambda c=cache: attend(q, k, v, c, lengths, **options) for cache in caches]
        torch.cuda.synchronize()  # weights are read early

    def begin(self) -> None:
        """Set the residual stream back."""
        self.hidden[1].copy_(self._first_hidden)
        self._normed[1].copy_(self._first_normed)

    def ours(self) -> list[Callable[[], object]]:
        """Return the launches of all layers."""
        stream, calls = self._gpu.stream, []
        normed, qkv, attended, gated, change = (pair[0] for pair in (self._normed, self._qkv, self._attended, self._gated, self._change))
        for layer, attend_layer in zip(self._layers, self._attend, strict=True):
            weights = {name: weight for name, (weight, _) in layer.items()}
            calls += [
                lambda w=weights: linear(normed, w["qkv"], out=qkv, stream=stream),
                *self._norm_qk,
                attend_layer,
                lambda w=weights: linear(attended, w["o"], out=change, stream=stream),
                self._add_norm,
                lambda w=weights: linear_silu_mul(normed, w["gate_up"], out=gated, stream=stream),
                lambda w=weights: linear(gated, w["down"], out=change, stream=stream),
                self._add_norm,
            ]
        return calls

    def by_torch(self) -> list[Callable[[], object]]:
        """Return the same with products of torch."""
        views = [{name: view for name, (_, view) in layer.items()} for layer in self._layers]
        return [
            lambda w=weights, a=attend_layer: self._layer_by_torch(w, a) for weights, attend_layer in zip(views, self._attend, strict=True)
        ]

    def _layer_by_torch(self, weights: dict[str, torch.Tensor], attend_layer: Callable[[], object]) -> None:
        stream, (_, normed), (_, change), (_, qkv) = self._gpu.stream, self._normed, self._change, self._qkv
        torch.mm(normed, weights["qkv"].t(), out=qkv)
        for norm_qk in self._norm_qk:
            norm_qk()
        attend_layer()
        torch.mm(self._attended[1], weights["o"].t(), out=change)
        self._add_norm()
        gate_up = F.linear(normed, weights["gate_up"])
        silu_mul(_borrowed(self._gpu, gate_up), out=self._gated[0], stream=stream)
        torch.mm(self._gated[1], weights["down"].t(), out=change)
        self._add_norm()

    def _add_norm(self) -> None:
        add_rms_norm(self.hidden[0], self._change[0], self._norm[0], out=self._normed[0], eps=_EPSILON, stream=self._gpu.stream)

    def check(self) -> None:
        """Compare a graph, in which launches overlap, with launches that are waited for; and with torch."""
        self.begin()
        for call in self.ours():
            call()
            torch.cuda.synchronize()
        expected = self.hidden[1].clone()
        replay = captured(self._gpu, [self.begin, *self.ours()])
        for _ in range(5):
            replay()
        torch.cuda.synchronize()
        assert torch.equal(self.hidden[1], expected), "launches that overlap give something else than one after another"
        self.begin()
        for call in self.by_torch():
            call()
        difference = float((self.hidden[1].double() - expected.double()).norm() / expected.double().norm())
        assert difference <= 0.1, f"layers differ from torch's by {difference:.2e}"


def _borrowed(gpu: Gpu, tensor: torch.Tensor) -> DeviceTensor:
    from trt_kvcache.torch_engine.device_view import device_view

    return device_view(tensor, gpu.memory)


def layers_row(gpu: Gpu, model: Model, rows: int, copy: float, with_torch: bool = True) -> dict[str, Any]:
    """Check and measure layers one behind the other."""
    nbytes = model.layer_nbytes(rows)
    layers = Layers(gpu, model, rows)
    layers.check()
    sides = {"ours": layers.ours(), "torch": layers.by_torch()} if with_torch else {"ours": layers.ours()}
    least = nbytes / copy
    times = {}
    for side, calls in sides.items():
        repeats = max(1, round(2e-3 / least / layers.count))
        times[side] = _elapsed(captured(gpu, [layers.begin, *calls * repeats])) / (layers.count * repeats)
    return {"model": model.name, "rows": rows, "layers": layers.count, "mb": round(nbytes / _MIB, 1), **_figures(times, least)}


def exceeded(products: Sequence[dict[str, Any]], layers: Sequence[dict[str, Any]]) -> list[str]:
    """Return the limits that rows do not keep."""
    slow = []
    for row in (one for one in products if one["rows"] <= _MAX_LIMITED_ROWS):
        what, ratio = f"{row['model']} {row['product']}, {row['rows']} rows", row["us"]["ours"] / row["us"]["torch"]
        if row["mb"] >= _LARGE_MB and row["of_copy"]["ours"] < LIMITS["of_copy"]:
            slow.append(f"{what}: {row['of_copy']['ours']:.3f} of copy")
        if ratio > LIMITS["of_torch"]:
            slow.append(f"{what}: {ratio:.2f} of torch's time")
    for row in (one for one in layers if one["mb"] >= _LARGE_MB and one["of_copy"]["ours"] < LIMITS["layers_of_copy"]):
        slow.append(f"{row['model']} layers, {row['rows']} rows: {row['of_copy']['ours']:.3f} of copy")
    return slow


def use_tiles(text: str) -> None:
    """Use other sizes than :func:`~trt_kvcache.kernels.linear_tiles.linear_tiles` chooses."""
    given = {_TILE_NAMES[name]: int(value) for name, value in (pair.split("=") for pair in text.split(",") if pair)}
    linear_tiles.linear_tiles = lambda rows, arch: _CHOSEN_TILES(rows, arch)._replace(**given)
    for cached in (linear_tiles.linear_plan, launches._module, launches._kernel):
        cached.cache_clear()


_CHOSEN_TILES = linear_tiles.linear_tiles
_TILE_NAMES = {
    **{name.upper(): name for name in ("warps", "loads", "blocks_per_sm")},
    **{"LARGE": "large_percent", "PREFETCH": "prefetched_kib"},
}


def try_tiles(gpu: Gpu, texts: Sequence[str], copy: float, rows: Sequence[int]) -> None:
    """Print what each choice gives for the products and layers of the first model."""
    model = MODELS[0]
    weights = {name: Tensors(gpu).weights(*shape, copies=3) for name, shape in model.products().items()}
    for text in texts:
        use_tiles(text)
        for count in rows:
            found = [product_row(gpu, model, name, count, of_name, copy, with_torch=False) for name, of_name in weights.items()]
            layers = layers_row(gpu, model, count, copy, with_torch=False)
            shares = {row["product"]: row["of_copy"]["ours"] for row in found}
            print(
                json.dumps(
                    {"tiles": text, "rows": count, "of_copy": shares, "layers": layers["of_copy"]["ours"], "us": layers["us"]["ours"]}
                )
            )
            sys.stdout.flush()


def measure(gpu: Gpu, copy: float, quick: bool, max_seconds: float) -> dict[str, Any]:
    """Check and measure it all; what does not fit into the time is named and left out."""
    deadline, products, layers, left_out = time.monotonic() + max_seconds, [], [], []
    for index, model in enumerate(MODELS[:1] if quick else MODELS):
        counts = (1, 8) if quick or index else (1, 2, 4, 8, 16)
        for count in (one for one in counts if one <= _MAX_LIMITED_ROWS):
            if time.monotonic() > deadline:
                left_out.append(f"{model.name} layers, {count} rows")
                continue
            layers.append(layers_row(gpu, model, count, copy))
            print(json.dumps(layers[-1]), flush=True)
        for name, (outputs, inputs) in model.products().items():
            copies = min(64, -(-_ROTATED_NBYTES // (outputs * inputs * _ELEMENT_NBYTES)))
            weights = Tensors(gpu).weights(outputs, inputs, max(1, copies))
            for count in counts:
                if time.monotonic() > deadline:
                    left_out.append(f"{model.name} {name}, {count} rows")
                    continue
                products.append(product_row(gpu, model, name, count, weights, copy))
                print(json.dumps(products[-1]), flush=True)
    return {"left_out": left_out, "exceeded": exceeded(products, layers), "layers": to_table(layers), "products": to_table(products)}


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the first model, 1 and 8 rows")
    parser.add_argument("--max-seconds", type=float, default=60, help="then the rest is left out")
    parser.add_argument("--tiles", action="append", help="sizes to try; may be repeated")
    parser.add_argument("--rows", default="1,8", help="with --tiles; default: %(default)s")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "linear.json")
    arguments = parser.parse_args()
    gpu = Gpu()
    with torch.cuda.stream(gpu.torch_stream):
        copy = _copy_bandwidth()
        print(json.dumps({"copy_gb_per_second": round(copy / 1e9)}), flush=True)
        if arguments.tiles:
            try_tiles(gpu, arguments.tiles, copy, [int(count) for count in arguments.rows.split(",")])
            return 0
        result = measure(gpu, copy, arguments.quick, arguments.max_seconds)
    for line in result["exceeded"]:
        print(f"over the limit: {line}")
    content = {"copy_gb_per_second": round(copy / 1e9), "limits": LIMITS, "dtype": DTYPE, **result}
    write_result(arguments.out, {**describe_environment(gpu=True), **content})
    return 1 if result["exceeded"] or result["left_out"] else 0


if __name__ == "__main__":
    sys.exit(main())
