"""Quantized checkpoints: what is stored for a weight, by format, and the values that it stands for.

One file a format. :mod:`~trt_kvcache.checkpoint.quantized.registry` chooses by ``config.json``.
"""
