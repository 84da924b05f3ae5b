"""Text decoders of models with a vision tower: logits against Hugging Face transformers with its tower, and a session."""

import pytest

from tests.golden.weights import VISION_SEEDS
from tests.helpers.assertions import assert_close
from tests.sweeps import one_of_each_family

from .rig import Rig, golden
from .test_golden import TOLERANCE


@pytest.mark.parametrize("attention", ["native", "plugin"])
@pytest.mark.parametrize("model", one_of_each_family(VISION_SEEDS))
def test_one_full_pass(model, attention):
    ids, expected = golden(f"vision/{model}")
    rig = Rig(f"vision/{model}", attention=attention)
    for length, logits in expected.items():
        assert_close(rig.step(ids, [0], [length - 1])[0], logits, TOLERANCE)
