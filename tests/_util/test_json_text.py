"""JSON from elsewhere: a value, or one kind of error."""

import pytest

from trt_kvcache._util.json_text import MAX_DEPTH, JSONTextError, parse_json


@pytest.mark.parametrize("text", ['{"a": [1, null, "é"]}', b'{"a": [1, null, "\xc3\xa9"]}'], ids=["text", "bytes"])
def test_a_value(text):
    assert parse_json(text) == {"a": [1, None, "é"]}


@pytest.mark.parametrize("number", [4300 * "9", "-" + 4300 * "9", "1e400", "-0"])
def test_numbers_that_python_has(number):
    assert isinstance(parse_json(number), int | float)


@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"a":'])
@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 10**6])
def test_too_deep(opening, depth):
    count = depth if opening != '[{"a":' else depth // 2 + 1
    closing = {"[": "]", '{"a":': "}", '[{"a":': "}]"}[opening]
    with pytest.raises(JSONTextError, match="expected JSON, got values nested more than 100 deep"):
        parse_json(opening * count + "1" + closing * count)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected JSON, got a syntax error"),
        ("{'a': 1}", "expected JSON, got a syntax error"),
        (b"\xff", "expected JSON in UTF-8, got byte 0xff at 0"),
        ("9" * 4301, "expected JSON, got an integer of more than 4300 digits"),
    ],
)
def test_what_is_no_json(text, message):
    with pytest.raises(JSONTextError, match=message):
        parse_json(text)
