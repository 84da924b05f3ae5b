"""Make the golden files: tiny random models as Hugging Face folders, and the logits that transformers computes for them.

Run with an environment that has torch (CPU) and transformers::

    python tests/golden/make_golden.py

Each folder gets the configuration, ``tensors.json`` from which ``weights.py`` makes the weights, and ``golden.npz``: ``input_ids``
int64 ``[tokens]``, and ``logits`` float32 ``[len(lengths), vocab]`` after the first ``lengths`` of them, of one full pass in float32
over the weights as stored. ``versions.json`` says what made them. The weights themselves are not kept.

The sizes are all different, so that a swapped axis shows; norm weights are not 1 and biases not 0, so that leaving one out shows.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config
from weights import write

HERE = Path(__file__).parent
LENGTHS = np.array([1, 2, 5, 6, 13, 14, 15, 24])


@dataclass
class Case:
    """One model: its configuration, how it is stored, and the seed of its weights."""

    config: PreTrainedConfig
    dtype: torch.dtype
    seed: int
    shards: int = 1
    old_spelling: bool = False


CASES = {
    "llama": Case(
        LlamaConfig(
            vocab_size=61,
            hidden_size=32,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            rms_norm_eps=1e-5,
            max_position_embeddings=64,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        ),
        torch.float32,
        seed=1,
    ),
    "llama-llama3-bias": Case(
        LlamaConfig(
            vocab_size=67,
            hidden_size=36,
            intermediate_size=44,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            rms_norm_eps=1e-5,
            max_position_embeddings=128,
            attention_bias=True,
            mlp_bias=True,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 300.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
            eos_token_id=[2, 5],
        ),
        torch.float16,
        seed=2,
    ),
    "llama-linear": Case(
        LlamaConfig(
            vocab_size=71,
            hidden_size=36,
            intermediate_size=28,
            num_hidden_layers=2,
            num_attention_heads=3,
            num_key_value_heads=3,
            head_dim=16,
            rms_norm_eps=1e-6,
            max_position_embeddings=96,
            rope_parameters={"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.5},
        ),
        torch.float16,
        seed=3,
    ),
    "qwen2-tied": Case(
        Qwen2Config(
            vocab_size=73,
            hidden_size=48,
            intermediate_size=52,
            num_hidden_layers=2,
            num_attention_heads=3,
            num_key_value_heads=1,
            rms_norm_eps=1e-6,
            max_position_embeddings=80,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        ),
        torch.float16,
        seed=4,
    ),
    "qwen3-sharded": Case(
        Qwen3Config(
            vocab_size=79,
            hidden_size=40,
            intermediate_size=44,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=24,
            rms_norm_eps=1e-6,
            max_position_embeddings=112,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        ),
        torch.float16,
        seed=5,
        shards=3,
    ),
    "llama-bfloat16-old": Case(
        LlamaConfig(
            vocab_size=59,
            hidden_size=32,
            intermediate_size=36,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            rms_norm_eps=1e-5,
            max_position_embeddings=72,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "linear", "rope_theta": 5000.0, "factor": 1.5},
        ),
        torch.bfloat16,
        seed=6,
        old_spelling=True,
    ),
}


def write_index(folder: Path, case: Case) -> None:
    """Write ``tensors.json``: the shape of every tensor of the model; and the index of its shards."""
    model = AutoModelForCausalLM.from_config(case.config)
    tied = {"lm_head.weight"} if case.config.tie_word_embeddings else set()
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items() if name not in tied}
    if case.shards > 1:
        names = [f"model-{number + 1:05}-of-{case.shards:05}.safetensors" for number in range(case.shards)]
        files = {name: names[place * case.shards // len(shapes)] for place, name in enumerate(shapes)}
        index = {"metadata": {}, "weight_map": files}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    text = json.dumps({"seed": case.seed, "dtype": str(case.dtype).removeprefix("torch."), "tensors": shapes})
    (folder / "tensors.json").write_text(text.replace('"model.', '\n  "model.').replace('"lm_head', '\n  "lm_head') + "\n")


def use_old_spelling(folder: Path) -> None:
    """Rewrite ``config.json`` as transformers 4 wrote it."""
    path = folder / "config.json"
    config: dict[str, Any] = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def make(name: str, case: Case) -> None:
    """Write one folder."""
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    case.config.dtype = case.dtype
    case.config.architectures = [type(AutoModelForCausalLM.from_config(case.config)).__name__]
    case.config.save_pretrained(folder)
    GenerationConfig.from_model_config(case.config).save_pretrained(folder)
    write_index(folder, case)
    write(folder)
    if case.old_spelling:
        use_old_spelling(folder)
    stored = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    input_ids = np.random.default_rng(case.seed).integers(0, case.config.vocab_size, LENGTHS[-1])
    with torch.no_grad():
        logits = stored(input_ids=torch.from_numpy(input_ids)[None], use_cache=False).logits[0, LENGTHS - 1].numpy()
    np.savez_compressed(folder / "golden.npz", input_ids=input_ids, lengths=LENGTHS, logits=logits)
    print(f"{name}: logits {logits.shape}, standard deviation {logits.std():.2f}")


def main() -> None:
    """Write every folder and the versions that made them."""
    torch.manual_seed(0)
    for name, case in CASES.items():
        make(name, case)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "numpy": np.__version__}
    (HERE / "versions.json").write_text(json.dumps(versions, indent=2) + "\n")


if __name__ == "__main__":
    main()
