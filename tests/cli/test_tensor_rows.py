"""Tensors of an engine in few rows."""

from __future__ import annotations

from trt_kvcache.cli.tensor_rows import tensor_rows
from trt_kvcache.engine.protocol import TensorMode, TensorSpec


def tensor(name: str, heads: int = 2, alias: str | None = None) -> TensorSpec:
    mode = TensorMode.INPUT if alias is None else TensorMode.OUTPUT
    return TensorSpec(name=name, shape=(-1, heads), dtype="float16", mode=mode, alias=alias)


def names(*tensors: TensorSpec, grouped: bool = True) -> list[tuple[str, str]]:
    return [(row[0], row[4]) for row in tensor_rows(tensors, grouped=grouped)]


def test_layers_that_differ_have_rows_of_their_own() -> None:
    tensors = [tensor("k_0"), tensor("k_1"), tensor("k_2", heads=3), tensor("k_3"), tensor("k_4")]
    assert names(*tensors) == [("k_{0..1}", ""), ("k_{3..4}", ""), ("k_2", "")]


def test_an_alias_of_another_layer_is_not_hidden() -> None:
    tensors = [tensor("out_0", alias="k_0"), tensor("out_1", alias="k_1"), tensor("out_2", alias="k_7")]
    assert names(*tensors) == [("out_{0..1}", "k_{0..1}"), ("out_2", "k_7")]


def test_names_without_a_number_are_left_alone() -> None:
    assert names(tensor("input_ids"), tensor("7"), tensor("logits")) == [("input_ids", ""), ("7", ""), ("logits", "")]


def test_one_layer_keeps_its_name() -> None:
    assert names(tensor("k_5")) == [("k_5", "")]


def test_nothing_is_grouped_if_all_are_wanted() -> None:
    assert names(tensor("k_0"), tensor("k_1"), grouped=False) == [("k_0", ""), ("k_1", "")]
