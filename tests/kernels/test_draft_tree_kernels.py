"""Trees of draft tokens that grow in any memory: against all paths in float64, and every byte against the definition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.kernels.plain_choice import plain_choice
from trt_kvcache import DeviceTensor, HostMemory
from trt_kvcache.kernels.draft_tree_kernels import TreeInputs, gather_parents_kernel, grow_trees_kernel
from trt_kvcache.kernels.growing_trees import GROWING_TREE
from trt_kvcache.kernels.philox import random_bits
from trt_kvcache.kernels.sampling_kernels import choose_tokens_kernel, token_logprobs_kernel
from trt_kvcache.kernels.sampling_rows import ACTIVE, GREEDY, LOGPROBS, ROW_PARAMS, ROW_RESULT, SamplingRows
from trt_kvcache.kernels.sampling_workspace import SamplingWorkspace
from trt_kvcache.kernels.token_choice import choice_params

VOCAB, SEED = 7, 11

Path = tuple[int, ...]
Model = Callable[[int, Path], np.ndarray]


class Slot(NamedTuple):
    """A slot with a draft, or without one: ``limit`` 0."""

    limit: int
    depth: int
    temperature: float = 0.0
    counter: int = 5


class Scene:
    """Trees of slots, and all that grows them."""

    def __init__(self, memory: Any, stream: Any, slots: Sequence[Slot], *, width: int, vocab: int = VOCAB, depths: bool = True) -> None:
        self.memory, self.stream, self.width, self.slots = memory, stream, width, len(slots)
        trees = np.zeros(len(slots), GROWING_TREE)
        for tree, slot in zip(trees, slots, strict=True):
            tree["limit"], tree["max_depth"] = slot.limit, min(slot.limit, slot.depth)
            tree["params"]["flags"] = ACTIVE * (slot.limit > 0) | GREEDY * (slot.temperature == 0)
            tree["params"]["seed"], tree["params"]["counter"] = SEED, slot.counter
            tree["params"]["scale"] = choice_params(slot.temperature or 1.0).scale
        self.top, rows = max(slot.limit for slot in slots), width * len(slots)
        params = np.zeros((rows, ROW_PARAMS.itemsize), np.uint8)
        first = params.view(ROW_PARAMS)[: len(slots), 0]
        first[...] = trees["params"]
        first["flags"] |= LOGPROBS * (first["flags"] & ACTIVE)
        self.trees = self._made(trees.view(np.uint8).reshape(len(slots), -1))
        self.rows = SamplingRows(self._made(params), self._made(np.full((rows, ROW_RESULT.itemsize), 0xEE, np.uint8)))
        self.found = self._made(np.full((rows, 1 + 2 * self.top), -9, np.int32))
        self.inputs = TreeInputs(
            self._made(np.full(rows, -3, np.int32)),
            self._made(np.full(rows, -3, np.int64)),
            self._made(np.full(rows, -3, np.int32)) if depths else None,
            self.rows.params,
        )
        self.tokens = self._made(np.zeros(rows, np.int32))
        self.workspace = SamplingWorkspace(memory, rows=rows, vocab_size=vocab, edits=False, max_top=self.top, stream=stream)

    def _made(self, array: np.ndarray) -> DeviceTensor:
        return self.memory.to_device(array, stream=self.stream)

    def choose(self, logits: np.ndarray) -> None:
        """Choose after the first rows, and find the likeliest tokens there."""
        count, on_device = len(logits), self._made(logits)
        rows = SamplingRows(self.rows.params[:count], self.rows.results[:count])
        choose_tokens_kernel(on_device, rows, self.tokens[:count], self.workspace, self.stream)
        token_logprobs_kernel(on_device, rows, self.found[:count], self.workspace, self.stream)
        self.memory.synchronize(self.stream)

    def grow(self, level: int) -> None:
        """Add a level."""
        count = self.slots * (1 if level == 1 else self.width)
        chosen = SamplingRows(self.rows.params[:count], self.rows.results[:count])
        grow_trees_kernel(self.trees, self.found[:count], chosen, level, self.inputs, self.stream)

    @property
    def grown(self) -> np.ndarray:
        return self.trees.numpy().view(GROWING_TREE)[:, 0]

    def written(self) -> dict[str, np.ndarray]:
        """Return what the next enqueue reads, by slot and token."""
        named = {"ids": self.inputs.ids, "ancestors": self.inputs.ancestors, "depths": self.inputs.depths}
        arrays = {name: tensor.numpy() for name, tensor in named.items() if tensor is not None}
        return {name: one.reshape(self.slots, self.width) for name, one in (*arrays.items(), ("params", self.params))}

    @property
    def params(self) -> np.ndarray:
        return self.rows.params.numpy().view(ROW_PARAMS)[:, 0]


def paths_of(tree: Any) -> list[Path]:
    found: list[Path] = []
    for token, parent in zip(tree["tokens"][: tree["count"]].tolist(), tree["parents"][: tree["count"]].tolist(), strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def grown(scene: Scene, model: Model, levels: int) -> list[list[list[Path]]]:
    """Return the paths of each slot after each level."""
    after: list[list[list[Path]]] = []
    for level in range(1, levels + 1):
        if level == 1:
            logits = np.stack([model(slot, ()) for slot in range(scene.slots)])
        else:  # what the tree does not have is not read
            logits = np.full((scene.slots, scene.width, VOCAB), np.nan, np.float32)
            for slot, paths in enumerate(after[-1]):
                for token, path in enumerate(paths):
                    logits[slot, token] = model(slot, path)
            logits = logits.reshape(-1, VOCAB)
        scene.choose(logits)
        scene.grow(level)
        after.append([paths_of(tree) for tree in scene.grown])
    return after


def choice(slot: Slot, logits: np.ndarray, depth: int) -> int | None:
    """Return the token that the request chooses after ``depth`` tokens of a draft; None for logits that are not finite."""
    if not np.isfinite(logits[np.argmax(logits)]):
        return None
    if slot.temperature == 0:
        return int(np.argmax(logits))
    uniform = random_bits(SEED, slot.counter + depth) / 2**53
    return plain_choice(logits, temperature=slot.temperature, uniform=uniform)


def expected(slot: Slot, model: Callable[[Path], np.ndarray]) -> tuple[list[Path], list[Path]]:
    """Return the chosen path, and the best of all other paths. A chosen token has the probability of the likeliest one."""
    main: list[Path] = []
    found: list[tuple[float, Path]] = []
    last: list[tuple[float, Path]] = [(0.0, ())]
    depth = min(slot.limit, slot.depth)
    for level in range(depth):
        following = []
        for score, path in last:
            chosen = choice(slot, model(path), level)
            if chosen is None:
                continue
            logits = model(path).astype(np.float64)
            best = np.lexsort((np.arange(VOCAB), -logits)).tolist()
            scores = logits[best] - logits.max() - np.log(np.exp(logits - logits.max()).sum())
            tokens = [chosen, *(token for token in best if token != chosen)]
            following += [(score + one, (*path, token)) for token, one in zip(tokens, scores.tolist(), strict=True) if one > -np.inf]
            if path == (main[-1] if main else ()) and len(main) == level:
                main.append((*path, chosen))
        found += following
        last = following
    others = [path for _, path in sorted(found, key=lambda one: -one[0]) if path not in main]
    return main, others[: max(slot.limit - len(main), 0)]


def random_model(seed: int, damage: Callable[[np.ndarray, Path], None] = lambda logits, path: None) -> Model:
    """Return random logits after each path."""

    def logits(slot: int, path: Path) -> np.ndarray:
        made = (np.random.default_rng([seed, slot, *path]).normal(size=VOCAB) * 2).astype(np.float32)
        damage(made, path)
        return made

    return logits


def without_some(logits: np.ndarray, path: Path) -> None:
    logits[[1, 4, (2 + sum(path)) % VOCAB]] = -np.inf


def bad_after_two(logits: np.ndarray, path: Path) -> None:
    """A token of the second level that has a NaN, another with nothing else than -inf, and one with inf."""
    if len(path) == 1 and path[0] < 3:
        logits[[3, 4]] = np.nan
        if path[0]:
            logits[:] = -np.inf
        if path[0] == 2:
            logits[1] = np.inf


def bad_at_once(logits: np.ndarray, path: Path) -> None:
    logits[sum(path) % VOCAB] = np.nan


DAMAGE = (lambda logits, path: None, without_some, bad_after_two, bad_at_once)

SLOTS = {
    "one": [Slot(8, 3)],
    "sampled": [Slot(12, 4, 1.3, 2**40), Slot(9, 3, 0.8)],
    "different, and slots without a draft": [Slot(0, 0), Slot(3, 4), Slot(20, 2, 1.0), Slot(0, 0), Slot(1, 4), Slot(15, 3)],
    "chains": [Slot(4, 15), Slot(3, 3, 1.5)],
    "all that there are": [Slot(63, 2), Slot(63, 3, 2.0)],
}


@pytest.mark.parametrize("damage", DAMAGE, ids=["finite", "without some", "bad after two", "bad at once"])
@pytest.mark.parametrize("name", [*list(SLOTS)[:-1], pytest.param(list(SLOTS)[-1], marks=pytest.mark.long)])
def test_the_chosen_path_and_the_best_of_all_others(memory, stream, name, damage):
    slots = SLOTS[name]
    width, levels = max(slot.limit for slot in slots) + 1, max(min(slot.limit, slot.depth) for slot in slots)
    scene, model = Scene(memory, stream, slots, width=width), random_model(len(name), damage)
    after = grown(scene, model, levels)
    for index, (slot, tree) in enumerate(zip(slots, scene.grown, strict=True)):
        main, others = expected(slot, lambda path: model(index, path))  # noqa: B023
        paths = after[-1][index]
        assert paths[: len(main)] == main
        assert tree["num_chosen"] == len(main)
        assert set(paths[len(main) :]) == set(others)
        assert len(set(paths)) == len(paths) == len(main) + len(others)


@pytest.mark.parametrize("depths", [True, False])
@pytest.mark.parametrize("name", ["sampled", "different, and slots without a draft"])
def test_inputs_of_the_next_enqueue(memory, stream, name, depths):
    slots = SLOTS[name]
    model = random_model(3)
    for levels in (1, 2):
        scene = Scene(memory, stream, slots, width=64, depths=depths)
        paths, written = grown(scene, model, levels)[-1], scene.written()
        assert ("depths" in written) == depths
        for index, slot in enumerate(slots):
            own, count = paths[index], len(paths[index])
            of_slot = {name: one[index] for name, one in written.items()}
            assert of_slot["ids"].tolist() == [*(path[-1] for path in own), *[0] * (64 - count)]
            bits = [sum(1 << own.index(path[: depth + 1]) for depth in range(len(path))) for path in own]
            assert of_slot["ancestors"].view(np.uint64).tolist() == [*bits, *(1 << token for token in range(count, 64))]
            if depths:
                assert of_slot["depths"].tolist() == [*(len(path) - 1 for path in own), *[0] * (64 - count)]
            goes_on = [len(path) == levels < min(slot.limit, slot.depth) for path in own]
            flags = ACTIVE | LOGPROBS | GREEDY * (slot.temperature == 0)
            assert of_slot["params"]["flags"].tolist() == [*(flags * one for one in goes_on), *[0] * (64 - count)]
            assert set(of_slot["params"]["counter"].tolist()) == {slot.counter + levels}


def test_host_and_device_keep_the_same_of_equal_tokens(memory, stream):
    """Log-probabilities of few values, and tokens in any order: ties among tokens of the tree, of one parent and of several."""
    slots = [Slot(63, 9), Slot(31, 5), Slot(0, 0), Slot(12, 8), Slot(40, 3), Slot(2, 2)]
    host = HostMemory()
    scenes = [Scene(*place, slots, width=64, vocab=200) for place in ((host, host.create_stream()), (memory, stream))]
    rng = np.random.default_rng(0)
    for level in range(1, 10):
        rows = len(slots) * 64
        found = np.zeros((rows, 127), np.int32)
        results = np.zeros(rows, ROW_RESULT)
        for row in range(rows):
            ids = rng.permutation(200)[:63]
            logprobs = -np.sort(rng.integers(0, 12, 63)).astype(np.float32) / 4
            logprobs[rng.integers(1, 4) :] -= 4  # so that trees become deep, and tokens at all of their places have successors
            logprobs[rng.integers(5, 63) :] = -np.inf
            count = int(rng.integers(4, 64))  # of a small vocabulary
            found[row, 1:64], found[row, 64:] = np.where(np.arange(63) < count, ids, -1), logprobs.view(np.int32)
            results[row] = (int(ids[0] if row % 3 else rng.integers(0, 200)), int(row % 11 == 7), 0, 0)
        for scene in scenes:
            scene.found = scene.memory.to_device(found, stream=scene.stream)
            of_rows = scene.memory.to_device(results.view(np.uint8).reshape(rows, -1), stream=scene.stream)
            scene.rows = SamplingRows(scene.rows.params, of_rows)
            scene.grow(level)
        one, other = (scene.grown for scene in scenes)
        for slot in range(len(slots)):
            count = one[slot]["count"]
            for field in GROWING_TREE.names:
                ends = slice(count) if one[slot][field].shape else ()
                np.testing.assert_array_equal(one[slot][field][ends], other[slot][field][ends], f"{field} of slot {slot}, level {level}")
        for (what, before), after in zip(scenes[0].written().items(), scenes[1].written().values(), strict=True):
            np.testing.assert_array_equal(before, after, f"{what}, level {level}")
    assert one["count"].tolist() == [63, 31, 0, 12, 40, 2]
    assert one["parents"].max() > 32


@pytest.mark.parametrize(("width", "dtype"), [(7, "float16"), (640, "float16"), (4096, "float32")])
def test_rows_of_parents(memory, stream, width, dtype):
    rng = np.random.default_rng(width)
    trees = np.zeros(3, GROWING_TREE)
    trees["count"] = 5, 0, 6
    trees["parents_before"] = rng.integers(-1, 6, (3, 64))
    trees["parents_before"][0, :2] = -1, 5
    own, last, out = (rng.normal(size=(count, width)).astype(dtype) for count in (3, 18, 18))
    wanted = out.copy()
    for slot in (0, 2):
        for token, parent in enumerate(trees["parents_before"][slot, : trees["count"][slot]].tolist()):
            wanted[6 * slot + token] = own[slot] if parent < 0 else last[6 * slot + parent]
    made = [memory.to_device(one, stream=stream) for one in (trees.view(np.uint8).reshape(3, -1), own, last, out)]
    gather_parents_kernel(*made, stream)
    np.testing.assert_array_equal(made[3].numpy(), wanted)
