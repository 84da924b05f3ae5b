"""What holds for the reference engine holds for the torch engine: the same tests, on a rig that opens it; and what is its own."""

import numpy as np
import pytest

from tests.torch_engine.needs_torch import need_torch

need_torch()

from tests.helpers.models import SMALL, with_mixer  # noqa: E402
from tests.reference.rig import Rig, random_ids  # noqa: E402
from tests.reference.test_engine import *  # noqa: E402, F403
from trt_kvcache import HostMemory  # noqa: E402
from trt_kvcache.engine.decoder_cache import cache_config  # noqa: E402
from trt_kvcache.errors import ConfigError  # noqa: E402
from trt_kvcache.model import ModelConfig  # noqa: E402
from trt_kvcache.torch_engine import TorchEngine, engine  # noqa: E402


def test_no_variant_reads_dead_rows() -> None:
    rigs = [Rig("llama", attention="mask") for _ in range(2)]
    rigs[1].poison(np.nan)
    clean, poisoned = (rig.run(random_ids(61, 9), [5, 1, 3]) for rig in rigs)
    np.testing.assert_array_equal(clean, poisoned)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_have_the_dtype_of_the_cache_and_are_joined(dtype: str) -> None:
    rig = Rig("llama-llama3-bias", dtype=dtype)
    attention, mlp = (block.part for block in rig.engine._weights.blocks[2:4])
    mixer = rig.model.layers[0].mixer
    heads = mixer.num_heads + 2 * mixer.num_kv_heads
    assert attention.inputs.weight.shape == (heads * mixer.head_dim, rig.model.hidden_size)
    assert attention.inputs.bias.shape == (heads * mixer.head_dim,)
    assert str(mlp.inputs.weight.dtype) == f"torch.{dtype}"


def test_a_tied_head_is_one_tensor() -> None:
    weights = Rig("qwen2-tied").engine._weights
    assert weights.head is weights.embedding


def test_a_failure_of_torch_is_an_engine_error(monkeypatch) -> None:
    from trt_kvcache.errors import EngineError
    from trt_kvcache.torch_engine import engine

    def fail(*_):
        raise RuntimeError("out of luck")

    rig = Rig("llama")
    monkeypatch.setattr(engine, "decoder_step", fail)
    with pytest.raises(EngineError, match=r"^torch: a step failed: out of luck$"):
        rig.step([[1]], [0])


def test_what_is_bound_after_a_step_is_what_the_next_one_uses() -> None:
    rig = Rig("llama")
    first = rig.step(random_ids(61, 1, 5), [0])
    other = rig.to_memory(np.zeros((3, 61), np.float32))
    rig.engine.bind("logits", other)
    rig.engine.enqueue(rig.stream)
    np.testing.assert_array_equal(other.numpy()[:1], first)


def test_a_cache_that_is_closed_after_a_step_is_refused() -> None:
    from trt_kvcache.errors import ClosedError

    rig = Rig("llama")
    rig.step([[1]], [0])
    rig.cache.close()
    with pytest.raises(ClosedError):
        rig.engine.enqueue(rig.stream)


def test_what_is_not_computed_is_refused_before_a_weight_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "COMPUTED_FEATURES", frozenset())
    model = with_mixer(ModelConfig.from_dict(SMALL), window=5)
    kv = cache_config(model, max_batch_size=2, max_sequence_length=32, dtype="float32")
    message = r"^layers\[0\]\.mixer\.window = 5: the PyTorch engine does not support sliding window yet \(llama\)\."
    with pytest.raises(ConfigError, match=message):
        TorchEngine(model, lambda name: pytest.fail(f"{name} was read"), kv=kv, max_prefill_length=8, memory=HostMemory())
