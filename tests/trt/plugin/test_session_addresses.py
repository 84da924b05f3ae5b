"""The plugin at the addresses that a session binds: a stand-in of TensorRT enqueues the plugin layers in place of an engine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.helpers.engine_files import PLAN, make_config
from tests.helpers.fake_tensorrt import FakeTensorRT, install
from tests.helpers.models import write_model
from tests.simt.standin import need_cuda_memory
from tests.trt.plugin.bound import PLUGIN_TYPES
from tests.trt.plugin.stand_in import tensorrt
from trt_kvcache import DeviceTensor, InferenceSession, KVCacheManager
from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.engine.protocol import TensorSpec
from trt_kvcache.engine.quantized_kv import QuantizedKV
from trt_kvcache.kernels import attend
from trt_kvcache.kernels.attention_workspace import AttentionWorkspace
from trt_kvcache.ops.borrowed_workspace import workspace_nbytes
from trt_kvcache.ops.int32_packing import packed_as_int32
from trt_kvcache.trt import tensorrt_engine
from trt_kvcache.trt.plugin import AttentionAttributes, plugin_class
from trt_kvcache.trt.tensorrt_engine import TensorRTEngine

need_cuda_memory()

LAYERS, HEAD_DIM, LENGTH = 2, 64, 38
SIZES = {"num_heads": 4, "num_kv_heads": 2, "head_dim": HEAD_DIM}


class PluginLayers:
    """The plugin layers of an engine, over random q, k and v."""

    def __init__(self, engine: TensorRTEngine, memory: Any) -> None:
        self.engine, self.memory, self.stream = engine, memory, memory.create_stream()
        kv = engine.config.cache
        kv_dtype = kv.dtype if kv.has_scales else None
        attributes = AttentionAttributes(**SIZES, rotary_dim=HEAD_DIM, kv_dtype=kv_dtype, kv_scales="token" if kv_dtype else None)
        self.scaled = ["kv_scales"] if kv_dtype else []
        self.plugins = [plugin_class(tensorrt())(attributes) for _ in range(LAYERS)]
        self.random = np.random.default_rng(0)
        self.cos_sin = self.on_device(LENGTH, 2, HEAD_DIM // 2, dtype=np.float32)
        self.workspace = memory.to_device(np.full(workspace_nbytes(attributes), 0xFF, np.uint8), stream=self.stream)
        self.own_workspace = AttentionWorkspace(memory, **SIZES, stream=self.stream)
        self.widths: list[int] = []

    def on_device(self, *shape: int, dtype: Any = np.float16) -> DeviceTensor:
        return self.memory.to_device(self.random.normal(size=shape).astype(dtype), stream=self.stream)

    def run(self, context: Any) -> None:
        """Enqueue each layer at the addresses of a context, then call ``attend`` on a copy of what was there: all bytes are equal."""
        slots, width = context.shapes["input_ids"]
        self.widths.append(width)
        for layer, plugin in enumerate(self.plugins):
            names = [f"past_key_values_{layer}", "kvcache_start_index", *(f"{name}_{layer}" for name in self.scaled)]
            cache, lengths, *scales = (self.bound(context, name)[:slots] for name in names)
            q, k, v = (self.on_device(slots, width, heads, HEAD_DIM) for heads in (4, 2, 2))
            copies = [self.memory.to_device(one.numpy(), stream=self.stream) for one in (cache, *scales)]
            out, expected = (self.on_device(slots, width, 4, HEAD_DIM) for _ in range(2))
            descs = [self.described(one) for one in (q, k, v, cache, lengths, *scales, self.cos_sin)]
            inputs = [q.ptr, k.ptr, v.ptr, *(context.addresses[name] for name in names), self.cos_sin.ptr]
            presents = [f"present_key_values_{layer}", *(f"present_{name}_{layer}" for name in self.scaled)]
            outputs = [out.ptr, *(context.addresses[name] for name in presents)]
            plugin.on_shape_change(descs, [])
            plugin.enqueue(descs, [], inputs, outputs, self.workspace.ptr, int(self.stream.__cuda_stream__()[1]))
            kv_scales = copies[1] if self.scaled else None
            options = {"cos_sin": self.cos_sin, "kv_scales": kv_scales, "workspace": self.own_workspace, "stream": self.stream}
            attend(q, k, v, copies[0], lengths, out=expected, **options)
            self.memory.synchronize(self.stream)
            for found, wanted in zip((out, cache, *scales), (expected, *copies), strict=True):
                assert found.numpy().tobytes() == wanted.numpy().tobytes()

    def bound(self, context: Any, name: str) -> DeviceTensor:
        """Return the tensor that the session has bound, after comparing it with the address in TensorRT."""
        tensor = self.engine._bindings.active.tensors[name]
        assert tensor.ptr == context.addresses[name]
        return tensor

    def described(self, tensor: DeviceTensor) -> Any:
        """Return what TensorRT says of a tensor: quantized values are int32."""
        spec = packed_as_int32(TensorSpec.input("", tensor.shape, tensor.dtype))
        return SimpleNamespace(dims=spec.shape, type=PLUGIN_TYPES[spec.dtype])


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_each_layer_is_attend_bit_for_bit(memory: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kv_dtype: str | None) -> None:
    """Ragged prompts in chunks, decode steps, and a next turn of some slots."""
    quantized = None if kv_dtype is None else QuantizedKV(kv_dtype)
    with Checkpoint.open(write_model(tmp_path / "model", head_dim=HEAD_DIM, num_hidden_layers=LAYERS)) as checkpoint:
        config = make_config(checkpoint, quantized=quantized, attention_variant="plugin")
    fake = FakeTensorRT([packed_as_int32(spec) for spec in config.tensors], config.profiles, plan=PLAN)
    install(fake, monkeypatch, tmp_path / "caches")
    monkeypatch.setattr(tensorrt_engine, "register", lambda tensorrt: None)
    fake.alias_of = lambda name: None
    engine = TensorRTEngine(fake.loaded, PLAN, memory=memory, names=config.names, config=config, plan_sha256="", cuda_graphs=False)
    layers = PluginLayers(engine, memory)
    fake.run = layers.run
    with InferenceSession(engine, KVCacheManager(config.cache, memory=memory)) as session:
        session.prefill([[5, 9, 3, 30, 11, 2, 7, 36, 1, 12, 13, 14, 15], [8], [21, 22, 4]])
        session.decode([3, 4, 5])
        session.append([[], [7, 8, 9], [3, 1]])
        session.decode([6, 7, 8])
    assert layers.widths == [11, 2, 1, 4, 1]  # three new tokens are padded to four
