"""Text decoders of models with a vision tower against Hugging Face transformers: logits, and the folders that it writes."""

import json

import pytest

from tests.torch_engine.needs_torch import need_torch

need_torch()

from tests.golden.weights import VISION, VISION_SEEDS  # noqa: E402
from tests.reference.test_vision import test_one_full_pass  # noqa: E402, F401
from tests.sweeps import one_of_each_family  # noqa: E402
from trt_kvcache.checkpoint import Checkpoint  # noqa: E402


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", one_of_each_family(VISION_SEEDS))
def test_a_folder_that_transformers_writes_is_the_same_model(name, tmp_path):
    """It has the tensors of a whole tower, and in ``text_config`` all fields, also those whose value is stated next to it."""
    transformers = pytest.importorskip("transformers")
    stored = transformers.AutoModelForImageTextToText.from_pretrained(VISION / name, dtype="auto")
    stored.save_pretrained(tmp_path)
    assert len(json.loads((tmp_path / "config.json").read_text())["text_config"]) >= 18
    with Checkpoint.open(tmp_path) as written, Checkpoint.open(VISION / name) as golden:
        assert written.config == golden.config
        assert written.fingerprint() == golden.fingerprint()
