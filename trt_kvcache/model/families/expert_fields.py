"""Fields of ``config.json`` about experts that several families share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from trt_kvcache.errors import ConfigError
from trt_kvcache.model.config_fields import ConfigFields
from trt_kvcache.model.families.fields import layer_indices, num_layers
from trt_kvcache.model.mlp_config import MlpConfig, RoutedMlpConfig, RouterConfig

#: MLP of a layer.
Mlp: TypeAlias = MlpConfig | RoutedMlpConfig

#: Names of the number of experts in transformers. Which one a file has depends on the version that wrote it.
NUM_EXPERTS = ("num_experts", "num_local_experts")


def num_experts(fields: ConfigFields, default: int, names: Sequence[str] = NUM_EXPERTS) -> int:
    """Return the number of experts, 0 for a model without any. Where several names are present, they must agree."""
    given = [name for name in names if name in fields]
    counts = {name: fields.count(name, default) for name in given or names[:1]}
    if len(set(counts.values())) > 1:
        said = " and ".join(f"{name} {count}" for name, count in counts.items())
        raise ConfigError(f"{given[0]}: expected one number of experts, got {said}.")
    count = next(iter(counts.values()))
    if count < 0:
        raise fields.refusal(given[0], "a number of experts >= 0")
    return count


def router(fields: ConfigFields, experts: int, *, per_token_field: str = "num_experts_per_tok", **options: Any) -> RouterConfig:
    """Return the router of a number of experts, of which each token takes as many as ``per_token_field`` says."""
    per_token = fields.integer(per_token_field)
    if per_token > experts:
        raise fields.refusal(per_token_field, f"at most the number of experts, {experts}")
    return RouterConfig(num_experts=experts, experts_per_token=per_token, **options)


def mlps(has_experts: Sequence[bool], routed: Callable[[], RoutedMlpConfig], single: Callable[[], MlpConfig]) -> list[Mlp]:
    """Return the MLP of each layer. Functions are called only for layers that are there: their fields may be absent else."""
    makers: dict[bool, Callable[[], Mlp]] = {True: routed, False: single}
    made = {kind: makers[kind]() for kind in set(has_experts)}
    return [made[kind] for kind in has_experts]


def sparse_layers(fields: ConfigFields, experts: int) -> list[bool]:
    """Return True for each layer with experts: each ``decoder_sparse_step``-th, except ``mlp_only_layers``, if there are any experts."""
    if not experts:
        return [False] * num_layers(fields)
    dense, step = layer_indices(fields, "mlp_only_layers") or (), fields.integer("decoder_sparse_step")
    return [index not in dense and (index + 1) % step == 0 for index in range(num_layers(fields))]
