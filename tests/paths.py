"""Where things are, wherever a test lies."""

from pathlib import Path

#: The checkout.
ROOT = Path(__file__).resolve().parents[1]

#: Small checkpoints and what transformers computed with them.
GOLDEN = ROOT / "tests" / "golden"

#: The model that is shipped as an example.
SHIPPED = ROOT / "examples" / "tiny-llama"
