"""Small models with states whose heads have published sizes, for which there are kernels."""

from __future__ import annotations

import json
from typing import Any

from tests.paths import GOLDEN
from trt_kvcache.model import ModelConfig

_MAMBA = {"mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_heads": 4, "mamba_expand": 2}

#: By golden model, what is larger.
_SIZES: dict[str, dict[str, Any]] = {
    "lfm2": {"num_attention_heads": 2, "num_key_value_heads": 1},
    "bamba": _MAMBA,
    "granitemoehybrid": {**_MAMBA, "num_attention_heads": 2, "num_key_value_heads": 1},
    "nemotron_h": {"head_dim": 64, "attention_head_dim": 64, "mamba_head_dim": 64, "ssm_state_size": 128},
    "mamba2": {"head_dim": 64, "num_heads": 4, "state_size": 128},
    "qwen3_next": {"head_dim": 64, "linear_key_head_dim": 128, "linear_value_head_dim": 128},
}

NAMES = tuple(_SIZES)

#: How far logits of two engines may be apart, relative to the largest one. Seen: 9e-6, 0.018 and 0.16, with the delta rule, which passes
#: on what 16 bits round; the others are a third of that.
TOLERANCES = {"float32": 1e-4, "float16": 4e-2, "bfloat16": 3e-1}


def hybrid_model(name: str) -> ModelConfig:
    """Return a model of a hidden size of 128, with heads of 64 in attention."""
    fields = json.loads((GOLDEN / name / "config.json").read_text(encoding="utf-8"))
    return ModelConfig.from_dict({**fields, "hidden_size": 128, **_SIZES[name]})
