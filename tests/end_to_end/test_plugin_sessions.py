"""Sessions whose K and V are one tensor per layer do what those with two do, token by token, over dead rows of NaN.

Golden models: test_equivalence.py; engines of one's own: the random programs of test_session.py and test_serving.py.
"""

import pytest

from tests.helpers.fakes import poison
from tests.paths import SHIPPED
from trt_kvcache import InferenceSession, KVLayout
from trt_kvcache.errors import ConfigError
from trt_kvcache.session import open_model

TEXTS = ["Alice was beginning", "The rabbit-hole went straight on", "Down, down"]


def test_queue_prompt_cache_and_turns():
    def program(session):
        handles = [session.submit(text, max_new_tokens=5 + 4 * index) for index, text in enumerate([*TEXTS, TEXTS[0]])]
        while session.step():
            poison(session.cache)
        said = [(handle.text, handle.finish_reason) for handle in handles]
        turn = "".join(event.text for event in session.generate(TEXTS[1], max_new_tokens=6, temperature=0.9, seed=3))
        again = "".join(event.text for event in session.generate(f"{TEXTS[1]}{turn} and", max_new_tokens=6))
        return said, turn, again, session.prompt_cache.hits, session.prompt_cache.reused_tokens

    options = {"max_batch_size": 3, "max_sequence_length": 48, "max_prefill_length": 5, "dtype": "float16", "prompt_cache_bytes": 1 << 20}
    native, plugin = (InferenceSession.from_model(SHIPPED, engine="reference", attention=each, **options) for each in ("native", "plugin"))
    with native, plugin:
        assert plugin.cache.kv_config.layout is KVLayout.COMBINED
        expected = program(native)
        assert program(plugin) == expected
        assert min(expected[-2:]) > 0


def test_a_head_dim_that_no_kernel_serves_falls_back(monkeypatch):
    monkeypatch.setattr(open_model, "why_no_tensorrt", lambda *_: None)
    monkeypatch.setattr(open_model, "CudaMemory", lambda *_, **__: None)
    with pytest.warns(open_model.EngineFallbackWarning, match="head_dim: expected one of 64, 80, 96, 128, 256"):
        InferenceSession.from_model(SHIPPED, attention="plugin").close()
    with pytest.raises(ConfigError, match="head_dim"):
        InferenceSession.from_model(SHIPPED, attention="plugin", engine="tensorrt")
