"""Options of networks that are computed layer by layer: of sizes and dtypes that the attention kernels do not have too."""

from typing import Any

import pytest

from trt_kvcache.builder import attention_choice
from trt_kvcache.builder.options import BuildOptions
from trt_kvcache.builder.resolved_options import ResolvedOptions
from trt_kvcache.model import ModelConfig


def resolved(model: ModelConfig, *, attention: str = "native", operations: dict[str, str] | None = None, **options: Any) -> ResolvedOptions:
    """Fill in the defaults of a model. Plugin attention and experts are not checked against the kernels."""
    given = BuildOptions(**options, attention=attention, operations=operations)
    with pytest.MonkeyPatch.context() as patch:
        if attention == "plugin":
            patch.setattr(attention_choice, "OBSTACLES", ())
        return ResolvedOptions.of_model(given, model)
