"""GGUF files of small models with experts, in types by a part of the names of tensors."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.checkpoint.folders import edit_config
from tests.checkpoint.gguf.convert import convert
from tests.golden.weights import write as write_weights
from tests.paths import GOLDEN

#: Experts as in a file that is called Q4_K_M: those of some layers have down in more bits.
Q4_K_M_EXPERTS = {"blk.0.ffn_down_exps": "Q6_K", "_exps": "Q4_K", "attn_v": "Q6_K", "attn": "Q4_K", "output": "Q6_K"}


def write_gguf_experts(folder: Path, types: Mapping[str, str], name: str = "qwen3_moe", **changes: Any) -> Path:
    """Write a golden model with changed sizes, its matrices in these types; return the file."""
    copy = folder / name
    shutil.copytree(GOLDEN / name, copy, ignore=shutil.ignore_patterns("*.safetensors"))
    edit_config(copy, **{"hidden_size": 256, "moe_intermediate_size": 256, "head_dim": 64, **changes})
    write_weights(copy)
    return convert(copy, folder / "model.gguf", types=types)
