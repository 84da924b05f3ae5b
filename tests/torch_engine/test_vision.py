"""Text decoders of models with a vision tower: logits against Hugging Face transformers, as for the reference engine."""

from tests.torch_engine.needs_torch import need_torch

need_torch()

from tests.reference.test_vision import test_one_full_pass  # noqa: E402, F401
