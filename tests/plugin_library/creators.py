"""The creators of a plugin library, called by their place in the table of virtual functions, as TensorRT calls them."""

from __future__ import annotations

from pathlib import Path

from tests.bindings.plugin_calls import Creator, Plugin, fields
from tests.bindings.stand_in import creators_in
from trt_kvcache.ops.attention_attributes import AttentionAttributes
from trt_kvcache.trt.plugin.versions import plugin_version

#: ``TensorRTPhase``.
BUILD, RUNTIME = 0, 1

#: ``DataType``.
DATA_TYPES = {"float32": 0, "float16": 1, "int32": 3, "bfloat16": 7, "int64": 8}


def creators_of(library: Path) -> dict[str, Creator]:
    """Return the creators by version."""
    return {creator.key[1].decode(): creator for creator in creators_in(library).values()}


def create(library: Path, attributes: AttentionAttributes, phase: int = RUNTIME) -> Plugin:
    """Return a plugin with these attributes."""
    values = {name: array.reshape(-1)[0].item() for name, array in attributes.plugin_field_arrays().items()}
    plugin = creators_of(library)[plugin_version(attributes)].create(fields(values), phase)
    assert plugin is not None
    return plugin
