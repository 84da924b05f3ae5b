"""Several LoRA adapters in one batch at the size of Llama-3-8B: time of a token with an adapter and without. Needs torch.

    python benchmarks/adapters.py [-o FILE] [--adapters 4] [--rank 16] [--batches 1,8] [--quick]

Weights and adapters are random; the adapters are of all linear layers of attention and MLPs. Slots take the adapters in turns. First, in a
small model of the same family, logits of each adapter are compared with those of a session with this adapter merged. ``base_ms`` is a
session without adapters, ``none_ms`` a step of the session with adapters in which no slot has one, ``adapted_ms`` one in which all have.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from draft_models import QUICK, write
from environment import describe_environment, write_result
from random_model import LLAMA_3_8B
from safetensors.torch import save_file

from trt_kvcache import InferenceSession
from trt_kvcache.model import ModelConfig
from trt_kvcache.model.tensor_shapes import tensor_shapes

HERE = Path(__file__).resolve().parent

#: Largest time of a step in which all slots have an adapter, over one without adapters.
LIMIT = 1.25

#: Of logits in bfloat16 with an adapter and with the same one merged, relative to the largest.
TOLERANCE = 0.05

PROMPT, TOKENS, RUNS = 1024, 64, 3


def write_adapter(folder: Path, config: dict[str, Any], rank: int, seed: int) -> Path:
    """Write an adapter of random weights for all linear layers."""
    folder.mkdir()
    generator, tensors = torch.Generator().manual_seed(seed), {}
    modules = []
    for name, shape in tensor_shapes(ModelConfig.from_dict(config)).items():
        if ".layers." in name and len(shape) == 2:
            modules.append(name.removesuffix(".weight"))
            a = torch.empty(rank, shape[1]).normal_(0, shape[1] ** -0.5, generator=generator)
            b = torch.empty(shape[0], rank).normal_(0, 0.02, generator=generator)
            tensors |= {
                f"base_model.model.{modules[-1]}.lora_A.weight": a.bfloat16(),
                f"base_model.model.{modules[-1]}.lora_B.weight": b.bfloat16(),
            }
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": modules}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def token_ms(session: InferenceSession, batch: int, prompt: int, adapters: list[str | None] | None) -> float:
    """Return the milliseconds of a step after prompts, the median of runs."""
    prompts = [[3 + (7 * slot + place) % 400 for place in range(prompt)] for slot in range(batch)]
    chosen = {} if adapters is None else {"adapter": adapters}
    times = []
    for run in range(RUNS + 2):  # the first runs capture
        stream = session.generate(prompts, max_new_tokens=TOKENS, temperature=0.0, ignore_eos=True, **chosen)
        for _ in range(batch):
            next(stream)
        begin = time.perf_counter()
        for _ in stream:
            pass
        if run > 1:
            times.append((time.perf_counter() - begin) / (TOKENS - 1))
    return round(1e3 * median(times), 3)


def compare(device: str, rank: int, folder: Path) -> float:
    """Return the largest difference of logits of adapters in one batch from those of merged ones, relative to the largest logit."""
    config = LLAMA_3_8B | QUICK | {"num_hidden_layers": 2}
    model = write(folder / "small", config, tensor_shapes(ModelConfig.from_dict(config)), device)
    adapters = {f"a{seed}": write_adapter(folder / f"small-{seed}", config, rank, seed) for seed in range(2)}
    names, sizes = ["a0", None, "a1"], {"engine": "torch", "max_batch_size": 3, "max_sequence_length": 64}
    row = list(range(3, 40))
    with InferenceSession.from_model(model, adapters=adapters, **sizes) as session:
        found = session.prefill([row] * 3, adapter=names)
    worst = 0.0
    for name, logits in zip(names, found, strict=True):
        chosen = {} if name is None else {"adapter": adapters[name]}
        with InferenceSession.from_model(model, **chosen, **sizes) as session:
            [expected] = session.prefill([row])
        worst = max(worst, float(np.abs(logits - expected).max() / np.abs(expected).max()))
    return worst


def main() -> int:
    """Compare, then measure; exit code 1 says that logits differ or the limit is missed."""
    global PROMPT, TOKENS, RUNS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path, default=HERE / "results" / "adapters.json")
    parser.add_argument("--adapters", type=int, default=4)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--quick", action="store_true", help="a small model: to try the script")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = LLAMA_3_8B
    if options.quick:
        PROMPT, TOKENS, RUNS, config = 32, 8, 1, LLAMA_3_8B | QUICK | {"num_hidden_layers": 2}
    batches = [int(batch) for batch in options.batches.split(",")]
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        differs = compare(device, options.rank, folder)
        model = write(folder / "model", config, tensor_shapes(ModelConfig.from_dict(config)), device)
        adapters = {f"a{seed}": write_adapter(folder / f"a{seed}", config, options.rank, seed) for seed in range(options.adapters)}
        sizes = {"engine": "torch", "max_batch_size": max(batches), "max_sequence_length": PROMPT + TOKENS + 16}
        with InferenceSession.from_model(model, **sizes) as session:
            base = {batch: token_ms(session, batch, PROMPT, None) for batch in batches}
        with InferenceSession.from_model(model, adapters=adapters, **sizes) as session:
            for batch in batches:
                turns = [f"a{slot % options.adapters}" for slot in range(batch)]
                none, adapted = token_ms(session, batch, PROMPT, [None] * batch), token_ms(session, batch, PROMPT, [*turns])
                row = {"batch": batch, "base_ms": base[batch], "none_ms": none, "adapted_ms": adapted}
                rows.append(row | {"adapted_over_base": round(adapted / base[batch], 3)})
                print(json.dumps(rows[-1]), flush=True)
    sizes = {"adapters": options.adapters, "rank": options.rank, "past": PROMPT, "limit": LIMIT}
    write_result(options.out, {**describe_environment(gpu=device != "cpu"), **sizes, "difference": round(differs, 6), "rows": rows})
    print(f"largest difference from merged adapters: {differs:.2e} of the largest logit, allowed {TOLERANCE:g}")
    return int(differs > TOLERANCE or any(row["adapted_over_base"] > LIMIT for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
