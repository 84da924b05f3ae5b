"""Hugging Face model folders: weights, tokenizer, generation defaults. :mod:`trt_kvcache.model` reads what ``config.json`` describes."""

from trt_kvcache.checkpoint.checkpoint import Checkpoint
from trt_kvcache.checkpoint.generation_config import GenerationDefaults
from trt_kvcache.checkpoint.stream_decoder import StreamDecoder
from trt_kvcache.checkpoint.tokenizer import Tokenizer

__all__ = ["Checkpoint", "GenerationDefaults", "StreamDecoder", "Tokenizer"]
