"""The first token after a start (Python, imports, opening a model of real shapes, a prompt): each start is a process of its own.

    python benchmarks/opening.py [--models Llama-3-8B,Qwen2-0.5B] [--formats bf16,int8,int4,q8_0,q4_0] [--device cpu] [--quick] [--out FILE]

``bf16`` is a folder of transformers; ``int8`` and ``int4`` open it with ``quantize=``; the others are GGUF files. Weights are random, files
are in the page cache. Each format is opened twice, first with an empty folder of compiled kernels. ``limit_seconds`` is a lower bound: the
time to copy the file from pinned memory to the device. Needs torch and gguf.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from end_to_end_llama import write_gguf
from environment import describe_environment, write_result
from random_model import LLAMA_3_8B, QWEN2_0_5B, QWEN3_4B
from safetensors.numpy import save_file

from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.model import ModelConfig
from trt_kvcache.model.tensor_shapes import tensor_shapes

HERE = Path(__file__).resolve().parent

MODELS = {"Llama-3-8B": LLAMA_3_8B, "Qwen3-4B": QWEN3_4B, "Qwen2-0.5B": QWEN2_0_5B}

#: Path of the model in the folder of files, and options of ``trt_kvcache.load``, by format.
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "bf16": ("folder", {}),
    "int8": ("folder", {"quantize": "int8"}),
    "int4": ("folder", {"quantize": "int4"}),
    "q8_0": ("Q8_0.gguf", {}),
    "q4_0": ("Q4_0.gguf", {}),
}
PROMPT_TOKENS = 128

#: Opens a model and runs two prompts. Prints seconds since its first line.
CHILD = """
import time
begin = time.perf_counter()
import json, sys, warnings
warnings.simplefilter("ignore")
import trt_kvcache
times = {"import": time.perf_counter() - begin}
path, options, count = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
session = trt_kvcache.load(path, engine="torch", max_batch_size=1, max_sequence_length=512, **options)
times["opened"] = time.perf_counter() - begin
for name, first in (("first_token", 3), ("second_prompt", 1000)):
    start = time.perf_counter()
    for token in session.generate([[first + index for index in range(count)]], max_new_tokens=1, ignore_eos=True):
        pass
    times[name] = time.perf_counter() - (begin if name == "first_token" else start)
print(json.dumps(times))
"""


def main() -> int:
    """Write the models, open them, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(MODELS), help=", ".join(MODELS))
    parser.add_argument("--formats", type=lambda text: text.split(","), default=list(FORMATS), help=", ".join(FORMATS))
    parser.add_argument("--files", type=Path, help="folder for the models, which are kept; a temporary one by default")
    parser.add_argument("--quick", action="store_true", help="tiny models: tries the script, measures nothing of use")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "opening.json")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    result = {**describe_environment(gpu=options.device != "cpu"), "prompt_tokens": PROMPT_TOKENS, "rows": rows}
    for name in options.models:
        config = MODELS[name] if not options.quick else {**MODELS[name], "num_hidden_layers": 2, "vocab_size": 2048}
        with tempfile.TemporaryDirectory() as temporary:
            folder = (options.files or Path(temporary)) / name
            for kind in options.formats:
                path = write_model(folder, config, FORMATS[kind][0])
                found = [opened(path, FORMATS[kind][1], options.device, fresh) for fresh in (True, False)]
                size = sum(file.stat().st_size for file in ([path] if path.is_file() else path.glob("*.safetensors")))
                rows.append({"model": name, "format": kind, "file_bytes": size, "first_start": found[0], "start": found[1]})
                if options.device != "cpu":
                    rows[-1]["limit_seconds"] = round(size / pinned_bandwidth(), 3)
                print(json.dumps(rows[-1]), flush=True)
                write_result(options.out, result)
    return 0


def write_model(folder: Path, config: dict[str, Any], name: str) -> Path:
    """Write a model of these shapes unless it is there; return its path. Rows of its matrices repeat."""
    path, model = folder / name, ModelConfig.from_dict(config)
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".gguf":
        write_gguf(path, model, path.stem)
        return path
    path.mkdir()
    random = np.random.default_rng(0)
    dtype = numpy_dtype(model.dtype)
    tensors = {}
    for tensor, shape in tensor_shapes(model).items():
        rows = random.standard_normal((64, shape[-1]), dtype=np.float32) / np.sqrt(shape[-1], dtype=np.float32)
        tensors[tensor] = np.ones(shape, dtype) if len(shape) == 1 else np.tile(rows.astype(dtype), (-(-shape[0] // 64), 1))[: shape[0]]
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def opened(path: Path, options: dict[str, Any], device: str, fresh: bool) -> dict[str, float]:
    """Return the seconds of a start, with or without kernels that an earlier one has compiled."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory() as empty:
        if fresh:
            environment["XDG_CACHE_HOME"] = empty
        begin = time.perf_counter()
        command = [sys.executable, "-c", CHILD, str(path), json.dumps(options), str(PROMPT_TOKENS)]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if run.returncode:
            raise RuntimeError(run.stderr[-2000:])
        times: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
        return {name: round(seconds, 3) for name, seconds in {**times, "process": time.perf_counter() - begin}.items()}


def pinned_bandwidth() -> float:
    """Return bytes a second from pinned memory to the device."""
    import torch

    host, device = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True), torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    device.copy_(host)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    device.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    return (1 << 30) / (time.perf_counter() - begin)


if __name__ == "__main__":
    sys.exit(main())
