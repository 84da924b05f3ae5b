"""A Gemma 4 in a GGUF file whose per-layer embedding has rows of whole blocks."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.checkpoint.folders import edit_config
from tests.checkpoint.gguf.convert import convert
from tests.golden.weights import write as write_weights
from tests.paths import GOLDEN


def write_gemma4_in_blocks(folder: Path) -> Path:
    """Write the golden model with rows of 96 elements, in Q8_0; return the file."""
    model = shutil.copytree(GOLDEN / "gemma4-ple", folder / "gemma4-ple", ignore=shutil.ignore_patterns("*.safetensors"))
    edit_config(model, hidden_size_per_layer_input=16)
    write_weights(model)
    return convert(model, folder / "model.gguf", kind="Q8_0")
