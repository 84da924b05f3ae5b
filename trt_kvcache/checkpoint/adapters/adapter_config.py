"""``AdapterConfig``: the fields of ``adapter_config.json`` of PEFT that decide what a LoRA adapter computes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from trt_kvcache._util.short_repr import short_repr
from trt_kvcache.errors import ConfigError
from trt_kvcache.model.config_fields import ConfigFields

#: Value of ``target_modules`` for all linear layers, in lower case.
ALL_LINEAR = "all-linear"

#: Initial values that leave the base weights as they are: a trained adapter is a plain product whatever it started from.
_INITS = (True, False, None, "gaussian", "eva", "orthogonal")

#: Fields that are read here.
_READ = (
    *("peft_type", "task_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "init_lora_weights"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "use_dora", "modules_to_save"),
)

#: Fields of training, of initial values and of the origin, which do not change what a trained adapter computes.
_WITHOUT_EFFECT = (
    *("auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "peft_version", "lora_dropout", "runtime_config"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "megatron_core", "qalora_group_size"),
)

_MERGE_ELSEWHERE = "Merge the adapter with PEFT (merge_and_unload), and open the merged model."

#: Ways out, by field that must not be set. All other fields that are not listed above must not be set either.
_HINTS = {
    "fan_in_fan_out": "Linear layers of these models are stored [out, in], for which PEFT takes it as false: set it to false.",
    "target_parameters": f"Adapters of stacked experts are not read. {_MERGE_ELSEWHERE}",
    "alora_invocation_tokens": "An activated LoRA changes weights in the middle of a prompt.",
    "layer_replication": "The adapter is for a model with other layers.",
}


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """A LoRA configuration. A module is named as in the model that PEFT adapted, such as ``model.layers.0.self_attn.q_proj``."""

    rank: int
    alpha: float
    use_rslora: bool
    use_dora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    target_modules: str | frozenset[str]  # a regular expression or ALL_LINEAR, or names and ends of names
    exclude_modules: str | frozenset[str]
    layers_to_transform: frozenset[int] | None
    layers_pattern: tuple[str, ...]
    modules_to_save: frozenset[str]  # names of modules whose tensors the adapter has whole, or of modules above them
    has_biases: bool  # the adapter has biases of the model whole
    base_model: str  # the base model by its name at the training, for messages; empty if not known

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> AdapterConfig:
        """Read the fields of ``adapter_config.json``. Raises ConfigError for a field that is wrong, or whose computation is not read."""
        fields = ConfigFields(data)
        if fields.get("peft_type") != "LORA":
            raise fields.refusal("peft_type", "LORA")
        if fields.get("task_type") not in (None, "CAUSAL_LM"):
            raise fields.refusal("task_type", "CAUSAL_LM or null")
        if fields.get("bias") not in (None, "none", "all", "lora_only"):
            raise fields.refusal("bias", "none, all or lora_only")
        init = fields.get("init_lora_weights")
        if not any(init is one or (isinstance(init, str) and init == one) for one in _INITS):
            others = "true, false, gaussian, eva or orthogonal"
            hint = "Others may change the base weights: PEFT converts such an adapter (path_initial_model_for_weight_conversion)."
            raise ConfigError(f"{fields.refusal('init_lora_weights', others)} {hint}")
        for name, value in data.items():
            if name not in (*_READ, *_WITHOUT_EFFECT) and not _is_unset(value):
                raise ConfigError(f"{fields.refusal(name, 'a field that is not set')} {_HINTS.get(name, _MERGE_ELSEWHERE)}")
        base_model = fields.get("base_model_name_or_path")
        config = cls(
            rank=fields.integer("r"),
            alpha=fields.number("lora_alpha"),
            use_rslora=fields.flag("use_rslora", False),
            use_dora=fields.flag("use_dora", False),
            rank_pattern={key: patterns.integer(key) for key, patterns in _patterns(fields, "rank_pattern")},
            alpha_pattern={key: patterns.number(key) for key, patterns in _patterns(fields, "alpha_pattern")},
            target_modules=_modules(fields, "target_modules"),
            exclude_modules=_modules(fields, "exclude_modules") if fields.get("exclude_modules") else frozenset(),
            layers_to_transform=_layers(fields),
            layers_pattern=_layers_pattern(fields),
            modules_to_save=_names(fields, "modules_to_save") if fields.get("modules_to_save") else frozenset(),
            has_biases=fields.get("bias") in ("all", "lora_only"),
            base_model=base_model if isinstance(base_model, str) else "",
        )
        if isinstance(config.target_modules, str) and (config.layers_to_transform is not None or config.layers_pattern):
            given = short_repr(config.target_modules)
            raise ConfigError(f"target_modules: expected a list with layers_to_transform or layers_pattern, got {given}.")
        if config.layers_pattern and config.layers_to_transform is None:
            raise fields.refusal("layers_pattern", "layers_to_transform with it")
        return config

    def rank_of(self, module: str) -> int:
        """Return the rank of a module."""
        return self.rank_pattern.get(_pattern_of(self.rank_pattern, module), self.rank)

    def scale_of(self, module: str) -> float:
        """Return the factor of the product of a module."""
        alpha, rank = self.alpha_pattern.get(_pattern_of(self.alpha_pattern, module), self.alpha), self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def targets(self, module: str) -> bool:
        """Return True if the adapter changes a module, which is linear or an embedding."""
        if _is_named(self.exclude_modules, module) or self._saves(module):
            return False
        if self.is_all_linear:
            return True
        if not _is_named(self.target_modules, module):
            return False
        return self.layers_to_transform is None or module in self.target_modules or self._layer_of(module) in self.layers_to_transform

    def replaces(self, tensor: str) -> bool:
        """Return True if the adapter may have a tensor of the model whole."""
        return (self.has_biases and "bias" in tensor) or self._saves(tensor.rpartition(".")[0])

    def _saves(self, module: str) -> bool:
        return any(f".{name}." in f".{module}." for name in self.modules_to_save)

    @cached_property
    def is_all_linear(self) -> bool:
        """True if the adapter may change any linear layer."""
        return isinstance(self.target_modules, str) and self.target_modules.lower() == ALL_LINEAR

    def _layer_of(self, module: str) -> int | None:
        """Return the index of a module's layer, the first number after a name, or after one of ``layers_pattern``."""
        names = self.layers_pattern or (r"[^.]+",)
        found = next((match for name in names if (match := re.match(rf"(?:.*?\.)?{name}\.(?P<layer>\d+)\.", module))), None)
        return None if found is None else int(found["layer"])


def _is_unset(value: Any) -> bool:
    return value is None or value is False or value in ([], {}, "")


def _is_named(modules: str | frozenset[str], module: str) -> bool:
    """Return True for a module that a regular expression matches as a whole, or that ends with one of the names."""
    if isinstance(modules, str):
        return re.fullmatch(modules, module) is not None
    return module in modules or any(module.endswith(f".{name}") for name in modules)


def _pattern_of(patterns: Iterable[str], module: str) -> str:
    """Return the first pattern that matches a module or the end of its name; an empty text if none does."""
    return next((pattern for pattern in patterns if re.match(rf"(.*\.)?({pattern})$", module)), "")


def _modules(fields: ConfigFields, name: str) -> str | frozenset[str]:
    """Return a regular expression, or names."""
    value = fields.get(name)
    if isinstance(value, str) and value:
        return value if value.lower() == ALL_LINEAR else _checked(fields, name, value)
    return _names(fields, name, "a list of names, or a regular expression")


def _names(fields: ConfigFields, name: str, expected: str = "a list of names") -> frozenset[str]:
    value = fields.get(name)
    if not isinstance(value, list) or not value or not all(isinstance(one, str) and one for one in value):
        raise fields.refusal(name, expected)
    return frozenset(value)


def _patterns(fields: ConfigFields, name: str) -> list[tuple[str, ConfigFields]]:
    """Return the regular expressions of a field, each with the values by expression."""
    value = fields.get(name)
    if value is None:
        return []
    if not isinstance(value, Mapping):
        raise fields.refusal(name, "an object")
    return [(_checked(fields, name, key), ConfigFields(value, f"{name}.")) for key in value]


def _checked(fields: ConfigFields, name: str, expression: str) -> str:
    try:
        re.compile(expression)
    except re.error as error:
        raise ConfigError(f"{name}: expected a regular expression, got {short_repr(expression)}: {error}.") from error
    return expression


def _layers(fields: ConfigFields) -> frozenset[int] | None:
    """Return the indices of the adapted layers; None for all."""
    value = fields.get("layers_to_transform")
    if value is None or value == []:
        return None
    values = value if isinstance(value, list) else [value]
    if not all(type(one) is int and one >= 0 for one in values):
        raise fields.refusal("layers_to_transform", "a layer or a list of layers")
    return frozenset(values)


def _layers_pattern(fields: ConfigFields) -> tuple[str, ...]:
    value = fields.get("layers_pattern") or []
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(one, str) for one in values):
        raise fields.refusal("layers_pattern", "a name or a list of names")
    return tuple(_checked(fields, "layers_pattern", one) for one in values)
