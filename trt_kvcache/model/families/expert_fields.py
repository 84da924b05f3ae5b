"""Fields of ``config.json`` about experts that several families share."""

from __future__ import annotations

from typing import Any

from trt_kvcache.errors import ConfigError
from trt_kvcache.model.config_fields import ConfigFields
from trt_kvcache.model.families.fields import layer_indices, num_layers
from trt_kvcache.model.mlp_config import RouterConfig

#: Names of the number of experts in transformers. Which one a file has depends on the version that wrote it.
NUM_EXPERTS = ("num_experts", "num_local_experts")


def num_experts(fields: ConfigFields, default: int) -> int:
    """Return the number of experts, 0 for a model without any. Where both names are present, they must agree."""
    names = [name for name in NUM_EXPERTS if name in fields]
    counts = {name: fields.count(name, default) for name in names or NUM_EXPERTS[:1]}
    if len(set(counts.values())) > 1:
        given = " and ".join(f"{name} {count}" for name, count in counts.items())
        raise ConfigError(f"{names[0]}: expected one number of experts, got {given}.")
    count = next(iter(counts.values()))
    if count < 0:
        raise fields.refusal(names[0], "a number of experts >= 0")
    return count


def router(fields: ConfigFields, experts: int, **options: Any) -> RouterConfig:
    """Return the router of a number of experts, of which each token takes ``num_experts_per_tok``."""
    per_token = fields.integer("num_experts_per_tok")
    if per_token > experts:
        raise fields.refusal("num_experts_per_tok", f"at most the number of experts, {experts}")
    return RouterConfig(num_experts=experts, experts_per_token=per_token, **options)


def sparse_layers(fields: ConfigFields) -> list[bool]:
    """Return for each layer of a model with experts whether it has some: each ``decoder_sparse_step``-th, but no ``mlp_only_layers``."""
    dense, step = layer_indices(fields, "mlp_only_layers") or (), fields.integer("decoder_sparse_step")
    return [index not in dense and (index + 1) % step == 0 for index in range(num_layers(fields))]
