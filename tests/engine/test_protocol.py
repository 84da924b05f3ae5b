"""``TensorSpec`` and ``EngineProfile``."""

from __future__ import annotations

import dataclasses

import pytest

from trt_kvcache.engine.protocol import EngineProfile, TensorMode, TensorSpec

PROFILE = EngineProfile(name="prefill", min_batch=2, max_batch=5, min_width=3, max_width=7)


def test_an_input() -> None:
    spec = TensorSpec.input("x", (-1, 3), "int32")
    assert spec == TensorSpec(name="x", shape=(-1, 3), dtype="int32", mode=TensorMode.INPUT, alias=None)


def test_an_output_in_place_of_an_input() -> None:
    spec = TensorSpec.output("y", (-1,), "float16", alias="x")
    assert spec == TensorSpec(name="y", shape=(-1,), dtype="float16", mode=TensorMode.OUTPUT, alias="x")


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (TensorSpec.input("ids", (-1, -1), "int32"), "input `ids` int32 (-1, -1)"),
        (TensorSpec.output("logits", (-1, 9), "float32"), "output `logits` float32 (-1, 9)"),
        (TensorSpec.output("new", (2, 3), "int8", alias="old"), "output `new` int8 (2, 3) sharing memory with `old`"),
    ],
)
def test_a_tensor_in_words(spec: TensorSpec, text: str) -> None:
    assert spec.describe() == text


def test_a_tensor_is_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        TensorSpec.input("x", (1,), "int32").name = "y"  # type: ignore[misc]


@pytest.mark.parametrize(("batch", "width"), [(2, 3), (5, 7), (3, 5)])
def test_a_profile_accepts_sizes_up_to_its_limits(batch: int, width: int) -> None:
    assert PROFILE.accepts(batch, width)


@pytest.mark.parametrize(("batch", "width"), [(1, 5), (6, 5), (3, 2), (3, 8)])
def test_a_profile_refuses_sizes_beyond_its_limits(batch: int, width: int) -> None:
    assert not PROFILE.accepts(batch, width)


def test_a_profile_accepts_as_many_logits_as_it_has() -> None:
    profile = dataclasses.replace(PROFILE, max_logits=4)
    assert [profile.accepts(3, 5, logits) for logits in (0, 1, 4, 5)] == [False, True, True, False]
    assert [PROFILE.accepts(3, 5, logits) for logits in (1, 2)] == [True, False]
