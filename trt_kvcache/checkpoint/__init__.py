"""Hugging Face model folders: configuration, weights, tokenizer, generation defaults."""

from trt_kvcache.checkpoint.checkpoint import Checkpoint
from trt_kvcache.checkpoint.generation_config import GenerationDefaults
from trt_kvcache.checkpoint.model_config import ModelConfig
from trt_kvcache.checkpoint.rope import RopeConfig, rope_table
from trt_kvcache.checkpoint.stream_decoder import StreamDecoder
from trt_kvcache.checkpoint.tokenizer import Tokenizer

__all__ = ["Checkpoint", "GenerationDefaults", "ModelConfig", "RopeConfig", "StreamDecoder", "Tokenizer", "rope_table"]
