"""Products with packed weights on a GPU: are they right, and how fast beside those with 16 bits and beside a copy. Needs torch.

    python benchmarks/packed_linear.py [--quick] [--schemes int4,q4_0] [--max-seconds 60] [--tiles WARPS=16,LOADS=4,...]

Each product of a model is compared with float64 over the same weights. Then weights take turns, so that none is in the L2, in a CUDA graph.
A share is the bytes of the packed weights divided by the time, relative to the bandwidth of a copy. ``layers``: the products of a layer
without what is between them, but with the launches that gather inputs of act-order, except of down. ``many``: 1,024 rows with weights that
are dequantized in parts, beside torch with weights in 16 bits. ``pairs``: q and k in one format and v in another one, in one launch, beside
a launch for each and the concatenation.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from attention import Gpu, _copy_bandwidth
from environment import describe_environment, to_table, write_result
from linear import DTYPE, MODELS, Model, Tensors, captured, largest_error, seconds
from packed_weights import quantized
from weight_schemes import SCHEMES, SUPER_BLOCKS

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))

from trt_kvcache.kernels import launch as launches, linear, linear_silu_mul, linear_tiles  # noqa: E402
from trt_kvcache.kernels.column_order_kernels import gather_columns_kernel  # noqa: E402
from trt_kvcache.kernels.packed_linear_kernels import (  # noqa: E402
    packed_dequantize_kernel,
    packed_linear_gated_mul_kernel,
    packed_linear_kernel,
)
from trt_kvcache.kernels.packed_pair_kernels import packed_linear_pair_kernel  # noqa: E402
from trt_kvcache.memory.tensor import DeviceTensor  # noqa: E402
from trt_kvcache.torch_engine.device_view import device_view  # noqa: E402
from trt_kvcache.torch_engine.device_views import DeviceViews  # noqa: E402
from trt_kvcache.torch_engine.operations import Elementwise, Projections, TorchProjection  # noqa: E402
from trt_kvcache.torch_engine.packed_matrix import PackedMatrix  # noqa: E402
from trt_kvcache.torch_engine.packed_projections import PackedProjections, new_workspace  # noqa: E402

#: Largest error of a product, relative to the largest result: half a unit in the last place, and sums of 32 bits in any order.
_TOLERANCE = 2**-8

_ROTATED_NBYTES, _MIB, _MANY = 256 << 20, 1 << 20, 1024

#: Share of the copy bandwidth of products of up to 8 rows, from so many MB of packed weights.
LIMITS = {"of_copy": 0.8}
_LARGE_MB, _MAX_LIMITED_ROWS = 32, 8

#: Formats of q and k, and of v: those of files in Q4_K_M and Q5_K_M, and with v in 8 bits.
PAIRS = (("q4_k", "q6_k"), ("q5_k", "q6_k"), ("q4_k", "q8_0"))


class Products:
    """The matrices of a model in one scheme, ``copies`` of each product."""

    def __init__(self, gpu: Gpu, model: Model, scheme: str) -> None:
        self.gpu, self.model, self.scheme = gpu, model, scheme
        self._packed: dict[str, list[PackedMatrix]] = {}

    def packed(self, name: str) -> list[PackedMatrix]:
        """Return matrices that take turns."""
        if name not in self._packed:
            outputs, inputs = self.model.products()[name]
            made = [
                quantized(
                    torch.randn(outputs, inputs, device="cuda", dtype=getattr(torch, DTYPE)) * inputs**-0.5, self.scheme, self.gpu.memory
                )
            ]
            copies = min(16, -(-_ROTATED_NBYTES // made[0].nbytes))
            made += [_copy_of(made[0]) for _ in range(copies - 1)]
            self._packed[name] = made
        return self._packed[name]

    def forget(self) -> None:
        """Free the matrices."""
        self._packed.clear()
        torch.cuda.empty_cache()


def _copy_of(weight: PackedMatrix) -> PackedMatrix:
    """Return an equal matrix in other memory."""
    fields = {field.name: getattr(weight, field.name) for field in dataclasses.fields(weight)}
    return type(weight)(**{name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in fields.items()})


def in_order(x: DeviceTensor, weight: PackedMatrix, ordered: DeviceTensor, gpu: Gpu) -> DeviceTensor:
    """Return inputs in the order of a weight: gathered into ``ordered`` if it has one."""
    if weight.order is None:
        return x
    gather_columns_kernel(x, device_view(weight.order, gpu.memory), ordered, gpu.stream)
    return ordered


def product_row(products: Products, name: str, rows: int, copy: float) -> dict[str, Any]:
    """Check and measure a product."""
    gpu, (outputs, inputs) = products.gpu, products.model.products()[name]
    weights, tensors, gated = products.packed(name), Tensors(gpu), name == "gate_up"
    (x, x_view), dtype = tensors.new(rows, inputs), "float32" if name == "head" else DTYPE
    plain, plain_view = tensors.new(rows, outputs, dtype=dtype)
    dense = weights[0].dequantized()
    torch.cuda.synchronize()  # weights are read early
    ordered = tensors.new(rows, inputs)[0]
    packed_linear_kernel(in_order(x, weights[0], ordered, gpu), weights[0].tensors, None, plain, gpu.stream)
    error = largest_error(plain_view, x_view, dense)
    dequantized = torch.empty_like(dense)
    packed_dequantize_kernel(device_view(dequantized, gpu.memory), weights[0].tensors, 0, gpu.stream)
    columns = dense if weights[0].order is None else dense[:, weights[0].order]
    assert torch.equal(dequantized, columns), f"{products.scheme} {name}: the kernel dequantizes other values than torch"
    assert error <= _TOLERANCE, f"{products.scheme} {name}, {rows} rows: error {error:.2e} over {_TOLERANCE:g}"
    out, _ = tensors.new(rows, outputs // 2 if gated else outputs, dtype=dtype)

    def call(weight: PackedMatrix) -> None:
        if gated:
            packed_linear_gated_mul_kernel(x, weight.tensors, None, out, "silu", gpu.stream)
        else:
            packed_linear_kernel(x, weight.tensors, None, out, gpu.stream)

    dense_weight, copies = device_view(dense, gpu.memory), [dense, *(dense.clone() for _ in range(min(2, 256 * _MIB // dense.nbytes)))]
    views = [dense_weight, *(device_view(one, gpu.memory) for one in copies[1:])]
    sixteen = linear_silu_mul if gated else linear
    nbytes = weights[0].nbytes
    times = {
        "packed": seconds(gpu, [lambda w=weight: call(w) for weight in weights], nbytes / copy),
        "16 bits": seconds(gpu, [lambda w=weight: sixteen(x, w, out=out, stream=gpu.stream) for weight in views], dense.nbytes / copy),
    }
    row = {"model": products.model.name, "scheme": products.scheme, "product": name, "rows": rows, "mb": round(nbytes / _MIB, 1)}
    return {**row, **_figures(times, nbytes, copy), "error": float(f"{error:.1e}")}


def _figures(times: dict[str, float], nbytes: int, copy: float) -> dict[str, Any]:
    return {
        "us": {side: round(one * 1e6, 2) for side, one in times.items()},
        "gb_per_second": round(nbytes / times["packed"] / 1e9),
        "of_copy": round(nbytes / copy / times["packed"], 3),
        "speedup": round(times["16 bits"] / times["packed"], 2),
    }


def layers_row(products: Products, rows: int, copy: float) -> dict[str, Any]:
    """Measure the products of a layer one behind the other, with overlapping launches, beside the same in 16 bits."""
    gpu, model, tensors = products.gpu, products.model, Tensors(products.gpu)
    names = ("qkv", "o", "gate_up", "down")
    weights = {name: products.packed(name) for name in names}
    kept = {name: weights[name][0].dequantized() for name in names}  # a view does not keep what it is of
    dense = {name: device_view(tensor, gpu.memory) for name, tensor in kept.items()}
    x, attended, gated = (tensors.new(rows, size)[0] for size in (model.hidden, model.attended, model.intermediate))
    qkv, change = (tensors.new(rows, size)[0] for size in (model.qkv, model.hidden))
    torch.cuda.synchronize()  # weights are read early
    stream, count = gpu.stream, min(len(copies) for copies in weights.values())

    ordered_x, ordered = (tensors.new(rows, size)[0] for size in (model.hidden, model.attended))

    def packed(at: int) -> None:
        qkv_weight, o_weight, gate_up_weight = (weights[name][at] for name in ("qkv", "o", "gate_up"))
        packed_linear_kernel(in_order(x, qkv_weight, ordered_x, gpu), qkv_weight.tensors, None, qkv, stream)
        packed_linear_kernel(in_order(attended, o_weight, ordered, gpu), o_weight.tensors, None, change, stream)
        packed_linear_gated_mul_kernel(in_order(x, gate_up_weight, ordered_x, gpu), gate_up_weight.tensors, None, gated, "silu", stream)
        packed_linear_kernel(gated, weights["down"][at].tensors, None, change, stream)

    def sixteen() -> None:
        linear(x, dense["qkv"], out=qkv, stream=stream)
        linear(attended, dense["o"], out=change, stream=stream)
        linear_silu_mul(x, dense["gate_up"], out=gated, stream=stream)
        linear(gated, dense["down"], out=change, stream=stream)

    nbytes = sum(weights[name][0].nbytes for name in names)
    times = {
        "packed": seconds(gpu, [lambda at=at: packed(at) for at in range(count)], nbytes / copy),
        "16 bits": seconds(gpu, [sixteen], 4 * nbytes / copy),
    }
    row = {"model": model.name, "scheme": products.scheme, "rows": rows, "mb": round(nbytes / _MIB, 1)}
    return {**row, **_figures(times, nbytes, copy)}


def many_row(products: Products, name: str) -> dict[str, Any]:
    """Check and measure a product of many rows."""
    gpu, (_, inputs) = products.gpu, products.model.products()[name]
    weight, dtype = products.packed(name)[0], getattr(torch, DTYPE)
    x, dense = torch.randn(1, _MANY, inputs, device="cuda", dtype=dtype), TorchProjection(weight.dequantized(), None)
    by_torch = Projections(Elementwise())
    ours = PackedProjections(by_torch, Elementwise(), new_workspace(dtype, x.device), DeviceViews(gpu.memory), gpu.stream)
    packed = TorchProjection(weight, None)
    expected = by_torch.project(dense, x)
    difference = float((ours.project(packed, x).double() - expected.double()).abs().max() / expected.double().abs().max())
    assert difference <= 2 * _TOLERANCE, f"{products.scheme} {name}, {_MANY} rows: differs from torch by {difference:.2e}"
    times = {}
    for side, call in (("packed", lambda: ours.project(packed, x)), ("16 bits", lambda: by_torch.project(dense, x))):
        times[side] = _elapsed_of(captured(gpu, [call] * 8)) / 8
    us = {side: round(one * 1e6, 1) for side, one in times.items()}
    return {"model": products.model.name, "scheme": products.scheme, "product": name, "rows": _MANY, "us": us}


def pair_row(gpu: Gpu, model: Model, schemes: tuple[str, str], rows: int, copy: float) -> dict[str, Any]:
    """Check and measure q, k and v of a layer, the last one in another format, with weights that take turns."""
    counts, dtype = (model.qkv - model.kv_heads * model.head_dim, model.kv_heads * model.head_dim), getattr(torch, DTYPE)
    matrices = []
    for scheme, count in zip(schemes, counts, strict=True):
        weight = torch.randn(count, model.hidden, device="cuda", dtype=dtype) * model.hidden**-0.5
        matrices.append(quantized(weight, scheme, gpu.memory))
    nbytes = sum(matrix.nbytes for matrix in matrices)
    copies = [matrices, *([_copy_of(matrix) for matrix in matrices] for _ in range(min(31, _ROTATED_NBYTES // nbytes)))]
    tensors = Tensors(gpu)
    (x, _), (out, out_view) = tensors.new(rows, model.hidden), tensors.new(rows, sum(counts))
    parts = [tensors.new(rows, count) for count in counts]
    views = [view for _, view in parts]
    torch.cuda.synchronize()  # weights are read early

    def in_one(pair: Sequence[PackedMatrix]) -> None:
        packed_linear_pair_kernel(x, (pair[0].tensors, pair[1].tensors), None, out, gpu.stream)

    def in_two(pair: Sequence[PackedMatrix]) -> None:
        for matrix, (part, _) in zip(pair, parts, strict=True):
            packed_linear_kernel(x, matrix.tensors, None, part, gpu.stream)
        torch.cat(views, dim=1, out=out_view)

    found = []
    for call in (in_one, in_two):
        out_view.fill_(float("nan"))
        call(matrices)
        found.append(out_view.clone())
    assert torch.equal(*found), f"{' and '.join(schemes)}, {rows} rows: one launch computes other values than two"
    calls = {"one launch": in_one, "two and cat": in_two}
    times = {side: seconds(gpu, [lambda c=call, p=pair: c(p) for pair in copies], nbytes / copy) for side, call in calls.items()}
    us = {side: round(one * 1e6, 2) for side, one in times.items()}
    share = round(nbytes / copy / times["one launch"], 3)
    return {"model": model.name, "schemes": " and ".join(schemes), "rows": rows, "mb": round(nbytes / _MIB, 1), "us": us, "of_copy": share}


def _elapsed_of(replay: Callable[[], object]) -> float:
    replay()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(5):
        replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 5e3


def use_tiles(text: str) -> None:
    """Use other sizes for packed weights than :func:`~trt_kvcache.kernels.linear_tiles.linear_tiles` chooses."""
    names = {"WARPS": "warps", "LOADS": "loads", "BLOCKS_PER_SM": "blocks_per_sm", "LARGE": "large_percent", "PREFETCH": "prefetched_kib"}
    given = {names[name]: int(value) for name, value in (pair.split("=") for pair in text.split(",") if pair)}

    def tiles(rows: int, arch: str, packed: str | None = None) -> linear_tiles.LinearTiles:
        chosen = _CHOSEN_TILES(rows, arch, packed)
        return chosen if packed is None else chosen._replace(**given)

    linear_tiles.linear_tiles = tiles
    for cached in (linear_tiles.linear_plan, launches._module, launches._kernel):
        cached.cache_clear()


_CHOSEN_TILES = linear_tiles.linear_tiles


def measure(gpu: Gpu, copy: float, options: argparse.Namespace) -> dict[str, Any]:
    """Check and measure what there is time for: the first model and scheme first."""
    deadline, found, left_out = time.monotonic() + options.max_seconds, {"pairs": [], "layers": [], "products": [], "many": []}, []

    def run(kind: str, what: str, call: Callable[[], dict[str, Any]]) -> None:
        if time.monotonic() > deadline:
            left_out.append(what)
            return
        found[kind].append(call())
        print(json.dumps(found[kind][-1]), flush=True)

    models: Sequence[Model] = MODELS[:1] if options.quick else MODELS[:2]
    for model in models:
        for schemes in PAIRS:
            for rows in (1, 16) if options.quick else (1, 8, 16):
                what = f"{model.name} {' and '.join(schemes)}, {rows} rows"
                run("pairs", what, lambda m=model, s=schemes, r=rows: pair_row(gpu, m, s, r, copy))
        for scheme in options.schemes:
            products = Products(gpu, model, scheme)
            for rows in (1, 8):
                run("layers", f"{model.name} {scheme} layers, {rows} rows", lambda p=products, r=rows: layers_row(p, r, copy))
            for name in model.products():
                for rows in (1, 16) if options.quick else (1, 8, 16):
                    run("products", f"{model.name} {scheme} {name}, {rows}", lambda p=products, n=name, r=rows: product_row(p, n, r, copy))
            if scheme == options.schemes[0]:
                run("many", f"{model.name} {scheme} many rows", lambda p=products: many_row(p, "gate_up"))
                run("many", f"{model.name} {scheme} many rows", lambda p=products: many_row(p, "o"))
            products.forget()
    return {"left_out": left_out, **{kind: to_table(rows) for kind, rows in found.items()}, "exceeded": exceeded(found["products"])}


def exceeded(products: Sequence[dict[str, Any]]) -> list[str]:
    """Return the products that do not keep the limit."""
    return [
        f"{row['model']} {row['scheme']} {row['product']}, {row['rows']} rows: {row['of_copy']:.3f} of copy"
        for row in products
        if row["rows"] <= _MAX_LIMITED_ROWS and row["mb"] >= _LARGE_MB and row["of_copy"] < LIMITS["of_copy"]
    ]


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the first model, 1 and 16 rows")
    parser.add_argument("--schemes", type=lambda text: text.split(","), default=[*SCHEMES, *SUPER_BLOCKS], help="default: all")
    parser.add_argument("--max-seconds", type=float, default=60, help="then the rest is left out")
    parser.add_argument("--tiles", action="append", help="sizes to try; may be repeated. Nothing is written")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "packed_linear.json")
    options = parser.parse_args()
    gpu = Gpu()
    with torch.cuda.stream(gpu.torch_stream), torch.inference_mode():
        copy = _copy_bandwidth()
        print(json.dumps({"copy_gb_per_second": round(copy / 1e9)}), flush=True)
        for text in options.tiles or []:
            use_tiles(text)
            for scheme in options.schemes:
                products = Products(gpu, MODELS[0], scheme)
                for rows in (1, 8):
                    print(json.dumps({"tiles": text, **layers_row(products, rows, copy)}), flush=True)
        if options.tiles:
            return 0
        result = measure(gpu, copy, options)
    for line in result["exceeded"]:
        print(f"over the limit: {line}")
    content = {"copy_gb_per_second": round(copy / 1e9), "limits": LIMITS, "dtype": DTYPE, **result}
    write_result(options.out, {**describe_environment(gpu=True), **content})
    return 1 if result["exceeded"] or result["left_out"] else 0


if __name__ == "__main__":
    sys.exit(main())
