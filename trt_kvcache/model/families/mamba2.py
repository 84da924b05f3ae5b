"""Mamba-2, a pure state-space model: no attention, MLP or positions."""

from trt_kvcache.errors import ConfigError
from trt_kvcache.memory.shapes import MAX_DIMENSION
from trt_kvcache.model.config_fields import ConfigFields
from trt_kvcache.model.families.family import Family
from trt_kvcache.model.families.fields import dt_limits, model, norm, num_layers, silu_convolution
from trt_kvcache.model.layer_config import LayerConfig
from trt_kvcache.model.model_config import ModelConfig
from trt_kvcache.model.recurrent_config import Mamba2Config

#: Names of the weights of Mamba-2 in layers with a module ``mixer``.
MIXER_NAMES = {
    "mamba_in": "mixer.in_proj",
    "conv": "mixer.conv1d",
    "a_log": "mixer.A_log",
    "d": "mixer.D",
    "dt_bias": "mixer.dt_bias",
    "mamba_norm": "mixer.norm",
    "mamba_out": "mixer.out_proj",
}


def read(fields: ConfigFields) -> ModelConfig:
    """Return the model of a ``config.json``. ``residual_in_fp32`` is ignored: engines have one precision.

    ``rms_norm`` and ``norm_before_gate`` are ignored too, as in transformers: the gate always comes before the norm.
    """
    silu_convolution(fields)
    norms, heads, head_dim = norm(fields, field="layer_norm_epsilon"), fields.integer("num_heads"), fields.integer("head_dim")
    inner = fields.integer("expand") * fields.integer("hidden_size")
    if inner != heads * head_dim:
        raise ConfigError(f"expand: expected expand * hidden_size = num_heads * head_dim = {heads * head_dim}, got {inner}.")
    mixer = Mamba2Config(
        num_heads=heads,
        head_dim=head_dim,
        state_size=fields.integer("state_size"),
        num_groups=fields.integer("n_groups"),
        kernel=fields.integer("conv_kernel"),
        norm=norms,
        conv_bias=fields.flag("use_conv_bias", True),
        bias=fields.flag("use_bias", False),
        **dt_limits(fields),
    )
    layer = LayerConfig(mixer=mixer, mlp=None, input_norm=norms)
    return model(fields, "mamba2", [layer] * num_layers(fields), final_norm=norms)


FAMILY = Family(
    name="mamba2",
    architecture="Mamba2ForCausalLM",
    title="Mamba-2",
    defaults={
        "max_position_embeddings": MAX_DIMENSION,
        "num_heads": 128,
        "head_dim": 64,
        "state_size": 128,
        "layer_norm_epsilon": 1e-5,
        "expand": 2,
        "conv_kernel": 4,
        "n_groups": 8,
        "hidden_act": "silu",
        "bos_token_id": 0,
        "eos_token_id": 2,
    },
    read=read,
    embedding="backbone.embeddings.weight",
    final_norm="backbone.norm_f.weight",
    layers="backbone.layers",
    names={"input_norm": "norm", **MIXER_NAMES},
    renamed={"backbone.embedding.": "backbone.embeddings."},
)
