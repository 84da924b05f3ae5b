"""Formats of quantized checkpoints: their tensors, and the values of a weight.

One file per format. :mod:`~trt_kvcache.checkpoint.quantized.registry` chooses by ``config.json``.
"""
