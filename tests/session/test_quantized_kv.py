"""Sessions over K and V in fp8 and int8, with each kind of scales: the same logits however tokens come into the cache, and near 16 bits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.helpers.assertions import assert_close
from tests.paths import GOLDEN
from tests.session.reference_sessions import OPTIONS
from trt_kvcache import Checkpoint, HostMemory, InferenceSession
from trt_kvcache.cache.edge_llm import make_cache
from trt_kvcache.engine.decoder_cache import decoder_cache_config
from trt_kvcache.engine.quantized_kv import QuantizedKV
from trt_kvcache.errors import ConfigError, SnapshotError
from trt_kvcache.reference import ReferenceEngine
from trt_kvcache.sequences.prompt_cache import PromptCache

S = 27  # not a multiple of 4
KINDS = [(dtype, scales) for dtype in ("fp8", "int8") for scales in ("tensor", "head", "token")]
kinds = pytest.mark.parametrize("kind", KINDS, ids="-".join)
by_token = pytest.mark.parametrize("kind", [("fp8", "token"), ("int8", "token")], ids="-".join)
#: Three heads; windows; states beside attention.
models = pytest.mark.parametrize("name", ["llama-linear", "gemma2-bias", "granitemoehybrid-bias"])

GREEDY = {"max_new_tokens": 4, "temperature": 0.0, "ignore_eos": True}

#: Sums in another order may move an element from one stored value to the next.
SAME = 1e-2


@cache
def tokens_of(name):
    return tuple(load_file(GOLDEN / name / "golden.safetensors")["input_ids"].tolist())


@cache
def largest(name):
    """The largest magnitudes [2, H] of K and of V of each attention layer of the tokens, in float32."""
    with InferenceSession.from_model(GOLDEN / name, engine="reference", dtype="float32", max_sequence_length=S) as session:
        session.prefill([tokens_of(name)[: S - 1]])
        views = [view for group in session.cache.kv_head_dim_groups for view in group.layer_infos.views]
        return [np.abs(view.numpy()[0, :, :, : S - 1]).max(axis=(2, 3)) for view in views]


def quantized(name, dtype, scales):
    if scales == "token":
        return QuantizedKV(dtype)
    by_head = [found / {"fp8": 448, "int8": 127}[dtype] for found in largest(name)]
    if scales == "head":
        return QuantizedKV(dtype, scales, [(tuple(k), tuple(v)) for k, v in by_head])
    return QuantizedKV(dtype, scales, [(k.max(), v.max()) for k, v in by_head])


@dataclass
class Options:
    slots: int = 3
    width: int = 9
    logits: int = 1
    prompt_cache: int = 0


def open_session(name, kind, dtype="float32", **options):
    """A session of the reference engine; static scales are given to its cache."""
    given = Options(**options)
    with Checkpoint.open(GOLDEN / name) as checkpoint:
        sizes = {"max_batch_size": given.slots, "max_sequence_length": S}
        config = decoder_cache_config(
            checkpoint.config, **sizes, dtype=dtype, attention="plugin", quantized=kind and quantized(name, *kind)
        )
        engine = ReferenceEngine(
            checkpoint, kv=config, dtype=dtype, max_prefill_length=given.width, max_logits_per_slot=given.logits, attention="plugin",
            memory=HostMemory(),
        )  # fmt: skip
    kv = make_cache(config, memory=engine.memory)
    poison_rows(kv)
    return InferenceSession(engine, kv, prompt_cache=PromptCache(kv, max_bytes=given.prompt_cache))


def poison_rows(kv, first=0):
    """Fill K, V and their scales by token of slots from ``first`` on with what must not be read."""
    memory = kv.memory
    for group in kv.kv_head_dim_groups:
        for view in group.layer_infos.views:
            memory.array(view)[first:] = np.nan if view.dtype != "int8" else 127
    if kv.kv_scale_rows is not None:
        for view in kv.kv_scale_rows.views:
            memory.array(view)[first:] = np.nan


def live_bytes(session, slot):
    """The stored rows of a slot, and their scales by token."""
    return stored(session.cache, slot, len(session.tokens(slot)))


def stored(kv, slot, count):
    saved = kv.capture_kv_cache(slot, count, stream=kv.memory.create_stream())
    return [tensor.numpy()[:, :, :count].tobytes() for tensor in saved]


@models
@kinds
def test_splits_agree(name, kind):
    tokens = tokens_of(name)[:20]
    with open_session(name, kind, width=20, slots=1) as whole, open_session(name, kind, width=3, slots=1) as parts:
        expected = whole.prefill([tokens])
        parts.prefill([tokens[:11]])
        parts.append([tokens[11:17]])
        for token in tokens[17:19]:
            parts.decode([token])
        assert_close(parts.decode([tokens[19]]), expected, SAME)
        assert np.isfinite(expected).all()


@models
@kinds
def test_ragged_batches_over_poison(name, kind):
    tokens = tokens_of(name)
    prompts = [tokens[:7], tokens[3:4], tokens[5:18]]
    with open_session(name, kind) as together:
        found = together.prefill(prompts)
        found_next = together.decode([1, 2, 3])
        for slot, prompt in enumerate(prompts):
            with open_session(name, kind, slots=1) as alone:
                assert_close(found[slot], alone.prefill([prompt])[0], SAME)
                assert_close(found_next[slot], alone.decode([slot + 1])[0], SAME)


#: Largest error of logits over largest logit, beside float32 K and V: with room for other CPUs.
LIMITS = {("fp8", "token"): 0.08, ("fp8", "head"): 0.08, ("fp8", "tensor"): 0.08, ("int8", "token"): 0.012, ("int8", "head"): 0.02}
LIMITS["int8", "tensor"] = 0.03


@models
@kinds
def test_logits_are_near_those_of_more_bits(name, kind):
    tokens = tokens_of(name)
    with open_session(name, kind, slots=1, width=S) as session, open_session(name, None, slots=1, width=S) as exact:
        found, expected = (one.prefill([tokens[: S - 1]]) for one in (session, exact))
    error = np.abs(found - expected).max() / np.abs(expected).max()
    assert 0 < error < LIMITS[kind], error


@by_token
def test_a_reused_slot_has_no_old_scales(kind):
    """The second prompt is a thousand times smaller in no layer, but its rows are others: an old scale would show."""
    tokens = tokens_of("llama-linear")
    with open_session("llama-linear", kind) as used, open_session("llama-linear", kind) as fresh:
        used.prefill([tokens[:20], tokens[4:9]])
        used.prefill([tokens[9:15]])
        fresh.prefill([tokens[9:15]])
        assert live_bytes(used, 0) == live_bytes(fresh, 0)


@kinds
def test_rewind_and_drafts(kind):
    tokens = tokens_of("llama-linear")
    with open_session("llama-linear", kind, logits=6) as session, open_session("llama-linear", kind, logits=6) as other:
        for one in (session, other):
            one.prefill([tokens[:6], tokens[2:5]])
        verified = session.verify([tokens[6:10], [9, 8, 7]])
        session.accept([2, 3])
        expected = other.append([tokens[6:8], [9, 8, 7]])
        assert_close(verified[0][1], expected[0], SAME)
        assert_close(verified[1][2], expected[1], SAME)
        session.rewind(1, 4)
        other.rewind(1, 4)
        assert_close(session.decode([5, 6]), other.decode([5, 6]), SAME)


@kinds
def test_compaction(kind):
    tokens = tokens_of("llama-linear")
    with open_session("llama-linear", kind) as session:
        session.prefill([tokens[:3], tokens[4:11], tokens[6:19]])
        stream = session.cache.memory.create_stream()
        before = live_bytes(session, 2)
        session.cache.compact_batch([-1, -1, 0], 3, 1, stream=stream)
        assert stored(session.cache, 0, 13) == before
        poison_rows(session.cache, first=1)
        session.cache.restore_kv_cache(session.cache.capture_kv_cache(0, 13, stream=stream), 2, stream=stream)
        assert stored(session.cache, 2, 13) == before


@kinds
def test_the_prompt_cache(kind):
    tokens = tokens_of("llama-linear")
    following = [[*tokens[:11], 3, 4], tokens[2:5]]
    with open_session("llama-linear", kind, prompt_cache=1 << 20) as session, open_session("llama-linear", kind) as fresh:
        session.prefill([tokens[:14]])
        before = stored(session.cache, 0, 11)
        session.prefill([tokens[1:3], tokens[5:8], tokens[7:9]])
        poison_rows(session.cache)
        assert_close(session.prefill(following), fresh.prefill(following), SAME)
        assert session.statistics.reused_tokens == 11
        assert stored(session.cache, 0, 11) == before


def load(kind, **options):
    given = {"engine": OPTIONS["engine"], "dtype": "float32", "max_batch_size": 2, "max_sequence_length": S, **options}
    dtype, scales = kind or (None, None)
    return InferenceSession.from_model(GOLDEN / "llama-linear", kv_dtype=dtype, kv_scales=scales, **given)


@by_token
def test_snapshots(kind, tmp_path):
    tokens = tokens_of("llama-linear")
    with load(kind) as session:
        session.prefill([tokens[:9], tokens[3:16]])
        snapshot = session.save_snapshot(tmp_path / "a", 1)
        assert list(snapshot.slot_format.tensors(13))[-4:] == ["k_scale_0", "v_scale_0", "k_scale_1", "v_scale_1"]
        before = stored(session.cache, 1, 12)
    with load(kind) as other:
        list(other.resume(tmp_path / "a", max_new_tokens=1))
        assert stored(other.cache, 0, 12) == before
    for wrong in (None, ("int8" if kind[0] == "fp8" else "fp8", "token")):
        with load(wrong) as other, pytest.raises(SnapshotError, match="dtype of K and V: expected "):
            list(other.resume(tmp_path / "a", max_new_tokens=1))


@by_token
def test_requests_through_a_queue_are_those_of_one_at_a_time(kind):
    tokens = tokens_of("llama-linear")
    prompts = [tokens[:7], tokens[2:9], tokens[5:6], tokens[4:15]]
    with load(kind) as session:
        handles = [session.submit(list(prompt), **GREEDY) for prompt in prompts]
        while any(not handle.finished for handle in handles):
            session.step()
        found = [list(handle.tokens) for handle in handles]
    with load(kind, max_batch_size=1) as alone:
        expected = [[event.token for event in alone.generate([list(prompt)], **GREEDY)] for prompt in prompts]
    assert found == expected


def test_both_names_of_fp8_are_one_type():
    made = []
    for name in ("fp8", "float8_e4m3fn"):
        with InferenceSession.from_model(GOLDEN / "llama-linear", engine="reference", kv_dtype=name) as session:
            made.append(session.cache_config)
    assert made[0] == made[1]
    assert made[0].kv.dtype == "float8_e4m3fn"


REFUSED = [
    ({"kv_dtype": "int4"}, "kv_dtype: expected one of fp8, float8_e4m3fn, int8, got 'int4'."),
    ({"kv_dtype": "fp8", "kv_scales": "row"}, "kv_scales: expected one of tensor, head, token, got 'row'."),
    ({"kv_scales": "token"}, "kv_scales: expected kv_dtype with it, fp8 or int8, got token alone."),
    ({"kv_dtype": "int8", "attention": "native"}, "attention: expected plugin for K and V in int8, got native."),
    (
        {"kv_dtype": "fp8", "kv_scales": "head"},
        "kv_scales: expected token, as the checkpoint has no static scales of K and V in fp8, got head.",
    ),
]


@pytest.mark.parametrize(("options", "text"), REFUSED, ids=[text[:40] for _, text in REFUSED])
def test_what_is_refused(options, text):
    with pytest.raises(ConfigError) as caught:
        InferenceSession.from_model(GOLDEN / "llama-linear", **{"engine": "reference", **options})
    assert str(caught.value) == text
