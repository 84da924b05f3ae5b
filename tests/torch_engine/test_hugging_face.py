"""Greedy tokens of whole sessions against those of Hugging Face transformers, on a GPU, with models that have learned a text."""

from __future__ import annotations

import pytest

from tests.torch_engine.needs_torch import need_torch

need_torch()

import torch  # noqa: E402

from trt_kvcache import InferenceSession  # noqa: E402

pytestmark = pytest.mark.gpu

TOKENS = 96
DTYPES = ["float16", "bfloat16"]


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "smollm3", "lfm2", "bamba", "qwen3_next"])
def learned(request):
    from tests.torch_engine import trained

    return trained.train(request.param, torch.device("cuda", 0))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("attention", ["native", "plugin"])
@pytest.mark.parametrize("dtype", [*DTYPES, "float32"])
def test_greedy_tokens(learned, dtype, attention, tmp_path):
    from tests.torch_engine import trained

    model = learned.to(getattr(torch, dtype))
    prompts = [list(trained.TEXT[start : start + 40 + 7 * index]) for index, start in enumerate((0, 130, 377))]
    expected = [trained.greedy_tokens(model, prompt, TOKENS) for prompt in prompts]
    folder = trained.save(model, tmp_path / "model")
    learned.to(torch.float32)
    options = {"attention": attention, "dtype": dtype, "max_batch_size": 3, "max_sequence_length": 256, "max_prefill_length": 33}
    with InferenceSession.from_model(folder, engine="torch", **options) as session:
        assert session.engine.memory.device == "cuda:0"
        found = [[] for _ in prompts]
        for token in session.generate(prompts, max_new_tokens=TOKENS, ignore_eos=True):
            found[token.index].append(token.token)
    assert found == expected
    assert bytes(expected[0]) == trained.TEXT[40 : 40 + TOKENS], "the model has not learned its text"
