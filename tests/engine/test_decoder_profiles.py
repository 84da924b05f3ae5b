"""Sizes of enqueues and of logits, written out."""

from __future__ import annotations

from typing import Any

import pytest

from trt_kvcache.engine.decoder_profiles import decoder_profiles, logits_per_slot
from trt_kvcache.engine.protocol import EngineProfile
from trt_kvcache.errors import ConfigError


def test_one_profile_for_prefill_and_one_for_decode() -> None:
    assert decoder_profiles(max_batch_size=3, max_prefill_length=11) == (
        EngineProfile(name="prefill", min_batch=1, max_batch=3, min_width=1, max_width=11),
        EngineProfile(name="decode", min_batch=1, max_batch=3, min_width=1, max_width=1),
    )


def test_one_more_profile_for_the_logits_of_drafts() -> None:
    assert decoder_profiles(max_batch_size=3, max_prefill_length=40, max_logits_per_slot=20) == (
        EngineProfile(name="prefill", min_batch=1, max_batch=3, min_width=1, max_width=40, max_logits=20),
        EngineProfile(name="decode", min_batch=1, max_batch=3, min_width=1, max_width=1),
        EngineProfile(name="verify", min_batch=1, max_batch=3, min_width=1, max_width=17, max_logits=17),
    )


@pytest.mark.parametrize(
    ("prefill", "logits", "verify"), [(40, 5, 5), (40, 17, 17), (17, 17, None), (9, 9, None), (9, 8, 8), (40, 1, None)]
)
def test_the_profile_for_drafts_is_narrower_than_that_for_prefill(prefill: int, logits: int, verify: int | None) -> None:
    _, _, *more = decoder_profiles(max_batch_size=3, max_prefill_length=prefill, max_logits_per_slot=logits)
    assert [(one.max_width, one.max_logits) for one in more] == ([] if verify is None else [(verify, verify)])


@pytest.mark.parametrize(("wanted", "found"), [(1, 1), (11, 11), ("all", 11)])
def test_how_many_logits_an_engine_is_to_have(wanted: Any, found: int) -> None:
    assert logits_per_slot(wanted, max_prefill_length=11) == found


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (0, "max_logits_per_slot: expected at least 1, got 0."),
        (12, "max_logits_per_slot: expected at most max_prefill_length=11, got 12. Longer prompts are scored in chunks."),
        ("every", "max_logits_per_slot: expected a number of new tokens or 'all', got 'every'."),
    ],
)
def test_a_number_of_logits_out_of_range(wanted: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        logits_per_slot(wanted, max_prefill_length=11)
    assert str(error.value) == message


def test_no_profile_of_one_slot_has_fixed_shapes_alone() -> None:
    prefill, decode = decoder_profiles(max_batch_size=1, max_prefill_length=11)
    assert (prefill.min_batch, prefill.max_batch) == (1, 1)
    assert (decode.min_batch, decode.max_batch, decode.max_width) == (1, 2, 1)


@pytest.mark.parametrize(("tree", "logits", "verify"), [(32, 32, 32), (64, 80, 64), (5, 80, 17), (64, 20, 20)])
def test_the_profile_for_drafts_takes_the_tokens_of_a_tree(tree: int, logits: int, verify: int) -> None:
    [*_, last] = decoder_profiles(max_batch_size=3, max_prefill_length=100, max_logits_per_slot=logits, draft_tree=tree)
    assert (last.name, last.max_width, last.max_logits) == ("verify", verify, verify)
