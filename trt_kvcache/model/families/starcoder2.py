"""StarCoder2: LayerNorm, an MLP without a gate, biases everywhere by default, and one sliding window for all layers or none."""

from trt_kvcache.model.config_fields import ConfigFields
from trt_kvcache.model.families.family import LLAMA_NAMES, Family
from trt_kvcache.model.families.fields import attention, layer_norm, mlp, model, num_layers, pre_norm_layer, rope, window_of_all
from trt_kvcache.model.model_config import ModelConfig


def read(fields: ConfigFields) -> ModelConfig:
    """Return the model of a ``config.json``."""
    for name, value in (("norm_type", "layer_norm"), ("mlp_type", "default")):
        if fields.get(name) not in (None, value):
            raise fields.refusal(name, value)
    bias, norms = fields.flag("use_bias", True), layer_norm(fields, field="norm_epsilon", bias=True)
    mixer = attention(fields, rope=rope(fields), window=window_of_all(fields), qkv_bias=bias, o_bias=bias)
    layer = pre_norm_layer(fields, mixer, mlp(fields, bias=bias, gated=False), before=norms)
    return model(fields, "starcoder2", [layer] * num_layers(fields), final_norm=norms)


FAMILY = Family(
    name="starcoder2",
    architecture="Starcoder2ForCausalLM",
    title="StarCoder2",
    defaults={
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "norm_epsilon": 1e-5,
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": True,
        "tie_word_embeddings": True,
        "bos_token_id": 50256,
        "eos_token_id": 50256,
    },
    read=read,
    names={**LLAMA_NAMES, "up": "mlp.c_fc", "down": "mlp.c_proj"},
)
