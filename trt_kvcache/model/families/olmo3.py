"""OLMo 3: OLMo 2 with three sliding-window layers for each full one; only full layers scale RoPE."""

from trt_kvcache.model.config_fields import ConfigFields
from trt_kvcache.model.families import olmo2
from trt_kvcache.model.families.family import Family
from trt_kvcache.model.families.fields import FULL, SLIDING, layer_types, num_layers, rope_of_layer_type, window_of_layer_type
from trt_kvcache.model.model_config import ModelConfig


def read(fields: ConfigFields) -> ModelConfig:
    """Return the model of a ``config.json``."""
    kinds = layer_types(fields, [SLIDING if (layer + 1) % 4 else FULL for layer in range(num_layers(fields))])
    mixers = {
        kind: olmo2.olmo_attention(
            fields, rope=rope_of_layer_type(fields, kind, theta="rope_theta"), window=window_of_layer_type(fields, kind)
        )
        for kind in set(kinds)
    }
    return olmo2.olmo(fields, "olmo3", [mixers[kind] for kind in kinds])


FAMILY = Family(
    name="olmo3",
    architecture="Olmo3ForCausalLM",
    title="OLMo 3",
    defaults={**olmo2.FAMILY.defaults, "rope_theta": 5e5, "sliding_window": 4096},
    read=read,
    names=olmo2.FAMILY.names,
)
