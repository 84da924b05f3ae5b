"""Products of a few rows with the experts that a router has chosen: are they right, and how fast beside a copy and torch. Needs torch.

    python benchmarks/experts.py [--quick] [--max-seconds 60]

``up`` and ``down``: each launch alone. ``both``: the chosen experts of a layer, both launches and what the engine does for them. With
16-bit weights the torch operations that gather these experts are measured too. All in a CUDA graph. Weights of several layers and several
choices take turns, so that none is in the L2. The least time is that in which the GPU copies as many bytes as the chosen experts have as
they are stored, each once.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from attention import Gpu, _copy_bandwidth
from environment import describe_environment, to_table, write_result
from linear import seconds

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))

from trt_kvcache.kernels.expert_kernels import expert_down_kernel, expert_up_kernel  # noqa: E402
from trt_kvcache.kernels.linear_tiles import EXPONENTS, NVFP4_SCALES, PACKED_BITS  # noqa: E402
from trt_kvcache.kernels.packed_layout import (  # noqa: E402
    FRAGMENT_INPUTS,
    FRAGMENT_NBYTES,
    NVFP4_GROUPS,
    ONE_GROUP,
    count_groups,
    count_tiles,
)
from trt_kvcache.kernels.super_block_layout import FACTORS, HIGH_BITS, MIDDLES, SUPER_BLOCK, fragment_nbytes  # noqa: E402
from trt_kvcache.model import ClampedSwiGLU, MlpConfig  # noqa: E402
from trt_kvcache.torch_engine.device_view import device_view  # noqa: E402
from trt_kvcache.torch_engine.device_views import DeviceViews  # noqa: E402
from trt_kvcache.torch_engine.experts import FixedProducts, SortedProducts  # noqa: E402
from trt_kvcache.torch_engine.kernel_experts import KernelExperts, epilogue_of  # noqa: E402
from trt_kvcache.torch_engine.operations import Elementwise, Experts, Projections, dense  # noqa: E402
from trt_kvcache.torch_engine.packed_stack import MatrixStack, PackedStack  # noqa: E402
from trt_kvcache.torch_engine.packed_weight import PackedWeight  # noqa: E402
from trt_kvcache.torch_engine.super_block_weight import SuperBlockWeight  # noqa: E402

#: Share of the copy bandwidth of both launches of a layer, from ``mb`` MB of chosen experts.
LIMITS = {"of_copy": 0.8, "mb": 32}

DTYPE, _MIB = "bfloat16", 2**20

#: Largest error, relative to the largest result: half a unit in the last place, and the rounding of the inner activations.
_TOLERANCE = 2**-7

#: Weights of all layers together, and choices of a layer that take turns.
_MAX_WEIGHT_NBYTES, _CHOICES = 16 << 30, 4


class Model(NamedTuple):
    """The sizes of a routed MLP."""

    name: str
    hidden: int
    intermediate: int
    experts: int
    choices: int
    activation: str | ClampedSwiGLU = "silu"
    gated: bool = True
    bias: bool = False

    @property
    def width(self) -> int:
        """Outputs of the products into an expert."""
        return self.intermediate * (2 if self.gated else 1)


class Format(NamedTuple):
    """How weights are stored; ``kind`` is None for 16 bits."""

    name: str
    kind: str | None = None
    scales: str = DTYPE
    group_shift: int = 0
    zero_points: bool = False

    @property
    def bits(self) -> int:
        """Bits of a weight without its scale."""
        return 16 if self.kind is None else PACKED_BITS[self.kind]


QWEN, MIXTRAL, GPT_OSS, NEMOTRON = (
    Model("Qwen3-30B-A3B", 2048, 768, 128, 8),
    Model("Mixtral-8x7B", 4096, 14336, 8, 2),
    Model("gpt-oss-20b", 2880, 2880, 32, 4, ClampedSwiGLU(alpha=1.702, limit=7.0), bias=True),
    Model("Nemotron-3-Nano-30B-A3B", 2688, 1856, 128, 6, activation="relu2", gated=False),
)
PLAIN, INT8, INT4 = Format(DTYPE), Format("int8", "int8", group_shift=ONE_GROUP), Format("int4", "int4")
Q4_K, Q5_K, Q6_K = (Format(kind.upper(), kind) for kind in HIGH_BITS)
ZERO_POINTS = Format("int4:128, zero points", "int4", "float16", group_shift=2, zero_points=True)
CASES = (
    *((GPT_OSS, Format("MXFP4", "e2m1", EXPONENTS)), (QWEN, PLAIN), (QWEN, INT4), (QWEN, INT8), (QWEN, ZERO_POINTS)),
    *((QWEN, Q4_K), (QWEN, Q5_K), (QWEN, Q6_K)),
    *((MIXTRAL, PLAIN), (MIXTRAL, INT4), (MIXTRAL, Q4_K), (GPT_OSS, PLAIN), (NEMOTRON, PLAIN), (NEMOTRON, INT8)),
    (NEMOTRON, Format("NVFP4", "e2m1", NVFP4_SCALES, group_shift=NVFP4_GROUPS)),
)
#: Of these, the ones that ``--quick`` takes.
_QUICK = 3


class Layers:
    """Random experts of a few layers, and choices of a few steps."""

    def __init__(self, gpu: Gpu, model: Model, stored: Format) -> None:
        self.gpu, self.model, self.stored = gpu, model, stored
        nbytes = model.experts * (model.width + model.intermediate) * model.hidden * stored.bits // 8
        count = max(1, min(4, _MAX_WEIGHT_NBYTES // nbytes))
        self.layers = [self._experts() for _ in range(count)]

    def _experts(self) -> Experts:
        model = self.model
        config = MlpConfig(intermediate_size=model.intermediate, activation=model.activation, bias=model.bias, gated=model.gated)
        inputs, down = (
            self._stack(outputs, inputs) for outputs, inputs in ((model.width, model.hidden), (model.hidden, model.intermediate))
        )
        biases = (_normal(*weight.shape[:2]) for weight in (inputs, down)) if model.bias else (None, None)
        inputs_bias, down_bias = biases
        return Experts(config=config, inputs=inputs, inputs_bias=inputs_bias, down=down, down_bias=down_bias)

    def _stack(self, outputs: int, inputs: int) -> MatrixStack:
        experts, stored = self.model.experts, self.stored
        if stored.kind is None:
            return _normal(experts, outputs, inputs).mul_(inputs**-0.5)
        if stored.kind in HIGH_BITS:
            return PackedStack(self._super_blocks(experts * outputs, inputs), experts)
        shape = (experts * count_tiles(outputs), count_groups(inputs, stored.group_shift), 8, 2)
        values = _bytes(0, 256, shape[0], -(-inputs // FRAGMENT_INPUTS) * FRAGMENT_NBYTES[stored.kind])
        factor: tuple[float, float] | None = None
        if stored.scales == NVFP4_SCALES:
            scales, factor = (_normal(*shape).abs() * 20).to(torch.float8_e4m3fn), (float(np.float32(inputs**-0.5 / 64)), 0.0)
        elif stored.kind == "e2m1":
            middle = 124 - int(math.log2(inputs) / 2)
            scales = _bytes(middle - 1, middle + 2, *shape)
        else:
            scales = (_normal(*shape) * inputs**-0.5 / 2 ** (stored.bits - 1)).to(getattr(torch, stored.scales))
        whole = PackedWeight(
            dtype=getattr(torch, DTYPE),
            memory=self.gpu.memory,
            kind=stored.kind,
            outputs=experts * outputs,
            inputs=inputs,
            group_shift=stored.group_shift,
            values=values,
            scales=scales,
            zero_points=_bytes(0, 16, *shape) if stored.zero_points else None,
            factor=factor,
        )
        return PackedStack(whole if factor is None else whole.with_factor_of_each_tile(), experts)

    def _super_blocks(self, outputs: int, inputs: int) -> SuperBlockWeight:
        """Return a matrix of whole tiles, with products of about the size of its inputs."""
        kind, tiles, fragments = str(self.stored.kind), count_tiles(outputs), inputs // FRAGMENT_INPUTS
        sizes = (
            torch.tensor([1 / 2048 if MIDDLES[kind] else 1 / (128 << HIGH_BITS[kind]), 1 / 64], device="cuda")[: FACTORS[kind]]
            * inputs**-0.5
        )
        factors = _normal(tiles, inputs // SUPER_BLOCK, 8, 2, FACTORS[kind]) * sizes
        return SuperBlockWeight(
            dtype=getattr(torch, DTYPE),
            memory=self.gpu.memory,
            kind=kind,
            outputs=outputs,
            inputs=inputs,
            values=_bytes(0, 256, tiles, fragments * fragment_nbytes(kind)),
            scales=_bytes(0, 64, tiles, fragments, 8, 8),
            factors=factors.half(),
        )

    def nbytes(self, stack: MatrixStack) -> float:
        """Return the bytes of one expert."""
        return (stack.nbytes if isinstance(stack, torch.Tensor) else stack.whole.nbytes) / self.model.experts

    def choices(self, rows: int) -> list[torch.Tensor]:
        """Return choices for each layer, one after another: int64 ``[rows, k]``."""
        random = torch.Generator().manual_seed(rows)
        return [
            torch.stack([torch.randperm(self.model.experts, generator=random)[: self.model.choices] for _ in range(rows)]).cuda()
            for _ in range(len(self.layers) * _CHOICES)
        ]

    def of_step(self, step: int) -> Experts:
        """Return the layer of a choice."""
        return self.layers[step % len(self.layers)]


def _normal(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=getattr(torch, DTYPE), device="cuda").normal_()


def _bytes(low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(low, high, shape, dtype=torch.uint8, device="cuda")


def reference(rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, experts: Experts) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inner activations ``[n, k, intermediate]`` and the sums ``[n, hidden]`` in float64, row by row."""
    inner, sums = [], []
    for row, of_row, factors in zip(rows.double(), chosen.tolist(), weights.double(), strict=True):
        total, activations = 0.0, []
        for expert, factor in zip(of_row, factors, strict=True):
            inputs = dense(experts.inputs[expert]).double() @ row
            if experts.inputs_bias is not None:
                inputs = inputs + experts.inputs_bias[expert].double()
            activated = Elementwise().inner(inputs, experts.config)
            output = dense(experts.down[expert]).double() @ activated
            if experts.down_bias is not None:
                output = output + experts.down_bias[expert].double()
            total = total + factor * output
            activations.append(activated)
        inner.append(torch.stack(activations))
        sums.append(total)
    return torch.stack(inner), torch.stack(sums)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return max|error| / max|result|."""
    return float((found.double() - expected).abs().max().nan_to_num(torch.inf) / expected.abs().max())


def rows_of(layers: Layers, rows: int, copy: float) -> list[dict[str, Any]]:
    """Check and measure a number of rows: each launch, and both."""
    gpu, model, stream = layers.gpu, layers.model, layers.gpu.stream
    x, weights, chosen = _normal(rows, model.hidden), torch.rand(rows, model.choices, device="cuda") + 0.1, layers.choices(rows)
    by_torch = FixedProducts(SortedProducts(Projections(Elementwise())), Elementwise())
    ours, views_of = KernelExperts(by_torch, Elementwise(), DeviceViews(gpu.memory), stream), DeviceViews(gpu.memory).of
    epilogue = epilogue_of(layers.layers[0].config)
    kept = [one.int() for one in chosen]
    inner, out = torch.empty(rows, model.choices, model.intermediate, dtype=x.dtype, device="cuda"), torch.empty_like(x)
    torch.cuda.synchronize()  # weights are read early

    views = {id(one): device_view(one, gpu.memory) for one in (x, weights, inner, out, *kept)}
    matrices = [
        [one.tensors if isinstance(one, PackedStack) else None if one is None else views_of(one) for one in operands]
        for operands in ((e.inputs, e.inputs_bias, e.down, e.down_bias) for e in layers.layers)
    ]
    up_nbytes, down_nbytes = layers.nbytes(layers.layers[0].inputs), layers.nbytes(layers.layers[0].down)

    def up(step: int) -> None:
        weight, bias, _, _ = matrices[step % len(matrices)]
        assert weight is not None
        expert_up_kernel(views[id(x)], weight, bias, views[id(kept[step])], views[id(inner)], epilogue, stream)

    def down(step: int) -> None:
        _, _, weight, bias = matrices[step % len(matrices)]
        assert weight is not None
        expert_down_kernel(views[id(inner)], weight, bias, views[id(kept[step])], views[id(weights)], views[id(out)], stream)

    errors = {"up": 0.0, "down": 0.0}
    for step in range(2):
        expected_inner, expected = reference(x, chosen[step], weights, layers.of_step(step))
        for tensor in (inner, out):
            tensor.fill_(torch.nan)
        up(step)
        down(step)
        errors["up"] = max(errors["up"], relative_error(inner, expected_inner))
        errors["down"] = max(errors["down"], relative_error(out, expected))
        together = ours(x, chosen[step], weights, layers.of_step(step))
        assert torch.equal(together, out), f"{model.name}, {rows} rows: the engine's call gives something else"
    for launch, error in errors.items():
        assert error <= _TOLERANCE, f"{model.name} {launch}, {rows} rows: error {error:.2e} over {_TOLERANCE:g}"

    read = sum(len(one.unique()) for one in chosen) / len(chosen)  # experts of a step, each once
    steps = range(len(chosen))
    found = []
    for launch, call, nbytes in (("up", up, read * up_nbytes), ("down", down, read * down_nbytes)):
        least = nbytes / copy
        times = {"ours": seconds(gpu, [lambda s=step, c=call: c(s) for step in steps], least)}
        found.append({**_figures(layers, launch, rows, read, nbytes, times, copy), "error": float(f"{errors[launch]:.1e}")})

    def both(step: int) -> None:
        up(step)
        down(step)

    nbytes = read * (up_nbytes + down_nbytes)
    times = {
        "ours": seconds(gpu, [lambda s=step: both(s) for step in steps], nbytes / copy),
        "engine": seconds(gpu, [lambda s=step: ours(x, chosen[s], weights, layers.of_step(s)) for step in steps], nbytes / copy),
    }
    if layers.stored.kind is None:
        calls = [lambda s=step: by_torch(x, chosen[s], weights, layers.of_step(s)) for step in steps]
        times["torch"] = seconds(gpu, calls, 4 * nbytes / copy)
    return [*found, {**_figures(layers, "both", rows, read, nbytes, times, copy), "error": float(f"{errors['down']:.1e}")}]


def _figures(layers: Layers, launch: str, rows: int, read: float, nbytes: float, times: dict[str, float], copy: float) -> dict[str, Any]:
    return {
        "model": layers.model.name,
        "format": layers.stored.name,
        "launch": launch,
        "rows": rows,
        "experts": round(read, 2),
        "mb": round(nbytes / _MIB, 1),
        "us": {side: round(one * 1e6, 2) for side, one in times.items()},
        "gb_per_second": round(nbytes / times["ours"] / 1e9),
        "of_copy": {side: round(nbytes / copy / one, 3) for side, one in times.items()},
    }


def measure(gpu: Gpu, copy: float, options: argparse.Namespace) -> dict[str, Any]:
    """Check and measure what there is time for; what there is not is named."""
    deadline, found, left_out = time.monotonic() + options.max_seconds, [], []
    for model, stored in CASES[:_QUICK] if options.quick else CASES:
        name = f"{model.name} in {stored.name}"
        if time.monotonic() > deadline:
            left_out.append(name)
            continue
        layers = Layers(gpu, model, stored)
        for rows in (1, 8) if options.quick else (1, 2, 4, 8):
            if time.monotonic() > deadline:
                left_out.append(f"{name}, {rows} rows")
                continue
            for row in rows_of(layers, rows, copy):
                print(json.dumps(row), flush=True)
                found.append(row)
        del layers
        torch.cuda.empty_cache()
    return {"left_out": left_out, "exceeded": exceeded(found), "rows": to_table(found)}


def exceeded(rows: list[dict[str, Any]]) -> list[str]:
    """Return the rows that do not keep the limit."""
    return [
        f"{row['model']} in {row['format']}, {row['rows']} rows: {row['of_copy']['ours']:.3f} of copy"
        for row in rows
        if row["launch"] == "both" and row["mb"] >= LIMITS["mb"] and row["of_copy"]["ours"] < LIMITS["of_copy"]
    ]


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three cases, 1 and 8 rows")
    parser.add_argument("--max-seconds", type=float, default=60, help="then the rest is left out")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "experts.json")
    options = parser.parse_args()
    gpu = Gpu()
    with torch.cuda.stream(gpu.torch_stream), torch.inference_mode():
        copy = _copy_bandwidth()
        print(json.dumps({"copy_gb_per_second": round(copy / 1e9)}), flush=True)
        result = measure(gpu, copy, options)
    for line in result["exceeded"]:
        print(f"over the limit: {line}")
    content = {"copy_gb_per_second": round(copy / 1e9), "limits": LIMITS, "dtype": DTYPE, **result}
    write_result(options.out, {**describe_environment(gpu=True), **content})
    return 1 if result["exceeded"] or result["left_out"] else 0


if __name__ == "__main__":
    sys.exit(main())
