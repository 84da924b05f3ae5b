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
from trt_kvcache.model.families.registry import FAMILIES
from trt_kvcache.model.tensor_shapes import tensor_shapes
from trt_kvcache.model.weight_parts import stacked_experts

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
    "qwen3_moe": 41,
    "qwen3_moe-dense-window": 42,
    "mixtral": 47,
    "mixtral-window": 44,
    "olmoe": 45,
    "olmoe-bias": 46,
    "granitemoehybrid-experts": 53,
    "qwen3_next-experts": 54,
    "lfm2_moe": 61,
    "lfm2_moe-bias": 56,
    "nemotron_h-experts": 72,
    "nemotron_h-latent": 58,
    "qwen3_5_moe": 59,
    "qwen3_5_moe-bias": 60,
    "gpt_oss": 62,
    "gpt_oss-mxfp4": 63,
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
    "gemma4": 73,
    "gemma4-bias": 74,
    "gemma4-shared": 79,
    "gemma4-ple": 90,
    "gemma4-experts": 94,
    "gemma4-experts-ple": 95,
    "falcon_h1": 91,
    "falcon_h1-bias": 92,
}

#: Models with a vision tower, whose text decoders are computed like the models above: in the folder ``vision``.
VISION = HERE / "vision"
VISION_SEEDS = {
    "gemma3": 41,
    "gemma3-bias": 42,
    "mistral3": 43,
    "mistral3-ministral": 44,
    "qwen3_5": 45,
    "qwen3_5-bias": 46,
    "qwen3_5_moe": 51,
    "qwen3_vl": 47,
    "qwen3_vl-bias": 48,
    "qwen2_5_vl": 49,
    "qwen2_5_vl-window": 50,
    "gemma4": 52,
    "gemma4_unified": 53,
}

#: Prefixes under which their tensors are stored, in place of ``model.`` and ``lm_head.``, and the prefixes of their towers.
_LLAVA_4 = ("language_model.model.", "language_model.lm_head.", ("vision_tower.", "multi_modal_projector."))
_LLAVA_5 = ("model.language_model.", "lm_head.", ("model.vision_tower.", "model.multi_modal_projector."))
_GEMMA_4 = ("model.language_model.", "lm_head.", ("model.vision_tower.", "model.audio_tower.", "model.embed_vision."))
_QWEN = ("model.language_model.", "lm_head.", ("model.visual.",))
STORED = {
    "gemma3": _LLAVA_4,
    "gemma3-bias": _LLAVA_5,
    "mistral3": _LLAVA_4,
    "mistral3-ministral": _LLAVA_5,
    "qwen3_5": _QWEN,
    "qwen3_5-bias": _QWEN,
    "qwen3_5_moe": _QWEN,
    "qwen3_vl": _QWEN,
    "qwen3_vl-bias": _QWEN,
    "qwen2_5_vl": ("model.", "lm_head.", ("visual.",)),
    "qwen2_5_vl-window": _QWEN,
    "gemma4": _GEMMA_4,
    "gemma4_unified": (*_GEMMA_4[:2], ("model.vision_embedder.", "model.embed_vision.", "model.embed_audio.")),
}


def write_all():
    """Write the weights of every golden model beside its ``config.json``."""
    for name in SEEDS:
        write(HERE / name)
    for name in VISION_SEEDS:
        write_vision(VISION / name)


def write_vision(folder):
    """Write the weights of one model with a tower. The tensors of the tower are NaN: nobody reads them."""
    config = ModelConfig.from_dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    model, head, towers = STORED[folder.name]
    tensors = {f"{tower}layers.0.weight": np.full((2, 3), np.nan, numpy_dtype(config.dtype)) for tower in towers}
    for name, values in random_weights(config, VISION_SEEDS[folder.name]).items():
        prefix, rest = name.split(".", 1)
        tensors[{"model": model, "lm_head": head}[prefix] + rest] = values
    replace_file(folder / "model.safetensors", save(tensors, metadata={"format": "pt"}))


def write(folder):
    """Write the weights of one model: one file, or three and their index. Each appears complete or not at all."""
    data = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = ModelConfig.from_dict(data)
    tensors = stored_tensors(config, data.get("quantization_config"), random_weights(config, SEEDS[folder.name]))
    names = [f"model-{number}-of-00003.safetensors" for number in ("00001", "00002", "00003")]
    if "sharded" not in folder.name:
        names = ["model.safetensors"]
    files = {name: {} for name in names}
    for place, (name, values) in enumerate(tensors.items()):
        files[names[place * len(names) // len(tensors)]][name] = values
    contents = {file: save(tensors, metadata={"format": "pt"}) for file, tensors in files.items()}
    if len(names) > 1:
        index = {"metadata": {}, "weight_map": {name: file for file, tensors in files.items() for name in tensors}}
        contents["model.safetensors.index.json"] = json.dumps(index).encode()
    for file, content in contents.items():
        replace_file(folder / file, content)


def replace_file(path, content):
    """Write a file that appears complete or not at all."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_bytes(content)
    os.replace(temporary, path)


def random_weights(config, seed):
    """Return the weights of a model by name, in its dtype."""
    weights = {}
    for name, shape in tensor_shapes(config).items():
        values = random_values(seed, name, shape)
        if "norm" in name:
            values -= config.final_norm.weight_offset
        weights[name] = values.astype(np.float32).astype(np.float32 if is_choice_bias(name) else numpy_dtype(config.dtype))
    return weights


def is_choice_bias(name):
    """Return True for the bias of a router's choice, which published files have in float32."""
    return name.endswith(("expert_bias", "e_score_correction_bias"))


def stored_tensors(config, quantization, tensors):
    """Return tensors as transformers reads them: where it reads no other form, with all experts of a layer in one."""
    if config.family == "gemma4_text":
        return stacked_tensors(config, tensors)
    if config.family != "gpt_oss":
        return tensors
    experts = range(config.layers[0].mlp.router.num_experts)
    found = {name: values for name, values in tensors.items() if ".experts." not in name}
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}.mlp.experts."
        for kind in ("weight", "bias"):
            gates, ups, downs = (
                np.stack([tensors[f"{prefix}{expert}.{name}_proj.{kind}"] for expert in experts]) for name in ("gate", "up", "down")
            )
            alternating = np.stack((gates, ups), axis=2).reshape(len(experts), -1, *gates.shape[2:])
            for name, values in (("gate_up_proj", alternating), ("down_proj", downs)):
                if kind == "bias":
                    found[f"{prefix}{name}_bias"] = values
                elif quantization is None:
                    found[f"{prefix}{name}"] = np.ascontiguousarray(values.swapaxes(1, 2))
                else:
                    found[f"{prefix}{name}_blocks"], found[f"{prefix}{name}_scales"] = mxfp4(values)
    return found


def stacked_tensors(config, tensors):
    """Return tensors with those of all experts of a layer in one, for each of the family's stacks of whole weights."""
    found = dict(tensors)
    for index in range(config.num_layers):
        for stack in FAMILIES[config.family].stacked:
            experts = stacked_experts(config, index, stack)
            if experts:
                found[f"model.layers.{index}.{stack}"] = np.stack(
                    [np.concatenate([found.pop(name) for name in names]) for names in experts]
                )
    return found


def mxfp4(values):
    """Return blocks uint8 ``[..., groups, 16]`` and scales uint8 ``[..., groups]`` of matrices, rounded to MXFP4."""
    groups = values.astype(np.float32).reshape(*values.shape[:-1], -1, 32)
    exponents = np.floor(np.log2(np.abs(groups).max(axis=-1))) - 2
    relative = groups / np.exp2(exponents)[..., None]
    magnitudes = np.abs(np.abs(relative)[..., None] - np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)).argmin(axis=-1)
    codes = (magnitudes + 8 * (relative < 0)).astype(np.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4, (exponents + 127).astype(np.uint8)


def random_values(seed, name, shape):
    """Return values of one tensor, each kind with a spread at which it matters: attention is neither flat nor one-hot."""
    raw = np.random.Philox(key=[seed, zlib.crc32(name.encode())]).random_raw(int(np.prod(shape)))
    uniform = (raw >> np.uint64(11)).astype(np.float64).reshape(shape) / 2.0**53  # [0, 1)
    if "norm" in name:
        return 0.5 + uniform
    if is_choice_bias(name):
        return 0.2 * uniform
    deviation = 0.5 if name.endswith(".bias") or "embed" in name else 1.0 / np.sqrt(np.prod(shape[1:]))
    if "q_proj.weight" in name or "k_proj.weight" in name:
        deviation *= 1.5
    if name.endswith("router.scale"):  # of an input of length 1
        deviation *= 2.0 * np.sqrt(shape[0])
    return (2.0 * uniform - 1.0) * np.sqrt(3.0) * deviation
