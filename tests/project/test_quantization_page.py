"""The page of quantization names what the code reads."""

from tests.paths import ROOT
from trt_kvcache.checkpoint.quantized.registry import FORMATS


def test_every_format_is_in_the_table():
    rows = [line for line in (ROOT / "docs" / "quantization.md").read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    assert all(any(f"`{method}`" in row for row in rows) for method in FORMATS)
