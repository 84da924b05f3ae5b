"""The weights of a model that an adapter changes, by name and shape."""

from __future__ import annotations

from trt_kvcache.checkpoint.adapters.adapter_config import AdapterConfig
from trt_kvcache.checkpoint.adapters.lora_adapter import LoraAdapter
from trt_kvcache.errors import CheckpointError
from trt_kvcache.model.families.registry import FAMILIES
from trt_kvcache.model.model_config import ModelConfig
from trt_kvcache.model.tensor_shapes import embedding_name, tensor_shapes
from trt_kvcache.model.weight_parts import exact_tensors, expert_tensors


def changed_weights(adapter: LoraAdapter, config: ModelConfig) -> dict[str, str]:
    """Return PEFT's names of the weights that an adapter changes, by their names in the family. Raises CheckpointError for others.

    Modules of a vision tower, which the decoder does not have, are left out as the tower is.
    """
    family, shapes = FAMILIES[config.family], tensor_shapes(config)
    changed: dict[str, str] = {}
    for stored in adapter.changed:
        if family.ignores(stored):
            continue
        name, module = family.own_name(stored), stored.removesuffix(".weight")
        shape = shapes.get(name)
        if shape is None or name in changed:
            got = "a second time" if name in changed else "of which the model has no weight"
            raise CheckpointError(
                f"{adapter.path}: expected modules of a {config.family} model once, got {module} {got}.{made_for(adapter)}"
            )
        changed[name] = stored
        if stored in adapter.replaced:
            continue
        update = adapter.updates[module]
        if update.shape != shape or (module in adapter.embeddings) != (name == embedding_name(config)):
            kind = "embedding" if module in adapter.embeddings else "linear layer"
            raise CheckpointError(
                f"{adapter.path}: expected an update of {name} {shape}, got one of a {kind} {update.shape}.{made_for(adapter)}"
            )
    missing = [module for module in _targeted(adapter.config, config) if f"{module}.weight" not in changed]
    if missing or not changed:
        got = f"none of {missing[0]}" if missing else "modules of its vision tower alone"
        raise CheckpointError(f"{adapter.path}: expected weights of all modules of the decoder that are targeted, got {got}.")
    return changed


def made_for(adapter: LoraAdapter) -> str:
    """Return a hint that names the base model of an adapter, if it is known."""
    return f" The adapter was made for {adapter.config.base_model}." if adapter.config.base_model else ""


def _targeted(adapter: AdapterConfig, config: ModelConfig) -> list[str]:
    """Return the decoder's modules that an adapter lists. Those of a regular expression are not known: it is for the names of PEFT."""
    if isinstance(adapter.target_modules, str):
        return []
    others = set(expert_tensors(config)) | exact_tensors(config)
    modules = (name.removesuffix(".weight") for name, shape in tensor_shapes(config).items() if len(shape) == 2 and name not in others)
    return [module for module in modules if adapter.targets(module)]
