"""The weights of the golden models: made from a seed where they are needed, so that only logits are stored.

They come from the raw 64-bit output of a Philox generator, which is the same on every platform and in every version of NumPy
(distributions are not promised to be). ``make_golden.py`` compares the shapes with those of transformers.
"""

import json
import os
import zlib
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.model import ModelConfig
from trt_kvcache.model.tensor_shapes import tensor_shapes

HERE = Path(__file__).parent
SEEDS = {
    "llama": 1,
    "llama-llama3-bias": 2,
    "llama-linear": 3,
    "qwen2-tied": 4,
    "qwen3-sharded": 5,
    "llama-bfloat16-old": 6,
    "mistral": 7,
    "mistral-window": 8,
    "ministral3": 9,
    "ministral3-window": 10,
    "phi3-long": 11,
    "phi3-short-window": 12,
    "gemma2": 13,
    "gemma2-bias": 14,
    "gemma3": 15,
    "gemma3-bias": 16,
    "smollm3": 17,
    "smollm3-bias-window": 18,
    "olmo2": 19,
    "olmo2-bias": 20,
    "granite": 21,
    "granite-bias": 22,
    "lfm2": 23,
    "lfm2-bias": 24,
    "bamba": 25,
    "bamba-bias": 26,
    "qwen3_next": 27,
    "qwen3_next-bias": 28,
    "qwen3_5": 29,
    "qwen3_5-bias": 30,
    "mamba2": 39,
    "mamba2-bias": 32,
    "granitemoehybrid": 33,
    "granitemoehybrid-bias": 34,
    "nemotron_h": 35,
    "nemotron_h-bias": 36,
    "olmo3": 40,
    "olmo3-bias-yarn": 41,
    "ernie4_5": 42,
    "ernie4_5-bias": 43,
    "exaone4": 44,
    "exaone4-full": 45,
    "glm4": 46,
    "glm4-bias": 47,
    "hunyuan": 48,
    "hunyuan-bias": 49,
    "starcoder2": 50,
    "starcoder2-window": 51,
    "stablelm": 52,
    "stablelm-bias": 53,
    "cohere2": 54,
    "cohere2-bias": 55,
}


def write_all():
    """Write the weights of every golden model beside its ``config.json``."""
    for name in SEEDS:
        write(HERE / name)


def write(folder):
    """Write the weights of one model: one file, or three and their index. Each appears complete or not at all."""
    config = ModelConfig.from_dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    shapes, dtype = tensor_shapes(config), numpy_dtype(config.dtype)
    names = [f"model-{number}-of-00003.safetensors" for number in ("00001", "00002", "00003")]
    if "sharded" not in folder.name:
        names = ["model.safetensors"]
    files = {name: {} for name in names}
    for place, (name, shape) in enumerate(shapes.items()):
        values = random_values(SEEDS[folder.name], name, shape)
        if "norm" in name:
            values -= config.final_norm.weight_offset
        files[names[place * len(names) // len(shapes)]][name] = values.astype(np.float32).astype(dtype)
    contents = {file: save(tensors, metadata={"format": "pt"}) for file, tensors in files.items()}
    if len(names) > 1:
        index = {"metadata": {}, "weight_map": {name: file for file, tensors in files.items() for name in tensors}}
        contents["model.safetensors.index.json"] = json.dumps(index).encode()
    for file, content in contents.items():
        temporary = folder / f"{file}.{os.getpid()}"
        temporary.write_bytes(content)
        os.replace(temporary, folder / file)


def random_values(seed, name, shape):
    """Return values of one tensor, each kind with a spread at which it matters: attention is neither flat nor one-hot."""
    raw = np.random.Philox(key=[seed, zlib.crc32(name.encode())]).random_raw(int(np.prod(shape)))
    uniform = (raw >> np.uint64(11)).astype(np.float64).reshape(shape) / 2.0**53  # [0, 1)
    if "norm" in name:
        return 0.5 + uniform
    deviation = 0.5 if name.endswith(".bias") or "embed" in name else 1.0 / np.sqrt(np.prod(shape[1:]))
    if "q_proj.weight" in name or "k_proj.weight" in name:
        deviation *= 1.5
    return (2.0 * uniform - 1.0) * np.sqrt(3.0) * deviation
