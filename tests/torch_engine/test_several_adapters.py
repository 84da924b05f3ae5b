"""Sessions of the torch engine with several adapters, by the tests of the reference engine; weights and graphs of steps with adapters."""

from __future__ import annotations

import numpy as np
import pytest

from tests.session.reference_sessions import OPTIONS
from tests.torch_engine.needs_torch import need_torch

need_torch()

import torch  # noqa: E402

from tests.helpers.adapters import linear_shapes, write_adapter, write_two_adapters  # noqa: E402
from tests.helpers.assertions import assert_close  # noqa: E402
from tests.helpers.models import model_of  # noqa: E402
from tests.session.test_several_adapters import *  # noqa: E402, F403
from tests.session.test_several_adapters import NAMES, PROMPTS, logits_of, open_model  # noqa: E402
from tests.torch_engine.fake_cuda import FakeCuda, FakeCudaDevice  # noqa: E402
from trt_kvcache.checkpoint.adapters.adapter_set import AdapterSet  # noqa: E402
from trt_kvcache.kernels.adapter_kernels import RANK_GRANULE  # noqa: E402
from trt_kvcache.torch_engine import engine  # noqa: E402
from trt_kvcache.torch_engine.adapter_updates import fused_updates, updates_of  # noqa: E402


@pytest.fixture(autouse=True)
def _sessions_run_torch(monkeypatch):
    monkeypatch.setitem(OPTIONS, "engine", "torch")


@pytest.mark.parametrize("first", [NAMES, None])
def test_captured_steps_with_and_without_adapters(monkeypatch, adapters, first):
    """A graph of a step without adapters is not replayed for one with adapters, nor the other way round; who has which may change."""
    cuda = FakeCuda(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "torch_device", lambda memory: FakeCudaDevice(cuda, 10**8))
        captured = open_model("llama", adapters=adapters)
    orders = [first, NAMES, None, ("poems", "sql", "sql"), (None, None, "sql")]
    with captured, open_model("llama", adapters=adapters) as eager:
        for _ in range(3):
            for names in orders:
                assert_close(logits_of(captured, adapter=names), logits_of(eager, adapter=names))
    assert cuda.captures
    assert cuda.replays > cuda.captures


def test_steps_without_adapters_do_not_compute_their_products(monkeypatch, adapters):
    with open_model("llama", adapters=adapters) as session:
        session.prefill(PROMPTS, adapter=NAMES)
        monkeypatch.setattr(engine, "AdaptedProjections", lambda *_: pytest.fail("the step has no adapter"))
        session.prefill(PROMPTS)
        session.decode([5, 6, 7])


def test_fused_updates(tmp_path):
    """Ranks are those of each part in turn, padded; a part without an update has none."""
    model = model_of("llama")
    shapes = linear_shapes(model)
    modules = [f"model.layers.0.self_attn.{name}_proj" for name in "qv"]
    folder = write_adapter(tmp_path / "a", {module: shapes[module] for module in modules}, rank=3)
    updates = updates_of(AdapterSet.open(model, {"a": folder}), model, "float32", torch.device("cpu"))(0)
    q, v = updates["q.weight"], updates["v.weight"]
    b_of_q, b_of_v = (update.products[0].b for update in (q, v))
    outputs = [len(b_of_q), 7, len(b_of_v)]
    whole = fused_updates([q, None, v], outputs)
    assert whole.owners == (1,) * 2 * RANK_GRANULE, "rank 3 is padded"
    assert whole.owners_on_device.tolist() == [*whole.owners]
    assert whole.parts.tolist() == [[0, outputs[0], 0, 8], [outputs[0] + 7, outputs[2], 8 * outputs[0], 8]]
    assert whole.starts.tolist() == [[0, 0, 8], [8, 8, 16]]
    assert whole.max_outputs == outputs[0]
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((2, 4, q.a.shape[1])).astype(np.float32))
    numbers, out = torch.tensor([1, 0], dtype=torch.int32), torch.zeros(2, 4, sum(outputs))
    whole.add(out, x, whole.others(numbers))
    first, none, last = out.split(outputs, dim=2)
    assert_close(first[0], x[0] @ q.a.T @ b_of_q.T)
    assert_close(last[0], x[0] @ v.a.T @ b_of_v.T)
    assert not none.any()
    assert not out[1].any()
    assert fused_updates([None, None], [2, 3]) is None


def test_values_that_a_dtype_cannot_hold(tmp_path):
    model = model_of("llama")
    folder = write_two_adapters(tmp_path, model)["sql"]
    big = write_adapter(tmp_path / "big", linear_shapes(model), lora_alpha=1e6)
    for one, is_refused in ((folder, False), (big, True)):
        load = updates_of(AdapterSet.open(model, {"a": one}), model, "float16", torch.device("cpu"))
        if not is_refused:
            assert load(0)
            continue
        with raises(CheckpointError, "adapters", "float16"):  # noqa: F405
            load(0)
