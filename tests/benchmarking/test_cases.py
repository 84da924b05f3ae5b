"""Names and sizes of benchmark cases, and which of them fit a cache."""

from __future__ import annotations

import pytest

from tests.helpers.assertions import raises
from trt_kvcache.benchmarking import BenchmarkCase
from trt_kvcache.benchmarking.cases import check_cases
from trt_kvcache.errors import CapacityError, ConfigError


@pytest.mark.parametrize(
    ("sizes", "name", "tokens"),
    [
        ({"prompt_tokens": 512}, "pp512", 512),
        ({"generate_tokens": 128}, "tg128", 129),
        ({"prompt_tokens": 512, "generate_tokens": 128, "batch_size": 8}, "pp512+tg128", 640),
        ({"prompt_tokens": 7, "depth": 4096}, "pp7 @ d4096", 4103),
        ({"generate_tokens": 3, "depth": 5}, "tg3 @ d5", 9),
    ],
)
def test_names_and_the_tokens_that_a_slot_holds_at_the_end(sizes, name, tokens):
    case = BenchmarkCase(**sizes)
    assert (case.name, case.tokens_per_slot) == (name, tokens)


def test_a_case_without_anything_to_measure():
    with raises(ConfigError, "BenchmarkCase", expected="prompt_tokens or generate_tokens above 0", got="0 for both"):
        BenchmarkCase(depth=5)


def test_a_number_out_of_range_is_named():
    with pytest.raises(ConfigError, match=r"^BenchmarkCase\.batch_size: expected"):
        BenchmarkCase(prompt_tokens=1, batch_size=0)


class TestFit:
    case = BenchmarkCase(prompt_tokens=6, generate_tokens=3, batch_size=2, depth=7)

    def test_exactly(self):
        check_cases([self.case], max_batch_size=2, max_sequence_length=16)

    def test_too_many_slots(self):
        with raises(CapacityError, "pp6+tg3 @ d7", expected="batch of at most 1 (max_batch_size)", got=2):
            check_cases([self.case], max_batch_size=1, max_sequence_length=16)

    def test_too_many_tokens(self):
        with raises(
            CapacityError,
            "pp6+tg3 @ d7",
            expected="at most 15 tokens in a slot (max_sequence_length)",
            got="16: 7 of the depth, 6 of the prompt, 3 generated",
        ):
            check_cases([self.case], max_batch_size=2, max_sequence_length=15)

    def test_no_case(self):
        with raises(ConfigError, "cases", expected="at least one", got="none"):
            check_cases([], max_batch_size=2, max_sequence_length=15)
