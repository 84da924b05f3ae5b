"""Sessions whose K and V are one tensor per layer do what those with two do, token by token, over dead rows of NaN."""

import pytest

from tests.helpers.assertions import assert_close
from tests.helpers.recording import cache_rows, kv_config, poison, recorded
from tests.paths import GOLDEN, SHIPPED
from tests.sweeps import each_once, one_of_each_family
from trt_kvcache import InferenceSession, KVLayout, SamplingParams
from trt_kvcache.errors import ConfigError
from trt_kvcache.session import open_model

FAMILIES = sorted(path.parent.name for path in GOLDEN.glob("*/golden.safetensors"))
TEXTS = ["Alice was beginning", "The rabbit-hole went straight on", "Down, down"]
IDS = [[5, 9, 3, 17, 2, 30, 11], [8, 1], [12, 4, 40, 6]]


def open_both(folder, **options):
    sizes = {"max_batch_size": 3, "max_sequence_length": 48, "max_prefill_length": 5, **options}
    return [InferenceSession.from_model(folder, engine="reference", attention=each, **sizes) for each in ("native", "plugin")]


def events_of(session, prompts, params):
    """Generate, with NaN in all dead rows before every step."""
    poison(session.cache)
    found = []
    for event in session.generate(prompts, params):
        found.append((event.index, event.token, event.text, event.finish_reason))
        poison(session.cache)
    return found


def test_the_plugin_takes_a_combined_cache():
    native, plugin = open_both(SHIPPED, dtype="float16")
    with native, plugin:
        assert (native.cache.kv_config.layout, plugin.cache.kv_config.layout) == (KVLayout.SEPARATE, KVLayout.COMBINED)


@pytest.mark.parametrize(
    ("name", "dtype"),
    each_once([*one_of_each_family(FAMILIES), "shipped"], ["float32", "float16", "bfloat16"]),
)
def test_generation_with_compaction(name, dtype):
    folder = SHIPPED if name == "shipped" else GOLDEN / name
    params = [SamplingParams(max_new_tokens=count, ignore_eos=True) for count in (20, 3, 9)]
    native, plugin = open_both(folder, dtype=dtype)
    with native, plugin:
        expected, found = (events_of(session, TEXTS if folder == SHIPPED else IDS, params) for session in (native, plugin))
        assert len(expected) == 32
        assert found == expected


@pytest.mark.parametrize("name", one_of_each_family(FAMILIES))
def test_logits_after_a_generation(name):
    native, plugin = open_both(GOLDEN / name, dtype="float32")
    with native, plugin:
        for session in (native, plugin):
            events_of(session, IDS, [SamplingParams(max_new_tokens=count, ignore_eos=True) for count in (20, 3, 9)])
        slots = len(native.cache.host_kv_cache_lengths)
        expected, logits = (session.append([[7, 8], [], []][:slots])[0] for session in (native, plugin))
        assert_close(logits, expected)


def test_requests_in_a_queue():
    def program(session):
        handles = [session.submit(text, max_new_tokens=5 + 4 * index) for index, text in enumerate([*TEXTS, TEXTS[0]])]
        while session.step():
            poison(session.cache)
        return [(handle.text, handle.finish_reason) for handle in handles]

    native, plugin = open_both(SHIPPED, dtype="float16")
    with native, plugin:
        assert program(plugin) == program(native)


def test_turns_over_a_prompt_cache():
    def program(session):
        turn = "".join(event.text for event in session.generate(TEXTS[1], max_new_tokens=6, temperature=0.9, seed=3))
        again = "".join(event.text for event in session.generate(f"{TEXTS[1]}{turn} and", max_new_tokens=6))
        return turn, again, session.prompt_cache.hits, session.prompt_cache.reused_tokens

    native, plugin = open_both(SHIPPED, dtype="float16", prompt_cache_bytes=1 << 20)
    with native, plugin:
        expected = program(native)
        assert program(plugin) == expected
        assert min(expected[-2:]) > 0


@pytest.mark.parametrize("first", [0, 1], ids=["native to plugin", "plugin to native"])
def test_a_snapshot_of_one_is_resumed_by_the_other(tmp_path, first):
    sessions = open_both(SHIPPED, dtype="bfloat16")
    with sessions[0], sessions[1]:
        one, other = sessions[first], sessions[1 - first]
        one.prefill(TEXTS)
        for _ in one.generate(TEXTS[1:2], max_new_tokens=5):
            pass
        one.save_snapshot(tmp_path / "one.kv")
        poison(other.cache)
        resumed = ["".join(event.text for event in session.resume(tmp_path / "one.kv", max_new_tokens=9)) for session in (one, other)]
        assert resumed[0]
        assert resumed[1] == resumed[0]


@pytest.mark.parametrize("limit", [16, 7], ids=["aligned", "not aligned"])
def test_an_engine_of_ones_own(limit):
    """Every row that the engine of the fakes finds must be that of the token that was sent, at any slot that a run starts at."""
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
        assert (len(starts) > 1) == (limit == 16), "a slot that does not start at an aligned address runs with those before it"
    assert rows[0] == rows[1]


@pytest.fixture
def tensorrt_without_gpu(monkeypatch):
    """As if TensorRT were there, so that only the model decides."""
    monkeypatch.setattr(open_model, "why_no_tensorrt", lambda *_: None)
    monkeypatch.setattr(open_model, "CudaMemory", lambda *_, **__: None)


@pytest.mark.usefixtures("tensorrt_without_gpu")
def test_a_head_dim_that_no_kernel_serves_falls_back_to_the_reference_engine():
    with pytest.warns(open_model.EngineFallbackWarning, match="head_dim: expected one of 64, 80, 96, 128, 256, 512"):
        InferenceSession.from_model(SHIPPED, attention="plugin").close()


@pytest.mark.usefixtures("tensorrt_without_gpu")
def test_a_head_dim_that_no_kernel_serves_is_refused_with_tensorrt_by_name():
    with pytest.raises(ConfigError, match="head_dim"):
        InferenceSession.from_model(SHIPPED, attention="plugin", engine="tensorrt")
