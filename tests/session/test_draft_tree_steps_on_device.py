"""Trees that grow on the emulated device, or a GPU: no launch or copy is waited for before the last level, and trees are the host's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from tests.helpers.recording import VOCAB, engine_tensors, kv_config
from trt_kvcache import DeviceTensor, DraftTree, KVCacheManager, SamplingParams
from trt_kvcache.engine.decoder_profiles import decoder_profiles
from trt_kvcache.engine.names import DEFAULT_NAMES as NAMES
from trt_kvcache.engine.step_ancestors import StepAncestors, ancestor_bits
from trt_kvcache.generation.growing_tree import GrowingTree
from trt_kvcache.generation.request import Request
from trt_kvcache.kernels.embedding_kernels import embed_kernel
from trt_kvcache.sequences.prompt_cache import PromptCache
from trt_kvcache.session.batch import Batch
from trt_kvcache.session.draft_steps import Drafted
from trt_kvcache.session.draft_tree_steps import DraftTreeSteps
from trt_kvcache.session.runner import Runner

SLOTS, TREE = 4, 12


class TableEngine:
    """The logits after a token are a row of a table: in any memory, without a wait. It copies what it reads besides token ids."""

    def __init__(self, kv: Any, memory: Any, table: np.ndarray, *, is_input: bool) -> None:
        self.tensors, self.memory = engine_tensors(kv, more_logits=True), memory
        self.profiles = decoder_profiles(max_batch_size=kv.max_batch_size, max_prefill_length=16, max_logits_per_slot=TREE)
        stream = memory.create_stream()
        self.table = memory.to_device(table, stream=stream)
        memory.synchronize(stream)
        self.ancestors = StepAncestors(memory, max_slots=kv.max_batch_size, is_input=is_input)
        self.seen: list[dict[str, Any]] = []
        self._profile = 0
        self._bound: list[dict[str, Any]] = [{} for _ in self.profiles]
        self._shapes: list[dict[str, tuple[int, ...]]] = [{} for _ in self.profiles]

    def use_profile(self, index: int) -> None:
        self._profile = index

    def bind(self, name: str, tensor: DeviceTensor) -> None:
        self._bound[self._profile][name] = tensor

    def set_input_shape(self, name: str, shape: Sequence[int]) -> None:
        self._shapes[self._profile][name] = tuple(shape)

    def enqueue(self, stream: Any) -> None:
        shapes = self._shapes[self._profile]
        ids, start, last = (self._tensor(name, shapes[name]) for name in (NAMES.input_ids, NAMES.kvcache_start_index, NAMES.last_token_ids))
        (slots, width), count = ids.shape, last.shape[0] * last.shape[1]
        ids_of_rows = ids.reshape(slots * width)
        if count == slots * width:  # else a prompt, whose logits nobody reads
            embed_kernel(self.table, ids_of_rows, self._tensor(NAMES.logits, (count, VOCAB)), stream)
        read = {"last": last.reshape(count), "ids": ids_of_rows, "start": start}
        if last.shape[1] > 1:
            assert self.ancestors.in_use
            read["ancestors"], depths = self.ancestors.written_on_device(slots, width)
            read |= {} if depths is None else {"depths": depths}
        self.seen.append({name: self._copied(tensor, stream) for name, tensor in read.items()})

    def _copied(self, tensor: DeviceTensor, stream: Any) -> DeviceTensor:
        copy = DeviceTensor(
            self.memory.allocate(tensor.shape[0] * np.dtype(tensor.dtype).itemsize, stream=stream), shape=tensor.shape, dtype=tensor.dtype
        )
        self.memory.copy_rows(copy, tensor, [(0, 0, len(tensor))], stream=stream)
        return copy

    def _tensor(self, name: str, shape: tuple[int, ...]) -> DeviceTensor:
        tensor = self._bound[self._profile][name]
        return DeviceTensor(tensor.allocation, shape=shape, dtype=tensor.dtype, offset=tensor.offset)

    def close(self) -> None:
        self.ancestors.close()


def expected(table: np.ndarray, one: Drafted, after: int) -> DraftTree:
    """Return the tree of a slot after a token, grown on the host."""
    growing = GrowingTree(limit=min(one.tree_limit, TREE), depth=one.limit)
    while growing.frontier:
        rows = table[[growing.tree.tokens[index] if index >= 0 else after for index in growing.frontier]]
        growing.grow(rows, [one.request.guess(row, growing.depth) if np.isfinite(row.max()) else None for row in rows])
    return growing.tree


PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=1.1, seed=7, top_p=0.95),
    SamplingParams(temperature=0.6, seed=2**40, repetition_penalty=1.3, logprobs=3),
    SamplingParams(temperature=2.0, seed=3, min_p=0.01),
]


def drafts(slots: Mapping[int, tuple[int, int, int]]) -> dict[int, Drafted]:
    """Return drafts by slot: a token, levels and tokens of a tree."""
    requests = [Request(index, [1], params, tokenizer=None, eos_token_ids=()) for index, params in enumerate(PARAMS)]
    return {slot: Drafted(requests[slot], (token,), levels, limit) for slot, (token, levels, limit) in slots.items()}


@pytest.mark.parametrize("is_input", [False, True])
def test_trees_of_several_steps(memory: Any, is_input: bool) -> None:
    table = np.random.default_rng(0).normal(0, 3, (VOCAB, VOCAB)).astype(np.float32)
    table[::17] = np.nan
    table[5::17] = -np.inf
    table[5::17, :4] = [1, 1, 2, 0]
    kv = kv_config(slots=SLOTS, limit=64)
    engine = TableEngine(kv, memory, table, is_input=is_input)
    cache = KVCacheManager(kv, memory=memory)
    runner = Runner(engine, cache)
    batch = Batch(runner, PromptCache(cache))
    batch.activate_all()
    steps = DraftTreeSteps(runner, batch, vocab_size=VOCAB, max_tokens=TREE)
    steps.on_device = True
    asked: list[dict[int, tuple[int, int, int]]] = [
        {0: (7, 3, 12), 1: (8, 4, 7), 3: (5, 2, 12)},
        {1: (9, 3, 5), 2: (11, 3, 4)},
        {0: (34, 3, 12), 2: (1, 1, 12)},
        {0: (3, 1, 4)},
        {0: (3, 15, 4), 1: (4, 2, 3), 2: (2, 3, 9), 3: (6, 4, 8)},
    ]
    for slots in asked:
        engine.seen.clear()
        drafted = drafts(slots)
        found = steps.run(drafted)
        assert found == {slot: expected(table, one, one.tokens[0]) for slot, one in drafted.items()}
        count, width = max(slots) + 1, max(limit for _, _, limit in slots.values())
        levels = max(min(depth, limit) for _, depth, limit in slots.values())
        assert len(engine.seen) == levels
        for seen in engine.seen[1:]:
            read = {name: tensor.numpy().reshape(count, -1) for name, tensor in seen.items()}
            assert read["last"].tolist() == [[*range(width)]] * count
        if levels > 1:  # of trees that did not grow in the last level, all is known
            for slot, (_, depth, limit) in slots.items():
                tree = found[slot]
                if min(depth, limit) < levels:
                    assert read["ids"][slot, : len(tree)].tolist() == list(tree.tokens)
                    assert read["ancestors"][slot, : len(tree)].tolist() == ancestor_bits(tree.parents)
                    if is_input:
                        assert read["depths"][slot, : len(tree)].tolist() == [depth - 1 for depth in tree.depths]
    assert batch.held == [4, 3, 3, 2]
    batch.run([[1] * 50, [], [], []])
    engine.seen.clear()
    drafted = drafts({1: (9, 3, 5), 2: (11, 3, 12)})
    found = steps.run(drafted)
    assert found == {slot: expected(table, one, one.tokens[0]) for slot, one in drafted.items()}
    assert all((one["start"].numpy() <= 64 - len(one["ids"]) // len(one["start"])).all() for one in engine.seen), "a slot has no room"
    assert batch.held == [54, 4, 4, 2]
    assert cache.kv_cache_lengths.numpy().tolist() == batch.held
    for owner in (steps, runner, cache, engine):
        owner.close()
