"""Small models of Hugging Face transformers that have learned a text by heart: their greedy tokens do not hang on rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.paths import ROOT

TEXT = (ROOT / "examples" / "tiny-llama" / "text.txt").read_bytes()[:1024]

COMMON: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 192,
    "intermediate_size": 320,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

_WINDOW_FIRST = ["sliding_attention", "full_attention"]

_DELTA_NET = {
    "head_dim": 64,
    "layer_types": ["linear_attention", "full_attention"],
    "num_experts": 0,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 64,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 64,
    "tie_word_embeddings": False,
}

#: By name: the ``model_type``, and what differs from :data:`COMMON`. Their heads are those that the attention kernels know.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"head_dim": 64, "tie_word_embeddings": False}),
    "qwen2": ("qwen2", {"hidden_size": 384, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 128, "tie_word_embeddings": False}),
    "gemma2": ("gemma2", {"head_dim": 64, "query_pre_attn_scalar": 96, "sliding_window": 48, "attn_implementation": "eager"}),
    "gemma3": ("gemma3_text", {"head_dim": 256, "query_pre_attn_scalar": 200, "sliding_window": 48, "layer_types": _WINDOW_FIRST}),
    "phi3": ("phi3", {"hidden_size": 384, "partial_rotary_factor": 0.75, "sliding_window": 64, "tie_word_embeddings": False}),
    "lfm2": ("lfm2", {"hidden_size": 384, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False, "norm_eps": 1e-6}),
    "bamba": ("bamba", {"hidden_size": 384, "attn_layer_indices": [1], "mamba_d_head": 64, "mamba_n_heads": 12, "mamba_d_state": 64}),
    "qwen3_next": ("qwen3_next", _DELTA_NET),
    "smollm3": ("smollm3", {"hidden_size": 384, "no_rope_layers": [1, 0]}),
}


def train(family: str, device: torch.device, *, steps: int = 600, length: int = 160) -> Any:
    """Return a model in float32 that continues any part of :data:`TEXT` with what follows there."""
    torch.manual_seed(0)
    kind, changes = FAMILIES[family]
    config = transformers.AutoConfig.for_model(kind, **{**COMMON, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.tensor(list(TEXT), device=device)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 20) * max(0.02, 1 - step / steps)
        starts = torch.randint(0, len(TEXT) - length, (16,)).tolist()
        batch = torch.stack([text[start : start + length] for start in starts])
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.eval()


def greedy_tokens(model: Any, prompt: list[int], count: int) -> list[int]:
    """Return what transformers generates after a prompt."""
    ids = torch.tensor([prompt], device=model.device)
    with torch.inference_mode():
        found = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, pad_token_id=0)
    return [int(token) for token in found[0, len(prompt) :]]


def save(model: Any, folder: Path) -> Path:
    """Write the model as a Hugging Face folder without a tokenizer."""
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    return folder
