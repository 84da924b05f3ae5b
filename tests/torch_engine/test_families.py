"""Sessions of every family over the torch engine: ragged prefill in chunks, decode steps, a rewind and a next turn, and comparisons.

Those with states, which cannot be rewound, are in test_states.py.
"""

from __future__ import annotations

import json
from functools import cache

import numpy as np
import pytest

from tests.cli.conftest import run  # noqa: F401
from tests.helpers.assertions import assert_close, assert_same_choice
from tests.helpers.models import model_of
from tests.helpers.recording import poison
from tests.paths import GOLDEN
from tests.reference.rig import MODELS, Rig, golden
from tests.torch_engine.needs_torch import need_torch

need_torch()

from trt_kvcache import InferenceSession  # noqa: E402
from trt_kvcache.session import open_model as opening  # noqa: E402
from trt_kvcache.session.open_model import EngineFallbackWarning  # noqa: E402
from trt_kvcache.torch_engine import TorchEngine, engine  # noqa: E402
from trt_kvcache.torch_engine.attention import LiveRowsAttention, MaskedAttention  # noqa: E402

S = 24

FAMILIES = [
    "bamba",
    "cohere2",
    "ernie4_5",
    "exaone4",
    "falcon_h1",
    "gemma2",
    "gemma3",
    "glm4",
    "gpt_oss",
    "gpt_oss-mxfp4",
    "granite",
    "hunyuan",
    "lfm2-bias",
    "mamba2",
    "ministral3-window",
    "nemotron_h",
    "olmo2",
    "olmo3",
    "phi3-short-window",
    "qwen3_moe-dense-window",
    "qwen3_next",
    "smollm3-bias-window",
    "stablelm",
    "starcoder2",
]


def open_model(model, *, width=5, **options):
    sizes = {"max_batch_size": 3, "max_sequence_length": S, "max_prefill_length": width}
    return InferenceSession.from_model(GOLDEN / model, engine="torch", dtype="float32", **sizes, **options)


#: Opened once.
opened = cache(open_model)


def full_pass(model, tokens):
    """Return the logits of one prefill of all tokens, which test_golden.py compares with those of transformers."""
    return opened(model, width=S).prefill([tokens])[0]


def check(model, session, logits):
    for slot, found in enumerate(logits):
        expected = full_pass(model, session.tokens(slot))
        assert_close(found, expected)
        assert_same_choice(found, expected)


@pytest.mark.parametrize("attention", ["native", "plugin"])
@pytest.mark.parametrize("model", [model for model in MODELS if not model_of(model).recurrent_layers])
def test_turns_of_a_ragged_batch_over_poisoned_rows(model, attention):
    ids = golden(model)[0].tolist()
    with open_model(model, attention=attention) as session:
        poison(session.cache)
        check(model, session, session.prefill([ids[:12], ids[4:6], ids[1:10]]))
        for step in range(3):
            poison(session.cache)
            check(model, session, session.decode(ids[step : step + 3]))
        session.rewind(0, 8)
        poison(session.cache)
        check(model, session, session.append([ids[14:23], ids[2:8], ids[:1]]))
        poison(session.cache)
        check(model, session, session.decode(ids[9:12]))


@pytest.mark.parametrize("model", FAMILIES)
def test_generated_tokens_do_not_depend_on_the_neighbours(model):
    ids = golden(model)[0].tolist()
    prompts = [ids[:11], ids[3:5], ids[6:15]]
    options = {"max_new_tokens": 8, "ignore_eos": True, "temperature": 1.2, "seed": 5}
    with open_model(model) as session:
        together = list(session.generate(prompts, **options))
        for index, prompt in enumerate(prompts):
            alone = [event.token for event in session.generate([prompt], **options)]
            assert [event.token for event in together if event.index == index] == alone


@pytest.mark.parametrize("model", ["gemma3", "phi3-long"])
def test_auto_takes_torch(model, monkeypatch):
    monkeypatch.setattr(opening, "find_gpu", lambda device: "there is no GPU here")
    with pytest.warns(EngineFallbackWarning, match="^running the PyTorch engine: there is no GPU here$"):
        session = InferenceSession.from_model(GOLDEN / model)
    with session:
        assert isinstance(session.engine, TorchEngine)
        assert np.isfinite(session.prefill([[3, 1, 4]])).all()


@pytest.mark.parametrize("model", FAMILIES)
def test_compare_takes_it(run, model):  # noqa: F811
    attention = () if model == "gemma3" else ("--attention", "native")
    done = run(
        "compare",
        GOLDEN / model,
        "--engine",
        "reference",
        "--reference",
        "torch",
        *attention,
        "--prompt-ids",
        "3,1,4,1,5,9,2",
        "--steps",
        9,
        "--json",
    )
    assert done.code == 0, done.err
    document = json.loads(done.out)
    names = {pair[side] for pair in document["pairs"] for side in ("first", "second")}
    assert document["agrees"]
    assert {"torch", "full recomputation"} <= names


@pytest.mark.parametrize("layers", [LiveRowsAttention, MaskedAttention])
@pytest.mark.parametrize("model", ["mistral-window", "gemma2"])
def test_padding_that_sees_no_row_of_the_cache_does_no_harm(model, layers, monkeypatch):
    """A token of the first slot is the last that fits; its padding lies so far behind the end that no row is in its window."""
    monkeypatch.setattr(engine, "LiveRowsAttention", layers)
    ids = golden(model)[0]
    both, alone = (Rig(model, length=13, width=12) for _ in range(2))
    for rig in (both, alone):
        rig.step(ids[:12], [0])
    found = both.step(np.stack((ids[12:24], ids[:12])), [12, 0], [0, 11])
    assert_close(found[0], alone.step(ids[12:13], [12])[0])
    assert_close(found[1], alone.step(ids[:12], [0])[0])
    assert all(np.isfinite(array[:2]).all() for array in both.caches())
