"""``STEP_WIDTHS``: the widths of steps on a GPU, each a CUDA graph: few, and close enough that padding costs little."""

from __future__ import annotations

from trt_kvcache.engine.close_widths import eighths
from trt_kvcache.engine.decoder_profiles import VERIFY_WIDTH

#: Up to here every width is one: a draft is verified at its own width, which decides how many logits are copied.
_LAST_EXACT = 8

#: Up to this number of rows, a product takes the time to read the weights.
_MEMORY_BOUND = (12, 16, VERIFY_WIDTH, 24, 32, 48, 64)

#: New tokens of a slot, padding included.
STEP_WIDTHS: tuple[int, ...] = (
    *range(1, _LAST_EXACT + 1),
    *_MEMORY_BOUND,
    *eighths(64, 128, 256, 512),
)

#: Of prompts next to requests that decode: their steps differ in the first slot, too, and each is a graph. Few rows take little longer than
#: the time to read the weights, padded or not.
COARSE_WIDTHS: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512, 1024)

#: Wider steps are not captured: there the GPU takes longer than the host.
MAX_CAPTURED_WIDTH = STEP_WIDTHS[-1]
