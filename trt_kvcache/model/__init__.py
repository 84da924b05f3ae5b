"""Descriptions of decoders as plain data: layers, norms, RoPE, and the Hugging Face families that they are read from."""

from trt_kvcache.model.assistant_input import AssistantInputConfig, TokenClusters
from trt_kvcache.model.eagle3_input import Eagle3InputConfig
from trt_kvcache.model.layer_config import AttentionConfig, LayerConfig, QkNormConfig, QueryScaling
from trt_kvcache.model.mlp_config import ClampedSwiGLU, MlpConfig, RoutedMlpConfig, RouterConfig
from trt_kvcache.model.model_config import ModelConfig
from trt_kvcache.model.norm_config import NormConfig
from trt_kvcache.model.per_layer_config import PerLayerEmbeddingConfig, PerLayerInputConfig
from trt_kvcache.model.recurrent_config import GatedDeltaNetConfig, Mamba2Config, ShortConvConfig
from trt_kvcache.model.rope import RopeConfig
from trt_kvcache.model.rope_table import rope_table

__all__ = [
    "AssistantInputConfig",
    "AttentionConfig",
    "ClampedSwiGLU",
    "Eagle3InputConfig",
    "GatedDeltaNetConfig",
    "LayerConfig",
    "Mamba2Config",
    "MlpConfig",
    "ModelConfig",
    "NormConfig",
    "PerLayerEmbeddingConfig",
    "PerLayerInputConfig",
    "QkNormConfig",
    "QueryScaling",
    "RopeConfig",
    "RoutedMlpConfig",
    "RouterConfig",
    "ShortConvConfig",
    "TokenClusters",
    "rope_table",
]
