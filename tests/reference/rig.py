"""An engine over a real cache, driven step by step: the reference engine, or that which a test puts in its place."""

import numpy as np
from safetensors.numpy import load_file

from tests.golden.weights import SEEDS
from tests.helpers.recording import kv_views
from tests.paths import GOLDEN
from trt_kvcache import HostMemory, KVLayout
from trt_kvcache.cache.edge_llm import make_cache
from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.engine.decoder_cache import decoder_cache_config
from trt_kvcache.engine.names import DEFAULT_NAMES
from trt_kvcache.engine.protocol import TensorMode
from trt_kvcache.reference import ReferenceEngine

MODELS = sorted(SEEDS)

PREFILL, DECODE = 0, 1

#: How a rig makes its engine from a checkpoint.
open_engine = ReferenceEngine


class Rig:
    def __init__(self, model, *, batch=3, length=29, width=24, dtype="float32", attention="native", logits=1):
        self.memory = HostMemory()
        self.stream = self.memory.create_stream()
        with Checkpoint.open(GOLDEN / model) as checkpoint:
            self.model = checkpoint.config
            config = decoder_cache_config(self.model, max_batch_size=batch, max_sequence_length=length, dtype=dtype, attention=attention)
            options = {"max_prefill_length": width, "max_logits_per_slot": logits, "attention": attention}
            self.engine = open_engine(checkpoint, kv=config, **options, memory=self.memory)
        self.kv = config.kv
        self.cache = make_cache(config, memory=self.memory)
        self.cache.set_active_batch_size(batch, stream=self.stream)
        self.logits = self.to_memory(np.zeros((batch * logits, self.model.vocab_size), np.float32))

    def to_memory(self, array):
        return self.memory.to_device(array, stream=self.stream)

    def caches(self):
        return [self.memory.array(view) for view in kv_views(self.cache)]

    def bindings(self):
        layers = self.cache.kv_layers
        for layer in range(self.kv.num_layers if self.kv else 0):
            combined = self.kv.layout is KVLayout.COMBINED
            views = [layers.combined[layer]] if combined else layers.separate[layer]
            pairs = [DEFAULT_NAMES.combined_pair(layer)] if combined else DEFAULT_NAMES.cache_pairs(layer)
            yield from ((name, view) for names, view in zip(pairs, views, strict=True) for name in names)
        for kind in self.cache.states.kinds if self.cache.states else ():
            for layer in range(self.cache.states.num_layers):
                past, present = DEFAULT_NAMES.state_pair(kind, layer)
                yield past, self.cache.states.current(kind).layers[layer]
                yield present, self.cache.states.next(kind).layers[layer]

    def poison(self, value):
        for array in self.caches():
            array[...] = value

    def states(self):
        """The current states of all layers: recurrent ones first."""
        states = self.cache.states
        return [self.memory.array(view) for kind in states.kinds for view in states.current(kind).layers] if states else []

    def prepare(self, ids, start, last=None, profile=PREFILL, new=None):
        ids = np.atleast_2d(np.asarray(ids, np.int32))
        slots, width = ids.shape
        wanted = np.asarray([width - 1] * slots if last is None else last, np.int32)
        values = {
            "input_ids": ids,
            "kvcache_start_index": np.asarray(start, np.int32),
            "last_token_ids": wanted.reshape(slots, -1),
        }
        if self.cache.states is not None:
            for slot in np.flatnonzero(np.asarray(start) == 0):
                self.cache.states.reset_slots([int(slot)], stream=self.stream)
            values["new_lengths"] = np.full(slots, width, np.int32) if new is None else np.array(new, np.int32)
        self.engine.use_profile(profile)
        for name, value in values.items():
            self.engine.bind(name, self.to_memory(value))
        self.engine.bind("logits", self.logits)
        for name, view in self.bindings():
            self.engine.bind(name, view)
        for name, spec in self.engine.tensors.items():
            if spec.mode is TensorMode.INPUT:
                self.engine.set_input_shape(name, values[name].shape if name in values else (slots, *spec.shape[1:]))

    def step(self, ids, start, last=None, profile=PREFILL, new=None):
        """Run a step; return the logits ``[A, vocab]``, or ``[A, m, vocab]`` of the tokens ``last`` ``[A, m]``.

        ``new`` ``[A]`` says of a model with states how many tokens are no padding: all if it is left out.
        """
        self.prepare(ids, start, last, profile, new)
        self.engine.enqueue(self.stream)
        if self.cache.states is not None:
            self.cache.swap()
        chosen = np.size(last) if last is not None else len(start)
        logits = self.logits[:chosen].numpy()
        return logits if np.ndim(last) < 2 else logits.reshape(*np.shape(last), -1)

    def run(self, ids, widths):
        """Run one sequence in slot 0 in chunks of these widths; return the logits after each chunk."""
        results, start = [], 0
        for width in widths:
            results.append(self.step(ids[start : start + width], [start], profile=DECODE if width == 1 else PREFILL)[0])
            start += width
        return np.array(results)


def golden(model):
    """Return 24 token ids, and logits ``[vocab]`` by the number of tokens that they follow."""
    file = load_file(GOLDEN / model / "golden.safetensors")
    return file["input_ids"], dict(zip(file["lengths"].tolist(), file["logits"], strict=True))


def random_ids(model_vocab, *shape, seed=0):
    return np.random.default_rng(seed).integers(0, model_vocab, shape)
