"""Trees of draft tokens in the torch engine: the logits of each token are those of its path, run as a chain."""

from __future__ import annotations

from contextlib import contextmanager
from random import Random

import numpy as np
import pytest

from tests.helpers.assertions import SAME_SUMS, assert_close
from tests.helpers.mixed_layers import RandomCheckpoint, mixed_model
from tests.helpers.recording import poison
from tests.helpers.token_trees import path_to, random_parents
from tests.paths import GOLDEN
from tests.session.test_verify_trees import MODELS
from tests.torch_engine.needs_torch import need_torch

need_torch()

import torch  # noqa: E402

from tests.torch_engine.fake_cuda import FakeCuda, FakeCudaDevice  # noqa: E402
from trt_kvcache import HostMemory, InferenceSession, KVCacheManager  # noqa: E402
from trt_kvcache.engine.decoder_cache import cache_config  # noqa: E402
from trt_kvcache.kernels.token_tree import positions_and_distances  # noqa: E402
from trt_kvcache.torch_engine import TorchEngine, engine  # noqa: E402
from trt_kvcache.torch_engine.attention import MaskedAttention  # noqa: E402
from trt_kvcache.torch_engine.token_trees import TokenTrees  # noqa: E402

SIZES = {"max_batch_size": 3, "max_sequence_length": 40}


@contextmanager
def session_of(name, **options):
    """Open a golden model, or that whose layers all differ, with heads of 256 and 512 too."""
    if name != "mixed":
        with InferenceSession.from_model(
            GOLDEN / name, engine="torch", dtype="float32", max_prefill_length=24, **SIZES, **options
        ) as session:
            yield session
        return
    model = mixed_model(256, 16, 512, 64)
    kv, memory = cache_config(model, **SIZES, dtype="float32", **options), HostMemory()
    ours = TorchEngine.open(RandomCheckpoint(model), kv=kv, max_prefill_length=24, max_logits_per_slot="all", memory=memory, **options)
    with InferenceSession(ours, KVCacheManager(kv, memory=memory)) as session:
        yield session


def check(session, plain, seed, lengths=(9, 1, 5), rounds=2, tolerance=SAME_SUMS):
    """Verify trees after prompts, and compare with prompts that end with a path; keep one path in each slot."""
    random = Random(seed)
    vocab = session.vocab_size
    tokens = [[random.randrange(3, vocab) for _ in range(length)] for length in lengths]
    session.prefill(tokens)
    for turn in range(rounds):
        rows = [[random.randrange(3, vocab) for _ in range(random.randint(1, 9))] for _ in tokens]
        parents = [random_parents(random, len(row)) for row in rows]
        if turn == 0:  # a tree that is deeper than windows, in which depths and rows differ
            rows[0], parents[0] = [random.randrange(3, vocab) for _ in range(13)], [-1, *((place - 1) // 2 * 2 for place in range(1, 13))]
        found = session.verify(rows, parents)
        paths = []
        for slot, row in enumerate(rows):
            for index in range(len(row)):
                [expected] = plain.prefill([[*tokens[slot], *(row[place] for place in path_to(parents[slot], index))]])
                assert_close(found[slot, index], expected, tolerance)
            paths.append(path_to(parents[slot], random.randrange(len(row))))
            tokens[slot] += [row[place] for place in paths[-1]]
        session.accept(paths=paths)
    following = session.decode([3, 4, 5])
    for slot, row in enumerate(tokens):
        assert_close(following[slot], plain.prefill([[*row, 3 + slot]])[0], tolerance)


@pytest.mark.parametrize("attention", ["native", "plugin"])
@pytest.mark.parametrize("name", ["mixed", *MODELS])
def test_logits_of_each_token_are_those_of_its_path(name, attention):
    with session_of(name, attention=attention) as session, session_of(name, attention=attention) as plain:
        poison(session.cache)
        check(session, plain, name)


def test_slots_of_equal_length_are_batched():
    with session_of("gemma3") as session, session_of("gemma3") as plain:
        check(session, plain, 1, lengths=(6, 6, 6))


@pytest.mark.parametrize(("kv_dtype", "tolerance"), [("fp8", 0.05), ("int8", 0.01)])
@pytest.mark.parametrize("name", ["gemma2-bias", "gemma4-shared", "gpt_oss"])
def test_quantized_kv(name, kv_dtype, tolerance):
    """Sums in another order may round a value to the next quantized one."""
    with session_of(name, kv_dtype=kv_dtype) as session, session_of(name, kv_dtype=kv_dtype) as plain:
        check(session, plain, name, tolerance=tolerance)


@pytest.mark.parametrize("name", ["mixed", "gemma2-bias", "gemma4-shared", "gpt_oss"])
def test_attention_under_a_mask(name, monkeypatch):
    with session_of(name) as plain:
        run = plain.prefill
        with monkeypatch.context() as patch:
            patch.setattr(engine, "LiveRowsAttention", MaskedAttention)
            with session_of(name) as session:

                def prefill(tokens):
                    with monkeypatch.context() as inner:
                        inner.setattr(engine, "LiveRowsAttention", LIVE)
                        return run(tokens)

                plain.prefill = prefill
                check(session, plain, name)


LIVE = engine.LiveRowsAttention


@pytest.mark.parametrize("name", ["mixed", "gemma3"])
def test_trees_and_chains_of_one_shape_have_graphs_of_their_own(name, monkeypatch):
    cuda, row, tree = FakeCuda(monkeypatch), [4, 9, 8, 7, 6], [-1, 0, 0, 2, 2]
    with session_of(name) as exact:
        expected = [exact.prefill([[5, 6, 7]]), exact.verify([row]), exact.verify([row], [tree]), exact.verify([row], [[-1, 0, 1, 1, 0]])]
    monkeypatch.setattr(engine, "torch_device", lambda memory: FakeCudaDevice(cuda))
    with session_of(name) as session:
        assert_close(session.prefill([[5, 6, 7]]), expected[0])
        for _ in range(3):
            for parents, logits in zip((None, [tree], [[-1, 0, 1, 1, 0]]), expected[1:], strict=True):
                assert_close(session.verify([row], parents), logits)
        assert (cuda.captures, cuda.replays) == (2, 7), "a chain runs eagerly once, and so do trees"


@pytest.mark.parametrize("window", [None, 1, 3])
def test_masks_are_those_of_the_kernels(window):
    random = np.random.default_rng(3)
    ancestors = random.integers(-(2**63), 2**63, (2, 64), np.int64)
    trees = TokenTrees(torch.from_numpy(ancestors))
    past = (5, 9)
    keys = torch.stack([torch.arange(80) - start for start in past])
    seen = trees.seen(keys, window)
    for slot, start in enumerate(past):
        positions, distance = positions_and_distances(start, 64, ancestors[slot])
        expected = (distance >= 0) & (distance < (window or 99))
        assert np.array_equal(trees.depths[slot].numpy() + start, positions)
        assert np.array_equal(seen[slot, 0, :, : start + 64].numpy(), expected)
        assert not seen[slot, 0, :, start + 64 :].any()
        assert torch.equal(trees.seen(keys[slot], window, slice(slot, slot + 1))[0], seen[slot])
