"""Python's work for a layer that is not captured: views and launch plans are made once, over a memory whose launches do nothing."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.mixed_layers import RandomCheckpoint
from tests.torch_engine.needs_torch import need_torch

need_torch()

import torch  # noqa: E402

from trt_kvcache import HostMemory, KVCacheManager  # noqa: E402
from trt_kvcache.engine.decoder_cache import cache_config  # noqa: E402
from trt_kvcache.engine.names import DEFAULT_NAMES as NAMES  # noqa: E402
from trt_kvcache.kernels import attention_kernels, decoder_layer_kernels, linear_kernels  # noqa: E402
from trt_kvcache.model import ModelConfig  # noqa: E402
from trt_kvcache.torch_engine import TorchEngine, device_views, engine  # noqa: E402
from trt_kvcache.torch_engine.device import HostDevice  # noqa: E402
from trt_kvcache.torch_engine.device_views import DeviceViews  # noqa: E402

LAYERS, S = 12, 64
CONFIG = {
    **{"model_type": "qwen3", "vocab_size": 64, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": LAYERS},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "rms_norm_eps": 1e-6, "rope_theta": 1e4},
    **{"max_position_embeddings": S, "tie_word_embeddings": True, "torch_dtype": "bfloat16"},
}


class StandInGpu(HostMemory):
    """Host memory that is taken for that of an H100."""

    is_host = False
    device = "cuda:0"
    arch, multiprocessor_count = "sm_90", 132


class Engine:
    """An engine over the stand-in. ``launches`` has the kernels of the last step."""

    def __init__(self, monkeypatch):
        self.launches, self.plans = [], 0
        monkeypatch.setattr(engine, "torch_device", lambda memory: HostDevice())
        for module in (attention_kernels, decoder_layer_kernels, linear_kernels):
            monkeypatch.setattr(module, "launch", lambda memory, source, name, *_, **__: self.launches.append(name))
        plan = attention_kernels.prefill_plan
        monkeypatch.setattr(attention_kernels, "prefill_plan", lambda params: (self._count_plan(), plan(params))[1])
        self._memory = StandInGpu()
        self._stream = self._memory.create_stream()
        checkpoint = RandomCheckpoint(ModelConfig.from_dict(CONFIG))
        kv = cache_config(checkpoint.config, max_batch_size=1, max_sequence_length=S, dtype="bfloat16")
        self.engine = TorchEngine.open(checkpoint, kv=kv, max_prefill_length=32, memory=self._memory)
        self._bind_caches(KVCacheManager(kv, memory=self._memory))

    def _count_plan(self):
        self.plans += 1

    def _bind_caches(self, cache):
        for layer in range(LAYERS):
            for names, view in zip(NAMES.cache_pairs(layer), cache.get_separate_kv_cache(layer), strict=True):
                for name in names:
                    self.engine.bind(name, view)
                self.engine.set_input_shape(names[0], view.shape)
        for name, shape in ((NAMES.last_token_ids, (1, 1)), (NAMES.kvcache_start_index, (1,)), (NAMES.input_ids, (1, 32))):
            self.engine.bind(name, self._memory.to_device(np.zeros(shape, np.int32), stream=self._stream))
            self.engine.set_input_shape(name, shape)
        self.engine.bind(NAMES.logits, self._memory.to_device(np.zeros((1, 64), np.float32), stream=self._stream))

    def step(self, width):
        """Run a step, and return the number of launch plans that were made for it."""
        self.engine.set_input_shape(NAMES.input_ids, (1, width))
        self.launches.clear()
        self.plans = 0
        self.engine.enqueue(self._stream)
        return self.plans


@pytest.mark.parametrize("width", [3, 20])
def test_views_of_weights_are_kept_for_later_steps(monkeypatch, width):
    made = Engine(monkeypatch)
    made.step(width)
    assert len(made.launches) > 4 * LAYERS
    weights = {block.norm.weight.data_ptr() for block in made.engine._weights.blocks}
    kept = {key: view for key, view in made.engine._views._views.items() if key[0] in weights}
    assert len(kept) == len(weights) - 1 == 2 * LAYERS - 1, "torch computes the first norm"
    made.step(width)
    made.step(width + 1)
    assert all(made.engine._views._views[key] is view for key, view in kept.items())


def test_the_launch_of_a_shape_is_planned_once_for_all_layers(monkeypatch):
    made = Engine(monkeypatch)
    assert [made.step(width) for width in (20, 24, 20)] == [1, 1, 0]


class TestDeviceViews:
    def test_a_view_is_made_once_for_each_address_shape_and_strides(self):
        views, tensor = DeviceViews(HostMemory()), torch.zeros(2, 3, 8)
        view = views.of(tensor)
        assert views.of(tensor) is view
        assert (view.ptr, view.shape, view.strides, view.dtype) == (tensor.data_ptr(), (2, 3, 8), (24, 8, 1), "float32")
        others = [views.of(one) for one in (tensor[:, 1:], tensor[:, :2], tensor.view(6, 8), tensor.view(torch.int32), tensor[1])]
        assert len({view, *others}) == 6
        assert [other.ptr - view.ptr for other in others] == [32, 0, 0, 0, 96]

    def test_rows_are_those_of_all_slots(self):
        views, tensor = DeviceViews(HostMemory()), torch.zeros(2, 3, 8)
        rows = views.rows_of(tensor)
        assert (rows.ptr, rows.shape, rows.strides) == (tensor.data_ptr(), (6, 8), (8, 1))
        assert views.rows_of(tensor) is rows
        part = tensor[:, :, :4]
        assert (views.rows_of(part).shape, views.rows_of(part).strides) == ((6, 4), (8, 1))

    def test_q_k_and_v_are_parts(self):
        views, tensor = DeviceViews(HostMemory()), torch.zeros(1, 2, 4, 8)
        parts = views.split_qkv(tensor, 2, 1)
        assert [(part.ptr - tensor.data_ptr(), part.shape) for part in parts] == [(0, (1, 2, 2, 8)), (64, (1, 2, 1, 8)), (96, (1, 2, 1, 8))]
        assert views.split_qkv(tensor, 2, 1) is parts

    def test_they_are_bounded(self, monkeypatch):
        monkeypatch.setattr(device_views, "MAX_VIEWS", 4)
        views, tensor = DeviceViews(HostMemory()), torch.zeros(9, 2)
        for row in range(9):
            assert views.of(tensor[row]).ptr == tensor[row].data_ptr()
        assert len(views._views) <= 4
