"""``STEP_WIDTHS``: the widths of steps on a GPU, each a CUDA graph: few, and close enough that padding costs little."""

from __future__ import annotations

from trt_kvcache.engine.decoder_profiles import VERIFY_WIDTH

#: Up to here every width is one: a draft is verified at its own width, which decides how many logits are copied.
_LAST_EXACT = 8

#: Up to this number of rows, a product takes the time to read the weights.
_MEMORY_BOUND = (12, 16, VERIFY_WIDTH, 24, 32, 48, 64)

#: Above these, at most one row in nine is padding.
_OCTAVES = (64, 128, 256, 512)

#: New tokens of a slot, padding included.
STEP_WIDTHS: tuple[int, ...] = (
    *range(1, _LAST_EXACT + 1),
    *_MEMORY_BOUND,
    *(start + start // 8 * part for start in _OCTAVES for part in range(1, 9)),
)

#: Wider steps are not captured: there the GPU takes longer than the host.
MAX_CAPTURED_WIDTH = STEP_WIDTHS[-1]
