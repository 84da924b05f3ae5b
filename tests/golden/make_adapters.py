"""Make the golden adapters: LoRA folders as PEFT writes them, and the logits that it computes with them beside tiny random models.

Run with an environment that has this package, torch (CPU), transformers and peft (0.21)::

    python tests/golden/make_adapters.py

Each folder of ``adapters`` is called as the golden model that it adapts. ``golden.safetensors`` has ``input_ids`` uint8 ``[tokens]`` and
``logits`` float32 ``[tokens, vocab]`` of one full pass in float32, with products beside the base layers: PEFT merges nothing.
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.numpy import save_file

from tests.golden.weights import HERE, write
from trt_kvcache.checkpoint.adapters.lora_adapter import ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE

ADAPTERS = HERE / "adapters"

#: Tokens of a prompt: more than the original context of the model with LongRoPE.
TOKENS = 20

#: Fields of a LoRA configuration by golden model: fused tensors with ranks of their own, a tied embedding and its head, RoPE whose rows are
#: reordered, layers by number, DoRA, whole modules and biases.
CONFIGS = {
    "phi3-long": {
        "r": 3,
        "lora_alpha": 5,
        "use_rslora": True,
        "rank_pattern": {"down_proj": 2},
        "alpha_pattern": {r".*layers\.1\.self_attn\.o_proj": 11},
        "target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    },
    "qwen2-tied": {"r": 2, "lora_alpha": 3, "target_modules": ["v_proj", "embed_tokens", "lm_head"]},
    "ernie4_5": {"r": 2, "lora_alpha": 7, "target_modules": r".*\.self_attn\.[qk]_proj"},
    "llama": {"r": 3, "lora_alpha": 4, "target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1]},
    "qwen3-sharded": {"r": 2, "lora_alpha": 3, "use_dora": True, "target_modules": ["k_proj", "o_proj", "gate_proj"]},
    "gemma2": {"r": 2, "lora_alpha": 3, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "post_attention_layernorm"]},
    "starcoder2": {"r": 2, "lora_alpha": 3, "target_modules": ["c_fc"], "bias": "all"},
}


def make(name, fields, seed):
    """Write an adapter of random weights, and its logits."""
    with tempfile.TemporaryDirectory() as place:
        folder = ADAPTERS / name
        folder.mkdir(parents=True, exist_ok=True)
        write(HERE / name)
        stored = transformers.AutoModelForCausalLM.from_pretrained(HERE / name, dtype=torch.float32, attn_implementation="eager").eval()
        torch.manual_seed(seed)
        model = get_peft_model(stored, LoraConfig(task_type="CAUSAL_LM", **fields)).eval()
        for weight_name, weight in model.named_parameters():
            if "lora_magnitude" in weight_name:
                weight.data *= torch.rand(len(weight)) + 0.5
            elif "lora_" in weight_name:
                torch.nn.init.normal_(weight, std=0.3)
            elif weight.requires_grad:  # a module or a bias that is saved whole
                weight.data += 0.3 * torch.randn(weight.shape)
        ids = np.random.default_rng(seed).integers(0, stored.config.vocab_size, TOKENS)
        with torch.no_grad():
            logits = model(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0].numpy()
            with model.disable_adapter():
                without = model(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0].numpy()
        model.save_pretrained(place)
        config = json.loads((Path(place) / ADAPTER_CONFIG_FILE).read_text())
        config |= {"base_model_name_or_path": name, "target_modules": fields["target_modules"]}
        (folder / ADAPTER_CONFIG_FILE).write_text(json.dumps(config, sort_keys=True) + "\n")
        (folder / ADAPTER_WEIGHTS_FILE).write_bytes((Path(place) / ADAPTER_WEIGHTS_FILE).read_bytes())
        save_file({"input_ids": ids.astype(np.uint8), "logits": logits}, folder / "golden.safetensors")
        print(f"{name}: the adapter changes logits by up to {np.abs(logits - without).max():.2f} of {np.abs(logits).max():.2f}")


if __name__ == "__main__":
    for seed, (name, fields) in enumerate(CONFIGS.items()):
        make(name, fields, seed)
