"""Tensors and profiles of an engine, read from the engine and compared with its record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.helpers.assertions import raises
from tests.helpers.fake_tensorrt import FakeTensorRT
from trt_kvcache.engine.names import TensorNames
from trt_kvcache.engine.protocol import EngineProfile, TensorMode, TensorSpec
from trt_kvcache.errors import BindingError, EngineError
from trt_kvcache.trt.tensors import (
    ProfileRanges,
    add_plugin_aliases,
    compare_profiles,
    compare_tensors,
    read_profiles,
    read_ranges,
    read_tensors,
)

PREFILL = EngineProfile(name="prefill", min_batch=1, max_batch=3, min_width=1, max_width=11)
DECODE = EngineProfile(name="decode", min_batch=1, max_batch=3, min_width=1, max_width=1)
IDS = TensorSpec.input("ids", (-1, -1), "int32")
TABLE = TensorSpec.input("table", (5, 7), "float32")
CACHE = TensorSpec.input("past", (-1, 2, 9), "bfloat16")
PRESENT = TensorSpec.output("present", (-1, 2, 9), "bfloat16", alias="past")
LOGITS = TensorSpec.output("logits", (-1, 37), "float16")
SPECS = [LOGITS, CACHE, PRESENT, IDS, TABLE]


@pytest.fixture
def fake() -> FakeTensorRT:
    return FakeTensorRT(SPECS, [PREFILL, DECODE])


def read(fake: FakeTensorRT) -> dict[str, TensorSpec]:
    tensorrt = fake.tensorrt("tensorrt_rtx")
    return read_tensors(tensorrt, tensorrt.module.Runtime(tensorrt.log.logger).deserialize_cuda_engine(fake.plan))


def ranges(fake: FakeTensorRT) -> list[ProfileRanges]:
    tensorrt = fake.tensorrt("tensorrt_rtx")
    engine = tensorrt.module.Runtime(tensorrt.log.logger).deserialize_cuda_engine(fake.plan)
    return read_ranges(engine, read_tensors(tensorrt, engine))


def test_tensors_are_read_with_dtype_mode_and_alias(fake: FakeTensorRT) -> None:
    assert read(fake) == {spec.name: spec for spec in SPECS}


@pytest.mark.parametrize("alias_of", [None, lambda name: None, lambda name: ""], ids=["before 10.15", "None", "empty"])
def test_an_alias_that_tensorrt_does_not_report_is_none(fake: FakeTensorRT, alias_of: Callable[[str], str | None] | None) -> None:
    fake.alias_of = alias_of
    assert read(fake)["present"].alias is None


def test_recorded_aliases_of_a_plugin_are_added_and_reported_ones_are_kept() -> None:
    found = {spec.name: spec for spec in (CACHE, replace(PRESENT, alias=None), LOGITS)}
    assert add_plugin_aliases(found, SPECS) == {spec.name: spec for spec in (CACHE, PRESENT, LOGITS)}
    found["present"] = replace(PRESENT, alias="ids")
    assert add_plugin_aliases(found, SPECS)["present"].alias == "ids"  # which the comparison then refuses


def test_inputs_come_first(fake: FakeTensorRT) -> None:
    assert list(read(fake)) == ["ids", "past", "table", "logits", "present"]


def test_a_tensor_in_host_memory_is_refused(fake: FakeTensorRT) -> None:
    fake.host_tensors.add("past")
    with raises(EngineError, "`past`", expected="tensor in GPU memory"):
        read(fake)


def test_ranges_of_each_profile(fake: FakeTensorRT) -> None:
    prefill, decode = ranges(fake)
    assert prefill.ranges["ids"] == ((1, 1), (3, 11))
    assert decode.ranges["ids"] == ((1, 1), (3, 1))
    assert prefill.ranges["past"] == decode.ranges["past"] == ((1, 2, 9), (3, 2, 9))


def test_an_input_of_a_fixed_shape_has_that_range(fake: FakeTensorRT) -> None:
    assert ranges(fake)[0].ranges["table"] == ((5, 7), (5, 7))


def test_outputs_have_no_range(fake: FakeTensorRT) -> None:
    assert set(ranges(fake)[0].ranges) == {"ids", "past", "table"}


@pytest.mark.parametrize("shape", [(1, 1), (3, 11), (2, 5)])
def test_a_shape_inside_the_range(shape: tuple[int, ...]) -> None:
    ProfileRanges({"ids": ((1, 1), (3, 11))}).check("ids", shape)


@pytest.mark.parametrize("shape", [(0, 1), (4, 1), (3, 12), (3,), (3, 1, 1)])
def test_a_shape_outside_the_range_is_refused(shape: tuple[int, ...]) -> None:
    with raises(BindingError, "`ids`", expected="(1, 1) to (3, 11) in this profile", got="("):
        ProfileRanges({"ids": ((1, 1), (3, 11))}).check("ids", shape)


def test_profiles_are_named_after_their_width(fake: FakeTensorRT) -> None:
    assert read_profiles(ranges(fake), TensorNames(input_ids="ids")) == (PREFILL, DECODE)


def test_the_most_logits_of_a_profile_are_those_that_can_be_chosen() -> None:
    shapes = {"ids": ((1, 1), (3, 11)), "last": ((1, 1), (3, 7))}
    names = TensorNames(input_ids="ids", last_token_ids="last")
    assert read_profiles([ProfileRanges(shapes)], names) == (replace(PREFILL, max_logits=7),)


def test_profiles_need_the_token_ids(fake: FakeTensorRT) -> None:
    with pytest.raises(
        EngineError, match=r"^`tokens`: the engine has no such input, it has `ids`, `past`, `table`\. Pass the engine's names as"
    ):
        read_profiles(ranges(fake), TensorNames(input_ids="tokens"))


def test_token_ids_have_two_dimensions(fake: FakeTensorRT) -> None:
    with raises(EngineError, "`past`", expected="two dimensions", says=3):
        read_profiles(ranges(fake), TensorNames(input_ids="past"))


def by_name(*specs: TensorSpec) -> dict[str, TensorSpec]:
    return {spec.name: spec for spec in specs}


def test_equal_tensors() -> None:
    assert compare_tensors(by_name(*SPECS), SPECS) == by_name(*SPECS)


@pytest.mark.parametrize(("found", "recorded"), [(SPECS[1:], SPECS), (SPECS, SPECS[1:])], ids=["missing", "too many"])
def test_other_names_are_refused(found: list[TensorSpec], recorded: list[TensorSpec]) -> None:
    with pytest.raises(EngineError, match=r"the engine's tensors are not the tensors of its config\.json: `logits` is only in one of them"):
        compare_tensors(by_name(*found), recorded)


@pytest.mark.parametrize(
    "changed",
    [replace(PRESENT, alias=None), replace(PRESENT, dtype="float16"), replace(PRESENT, shape=(-1, 2))],
    ids=["alias", "dtype", "rank"],
)
def test_another_tensor_is_refused(changed: TensorSpec) -> None:
    with pytest.raises(EngineError) as raised:
        compare_tensors(by_name(IDS, changed), [IDS, PRESENT])
    expected = f"the engine is not what its config.json says: expected {PRESENT.describe()}, got {changed.describe()}."
    assert str(raised.value) == expected


@pytest.mark.parametrize("shapes", [((-1, 2, 9), (-1, 2, -1)), ((-1, 2, -1), (-1, 2, 9)), ((3, 2, 9), (-1, 2, 9))])
def test_a_size_of_an_output_that_one_side_does_not_know_is_that_of_the_record(shapes: tuple[tuple[int, ...], ...]) -> None:
    found, recorded = (replace(PRESENT, shape=shape) for shape in shapes)
    assert compare_tensors(by_name(IDS, found), [IDS, recorded]) == by_name(IDS, recorded)


def test_another_size_of_an_output_is_a_warning() -> None:
    changed = replace(PRESENT, shape=(-1, 2, 8))
    with pytest.warns(RuntimeWarning) as warned:
        assert compare_tensors(by_name(IDS, changed), [IDS, PRESENT]) == by_name(IDS, changed)
    expected = f"the engine is not what its config.json says: expected {PRESENT.describe()}, got {changed.describe()}. The plan is the"
    assert str(warned[0].message).startswith(expected)


@pytest.mark.parametrize("changed", [replace(IDS, shape=(3, -1)), replace(IDS, dtype="int64"), replace(IDS, mode=TensorMode.OUTPUT)])
def test_another_input_is_refused(changed: TensorSpec) -> None:
    with raises(EngineError, "the engine", expected=IDS.describe(), got=changed.describe()):
        compare_tensors(by_name(changed), [IDS])


def test_names_of_profiles_are_not_compared() -> None:
    compare_profiles([replace(PREFILL, name="x"), DECODE], [PREFILL, DECODE])


@pytest.mark.parametrize(
    "found",
    [[PREFILL], [DECODE, PREFILL], [replace(PREFILL, max_width=12), DECODE], [replace(PREFILL, max_logits=2), DECODE]],
    ids=["missing", "order", "width", "logits"],
)
def test_other_profiles_are_refused(found: list[EngineProfile]) -> None:
    with pytest.raises(EngineError, match=r"expected profiles \[\(1, 3, 1, 11, 1\), \(1, 3, 1, 1, 1\)\] \(batch, width, logits\), got \["):
        compare_profiles(found, [PREFILL, DECODE])
