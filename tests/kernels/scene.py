"""Arguments for every kernel function."""

from functools import partial
from typing import Any

import numpy as np

from tests.kernels.layers import make_layer, make_saved, saved_tensor
from trt_kvcache import DeviceTensor, HostMemory, KVLayout, kernels
from trt_kvcache.kernels import CompactionPlan, KVLayerInfos, StateInfos


def save_layer(cache, tensor, slot, *, stream):
    kernels.save_kv_cache_layer_into_tensor(tensor, cache, slot, stream=stream)


class Scene:
    """A cache of layers (B=3, H=2 and 1, S=5, D=8, float16), saved tensors of 4 tokens, states, lengths, plans."""

    def __init__(self, memory, stream, pairs=1):
        self.memory, self.stream, heads = memory, stream, (2, 1) * pairs
        self.numbers = 0  # in all tensors: no two hold the same
        cache = [make_layer(memory, stream, KVLayout.SEPARATE, (3, h, 5, 8), "float16", h) for h in heads]
        saved = [make_saved(memory, stream, (h, 4, 8), "float16", 10 + h) for h in heads]
        self.made, self.layers, self.tensors = cache, [layer.tensor for layer in cache], [saved_tensor(layer) for layer in saved]
        self.states, self.rows = ([self.new(*one) for one in shapes * pairs] for shapes in (((3, 2, 3), (3, 5)), ((2, 3), (5,))))
        self.lengths, self.mapping = self.new(3, dtype=np.int32), memory.to_device(np.array([-1, 0, 1], np.int32), stream=stream)
        self.cache, self.saved = KVLayerInfos(self.layers, stream=stream), KVLayerInfos(self.tensors, stream=stream)
        self.infos = StateInfos(self.states, stream=stream)
        self.plan = CompactionPlan.from_host([1, 0, 2], 3, 3, [5, 4, 3])
        self.mapped = CompactionPlan.from_device(self.mapping, 3, 2, self.lengths)
        self.everything = [layer.whole for layer in (*cache, *saved)] + self.states + self.rows + [self.lengths]

    def new(self, *shape, dtype=np.float32, memory=None):
        place, stream = (self.memory, self.stream) if memory is None else (memory, memory.create_stream())
        numbers = self.numbers + np.arange(np.prod(shape))
        self.numbers += numbers.size
        return place.to_device(numbers.astype(dtype).reshape(shape), stream=stream)

    def strided(self, tensor, *shape, strides):
        return DeviceTensor(tensor.allocation, shape=shape, dtype=tensor.dtype, strides=strides)

    def infos_of(self, kind, *shapes, memory=None, **dtype):
        stream = self.stream if memory is None else memory.create_stream()
        return kind([self.new(*shape, memory=memory, **dtype) for shape in shapes], stream=stream)

    def saved_of(self, *shapes, dtype=np.float16, memory=None):
        return self.infos_of(KVLayerInfos, *shapes, dtype=dtype, memory=memory)

    def plan_elsewhere(self):
        """A plan whose mapping and lengths are in another memory."""
        host = HostMemory()
        numbers = self.new(3, dtype=np.int32, memory=host)
        return CompactionPlan.from_device(numbers, 3, 2, numbers)

    def calls(self, name, given):
        """Each function of that name, with arguments that fit, but for those that are given."""
        functions: Any
        functions, fitting = {
            "single": (
                (save_layer, kernels.instantiate_kv_cache_layer_from_tensor),
                {"cache": self.layers[0], "tensor": self.tensors[0], "slot": 1},
            ),
            "batched": (
                (kernels.save_kv_cache_batched, kernels.instantiate_kv_cache_batched),
                {"cache": self.cache, "saved": self.saved, "slot": 1, "tokens": 4},
            ),
            "rows": ((kernels.save_rows, kernels.instantiate_rows), {"infos": self.infos, "saved": self.rows, "slot": 0}),
            "compact": ((kernels.compact_kv_cache_batched,), {"cache": self.cache, "plan": self.plan}),
            "compact_rows": ((kernels.compact_rows,), {"infos": self.infos, "plan": self.plan}),
            "compact_lengths": ((kernels.compact_length_tensor,), {"lengths": self.lengths, "plan": self.plan}),
            "zero": ((kernels.zero_rows,), {"infos": self.infos, "slot": 0, "count": 1}),
            "copy": ((kernels.copy_rows,), {"dst": self.infos, "src": self.infos, "slot": 0}),
            "increment": ((kernels.increment_length_tensor,), {"lengths": self.lengths, "increment": 1}),
            "store": (
                [partial(kernels.store_length_values, accumulate=accumulate) for accumulate in (False, True)],
                {"lengths": self.lengths, "values": [1, 1, 1]},
            ),
        }[name]
        words = {"stream": self.stream, **fitting, **given}
        named = {word: words.pop(word) for word in ("stream", "count") if word in words}
        return [partial(function, *words.values(), **named) for function in functions]
