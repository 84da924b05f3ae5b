"""Options of networks that are computed layer by layer: of sizes and dtypes that the attention kernels do not have too."""

from dataclasses import replace
from typing import Any

from trt_kvcache.builder.options import BuildOptions
from trt_kvcache.builder.resolved_options import ResolvedOptions
from trt_kvcache.model import ModelConfig


def resolved(model: ModelConfig, *, attention: str = "native", operations: dict[str, str] | None = None, **options: Any) -> ResolvedOptions:
    """Fill in the defaults of a model. Plugin attention is not checked against the kernels."""
    if attention != "plugin":
        return ResolvedOptions.of_model(BuildOptions(**options, attention=attention, operations=operations), model)
    return replace(ResolvedOptions.of_model(BuildOptions(**options, attention="mask"), model), attention="plugin", operations=operations)
