"""``TorchEngine``: the decoder in PyTorch, on a CPU or an NVIDIA GPU. Importing this package imports torch."""

from trt_kvcache._util.extras import naming_the_extra

with naming_the_extra():
    import torch as _torch  # noqa: F401

from trt_kvcache.torch_engine.engine import TorchEngine

__all__ = ["TorchEngine"]
