"""Sessions whose K and V are one tensor per layer do what those with two do, token by token, over dead rows of NaN."""

from pathlib import Path

import numpy as np
import pytest
from fakes import cache_rows, kv_config, poison, recorded

from trt_kvcache import InferenceSession, KVLayout, SamplingParams, opening
from trt_kvcache.errors import ConfigError

GOLDEN = Path(__file__).parent / "golden"
SHIPPED = Path(__file__).parents[1] / "examples" / "tiny-llama"
FAMILIES = sorted(path.parent for path in GOLDEN.glob("*/golden.npz"))
TEXTS = ["Alice was beginning", "The rabbit-hole went straight on", "Down, down"]
IDS = [[5, 9, 3, 17, 2, 30, 11], [8, 1], [12, 4, 40, 6]]


def open_both(folder, **options):
    sizes = {"max_batch_size": 3, "max_sequence_length": 48, "max_prefill_length": 5, **options}
    return [InferenceSession.from_model(folder, engine="reference", attention=each, **sizes) for each in ("native", "plugin")]


def events_of(session, prompts, params):
    poison(session.cache)
    found = []
    for event in session.generate(prompts, params):
        found.append((event.index, event.token, event.text, event.finish_reason))
        poison(session.cache)
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("folder", [*FAMILIES, SHIPPED], ids=lambda path: path.name)
def test_generation_with_compaction(folder, dtype):
    params = [SamplingParams(max_new_tokens=count, ignore_eos=True) for count in (20, 3, 9)]
    native, plugin = open_both(folder, dtype=dtype)
    with native, plugin:
        assert plugin.cache.kv_config.layout is KVLayout.COMBINED
        expected, found = (events_of(session, TEXTS if folder == SHIPPED else IDS, params) for session in (native, plugin))
        assert len(expected) == 32
        assert found == expected
        logits = [session.append([[7, 8], [], []][: len(session.cache.host_kv_cache_lengths)]) for session in (native, plugin)]
        if dtype == "float32":
            np.testing.assert_allclose(logits[1], logits[0], rtol=0, atol=1e-5)


def test_queue_prompt_cache_and_turns():
    def program(session):
        handles = [session.submit(text, max_new_tokens=5 + 4 * index) for index, text in enumerate([*TEXTS, TEXTS[0]])]
        while session.step():
            poison(session.cache)
        said = [(handle.text, handle.finish_reason) for handle in handles]
        turn = "".join(event.text for event in session.generate(TEXTS[1], max_new_tokens=6, temperature=0.9, seed=3))
        again = "".join(event.text for event in session.generate(f"{TEXTS[1]}{turn} and", max_new_tokens=6))
        return said, turn, again, session.prompt_cache.hits, session.prompt_cache.reused_tokens

    native, plugin = open_both(SHIPPED, dtype="float16", prompt_cache_bytes=1 << 20)
    with native, plugin:
        expected = program(native)
        assert program(plugin) == expected
        assert min(expected[-2:]) > 0


@pytest.mark.parametrize("limit", [16, 7], ids=["aligned", "not aligned"])
def test_an_engine_of_ones_own(limit):
    rows = []
    for layout in KVLayout:
        combined = layout is KVLayout.COMBINED
        engine, cache = recorded(kv_config(slots=4, limit=limit, head_dim=8, layout=layout), combined=combined)
        with InferenceSession(engine, cache) as session:
            session.prefill([[3, 4, 5], [6], [7, 8]])
            session.decode([1, 2, 3])
            handles = [session.submit([9, index], max_new_tokens=2 + index % 3, ignore_eos=True) for index in range(6)]
            while session.step():
                poison(cache)
            rows.append((cache_rows(cache), [handle.tokens for handle in handles]))
            starts = {step.bound["past_key_values_1" if combined else "k_cache_1"].ptr for step in engine.steps}
        assert (len(starts) > 1) == (limit == 16)  # an unaligned slot brings those before it
    assert rows[0] == rows[1]


def test_a_head_dim_that_no_kernel_serves_falls_back(monkeypatch):
    monkeypatch.setattr(opening, "why_no_tensorrt", lambda *_: None)
    monkeypatch.setattr(opening, "CudaMemory", lambda *_, **__: None)
    with pytest.warns(opening.EngineFallbackWarning, match="head_dim: expected one of 64, 80, 96, 128, 256"):
        InferenceSession.from_model(SHIPPED, attention="plugin").close()
    with pytest.raises(ConfigError, match="head_dim"):
        InferenceSession.from_model(SHIPPED, attention="plugin", engine="tensorrt")
