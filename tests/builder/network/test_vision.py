"""Networks of models with a vision tower, by the interpreter of layers: logits against Hugging Face transformers."""

import numpy as np
import pytest

from tests.golden.weights import VISION_SEEDS
from tests.helpers.models import attentions_of, has_experts
from tests.reference.rig import golden
from tests.sweeps import one_of_each_family

from .conftest import MAX_SEQUENCE_LENGTH
from .test_network_values import GOLDEN_SLOT, GOLDEN_TOLERANCE, STEPS, Network, assert_near, run, tokens_of

pytestmark = pytest.mark.trt


@pytest.mark.parametrize("model", one_of_each_family(name for name in VISION_SEEDS if not has_experts(f"vision/{name}")))
def test_computes_what_hugging_face_does(define, model):
    name = f"vision/{model}"
    logits = run(Network(define(name, attention=attentions_of(name, MAX_SEQUENCE_LENGTH)[0])), *tokens_of(name))
    lengths = np.cumsum([new[GOLDEN_SLOT] for new in STEPS])
    expected = np.array([golden(name)[1][length] for length in lengths])
    assert_near(np.array([step[GOLDEN_SLOT] for step in logits]), expected, GOLDEN_TOLERANCE["float32"])
