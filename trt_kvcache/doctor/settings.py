"""``Settings``: the options of a run, which the parent hands to the child process of each check."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.cuda_memory import CudaMemory
from trt_kvcache.memory.host_memory import HostMemory


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Options of a run of ``doctor``, in the types of JSON."""

    scratch: str  # folder for models and engines, removed at the end
    model: str | None = None  # folder of the user's model
    full: bool = False
    dry_run: bool = False  # host memory and the NumPy engine in the place of GPU and TensorRT
    flavour: str = "auto"
    device: int = 0
    #: Reasons of check C to leave TensorRT, or one of its engines, out of later checks: by the name of the case.
    left_out: dict[str, str] = field(default_factory=dict)

    def changed(self, **changes: Any) -> Settings:
        """Return settings with other values."""
        return replace(self, **changes)

    @property
    def folder(self) -> Path:
        """The scratch folder."""
        return Path(self.scratch)

    def memory(self) -> Memory:
        """Return the memory that the checks run in."""
        return HostMemory() if self.dry_run else CudaMemory(self.device)
