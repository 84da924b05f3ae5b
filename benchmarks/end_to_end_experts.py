"""Whole models with experts on a GPU: ``InferenceSession.generate`` on the PyTorch engine, beside the time to read what a step needs.

    python benchmarks/end_to_end_experts.py [--quick] [--device cpu] [--cells gpt-oss,b1] [--max-seconds 300]

Models of published shapes get random weights on the device, in 16 bits or packed; nothing is read or downloaded. Logits of small models of
the same kinds are first compared with those of the same weights on a CPU. The limit is the time to read the chosen experts (by chance: each
token chooses on its own), all other weights, and K and V at the speed of a copy. Exit code 1 if logits differ or a cell failed. Needs torch
and transformers, of which the latter is not measured.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from end_to_end import run_cell
from end_to_end_models import random_tokenizer, torch_session
from end_to_end_sides import ours
from environment import describe_environment, write_result
from random_model import GPT_OSS_20B, QWEN3_30B_A3B

from trt_kvcache import CudaMemory, HostMemory, InferenceSession
from trt_kvcache.benchmarking import MemoryLimit
from trt_kvcache.checkpoint.weights_summary import WeightsSummary
from trt_kvcache.kernels.packed_layout import FRAGMENT_INPUTS, FRAGMENT_NBYTES, HALF_INPUTS, ONE_GROUP, count_groups, count_tiles
from trt_kvcache.model import ModelConfig
from trt_kvcache.model.tensor_shapes import embedding_name, tensor_shapes
from trt_kvcache.model.weight_parts import exact_tensors, expert_tensors
from trt_kvcache.torch_engine.packed_weight import PackedWeight

HERE = Path(__file__).resolve().parent

#: Share of the limit at batch 1 and the fewest tokens past.
LIMITS = {"of_limit_batch_1": 0.75}

#: Largest difference of logits to those of the same weights on a CPU, relative to the largest logit.
TOLERANCE = 8e-2

#: Slots and tokens past of a cell, and measured steps.
SHAPES, STEPS = ((1, 1024), (8, 1024), (1, 8192)), 128

#: Fields of the small models whose logits are compared.
_SMALL = {
    **{
        "vocab_size": 2048,
        "num_hidden_layers": 4,
        "max_position_embeddings": 256,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    **{"hidden_size": 512, "intermediate_size": 256, "moe_intermediate_size": 128, "num_attention_heads": 16},
    **{"num_experts": 8, "num_local_experts": 4},  # all are chosen: with random weights two are often nearly tied
}


class Format(NamedTuple):
    """Formats of packed matrices: of experts, and of the other projections with the head; None for 16 bits."""

    experts: str | None
    others: str | None


FORMATS = {"bfloat16": Format(None, None), "int8": Format("int8", "int8"), "int4": Format("int4", "int4"), "MXFP4": Format("e2m1", None)}
CASES = {
    "Qwen3-30B-A3B": (QWEN3_30B_A3B, ("bfloat16", "int8", "int4")),
    "gpt-oss-20b": (GPT_OSS_20B, ("MXFP4", "bfloat16")),
}


class ExpertsModel:
    """A model with random weights on a device. ``kinds``: its packed formats; groups of packed values have 32 inputs, int8 all."""

    def __init__(self, config: dict[str, Any], kinds: Format, memory: Any, folder: Path) -> None:
        self.config, self._kinds, self._memory = ModelConfig.from_dict(config), kinds, memory
        self.tokenizer = random_tokenizer(self.config.vocab_size, folder)
        self._device = "cpu" if memory.is_host else "cuda"
        self._shapes, self._exact = tensor_shapes(self.config), exact_tensors(self.config)
        self._experts = expert_tensors(self.config)
        self._random = torch.Generator(self._device).manual_seed(0)
        self.tensors: dict[str, torch.Tensor] = {}  # kept with keep = True
        self.packed: dict[str, list[tuple[slice | list[int], PackedWeight]]] = {}
        self.keep = False

    def load(self, name: str) -> torch.Tensor:
        """Return a tensor, as :data:`~trt_kvcache.torch_engine.stored_weights.LoadTensor`."""
        shape = self._shapes[name]
        dtype = torch.float32 if name in self._exact else getattr(torch, self.config.dtype)
        made = torch.empty(shape, dtype=dtype, device=self._device)
        if len(shape) == 1:
            made.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.02, generator=self._random)
        else:
            made.normal_(0.0, shape[-1] ** -0.5, generator=self._random)
        if self.keep:
            self.tensors[name] = made
        return made

    def load_packed(self, name: str, rows: Sequence[slice | list[int]]) -> PackedWeight | None:
        """Return rows of a packed matrix, as :data:`~trt_kvcache.torch_engine.stored_weights.LoadPacked`; None for one in 16 bits."""
        kind = self._kinds.experts if name in self._experts else self._kinds.others
        if kind is None or name == embedding_name(self.config):
            return None
        outputs, inputs = self._shapes[name]
        chosen = [row for some in rows for row in (range(outputs)[some] if isinstance(some, slice) else some)]
        made = self._random_packed(kind, len(chosen), inputs)
        if self.keep:
            self.packed.setdefault(name, []).append((chosen, made))
        return made

    def _random_packed(self, kind: str, outputs: int, inputs: int) -> PackedWeight:
        shift = ONE_GROUP if kind == "int8" else 0
        shape = (count_tiles(outputs), count_groups(inputs, shift), 8, 2)
        dtype = getattr(torch, self.config.dtype)
        if kind == "e2m1":
            middle = 126 - round(math.log2(inputs) / 2)
            scales = self._bytes(middle - 1, middle + 1, *shape)
        else:
            size = inputs**-0.5 / {"int4": 4.3, "int8": 74}[kind]  # over the standard deviation of random values
            scales = torch.full(shape, size, dtype=dtype, device=self._device)
        columns = -(-inputs // FRAGMENT_INPUTS) * FRAGMENT_NBYTES[kind]
        if kind == "int4":  # 1 to 15: with another mean than the zero point all rows would become alike, and choose the same experts
            values = self._bytes(1, 16, shape[0], columns) + 16 * self._bytes(1, 16, shape[0], columns)
        else:
            values = self._bytes(0, 256, shape[0], columns)
        return PackedWeight(
            dtype=dtype,
            memory=self._memory,
            kind=kind,
            outputs=outputs,
            inputs=inputs,
            group_shift=shift,
            values=values,
            scales=scales,
            zero_points=None,
        )

    def _bytes(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, device=self._device, generator=self._random)

    def kept(self, name: str) -> torch.Tensor:
        """Return a tensor that an engine has loaded, on the CPU and dequantized."""
        if name not in self.packed:
            return self.tensors[name].cpu()
        whole = torch.empty(self._shapes[name], dtype=getattr(torch, self.config.dtype))
        for rows, packed in self.packed[name]:
            whole[rows] = packed.dequantized().cpu()
        return whole

    def session(self, memory: Any, *, slots: int, length: int, width: int) -> InferenceSession:
        """Return a session on the PyTorch engine. Each has other weights."""
        packed = () if self._kinds == FORMATS["bfloat16"] else (self.load_packed,)
        return torch_session(
            self.config, self.load, *packed, memory=memory, slots=slots, length=length, width=width, tokenizer=self.tokenizer
        )

    @property
    def weights(self) -> WeightsSummary | None:
        """Sizes of the weights, if some are packed."""
        if self._kinds == FORMATS["bfloat16"]:
            return None
        sizes = {name: self._nbytes(name, shape) for name, shape in self._shapes.items()}
        total = sum(sizes.values())
        experts = sum(size for name, size in sizes.items() if name in self._experts)
        step = total - (0 if self.config.tie_word_embeddings else sizes[embedding_name(self.config)])
        return WeightsSummary(format="packed", is_quantized=True, nbytes=total, step_nbytes=step, experts_nbytes=experts)

    def _nbytes(self, name: str, shape: tuple[int, ...]) -> int:
        kind = self._kinds.experts if name in self._experts else self._kinds.others
        if kind is None or len(shape) != 2 or name in self._exact or name == embedding_name(self.config):
            return math.prod(shape) * (4 if name in self._exact else 2)
        values = math.prod(shape) * (8 if kind == "int8" else 4) // 8
        groups = shape[0] * (1 if kind == "int8" else -(-shape[1] // HALF_INPUTS))
        return values + groups * (1 if kind == "e2m1" else 2)

    def prompts(self, count: int, length: int, *, seed: int) -> list[list[int]]:
        """Return random token ids."""
        random = torch.Generator().manual_seed(seed)
        return torch.randint(self.config.vocab_size, (count, length), generator=random).tolist()


def main() -> int:
    """Compare, measure, write."""
    options = _options()
    on_cpu = options.device == "cpu"
    content: dict[str, Any] = {
        **describe_environment(gpu=not on_cpu),
        "limits": LIMITS,
        "tolerance": TOLERANCE,
        "compared": {},
        "cells": {},
    }
    deadline = time.monotonic() + options.max_seconds
    memory = HostMemory() if on_cpu else CudaMemory()
    cases = [(name, config, kind) for name, (config, kinds) in CASES.items() for kind in kinds]
    with tempfile.TemporaryDirectory() as folder:
        for name, config, kind in cases:
            if on_cpu and kind != "bfloat16":
                continue
            label = f"{name} {kind}"
            content["compared"][label] = run_cell(partial(compare, _small(config), FORMATS[kind], memory, Path(folder) / label), 60)
            print("compared", label, json.dumps(content["compared"][label]), flush=True)
        for name, config, kind in cases:
            shapes = ((1, 24), (8, 24)) if options.quick else SHAPES
            wanted = [shape for shape in shapes if all(part in f"{name} {kind} b{shape[0]} p{shape[1]}" for part in options.cells)]
            if not wanted or (on_cpu and kind != "bfloat16"):
                continue
            model = ExpertsModel(_small(config) if options.quick else config, FORMATS[kind], memory, Path(folder) / name)
            limit = MemoryLimit.measured(model.config, model.config.dtype, memory, model.weights)
            for batch, past in wanted:
                measure = partial(ours, model, memory, limit, batch, past, 6 if options.quick else STEPS)
                result = {**run_cell(measure, min(120, deadline - time.monotonic())), "model": name, "format": kind}
                result |= {"batch": batch, "past": past, "copy_gb_per_second": limit.copy_bytes_per_second / 1e9}
                content["cells"][f"{name} {kind} b{batch} p{past}"] = result
                write_result(options.out, content)
                shown = {key: result.get(key) for key in ("step_ms", "of_limit", "engine_of_limit", "first_token_ms", "error")}
                print(name, kind, batch, past, json.dumps(shown), f"{result['seconds']:.1f} s", flush=True)
                gc.collect()
                if not on_cpu:
                    torch.cuda.empty_cache()
    results = [*content["compared"].values(), *content["cells"].values()]
    return int(not all(one["ok"] or one.get("skipped") for one in results))


def _small(config: dict[str, Any]) -> dict[str, Any]:
    return {**config, **{name: value for name, value in _SMALL.items() if name in config}}


def compare(config: dict[str, Any], kinds: Format, memory: Any, folder: Path) -> dict[str, Any]:
    """Compare logits of prompts and of a decode step with those of the same weights on a CPU."""
    model = ExpertsModel(config, kinds, memory, folder)
    model.keep = True
    prompts, host = model.prompts(2, 21, seed=1), HostMemory()
    found = []
    with model.session(memory, slots=2, length=32, width=16) as session:
        shape = {"slots": 2, "length": 32, "width": 16, "tokenizer": model.tokenizer}
        with torch_session(model.config, model.kept, memory=host, **shape) as expected:
            for one in (session, expected):
                found.append([one.prefill(prompts), *(one.decode([5, 9]) for _ in range(2))])
    errors = [float(np.abs(ours - theirs).max() / np.abs(theirs).max()) for ours, theirs in zip(*found, strict=True)]
    if not max(errors) <= TOLERANCE:
        raise AssertionError(f"logits differ by {errors} of the largest one")
    return {"error": max(errors)}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="models of few layers: tries the script, measures nothing of use")
    parser.add_argument(
        "--cells", type=lambda text: text.split(","), default=[], help="only cells with all of these: gpt-oss, MXFP4, b1, p1024"
    )
    parser.add_argument("--max-seconds", type=float, default=300.0, help="begin no cell after so long")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "end_to_end_experts.json")
    options = parser.parse_args()
    if (options.quick or options.device == "cpu") and options.out == parser.get_default("out"):
        parser.error("expected --out with --quick and --device cpu, which measure nothing that belongs into the results.")
    return options


if __name__ == "__main__":
    sys.exit(main())
