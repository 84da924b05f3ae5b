"""Folders of quantized weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.quantized_models import ALL_CASES, Tensors, write_quantized
from trt_kvcache.checkpoint import Checkpoint


@dataclass(frozen=True)
class Folder:
    """A checkpoint of quantized weights, and the values of all tensors."""

    path: Path
    values: Tensors

    def open(self) -> Checkpoint:
        """Open it without what is said of activations."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*activations are not quantized")
            return Checkpoint.open(self.path)


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Folder]:
    """Write the checkpoint of a case."""

    def make(case: str, model: str = "llama") -> Folder:
        quantize, config = ALL_CASES[case]
        path = tmp_path / f"{model}-{case}"
        return Folder(path, write_quantized(path, model, quantize, config))

    return make
