"""``examples/image.py``: its answer is that of the whole model in transformers."""

import runpy

import numpy as np
import pytest

from tests.torch_engine.needs_torch import need_torch

need_torch()

import torch  # noqa: E402

from tests.golden.weights import VISION  # noqa: E402
from tests.paths import ROOT  # noqa: E402


@pytest.mark.filterwarnings("ignore")
def test_the_answer_is_that_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    whole = transformers.Mistral3ForConditionalGeneration.from_pretrained(VISION / "mistral3", dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in whole.model.multi_modal_projector.parameters():
            weight.normal_(std=weight.shape[-1] ** -0.5)
    whole.save_pretrained(tmp_path)
    inputs = {
        "input_ids": torch.tensor([[1, 5, 10, 10, 7, 3, 44, 10, 10, 6]]),
        "pixel_values": torch.from_numpy(np.random.default_rng(2).normal(size=(2, 3, 28, 56)).astype(np.float32)),
        "image_sizes": torch.tensor([[28, 56], [28, 56]]),
    }
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = whole.generate(**inputs, **options)[0, inputs["input_ids"].shape[1] :].tolist()
    answer = runpy.run_path(str(ROOT / "examples" / "image.py"))["answer"]
    found = [token.token for token in answer(tmp_path, inputs, 10, max_new_tokens=8, ignore_eos=True)]
    assert found == expected
    without = {**inputs, "input_ids": torch.where(inputs["input_ids"] == 10, 11, inputs["input_ids"])}
    assert found != [token.token for token in answer(tmp_path, without, 10, max_new_tokens=8, ignore_eos=True)]
